package gpu

import (
	"maps"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Pool gives out parts of one Buffer: small ones, for which an object each would be too much.
type Pool struct {
	buf *Buffer

	mu     sync.Mutex // guards what follows
	spaces spaces
	parts  map[*Buffer]extent
	closed bool
}

// poolAlign is what the parts of a pool are aligned to, as with other GPUs.
const poolAlign = 256

// NewPool makes a pool of the bytes of a Buffer, which it frees when it is closed. The pool owns the Buffer.
//
// Errors: [ErrFreed], [ErrClosed]; EINVAL if the Buffer has less than 256 bytes.
func NewPool(b *Buffer) (*Pool, error) {
	const op = "gpu_new_pool"
	if err := b.ok(op); err != nil {
		return nil, err
	}
	if b.n < poolAlign {
		return nil, ib.Errorf(op, syscall.EINVAL, "a pool of %d bytes", b.n)
	}
	return &Pool{buf: b, spaces: newSpaces(b.n &^ (poolAlign - 1)), parts: make(map[*Buffer]extent)}, nil
}

// Alloc returns n bytes, which may hold what was there before. Give them back by [Pool.Free].
//
// Errors: [ErrOutOfMemory] if the pool has no such piece; EINVAL for no bytes; [ErrFreed], [ErrClosed].
func (p *Pool) Alloc(n uint64) (*Buffer, error) {
	const op = "gpu_pool_alloc"
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return nil, fail(op, ErrFreed, "the pool is closed")
	case n == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	case n > p.buf.n:
		return nil, fail(op, ErrOutOfMemory, "%d bytes of a pool of %d", n, p.buf.n)
	}
	got := p.spaces.take(roundUp(n, poolAlign), p.buf.n, true)
	if got == nil {
		return nil, fail(op, ErrOutOfMemory, "%d bytes, %d are free", n, p.spaces.total)
	}
	b, err := p.buf.Sub(got[0].off, n)
	if err != nil {
		p.spaces.put(got[0])
		return nil, err
	}
	p.parts[b] = got[0]
	return b, nil
}

// Free gives a part back. It fails with [ErrFreed] if it is none of the pool's, or was freed.
func (p *Pool) Free(b *Buffer) error {
	const op = "gpu_pool_free"
	p.mu.Lock()
	e, ok := p.parts[b]
	if ok {
		delete(p.parts, b)
	}
	p.mu.Unlock()
	if !ok {
		return fail(op, ErrFreed, "the pool has no such part")
	}
	err := b.Free()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spaces.put(e)
	return err
}

// Close frees all parts, and the Buffer. Closing again does nothing.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	parts := slices.Collect(maps.Keys(p.parts))
	p.parts = nil
	p.mu.Unlock()
	for _, b := range parts {
		_ = b.Free() // the device may have freed it
	}
	_ = p.buf.Free()
	return nil
}
