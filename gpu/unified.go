package gpu

// Memory that the GPU and the process share by the process's own addresses. Package hmm has it: this file is what
// streams need of it, and what it needs of a GPU.

import (
	"fmt"
	"math"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Unified is memory of the process that a GPU reaches by the process's addresses: a *[hmm.Mirror]. Its methods are the GPU's
// loads and stores. A fault that cannot be resolved is an error, which becomes the stream's.
//
// [hmm.Mirror]: https://pkg.go.dev/github.com/verbena-rdma/verbena/hmm#Mirror
type Unified interface {
	Len() uint64
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
}

// InUnified returns n bytes of unified memory, from off on. That they are inside is checked when an operation is queued with
// them. Bytes that the CPU stores while the operation runs may be seen by it or not.
func InUnified(m Unified, off, n uint64) Mem { return Mem{unified: m, off: off, n: n} }

func (m *Mem) holdUnified(op string) error {
	if size := m.unified.Len(); m.n == 0 || m.n > math.MaxInt || m.off > size || m.n > size-m.off {
		return fail(op, ErrRange, "%d bytes at %d of %d", m.n, m.off, size)
	}
	return nil
}

// load returns memory for the bytes, with the bytes in it if the operation reads them.
func (m *Mem) load(read bool) ([]byte, error) {
	b := make([]byte, m.n)
	if !read {
		return b, nil
	}
	if _, err := m.unified.ReadAt(b, int64(m.off)); err != nil {
		return nil, fmt.Errorf("gpu: a load of unified memory: %w", err)
	}
	return b, nil
}

// store stores what an operation has written.
func (m *Mem) store(b []byte) error {
	if _, err := m.unified.WriteAt(b, int64(m.off)); err != nil {
		return fmt.Errorf("gpu: a store to unified memory: %w", err)
	}
	return nil
}

// File returns where memory that is mapped ([Buffer.Map]) lies: a descriptor of the file that is the VRAM, and the offset in
// it. Both are good until Unmap. It is for package hmm, which maps pages of it at other addresses.
//
// Errors: [ErrFreed], [ErrClosed]; EINVAL if the memory is not mapped, or not in one piece.
func (b *Buffer) File() (fd int, off uint64, err error) {
	const op = "gpu_file"
	if err := b.ok(op); err != nil {
		return -1, 0, err
	}
	b.obj.resv.Lock()
	defer b.obj.resv.Unlock()
	p := b.obj.place
	if b.obj.shown == 0 || p == nil || len(p.extents) != 1 {
		return -1, 0, ib.Errorf(op, syscall.EINVAL, "the memory is not mapped, or not in one piece")
	}
	return p.heap.fd, p.extents[0].off + b.off, nil
}
