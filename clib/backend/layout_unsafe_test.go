package main

import (
	"testing"
	"unsafe"

	"github.com/verbena-rdma/verbena/ib"
)

// ib.SGE is laid out as struct ibv_sge: a 64-bit address, two 32-bit numbers.
func TestLayout(t *testing.T) {
	var e ib.SGE
	if unsafe.Sizeof(e) != 16 || unsafe.Offsetof(e.Addr) != 0 || unsafe.Offsetof(e.Length) != 8 || unsafe.Offsetof(e.LKey) != 12 {
		t.Errorf("ib.SGE has %d bytes, its fields lie at %d, %d and %d", unsafe.Sizeof(e), unsafe.Offsetof(e.Addr), unsafe.Offsetof(e.Length), unsafe.Offsetof(e.LKey))
	}
}

// ib.Stride is laid out as struct vbe_piece: three 64-bit numbers, a 32-bit one.
func TestPieceLayout(t *testing.T) {
	var s ib.Stride
	if unsafe.Sizeof(s) != 32 || unsafe.Offsetof(s.Addr) != 0 || unsafe.Offsetof(s.Bytes) != 8 || unsafe.Offsetof(s.Skip) != 16 || unsafe.Offsetof(s.LKey) != 24 {
		t.Errorf("ib.Stride has %d bytes, its fields lie at %d, %d, %d and %d", unsafe.Sizeof(s),
			unsafe.Offsetof(s.Addr), unsafe.Offsetof(s.Bytes), unsafe.Offsetof(s.Skip), unsafe.Offsetof(s.LKey))
	}
}
