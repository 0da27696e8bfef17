//go:build cgo

package sys

// #cgo CFLAGS: -O2 -Wall
// #cgo LDFLAGS: -pthread -ldl
// #include <stddef.h>
// #include "notifier.h"
import "C"

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The C side of the notifier, in notifier*.c. It is sound to give C the ring: it is not
// Go memory, and it is never unmapped. The constants below do not compile if the two
// sides disagree about where its fields are.

const haveCgo = true

const (
	_ = uint(unsafe.Sizeof(ring{}) - C.sizeof_struct_vn_ring)
	_ = uint(C.sizeof_struct_vn_ring - unsafe.Sizeof(ring{}))
	_ = uint(unsafe.Sizeof(slot{}) - C.sizeof_struct_vn_slot)
	_ = uint(C.VN_SLOTS - ringSlots)
	_ = uint(ringSlots - C.VN_SLOTS)
	_ = -(unsafe.Offsetof(ring{}.consumed) ^ unsafe.Offsetof(C.struct_vn_ring{}.consumed))
	_ = -(unsafe.Offsetof(ring{}.overruns) ^ unsafe.Offsetof(C.struct_vn_ring{}.overruns))
	_ = -(unsafe.Offsetof(ring{}.done) ^ unsafe.Offsetof(C.struct_vn_ring{}.done))
	_ = -(unsafe.Offsetof(ring{}.open) ^ unsafe.Offsetof(C.struct_vn_ring{}.open))
	_ = -(unsafe.Offsetof(ring{}.tickets) ^ unsafe.Offsetof(C.struct_vn_ring{}.tickets))
	_ = -(unsafe.Offsetof(ring{}.moving) ^ unsafe.Offsetof(C.struct_vn_ring{}.moving))
	_ = -(unsafe.Offsetof(ring{}.accesses) ^ unsafe.Offsetof(C.struct_vn_ring{}.accesses))
	_ = -(unsafe.Offsetof(ring{}.closed) ^ unsafe.Offsetof(C.struct_vn_ring{}.closed))
	_ = -(unsafe.Offsetof(ring{}.slots) ^ unsafe.Offsetof(C.struct_vn_ring{}.slots))
	_ = -(unsafe.Offsetof(ring{}.units) ^ unsafe.Offsetof(C.struct_vn_ring{}.units))
)

// startThread starts the thread that reads userfault into r, until stopThread. On
// success the descriptors are the thread's.
func startThread(userfault, stop int, r *ring) error {
	if e := C.vn_start(C.int(userfault), C.int(stop), (*C.struct_vn_ring)(unsafe.Pointer(r))); e != 0 {
		return unix.Errno(e)
	}
	return nil
}

// stopThread ends the thread; its descriptors are closed when it returns.
func stopThread() { C.vn_stop() }
