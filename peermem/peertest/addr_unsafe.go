package peertest

import "unsafe"

// addrOf returns the address of a mapping. It is a number that nothing is accessed by, so it is sound
// whatever becomes of the mapping.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
