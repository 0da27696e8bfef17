package device

import "unsafe"

// addrOf returns the address of a slice's first byte: of a mapping, to register it by address.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
