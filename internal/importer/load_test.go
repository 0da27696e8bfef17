package importer_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// poison is what memory holds that a buffer has left. The tests write no such byte.
const poison = 0xdb

// fill fills b with random bytes, none of which is poison.
func fill(rng *rand.Rand, b []byte) {
	v := byte(rng.Uint32())
	for i := range b {
		if v = v*5 + 17; v == poison {
			v++
		}
		b[i] = v
	}
}

// rounds is how often something is done under load.
func rounds(short int) int {
	if os.Getenv("VERBENA_FULL") != "" {
		return 20 * short
	}
	return short
}

// crowd is a buffer that several importers use while it moves.
type crowd struct {
	t      *testing.T
	memory *dmabuf.Memory
	table  *mem.Table
	// regions name the whole buffer: by regions of all of it, and by one of two halves.
	regions []part
	size    uint64
	moves   atomic.Int64 // how often the mover has moved it
	revoked atomic.Bool  // the accesses may end with FaultRevoked
}

// part is a range of the buffer that a key opens.
type part struct {
	region
	off, n uint64
}

// piece is how many bytes belong to one worker, at each of its places.
const piece = 12000

func newCrowd(t *testing.T, workers int) *crowd {
	c := &crowd{t: t, table: newTable(), size: uint64(workers) * 5 * piece}
	var err error
	c.memory, err = dmabuf.Alloc(dmabuf.MemoryConfig{Size: c.size, Segments: 3, Name: "crowd"})
	check(t, err)
	half := c.size / 2
	for _, cfg := range []importer.Config{
		{Length: c.size}, {Length: c.size}, {Length: half}, {Offset: half, Length: c.size - half}, {Offset: 77, Length: c.size - 154},
	} {
		c.regions = append(c.regions, part{register(t, c.table, c.memory.Buffer(), cfg), cfg.Offset, cfg.Length})
	}
	return c
}

// worker is a goroutine with a share of the buffer: nobody else writes to it, so it knows what
// must be there.
type worker struct {
	*crowd
	rng    *rand.Rand
	number int
	model  []byte
}

func (c *crowd) worker(seed uint64, number int) *worker {
	return &worker{c, rand.New(rand.NewPCG(seed, uint64(number))), number, make([]byte, 5*piece)}
}

// step writes to some of the worker's bytes, reads some or copies some to others, through any of the
// regions. It reports false when the memory is revoked.
func (w *worker) step() bool {
	if w.rng.IntN(4) == 0 {
		return w.copy()
	}
	base := uint64(w.number) * 5 * piece
	off := w.rng.Uint64N(5 * piece)
	n := 1 + w.rng.Uint64N(min(5*piece-off, 2*piece))
	b := make([]byte, n)
	write := w.rng.IntN(2) == 0
	if write {
		fill(w.rng, b)
	}
	p := w.through(base+off, n)
	var f mem.Fault
	if write {
		f = p.write(base+off-p.off, b)
	} else {
		f = p.read(base+off-p.off, b)
	}
	switch {
	case f.Kind == mem.FaultRevoked && w.revoked.Load():
		return false
	case !f.OK():
		w.t.Errorf("%d bytes at %d: %v", n, base+off, f)
		return false
	case write:
		copy(w.model[off:], b)
	case !bytes.Equal(b, w.model[off:][:n]):
		at := 0
		for b[at] == w.model[off:][at] {
			at++
		}
		w.t.Errorf("byte %d of %d at %d is %#x, should be %#x", at, n, base+off, b[at], w.model[off:][at])
		return false
	}
	return true
}

// copy copies some of the worker's bytes to others of its bytes, from one region to another or to
// itself.
func (w *worker) copy() bool {
	base := uint64(w.number) * 5 * piece
	n := 1 + w.rng.Uint64N(2*piece)
	from := w.rng.Uint64N(5*piece/2 - n)
	to := 5*piece/2 + w.rng.Uint64N(5*piece/2-n)
	if w.rng.IntN(2) == 0 {
		from, to = to, from
	}
	src, dst := w.through(base+from, n), w.through(base+to, n)
	f := insist(func() mem.Fault {
		f, _ := mem.Copy(dst.list(dst.Key(), base+to-dst.off, int(n)), src.list(src.Key(), base+from-src.off, int(n)), n, true)
		return f
	})
	switch {
	case f.Kind == mem.FaultRevoked && w.revoked.Load():
		return false
	case !f.OK():
		w.t.Errorf("copy of %d bytes from %d to %d: %v", n, base+from, base+to, f)
		return false
	}
	copy(w.model[to:][:n], w.model[from:][:n])
	return true
}

// through returns a region that has all of a range.
func (w *worker) through(off, n uint64) part {
	for {
		p := w.regions[w.rng.IntN(len(w.regions))]
		if off >= p.off && n <= p.n && off-p.off <= p.n-n {
			return p
		}
	}
}

// mover moves and evicts the memory until the channel is closed. Now and then an importer has
// pinned it.
func (c *crowd) mover(rng *rand.Rand, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		do := c.memory.Move
		if rng.IntN(3) == 0 {
			do = c.memory.Evict
		}
		switch err := do(context.Background()); {
		case err == nil:
			c.moves.Add(1)
		case !errors.Is(err, syscall.EBUSY):
			c.t.Error(err)
			return
		}
	}
}

// pinner has the memory pinned in turn: it registers it, looks at it, gives it up, and lets it move.
// It reads bytes that workers write, so it looks for poison alone.
func (c *crowd) pinner(stop <-chan struct{}, letMove func()) {
	b := make([]byte, c.size)
	for {
		select {
		case <-stop:
			return
		default:
		}
		backing, err := importer.Import(c.memory.Buffer(), importer.Config{Length: c.size, Pinned: true})
		if c.revoked.Load() && errors.Is(err, syscall.ENODEV) {
			return
		}
		if err != nil {
			c.t.Error(err)
			return
		}
		r, err := c.table.Register(regionOn(backing))
		if err != nil {
			c.t.Error(err)
			return
		}
		f := region{r, c.table, backing}.read(0, b[:1+c.size/7])
		if !f.OK() && (f.Kind != mem.FaultRevoked || !c.revoked.Load()) || f.OK() && bytes.IndexByte(b[:1+c.size/7], poison) >= 0 {
			c.t.Errorf("pinned memory: %v, or poison", f)
		}
		if err := r.Close(); err != nil {
			c.t.Error(err)
		}
		letMove()
	}
}

// Regions of a buffer are written and read while the buffer moves, is evicted and is pinned in
// turn: no byte is lost and no poison seen. At the end it is revoked, and accesses end with that.
func TestMovesUnderLoad(t *testing.T) {
	defer watchdog(t)()
	const workers = 4
	seed := memtest.Seed(t)
	c := newCrowd(t, workers)
	var all []*worker
	for i := range workers {
		all = append(all, c.worker(seed, i))
	}
	stop := make(chan struct{})
	var helpers sync.WaitGroup
	var pins atomic.Int64
	helpers.Go(func() { c.mover(rand.New(rand.NewPCG(seed, 100)), stop) })
	helpers.Go(func() {
		c.pinner(stop, func() {
			pins.Add(1)
			for was := c.moves.Load(); c.moves.Load() < was+2; runtime.Gosched() {
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	})
	var wg sync.WaitGroup
	for _, w := range all {
		wg.Go(func() {
			enough := int64(rounds(25))
			for n := int64(0); n < enough || c.moves.Load() < enough || pins.Load() < enough/8; n++ {
				if !w.step() {
					return
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	helpers.Wait()
	for _, w := range all {
		got := make([]byte, len(w.model))
		_, err := c.memory.ReadAt(got, int64(w.number*len(got)))
		check(t, err)
		if !bytes.Equal(got, w.model) {
			t.Errorf("the bytes of worker %d are not what it has written", w.number)
		}
	}
	t.Logf("%d moves, %d pins", c.memory.Moves(), pins.Load())

	// Now until it is revoked.
	c.revoked.Store(true)
	stop = make(chan struct{})
	helpers.Go(func() { c.pinner(stop, func() {}) })
	var steps atomic.Int64
	for _, w := range all {
		wg.Go(func() {
			for w.step() {
				steps.Add(1)
			}
		})
	}
	eventually(t, "all are at work", func() bool { return steps.Load() > 20*workers || t.Failed() })
	check(t, c.memory.Revoke(context.Background()))
	wg.Wait()
	close(stop)
	helpers.Wait()
	for _, p := range c.regions {
		p.fails(t, "revoked", mem.FaultRevoked)
		check(t, p.Close())
	}
	if n := c.table.Len(); n != 0 {
		t.Errorf("%d regions are left", n)
	}
	c.gone()
}

// gone closes the memory and looks whether importers are left.
func (c *crowd) gone() {
	c.t.Helper()
	b := c.memory.Buffer()
	r := b.Reservation()
	r.Lock()
	n := len(b.Attachments())
	r.Unlock()
	if n != 0 {
		c.t.Errorf("%d attachments are left", n)
	}
	check(c.t, c.memory.Close())
	if b.Get() {
		c.t.Error("a reference is left")
	}
}

// Regions are registered again, with other buffers, invalidated and closed, while the buffers move: nothing
// hangs, and no access sees poison or another buffer's bytes.
func TestReregUnderMoves(t *testing.T) {
	defer watchdog(t)()
	const length = 5 * 4096
	seed := memtest.Seed(t)
	table := newTable()
	var memory [2]*dmabuf.Memory
	for i := range memory {
		var err error
		memory[i], err = dmabuf.Alloc(dmabuf.MemoryConfig{Size: length, Segments: 1 + 2*i})
		check(t, err)
		_, err = memory[i].WriteAt(bytes.Repeat([]byte{byte(i + 1)}, length), 0)
		check(t, err)
	}
	stop := make(chan struct{})
	var helpers, wg sync.WaitGroup
	var done, seen atomic.Int64
	for i, m := range memory {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		c := &crowd{t: t, memory: m}
		helpers.Go(func() { c.mover(rng, stop) })
	}
	for i := range 3 {
		var current atomic.Pointer[mem.Region]
		rng := rand.New(rand.NewPCG(seed, 10+uint64(i)))
		// The owner of a region registers it, registers it again with either buffer, and closes it.
		wg.Go(func() {
			for n := range rounds(12) {
				backing, err := importer.Import(memory[rng.IntN(2)].Buffer(), importer.Config{Length: length, Pinned: rng.IntN(8) == 0})
				if err != nil {
					t.Error(err)
					return
				}
				r := current.Load()
				switch {
				case r == nil:
					r, err = table.Register(regionOn(backing))
					current.Store(r)
				default:
					err = r.Rereg(regionOn(backing))
				}
				if err != nil {
					t.Error(err)
					return
				}
				switch rng.IntN(5) {
				case 0: // on the same memory
					cfg := regionOn(backing)
					cfg.KeepKey = rng.IntN(2) == 0
					err = r.Rereg(cfg)
				case 1: // by a peer
					if f := insist(func() mem.Fault { return table.Invalidate(r.Key(), self) }); !f.OK() {
						t.Error(f)
					}
					fallthrough
				case 2:
					current.Store(nil)
					err = r.Close()
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n%16 == 0 { // let the accesses catch up, so that both are at work all the time
					was := seen.Load()
					eventually(t, "accesses go on", func() bool { return seen.Load() > was+2 || done.Load() > 0 || t.Failed() || current.Load() == nil })
				}
			}
			done.Add(1)
			if r := current.Load(); r != nil {
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			}
		})
		helpers.Go(func() {
			b := make([]byte, length-100)
			for {
				select {
				case <-stop:
					return
				default:
				}
				r := current.Load()
				if r == nil {
					continue
				}
				f := region{Region: r, table: table}.read(50, b)
				switch f.Kind {
				case mem.FaultKey, mem.FaultDead: // it is another, or none, by now
				case mem.FaultNone:
					seen.Add(1)
					// One copy ends in the memory where it began: the key changes with the memory.
					if b[0] != 1 && b[0] != 2 || bytes.Count(b, b[:1]) != len(b) {
						t.Errorf("the bytes are %#x and others", b[0])
						return
					}
				default:
					t.Error(f)
					return
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	helpers.Wait()
	t.Logf("%d and %d moves, %d accesses", memory[0].Moves(), memory[1].Moves(), seen.Load())
	if seen.Load() == 0 || memory[0].Moves() == 0 || memory[1].Moves() == 0 {
		t.Error("nothing has happened")
	}
	if n := table.Len(); n != 0 {
		t.Errorf("%d regions are left", n)
	}
	for _, m := range memory {
		(&crowd{t: t, memory: m}).gone()
	}
}

// Windows and indirect keys on regions of a buffer follow its moves, too.
func TestWindowsUnderMoves(t *testing.T) {
	defer watchdog(t)()
	seed := memtest.Seed(t)
	c := newCrowd(t, 1)
	access := ib.AccessLocalWrite | ib.AccessRemote | ib.AccessMWBind
	backing, err := importer.Import(c.memory.Buffer(), importer.Config{Length: c.size})
	check(t, err)
	cfg := regionOn(backing)
	cfg.Access = access
	parent, err := c.table.Register(cfg)
	check(t, err)
	w, err := c.table.AllocWindow(self.PD, ib.MWType1)
	check(t, err)
	key, f := bindWindow(c.table, w, parent, 1000, 9000)
	if !f.OK() {
		t.Fatal(f)
	}
	stop := make(chan struct{})
	var helpers sync.WaitGroup
	helpers.Go(func() { c.mover(rand.New(rand.NewPCG(seed, 1)), stop) })
	rng := rand.New(rand.NewPCG(seed, 2))
	whole := region{parent, c.table, backing}
	for round := range rounds(300) {
		b, got := make([]byte, 1+rng.IntN(8000)), make([]byte, 9000)
		fill(rng, b)
		off := uint64(rng.IntN(9000 - len(b)))
		f := insist(func() mem.Fault {
			f, _ := mem.Copy(whole.list(key, 1000+off, len(b)), &mem.List{Raw: [][]byte{b}}, uint64(len(b)), true)
			return f
		})
		if !f.OK() {
			t.Fatalf("round %d: %v", round, f)
		}
		if f := whole.read(1000, got); !f.OK() || !bytes.Equal(got[off:][:len(b)], b) || bytes.IndexByte(got, poison) >= 0 {
			t.Fatalf("round %d: %v, or other bytes", round, f)
		}
	}
	close(stop)
	helpers.Wait()
	if err := parent.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Close of a region with a window: %v", err)
	}
	check(t, c.memory.Revoke(context.Background()))
	f = insist(func() mem.Fault {
		f, _ := mem.Copy(&mem.List{Raw: [][]byte{make([]byte, 8)}}, whole.list(key, 1000, 8), 8, false)
		return f
	})
	if f.Kind != mem.FaultRevoked {
		t.Errorf("through the window to revoked memory: %v", f)
	}
	check(t, w.Close())
	check(t, parent.Close())
	for _, p := range c.regions {
		check(t, p.Close())
	}
	c.gone()
}

// bindWindow binds a window to a range of a region, and returns its key.
func bindWindow(table *mem.Table, w *mem.Window, parent *mem.Region, off, n uint64) (uint32, mem.Fault) {
	b := ib.MWBind{MW: w.Key(), RKey: w.NextKey(), LKey: parent.Key(), Addr: parent.IOVA() + off, Length: n, Access: ib.AccessRemoteRead | ib.AccessRemoteWrite}
	f := table.Bind(&b, true, self)
	return w.Key(), f
}

// Atomics through several regions and an indirect key add up while the buffer moves.
func TestAtomicsUnderMoves(t *testing.T) {
	defer watchdog(t)()
	seed := memtest.Seed(t)
	c := newCrowd(t, 1)
	first, second := c.regions[0], c.regions[1]
	m, err := c.table.CreateMKey(self.PD, 2)
	check(t, err)
	f := c.table.Configure(&mem.Layout{
		Key: m.Key(), Access: ib.AccessLocalWrite | ib.AccessRemote, Addr: iova, Repeat: 1,
		Pieces: []ib.Stride{{Addr: iova, Bytes: 8192, LKey: first.Key()}, {Addr: iova + 8192, Bytes: 8192, LKey: second.Key()}},
	}, self)
	if !f.OK() {
		t.Fatal(f)
	}
	keys := []uint32{first.Key(), second.Key(), m.Key()}
	words := []uint64{0, 4096 - 8, 8192 - 8, 8192, 12288}
	sums := make([]atomic.Uint64, len(words))
	stop := make(chan struct{})
	var helpers, wg sync.WaitGroup
	helpers.Go(func() { c.mover(rand.New(rand.NewPCG(seed, 1)), stop) })
	for i, key := range keys {
		rng := rand.New(rand.NewPCG(seed, 10+uint64(i)))
		wg.Go(func() {
			enough := rounds(15)
			for n := 0; n < 10*enough || c.moves.Load() < int64(enough); n++ {
				w, add := rng.IntN(len(words)), rng.Uint64N(1000)
				f := insist(func() mem.Fault {
					_, f := mem.Atomic(c.table, self, key, iova+words[w], mem.FetchAdd, 0, add)
					return f
				})
				if !f.OK() {
					t.Errorf("by key %d: %v", i, f)
					return
				}
				sums[w].Add(add)
			}
		})
	}
	wg.Wait()
	close(stop)
	helpers.Wait()
	for i, off := range words {
		b := make([]byte, 8)
		_, err := c.memory.ReadAt(b, int64(off))
		check(t, err)
		if got := binary.NativeEndian.Uint64(b); got != sums[i].Load() {
			t.Errorf("the word at %d is %d, should be %d", off, got, sums[i].Load())
		}
	}
	check(t, c.memory.Revoke(context.Background()))
	f = insist(func() mem.Fault {
		_, f := mem.Atomic(c.table, self, m.Key(), iova, mem.FetchAdd, 0, 1)
		return f
	})
	if f.Kind != mem.FaultRevoked {
		t.Errorf("through the indirect key to revoked memory: %v", f)
	}
	check(t, m.Close())
	for _, p := range c.regions {
		check(t, p.Close())
	}
	c.gone()
}
