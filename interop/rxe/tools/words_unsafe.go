package tools

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// Atomic loads of memory that the device writes for a peer while this program reads it.

// loadByte reads b[i]. Go has no atomic byte, so the aligned 8-byte word around
// it is loaded. That is sound because the word lies inside the allocation: b must
// be a buffer of rig.buffer, whose start and length are multiples of 8.
func loadByte(b []byte, i int) byte {
	p := unsafe.Pointer(&b[i])
	v := atomic.LoadUint64((*uint64)(unsafe.Pointer(uintptr(p) &^ 7)))
	var word [8]byte
	binary.NativeEndian.PutUint64(word[:], v)
	return word[uintptr(p)&7]
}

// loadWord reads the first 8 bytes of b, which must start at a multiple of 8, in
// the machine's byte order, as atomics do. That is sound because the conversion to
// an array checks the length.
func loadWord(b []byte) uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer((*[8]byte)(b)))) }
