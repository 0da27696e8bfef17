package mem

import "unsafe"

// A Host keeps its address as a number, not as a slice.
//
// Why this is sound. Memory of the Go heap does not move, and the Host's owner
// keeps it alive. Other memory the collector ignores; but a program may unmap
// it under the region, and the runtime may then map heap at the very place,
// where a pointer left over in a long-lived object would be a bad one. So
// pointers are made for the time of an access only.

// addrOf returns the address of a slice's first byte.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// bytesAt makes a slice of memory at an address. The pointer is made by reading
// the number as one: the compiler's check of pointer arithmetic does not know
// memory that came from elsewhere.
//
//go:nocheckptr
func bytesAt(addr uintptr, n int) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}
