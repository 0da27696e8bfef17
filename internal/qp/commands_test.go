package qp

// The commands of the scripts, in the order in which script_test.go lists them.

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

var mtus = map[uint64]ib.MTU{256: ib.MTU256, 512: ib.MTU512, 1024: ib.MTU1024, 2048: ib.MTU2048, 4096: ib.MTU4096}

var accessNames = map[string]ib.Access{"none": 0, "local-write": ib.AccessLocalWrite, "remote-write": ib.AccessRemoteWrite,
	"remote-read": ib.AccessRemoteRead, "remote-atomic": ib.AccessRemoteAtomic, "invalidate": ib.AccessRemoteInvalidate,
	"flush-global": ib.AccessFlushGlobal, "flush-persistent": ib.AccessFlushPersistent, "flush": ib.AccessFlush,
	"remote": ib.AccessRemote, "bind": ib.AccessMWBind, "zero-based": ib.AccessZeroBased}

func (a *cmdArgs) access(key string, def ib.Access) ib.Access {
	v := a.values(key)
	if v == nil {
		return def
	}
	acc := ib.Access(0)
	for _, n := range v {
		bit, ok := accessNames[n]
		if !ok {
			a.s.fatalf("no access right %q", n)
		}
		acc |= bit
	}
	return acc
}

func (s *script) pair(a *cmdArgs) {
	types := map[string][2]ib.QPType{"rc": {ib.RC, ib.RC}, "uc": {ib.UC, ib.UC}, "ud": {ib.UD, ib.UD}, "xrc": {ib.XRCSend, ib.XRCRecv}}
	states := map[string]ib.QPState{"reset": ib.QPReset, "init": ib.QPInit, "rtr": ib.QPRTR, "rts": ib.QPRTS}
	w := newWorld(s.t)
	w.log = s.printf
	w.seen = func(to *end, t *train.Train) { s.printf("%s", describe(to, t)) }
	w.tap = s.tap
	w.byRef = a.flag("by-reference")
	w.lazy = a.flag("lazy")
	w.lossless = w.byRef
	if a.flag("selective") {
		w.selective = [2]bool{true, !a.flag("b.other")}
	}
	s.w, s.polling = w, [2]bool{true, true}
	var set [2]setup
	var upTo [2]ib.QPState
	typ, signalAll, scatter := types[a.str("type", "rc")], a.flag("signal-all"), a.flag("scatter")
	for i, name := range []string{"a", "b"} {
		key := func(k string) string {
			if a.has(name + "." + k) {
				return name + "." + k
			}
			return k
		}
		num := func(k string, def uint64) uint64 { return a.num(key(k), def) }
		byteOf := func(k string, def uint8) uint8 { return uint8(num(k, uint64(def))) }
		u := usual()
		set[i] = setup{typ: typ[i], signalAll: signalAll, mtu: mtus[num("mtu", 256)], psn: uint32(num("psn", 0)),
			window: int(num("window", uint64(u.window))), credits: int(num("credits", 0)), retry: byteOf("retry", u.retry),
			rnr: byteOf("rnr", u.rnr), timeout: byteOf("timeout", u.timeout), rd: byteOf("rd", u.rd),
			destRD: byteOf("dest-rd", u.destRD), timer: byteOf("timer", u.timer), access: a.access(key("access"), u.access),
			cq: int(num("cq", uint64(u.cq))), sq: int(num("sq", uint64(u.sq))), rq: int(num("rq", uint64(u.rq))), sge: u.sge,
			inline: u.inline, qkey: uint32(num("qkey", uint64(u.qkey))), srq: a.flag(name + ".srq"),
			recvPD: uint32(num("recv-pd", testPD)), memory: int(num("memory", uint64(u.memory))),
			scatter: scatter}
		w.newEnd(name, set[i])
		upTo[i] = states[a.str(key("state"), "rts")]
	}
	w.a.peer, w.b.peer = w.b, w.a
	w.a.toState(upTo[0], set[0], set[1])
	w.b.toState(upTo[1], set[1], set[0])
}

func (s *script) region(a *cmdArgs) {
	e := a.end()
	e.register(a.word(), int(a.num("size", 4096)), uint32(a.num("pd", testPD)), a.access("access", allRights))
}

// window makes a memory window, which scripts name as they name regions.
func (s *script) window(a *cmdArgs) {
	e := a.end()
	name := a.word()
	w, err := e.table.AllocWindow(uint32(a.num("pd", testPD)), ib.MWType(a.num("type", 2)))
	if err != nil {
		s.fatalf("%v", err)
	}
	e.windows[name] = w
	e.regions[name] = &region{Region: e.table.Lookup(w.Key())}
}

// bind posts the verb that binds a window of type 1.
func (s *script) bind(a *cmdArgs) {
	e := a.end()
	name := a.word()
	var flags ib.SendFlags
	if a.flag("signaled") {
		flags = ib.SendSignaled
	}
	id, b := a.num("id", 0), a.bind(e, name)
	b.RKey = e.windows[name].NextKey()
	if err := e.q.PostBind(id, flags, &b); err != nil {
		s.printf("%s refused: %v", e.name, err)
	}
}

// bind is what a window is to be bound to.
func (a *cmdArgs) bind(e *end, window string) ib.MWBind {
	r, off := a.place(e, a.str("on", "mem+0"))
	return ib.MWBind{MW: e.regions[window].Key(), RKey: uint32(a.num("tag", 0)), LKey: r.Key(), Addr: r.IOVA() + off,
		Length: a.num("size", 0), Access: a.access("access", ib.AccessRemote)}
}

// mkey makes an indirect key, which scripts name as they name regions.
func (s *script) mkey(a *cmdArgs) {
	e := a.end()
	name := a.word()
	m, err := e.table.CreateMKey(uint32(a.num("pd", testPD)), int(a.num("pieces", 4)))
	if err != nil {
		s.fatalf("%v", err)
	}
	e.mkeys[name] = m
	e.regions[name] = &region{Region: e.table.Lookup(m.Key())}
}

// configure is what an indirect key is to be made of: list=(mem+0/100,...) or
// strides=(mem+0/64/192,...), of bytes and skips, with repeat=.
func (a *cmdArgs) configure(e *end) *ib.MKeyConfig {
	c := &ib.MKeyConfig{MKey: a.tagged(e.regions[a.str("mkey", "mkey")].Key()), Access: a.access("access", allRights), Repeat: a.num("repeat", 0)}
	for _, v := range a.values("list") {
		where, n, _ := strings.Cut(v, "/")
		r, off := a.place(e, where)
		c.List = append(c.List, r.at(off, int(a.parse(n))))
	}
	for _, v := range a.values("strides") {
		f := strings.Split(v, "/")
		r, off := a.place(e, f[0])
		c.Interleaved = append(c.Interleaved, ib.Stride{Addr: r.IOVA() + off, Bytes: a.parse(f[1]), Skip: a.parse(f[2]), LKey: r.Key()})
	}
	return c
}

// tagged is a key with another tag, if one is given: one that a window had, or
// will have.
func (a *cmdArgs) tagged(key uint32) uint32 {
	if !a.has("tag") {
		return key
	}
	return key&^0xff | uint32(a.num("tag", 0))
}

func (s *script) close(a *cmdArgs) {
	e := a.end()
	name := a.word()
	if w := e.windows[name]; w != nil {
		if err := w.Close(); err != nil {
			s.fatalf("%v", err)
		}
		return
	}
	if m := e.mkeys[name]; m != nil {
		if err := m.Close(); err != nil {
			s.printf("%s refused: %v", e.name, err)
		}
		return
	}
	if err := e.regions[name].Close(); err != nil {
		s.printf("%s refused: %v", e.name, err)
	}
}

var opcodes = map[string]ib.Opcode{"send": ib.OpSend, "send-imm": ib.OpSendImm, "send-inv": ib.OpSendInv, "write": ib.OpRDMAWrite,
	"write-imm": ib.OpRDMAWriteImm, "read": ib.OpRDMARead, "cmp-swap": ib.OpAtomicCmpSwap, "fetch-add": ib.OpAtomicFetchAdd,
	"atomic-write": ib.OpAtomicWrite, "flush": ib.OpFlush, "local-inv": ib.OpLocalInv, "bind": ib.OpBindMW,
	"configure": ib.OpConfigureMKey}

var flushTypes = map[string]ib.FlushType{"all": ib.FlushGlobal, "storage": ib.FlushPersistent, "none": 0, "unknown": 4}

func (s *script) post(a *cmdArgs) {
	e := a.end()
	word := a.word()
	wr := ib.SendWR{ID: a.num("id", 0), Op: opcodes[word], Imm: uint32(a.num("imm", 0)),
		CompareAdd: a.num("add", a.num("compare", 0)), Swap: a.num("swap", 0)}
	if wr.Op == ib.OpFlush {
		wr.FlushLevel, wr.RemoteLength = ib.FlushRange, uint32(a.num("size", 0))
		if a.flag("region") {
			wr.FlushLevel = ib.FlushMR
		}
		wr.FlushLevel = ib.FlushLevel(a.num("level", uint64(wr.FlushLevel)))
		for _, t := range a.values("for") {
			wr.FlushType |= flushTypes[t]
		}
	}
	if f := opTable[wr.Op]; (f.data == dataInWord || f.data == dataWord) && !a.has("inline") {
		r, off := a.place(e, a.str("at", "mem+0"))
		wr.SGL = []ib.SGE{r.at(off, 8)}
	}
	if l := a.sgl(e); l != nil {
		wr.SGL = l
	}
	if to := a.str("to", ""); to != "" || opTable[wr.Op].remote {
		r, off := a.place(e.peer, orDefault(to, "mem+0"))
		wr.RKey, wr.RemoteAddr = uint32(a.num("rkey", uint64(a.tagged(r.Key())))), a.num("va", r.IOVA()+off)
	}
	if inv := a.str("inv", ""); inv != "" {
		from := e.peer
		if wr.Op == ib.OpLocalInv {
			from = e
		}
		r, _ := a.place(from, inv)
		wr.InvalidateKey = a.tagged(r.Key())
	}
	if wr.Op == ib.OpBindMW {
		wr.Bind = a.bind(e, a.str("mw", "mw"))
	}
	if wr.Op == ib.OpConfigureMKey {
		wr.Configure = a.configure(e)
	}
	if text := a.str("inline", ""); text != "" {
		wr.Inline = []byte(text)
	}
	if e.q.half == initiator {
		wr.RemoteSRQN = uint32(a.num("srq", testSRQ))
	}
	if e.q.Type == ib.UD {
		wr.RemoteQPN, wr.RemoteQKey = e.peer.q.Number, uint32(a.num("qkey", 0x1234))
		addr := &Address{PD: uint32(a.num("ah-pd", testPD)), Flow: e.flow(e.peer)}
		wr.AH = ib.NewAH(ib.AHAttr{DGID: ib.GIDFromAddr(e.peer.addr)}, addr, func() error { return nil })
	}
	for name, f := range map[string]ib.SendFlags{"signaled": ib.SendSignaled, "fence": ib.SendFence, "solicited": ib.SendSolicited} {
		if a.flag(name) {
			wr.Flags |= f
		}
	}
	for range a.num("count", 1) {
		if w := s.w; w.tap != nil {
			w.tap(e, wr)
		}
		if _, err := e.q.PostSend([]ib.SendWR{wr}); err != nil {
			s.printf("%s refused: %v", e.name, err)
			return
		}
		wr.ID++
	}
}

// srq makes a shared receive queue, or closes it.
func (s *script) srq(a *cmdArgs) {
	e := a.end()
	n := uint32(a.parse(a.word()))
	if a.flag("close") {
		delete(e.srqs, n)
		return
	}
	e.srqs[n] = &SharedQueue{Number: n, Domain: uint32(a.num("domain", testXRCD)), PD: uint32(a.num("pd", testPD)),
		Recv: queue.NewRecv(16, 4), CQ: e.recvCQ}
}

func (s *script) recv(a *cmdArgs) {
	e := a.end()
	wr := ib.RecvWR{ID: a.num("id", 0), SGL: a.sgl(e)}
	to := e.recv
	if a.has("srq") {
		to = e.srqs[uint32(a.num("srq", 0))].Recv
	}
	for range a.num("count", 1) {
		if w := s.w; w.tap != nil {
			w.tap(e, wr)
		}
		if to.Post([]ib.RecvWR{wr}) != 1 {
			s.printf("%s refused: the receive queue is full", e.name)
		}
		wr.ID++
	}
	if e.recv == e.q.Recv && !e.q.Shared {
		e.q.FlushReceive()
	}
}

// take removes the named trains, or all, from the way to an end.
func (a *cmdArgs) take(e *end) []*train.Train {
	var picked []*train.Train
	indices := a.indices(e)
	for _, i := range indices {
		picked = append(picked, e.wire[i])
	}
	slices.Sort(indices)
	for i, at := range slices.Backward(indices) {
		if i > 0 && indices[i-1] == at {
			a.s.fatalf("train %d twice", at+1)
		}
		e.wire = slices.Delete(e.wire, at, at+1)
	}
	return picked
}

// indices parses the numbers of trains, as the wire command shows them.
func (a *cmdArgs) indices(e *end) []int {
	var l []int
	for w := a.word(); w != ""; w = a.word() {
		i := int(a.parse(w)) - 1
		if i < 0 || i >= len(e.wire) {
			a.s.fatalf("there is no train %d on the way to %s", i+1, e.name)
		}
		l = append(l, i)
	}
	if l == nil {
		for i := range e.wire {
			l = append(l, i)
		}
	}
	if l == nil {
		a.s.fatalf("nothing is on the way to %s", e.name)
	}
	return l
}

func (s *script) deliver(a *cmdArgs) {
	e := a.end()
	for _, t := range a.take(e) {
		e.receive(t)
	}
}

func (s *script) drop(a *cmdArgs) {
	e := a.end()
	for _, t := range a.take(e) {
		s.printf("lost: %s", describe(e, t))
	}
}

func (s *script) dup(a *cmdArgs) {
	e := a.end()
	for _, i := range a.indices(e) {
		e.wire = append(e.wire, copyTrain(e.wire[i]))
	}
}

func (s *script) move(a *cmdArgs) {
	e := a.end()
	l := a.indices(e)
	if len(l) != 2 {
		s.fatalf("move takes two numbers")
	}
	t := e.wire[l[0]]
	e.wire = slices.Insert(slices.Delete(e.wire, l[0], l[0]+1), l[1], t)
	s.show1(e)
}

func (s *script) cut(a *cmdArgs) {
	e := a.end()
	l := a.indices(e)
	for _, at := range slices.Backward(l) {
		t := e.wire[at]
		var packets []*train.Train
		for i := range t.N {
			packets = append(packets, cut(t, i, 1))
		}
		e.wire = slices.Replace(e.wire, at, at+1, packets...)
	}
	s.show1(e)
}

var kindByName = map[string]wire.Kind{"send": wire.KindSend, "write": wire.KindWrite, "read": wire.KindReadRequest,
	"read-response": wire.KindReadResponse, "ack": wire.KindAck, "atomic-ack": wire.KindAtomicAck,
	"cmp-swap": wire.KindCmpSwap, "fetch-add": wire.KindFetchAdd, "atomic-write": wire.KindAtomicWrite, "flush": wire.KindFlush,
	"cnp": wire.KindCNP, "gaps": wire.KindGaps}

var posByName = map[string]wire.Pos{"first": wire.First, "middle": wire.Middle, "last": wire.Last, "only": wire.Only}

func (s *script) alter(a *cmdArgs) {
	e := a.end()
	i := int(a.parse(a.word())) - 1
	if i < 0 || i >= len(e.wire) {
		s.fatalf("there is no train %d", i+1)
	}
	t := copyTrain(e.wire[i])
	s.setFields(e, t, a, t.PSN)
	e.wire[i] = t
	s.printf("%s", describe(e, t))
}

func (s *script) inject(a *cmdArgs) {
	e := a.end()
	t := &train.Train{From: e.peer.addr, To: e.addr, Transport: e.q.transport, SRQ: testSRQ, Kind: kindByName[a.word()],
		Start: true, End: true, DestQP: e.q.Number, N: 1, DETH: wire.DETH{QKey: 0x1234, SrcQP: e.peer.q.Number}}
	base := e.q.resp.epsn // a request that is expected
	if t.Kind == wire.KindAck || t.Kind == wire.KindGaps || t.Kind == wire.KindReadResponse || t.Kind == wire.KindAtomicAck {
		base = e.q.req.una // the answer that is expected
		t.AETH.Syndrome = wire.AckNoCredits
	} else if t.Kind != wire.KindSend {
		r := e.regions["mem"]
		t.RETH = wire.RETH{VA: r.IOVA(), RKey: r.Key()}
		t.Atomic = wire.AtomicETH{VA: r.IOVA(), RKey: r.Key()}
	}
	t.PSN = base
	s.setFields(e, t, a, base)
	s.printf("%s", describe(e, t))
	e.receive(t)
}

// setFields changes the fields of a train that are named.
func (s *script) setFields(e *end, t *train.Train, a *cmdArgs, base wire.PSN) {
	if k := a.str("kind", ""); k != "" {
		t.Kind = kindByName[k]
	}
	if p := a.str("pos", ""); p != "" {
		t.Start, t.End = posByName[p].Starts(), posByName[p].Ends()
	}
	if p := a.str("psn", ""); p != "" {
		switch p[0] {
		case '+':
			t.PSN = base.Add(int(a.parse(p[1:])))
		case '-':
			t.PSN = base.Add(-int(a.parse(p[1:])))
		default:
			t.PSN = wire.MakePSN(uint32(a.parse(p)))
		}
	}
	t.N = int(a.num("n", uint64(t.N)))
	if a.has("len") {
		t.Len = int(a.num("len", 0))
		b := make([]byte, t.Len)
		fill(b, 77)
		t.Payload.Raw, t.Payload.Off, t.MTU = [][]byte{b}, 0, t.Len
	}
	t.MTU = int(a.num("mtu", uint64(t.MTU)))
	if v := a.values("reth"); v != nil { // reth=(mem+0,100)
		r, off := a.place(e, v[0])
		t.RETH = wire.RETH{VA: r.IOVA() + off, RKey: r.Key(), Len: uint32(a.parse(v[1]))}
		t.Atomic.VA, t.Atomic.RKey = t.RETH.VA, t.RETH.RKey
	}
	t.RETH.VA, t.RETH.RKey = a.num("va", t.RETH.VA), uint32(a.num("rkey", uint64(t.RETH.RKey)))
	t.SRQ = uint32(a.num("srq", uint64(t.SRQ)))
	t.RETH.Flush.Placement = uint8(a.num("place", uint64(t.RETH.Flush.Placement)))
	t.RETH.Flush.Selectivity = uint8(a.num("select", uint64(t.RETH.Flush.Selectivity)))
	t.Atomic.SwapAdd = a.num("add", t.Atomic.SwapAdd)
	t.AETH.Syndrome = wire.Syndrome(a.num("syndrome", uint64(t.AETH.Syndrome)))
	t.Orig, t.DETH.QKey = a.num("orig", t.Orig), uint32(a.num("qkey", uint64(t.DETH.QKey)))
	if a.has("imm") {
		t.Extra, t.Imm = wire.WithImm, uint32(a.num("imm", 0))
	}
	if inv := a.str("inv", ""); inv != "" {
		r, _ := a.place(e, inv)
		t.Extra, t.Imm = wire.WithInv, r.Key()
	}
	t.Hints, t.Marked = uint8(a.num("hints", uint64(t.Hints))), int(a.num("marked", uint64(t.Marked)))
	if v := a.values("gaps"); v != nil { // gaps=(0,1,2,0)
		var g wire.Gaps
		for i := 0; i+1 < len(v); i += 2 {
			g = g.Append(int(a.parse(v[i])), int(a.parse(v[i+1])))
		}
		t.Payload.Raw, t.Payload.Off, t.Len, t.Transport = [][]byte{g}, 0, len(g), wire.Own
	}
	if a.flag("ackreq") {
		t.AckReq = true
	}
	if a.flag("other-source") {
		t.From = e.addr
	}
	if a.flag("other-transport") {
		t.Transport = wire.RD
	}
}

func (s *script) advance(a *cmdArgs) {
	d, err := time.ParseDuration(a.word())
	if err != nil {
		s.fatalf("%v", err)
	}
	lost := a.flag("lost") // nothing arrives any more
	s.stamp = true         // everything that happens is shown with its time
	s.w.advance(d, func() {
		if lost {
			s.w.a.wire, s.w.b.wire = nil, nil
		}
		s.observe()
	})
	s.stamp = false
}

// answering lets time pass while everything arrives at once.
func (s *script) answering(a *cmdArgs) {
	d, err := time.ParseDuration(a.word())
	if err != nil {
		s.fatalf("%v", err)
	}
	s.stamp = true
	s.w.advance(d, func() {
		s.observe()
		s.exchange(nil)
	})
	s.stamp = false
}

// exchange delivers everything, without loss, until nothing is on the way.
func (s *script) exchange(*cmdArgs) {
	for len(s.w.a.wire)+len(s.w.b.wire) > 0 {
		for _, e := range []*end{s.w.b, s.w.a} {
			trains := e.wire
			e.wire = nil
			for _, t := range trains {
				e.receive(t)
			}
			s.observe()
		}
	}
}

func (s *script) arm(a *cmdArgs) {
	e := a.end()
	w := a.word()
	e.recvCQ.Arm(w == "solicited")
}

func (s *script) limit(a *cmdArgs) { e := a.end(); e.recv.SetLimit(int(a.parse(a.word()))) }

func (s *script) unreadable(a *cmdArgs) { e := a.end(); e.unreadable = int(a.parse(a.word())) }

// sync lets storage do its work: it succeeds, or fails if the script wants that.
func (s *script) sync(a *cmdArgs) {
	e := a.end()
	var errno error
	if a.flag("eio") {
		errno = syscall.EIO
	}
	for _, r := range e.regions {
		if r.disk != nil {
			r.disk.err = errno
		}
	}
	if !e.work(WorkSync) {
		s.printf("nothing waits for %s's storage", e.name)
	}
}

// begin lets storage begin; "end" ends it.
func (s *script) begin(a *cmdArgs) {
	e := a.end()
	if l := a.workKind(WorkSync); !e.q.NextWork(l, &s.begun) {
		s.printf("nothing waits for %s's storage", e.name)
	}
}

func (s *script) end(a *cmdArgs) {
	e := a.end()
	s.begun.Do(e.table)
	s.showFetched(e)
	e.q.Finished(&s.begun, s.w.now)
}

var workKindNames = map[string]WorkKind{"sync": WorkSync, "send": WorkSend, "receive": WorkReceive}

func (a *cmdArgs) workKind(def WorkKind) WorkKind {
	w := a.word()
	if w == "" {
		return def
	}
	l, ok := workKindNames[w]
	if !ok {
		a.s.fatalf("no kind of work %q", w)
	}
	return l
}

// absent makes memory absent.
func (s *script) absent(a *cmdArgs) {
	e := a.end()
	r, off := a.place(e, a.word())
	r.lazy.drop(off, a.num("len", uint64(len(r.buf))-off))
}

// fetch does what waits for memory, and shows what was fetched; or it fails.
func (s *script) suspend(a *cmdArgs) {
	if e := a.end(); !e.regions[a.word()].Suspend() {
		s.printf("%s cannot be suspended", e.name)
	}
}

func (s *script) resume(a *cmdArgs) { e := a.end(); e.regions[a.word()].Resume() }
func (s *script) revoke(a *cmdArgs) { e := a.end(); e.regions[a.word()].Revoke() }

func (s *script) fetch(a *cmdArgs) {
	e := a.end()
	gone := a.flag("gone")
	some := false
	for _, l := range []WorkKind{WorkSend, WorkReceive} {
		for _, r := range e.regions {
			if r.lazy != nil {
				r.lazy.gone = gone
			}
		}
		some = e.work(l) || some
	}
	if !some {
		s.printf("%s has nothing to fetch", e.name)
	}
	s.showFetched(e)
}

func (s *script) showFetched(e *end) {
	for _, name := range slices.Sorted(maps.Keys(e.regions)) {
		if z := e.regions[name].lazy; z != nil {
			for _, f := range z.fetched {
				s.printf("%s fetched %s+%d:%d", e.name, name, f[0], f[1])
			}
			z.fetched = nil
		}
	}
}

// stored shows eight bytes as storage has them.
func (s *script) stored(a *cmdArgs) {
	e := a.end()
	r, off := a.place(e, a.word())
	s.printf("%d", binary.NativeEndian.Uint64(r.disk.stored[off:]))
}

func (s *script) poll(a *cmdArgs) {
	i := 0
	if a.end() == s.w.b {
		i = 1
	}
	s.polling[i] = a.word() != "off"
}

func (s *script) credits(a *cmdArgs) {
	e := a.end()
	switch w := a.word(); w[0] {
	case '-':
		e.credits.release(int(a.parse(w[1:])), 1)
	default:
		s.printf("%s: another queue pair has taken %d credits", e.name, e.credits.acquire(int(a.parse(w)), 1))
	}
}

func (s *script) u64(a *cmdArgs) {
	e := a.end()
	r, off := a.place(e, a.word())
	b := r.buf[off:][:8]
	if a.has("set") {
		binary.NativeEndian.PutUint64(b, a.num("set", 0))
		return
	}
	s.printf("%d", binary.NativeEndian.Uint64(b))
}

func (s *script) same(a *cmdArgs) {
	e1 := a.end()
	r1, off1 := a.place(e1, a.word())
	e2 := a.end()
	r2, off2 := a.place(e2, a.word())
	n := a.num("len", 0)
	b1, b2 := r1.buf[off1:][:n], r2.buf[off2:][:n]
	if bytes.Equal(b1, b2) {
		s.printf("the same")
		return
	}
	for i := range b1 {
		if b1[i] != b2[i] {
			s.printf("differ from byte %d on", i)
			return
		}
	}
}

func (s *script) show(a *cmdArgs) {
	for _, e := range s.w.ends() {
		s.printf("%s", describeQP(e))
	}
}

func (s *script) wire(a *cmdArgs) { s.show1(a.end()) }

// show1 lists what is on the way to an end.
func (s *script) show1(e *end) {
	for i, t := range e.wire {
		s.printf("%d: %s", i+1, describe(e, t))
	}
}

func (s *script) counters(a *cmdArgs) {
	e := a.end()
	for i := range NumCounters {
		if n := e.q.Counters[i]; n != 0 && i > CntRxBytes {
			s.printf("%v %d", i, n)
		}
	}
}

// modify parses attributes by the names that error messages use.
func (s *script) modify(a *cmdArgs) {
	e := a.end()
	at, mask := a.attributes()
	if err := e.modify(at, mask, int(a.num("window", 64))); err != nil {
		s.printf("%s refused: %v", e.name, err)
	}
}

var stateByName = map[string]ib.QPState{"reset": ib.QPReset, "init": ib.QPInit, "rtr": ib.QPRTR, "rts": ib.QPRTS,
	"sqd": ib.QPSQD, "sqe": ib.QPSQE, "err": ib.QPErr}

func (a *cmdArgs) attributes() (at ib.QPAttr, mask ib.QPAttrMask) {
	set := func(name string, bit ib.QPAttrMask, f func(v uint64)) {
		if a.has(name) {
			mask |= bit
			f(a.num(name, 0))
		}
	}
	for _, st := range []struct {
		name string
		bit  ib.QPAttrMask
		to   *ib.QPState
	}{{"state", ib.QPMaskState, &at.State}, {"cur_state", ib.QPMaskCurState, &at.CurState}} {
		if v := a.str(st.name, ""); v != "" {
			mask |= st.bit
			*st.to = stateByName[v]
		}
	}
	if a.has("access_flags") {
		mask |= ib.QPMaskAccess
		at.Access = a.access("access_flags", 0)
	}
	if a.flag("av") {
		mask |= ib.QPMaskAV
	}
	if a.flag("en_sqd_async_notify") {
		mask |= ib.QPMaskSQDAsyncNotify
		at.SQDAsyncNotify = true
	}
	set("port", ib.QPMaskPort, func(v uint64) { at.Port = uint8(v) })
	set("pkey_index", ib.QPMaskPKeyIndex, func(v uint64) { at.PKeyIndex = uint16(v) })
	set("qkey", ib.QPMaskQKey, func(v uint64) { at.QKey = uint32(v) })
	set("path_mtu", ib.QPMaskPathMTU, func(v uint64) { at.PathMTU = mtus[v] })
	set("dest_qpn", ib.QPMaskDestQPN, func(v uint64) { at.DestQPN = uint32(v) })
	set("rq_psn", ib.QPMaskRQPSN, func(v uint64) { at.RQPSN = uint32(v) })
	set("sq_psn", ib.QPMaskSQPSN, func(v uint64) { at.SQPSN = uint32(v) })
	set("timeout", ib.QPMaskTimeout, func(v uint64) { at.Timeout = uint8(v) })
	set("retry_cnt", ib.QPMaskRetryCnt, func(v uint64) { at.RetryCnt = uint8(v) })
	set("rnr_retry", ib.QPMaskRNRRetry, func(v uint64) { at.RNRRetry = uint8(v) })
	set("min_rnr_timer", ib.QPMaskMinRNRTimer, func(v uint64) { at.MinRNRTimer = uint8(v) })
	set("max_rd_atomic", ib.QPMaskMaxRDAtomic, func(v uint64) { at.MaxRDAtomic = uint8(v) })
	set("max_dest_rd_atomic", ib.QPMaskMaxDestRDAtomic, func(v uint64) { at.MaxDestRDAtomic = uint8(v) })
	return at, mask
}

func (s *script) query(a *cmdArgs) {
	q := a.end().q.Query()
	s.printf("state=%v access=%v qkey=%#x mtu=%v dest_qpn=%#x rq_psn=%06x sq_psn=%06x\ntimeout=%d retry_cnt=%d rnr_retry=%d min_rnr_timer=%d max_rd_atomic=%d max_dest_rd_atomic=%d",
		q.State, q.Access, q.QKey, q.PathMTU, q.DestQPN, q.RQPSN, q.SQPSN,
		q.Timeout, q.RetryCnt, q.RNRRetry, q.MinRNRTimer, q.MaxRDAtomic, q.MaxDestRDAtomic)
	if q.SQDraining {
		s.printf("draining")
	}
}
