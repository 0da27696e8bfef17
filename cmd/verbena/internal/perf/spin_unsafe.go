package perf

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// loadByte reads one byte that a device may be writing, so that the compiler
// reads it anew each time and the race detector knows that this is meant.
//
// Go has no atomic byte; the aligned 8-byte word around it is loaded instead.
// That is sound because the word lies inside the allocation: buffers of this
// package start on a cache line and are whole cache lines long (Params.stride).
func loadByte(b []byte, i int) byte {
	p := unsafe.Pointer(&b[i])
	word := atomic.LoadUint64((*uint64)(unsafe.Pointer(uintptr(p) &^ 7)))
	var bytes [8]byte
	binary.NativeEndian.PutUint64(bytes[:], word)
	return bytes[uintptr(p)&7]
}
