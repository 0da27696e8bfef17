package shm

import (
	"sync/atomic"
	"unsafe"
)

// word returns the 8 bytes at off of a mapping, which other processes read and
// write too, as an atomic.
//
// This is sound: slicing checks that the bytes are there, mappings start at a
// page and off is a multiple of 8, so the word is aligned; and it lies outside
// the memory that the runtime manages, so nothing moves it.
func word(b []byte, off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b[off : off+8])))
}

// store sets the word at off of a mapping with an ordinary store. It is sound
// for the same reasons. No other process may rely on the word before a later atomic store.
func store(b []byte, off int, v uint64) {
	*(*uint64)(unsafe.Pointer(unsafe.SliceData(b[off : off+8]))) = v
}
