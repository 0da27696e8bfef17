package link

import (
	"errors"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// onEngine makes memory of an engine that other processes can open, and a list of all of it.
func onEngine(t *testing.T, g *enginetest.Engine, size int) (*enginetest.Memory, *mem.Region, *mem.List) {
	t.Helper()
	m := g.Alloc(uint64(size))
	table := mem.NewTable(mem.TableConfig{})
	r, err := table.Register(mem.RegionConfig{PD: 1, Length: uint64(size), Backing: m})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		m.Free()
	})
	return m, r, &mem.List{Table: table, Actor: mem.Actor{PD: 1}, SGEs: []ib.SGE{{Length: uint32(size), LKey: r.Key()}}}
}

// keeper is a Sink that keeps trains by KeepStaged.
type keeper struct {
	kept []*train.Train
	bad  int
}

func (k *keeper) Deliver(t *train.Train) {
	c, _, f := t.KeepStaged()
	if !f.OK() || t.Lease == nil {
		k.bad++
		return
	}
	k.kept = append(k.kept, c)
}
func (k *keeper) Drop(Reason) { k.bad++ }

// read reads a train's payload from where it lies.
func read(c *train.Train) ([]byte, mem.Fault) {
	b := make([]byte, c.Len)
	var s mem.Stream
	defer s.Close()
	f, _ := mem.CopyWaiting(&mem.List{Raw: [][]byte{b}}, &c.Payload, uint64(c.Len), true, &s)
	return b, f
}

// namedPair is two links, one of which has opened memory of the other.
func namedPair(t *testing.T) (a, b *Shared, f *train.Flow, c *Carrier, m *enginetest.Memory, r *mem.Region, l *mem.List, g *enginetest.Engine) {
	t.Helper()
	a, b = sharedPair(t)
	f = flowBetween(t, a, b)
	if err := a.Reach(f, 9); err != nil {
		t.Fatal(err)
	}
	g = enginetest.New(enginetest.Config{Name: t.Name()})
	t.Cleanup(g.Close)
	m, r, l = onEngine(t, g, 1<<20)
	c = a.NewCarrier(f, 9)
	var k keeper
	for end := time.Now().Add(10 * time.Second); ; {
		if h := c.Carries(new(train.Train), l, 4096, 1, true); h.Len == 4096 {
			h.Release()
			break
		}
		b.Poll(&k, 16)
		a.Poll(&k, 16)
		if time.Now().After(end) {
			t.Fatal("it is not opened")
		}
	}
	if k.bad != 0 || len(k.kept) != 0 || g.Opened() != 1 {
		t.Fatalf("%+v, %d open", k, g.Opened())
	}
	return a, b, f, c, m, r, l, g
}

// A payload in opened memory is read where it lies, until the sender gives it up. When the
// sender closes the memory, the peer closes it too.
func TestNamed(t *testing.T) {
	a, b, f, c, m, r, l, g := namedPair(t)
	for i := range m.Bytes {
		m.Bytes[i] = byte(i * 13)
	}
	const at, n = 12345, 64 << 10
	var k keeper
	send := func(lease bool) *train.Train {
		t.Helper()
		from := *l
		from.Off = at
		tr := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: n / 4096, Len: n,
			Ticket: a.Ticket(), Payload: from}
		if !lease {
			tr.Kind = wire.KindReadResponse
		}
		h := c.Carries(tr, &from, n, 1, lease)
		if h.Len != n {
			t.Fatal("it is not carried")
		}
		h.Release()
		if k, err := a.Send([]*train.Train{tr}); k != 1 || err != nil {
			t.Fatal(k, err)
		}
		k.kept = nil
		for len(k.kept) == 0 && k.bad == 0 {
			b.Poll(&k, 16)
		}
		if k.bad != 0 {
			t.Fatal("it was dropped")
		}
		return k.kept[0]
	}
	for _, lease := range []bool{true, false} {
		got := send(lease)
		bytes, fault := read(got)
		if !fault.OK() || !got.Leased() || len(bytes) != n || bytes[0] != m.Bytes[at] || bytes[n-1] != m.Bytes[at+n-1] {
			t.Fatalf("lease %v: %v, %v", lease, fault, got.Leased())
		}
		if lease {
			a.GiveUpFetches() // changes the ticket, not the lease
			if !got.Leased() {
				t.Error("a request is given up with others'")
			}
			c.GiveUp()
		} else {
			c.GiveUp()
			if !got.Leased() {
				t.Error("an answer is given up with requests")
			}
			a.GiveUpFetches()
		}
		if got.Leased() {
			t.Errorf("lease %v: what was given up is still good", lease)
		}
	}
	// If the peer's process wants packets by now, the bytes have to be loaded first.
	const long = 4 * train.MaxBytes // longer than a train that is copied
	tr := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: long / 4096, Len: long, Payload: *l}
	h := c.Carries(tr, l, long, 4096, true)
	h.Release()
	others := c.flow.dev.view.(*others)
	others.packets = true
	var unread *PayloadError
	if sent, err := a.Send([]*train.Train{tr}); h.Len != long || sent != 0 || !errors.As(err, &unread) || !unread.Fault.Staged() {
		t.Errorf("to a process that wants packets: %d, %v", sent, err)
	}
	others.packets = false
	late := send(true)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); g.Opened() != 0; {
		b.Poll(&k, 16)
		if time.Now().After(end) {
			t.Fatal("it is not closed")
		}
	}
	if _, fault := read(late); fault.OK() {
		t.Error("what was closed can be read")
	}
	c.Close()
	c.Close()
}

// A peer that names memory, leases or offsets that do not exist only loses its own trains.
func TestNamedLies(t *testing.T) {
	_, b, f, c, _, _, l, g := namedPair(t)
	h, fault := mem.HoldShared(l, 1)
	if !fault.OK() {
		t.Fatal(fault)
	}
	h.Release()
	id := h.ID
	to := c.flow.dev.channels[7].Load()
	var k keeper
	poll := func() {
		for range 100 {
			b.Poll(&k, 64)
		}
	}
	say := func(typ byte, words ...uint64) {
		t.Helper()
		var rec []byte
		for _, w := range words {
			rec = le.AppendUint64(rec, w)
		}
		for to.Send(typ, rec) == shm.ErrFull { //nolint:errorlint // as it is
			poll()
		}
		poll()
	}
	for i := range uint64(2 * maxMapped) { // memory that nobody has
		say(recShare, 1<<40+i)
	}
	say(recShare)
	say(recShare, 1, 2)
	say(recOpened)
	say(recOpened, 99)
	b.opened.mu.Lock()
	n := len(b.opened.byKey)
	b.opened.mu.Unlock()
	if n > maxMapped || g.Opened() != 1 {
		t.Errorf("%d are noted, %d open", n, g.Opened())
	}
	named := func(lease uint32, at, memory, off uint64, n int) {
		t.Helper()
		tr := train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: 1, Len: n}
		rec := make([]byte, trainBytes+namedBytes)
		packTrain(rec, &tr, c.flow.src, c.flow.dst)
		p := packer{rec[trainBytes:]}
		p.u32(lease)
		p.u64(at)
		p.u64(memory)
		p.u64(off)
		if err := to.Send(recNamed, rec); err != nil {
			t.Fatal(err)
		}
		poll()
	}
	k = keeper{}
	named(1, 0, id, 0, 0)                 // no bytes
	named(shm.MaxLeases+1, 0, id, 0, 100) // no such lease
	named(1<<31, 0, id, 0, 100)           // nor this
	if k.bad != 3 || len(k.kept) != 0 {
		t.Errorf("%+v", k)
	}
	for _, place := range [][2]uint64{{id + 1000, 0}, {id, 1<<20 - 99}, {id, ^uint64(0)}, {id, 1 << 63}} {
		k = keeper{}
		named(1, 0, place[0], place[1], 100)
		if len(k.kept) != 1 {
			t.Fatalf("%#x: %+v", place, k)
		}
		if _, f := read(k.kept[0]); f.OK() {
			t.Errorf("%#x is read", place)
		}
	}
	if to.Err() != nil {
		t.Error(to.Err())
	}
}
