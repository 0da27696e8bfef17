// Package memtest is the conformance suite of memory: every kind of memory
// passes it. A new kind names a constructor and calls Run.
//
// The suite works through package mem as queue pairs do, with keys and lists,
// and looks at the bytes as the owner of the memory does. Random choices come
// from a seed that is printed and can be given in VERBENA_SEED.
package memtest

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Constructor makes memory of one kind.
type Constructor struct {
	Name string
	// New makes n bytes of memory, all zero, that can be registered with the
	// access. It fails the test if it cannot.
	New func(tb testing.TB, n uint64, access ib.Access) Memory
	// Access is what regions of the kind are registered with besides: on demand.
	Access ib.Access
	// NoAtomics says that the kind refuses atomics (with FaultAccess).
	NoAtomics bool
	// Discards says that the kind forgets what is written: it reads as zeros.
	Discards bool
	// Window, if not 0, has everything done through windows of that type on
	// the memory, and not by its regions' own keys (windows.go).
	Window ib.MWType
	// Shape, if not 0, has everything done through indirect keys of that shape that
	// stand on the memory (indirect.go).
	Shape Shape
}

// Memory is a piece of memory under test.
type Memory struct {
	Backing mem.Backing
	// Bytes is the memory as the CPU sees it; nil if it does not.
	Bytes []byte
	// Read and Write access the memory as its owner; nil means by Bytes.
	Read, Write func(off uint64, b []byte)
	// Move moves the memory, which is suspended, to other pages, and leaves poison in
	// those that it gives up, for as long as they are there; nil means that the owner
	// writes poison and then the old bytes again.
	Move func(poison byte)
	// Free gives up what New made, after the backing is closed; may be nil.
	Free func()
}

// Hold opens a read section on n bytes of the region with a key, until release is called.
// bytes returns the first of them that lie together; under an indirect key it opens the
// section on the leaf that they belong to. After a fault nothing is open.
//
// Only tests hold sections, so the tests of package mem have the function and set it.
var Hold func(t *mem.Table, key uint32, addr, n uint64, acc ib.Access, who mem.Actor) (bytes func() ([]byte, mem.Fault), release func(), f mem.Fault)

// test is one test of the suite.
type test struct {
	name string
	run  func(t *testing.T, e *env)
}

// Run runs the suite.
func Run(t *testing.T, mk Constructor) {
	tests := []test{
		{"Lengths", testLengths},
		{"Pieces", testPieces},
		{"Quanta", testQuanta},
		{"Gather", testGather},
		{"Rights", testRights},
		{"Domain", testDomain},
		{"Bounds", testBounds},
		{"ZeroBased", testZeroBased},
		{"ShortList", testShortList},
		{"Counters", testCounters},
		{"Atomics", testAtomics},
		{"AtomicsTogether", testAtomicsTogether},
		{"Tail", testTail},
		{"CloseWaits", testCloseWaits},
		{"CloseRevokes", testCloseRevokes},
		{"CloseRace", testCloseRace},
		{"Invalidate", testInvalidate},
		{"InvalidateRevokes", testInvalidateRevokes},
		{"AfterClose", testAfterClose},
		{"Suspended", testSuspended},
		{"SuspendWaits", testSuspendWaits},
		{"Moves", testMoves},
		{"Revoke", testRevoke},
	}
	if mk.Discards {
		tests = slices.DeleteFunc(tests, func(test test) bool { return !discarding[test.name] })
	}
	if mk.Window != 0 {
		tests = slices.DeleteFunc(tests, func(test test) bool { return !throughWindows(test.name, mk.Window) })
		tests = append(tests, windowTests...)
	}
	if mk.Shape != 0 {
		tests = slices.DeleteFunc(tests, func(test test) bool { return !throughIndirect(test.name) })
		tests = append(tests, indirectTests...)
	}
	for _, test := range tests {
		t.Run(mk.Name+"/"+test.name, func(t *testing.T) {
			e := newEnv(t, mk)
			test.run(t, e)
			e.finish()
		})
	}
}

// discarding are the tests that make sense for memory that forgets what is written.
var discarding = map[string]bool{
	"Rights": true, "Bounds": true, "ShortList": true, "CloseWaits": true, "CloseRevokes": true, "CloseRace": true,
	"Invalidate": true, "InvalidateRevokes": true, "AfterClose": true,
	"Suspended": true, "SuspendWaits": true, "Moves": true, "Revoke": true,
}

// Seed returns the seed of a test and prints it.
func Seed(tb testing.TB) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 0, 64); err != nil {
			tb.Fatal(err)
		}
	}
	tb.Logf("VERBENA_SEED=%#x", seed)
	return seed
}

// domain is the protection domain of the suite's regions.
const domain = 7

var self = mem.Actor{PD: domain, QPN: 0x123}

// allAccess grants everything that can be granted.
const allAccess = ib.AccessLocalWrite | ib.AccessRemote

// env is what a test of the suite works with.
type env struct {
	t       *testing.T
	mk      Constructor
	rng     *rand.Rand
	table   *mem.Table
	regions []*region
}

func newEnv(t *testing.T, mk Constructor) *env {
	seed := Seed(t)
	return &env{
		t:     t,
		mk:    mk,
		rng:   rand.New(rand.NewPCG(seed, 0)),
		table: mem.NewTable(mem.TableConfig{Seed: seed}),
	}
}

// region is registered memory under test.
type region struct {
	*mem.Region
	Memory
	watch    *watched
	window   *window   // not nil: Region is the window's key
	indirect *indirect // not nil: Region is the indirect key
}

// watched is a backing whose calls are watched.
type watched struct {
	mem.Backing
	closes  int
	longest atomic.Uint64 // what a call of Run asked for at most
}

func (c *watched) Close() error { c.closes++; return c.Backing.Close() }

// Bind tells a backing that moves of its region.
func (c *watched) Bind(r *mem.Region) {
	if m, ok := c.Backing.(mem.Movable); ok {
		m.Bind(r)
	}
}

// Run checks that the backing keeps its promise.
func (c *watched) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	for {
		if was := c.longest.Load(); n <= was || c.longest.CompareAndSwap(was, n) {
			break
		}
	}
	b, kind := c.Backing.Run(off, n, acc)
	if kind == mem.FaultNone && (len(b) == 0 || uint64(len(b)) > n) {
		panic("memtest: Run returned a wrong number of bytes")
	}
	return b, kind
}

// pager are the methods of a backing whose bytes come and go, or may have to be waited for.
type pager interface {
	Gone(off, n uint64, acc ib.Access) mem.FaultKind
	Await(off, n uint64, acc ib.Access) mem.FaultKind
}

// watchedPager is watched for such a backing.
type watchedPager struct {
	*watched
	pager
}

// storer is the method of a backing whose bytes are another process's.
type storer interface {
	Store(off uint64, b []byte, last bool) mem.FaultKind
	Done(b []byte)
}

// watchedStorer is watched for such a backing.
type watchedStorer struct {
	*watched
	storer
}

// watchedStoringPager is watched for a backing that is both.
type watchedStoringPager struct {
	*watched
	storer
	pager
}

// placer is the method of such a backing whose bytes have an address all the same.
type placer interface {
	InPlace(off, n uint64) ([]byte, *mem.Host, mem.FaultKind)
}

// watchedPlacer is watched for such a backing.
type watchedPlacer struct {
	watchedStorer
	placer
}

// watchedEngine is watched for memory that the CPU does not address.
type watchedEngine struct {
	*watched
	mem.Engine
}

func (w watchedEngine) Kind() mem.Kind { return w.watched.Kind() }
func (w watchedEngine) Len() uint64    { return w.watched.Len() }
func (w watchedEngine) Close() error   { return w.watched.Close() }
func (w watchedEngine) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	return w.watched.Run(off, n, acc)
}

// Reaches forwards what the engine says about itself.
func (w watchedEngine) Reaches(b []byte) bool {
	r, ok := w.Engine.(interface{ Reaches(b []byte) bool })
	return ok && r.Reaches(b)
}

// Begin lets the engine see its own memory.
func (w watchedEngine) Begin(op *mem.Op) {
	if from, ok := op.From.(watchedEngine); ok {
		op.From = from.Engine
	}
	w.Engine.Begin(op)
}

// Staged forwards what the backing says about itself.
func (c *watched) Staged() bool {
	s, ok := c.Backing.(interface{ Staged() bool })
	return !ok || s.Staged()
}

// Pinned forwards whether the memory may be remapped.
func (c *watched) Pinned() *mem.Host {
	if h, ok := c.Backing.(interface{ Pinned() *mem.Host }); ok {
		return h.Pinned()
	}
	return nil
}

// Solid forwards what the backing says about itself.
func (c *watched) NeverFaults() bool {
	s, ok := c.Backing.(interface{ NeverFaults() bool })
	return ok && s.NeverFaults()
}

// iova is where regions begin in requests: no kind of memory may care. It is
// aligned to pages, as atomics want the request and the memory to agree.
const iova = 0x5a5a_0000_0000_0000

// register makes a region of n bytes. The configuration's backing and length
// are filled in, and domain and address if they are zero.
func (e *env) register(n uint64, cfg mem.RegionConfig) *region {
	e.t.Helper()
	if e.mk.Window != 0 {
		return e.registerWindow(n, cfg)
	}
	if e.mk.Shape != 0 {
		return e.registerIndirect(n, cfg)
	}
	r, m, c := e.registerRegion(n, cfg)
	reg := &region{Region: r, Memory: m, watch: c}
	e.regions = append(e.regions, reg)
	return reg
}

func (e *env) registerRegion(n uint64, cfg mem.RegionConfig) (*mem.Region, Memory, *watched) {
	e.t.Helper()
	m := e.mk.New(e.t, n, cfg.Access|e.mk.Access)
	if m.Read == nil {
		m.Read = func(off uint64, b []byte) { copy(b, m.Bytes[off:]) }
		m.Write = func(off uint64, b []byte) { copy(m.Bytes[off:], b) }
	}
	c := &watched{Backing: m.Backing}
	cfg.Backing, cfg.Length = c, n
	if p, ok := m.Backing.(pager); ok {
		cfg.Backing = watchedPager{c, p}
	}
	if s, ok := m.Backing.(storer); ok {
		cfg.Backing = watchedStorer{c, s}
		if p, pages := m.Backing.(pager); pages {
			cfg.Backing = watchedStoringPager{c, s, p}
		}
		if _, in := m.Backing.(placer); in {
			cfg.Backing = watchedPlacer{watchedStorer{c, s}, m.Backing.(placer)}
		}
	}
	if g, ok := m.Backing.(mem.Engine); ok {
		cfg.Backing = watchedEngine{c, g}
	}
	cfg.Access |= e.mk.Access
	if cfg.PD == 0 {
		cfg.PD = domain
	}
	if cfg.IOVA == 0 {
		cfg.IOVA = iova
	}
	r, err := e.table.Register(cfg)
	if err != nil {
		e.t.Fatal(err)
	}
	return r, m, c
}

// all registers n bytes with all rights.
func (e *env) all(n uint64) *region {
	e.t.Helper()
	return e.register(n, mem.RegionConfig{Access: allAccess})
}

// finish closes everything and looks for what is left.
func (e *env) finish() {
	e.t.Helper()
	for _, r := range e.regions {
		r.checkMargins(e.t)
		if err := r.Close(); err != nil {
			e.t.Errorf("Close: %v", err)
		}
		if err := r.Close(); err != nil {
			e.t.Errorf("second Close: %v", err)
		}
		if r.indirect != nil {
			r.indirect.check(e.t)
			continue
		}
		if r.watch.closes != 1 {
			e.t.Errorf("the backing was closed %d times", r.watch.closes)
		}
		if r.Free != nil {
			r.Free()
		}
	}
	if n := e.table.Len(); n != 0 {
		e.t.Errorf("%d regions are left in the table", n)
	}
	if n := e.table.StaleFaults(); n != 0 {
		e.t.Errorf("%d stale faults", n)
	}
}

// randomise fills b with random bytes, and repeat with one: by words and by copies, since
// the race detector notes every single store.
func randomise(rng *rand.Rand, b []byte) {
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, rng.Uint64())
	}
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
}

func repeat(b []byte, value byte) {
	b[0] = value
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// fill writes random bytes to all of a region as its owner and returns them.
func (e *env) fill(r *region) []byte {
	b := make([]byte, r.Length())
	randomise(e.rng, b)
	r.Write(0, b)
	return b
}

// contents reads all of a region as its owner.
func (r *region) contents() []byte {
	b := make([]byte, r.Length())
	r.Read(0, b)
	return b
}

// want compares a region with what it should contain.
func (r *region) want(t *testing.T, want []byte) {
	t.Helper()
	got := r.contents()
	if bytes.Equal(got, want) {
		return
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("byte %d of %d is %#x, should be %#x", i, len(got), got[i], want[i])
		}
	}
}

// at makes an SGE of a place in a region.
func (r *region) at(off, n uint64) ib.SGE {
	return ib.SGE{Addr: r.IOVA() + off, Length: uint32(n), LKey: r.Key()}
}

// list makes a list of SGEs.
func (e *env) list(access ib.Access, sges ...ib.SGE) *mem.List {
	return &mem.List{Table: e.table, Actor: self, Access: e.acc(access), SGEs: sges}
}

// raw makes a list of raw bytes.
func raw(pieces ...[]byte) *mem.List { return &mem.List{Raw: pieces} }

// moveBytes is mem.Copy, and changeWord mem.Atomic, where the memory may be an engine's, or
// its mappings have just changed.
func moveBytes(dst, src *mem.List, n uint64, last bool) (f mem.Fault, side mem.Side) {
	var s mem.Stream
	defer s.Close()
	unlessChanging(func() mem.Fault {
		f, side = mem.CopyWaiting(dst, src, n, last, &s)
		return f
	})
	return f, side
}

func changeWord(t *mem.Table, who mem.Actor, key uint32, addr uint64, op mem.AtomicOp, compare, swapAdd uint64) (uint64, mem.Fault) {
	var s mem.Stream
	defer s.Close()
	var old uint64
	f := unlessChanging(func() (f mem.Fault) {
		old, f = mem.AtomicWaiting(t, who, key, addr, op, compare, swapAdd, &s, mem.Link{})
		return f
	})
	return old, f
}

// unlessChanging does something again while only changes of mappings are in its way, which the
// kernel has announced and are not known yet.
func unlessChanging(f func() mem.Fault) mem.Fault {
	for {
		fault := f()
		if !fault.Brief() || fault.Suspended() != nil {
			return fault
		}
		fault.Await()
	}
}

// kill is Table.Invalidate, which does not wait for engines.
func (e *env) kill(key uint32, who mem.Actor) mem.Fault {
	return insist(func() mem.Fault { return e.table.Invalidate(key, who) })
}

// section opens a section on a piece, and on the leaf that it lies in. It returns what
// closes them.
func (e *env) section(sge ib.SGE, n uint64) (release func()) {
	e.t.Helper()
	for {
		bytes, release, f := Hold(e.table, sge.LKey, sge.Addr, n, e.acc(0), self)
		if f.OK() {
			if _, f = bytes(); f.Staged() {
				f = mem.Fault{}
			}
		}
		switch {
		case f.OK():
			return release
		case f.Kind != mem.FaultPending || f.Suspended() != nil:
			e.t.Fatal(f)
		}
		release() // the kernel has taken the page meanwhile, or changes a mapping
		f.Await()
	}
}

// mustCopy copies, and fails the test on a fault. An odd number of bytes goes to a list
// of two pieces at least, since memory that lies together takes a shorter way.
func mustCopy(t *testing.T, dst, src *mem.List, n uint64, last bool) {
	t.Helper()
	if n%2 != 0 && len(dst.SGEs) == 1 && dst.SGEs[0].Length > 1 {
		one := dst.SGEs[0]
		rest := one
		one.Length, rest.Addr, rest.Length = 1, rest.Addr+1, rest.Length-1
		cut := *dst
		cut.SGEs = []ib.SGE{one, rest}
		dst = &cut
	}
	if f, side := moveBytes(dst, src, n, last); !f.OK() {
		t.Fatalf("Copy of %d bytes: %v: %v", n, side, f)
	}
}

// wantFault checks a fault and the side.
func wantFault(t *testing.T, what string, f mem.Fault, side mem.Side, kind mem.FaultKind, wantSide mem.Side) {
	t.Helper()
	if f.Kind != kind || side != wantSide {
		t.Fatalf("%s: %v: %v, should be %v: %v", what, side, f, wantSide, kind)
	}
}
