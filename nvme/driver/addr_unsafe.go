package driver

import "unsafe"

// addrOf returns where bytes lie. It is sound: the number is only compared.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
