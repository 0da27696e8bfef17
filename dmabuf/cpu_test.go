package dmabuf

import (
	"context"
	"fmt"
	"math"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

// A CPU that reads waits for those that write, one that writes for all but bookkeeping.
func TestCPUAccessWaits(t *testing.T) {
	for _, c := range []struct {
		dir   Direction
		waits [numUsages]bool
	}{
		{FromDevice, [numUsages]bool{Kernel: true, Write: true}},
		{ToDevice, [numUsages]bool{Kernel: true, Write: true, Read: true}},
		{Bidirectional, [numUsages]bool{Kernel: true, Write: true, Read: true}},
	} {
		for usage, waits := range c.waits {
			e := export(t, nil)
			fence := NewFence()
			locked(e.buffer.resv, func() { e.buffer.resv.Add(fence, Usage(usage)) })
			err := e.buffer.BeginCPUAccess(ended(), c.dir)
			if waits {
				wantErr(t, fmt.Sprint(c.dir, Usage(usage)), err, syscall.ETIMEDOUT)
				if text := err.Error(); !strings.HasPrefix(text, "dma_buf_begin_cpu_access: ") {
					t.Errorf("the error is not that of the call: %s", text)
				}
				e.want("begin 1, end 1") // what was begun is ended
				fence.Signal(nil)
				err = e.buffer.BeginCPUAccess(ended(), c.dir)
			}
			check(t, err)
			check(t, e.buffer.EndCPUAccess(c.dir))
			e.end()
		}
	}
}

// An exporter that answers EAGAIN or EINTR is asked again, in whatever form it says so; other
// errors are the caller's.
func TestCPUAccessFails(t *testing.T) {
	asked := 0
	var answers []error
	answer := func(*Buffer, Direction) error {
		if asked++; asked <= len(answers) {
			return answers[asked-1]
		}
		return nil
	}
	e := export(t, func(c *Config) { c.Ops.BeginCPUAccess, c.Ops.EndCPUAccess = answer, answer })
	defer e.end()
	for _, access := range []func() error{
		func() error { return e.buffer.BeginCPUAccess(background(t), ToDevice) },
		func() error { return e.buffer.EndCPUAccess(ToDevice) },
	} {
		answers, asked = []error{syscall.EAGAIN, syscall.EINTR, ib.Errorf("theirs", syscall.EAGAIN, ""), fmt.Errorf("theirs: %w", syscall.EINTR)}, 0
		check(t, access())
		if asked != len(answers)+1 {
			t.Errorf("asked %d times", asked)
		}
		for _, errno := range append(errnos, syscall.EIO) {
			answers, asked = []error{syscall.EAGAIN, errno}, 0
			wantErr(t, "an errno", access(), errno)
			if asked != 2 {
				t.Errorf("asked %d times", asked)
			}
		}
		answers, asked = make([]error, 2*maxRepeats), 0
		for i := range answers {
			answers[i] = syscall.EAGAIN
		}
		wantErr(t, "always EAGAIN", access(), syscall.EAGAIN)
		if asked != maxRepeats {
			t.Errorf("asked %d times", asked)
		}
	}
	asked = 0
	wantErr(t, "EAGAIN when the context has ended", e.buffer.BeginCPUAccess(ended(), ToDevice), syscall.EAGAIN)
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	for _, dir := range []Direction{3, 255} {
		wantErr(t, "BeginCPUAccess", e.buffer.BeginCPUAccess(context.Background(), dir), syscall.EINVAL)
		wantErr(t, "EndCPUAccess", e.buffer.EndCPUAccess(dir), syscall.EINVAL)
	}
}

// Mmap takes pages of the buffer, and nothing else.
func TestMmap(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	for _, c := range []struct{ off, n uint64 }{{0, 4096}, {0, 4 * 4096}, {3 * 4096, 4096}} {
		b, err := e.buffer.Mmap(c.off, c.n)
		check(t, err)
		if uint64(len(b)) != c.n || uint64(cap(b)) != c.n || &b[0] != &e.bytes[c.off] {
			t.Errorf("%d bytes at %d: %d bytes of %d", c.n, c.off, len(b), cap(b))
		}
	}
	e.want("mmap 3")
	for _, c := range []struct{ off, n uint64 }{
		{0, 0}, {1, 4096}, {0, 4095}, {4 * 4096, 4096}, {4096, 4 * 4096}, {8 * 4096, 4096},
		{4096, math.MaxUint64 &^ 4095}, {math.MaxUint64 &^ 4095, 4096}, {math.MaxUint64 &^ 4095, 8192},
	} {
		_, err := e.buffer.Mmap(c.off, c.n)
		wantErr(t, fmt.Sprintf("%d bytes at %d", c.n, c.off), err, syscall.EINVAL)
	}
	e.want("mmap 3")
	for _, errno := range errnos {
		e.set("mmap", errno)
		_, err := e.buffer.Mmap(0, 4096)
		wantErr(t, "Mmap", err, errno)
	}
	short := export(t, func(c *Config) {
		c.Ops.Mmap = func(*Buffer, uint64, uint64) ([]byte, error) { return make([]byte, 100), nil }
	})
	defer short.end()
	_, err := short.buffer.Mmap(0, 4096)
	wantErr(t, "an exporter that maps too little", err, syscall.EINVAL)
}

// All calls of Vmap share one mapping, until the last Vunmap.
func TestVmap(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	b := e.buffer
	locked(b.resv, func() {
		first, err := b.Vmap()
		check(t, err)
		second, err := b.Vmap()
		check(t, err)
		if len(first) != size || &first[0] != &second[0] {
			t.Error("two calls of Vmap return different memory")
		}
		b.Vunmap()
		e.want("vmap 1, vunmap 0")
		b.Vunmap()
		e.want("vmap 1, vunmap 1")
		wantPanic(t, "Vunmap", "without Vmap", b.Vunmap)
		for _, errno := range errnos {
			e.set("vmap", errno)
			_, err = b.Vmap()
			wantErr(t, "Vmap", err, errno)
			_, err = b.Kmap(0)
			wantErr(t, "Kmap", err, errno)
		}
		e.want("vunmap 1")
		e.set("vmap", nil)
		e.calls["vmap"] = 1

		for page, n := range []int{4096, 4096, 4096, 100} {
			m, err := b.Kmap(uint64(page))
			check(t, err)
			if len(m) != n || &m[0] != &e.bytes[page*4096] {
				t.Errorf("page %d has %d bytes", page, len(m))
			}
			b.Kunmap()
		}
		for _, page := range []uint64{4, math.MaxUint64, math.MaxUint64 / 4096} {
			_, err := b.Kmap(page)
			wantErr(t, fmt.Sprintf("page %d", page), err, syscall.EINVAL)
		}
	})
	kept := export(t, nil)
	locked(kept.buffer.resv, func() {
		_, err := kept.buffer.Vmap()
		check(t, err)
	})
	wantPanic(t, "Put", "while the CPU has mapped", kept.buffer.Put)
	short := export(t, func(c *Config) {
		vmap := c.Ops.Vmap
		c.Ops.Vmap = func(b *Buffer) ([]byte, error) { m, err := vmap(b); return m[:size-1], err }
	})
	defer short.end()
	locked(short.buffer.resv, func() {
		_, err := short.buffer.Vmap()
		wantErr(t, "an exporter that maps too little", err, syscall.EINVAL)
		short.want("vunmap 1")
	})
}
