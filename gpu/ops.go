package gpu

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"math"
	"reflect"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// Mem is memory that an operation works on: a part of a Buffer, or memory of the program.
type Mem struct {
	buf     *Buffer
	obj     *object
	host    []byte
	unified Unified
	off, n  uint64
}

// Host is memory of the program, which it leaves alone until the operation is executed.
func Host(b []byte) Mem { return Mem{host: b, n: uint64(len(b))} }

// At returns n bytes of the memory, from off on. That they are inside is checked when an operation
// is queued with them.
func (b *Buffer) At(off, n uint64) Mem { return Mem{buf: b, off: off, n: n} }

// All returns all of the memory.
func (b *Buffer) All() Mem { return b.At(0, b.n) }

// Len returns the number of bytes.
func (m Mem) Len() uint64 { return m.n }

// hold checks the memory and takes a reference.
func (m *Mem) hold(op string) error {
	if m.unified != nil {
		return m.holdUnified(op)
	}
	if m.buf == nil {
		if m.host == nil && m.n == 0 {
			return ib.Errorf(op, syscall.EINVAL, "no memory")
		}
		return nil
	}
	if err := m.buf.ok(op); err != nil {
		return err
	}
	if err := m.buf.inside(op, m.off, m.n); err != nil {
		return err
	}
	if !m.buf.obj.get() {
		return fail(op, ErrFreed, "object %d", m.buf.obj.id)
	}
	m.obj = m.buf.obj
	m.off += m.buf.off
	return nil
}

func (m *Mem) letGo() {
	if m.obj != nil {
		m.obj.put()
		m.obj = nil
	}
}

// span is where an operation finds its memory.
type span struct {
	table *dmabuf.Table
	off   uint64
	n     uint64
	vram  bool
	used  bool // the object is to be told when the operation has ended
	// staged has the bytes of unified memory meanwhile; nil for other memory.
	staged []byte
}

// at returns the bytes from off on that lie together, at most n.
func (s *span) at(off, n uint64) []byte { return s.table.At(s.off+off, n) }

// use finds out where memory is, and keeps it there until the fence is signalled. The first of the mems is
// written. Reservations are locked one after the other, and in one order by all operations: who moves an object
// holds its lock while it waits for operations that use it, and these may want to lock the next one.
func use(ctx context.Context, op string, mems []Mem, f *dmabuf.Fence) ([]span, error) {
	at := make([]span, len(mems))
	order := make([]int, 0, len(mems))
	for i, m := range mems {
		at[i] = span{off: m.off, n: m.n}
		switch {
		case m.obj != nil:
			order = append(order, i)
		case m.unified != nil:
			b, err := m.load(i > 0)
			if err != nil {
				return at, err
			}
			at[i] = span{table: dmabuf.NewTable(b), n: m.n, staged: b}
		default:
			at[i].table = dmabuf.NewTable(m.host)
		}
	}
	key := func(i int) uintptr { return reflect.ValueOf(mems[i].obj.resv).Pointer() }
	slices.SortFunc(order, func(i, j int) int {
		if key(i) < key(j) {
			return -1
		}
		if key(i) > key(j) {
			return 1
		}
		return i - j // what is written comes first
	})
	for k, i := range order {
		if k > 0 && mems[order[k-1]].obj == mems[i].obj {
			at[i].table, at[i].vram = at[order[k-1]].table, at[order[k-1]].vram
			continue
		}
		var err error
		if at[i].table, at[i].vram, err = mems[i].obj.use(ctx, op, i == 0, f); err != nil {
			return at, err
		}
		at[i].used = true
	}
	return at, nil
}

// wayOf returns what moving bytes costs.
func (c *card) wayOf(toVRAM, fromVRAM bool) Cost {
	switch {
	case toVRAM && fromVRAM:
		return c.cfg.Costs.Within
	case toVRAM:
		return c.cfg.Costs.ToDevice
	case fromVRAM:
		return c.cfg.Costs.FromDevice
	}
	return Cost{}
}

// compute queues an operation that writes the first of the mems from the others.
func (s *Stream) compute(name string, run func(at []span) error, mems ...Mem) error {
	c := s.dev.card
	return s.submit(&operation{name: name, mems: mems, run: run, cost: func(at []span) (Cost, uint64) {
		longest, from := at[0].n, at[0].vram
		for i := range at[1:] {
			from = at[i+1].vram && (from || i == 0)
			longest = max(longest, at[i+1].n)
		}
		return c.wayOf(at[0].vram, from), longest
	}})
}

// Copy copies memory: between buffers of GPUs, or between a buffer and the program's memory. Parts that overlap
// in one object come out as if the bytes had been read first if the object lies in one piece, and mixed
// otherwise.
//
// Errors of this and the other operations, before they are queued: [ErrFreed], [ErrRange], [ErrClosed];
// EINVAL if lengths do not match. Errors of the execution are the stream's ([Stream.Sync]).
func (s *Stream) Copy(dst, src Mem) error {
	const op = "gpu_copy"
	if dst.n != src.n {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes into %d", src.n, dst.n)
	}
	return s.compute(op, func(at []span) error {
		to, from := &at[0], &at[1]
		for off := uint64(0); off < to.n; {
			run := from.at(off, to.n-off)
			off += uint64(copy(to.at(off, uint64(len(run))), run))
		}
		return nil
	}, dst, src)
}

// Fill sets all bytes.
func (s *Stream) Fill(dst Mem, value byte) error { return s.FillPattern(dst, []byte{value}) }

// FillPattern writes a pattern again and again. It has 1, 2, 4 or 8 bytes; the offset of the memory in its object and its
// length are multiples of that.
//
// Errors: as those of Copy; EINVAL if the pattern, the offset or the length is not so.
func (s *Stream) FillPattern(dst Mem, pattern []byte) error {
	const op = "gpu_fill"
	width, off := uint64(len(pattern)), dst.off
	if dst.buf != nil {
		off += dst.buf.off
	}
	if width == 0 || width > 8 || width&(width-1) != 0 || dst.n%width != 0 || off%width != 0 {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %d with a pattern of %d", dst.n, off, width)
	}
	pattern = slices.Clone(pattern)
	return s.compute(op, func(at []span) error {
		for off, to := uint64(0), &at[0]; off < to.n; {
			run := to.at(off, to.n-off) // whole patterns: an object's pieces are whole pages
			copy(run, pattern)
			for n := len(pattern); n < len(run); n *= 2 {
				copy(run[n:], run[:n])
			}
			off += uint64(len(run))
		}
		return nil
	}, dst)
}

// Type is the type of the numbers in memory, which are little-endian and 4 bytes long.
type Type uint8

const (
	Float32 Type = iota
	Uint32
)

func (t Type) add(a, b uint32) uint32 {
	if t == Float32 {
		return math.Float32bits(math.Float32frombits(a) + math.Float32frombits(b))
	}
	return a + b
}

// vectors checks operands that are vectors of numbers: the offsets are multiples of 4, so that no number lies
// across two pages.
func vectors(op string, t Type, mems ...Mem) error {
	if t > Uint32 {
		return ib.Errorf(op, syscall.EINVAL, "type %d", t)
	}
	for _, m := range mems {
		off := m.off
		if m.buf != nil {
			off += m.buf.off
		}
		if m.n%4 != 0 || off%4 != 0 {
			return ib.Errorf(op, syscall.EINVAL, "%d bytes at %d are no numbers of 4 bytes", m.n, off)
		}
	}
	return nil
}

// Add adds two vectors: each number of dst becomes the sum of those of a and b, which may be dst.
func (s *Stream) Add(dst, a, b Mem, t Type) error {
	const op = "gpu_add"
	if dst.n != a.n || dst.n != b.n {
		return ib.Errorf(op, syscall.EINVAL, "vectors of %d, %d and %d bytes", dst.n, a.n, b.n)
	}
	if err := vectors(op, t, dst, a, b); err != nil {
		return err
	}
	return s.compute(op, func(at []span) error {
		for off, n := uint64(0), at[0].n; off < n; {
			x := at[1].at(off, n-off)
			y := at[2].at(off, uint64(len(x)))
			to := at[0].at(off, uint64(len(y)))
			x, y = x[:len(to)], y[:len(to)]
			for i := 0; i+4 <= len(to); i += 4 {
				binary.LittleEndian.PutUint32(to[i:], t.add(binary.LittleEndian.Uint32(x[i:]), binary.LittleEndian.Uint32(y[i:])))
			}
			off += uint64(len(to))
		}
		return nil
	}, dst, a, b)
}

// Reduce adds up a vector: dst, 4 bytes, becomes the sum of the numbers of src, in their order.
func (s *Stream) Reduce(dst, src Mem, t Type) error {
	const op = "gpu_reduce"
	if dst.n != 4 {
		return ib.Errorf(op, syscall.EINVAL, "a sum of %d bytes", dst.n)
	}
	if err := vectors(op, t, dst, src); err != nil {
		return err
	}
	return s.compute(op, func(at []span) error {
		var sum uint32
		for off, from := uint64(0), &at[1]; off < from.n; {
			run := from.at(off, from.n-off)
			for i := 0; i+4 <= len(run); i += 4 {
				sum = t.add(sum, binary.LittleEndian.Uint32(run[i:]))
			}
			off += uint64(len(run))
		}
		binary.LittleEndian.PutUint32(at[0].at(0, 4), sum)
		return nil
	}, dst, src)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum computes the CRC-32C of src into dst, 4 bytes.
func (s *Stream) Checksum(dst, src Mem) error {
	const op = "gpu_checksum"
	if dst.n != 4 {
		return ib.Errorf(op, syscall.EINVAL, "a checksum of %d bytes", dst.n)
	}
	if err := vectors(op, Uint32, dst); err != nil {
		return err
	}
	return s.compute(op, func(at []span) error {
		var sum uint32
		for off, from := uint64(0), &at[1]; off < from.n; {
			run := from.at(off, from.n-off)
			sum = crc32.Update(sum, castagnoli, run)
			off += uint64(len(run))
		}
		binary.LittleEndian.PutUint32(at[0].at(0, 4), sum)
		return nil
	}, dst, src)
}
