package enginetest

import (
	"encoding/binary"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// change does an atomic operation on 8 bytes, under the memory's lock.
//
//go:norace
func change(b []byte, op mem.AtomicOp, compare, swapAdd uint64) (orig uint64) {
	orig = binary.NativeEndian.Uint64(b)
	switch {
	case op == mem.FetchAdd:
		binary.NativeEndian.PutUint64(b, orig+swapAdd)
	case op == mem.Store, orig == compare:
		binary.NativeEndian.PutUint64(b, swapAdd)
	}
	return orig
}
