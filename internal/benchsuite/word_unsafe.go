package main

import (
	"sync/atomic"
	"unsafe"
)

// loadWord loads the first 8 bytes of a slice that a device may be writing. The load is
// atomic, so the compiler does not omit it in a loop.
//
// This is sound because slots start on a cache line (side.go), so the word is
// aligned, and slicing checks that the slice is long enough.
func loadWord(b []byte) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(unsafe.SliceData(b[:8]))))
}

// addrOf returns where a slice lies, for requests. This is sound because a buffer
// does not move: it is mapped, or lies in the heap and is kept by its region.
func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
