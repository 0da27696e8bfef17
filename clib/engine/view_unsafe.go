package main

// Looking at the program's memory.
//
// Sound: the front passes addresses that are valid while the call lasts, of
// structures whose layout is that of the Go types (ib.SGE has that of struct
// ibv_sge, ib.Stride that of struct vbe_piece: layout_unsafe_test.go), and nothing here
// outlives the call. If the program itself passed a wrong address, it faults, as it
// would with any library.

// #include "call.h"
import "C"

import (
	"unsafe"

	"github.com/verbena-rdma/verbena/ib"
)

// view is n elements of C memory.
func view[T any](p *T, n int) []T { return unsafe.Slice(p, n) }

// sges is a list of elements at an address.
func sges(addr uint64, n uint32) []ib.SGE {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*ib.SGE)(at(addr)), n)
}

// strides is a list of pieces at an address.
func strides(addr uint64, n uint32) []ib.Stride {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*ib.Stride)(at(addr)), n)
}

func layoutAt(addr uint64) *C.struct_vbe_layout { return (*C.struct_vbe_layout)(at(addr)) }

// bytesAt is n bytes at an address.
func bytesAt(addr, n uint64) []byte {
	if n == 0 {
		return []byte{}
	}
	return unsafe.Slice((*byte)(at(addr)), n)
}

// at is a pointer to C memory: nothing that the collector knows of.
func at(addr uint64) unsafe.Pointer {
	p := uintptr(addr)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

// word is a number of C's that both sides change, for sync/atomic.
func word(p *C.uint32_t) *uint32 { return (*uint32)(unsafe.Pointer(p)) }

func goString(p *C.char) string { return C.GoString(p) }
