package memtest

import (
	"sync/atomic"
	"unsafe"
)

// lastByte reads a byte of memory that a device writes meanwhile, as a program
// does that spins on it: with an atomic load of the word it lies in, which is
// sound because aligned words do not cross pages.
//
//go:norace
//go:nocheckptr
func lastByte(p *byte) byte {
	place := uintptr(unsafe.Pointer(p)) % 4
	word := atomic.LoadUint32((*uint32)(unsafe.Add(unsafe.Pointer(p), -int(place))))
	return (*[4]byte)(unsafe.Pointer(&word))[place]
}
