package mem_test

import (
	"errors"
	"math"
	"math/big"
	"syscall"

	"pgregory.net/rapid"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// The part of the model that is about windows and re-registration.

// modelWindow is a window in the model.
type modelWindow struct {
	ib.MWBind // what it is bound to
	real      *mem.Window
	typ       ib.MWType
	pd        uint32
	key       uint32
	qpn       uint32       // type 2: where it is bound
	on        *modelRegion // nil: free
}

func (w *modelWindow) entry() *modelEntry {
	e := &modelEntry{window: w, region: w.on, dead: w.on == nil}
	e.PD = w.pd
	if w.on == nil {
		return e
	}
	e.Access = w.Access & (ib.AccessRemote | ib.AccessFlush)
	e.IOVA, e.Length = w.Addr, w.Length
	e.memory, e.start = w.on.memory, w.on.start+int(w.Addr-w.on.IOVA)
	if w.Access&ib.AccessZeroBased != 0 {
		e.IOVA = 0
	}
	return e
}

// behind returns how an access ends that fits the window's domain, rights and bounds.
func (e *modelEntry) behind(who mem.Actor, right ib.Access) mem.FaultKind {
	w := e.window
	switch {
	case w == nil:
		return mem.FaultNone
	case w.typ == ib.MWType2 && w.qpn != who.QPN:
		return mem.FaultDomain
	case right&ib.AccessRemote == 0:
		return mem.FaultAccess
	case w.on.invalidated:
		return mem.FaultDead
	}
	return mem.FaultNone
}

// release frees the window.
func (w *modelWindow) release() {
	if w.on != nil {
		w.on.windows--
		w.on = nil
	}
}

// invalidated is what becomes of a window that its domain invalidates.
func (w *modelWindow) invalidated(who mem.Actor) mem.FaultKind {
	switch {
	case w.typ == ib.MWType1:
		return mem.FaultNotInvalidatable
	case w.on == nil:
		return mem.FaultNone
	case w.qpn != who.QPN:
		return mem.FaultDomain
	}
	w.release()
	return mem.FaultNone
}

func (m *model) allocate(t *rapid.T) {
	w := &modelWindow{typ: ib.MWType(rapid.IntRange(1, 2).Draw(t, "type")), pd: uint32(rapid.IntRange(1, 2).Draw(t, "pd"))}
	var err error
	w.real, err = m.table.AllocWindow(w.pd, w.typ)
	if full := len(m.regions)+len(m.windows) == modelRegions; (err == nil) == full {
		t.Fatalf("AllocWindow, full: %v: %v", full, err)
	}
	if err != nil {
		return
	}
	w.key = w.real.Key()
	m.windows = append(m.windows, w)
	m.unique(t, w.key)
}

// free closes a window.
func (m *model) free(t *rapid.T) {
	if len(m.windows) == 0 || rapid.IntRange(0, 3).Draw(t, "yes") > 0 {
		return
	}
	k := rapid.IntRange(0, len(m.windows)-1).Draw(t, "window")
	w := m.windows[k]
	w.release()
	for range 2 {
		if err := w.real.Close(); err != nil {
			t.Fatal(err)
		}
	}
	m.dead = append(m.dead, w.key)
	m.windows = append(m.windows[:k], m.windows[k+1:]...)
}

// bind binds a window to anything that a request could name.
func (m *model) bind(t *rapid.T) {
	if len(m.windows) == 0 {
		return
	}
	w := m.windows[rapid.IntRange(0, len(m.windows)-1).Draw(t, "window")]
	lkey, on := m.draw(t)
	who := drawActor(t)
	if rapid.IntRange(0, 7).Draw(t, "own domain") < 7 {
		who.PD = w.pd
	}
	if good := m.bindable(w); len(good) > 0 && rapid.IntRange(0, 3).Draw(t, "good") < 3 {
		r := rapid.SampledFrom(good).Draw(t, "good region")
		lkey, on = r.real.Key(), r.entry()
	}
	var base, size uint64
	if on != nil {
		base, size = on.IOVA, on.Length
	}
	near := uint64(rapid.IntRange(-2, 2).Draw(t, "near"))
	b := ib.MWBind{MW: w.key, LKey: lkey, RKey: rapid.Uint32().Draw(t, "rkey"),
		Addr: rapid.SampledFrom([]uint64{base, base + size/4, base + size/2, base + near, base + size + near, math.MaxUint64}).Draw(t, "addr"),
		Access: rapid.SampledFrom([]ib.Access{ib.AccessRemote, ib.AccessRemote, ib.AccessRemoteRead, ib.AccessRemoteWrite, ib.AccessRemoteAtomic, 0, ib.AccessLocalWrite}).Draw(t, "access") |
			rapid.SampledFrom([]ib.Access{0, 0, ib.AccessZeroBased}).Draw(t, "zero-based")}
	b.Length = rapid.SampledFrom([]uint64{size / 4, size / 4, size / 4, size / 2, size / 2, size / 2, 1, base + size - b.Addr, base + size - b.Addr, base + size - b.Addr, size, size + 1, base + size - b.Addr + 1, 0, math.MaxUint64}).Draw(t, "length")
	verb := w.typ == ib.MWType1
	if rapid.IntRange(0, 15).Draw(t, "wrong way") == 0 {
		verb = !verb
	} else if verb {
		b.RKey = w.real.NextKey()
	}

	want := mem.FaultNone
	switch {
	case w.pd != who.PD:
		want = mem.FaultDomain
	case b.Access&^(ib.AccessRemote|ib.AccessFlush|ib.AccessZeroBased) != 0:
		want = mem.FaultAccess
	case verb != (w.typ == ib.MWType1),
		w.typ == ib.MWType1 && b.Access&ib.AccessZeroBased != 0,
		w.typ == ib.MWType2 && (w.on != nil || b.Length == 0):
		want = mem.FaultWindow
	case b.Length > 0:
		want = mayBind(on, &b, who)
	}
	f := m.table.Bind(&b, verb, who)
	m.saw("bind", f)
	if f.Kind != want {
		t.Fatalf("Bind(%+v) of %v: %v, should be %v", b, w.typ, f, want)
	}
	if !f.OK() {
		return
	}
	w.release()
	m.dead = append(m.dead, w.key)
	w.key = w.key&^0xff | b.RKey&0xff
	w.MWBind, w.qpn = b, who.QPN
	if b.Length > 0 {
		w.on = on.region
		w.on.windows++
	}
	if w.typ == ib.MWType2 && w.real.Key() != w.key {
		t.Fatalf("the key is %#x, should be %#x", w.real.Key(), w.key)
	}
}

// bindable returns the regions that a window may be bound to, somehow.
func (m *model) bindable(w *modelWindow) (good []*modelRegion) {
	for _, r := range m.regions {
		if r.PD == w.pd && !r.invalidated && r.Access&ib.AccessMWBind != 0 {
			good = append(good, r)
		}
	}
	return good
}

// mayBind reports whether a window can be bound to what has a key.
func mayBind(on *modelEntry, b *ib.MWBind, who mem.Actor) mem.FaultKind {
	switch {
	case on == nil:
		return mem.FaultKey
	case on.dead:
		return mem.FaultDead
	case on.PD != who.PD:
		return mem.FaultDomain
	}
	end := new(big.Int).Add(new(big.Int).SetUint64(b.Addr), new(big.Int).SetUint64(b.Length))
	limit := new(big.Int).Add(new(big.Int).SetUint64(on.IOVA), new(big.Int).SetUint64(on.Length))
	if b.Addr < on.IOVA || end.Cmp(limit) > 0 {
		return mem.FaultBounds
	}
	if on.window != nil {
		return on.behind(who, 0)
	}
	if on.Access&ib.AccessMWBind == 0 ||
		b.Access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && on.Access&ib.AccessLocalWrite == 0 {
		return mem.FaultAccess
	}
	return mem.FaultNone
}

// rereg makes another region of a region.
func (m *model) rereg(t *rapid.T) {
	if len(m.regions) == 0 || rapid.Bool().Draw(t, "not so often") {
		return
	}
	r := m.regions[rapid.IntRange(0, len(m.regions)-1).Draw(t, "region")]
	to, ok := m.drawRegion(t)
	key := r.real.Key()
	err := r.real.Rereg(to.RegionConfig)
	var failed *ib.ReregError
	errors.As(err, &failed)
	switch {
	case r.invalidated:
		if !errors.Is(err, syscall.EINVAL) || failed == nil || failed.State != ib.ReregUnusable {
			t.Fatalf("Rereg of a region that was invalidated: %v", err)
		}
		m.seen["rereg, unusable"]++
		return
	case !ok:
		if failed == nil || failed.State != ib.ReregOldValid {
			t.Fatalf("Rereg(%+v): %v", to.RegionConfig, err)
		}
		m.seen["rereg, refused"]++
		return
	case r.windows > 0:
		if !errors.Is(err, syscall.EBUSY) || failed == nil || failed.State != ib.ReregOldValid {
			t.Fatalf("Rereg of a region with %d windows: %v", r.windows, err)
		}
		m.seen["rereg, busy"]++
		return
	case err != nil:
		t.Fatal(err)
	}
	m.seen["rereg, done"]++
	to.real = r.real
	if to.Access&ib.AccessZeroBased != 0 {
		to.IOVA = 0
	}
	*r = *to
	if r.real.Key() == key {
		t.Fatalf("the key %#x is still good", key)
	}
	m.dead = append(m.dead, key)
	m.unique(t, r.real.Key())
}
