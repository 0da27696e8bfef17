package dmabuf

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

// The CPU's accesses.

// BeginCPUAccess makes the memory ready for accesses of the CPU, in the direction in which a
// device would move the data: FromDevice if the CPU reads what a device has written, ToDevice
// if it writes what a device will read. It waits for the Write fences if the CPU only reads, and
// for the Read fences, too, if it writes.
//
// Errors: the exporter's; EINVAL for a direction that there is not; ETIMEDOUT if the context
// ends before the exporter answers, or before the fences are signalled; EAGAIN if the exporter
// returns that, or EINTR, again and again until the context ends.
func (b *Buffer) BeginCPUAccess(ctx context.Context, dir Direction) error {
	const op = "dma_buf_begin_cpu_access"
	b.resv.mustNotHold("BeginCPUAccess")
	usage := UsageFor(dir != FromDevice)
	if k, ok := b.cfg.Priv.(*kernelBuffer); ok {
		// The kernel's own wait, in SYNC, ends with no context.
		if err := k.waitFences(ctx, usage); err != nil {
			return named(op, err)
		}
	}
	if err := b.beginCPUAccess(ctx, dir); err != nil {
		return err
	}
	if err := b.waitFences(ctx, op, usage); err != nil {
		_ = b.EndCPUAccess(dir) // the first error says more
		return err
	}
	return nil
}

// beginCPUAccess is BeginCPUAccess, but for the wait for the fences.
func (b *Buffer) beginCPUAccess(ctx context.Context, dir Direction) error {
	begin, end := b.cfg.Ops.BeginCPUAccess, b.cfg.Ops.EndCPUAccess
	return b.cpuAccess(ctx, "dma_buf_begin_cpu_access", begin, dir, func() {
		if end != nil {
			_ = end(b, dir) // nobody has accessed anything
		}
	})
}

// EndCPUAccess ends accesses of the CPU. It fails with ETIMEDOUT if the exporter does not answer for
// ten seconds.
func (b *Buffer) EndCPUAccess(dir Direction) error {
	b.resv.mustNotHold("EndCPUAccess")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return b.cpuAccess(ctx, "dma_buf_end_cpu_access", b.cfg.Ops.EndCPUAccess, dir, func() {})
}

// patience is how long an exporter may take for an operation that no context ends; a variable for
// tests.
var patience = 10 * time.Second

// maxRepeats is how often an exporter is asked that answers EAGAIN or EINTR.
const maxRepeats = 1000

// cpuAccess calls an operation of the exporter, until the context ends. undo is called if the operation
// succeeds after that.
func (b *Buffer) cpuAccess(ctx context.Context, op string, do func(*Buffer, Direction) error, dir Direction, undo func()) error {
	if !dir.valid() {
		return ib.Errorf(op, syscall.EINVAL, "%v", dir)
	}
	if do == nil {
		return nil
	}
	return b.inTime(ctx, op, func() error {
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
	}, undo)
}

// inTime calls do, which calls the exporter, on a goroutine of its own, and waits for it until the context
// ends, and a moment longer: a context that has ended before leaves the exporter that time. Then it
// returns ETIMEDOUT, and the goroutine waits on, with a reference to the buffer; if do succeeds after
// all, it calls undo. If the caller has locked the reservation, do runs as if it had.
func (b *Buffer) inTime(ctx context.Context, op string, do func() error, undo func()) error {
	if ctx.Done() == nil { // nothing ends the wait
		return do()
	}
	b.refs.Add(1) // the caller has one, so there is one
	loan := b.resv.lend()
	var decided atomic.Bool // do has returned, or the caller has given up; whatever came first
	result := make(chan error, 1)
	go func() {
		loan.take()
		err := do()
		loan.giveBack()
		if decided.CompareAndSwap(false, true) {
			result <- err
			return
		}
		if err == nil {
			undo()
		}
		b.Put()
	}()
	var err error
	select {
	case err = <-result:
	case <-ctx.Done():
		late := time.NewTimer(moment)
		defer late.Stop()
		select {
		case err = <-result:
		case <-late.C:
			if decided.CompareAndSwap(false, true) {
				loan.revoke()
				return ib.Errorf(op, syscall.ETIMEDOUT, "the exporter: %v", ctx.Err())
			}
			err = <-result
		}
	}
	b.refs.Add(-1) // the caller still has its own
	return err
}

// moment is how long an exporter may take whose caller's context has ended.
const moment = time.Second

// Mmap returns memory for the CPU: n bytes at off, both multiples of a page. Accesses are
// bracketed by BeginCPUAccess and EndCPUAccess.
//
// Errors: EINVAL if the exporter has no such operation or returns fewer bytes, or the range is not
// in the buffer; the exporter's; ETIMEDOUT if it does not answer for ten seconds.
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
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got := make(chan []byte, 1)
	err := b.inTime(ctx, op, func() error {
		m, err := b.cfg.Ops.Mmap(b, off, n)
		got <- m
		return err
	}, func() {}) // the memory is the exporter's: there is nothing to undo
	if err != nil {
		return nil, named(op, err)
	}
	m := <-got
	switch {
	case uint64(len(m)) < n:
		return nil, ib.Errorf(op, syscall.EINVAL, "the exporter has mapped %d of %d bytes", len(m), n)
	}
	return m[:n:n], nil
}

// Vmap returns all of the memory in one piece, until as many calls of Vunmap. The caller has
// locked the reservation.
//
// Errors: EINVAL if the exporter has no such operation; the exporter's; ETIMEDOUT if it does not answer
// for ten seconds, and EBUSY from then on until it does.
func (b *Buffer) Vmap() ([]byte, error) {
	const op = "dma_buf_vmap"
	b.resv.mustHold("Vmap")
	if b.cfg.Ops.Vmap == nil {
		return nil, ib.Errorf(op, syscall.EINVAL, "the exporter does not map all of its memory")
	}
	if b.vmapLate {
		return nil, ib.Errorf(op, syscall.EBUSY, "the exporter has not answered an earlier call")
	}
	if b.vmaps == 0 {
		m, err := b.vmapNew(op)
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

// vmapNew has the exporter map the memory. If it does not answer in time, vmapLate is set until it does.
func (b *Buffer) vmapNew(op string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	type answer struct {
		m   []byte
		err error
	}
	got := make(chan answer, 1)
	err := b.inTime(ctx, op, func() error {
		m, err := b.cfg.Ops.Vmap(b)
		got <- answer{m, err}
		return nil
	}, func() {
		b.resv.Lock()
		defer b.resv.Unlock()
		if a := <-got; a.err == nil {
			b.cfg.Ops.Vunmap(b, a.m)
		}
		b.vmapLate = false
	})
	if err != nil {
		b.vmapLate = true
		return nil, err
	}
	a := <-got
	return a.m, a.err
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
