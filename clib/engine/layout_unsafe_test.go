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
