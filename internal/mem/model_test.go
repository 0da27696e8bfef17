package mem_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"math"
	"math/big"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// The model test: random registrations, closes, invalidations, binds,
// re-registrations and accesses, several regions and windows on the same memory,
// against a model that is as simple as can be: bytes in slices, bounds in numbers
// without a limit, keys in lists. model_mw_test.go has the part of it that is
// about windows and re-registration.

const (
	modelMemory  = 600
	modelRegions = 14 // and windows, at most
)

// modelRegion is a region in the model.
type modelRegion struct {
	mem.RegionConfig
	real        *mem.Region
	memory      int // which one
	start       int // where in there
	invalidated bool
	windows     int // bound to it
}

// entry returns the model of a region or window that has a key: where it lies, and which
// accesses of which actors it allows.
func (r *modelRegion) entry() *modelEntry {
	return &modelEntry{RegionConfig: r.RegionConfig, region: r, memory: r.memory, start: r.start, dead: r.invalidated}
}

type modelEntry struct {
	mem.RegionConfig
	region *modelRegion // for a window, the one that it is bound to
	window *modelWindow // nil: a region
	memory int
	start  int
	dead   bool
}

type model struct {
	table   *mem.Table
	memory  [3][]byte // what the device accesses
	want    [3][]byte // what should be in there
	regions []*modelRegion
	windows []*modelWindow
	dead    []uint32 // keys that were good once
	memo    mem.Memo // of some lists
	seen    map[string]int
}

func TestModel(t *testing.T) {
	for name, n := range map[string]string{"rapid.steps": "250", "rapid.checks": "400"} {
		if err := flag.Set(name, n); err != nil {
			t.Fatal(err)
		}
	}
	seen := make(map[string]int) // accesses by outcome
	rapid.Check(t, func(t *rapid.T) {
		m := &model{seen: seen, table: mem.NewTable(mem.TableConfig{MaxRegions: modelRegions, Seed: rapid.Uint64Range(1, math.MaxUint64).Draw(t, "seed")})}
		for i := range m.memory {
			m.memory[i], m.want[i] = make([]byte, modelMemory), make([]byte, modelMemory)
		}
		for range 6 {
			m.register(t)
		}
		for range 4 {
			m.allocate(t)
			m.bind(t)
		}
		t.Repeat(map[string]func(*rapid.T){
			"register":   m.register,
			"close":      m.close,
			"invalidate": m.invalidate,
			"resolve":    m.resolve,
			"copy":       m.copy,
			"raw":        m.raw,
			"atomic":     m.atomic,
			"allocate":   m.allocate,
			"bind":       m.bind,
			"free":       m.free,
			"rereg":      m.rereg,
			"":           m.compare,
		})
		for _, w := range m.windows {
			w.real.Close()
		}
		for _, r := range m.regions {
			if err := r.real.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if m.table.Len() != 0 {
			t.Fatalf("%d regions are left", m.table.Len())
		}
	})
	// The walk must have come everywhere, or it proves nothing.
	for _, action := range []string{"resolve", "copy", "raw", "atomic", "resolve through a window", "raw through a window"} {
		for _, kind := range []mem.FaultKind{mem.FaultNone, mem.FaultKey, mem.FaultDead, mem.FaultDomain, mem.FaultAccess, mem.FaultBounds} {
			if n := seen[action+", "+kind.String()]; n < 10 && (kind != mem.FaultKey || !strings.Contains(action, "window")) {
				t.Errorf("%s, %v: only %d times", action, kind, n)
			}
		}
	}
	for _, kind := range []mem.FaultKind{mem.FaultNone, mem.FaultDomain, mem.FaultAccess, mem.FaultBounds, mem.FaultWindow, mem.FaultDead} {
		if n := seen["bind, "+kind.String()]; n < 10 {
			t.Errorf("bind, %v: only %d times", kind, n)
		}
	}
	for _, what := range []string{"rereg, done", "rereg, busy", "rereg, refused", "rereg, unusable", "close, busy"} {
		if seen[what] < 10 {
			t.Errorf("%s: only %d times", what, seen[what])
		}
	}
	if n := seen["atomic, "+mem.FaultAlign.String()]; n < 10 {
		t.Errorf("atomic, %v: only %d times", mem.FaultAlign, n)
	}
	t.Log(seen)
}

func (m *model) saw(action string, f mem.Fault) { m.seen[action+", "+f.Kind.String()]++ }

func (m *model) compare(t *rapid.T) {
	for i := range m.memory {
		if !bytes.Equal(m.memory[i], m.want[i]) {
			t.Fatalf("memory %d differs from the model", i)
		}
	}
	if n := len(m.regions) + len(m.windows); m.table.Len() != n {
		t.Fatalf("%d regions and windows, should be %d", m.table.Len(), n)
	}
}

var rights = []ib.Access{0, ib.AccessLocalWrite, ib.AccessRemoteWrite, ib.AccessRemoteRead, ib.AccessRemoteAtomic}

// drawAccess prefers the first, as rapid does.
func drawAccess(t *rapid.T) ib.Access {
	a := rapid.SampledFrom([]ib.Access{
		ib.AccessLocalWrite | ib.AccessRemote, ib.AccessLocalWrite | ib.AccessRemote, ib.AccessLocalWrite | ib.AccessRemote,
		0, ib.AccessLocalWrite, ib.AccessRemoteRead, ib.AccessLocalWrite | ib.AccessRemoteWrite, ib.AccessLocalWrite | ib.AccessRemoteAtomic,
		ib.AccessRemoteWrite, ib.AccessRemoteAtomic, 1 << 10,
	}).Draw(t, "access")
	return a | rapid.SampledFrom([]ib.Access{0, ib.AccessMWBind, ib.AccessMWBind, ib.AccessMWBind, ib.AccessMWBind | ib.AccessZeroBased, ib.AccessZeroBased, ib.AccessRemoteInvalidate, ib.AccessMWBind | ib.AccessRemoteInvalidate}).Draw(t, "more access")
}

func (m *model) register(t *rapid.T) {
	r, ok := m.drawRegion(t)
	ok = ok && len(m.regions)+len(m.windows) < modelRegions
	var err error
	if r.real, err = m.table.Register(r.RegionConfig); (err == nil) != ok {
		t.Fatalf("Register(%+v): %v", r.RegionConfig, err)
	}
	if !ok {
		return
	}
	if r.Access&ib.AccessZeroBased != 0 {
		r.IOVA = 0
	}
	m.unique(t, r.real.Key())
	m.regions = append(m.regions, r)
}

// unique checks that no other region or window has a key.
func (m *model) unique(t *rapid.T, key uint32) {
	n := 0
	for _, r := range m.regions {
		if r.real.Key() == key {
			n++
		}
	}
	for _, w := range m.windows {
		if w.key == key {
			n++
		}
	}
	if n > 1 {
		t.Fatalf("key %#x is in use", key)
	}
}

// drawRegion draws what a region is to be, and reports whether there can be such.
func (m *model) drawRegion(t *rapid.T) (*modelRegion, bool) {
	r := &modelRegion{memory: rapid.IntRange(0, 2).Draw(t, "memory")}
	r.start = rapid.SampledFrom([]int{0, 8, 64, 200, 1, 77, 350, modelMemory - 1}).Draw(t, "start")
	n := modelMemory - r.start - rapid.IntRange(0, modelMemory-r.start-1).Draw(t, "less")
	b := m.memory[r.memory][r.start : r.start+n]
	r.PD = uint32(rapid.IntRange(1, 2).Draw(t, "pd"))
	r.Access = drawAccess(t)
	r.Invalidatable = rapid.Bool().Draw(t, "invalidatable")
	r.IOVA = rapid.SampledFrom([]uint64{0, 8, 1 << 40, uint64(addrOf(b)), math.MaxUint64 - uint64(n), math.MaxUint64 - uint64(n) + 1, math.MaxUint64}).Draw(t, "iova")
	r.Length = uint64(n) + rapid.SampledFrom([]uint64{0, 0, 0, 0, 0, 0, 1, math.MaxUint64}).Draw(t, "beyond")
	h, err := mem.NewHostBytes(b, r.Access, ib.LockAuto)
	if err != nil {
		t.Fatal(err)
	}
	r.Backing = h

	base := new(big.Int).SetUint64(r.IOVA)
	if r.Access&ib.AccessZeroBased != 0 {
		base.SetUint64(0)
	}
	end := new(big.Int).Add(base, new(big.Int).SetUint64(r.Length))
	remoteWrite := r.Access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0
	ok := r.Access&(1<<10) == 0 && (!remoteWrite || r.Access&ib.AccessLocalWrite != 0) &&
		end.Cmp(new(big.Int).SetUint64(math.MaxUint64)) <= 0 && r.Length <= uint64(n)
	return r, ok
}

// draw chooses a region or window, dead ones included, and returns nil for a key
// without any.
func (m *model) draw(t *rapid.T) (key uint32, e *modelEntry) {
	k := rapid.IntRange(0, 31).Draw(t, "region")
	switch {
	case k < 18 && len(m.regions) > 0:
		r := m.regions[k%len(m.regions)]
		return r.real.Key(), r.entry()
	case k < 28 && len(m.windows) > 0:
		w := m.windows[k%len(m.windows)]
		for i := 0; w.on == nil && i < len(m.windows) && k%4 > 0; i++ { // rather one that is bound
			w = m.windows[i]
		}
		return w.key, w.entry()
	case k < 30 && len(m.dead) > 0:
		key = rapid.SampledFrom(m.dead).Draw(t, "old key")
	default:
		key = rapid.Uint32().Draw(t, "key")
	}
	return key, m.find(key)
}

// find returns what has a key.
func (m *model) find(key uint32) *modelEntry {
	for _, r := range m.regions {
		if r.real.Key() == key {
			return r.entry()
		}
	}
	for _, w := range m.windows {
		if w.key == key {
			return w.entry()
		}
	}
	return nil
}

func (m *model) close(t *rapid.T) {
	if len(m.regions) == 0 || rapid.IntRange(0, 3).Draw(t, "yes") > 0 {
		return
	}
	k := rapid.IntRange(0, len(m.regions)-1).Draw(t, "region")
	r := m.regions[k]
	if r.windows > 0 {
		if err := r.real.Close(); !errors.Is(err, syscall.EBUSY) {
			t.Fatalf("Close of a region with %d windows: %v", r.windows, err)
		}
		m.seen["close, busy"]++
		return
	}
	for range 2 {
		if err := r.real.Close(); err != nil {
			t.Fatal(err)
		}
	}
	m.dead = append(m.dead, r.real.Key())
	m.regions = append(m.regions[:k], m.regions[k+1:]...)
}

func drawActor(t *rapid.T) mem.Actor {
	return mem.Actor{PD: uint32(rapid.IntRange(1, 2).Draw(t, "pd")), QPN: uint32(rapid.IntRange(1, 2).Draw(t, "qpn"))}
}

func (m *model) invalidate(t *rapid.T) {
	key, e := m.draw(t)
	who := drawActor(t)
	want := mem.FaultNone
	switch {
	case e == nil:
		want = mem.FaultKey
	case e.PD != who.PD:
		want = mem.FaultDomain
	case rapid.IntRange(0, 3).Draw(t, "yes") > 0: // not too often
		return
	case e.window != nil:
		want = e.window.invalidated(who)
	case !e.Invalidatable && e.Access&ib.AccessRemoteInvalidate == 0 || e.region.windows > 0:
		want = mem.FaultNotInvalidatable
	default:
		e.region.invalidated = true
	}
	if f := m.table.Invalidate(key, who); f.Kind != want {
		t.Fatalf("Invalidate(%#x): %v, should be %v", key, f, want)
	}
}

// modelRange is a range that an access asks for, and what the model expects of it.
type modelRange struct {
	sge   ib.SGE
	who   mem.Actor
	right ib.Access
	r     *modelEntry
	off   int // in the memory, if there is no fault
	fault mem.FaultKind
}

// bytes returns the range in the model.
func (a *modelRange) bytes(m *model) []byte {
	return m.want[a.r.memory][a.off:][:a.sge.Length]
}

// drawRange chooses a key, a place around one of the region's ends or anywhere,
// and a length.
func (m *model) drawRange(t *rapid.T, right ib.Access) *modelRange {
	a := &modelRange{right: right, who: drawActor(t)}
	a.sge.LKey, a.r = m.draw(t)
	var base, size uint64
	if a.r != nil {
		base, size = a.r.IOVA, a.r.Length
		if rapid.IntRange(0, 7).Draw(t, "own domain") < 7 {
			a.who.PD = a.r.PD
		}
		if w := a.r.window; w != nil && rapid.IntRange(0, 3).Draw(t, "own queue pair") < 3 {
			a.who.QPN = w.qpn
		}
	}
	near := uint64(rapid.IntRange(-9, 9).Draw(t, "near"))
	a.sge.Addr = rapid.SampledFrom([]uint64{
		base, base + size/3, base + size/2&^7, base + size/4*3, base + near, base + size + near, near, rapid.Uint64().Draw(t, "anywhere"),
	}).Draw(t, "addr")
	length := rapid.SampledFrom([]uint64{1, size / 8, size / 4, size / 2, 8, base + size - a.sge.Addr, size, size - 1, size + 1, 300, math.MaxUint32}).Draw(t, "n")
	a.sge.Length = max(1, uint32(min(length, math.MaxUint32)))
	switch {
	case a.r == nil:
		a.fault = mem.FaultKey
	case a.r.dead:
		a.fault = mem.FaultDead
	case a.r.PD != a.who.PD:
		a.fault = mem.FaultDomain
	case a.r.Access&right != right:
		a.fault = mem.FaultAccess
	default:
		first := new(big.Int).SetUint64(a.sge.Addr)
		end := new(big.Int).Add(first, big.NewInt(int64(a.sge.Length)))
		lo := new(big.Int).SetUint64(a.r.IOVA)
		hi := new(big.Int).Add(lo, new(big.Int).SetUint64(a.r.Length))
		if first.Cmp(lo) < 0 || end.Cmp(hi) > 0 {
			a.fault = mem.FaultBounds
			break
		}
		a.off = a.r.start + int(new(big.Int).Sub(first, lo).Int64())
		a.fault = a.r.behind(a.who, right)
	}
	return a
}

func (m *model) list(a *modelRange) *mem.List {
	l := &mem.List{Table: m.table, Actor: a.who, Access: a.right, SGEs: []ib.SGE{a.sge}}
	if a.sge.Addr%2 == 0 {
		l.Memo = &m.memo
	}
	return l
}

func (m *model) resolve(t *rapid.T) {
	a := m.drawRange(t, rapid.SampledFrom(rights).Draw(t, "right"))
	look, release, f := mem.Hold(m.table, a.sge.LKey, a.sge.Addr, uint64(a.sge.Length), a.right, a.who)
	if f.Kind != a.fault {
		t.Fatalf("Hold: %v, should be %v", f, a.fault)
	}
	m.saw("resolve", f)
	if a.r != nil && a.r.window != nil {
		m.saw("resolve through a window", f)
	}
	if check := mem.Check(m.list(a), uint64(a.sge.Length)); check.Kind != a.fault {
		t.Fatalf("Check: %v, should be %v", check, a.fault)
	}
	if !f.OK() {
		return
	}
	b, f := look()
	if !f.OK() || !bytes.Equal(b, a.bytes(m)) {
		t.Fatalf("held: %v, %d bytes of %d", f, len(b), a.sge.Length)
	}
	release()
}

// copy copies between two regions. Where both are on the same memory and the
// ranges overlap, the result is undefined, and the model takes what is there.
func (m *model) copy(t *rapid.T) {
	dst := m.drawRange(t, rapid.SampledFrom([]ib.Access{ib.AccessLocalWrite, ib.AccessRemoteWrite}).Draw(t, "write"))
	src := m.drawRange(t, rapid.SampledFrom([]ib.Access{0, ib.AccessRemoteRead}).Draw(t, "read"))
	n := min(dst.sge.Length, src.sge.Length)
	if dst.fault == mem.FaultBounds || src.fault == mem.FaultBounds {
		n = max(dst.sge.Length, src.sge.Length) // so that the whole range counts
	}
	last := rapid.Bool().Draw(t, "last")
	dst.sge.Length, src.sge.Length = min(n, dst.sge.Length), min(n, src.sge.Length)
	into := m.list(dst)
	if n > 1 && dst.fault == mem.FaultNone && src.fault == mem.FaultNone && rapid.Bool().Draw(t, "cut") {
		one, rest := dst.sge, dst.sge // what does not lie together takes the longer way
		one.Length, rest.Addr, rest.Length = 1, rest.Addr+1, rest.Length-1
		into.SGEs = []ib.SGE{one, rest}
	}
	f, side := mem.Copy(into, m.list(src), uint64(n), last)
	m.saw("copy", f)
	if dst.fault != mem.FaultNone || src.fault != mem.FaultNone {
		// Long ranges go in quanta, so the bytes before a fault may be copied;
		// the target is looked at first.
		wantKind, wantSide := dst.fault, mem.Dst
		if dst.fault == mem.FaultNone {
			wantKind, wantSide = src.fault, mem.Src
		}
		if f.Kind != wantKind || side != wantSide {
			t.Fatalf("Copy of %d: %v: %v, should be %v: %v", n, side, f, wantSide, wantKind)
		}
		return
	}
	if !f.OK() {
		t.Fatalf("Copy of %d: %v: %v", n, side, f)
	}
	to, from := dst.bytes(m), src.bytes(m)
	if dst.r.memory == src.r.memory && dst.off < src.off+int(n) && src.off < dst.off+int(n) {
		copy(to, m.memory[dst.r.memory][dst.off:][:n])
		return
	}
	copy(to, from)
}

// raw copies between a region and raw bytes.
func (m *model) raw(t *rapid.T) {
	write := rapid.Bool().Draw(t, "write")
	right := ib.AccessRemoteRead
	if write {
		right = ib.AccessRemoteWrite
	}
	a := m.drawRange(t, right)
	n := int(a.sge.Length)
	data := bytes.Repeat([]byte{rapid.Byte().Draw(t, "data")}, min(n, 1<<20))
	l, packet := m.list(a), &mem.List{Raw: [][]byte{data[:len(data)/3], nil, data[len(data)/3:]}}
	var f mem.Fault
	if write {
		f, _ = mem.Copy(l, packet, uint64(n), true)
	} else {
		f, _ = mem.Copy(packet, l, uint64(n), true)
	}
	m.saw("raw", f)
	if a.r != nil && a.r.window != nil {
		m.saw("raw through a window", f)
	}
	if n > len(data) && a.fault == mem.FaultNone {
		t.Fatalf("a range of %d bytes in a memory of %d", n, modelMemory)
	}
	if n > len(data) { // either the list or the region is too short
		return
	}
	if f.Kind != a.fault {
		t.Fatalf("Copy: %v, should be %v", f, a.fault)
	}
	if !f.OK() {
		return
	}
	if write {
		copy(a.bytes(m), data)
	} else if !bytes.Equal(data, a.bytes(m)) {
		t.Fatal("the bytes read differ from the model")
	}
}

func (m *model) atomic(t *rapid.T) {
	a := m.drawRange(t, ib.AccessRemoteAtomic)
	a.sge.Length = 8
	if a.r != nil && !a.r.dead && a.r.PD == a.who.PD && a.fault != mem.FaultAccess {
		// The length has changed: bounds once more.
		off := new(big.Int).Sub(new(big.Int).SetUint64(a.sge.Addr), new(big.Int).SetUint64(a.r.IOVA))
		a.fault = mem.FaultNone
		if off.Sign() < 0 || new(big.Int).Add(off, big.NewInt(8)).Cmp(new(big.Int).SetUint64(a.r.Length)) > 0 {
			a.fault = mem.FaultBounds
		} else if a.fault = a.r.behind(a.who, ib.AccessRemoteAtomic); a.fault != mem.FaultNone {
			// not this queue pair's window
		} else if a.off = a.r.start + int(off.Int64()); a.sge.Addr%8 != 0 || (addrOf(m.memory[a.r.memory])+uintptr(a.off))%8 != 0 {
			a.fault = mem.FaultAlign
		}
	}
	op := rapid.SampledFrom([]mem.AtomicOp{mem.CmpSwap, mem.FetchAdd}).Draw(t, "op")
	compare, value := rapid.Uint64().Draw(t, "compare"), rapid.Uint64().Draw(t, "value")
	var was uint64
	if a.fault == mem.FaultNone {
		was = binary.NativeEndian.Uint64(a.bytes(m))
		if rapid.Bool().Draw(t, "equal") {
			compare = was
		}
	}
	orig, f := mem.Atomic(m.table, a.who, a.sge.LKey, a.sge.Addr, op, compare, value)
	m.saw("atomic", f)
	if f.Kind != a.fault || orig != was {
		t.Fatalf("Atomic: %#x, %v, should be %#x, %v", orig, f, was, a.fault)
	}
	if !f.OK() {
		return
	}
	switch {
	case op == mem.FetchAdd:
		value += was
	case was != compare:
		value = was
	}
	binary.NativeEndian.PutUint64(a.bytes(m), value)
}
