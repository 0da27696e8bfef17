package mem_test

import "unsafe"

// addrOf returns the address of a slice's first byte.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
