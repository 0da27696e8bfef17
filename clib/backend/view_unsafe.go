package main

// Access to the program's memory.
//
// Sound: the front passes addresses that are valid during the call, of structures that are
// laid out as the Go types (ib.SGE as struct ibv_sge, ib.Stride as struct vbe_piece:
// layout_unsafe_test.go), and nothing here outlives the call. A wrong address from the
// program faults, as with any library.

// #include "call.h"
import "C"

import (
	"unsafe"

	"github.com/verbena-rdma/verbena/ib"
)

// view returns n elements of C memory.
func view[T any](p *T, n int) []T { return unsafe.Slice(p, n) }

// octets returns n bytes of C memory.
func octets[T ~uint8](p *T, n int) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(p)), n) }

// sges returns the scatter/gather list at an address.
func sges(addr uint64, n uint32) []ib.SGE {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*ib.SGE)(at(addr)), n)
}

// strides returns the list of pieces at an address.
func strides(addr uint64, n uint32) []ib.Stride {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*ib.Stride)(at(addr)), n)
}

func layoutAt(addr uint64) *C.struct_vbe_layout { return (*C.struct_vbe_layout)(at(addr)) }

// bytesAt returns n bytes at an address.
func bytesAt(addr, n uint64) []byte {
	if n == 0 {
		return []byte{}
	}
	return unsafe.Slice((*byte)(at(addr)), n)
}

// at returns a pointer to C memory, which the garbage collector does not manage.
func at(addr uint64) unsafe.Pointer {
	p := uintptr(addr)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

// word returns a number that both sides change, for sync/atomic.
func word(p *C.uint32_t) *uint32 { return (*uint32)(unsafe.Pointer(p)) }

// addrOf returns the address of memory that the backend has mapped, for C. It stays there until the region
// is closed.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// textAt returns the string at an address.
func textAt(addr uint64) string { return C.GoString((*C.char)(at(addr))) }

func goString(p *C.char) string { return C.GoString(p) }

// stringList returns the strings from an address on. An empty one ends the list.
func stringList(p *C.char) (list []string) {
	for *p != 0 {
		s := C.GoString(p)
		list = append(list, s)
		p = (*C.char)(unsafe.Add(unsafe.Pointer(p), len(s)+1))
	}
	return list
}
