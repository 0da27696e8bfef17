package dmabuf

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// An exporter that does not answer keeps nobody waiting for ever, and what it does later is undone.
func TestExporterHangs(t *testing.T) {
	defer func(d time.Duration) { patience = d }(patience)
	patience = 20 * time.Millisecond
	hang := make(chan struct{})
	hold := func() { <-hang }
	var e *exporter
	e = export(t, func(c *Config) {
		ops := c.Ops
		c.Ops.BeginCPUAccess = func(b *Buffer, d Direction) error { hold(); return ops.BeginCPUAccess(b, d) }
		c.Ops.Mmap = func(b *Buffer, off, n uint64) ([]byte, error) { hold(); return ops.Mmap(b, off, n) }
		c.Ops.Vmap = func(*Buffer) ([]byte, error) { hold(); e.count("vmap"); return e.bytes[:size], nil }
		c.Ops.Vunmap = func(*Buffer, []byte) { e.must("vunmap", true) }
	})
	b := e.buffer
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	wantErr(t, "BeginCPUAccess", b.BeginCPUAccess(ctx, ToDevice), syscall.ETIMEDOUT)
	_, err := b.Mmap(0, 4096)
	wantErr(t, "Mmap", err, syscall.ETIMEDOUT)
	locked(b.Reservation(), func() {
		_, err := b.Vmap()
		wantErr(t, "Vmap", err, syscall.ETIMEDOUT)
		_, err = b.Vmap()
		wantErr(t, "Vmap again", err, syscall.EBUSY)
		_, err = b.Kmap(0)
		wantErr(t, "Kmap", err, syscall.EBUSY)
	})
	close(hang)
	eventually(t, "what was late is undone", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.calls["begin"] == 1 && e.calls["end"] == 1 && e.calls["mmap"] == 1 && e.calls["vmap"] == 1 && e.calls["vunmap"] == 1
	})
	eventually(t, "the references are back", func() bool { return b.refs.Load() == 1 })
	patience = time.Minute
	locked(b.Reservation(), func() {
		_, err := b.Vmap()
		check(t, err)
		b.Vunmap()
	})
	e.end()
}

// count counts a call without looking at the lock.
func (e *exporter) count(op string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls[op]++
}

// An exporter that hangs at the end of accesses.
func TestExporterHangsAtEnd(t *testing.T) {
	defer func(d time.Duration) { patience = d }(patience)
	patience = 20 * time.Millisecond
	hang := make(chan struct{})
	e := export(t, func(c *Config) {
		ops := c.Ops
		c.Ops.EndCPUAccess = func(b *Buffer, d Direction) error { <-hang; return ops.EndCPUAccess(b, d) }
	})
	check(t, e.buffer.BeginCPUAccess(background(t), FromDevice))
	wantErr(t, "EndCPUAccess", e.buffer.EndCPUAccess(FromDevice), syscall.ETIMEDOUT)
	close(hang)
	eventually(t, "the references are back", func() bool { return e.buffer.refs.Load() == 1 })
	e.end()
}

// The storm is asked for by the variables that the C library hands over, too: a program in C may have
// written over those of the process.
func TestStormVariable(t *testing.T) {
	defer sys.ResetEnvironment()
	sys.SetEnvironment([]string{stormVar + "=7,5000"})
	m, err := Alloc(MemoryConfig{Size: 4096})
	check(t, err)
	eventually(t, "the memory moves", func() bool { return m.Moves() > 3 })
	check(t, m.Close())
}
