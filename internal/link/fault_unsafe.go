package link

import (
	"runtime"
	"unsafe"
)

// faultIn reports whether e, the value of a panic, is that of an access to memory in
// b. This is sound: addresses are compared as numbers, and never made pointers again.
func faultIn(b []byte, e any) bool {
	f, ok := e.(interface {
		runtime.Error
		Addr() uintptr
	})
	return ok && f.Addr()-uintptr(unsafe.Pointer(unsafe.SliceData(b))) < uintptr(len(b))
}
