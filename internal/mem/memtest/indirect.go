package memtest

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// The suite through indirect keys: every region that a test registers is a key that
// stands on regions of the kind under test, cut and mixed by its shape. Between and
// around the pieces lie bytes that stay as they are, whatever a test does.

// Shape is how an indirect key is made of regions.
type Shape int

const (
	List    Shape = iota + 1 // pieces of several regions, in any order
	Strided                  // one or two regions, with gaps
	Nested                   // a list of strided keys, lists and pieces
)

// indirect is what stands behind a region of the suite that is an indirect key.
type indirect struct {
	*mem.MKey
	layout mem.Layout
	keys   []*mem.MKey // those that it stands on, deepest first
	parts  []*part
}

// part is a region under an indirect key.
type part struct {
	*mem.Region
	Memory
	watch  *watched
	size   uint64
	used   []bool // which bytes the key shows
	before []byte
}

// run is where bytes of an indirect key lie.
type run struct {
	part *part
	off  uint64
	n    uint64
}

func throughIndirect(name string) bool {
	switch name {
	case "Invalidate", "CloseRace": // indirect keys have their own
		return false
	}
	return true
}

var indirectTests = []test{
	{"IndirectInvalidate", testIndirectInvalidate},
	{"IndirectBusy", testIndirectBusy},
	{"IndirectRefused", testIndirectRefused},
	{"IndirectInPlace", testIndirectInPlace},
	{"IndirectSheltered", testIndirectSheltered},
	{"IndirectRace", testIndirectRace},
}

// cut is the length that pieces are multiples of: atomics find aligned words, and
// runs are short enough that there are many.
const cut = 64

// registerIndirect makes an indirect key of n bytes.
func (e *env) registerIndirect(n uint64, cfg mem.RegionConfig) *region {
	e.t.Helper()
	if cfg.IOVA == 0 {
		cfg.IOVA = iova
	}
	if cfg.PD == 0 {
		cfg.PD = domain
	}
	x := &indirect{}
	pieces, repeat, runs := e.shape(x, n, cfg)
	x.MKey = e.mkey(cfg.PD, len(pieces))
	x.layout = mem.Layout{Key: x.Key(), Access: cfg.Access, Addr: cfg.IOVA, Repeat: repeat, Pieces: pieces}
	who := self
	who.PD = cfg.PD
	if f := e.table.Configure(&x.layout, who); !f.OK() {
		e.t.Fatalf("configuring a key of %d pieces: %v", len(pieces), f)
	}
	for _, p := range x.parts {
		p.seal(e.rng)
	}
	r := &region{Region: e.table.Lookup(x.Key()), watch: x.parts[0].watch, indirect: x}
	r.Memory = Memory{Backing: r.Region.Backing()}
	starts := make([]uint64, len(runs)) // where each begins in the key
	for i := 1; i < len(runs); i++ {
		starts[i] = starts[i-1] + runs[i-1].n
	}
	each := func(off uint64, b []byte, f func(p *part, off uint64, b []byte)) {
		for i := sort.Search(len(starts), func(i int) bool { return starts[i] > off }) - 1; len(b) > 0; i++ {
			in := off - starts[i]
			k := min(runs[i].n-in, uint64(len(b)))
			f(runs[i].part, runs[i].off+in, b[:k])
			b, off = b[k:], off+k
		}
	}
	r.Read = func(off uint64, b []byte) { each(off, b, func(p *part, off uint64, b []byte) { p.Read(off, b) }) }
	r.Write = func(off uint64, b []byte) { each(off, b, func(p *part, off uint64, b []byte) { p.Write(off, b) }) }
	if got := r.Length(); got != n {
		e.t.Fatalf("the key has %d bytes, should have %d", got, n)
	}
	e.regions = append(e.regions, r)
	return r
}

func (e *env) mkey(pd uint32, pieces int) *mem.MKey {
	e.t.Helper()
	m, err := e.table.CreateMKey(pd, max(pieces, 1))
	if err != nil {
		e.t.Fatal(err)
	}
	return m
}

// shape makes what the key stands on.
func (e *env) shape(x *indirect, n uint64, cfg mem.RegionConfig) (pieces []ib.Stride, repeat uint64, runs []run) {
	switch e.mk.Shape {
	case Strided:
		return e.strided(x, n, cfg)
	case Nested:
		return e.nested(x, n, cfg)
	}
	pieces, runs = e.listed(x, n, cfg)
	return pieces, 1, runs
}

// part registers a region for a key to stand on.
func (e *env) part(x *indirect, size uint64, cfg mem.RegionConfig) *part {
	e.t.Helper()
	cfg.Access &= ib.AccessLocalWrite // nothing more is needed, whatever the key grants
	cfg.IOVA, cfg.Invalidatable = iova+1<<32*uint64(len(x.parts)), true
	r, m, w := e.registerRegion(size, cfg)
	p := &part{Region: r, Memory: m, watch: w, size: size, used: make([]bool, size)}
	x.parts = append(x.parts, p)
	return p
}

func (p *part) stride(off, n, skip uint64) ib.Stride {
	return ib.Stride{Addr: p.IOVA() + off, Bytes: n, Skip: skip, LKey: p.Key()}
}

// use notes that the key shows bytes.
func (p *part) use(off, n uint64) run {
	for i := range n {
		p.used[off+i] = true
	}
	return run{p, off, n}
}

// seal fills what the key does not show.
func (p *part) seal(rng *rand.Rand) {
	p.before = make([]byte, p.size)
	for i := range p.before {
		if !p.used[i] {
			p.before[i] = byte(rng.Uint32())
		}
	}
	p.Write(0, p.before)
}

// listed cuts n bytes into pieces of two regions, which lie there in another order.
func (e *env) listed(x *indirect, n uint64, cfg mem.RegionConfig) (pieces []ib.Stride, runs []run) {
	var sizes []uint64
	for left := n; left > 0; {
		k := min(left, cut*(1+e.rng.Uint64N(20)))
		if left > 1<<16 {
			k = min(left, 1<<14)
		}
		sizes = append(sizes, k)
		left -= k
	}
	place := make([]run, len(sizes))
	room := [2]uint64{cut, cut}
	for _, i := range e.rng.Perm(len(sizes)) {
		k := e.rng.IntN(2)
		place[i] = run{off: room[k], n: uint64(k)}
		room[k] += (sizes[i]+cut-1)/cut*cut + cut
	}
	parts := [2]*part{e.part(x, room[0], cfg), e.part(x, room[1], cfg)}
	for i, k := range sizes {
		p := parts[place[i].n]
		pieces = append(pieces, p.stride(place[i].off, k, 0))
		runs = append(runs, p.use(place[i].off, k))
	}
	return pieces, runs
}

// strided spreads n bytes over one region or, if they can be shared out evenly, two.
func (e *env) strided(x *indirect, n uint64, cfg mem.RegionConfig) (pieces []ib.Stride, repeat uint64, runs []run) {
	element := uint64(cut)
	for n%element != 0 {
		element /= 2
	}
	sources := uint64(1)
	if n%(2*element) == 0 {
		sources = 2
	}
	repeat = n / element / sources
	var parts []*part
	for i := range sources {
		skip := element * (1 + i)
		p := e.part(x, element+repeat*(element+skip), cfg)
		parts = append(parts, p)
		pieces = append(pieces, p.stride(element, element, skip))
	}
	for round := range repeat {
		for i, p := range parts {
			runs = append(runs, p.use(element+round*(pieces[i].Bytes+pieces[i].Skip), element))
		}
	}
	return pieces, repeat, runs
}

// nested makes a list of a strided key, a list and a piece, two deep.
func (e *env) nested(x *indirect, n uint64, cfg mem.RegionConfig) (pieces []ib.Stride, repeat uint64, runs []run) {
	third := n / 3 / cut * cut
	who := self
	who.PD = cfg.PD
	add := func(n uint64, make func(x *indirect, n uint64, cfg mem.RegionConfig) ([]ib.Stride, uint64, []run)) {
		if n == 0 {
			return
		}
		strides, repeat, more := make(x, n, cfg)
		m := e.mkey(cfg.PD, len(strides))
		if f := e.table.Configure(&mem.Layout{Key: m.Key(), Access: cfg.Access & ib.AccessLocalWrite, Repeat: repeat, Pieces: strides}, who); !f.OK() {
			e.t.Fatal(f)
		}
		x.keys = append(x.keys, m)
		// In two pieces, the second of which begins in the middle.
		half := n / 2 / 8 * 8
		pieces = append(pieces, ib.Stride{Bytes: half, LKey: m.Key()}, ib.Stride{Addr: half, Bytes: n - half, LKey: m.Key()})
		runs = append(runs, more...)
	}
	add(third, e.strided)
	add(third, func(x *indirect, n uint64, cfg mem.RegionConfig) ([]ib.Stride, uint64, []run) {
		list, runs := e.listed(x, n, cfg)
		return list, 1, runs
	})
	rest := n - 2*third
	p := e.part(x, rest+2*cut, cfg)
	return append(pieces, p.stride(cut, rest, 0)), 1, append(runs, p.use(cut, rest))
}

// close closes the key and what it stands on.
func (x *indirect) close() error {
	err := x.Close()
	for _, k := range x.keys {
		err = errors.Join(err, k.Close())
	}
	for _, p := range x.parts {
		err = errors.Join(err, p.Region.Close())
	}
	return err
}

// check looks at the regions when all is closed: between the pieces nothing has
// changed.
func (x *indirect) check(t *testing.T) {
	t.Helper()
	for _, p := range x.parts {
		now := make([]byte, p.size)
		p.Read(0, now)
		for i := range now {
			if !p.used[i] && now[i] != p.before[i] {
				t.Errorf("byte %d, which the key does not show, has changed", i)
				break
			}
		}
		if p.watch.closes != 1 {
			t.Errorf("the backing was closed %d times", p.watch.closes)
		}
		if p.Free != nil {
			p.Free()
		}
	}
}

// again configures the key as it was, after it was invalidated.
func (e *env) again(r *region) mem.Fault {
	return insist(func() mem.Fault { return e.table.Configure(&r.indirect.layout, self) })
}

// testIndirectInvalidate checks who may invalidate an indirect key, what is left of
// it, and that it can be configured again, not before.
func testIndirectInvalidate(t *testing.T, e *env) {
	r := e.all(page)
	for range 2 {
		e.invalidate(t, r, func() {
			if r.Alive() {
				if f := e.again(r); f.Kind != mem.FaultNotFree {
					t.Errorf("configured again while it is in use: %v", f)
				}
			}
		})
		if f := e.again(r); !f.OK() || !r.Alive() {
			t.Fatalf("configured again: %v", f)
		}
	}
	model := e.fill(r)
	r.want(t, model)
}

// testIndirectBusy: what a configured key stands on can be neither closed, changed
// nor invalidated; when it is free it can.
func testIndirectBusy(t *testing.T, e *env) {
	r := e.all(page)
	x := r.indirect
	tryAll := func(busy bool) {
		for _, k := range x.keys {
			if busy != errors.Is(k.Close(), syscall.EBUSY) {
				t.Fatalf("closing a key that another stands on: busy should be %v", busy)
			}
			if f := e.kill(k.Key(), self); busy && f.Kind != mem.FaultNotInvalidatable {
				t.Fatalf("invalidating a key that another stands on: %v", f)
			}
		}
		for _, p := range x.parts {
			if !busy || !slices.Contains(p.used, true) {
				continue
			}
			cfg, _ := p.Snapshot()
			var state *ib.ReregError
			if err := p.Rereg(cfg); !errors.Is(err, syscall.EBUSY) || !errors.As(err, &state) || state.State != ib.ReregOldValid {
				t.Fatalf("registering again: %v", err)
			}
			if f := e.kill(p.Key(), self); f.Kind != mem.FaultNotInvalidatable {
				t.Fatalf("invalidating: %v", f)
			}
			if err := p.Region.Close(); !errors.Is(err, syscall.EBUSY) {
				t.Fatalf("closing: %v", err)
			}
		}
	}
	tryAll(true)
	if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultNone {
		t.Fatalf("access after that: %v", got)
	}
	if f := e.kill(r.Key(), self); !f.OK() {
		t.Fatal(f)
	}
	tryAll(false)
	for _, p := range x.parts {
		if f := e.kill(p.Key(), self); !f.OK() {
			t.Fatalf("a region that nobody stands on any more: %v", f)
		}
	}
	if f := e.again(r); f.Kind != mem.FaultDead && f.Kind != mem.FaultKey {
		t.Errorf("configured on regions that are gone: %v", f)
	}
}

// testIndirectRefused configures a free key in ways that cannot be: it stays free,
// and borrows nothing.
func testIndirectRefused(t *testing.T, e *env) {
	r := e.all(page)
	x := r.indirect
	if f := e.kill(r.Key(), self); !f.OK() {
		t.Fatal(f)
	}
	good := x.layout
	for _, c := range []struct {
		name   string
		change func(l *mem.Layout, last *ib.Stride)
		who    mem.Actor
		want   mem.FaultKind
	}{
		{"no pieces", func(l *mem.Layout, _ *ib.Stride) { l.Pieces = nil }, self, mem.FaultLayout},
		{"no rounds", func(l *mem.Layout, _ *ib.Stride) { l.Repeat = 0 }, self, mem.FaultLayout},
		{"too many pieces", func(l *mem.Layout, _ *ib.Stride) { l.Pieces = append(l.Pieces, l.Pieces[0]) }, self, mem.FaultLayout},
		{"nothing but empty pieces", func(l *mem.Layout, _ *ib.Stride) { l.Pieces = make([]ib.Stride, 1) }, self, mem.FaultLayout},
		{"an address that wraps", func(l *mem.Layout, _ *ib.Stride) { l.Addr = ^uint64(0) - 7 }, self, mem.FaultLayout},
		{"a piece too long", func(_ *mem.Layout, p *ib.Stride) { p.Bytes += 1 << 20 }, self, mem.FaultBounds},
		{"a piece that wraps", func(_ *mem.Layout, p *ib.Stride) { p.Bytes, p.Skip = 1<<63, 1<<63 }, self, mem.FaultBounds},
		{"a piece before the start", func(_ *mem.Layout, p *ib.Stride) { p.Addr -= 1 << 31 }, self, mem.FaultBounds},
		{"rounds beyond the end", func(l *mem.Layout, _ *ib.Stride) { l.Repeat += page }, self, mem.FaultBounds},
		{"rounds beyond everything", func(l *mem.Layout, _ *ib.Stride) { l.Repeat = ^uint64(0) }, self, mem.FaultBounds},
		{"an unknown key", func(_ *mem.Layout, p *ib.Stride) { p.LKey ^= 0x80 }, self, mem.FaultKey},
		{"itself", func(l *mem.Layout, p *ib.Stride) { *p = ib.Stride{Addr: l.Addr, Bytes: 8, LKey: l.Key} }, self, mem.FaultDead},
		{"another's key", func(*mem.Layout, *ib.Stride) {}, mem.Actor{PD: domain + 1}, mem.FaultDomain},
		{"windows", func(l *mem.Layout, _ *ib.Stride) { l.Access |= ib.AccessMWBind }, self, mem.FaultAccess},
		{"flush that the pieces do not grant", func(l *mem.Layout, _ *ib.Stride) { l.Access |= ib.AccessFlushGlobal }, self, mem.FaultAccess},
		{"no such key", func(l *mem.Layout, _ *ib.Stride) { l.Key ^= 1 }, self, mem.FaultKey},
		{"a region's key", func(l *mem.Layout, _ *ib.Stride) { l.Key = x.parts[0].Key() }, self, mem.FaultKey},
	} {
		l := good
		l.Pieces = append([]ib.Stride(nil), good.Pieces...)
		c.change(&l, &l.Pieces[max(len(l.Pieces), 1)-1])
		if f := e.table.Configure(&l, c.who); f.Kind != c.want {
			t.Errorf("%s: %v, should be %v", c.name, f, c.want)
		}
		if r.Alive() {
			t.Fatalf("%s: the key is in use", c.name)
		}
	}
	readOnly := e.part(x, page, mem.RegionConfig{PD: domain})
	readOnly.seal(e.rng)
	l := mem.Layout{Key: r.Key(), Access: ib.AccessLocalWrite, Repeat: 1, Pieces: []ib.Stride{readOnly.stride(0, 8, 0)}}
	if f := e.table.Configure(&l, self); f.Kind != mem.FaultAccess {
		t.Errorf("writing to what may not be written: %v", f)
	}
	e.nothingBorrowed(t, x)
}

// nothingBorrowed checks that what a key stood on is free again: its keys can be
// invalidated, its regions changed.
func (e *env) nothingBorrowed(t *testing.T, x *indirect) {
	t.Helper()
	for _, k := range x.keys {
		if f := e.kill(k.Key(), self); !f.OK() {
			t.Errorf("a key below: %v", f)
		}
	}
	for _, p := range x.parts {
		cfg, _ := p.Snapshot()
		if err := p.Rereg(cfg); err != nil {
			t.Errorf("a region: %v", err)
		}
	}
}

// testIndirectInPlace configures a key that is configured already: what is not kept
// becomes another, and what it stood on before is given back.
func testIndirectInPlace(t *testing.T, e *env) {
	r := e.all(page)
	x := r.indirect
	long, short := r.at(0, page), r.at(0, 8)
	whole := x.layout
	first := mem.Layout{Key: r.Key(), Access: ib.AccessRemoteRead, Addr: iova, Repeat: 1, Pieces: []ib.Stride{{Addr: x.layout.Pieces[0].Addr, Bytes: 8, LKey: x.layout.Pieces[0].LKey}}}
	with := func(l mem.Layout, update ib.MKeyUpdate) *mem.Layout {
		if l.Update = ib.MKeyInPlace | update; update&ib.MKeyKeepLayout != 0 {
			l.Pieces, l.Repeat = nil, 0
		}
		return &l
	}
	bad := first
	bad.Pieces = []ib.Stride{{Addr: first.Pieces[0].Addr, Bytes: 8, LKey: r.Key()}}
	for _, c := range []struct {
		name   string
		layout *mem.Layout
		fault  mem.FaultKind // of the configuration, of a write of all bytes and of a read of some
		write  mem.FaultKind
		read   mem.FaultKind
	}{
		{"other rights", with(first, ib.MKeyKeepLayout), mem.FaultNone, mem.FaultAccess, mem.FaultNone},
		{"the rights of before", with(whole, ib.MKeyKeepLayout), mem.FaultNone, mem.FaultNone, mem.FaultNone},
		{"other bytes", with(first, ib.MKeyKeepAccess), mem.FaultNone, mem.FaultBounds, mem.FaultNone},
		{"nothing else", with(first, ib.MKeyKeepAccess|ib.MKeyKeepLayout), mem.FaultNone, mem.FaultBounds, mem.FaultNone},
		{"all", with(whole, 0), mem.FaultNone, mem.FaultNone, mem.FaultNone},
		{"writing for peers alone", with(mem.Layout{Key: r.Key(), Access: ib.AccessRemoteWrite}, ib.MKeyKeepLayout), mem.FaultNone, mem.FaultNone, mem.FaultAccess},
		{"itself", with(bad, 0), mem.FaultDead, mem.FaultDead, mem.FaultDead},
		{"rights, when it is free", with(whole, ib.MKeyKeepLayout), mem.FaultNone, mem.FaultBounds, mem.FaultBounds},
		{"and then bytes", with(whole, ib.MKeyKeepAccess), mem.FaultNone, mem.FaultNone, mem.FaultNone},
		{"rights that there are not", with(mem.Layout{Key: r.Key(), Access: ib.AccessMWBind}, ib.MKeyKeepLayout), mem.FaultAccess, mem.FaultDead, mem.FaultDead},
		{"bytes, when it is free", with(whole, ib.MKeyKeepAccess), mem.FaultNone, mem.FaultAccess, mem.FaultAccess},
		{"rights that the pieces do not grant", with(mem.Layout{Key: r.Key(), Access: ib.AccessFlushGlobal}, ib.MKeyKeepLayout), mem.FaultAccess, mem.FaultDead, mem.FaultDead},
	} {
		if f := e.table.Configure(c.layout, self); f.Kind != c.fault {
			t.Fatalf("%s: %v, should be %v", c.name, f, c.fault)
		}
		if got := e.access(long, page, ib.AccessRemoteWrite, self); got != c.write {
			t.Errorf("%s: writing all: %v, should be %v", c.name, got, c.write)
		}
		if got := e.access(short, 8, ib.AccessRemoteRead, self); got != c.read {
			t.Errorf("%s: reading: %v, should be %v", c.name, got, c.read)
		}
	}
	e.nothingBorrowed(t, x)
}

// testIndirectSheltered: a key that another stands on cannot be changed in place, and
// one that is sheltered not be invalidated by peers.
func testIndirectSheltered(t *testing.T, e *env) {
	r := e.all(page)
	above := e.mkey(domain, 1)
	above.Shelter()
	l := mem.Layout{Key: above.Key(), Repeat: 1, Pieces: []ib.Stride{{Addr: iova, Bytes: 8, LKey: r.Key()}}}
	if f := e.table.Configure(&l, self); !f.OK() {
		t.Fatal(f)
	}
	under := mem.Layout{Key: r.Key(), Update: ib.MKeyInPlace | ib.MKeyKeepLayout}
	if f := e.table.Configure(&under, self); f.Kind != mem.FaultNotInvalidatable {
		t.Errorf("changing a key that another stands on: %v", f)
	}
	if f := e.kill(above.Key(), self); f.Kind != mem.FaultNotInvalidatable || above.Free() {
		t.Errorf("a peer invalidates a sheltered key: %v", f)
	}
	if got := e.access(ib.SGE{Length: 8, LKey: above.Key()}, 8, 0, self); got != mem.FaultNone {
		t.Errorf("access after that: %v", got)
	}
	if f := e.table.InvalidateOwn(above.Key(), self); !f.OK() || !above.Free() {
		t.Errorf("the program invalidates it: %v", f)
	}
	if f := e.table.Configure(&under, self); !f.OK() {
		t.Errorf("changing a key that nobody stands on any more: %v", f)
	}
	if err := above.Close(); err != nil {
		t.Error(err)
	}
}

// testIndirectRace configures and invalidates a key, many times, while somebody uses
// it: a section never is open on a key that is free.
func testIndirectRace(t *testing.T, e *env) {
	const rounds, enough = 20_000, 100 * time.Millisecond
	r := e.all(64)
	var epoch atomic.Int64 // odd: the key is free
	var opened, late atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			_, release, f := Hold(e.table, r.Key(), iova, 8, ib.AccessRemoteWrite, self)
			if !f.OK() {
				if !dead(f.Kind) {
					t.Errorf("%v", f)
					return
				}
				runtime.Gosched()
				continue
			}
			was := epoch.Load()
			for range 50 {
				if now := epoch.Load(); now != was || now%2 != 0 {
					late.Add(1)
					break
				}
			}
			release()
			if opened.Add(1)%16 == 0 {
				runtime.Gosched() // there may be one core only
			}
		}
	})
	start := time.Now()
	for round := 0; round < 200 || round < rounds && time.Since(start) < enough; round++ {
		before := opened.Load()
		for opened.Load() < before+3 {
			runtime.Gosched()
		}
		if f := e.kill(r.Key(), self); !f.OK() {
			t.Fatal(f)
		}
		epoch.Add(1)
		runtime.Gosched()
		epoch.Add(1)
		if f := e.again(r); !f.OK() {
			t.Fatal(f)
		}
	}
	stop.Store(true)
	wg.Wait()
	if late.Load() != 0 {
		t.Errorf("%d of %d sections were open on a key that was free", late.Load(), opened.Load())
	}
}
