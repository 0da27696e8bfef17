// Package word reads and writes memory that a device may be accessing at the same time.
// The accesses are atomic: the compiler neither omits nor splits them, and the race
// detector does not report them.
package word

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// LoadByte reads b[i]. Go has no atomic byte; the aligned 8-byte word around it
// is loaded instead. That is sound because the word lies inside the allocation:
// b must be a slice of a buffer that starts at a multiple of 8 and whose length
// is one.
func LoadByte(b []byte, i int) byte {
	p := unsafe.Pointer(&b[i])
	v := atomic.LoadUint64((*uint64)(unsafe.Pointer(uintptr(p) &^ 7)))
	var bytes [8]byte
	binary.NativeEndian.PutUint64(bytes[:], v)
	return bytes[uintptr(p)&7]
}

// Load reads the first 8 bytes of b, which must start at a multiple of 8, as a
// number in the machine's byte order: what remote atomics work on. That is
// sound because the conversion to an array checks the length.
func Load(b []byte) uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer((*[8]byte)(b)))) }

// Store writes the first 8 bytes of b, as Load reads them.
func Store(b []byte, v uint64) { atomic.StoreUint64((*uint64)(unsafe.Pointer((*[8]byte)(b))), v) }

// Addr returns where b lies, for requests that name memory by its address. That is
// sound for memory that does not move: mapped, or of the Go heap and kept alive.
func Addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
