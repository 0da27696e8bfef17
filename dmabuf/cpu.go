package dmabuf

import (
	"context"
	"errors"
	"os"
	"runtime"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// The CPU's accesses.

// BeginCPUAccess makes the memory ready for accesses of the CPU, in the direction in which a
// device would move the data: FromDevice if the CPU reads what a device has written, ToDevice
// if it writes what a device will read. It waits for the Write fences if the CPU only reads, and
// for the Read fences, too, if it writes.
//
// Errors: the exporter's; EINVAL for a direction that there is not; ETIMEDOUT if the context
// ends before the fences are signalled; EAGAIN if the exporter returns that, or EINTR, again and
// again until the context ends.
func (b *Buffer) BeginCPUAccess(ctx context.Context, dir Direction) error {
	const op = "dma_buf_begin_cpu_access"
	b.resv.mustNotHold("BeginCPUAccess")
	if err := b.cpuAccess(ctx, op, b.cfg.Ops.BeginCPUAccess, dir); err != nil {
		return err
	}
	if err := b.resv.Wait(ctx, UsageFor(dir != FromDevice)); err != nil {
		_ = b.EndCPUAccess(dir) // the first error says more
		return ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's fences: %v", err)
	}
	return nil
}

// EndCPUAccess ends accesses of the CPU.
func (b *Buffer) EndCPUAccess(dir Direction) error {
	b.resv.mustNotHold("EndCPUAccess")
	return b.cpuAccess(context.Background(), "dma_buf_end_cpu_access", b.cfg.Ops.EndCPUAccess, dir)
}

// maxRepeats is how often an exporter is asked that answers EAGAIN or EINTR.
const maxRepeats = 1000

func (b *Buffer) cpuAccess(ctx context.Context, op string, do func(*Buffer, Direction) error, dir Direction) error {
	if !dir.valid() {
		return ib.Errorf(op, syscall.EINVAL, "%v", dir)
	}
	if do == nil {
		return nil
	}
	for range maxRepeats {
		err := do(b, dir)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EINTR) {
			return named(op, err)
		}
		if ctx.Err() != nil {
			break
		}
		runtime.Gosched()
	}
	return ib.Errorf(op, syscall.EAGAIN, "the exporter")
}

// Mmap returns memory for the CPU: n bytes at off, both multiples of a page. Accesses are
// bracketed by BeginCPUAccess and EndCPUAccess.
//
// Errors: EINVAL if the exporter has no such operation or returns fewer bytes, or the range is not
// in the buffer; the exporter's.
func (b *Buffer) Mmap(off, n uint64) ([]byte, error) {
	const op = "dma_buf_mmap"
	b.resv.mustNotHold("Mmap")
	page := uint64(os.Getpagesize())
	size := (b.cfg.Size + page - 1) &^ (page - 1)
	switch {
	case b.cfg.Ops.Mmap == nil:
		return nil, ib.Errorf(op, syscall.EINVAL, "the exporter has no memory for the CPU")
	case n == 0 || off%page != 0 || n%page != 0 || off > size || n > size-off:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d of %d", n, off, b.cfg.Size)
	}
	m, err := b.cfg.Ops.Mmap(b, off, n)
	switch {
	case err != nil:
		return nil, named(op, err)
	case uint64(len(m)) < n:
		return nil, ib.Errorf(op, syscall.EINVAL, "the exporter has mapped %d of %d bytes", len(m), n)
	}
	return m[:n:n], nil
}

// Vmap returns all of the memory in one piece, until as many calls of Vunmap. The caller has
// locked the reservation.
//
// Errors: EINVAL if the exporter has no such operation; the exporter's.
func (b *Buffer) Vmap() ([]byte, error) {
	const op = "dma_buf_vmap"
	b.resv.mustHold("Vmap")
	if b.cfg.Ops.Vmap == nil {
		return nil, ib.Errorf(op, syscall.EINVAL, "the exporter does not map all of its memory")
	}
	if b.vmaps == 0 {
		m, err := b.cfg.Ops.Vmap(b)
		if err != nil {
			return nil, named(op, err)
		}
		if uint64(len(m)) < b.cfg.Size {
			b.cfg.Ops.Vunmap(b, m)
			return nil, ib.Errorf(op, syscall.EINVAL, "the exporter has mapped %d of %d bytes", len(m), b.cfg.Size)
		}
		b.vmapped = m
	}
	b.vmaps++
	return b.vmapped, nil
}

// Vunmap ends a Vmap. The caller has locked the reservation.
func (b *Buffer) Vunmap() {
	b.resv.mustHold("Vunmap")
	if b.vmaps == 0 {
		panic("dmabuf: Vunmap without Vmap")
	}
	if b.vmaps--; b.vmaps == 0 {
		b.cfg.Ops.Vunmap(b, b.vmapped)
		b.vmapped = nil
	}
}

// Kmap returns one page of the memory, until Kunmap. The caller has locked the reservation.
//
// Errors: EINVAL if there is no such page; those of Vmap.
func (b *Buffer) Kmap(page uint64) ([]byte, error) {
	b.resv.mustHold("Kmap")
	size := uint64(os.Getpagesize())
	if page > (b.cfg.Size-1)/size {
		return nil, ib.Errorf("dma_buf_kmap", syscall.EINVAL, "page %d of a buffer of %d bytes", page, b.cfg.Size)
	}
	all, err := b.Vmap()
	if err != nil {
		return nil, err
	}
	return all[page*size:][:min(size, b.cfg.Size-page*size)], nil
}

// Kunmap ends a Kmap. The caller has locked the reservation.
func (b *Buffer) Kunmap() { b.Vunmap() }
