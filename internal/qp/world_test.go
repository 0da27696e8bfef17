package qp

// A world for the protocol core to live in: two ends, each with a queue pair,
// its queues and its memory; a wire to each of them; and a clock that moves
// only when the test advances it. Everything in it is repeatable.
//
//  1. newEnd, connect: the ends and how they come to RTS.
//  2. pull: what a queue pair wants to send goes onto a wire, as a link would
//     take it: the payload is read, and a payload that cannot be read is
//     reported.
//  3. deliver, cut, copyTrain: what a wire does to trains.
//  4. advance: time passes, and acts.
//  5. check: what must hold after every step, whatever happened.

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// epoch is when a world begins. Zero would stand for "never".
const epoch = time.Second

const (
	testPD    = 7
	otherPD   = 8
	testXRCD  = 3
	testSRQ   = 0x51
	allRights = ib.AccessLocalWrite | ib.AccessRemote
)

type world struct {
	t   testing.TB
	now Time
	a,
	b *end
	lazy      bool    // memory may have to be fetched
	byRef     bool    // trains refer to the sender's memory, as on the loop link
	holding   bool    // no end sends
	lossless  bool    // the paths say that they lose nothing
	selective [2]bool // the paths of a and b say that what is lost alone is sent again
	log       func(format string, args ...any)
	seen      func(e *end, t *train.Train) // what is put on a wire
	tap       func(e *end, op any)         // if set: what is delivered
	failed    func(e *end, t *train.Train) // if set: what could not be read when it arrived
}

// end is one side: a queue pair with all that it needs.
type end struct {
	w       *world
	name    string
	lazy    bool // regions are made of memory that may have to be fetched
	addr    netip.Addr
	peer    *end
	q       *QP
	table   *mem.Table
	sendCQ  *queue.CQ
	recvCQ  *queue.CQ
	recv    *queue.Recv
	regions map[string]*region
	windows map[string]*mem.Window
	mkeys   map[string]*mem.MKey
	srqs    map[uint32]*SharedQueue
	wire    []*train.Train // on the way to this end
	credits *Credits
	events  []ib.EventType

	unreadable int // the next payloads that the link cannot read
	state      ib.QPState
}

// region is registered memory by name.
type region struct {
	*mem.Region
	buf  []byte
	disk *disk // what has reached storage, if it can
	lazy *lazy // what is there and what is not, if that is not all
}

// disk is memory with storage behind it.
type disk struct {
	*mem.Host
	buf, stored []byte
	err         error // what the storage says to everything, if set
}

func (d *disk) Durable() bool { return true }

func (d *disk) Persist(off, n uint64) error {
	copy(d.stored[off:][:n], d.buf[off:])
	return d.err
}

// work does a piece of deferred work of a kind, and reports whether there was one.
func (e *end) work(l WorkKind) bool {
	var w Work
	if !e.q.NextWork(l, &w) {
		return false
	}
	w.Do(e.table)
	e.q.Finished(&w, e.w.now)
	return true
}

// setup is what an end is made of.
type setup struct {
	typ                 ib.QPType
	mtu                 ib.MTU
	psn                 uint32 // the first that it sends; 0: 0x100 for a, 0x900 for b
	window              int
	credits             int // 0: none are needed
	retry, rnr, timeout uint8
	rd, destRD, timer   uint8
	access              ib.Access // of the queue pair
	cq, sq, rq          int       // sizes of the queues
	sge, inline         int
	signalAll, srq      bool
	qkey, recvPD        uint32
	memory              int // bytes of the region "mem"
	scatter             bool
}

// usual is what most tests want.
func usual() setup {
	return setup{typ: ib.RC, mtu: ib.MTU256, window: 64, retry: 7, rnr: 7, timeout: 14, rd: 4, destRD: 4, timer: 12,
		access: ib.AccessRemote | ib.AccessFlush, cq: 64, sq: 16, rq: 16, sge: 4, inline: 64, qkey: 0x1234, recvPD: testPD, memory: 64 << 10}
}

func newWorld(t testing.TB) *world {
	return &world{t: t, now: epoch, log: func(string, ...any) {}, seen: func(*end, *train.Train) {}}
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// newEnd makes an end with its queue pair in RESET.
func (w *world) newEnd(name string, s setup) *end {
	e := &end{w: w, name: name, lazy: w.lazy, regions: map[string]*region{}, windows: map[string]*mem.Window{}, mkeys: map[string]*mem.MKey{}, srqs: map[uint32]*SharedQueue{}, state: ib.QPReset}
	host, seed := byte(1), uint64(101)
	if name == "b" {
		host, seed = 2, 202
		w.b = e
	} else {
		w.a = e
	}
	e.addr = netip.AddrFrom4([4]byte{127, 0, 0, host})
	e.table = mem.NewTable(mem.TableConfig{MaxRegions: 64, Seed: seed})
	e.sendCQ, e.recvCQ = queue.NewCQ(s.cq), queue.NewCQ(s.cq)
	for _, q := range []struct {
		cq   *queue.CQ
		name string
	}{{e.sendCQ, "send"}, {e.recvCQ, "recv"}} {
		q.cq.OnEvent = func() { w.log("%s event: %s completion queue", e.name, q.name) }
		q.cq.OnOverflow = func() { w.log("%s event: %s completion queue overflow", e.name, q.name) }
	}
	c := ib.QPCap{MaxSendWR: s.sq, MaxRecvWR: s.rq, MaxSendSGE: s.sge, MaxRecvSGE: s.sge, MaxInlineData: s.inline}
	e.recv = queue.NewRecv(c.MaxRecvWR, c.MaxRecvSGE)
	e.recv.OnLimit = func() { w.log("%s event: %v", e.name, ib.EventSRQLimitReached) }
	e.srqs[testSRQ] = &SharedQueue{Number: testSRQ, Domain: testXRCD, PD: testPD, Recv: e.recv, CQ: e.recvCQ}
	cfg := Config{Type: s.typ, Number: 0x10 * uint32(host), PD: testPD, Cap: c, SignalAll: s.signalAll,
		SendCQ: e.sendCQ, RecvCQ: e.recvCQ, Recv: e.recv, Shared: s.srq, RecvPD: s.recvPD,
		Table: e.table, Event: e.event, Scatter: s.scatter}
	cfg.ScatterFailed = func(f mem.Fault) uint16 { return e.q.ScatterBroke(f) }
	switch s.typ { // as a device does it
	case ib.XRCSend:
		cfg.RecvCQ, cfg.Recv, cfg.RecvPD = nil, nil, 0
	case ib.XRCRecv:
		cfg.PD, cfg.SendCQ, cfg.RecvCQ, cfg.Recv, cfg.RecvPD, cfg.Cap = 0, nil, nil, nil, 0, ib.QPCap{}
		cfg.XRC = XRC{Domain: testXRCD, Find: func(n uint32) *SharedQueue { return e.srqs[n] }}
	}
	e.q = New(cfg)
	if e.q.Type == ib.UD {
		e.q.SetDatagramMTU(s.mtu.Bytes())
	}
	if s.credits > 0 {
		e.credits = NewCredits(s.credits)
	}
	e.register("mem", s.memory, testPD, allRights)
	return e
}

func (e *end) index() int {
	if e.name == "b" {
		return 1
	}
	return 0
}

func (e *end) event(t ib.EventType) {
	e.events = append(e.events, t)
	e.w.log("%s event: %v", e.name, t)
}

// register makes a region. Regions of one end lie 16 MiB apart, those of a at
// 0x1…, those of b at 0x2….
func (e *end) register(name string, size int, pd uint32, access ib.Access) *region {
	e.w.t.Helper()
	r := &region{buf: make([]byte, size)}
	if e.name == "a" {
		fill(r.buf, byte(len(e.regions)))
	}
	host, err := mem.NewHostBytes(r.buf, access&^ib.AccessFlushPersistent, ib.LockOff)
	if err != nil {
		e.w.t.Fatal(err)
	}
	var backing mem.Backing = host
	if access&ib.AccessFlushPersistent != 0 {
		r.disk = &disk{Host: host, buf: r.buf, stored: make([]byte, size)}
		backing = r.disk
	}
	if e.lazy {
		r.lazy = newLazy(backing)
		backing = r.lazy
	}
	iova := uint64(0x1000_0000)
	if e.name == "b" {
		iova = 0x2000_0000
	}
	iova += uint64(len(e.regions)) << 24
	r.Region, err = e.table.Register(mem.RegionConfig{PD: pd, Access: access, IOVA: iova, Length: uint64(size), Backing: backing})
	if err != nil {
		e.w.t.Fatal(err)
	}
	e.regions[name] = r
	return r
}

// fill makes bytes that differ from their neighbours and over long distances.
func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = seed*31 + byte(i) + byte(i>>8)*3 + byte(i>>16)*5 + 1
	}
}

// at returns an SGE of n bytes of a region.
func (r *region) at(off uint64, n int) ib.SGE {
	return ib.SGE{Addr: r.IOVA() + off, Length: uint32(n), LKey: r.Key()}
}

func (e *end) flow(to *end) *train.Flow {
	return &train.Flow{Src: e.addr, Dst: to.addr, HopLimit: 64, TClass: 4}
}

// modify is Modify with a path where one is needed.
func (e *end) modify(a ib.QPAttr, mask ib.QPAttrMask, window int) error {
	var path *Path
	if mask&ib.QPMaskAV != 0 {
		path = &Path{Flow: e.flow(e.peer), Window: window, Credits: e.credits, Lossless: e.w.lossless, Selective: e.w.selective[e.index()]}
	}
	return e.q.Modify(&a, mask, path, e.w.now)
}

// toState brings a queue pair from RESET to INIT, RTR or RTS.
func (e *end) toState(to ib.QPState, s, peer setup) {
	e.w.t.Helper()
	typ := e.q.Type
	do := func(a ib.QPAttr, masks [ib.NumQPTypes]ib.QPAttrMask) {
		e.w.t.Helper()
		if e.q.State() >= to {
			return
		}
		if err := e.modify(a, masks[typ]|ib.QPMaskState, s.window); err != nil {
			e.w.t.Fatal(err)
		}
	}
	const init = ib.QPMaskPKeyIndex | ib.QPMaskPort
	do(ib.QPAttr{State: ib.QPInit, Port: 1, Access: s.access, QKey: s.qkey},
		[...]ib.QPAttrMask{ib.RC: init | ib.QPMaskAccess, ib.UC: init | ib.QPMaskAccess, ib.UD: init | ib.QPMaskQKey,
			ib.XRCSend: init | ib.QPMaskAccess, ib.XRCRecv: init | ib.QPMaskAccess})
	const path = ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN
	do(ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: ib.GIDFromAddr(e.peer.addr)}, PathMTU: s.mtu,
		DestQPN: e.peer.q.Number, RQPSN: peer.firstPSN(e.peer), MaxDestRDAtomic: s.destRD, MinRNRTimer: s.timer},
		[...]ib.QPAttrMask{ib.RC: path | mResponder, ib.UC: path, ib.UD: 0, ib.XRCSend: path, ib.XRCRecv: path | mResponder})
	do(ib.QPAttr{State: ib.QPRTS, SQPSN: s.firstPSN(e), Timeout: s.timeout, RetryCnt: s.retry, RNRRetry: s.rnr, MaxRDAtomic: s.rd},
		[...]ib.QPAttrMask{
			ib.RC: mRequester, ib.UC: ib.QPMaskSQPSN, ib.UD: ib.QPMaskSQPSN,
			ib.XRCSend: mRequester, ib.XRCRecv: ib.QPMaskSQPSN | ib.QPMaskTimeout})
	e.state = e.q.State()
}

// firstPSN is 0x100 for a and 0x900 for b, unless the setup names another.
func (s setup) firstPSN(e *end) uint32 {
	if e.name == "b" {
		return orDefault(s.psn, 0x900)
	}
	return orDefault(s.psn, 0x100)
}

// newPair makes two connected ends in RTS.
func newPair(t testing.TB, a, b setup) *world { return newWorld(t).pair(a, b) }

func (w *world) pair(a, b setup) *world {
	w.newEnd("a", a)
	w.newEnd("b", b)
	w.a.peer, w.b.peer = w.b, w.a
	w.a.toState(ib.QPRTS, a, b)
	w.b.toState(ib.QPRTS, b, a)
	return w
}

func (w *world) ends() [2]*end { return [2]*end{w.a, w.b} }

// pull puts what an end has to send onto the wires, until it has no more, and
// returns how many trains that were.
func (e *end) pull() int {
	for n := 0; ; n++ {
		if n > 100000 {
			e.w.t.Fatalf("%s never stops sending", e.name)
		}
		t := new(train.Train)
		pending := e.q.Pending()
		if !e.q.Pull(t, e.w.now) {
			if e.q.TakeShortcut() > 0 {
				continue // there may be more
			}
			return n
		}
		if !pending {
			e.w.t.Fatalf("%s sends what was not pending: %+v", e.name, t)
		}
		if err := malformed(t); err != nil {
			e.w.t.Fatalf("%s sends a train that no link can carry: %v: %+v", e.name, err, t)
		}
		t.From, t.To, t.TClass, t.HopLimit = t.Flow.Src, t.Flow.Dst, t.Flow.TClass, t.Flow.HopLimit
		f := e.fail(t)
		if f.OK() {
			if f = e.read(t); !f.OK() && !e.w.byRef {
				e.sendFront(t)
			}
		}
		if !f.OK() {
			e.w.log("%s link: cannot read the payload of psn=%06x: %v", e.name, t.PSN, f.Kind)
			e.q.SendFailed(t, f, e.w.now)
			e.q.HoldFrom(e.w.now)
			continue
		}
		e.put(t)
		if !e.w.byRef {
			e.q.Sent(t, e.w.now)
		}
	}
}

// put puts a train onto its wire.
func (e *end) put(t *train.Train) {
	to := e.w.a
	if t.To == e.w.b.addr {
		to = e.w.b
	}
	e.w.seen(to, t)
	to.wire = append(to.wire, t)
}

// sendFront sends the packets of a train before the first that cannot be read, as
// a link of packets does, and takes them off the train.
func (e *end) sendFront(t *train.Train) {
	for t.N > 1 {
		first := copyTrain(t)
		first.N, first.End, first.Len, first.AckReq, first.Extra = 1, false, t.MTU, false, wire.NoExtra
		if !e.read(first).OK() {
			return
		}
		e.put(first)
		t.TrimFront(1)
	}
}

// malformed returns why a link could not packetize a train; nil if it could.
func malformed(t *train.Train) error {
	switch {
	case t.Flow == nil:
		return errors.New("no flow")
	case t.N < 1 || t.Len < 0 || t.Len > train.MaxBytes:
		return errors.New("its size")
	case t.N == 1 && t.End && t.Len > wire.MaxPayload:
		return errors.New("its only packet is too long")
	case !t.End && t.Len != t.N*t.MTU, t.N > 1 && (t.Len-1)/t.MTU != t.N-1:
		return errors.New("its length does not fill its packets")
	}
	for i := range t.N {
		pos, extra := wire.Middle, wire.NoExtra
		switch first, last := t.Start && i == 0, t.End && i == t.N-1; {
		case first && last:
			pos, extra = wire.Only, t.Extra
		case first:
			pos = wire.First
		case last:
			pos, extra = wire.Last, t.Extra
		}
		if _, ok := wire.Op(t.Transport, t.Kind, pos, extra); !ok {
			return fmt.Errorf("packet %d has no opcode", i)
		}
	}
	return nil
}

// fail fails a train if the script wants that.
func (e *end) fail(t *train.Train) mem.Fault {
	if t.Len > 0 && e.unreadable > 0 {
		if e.unreadable--; e.unreadable == 0 {
			return mem.Fault{Kind: mem.FaultDead}
		}
	}
	return mem.Fault{}
}

// read makes the payload of a train bytes of its own, as a network does.
func (e *end) read(t *train.Train) mem.Fault {
	if e.w.byRef {
		return mem.Fault{}
	}
	b := make([]byte, t.Len)
	f, _ := mem.Copy(&mem.List{Raw: [][]byte{b}}, &t.Payload, uint64(t.Len), false)
	if f.OK() {
		t.Payload = mem.List{Raw: [][]byte{b}}
	}
	return f
}

// pullAll lets both ends send.
func (w *world) pullAll() {
	for _, e := range w.ends() {
		if e != nil && !w.holding {
			e.pull()
		}
	}
	w.check()
}

// receive gives a train to an end. If the payload could not be read, which happens when it
// lies in the sender's memory, the fault goes to the sender.
func (e *end) receive(t *train.Train) {
	if e.w.tap != nil {
		e.w.tap(e, t)
	}
	if f := e.q.Receive(t, e.w.now); !f.OK() {
		e.w.log("%s link: cannot read the payload of psn=%06x: %v", e.peer.name, t.PSN, f.Kind)
		e.peer.q.SendFailed(t, f, e.w.now)
		if e.w.failed != nil {
			e.w.failed(e, t)
		}
	} else if e.w.byRef {
		e.peer.q.Sent(t, e.w.now)
	}
	e.q.HoldFrom(e.w.now)
}

// copyTrain copies a train whose payload is bytes of its own.
func copyTrain(t *train.Train) *train.Train {
	c := *t
	return &c
}

// cut returns packets i to i+n of a train as a train, as a network that lost
// the others would.
func cut(t *train.Train, i, n int) *train.Train {
	c := copyTrain(t)
	last := i+n == t.N
	c.PSN, c.N = t.PSN.Add(i), n
	c.Start, c.End = t.Start && i == 0, t.End && last
	if !last {
		c.AckReq = false
	}
	if !c.End {
		c.Extra, c.Solicited, c.Imm = wire.NoExtra, false, 0
	}
	if t.Len > 0 {
		from, to := i*t.MTU, min((i+n)*t.MTU, t.Len)
		if last {
			to = t.Len
		}
		c.Len = to - from
		c.Payload = mem.List{Raw: [][]byte{t.Payload.Raw[0][from:to]}}
	}
	if n == 1 {
		c.MTU = c.Len // as for a received train of one packet, which does not show the MTU
	}
	return c
}

// advance lets time pass, and calls Tick whenever an end asked for it.
func (w *world) advance(d time.Duration, each func()) {
	end := w.now + d
	for steps := 0; ; steps++ {
		if steps > 100000 {
			w.t.Fatal("time does not pass: somebody's deadline stays")
		}
		next := end
		for _, e := range w.ends() {
			if at := e.q.Deadline(); at != 0 && at < next {
				next = max(at, w.now)
			}
		}
		w.now = next
		due := false
		for _, e := range w.ends() {
			if at := e.q.Deadline(); at != 0 && at <= w.now {
				due = true
				e.q.Tick(w.now)
			}
		}
		w.pullAll()
		if each != nil {
			each()
		}
		if !due && w.now == end {
			return
		}
	}
}

// check checks what must always hold.
func (w *world) check() {
	w.t.Helper()
	for _, e := range w.ends() {
		if e == nil {
			continue
		}
		if err := e.q.broken(); err != nil {
			w.t.Fatalf("%s: %v", e.name, err)
		}
	}
}

// broken returns what is wrong inside a queue pair; nil if nothing is.
func (q *QP) broken() error {
	r, s := &q.req, &q.sq
	switch {
	case s.tail-s.head > s.max:
		return fmt.Errorf("%d requests in a queue of %d", s.tail-s.head, s.max)
	case r.cur-s.head > s.tail-s.head:
		return fmt.Errorf("request %d is next, the queue is %d to %d", r.cur, s.head, s.tail)
	case q.resp.n > MaxRDAtomic:
		return fmt.Errorf("%d answers wait", q.resp.n)
	case q.resp.flushing() && (q.deferred.want|q.deferred.busy)&WorkSync.bit() == 0:
		return fmt.Errorf("a FLUSH waits and nobody is told")
	case r.fetching && (q.deferred.want|q.deferred.busy)&WorkSend.bit() == 0:
		return fmt.Errorf("it waits for its memory and nobody is told")
	case q.state == ib.QPErr && s.tail != s.head:
		return fmt.Errorf("%d requests were not flushed", s.tail-s.head)
	case q.state == ib.QPErr && q.Deadline() != 0:
		return fmt.Errorf("a deadline in the error state")
	case r.heldCredits < 0:
		return fmt.Errorf("%d credits held", r.heldCredits)
	}
	for i := range q.resp.n {
		if j := q.resp.at(i); j.held && (q.resp.held == nil || !q.resp.held.answers) {
			return fmt.Errorf("answer %d of %d (psn %06x) is held, and nobody will let it go", i, q.resp.n, j.psn)
		}
	}
	for i := uint8(1); i < q.resp.n; i++ {
		if q.resp.at(i).psn.Less(q.resp.at(i - 1).psn) {
			return fmt.Errorf("the answers are not in order")
		}
	}
	if !q.reliable || q.state != ib.QPRTS && q.state != ib.QPSQD {
		return nil
	}
	switch {
	case r.nxt.Less(r.una) || r.max.Less(r.nxt):
		return fmt.Errorf("una %06x, nxt %06x, max %06x are not in order", r.una, r.nxt, r.max)
	case r.heldCredits > r.flight():
		return fmt.Errorf("%d credits held for %d packets under way", r.heldCredits, r.flight())
	case r.rd.len() > int(q.attr.MaxRDAtomic):
		return fmt.Errorf("%d READs and atomics under way, %d are allowed", r.rd.len(), q.attr.MaxRDAtomic)
	}
	return q.brokenRepair()
}

// brokenRepair returns what is wrong with what is known of lost packets, and with what is kept.
func (q *QP) brokenRepair() error {
	r := &q.req
	at, settled, lost := r.una, 0, 0
	for i := range r.runs {
		x := &r.runs[i]
		if x.first.Less(at) || !x.first.Less(x.end) || r.nxt.Less(x.end) {
			return fmt.Errorf("run %d is %06x to %06x, una %06x, nxt %06x", i, x.first, x.end, r.una, r.nxt)
		}
		if x.kept != nil && (x.state != landed || x.end.Sub(x.first) != 1) {
			return fmt.Errorf("run %d keeps an answer, its state is %d", i, x.state)
		}
		at = x.end
		switch x.state {
		case arrived, landed:
			settled += x.end.Sub(x.first)
		case missing:
			lost += x.end.Sub(x.first)
		}
	}
	if settled != r.settled || lost != r.missing {
		return fmt.Errorf("%d packets have arrived and %d are missing, not %d and %d", settled, lost, r.settled, r.missing)
	}
	at, bytes := q.resp.epsn, 0
	for i, t := range q.resp.ahead.trains {
		if t.PSN.Less(at) {
			return fmt.Errorf("what is kept is not in order: %06x after %06x", t.PSN, at)
		}
		if i == 0 && t.PSN == at && (q.resp.held == nil || !q.resp.holding()) {
			return fmt.Errorf("the expected request is kept")
		}
		at = t.PSN.Add(q.takes(t))
		bytes += t.Holds() + heldCost
	}
	if bytes != q.resp.ahead.bytes {
		return fmt.Errorf("%d bytes are kept, not %d", bytes, q.resp.ahead.bytes)
	}
	return nil
}
