package device

import "unsafe"

// addrOf returns the address of a slice's first byte: of a mapping, for those who
// register by address.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
