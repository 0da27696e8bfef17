package qp

// WRITEs and READs that take a shortcut: which do, in what order with those that do not, and
// the state of both sides afterwards.

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
)

// shortcut is a Shortcut to one region of the peer's, and from another: a grant.
type shortcut struct {
	to     *end
	region string      // to be written to
	source string      // to be read from
	closed func() bool // if set: it cannot be used now
	fails  func() bool // if set: it breaks, when the bytes have been copied
	n      int         // requests done
	access ib.Access   // the rights that the last one wanted to its own memory

	untold [2]struct{ messages, packets, bytes uint64 } // WRITEs and READs that the peer has not absorbed
}

func (s *shortcut) area(read bool) *region {
	if read {
		return s.to.regions[s.source]
	}
	return s.to.regions[s.region]
}

func (s *shortcut) Covers(x *Request) bool {
	r := s.area(x.Read)
	return r != nil && x.RKey == r.Key() && r.Alive() && x.VA >= r.IOVA() && x.VA-r.IOVA()+uint64(x.Len) <= uint64(len(r.buf)) && (s.closed == nil || !s.closed())
}

func (s *shortcut) Copy(x *Request) bool {
	r, kind := s.area(x.Read), 0
	there := &mem.List{Raw: [][]byte{r.buf[x.VA-r.IOVA():][:x.Len]}, MayFault: true}
	to, from := there, x.Own
	if x.Read {
		to, from, kind = x.Own, there, 1
	}
	s.access = x.Own.Access
	f, _ := mem.Copy(to, from, uint64(x.Len), true)
	if !f.OK() || s.fails != nil && s.fails() {
		return false
	}
	s.n++
	x.from.Counters.add(CntByGrant, 1)
	u := &s.untold[kind]
	u.messages, u.packets, u.bytes = u.messages+1, u.packets+uint64(x.Packets()), u.bytes+uint64(x.Len)
	return true
}

// postShort posts a request by the end's shortcut, and reports whether that has executed
// it. If not, the request is not posted.
func (e *end) postShort(wr ib.SendWR) bool {
	return e.q.PostShortcut(e.q.Shortcut, []ib.SendWR{wr}) == 1
}

// tell moves the peer's responder past what was done (Absorb), as the peer's owner does before
// it delivers a train.
func (s *shortcut) tell() {
	for kind := range s.untold {
		u := &s.untold[kind]
		s.to.q.Absorb(u.messages, u.packets, u.bytes, kind == 1)
		*u = struct{ messages, packets, bytes uint64 }{}
	}
}

// shortcuts gives both sides of a game a shortcut, which is there at some times and
// not at others.
func (g *game) shortcuts(seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 2))
	ways := map[*end]*shortcut{}
	for _, s := range g.sides {
		open := true
		way := &shortcut{to: s.peer.end, region: "dst", source: "src", fails: func() bool { return rng.IntN(10) == 0 }}
		way.closed = func() bool {
			if rng.IntN(20) == 0 {
				open = !open
			}
			return !open
		}
		s.q.Shortcut, ways[way.to] = way, way
	}
	g.w.tap = func(e *end, _ any) { ways[e].tell() }
}

// shortcutWorld is a pair whose end a has a shortcut to b's region, and what b receives.
func shortcutWorld(t *testing.T, a setup) (w *world, way *shortcut) {
	w = newPair(t, a, usual())
	way = &shortcut{to: w.b, region: "mem"}
	w.a.q.Shortcut = way
	w.tap = func(e *end, _ any) {
		if e == w.b {
			way.tell()
		}
	}
	return w, way
}

// write makes a WRITE of n bytes to the same place.
func (e *end) write(off uint64, n int, flags ib.SendFlags) ib.SendWR {
	r := e.peer.regions["mem"]
	return ib.SendWR{Op: ib.OpRDMAWrite, Flags: flags, SGL: []ib.SGE{e.regions["mem"].at(off, n)}, RKey: r.Key(), RemoteAddr: r.IOVA() + off}
}

func (e *end) post(wrs ...ib.SendWR) {
	e.w.t.Helper()
	if _, err := e.q.PostSend(wrs); err != nil {
		e.w.t.Fatal(err)
	}
}

// arrive delivers all that is on the wires, and what comes of it.
func (w *world) arrive() {
	for len(w.a.wire)+len(w.b.wire) > 0 {
		for _, e := range w.ends() {
			trains := e.wire
			e.wire = nil
			for _, t := range trains {
				e.receive(t)
			}
		}
		w.pullAll()
	}
}

// completed takes the numbers of the requests that have completed, all of them well.
func (e *end) completed() (ids []uint64) {
	e.w.t.Helper()
	var wcs [64]ib.WC
	for i, n := 0, e.sendCQ.Poll(wcs[:]); i < n; i++ {
		if wcs[i].Status != ib.WCSuccess {
			e.w.t.Errorf("%+v", wcs[i])
		}
		ids = append(ids, wcs[i].ID)
	}
	return ids
}

// inStep checks that both sides agree on what comes next, and on how much has come.
func (w *world) inStep(way *shortcut) {
	w.t.Helper()
	way.tell()
	if a, b := w.a.q, w.b.q; a.req.max != b.resp.epsn || a.req.una != a.req.max {
		w.t.Errorf("a: una %06x, max %06x; b expects %06x", a.req.una, a.req.max, b.resp.epsn)
	}
}

// TestShortcutOrder: a WRITE takes the shortcut when what was before it is done, and not
// before; what is behind it waits for it.
func TestShortcutOrder(t *testing.T) {
	w, way := shortcutWorld(t, usual())
	w.b.recv.Post([]ib.RecvWR{{}})
	before, first, second := w.a.write(700, 8, ib.SendSignaled), w.a.write(0, 500, ib.SendSignaled), w.a.write(600, 8, 0)
	before.ID, first.ID, second.ID = 1, 2, 3
	last := ib.SendWR{ID: 4, Op: ib.OpSend, Flags: ib.SendSignaled}
	w.a.q.Shortcut = nil // there was none yet
	w.a.post(before)
	w.pullAll()
	w.a.q.Shortcut = way
	w.a.post(first, second, last)
	w.pullAll()
	if len(w.b.wire) != 1 || way.n != 0 {
		t.Fatalf("%d trains, %d WRITEs, while the first request is under way", len(w.b.wire), way.n)
	}
	if d := w.a.q.Deadline(); d == 0 {
		t.Error("it waits, and nobody would ask again")
	}
	trains := w.b.wire
	w.b.wire = nil
	w.b.receive(trains[0])
	w.pullAll() // b's acknowledgement
	for _, x := range w.a.wire {
		w.a.receive(x)
	}
	w.a.wire = nil
	w.pullAll()
	if way.n != 2 || len(w.b.wire) != 1 || !bytes.Equal(w.b.regions["mem"].buf[:500], w.a.regions["mem"].buf[:500]) {
		t.Fatalf("%d WRITEs, %d trains", way.n, len(w.b.wire))
	}
	if got, want := w.b.wire[0].PSN, w.b.q.resp.epsn.Add(3); got != want { // two packets and one
		t.Errorf("the last request is %06x, want %06x", got, want)
	}
	w.arrive()
	if ids := w.a.completed(); !slices.Equal(ids, []uint64{1, 2, 4}) {
		t.Errorf("%v have completed", ids)
	}
	w.inStep(way)
	if c := w.b.q.Counters; c[CntRxPackets] != 5 || c[CntRxBytes] != 516 || w.b.q.resp.msn != 4 { // a SEND and 4 packets
		t.Errorf("%d packets, %d bytes, %d messages", c[CntRxPackets], c[CntRxBytes], w.b.q.resp.msn)
	}
}

// TestShortcutBehindLocal: requests are sent, and a local one between them is done; then they
// are taken back, since the first has to be fetched, and those behind it take the shortcut.
// The local one is not done twice, completes in the order of posting, and nothing overtakes it.
func TestShortcutBehindLocal(t *testing.T) {
	w, way := shortcutWorld(t, usual())
	w.b.recv.Post(make([]ib.RecvWR, 1))
	m, err := w.a.table.CreateMKey(testPD, 1)
	if err != nil {
		t.Fatal(err)
	}
	send := ib.SendWR{ID: 1, Op: ib.OpSend, Flags: ib.SendSignaled}
	local := ib.SendWR{ID: 3, Op: ib.OpConfigureMKey, Flags: ib.SendSignaled,
		Configure: &ib.MKeyConfig{MKey: m.Key(), Access: ib.AccessLocalWrite, List: []ib.SGE{w.a.regions["mem"].at(0, 8)}}}
	second, fourth := w.a.write(0, 8, ib.SendSignaled), w.a.write(600, 8, ib.SendSignaled)
	second.ID, fourth.ID = 2, 4
	w.a.q.Shortcut = nil // there is none yet
	w.a.post(send, second, local, fourth)
	w.pullAll()
	if len(w.b.wire) != 3 {
		t.Fatalf("%d trains", len(w.b.wire))
	}
	first := w.b.wire[0]
	w.b.wire = nil // a link sends nothing behind what it cannot read
	w.a.q.SendFailed(first, mem.Fault{Kind: mem.FaultPending}, w.now)
	var work Work
	if !w.a.q.NextWork(WorkSend, &work) {
		t.Fatal("nothing is fetched")
	}
	work.Do(w.a.table)
	w.a.q.Finished(&work, w.now)
	again := new(train.Train)
	if !w.a.q.Pull(again, w.now) || again.PSN != first.PSN {
		t.Fatal("the first is not sent again")
	}
	again.From, again.To = again.Flow.Src, again.Flow.Dst
	w.a.put(again)
	w.a.q.Shortcut = way
	w.pullAll()
	w.arrive()
	if ids := w.a.completed(); way.n != 2 || !slices.Equal(ids, []uint64{1, 2, 3, 4}) {
		t.Errorf("%d WRITEs by the shortcut, %v have completed", way.n, ids)
	}
	w.inStep(way)
}

// TestShortcutMixed: WRITEs between other requests do not wait for those: trains follow each
// other.
func TestShortcutMixed(t *testing.T) {
	w, way := shortcutWorld(t, usual())
	w.b.recv.Post(make([]ib.RecvWR, 4))
	send, write := ib.SendWR{Op: ib.OpSend, Flags: ib.SendSignaled}, w.a.write(0, 8, ib.SendSignaled)
	w.a.post(write, send, write, write, send, write)
	w.pullAll()
	if way.n != 1 || len(w.b.wire) != 5 {
		t.Errorf("%d WRITEs were done at once, and %d trains sent", way.n, len(w.b.wire))
	}
	w.arrive()
	w.a.post(write)
	w.pullAll()
	if way.n != 2 || len(w.a.completed()) != 7 {
		t.Errorf("%d WRITEs were done at once, when nothing was under way", way.n)
	}
	w.inStep(way)

	// The same with WRITEs that cannot take the shortcut, for they go elsewhere.
	elsewhere := write
	elsewhere.Flags |= ib.SendFence
	w.a.post(elsewhere, write, elsewhere, write)
	w.pullAll()
	if way.n != 2 || len(w.b.wire) != 4 {
		t.Errorf("%d WRITEs were done at once, and %d trains sent", way.n, len(w.b.wire))
	}
	w.arrive()
	w.inStep(way)
}

// TestShortcutAccess: a READ needs the right to write to its own memory, a WRITE behind it
// does not.
func TestShortcutAccess(t *testing.T) {
	w, way := shortcutWorld(t, usual())
	way.source = "mem"
	read := w.a.write(0, 8, ib.SendSignaled)
	read.Op = ib.OpRDMARead
	if !w.a.postShort(read) || way.access != ib.AccessLocalWrite {
		t.Fatalf("the READ did not take the shortcut, or wants %v", way.access)
	}
	if !w.a.postShort(w.a.write(0, 8, ib.SendSignaled)) || way.access != 0 {
		t.Errorf("the WRITE did not take the shortcut, or wants %v", way.access)
	}
	w.inStep(way)
}

// TestSendQueueGoesRound: numbers of requests go past half of their range, and wrap, while only
// polls free places.
func TestSendQueueGoesRound(t *testing.T) {
	for _, start := range []uint32{1<<31 - 20, ^uint32(0) - 20} {
		w, way := shortcutWorld(t, usual())
		s := &w.a.q.sq
		s.head, s.tail, w.a.q.req.cur = start, start, start
		s.freed.Store(0)
		for n := uint32(0); n != start; { // as if all had been posted and polled
			n += min(1<<30, start-n)
			w.a.sendCQ.PushSend(&ib.WC{}, s.freed, n)
			w.a.completed()
			s.freed.Load()
		}
		for i := range 60 {
			wr := w.a.write(0, 8, ib.SendSignaled)
			if !w.a.postShort(wr) || len(w.a.completed()) != 1 {
				t.Fatalf("request %d behind %#x: %d places are free", i, start, w.a.q.Room())
			}
		}
		w.inStep(way)
	}
}

// TestShortcutNot: what cannot take the shortcut does not, nor what is behind requests for
// which no acknowledgement was asked for.
func TestShortcutNot(t *testing.T) {
	quiet := ib.SendWR{Op: ib.OpSend}
	for name, c := range map[string]func(e *end) []ib.SendWR{
		"fence":    func(e *end) []ib.SendWR { return []ib.SendWR{e.write(0, 8, ib.SendFence)} },
		"no bytes": func(e *end) []ib.SendWR { return []ib.SendWR{e.write(0, 0, 0)} },
		"elsewhere": func(e *end) []ib.SendWR {
			wr := e.write(0, 8, 0)
			wr.RemoteAddr += 64<<10 - 4
			return []ib.SendWR{wr}
		},
		"imm": func(e *end) []ib.SendWR {
			wr := e.write(0, 8, 0)
			wr.Op = ib.OpRDMAWriteImm
			return []ib.SendWR{wr}
		},
		"another key": func(e *end) []ib.SendWR {
			wr := e.write(0, 8, 0)
			wr.RKey++
			return []ib.SendWR{wr}
		},
		"behind a quiet one": func(e *end) []ib.SendWR { return []ib.SendWR{quiet, e.write(0, 8, 0)} },
	} {
		t.Run(name, func(t *testing.T) {
			w, way := shortcutWorld(t, usual())
			w.b.recv.Post([]ib.RecvWR{{}, {}})
			wrs := c(w.a)
			if len(wrs) == 1 && w.a.postShort(wrs[0]) {
				t.Error("it was done at once")
			}
			w.a.post(wrs...)
			w.pullAll()
			if way.n != 0 || len(w.b.wire) != len(wrs) {
				t.Errorf("%d WRITEs, %d trains for %d requests", way.n, len(w.b.wire), len(wrs))
			}
		})
	}
}

// TestShortcutFails: a request whose shortcut fails goes by train, with the same PSNs.
func TestShortcutFails(t *testing.T) {
	w, way := shortcutWorld(t, usual())
	w.a.post(w.a.write(0, 8, ib.SendSignaled))
	w.pullAll()
	fail := true
	way.fails = func() bool { return fail }
	wr := w.a.write(0, 600, ib.SendSignaled)
	if w.a.postShort(wr) {
		t.Error("it was done at once")
	}
	w.a.post(wr)
	w.pullAll()
	if len(w.b.wire) != 1 || w.b.wire[0].PSN != 0x101 || w.b.wire[0].N != 3 {
		t.Fatalf("%d trains: %+v", len(w.b.wire), w.b.wire)
	}
	w.arrive()
	fail = false
	if !w.a.postShort(wr) {
		t.Error("it was not done")
	}
	if n := len(w.a.completed()); n != 3 || way.n != 2 {
		t.Errorf("%d completed, %d by the shortcut", n, way.n)
	}
	w.inStep(way)
}

// TestShortcutQuantum: one call copies a bounded number of bytes, and TakeShortcut shows that
// there may be more.
func TestShortcutQuantum(t *testing.T) {
	s := usual()
	s.sq, s.cq = 400, 400
	w, way := shortcutWorld(t, s)
	for range 300 {
		w.a.post(w.a.write(0, 8, ib.SendSignaled))
	}
	var tr train.Train
	for _, want := range []int{128, 256, 300} {
		if w.a.q.Pull(&tr, w.now) || way.n != want {
			t.Fatalf("%d WRITEs are done, want %d", way.n, want)
		}
		if n := w.a.q.TakeShortcut(); n == 0 || n > train.MaxBytes {
			t.Errorf("%d bytes", n)
		}
	}
	if w.a.q.Pull(&tr, w.now) || w.a.q.TakeShortcut() != 0 || w.a.q.Pending() {
		t.Error("there is more")
	}
	w.inStep(way)
}

// TestShortcutStates: nothing takes the shortcut in a queue that drains or has failed.
func TestShortcutStates(t *testing.T) {
	t.Run("SQD", func(t *testing.T) {
		w, way := shortcutWorld(t, usual())
		if err := w.a.modify(ib.QPAttr{State: ib.QPSQD}, ib.QPMaskState, 0); err != nil {
			t.Fatal(err)
		}
		wr := w.a.write(0, 8, ib.SendSignaled)
		if w.a.postShort(wr) {
			t.Error("it was done at once")
		}
		w.a.post(wr)
		w.pullAll()
		if way.n != 0 || len(w.b.wire) != 0 {
			t.Errorf("%d WRITEs, %d trains", way.n, len(w.b.wire))
		}
		if err := w.a.modify(ib.QPAttr{State: ib.QPRTS}, ib.QPMaskState, 0); err != nil {
			t.Fatal(err)
		}
		w.pullAll()
		if way.n != 1 {
			t.Error("it was not done")
		}
	})
	t.Run("overflow", func(t *testing.T) {
		s := usual()
		s.cq = 2
		w, way := shortcutWorld(t, s)
		for i := range 8 {
			wr := w.a.write(0, 8, ib.SendSignaled)
			if i%2 == 0 {
				w.a.postShort(wr)
				continue
			}
			w.a.post(wr)
			w.pullAll()
		}
		if way.n != 3 || w.a.q.State() != ib.QPErr { // the third found no room
			t.Errorf("%d WRITEs, the queue pair is in %v", way.n, w.a.q.State())
		}
	})
	t.Run("local failure", func(t *testing.T) {
		w, way := shortcutWorld(t, usual())
		bad := w.a.write(0, 8, ib.SendSignaled)
		bad.SGL[0].LKey++
		w.a.post(bad, w.a.write(0, 8, ib.SendSignaled))
		w.pullAll()
		if way.n != 0 || w.a.q.State() != ib.QPErr {
			t.Errorf("%d WRITEs, the queue pair is in %v", way.n, w.a.q.State())
		}
	})
}

// TestShortcutFull: a place in the queue is taken until its completion is polled.
func TestShortcutFull(t *testing.T) {
	s := usual()
	s.sq, s.signalAll = 3, true
	w, way := shortcutWorld(t, s)
	wr := w.a.write(0, 8, 0)
	for i := range 5 {
		if done := w.a.postShort(wr); done != (i < 3) {
			t.Errorf("WRITE %d of 3: %v", i, done)
		}
	}
	if n := len(w.a.completed()); n != 3 || !w.a.postShort(wr) || way.n != 4 {
		t.Errorf("%d completed, %d WRITEs", n, way.n)
	}
}

// TestAbsorb: PSNs and message numbers go round.
func TestAbsorb(t *testing.T) {
	s := usual()
	s.psn = 0xfffffe
	w := newPair(t, s, usual())
	q := w.b.q
	q.resp.msn = 0xffffff
	q.Absorb(2, 5, 77, false)
	if q.resp.epsn != 3 || q.resp.msn != 1 || q.Query().RQPSN != 3 {
		t.Errorf("epsn %06x, msn %06x", q.resp.epsn, q.resp.msn)
	}
	q.Absorb(1<<40|1, 1<<40|4, 1, false)
	if q.resp.epsn != 7 || q.resp.msn != 2 || q.Counters[CntRxBytes] != 78 {
		t.Errorf("epsn %06x, msn %06x", q.resp.epsn, q.resp.msn)
	}
	was := q.Counters[CntRxPackets]
	q.Absorb(3, 9, 100, true)
	if q.resp.epsn != 16 || q.resp.msn != 5 || q.Counters[CntRxPackets] != was+3 || q.Counters[CntTxPackets] != 9 || q.Counters[CntTxBytes] != 100 {
		t.Errorf("READs: epsn %06x, msn %06x, %v", q.resp.epsn, q.resp.msn, q.Counters)
	}
}
