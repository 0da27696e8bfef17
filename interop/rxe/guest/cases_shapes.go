package main

// Messages in many pieces, messages across the wrap of the PSN, many messages at once, and
// messages on a network with the usual frame size.

import (
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

func shapes() (rows []*testCase) {
	for _, op := range opNames {
		rows = append(rows, everyWay(testCase{name: "rc/sges/" + op.name, shortV4: true}, func(s *scene) error { return s.pieces(op.op) })...)
		rows = append(rows, everyWay(testCase{name: "rc/psnwrap/" + op.name, short: op.op == verbs.OpRDMAWrite || op.op == verbs.OpRDMARead},
			func(s *scene) error { return s.wrap(op.op) })...)
		rows = append(rows, everyWay(testCase{name: "rc/frame1500/" + op.name, frame: 1500, short: op.op == verbs.OpRDMAWrite},
			func(s *scene) error { return s.operate(verbs.RC, op.op, verbs.MTU1024, 100_000) })...)
	}
	for _, op := range opNames {
		if op.op != verbs.OpSendInv {
			rows = append(rows, everyWay(testCase{name: "rc/stream/" + op.name, short: op.op == verbs.OpSend},
				func(s *scene) error { return s.stream(streaming{op: op.op, size: 20_000, count: 100}) })...)
		}
	}
	rows = append(rows, everyWay(testCase{name: "rc/mixed", short: true}, (*scene).mixed)...)
	return rows
}

// cut divides n bytes into pieces of odd sizes with gaps between them. It returns the pieces
// and the size of a region for them.
func cut(n, pieces int) (offs, lens []int, size int) {
	const apart = 13
	at := 3
	for k := range pieces {
		l := n / pieces
		if k%2 == 0 {
			l += 7
		}
		if k == pieces-1 || l > n {
			l = n
		}
		offs, lens = append(offs, at), append(lens, l)
		at += l + apart
		n -= l
		pieces--
	}
	return offs, lens, at
}

// pieces sends a message from scattered pieces to other pieces.
func (s *scene) pieces(op verbs.Opcode) error {
	const bytes, seed = 10_001, 5
	i, t, err := s.connect(connection{sges: 8})
	if err != nil {
		return err
	}
	lOffs, lLens, size := cut(bytes, 7)
	local, remote, err := buffers(i, t, max(size, bytes)+guard)
	if err != nil {
		return err
	}
	wr := verbs.SendWR{ID: 1, Op: op, RemoteAddr: remote.addr + 1, RKey: remote.rkey, Imm: 77}
	for k := range lOffs {
		wr.SGL = append(wr.SGL, local.sge(lOffs[k], lLens[k]))
	}
	rOffs, rLens := []int{1}, []int{bytes} // WRITE and READ have one remote range
	takesReceive := op != verbs.OpRDMAWrite && op != verbs.OpRDMARead
	if takesReceive && op != verbs.OpRDMAWriteImm {
		rOffs, rLens, _ = cut(bytes, 5)
	}
	if op == verbs.OpSendInv {
		if wr.InvalidateKey, err = t.killable(t.qp); err != nil {
			return err
		}
	}
	from, to := &scattered{i.party, local, lOffs, lLens}, &scattered{t.party, remote, rOffs, rLens}
	if op == verbs.OpRDMARead {
		from, to = to, from
	}
	if err := from.fill(seed); err != nil {
		return err
	}
	if takesReceive {
		var sgl []verbs.SGE
		if op != verbs.OpRDMAWriteImm {
			for k := range rOffs {
				sgl = append(sgl, remote.sge(rOffs[k], rLens[k]))
			}
		}
		if err := t.receive(2, sgl...); err != nil {
			return err
		}
	}
	if _, err := i.do(wr); err != nil {
		return err
	}
	if takesReceive {
		wc, err := t.received(t.qp, patience)
		if err := wantStatus(t.who(), wc, err, verbs.WCSuccess); err != nil {
			return err
		}
		if wc.ByteLen != bytes {
			return fmt.Errorf("%s: received %d bytes, want %d", t.who(), wc.ByteLen, bytes)
		}
	}
	return to.check(seed)
}

// scattered is a message in pieces of a region. The pieces hold consecutive bytes of one
// pattern, so that it does not matter how the other side is divided.
type scattered struct {
	party
	r          *region
	offs, lens []int
}

func (x *scattered) fill(seed uint64) error {
	at := 0
	for k := range x.offs {
		if err := x.poke(x.r, x.offs[k], row(seed, at, x.lens[k])); err != nil {
			return err
		}
		at += x.lens[k]
	}
	return nil
}

func (x *scattered) check(seed uint64) error {
	at := 0
	for k := range x.offs {
		got, err := x.peek(x.r, x.offs[k], x.lens[k])
		if err != nil {
			return err
		}
		for n, want := range row(seed, at, x.lens[k]) {
			if got[n] != want {
				return fmt.Errorf("%s: piece %d: byte %d of the message is %#x, want %#x", x.who(), k, at+n, got[n], want)
			}
		}
		at += x.lens[k]
	}
	return nil
}

// row returns bytes of the pattern from an offset on.
func row(seed uint64, from, n int) (b []byte) {
	pattern(from+n, seed, func(i int, v byte) bool {
		if i >= from {
			b = append(b, v)
		}
		return true
	})
	return b
}

// wrap sends messages across the wrap of the 24 bits of a PSN, between two messages and inside
// of one.
func (s *scene) wrap(op verbs.Opcode) error {
	for _, psn := range []uint32{0xfffff0, 0xfffffb, 0xffffff, 0xffff94} { // with the last one the target's PSN wraps
		if err := s.streamOn(connection{psn: psn}, streaming{op: op, size: 5 * 1024, count: 6}); err != nil {
			return fmt.Errorf("from PSN %#x on: %w", psn, err)
		}
	}
	return nil
}

// streaming is a number of messages of one size, several at a time.
type streaming struct {
	op    verbs.Opcode
	size  int
	count int
}

func (s *scene) stream(x streaming) error { return s.streamOn(connection{}, x) }

// streamOn sends messages, as many at a time as the queue has room for, each from and to
// memory of its own, and checks all of them.
func (s *scene) streamOn(c connection, x streaming) error {
	c.defaults()
	i, t, err := s.connect(c)
	if err != nil {
		return err
	}
	return s.streamBetween(i, t, c.depth, x)
}

func (s *scene) streamBetween(i, t *end, depth int, x streaming) error {
	local, remote, err := buffers(i, t, depth*x.size)
	if err != nil {
		return err
	}
	takesReceive := x.op != verbs.OpRDMAWrite && x.op != verbs.OpRDMARead
	from, to, src, dst := i.party, t.party, local, remote
	if x.op == verbs.OpRDMARead {
		from, to, src, dst = t.party, i.party, remote, local
	}
	for done := 0; done < x.count; done += depth {
		n := min(depth, x.count-done)
		for k := range n {
			if err := from.fill(src, k*x.size, x.size, uint64(done+k)); err != nil {
				return err
			}
			if takesReceive {
				sgl := []verbs.SGE{remote.sge(k*x.size, x.size)}
				if x.op == verbs.OpRDMAWriteImm {
					sgl = nil
				}
				if err := t.receive(uint64(done+k), sgl...); err != nil {
					return err
				}
			}
		}
		for k := range n {
			wr := verbs.SendWR{ID: uint64(done + k), Op: x.op, SGL: []verbs.SGE{local.sge(k*x.size, x.size)}, Imm: uint32(done + k),
				RemoteAddr: remote.addr + uint64(k*x.size), RKey: remote.rkey}
			if x.op == verbs.OpSendInv {
				if wr.InvalidateKey, err = t.killable(t.qp); err != nil {
					return err
				}
			}
			if err := i.post(wr); err != nil {
				return err
			}
		}
		for k := range n {
			id := uint64(done + k)
			wc, err := i.sent(i.qp, patience)
			if err := errors.Join(wantStatus(i.who(), wc, err, verbs.WCSuccess), wantID(i, wc, id)); err != nil {
				return err
			}
			if takesReceive {
				wc, err := t.received(t.qp, patience)
				if err := errors.Join(wantStatus(t.who(), wc, err, verbs.WCSuccess), wantID(t, wc, id)); err != nil {
					return err
				}
			}
		}
		for k := range n {
			if err := to.check(dst, k*x.size, x.size, uint64(done+k)); err != nil {
				return fmt.Errorf("message %d: %w", done+k, err)
			}
		}
	}
	return nil
}

func wantID(e *end, wc verbs.WC, id uint64) error {
	if wc.ID != id {
		return fmt.Errorf("%s: request %d completed, want %d", e.who(), wc.ID, id)
	}
	return nil
}

// mixed posts all kinds of requests at once, some with a fence.
func (s *scene) mixed() error {
	const size = 3000
	i, t, err := s.connect(connection{depth: 64})
	if err != nil {
		return err
	}
	local, remote, err := buffers(i, t, 16*size)
	if err != nil {
		return err
	}
	if err := errors.Join(i.fill(local, 0, size, 1), t.fill(remote, 5*size, size, 2), setWord(t, remote, 8*size, 40)); err != nil {
		return err
	}
	for n := range 4 {
		if err := t.receive(uint64(n), remote.sge((n%2)*size, size)); err != nil {
			return err
		}
	}
	to := func(n int) uint64 { return remote.addr + uint64(n*size) }
	from := []verbs.SGE{local.sge(0, size)}
	wrs := []verbs.SendWR{
		{Op: verbs.OpSend, SGL: from},
		{Op: verbs.OpRDMARead, SGL: []verbs.SGE{local.sge(2*size, size)}, RemoteAddr: to(5)},
		{Op: verbs.OpRDMAWrite, SGL: from, RemoteAddr: to(3)},
		{Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{local.sge(8*size, 8)}, RemoteAddr: to(8), CompareAdd: 2},
		{Op: verbs.OpRDMAWriteImm, SGL: from, RemoteAddr: to(4), Imm: 9},
		{Op: verbs.OpAtomicCmpSwap, SGL: []verbs.SGE{local.sge(8*size+8, 8)}, RemoteAddr: to(8), CompareAdd: 42, Swap: 50},
		{Op: verbs.OpRDMARead, SGL: []verbs.SGE{local.sge(6*size, size)}, RemoteAddr: to(3)}, // what a WRITE before has written
		{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(2*size, size)}, RemoteAddr: to(6), Flags: verbs.SendFence},
		{Op: verbs.OpSendImm, SGL: from, Imm: 10},
		{Op: verbs.OpSend, SGL: from},
	}
	for n := range wrs {
		wrs[n].ID, wrs[n].RKey = uint64(n), remote.rkey
		if err := i.post(wrs[n]); err != nil {
			return err
		}
	}
	for n := range wrs {
		wc, err := i.sent(i.qp, patience)
		if err := errors.Join(wantStatus(i.who(), wc, err, verbs.WCSuccess), wantID(i, wc, uint64(n))); err != nil {
			return fmt.Errorf("%v: %w", wrs[n].Op, err)
		}
	}
	for n := range 4 {
		wc, err := t.received(t.qp, patience)
		if err := errors.Join(wantStatus(t.who(), wc, err, verbs.WCSuccess), wantID(t, wc, uint64(n))); err != nil {
			return err
		}
	}
	if err := errors.Join(
		t.check(remote, 0, size, 1), t.check(remote, 3*size, size, 1), t.check(remote, 4*size, size, 1), // received and written
		i.check(local, 2*size, size, 2), i.check(local, 6*size, size, 1), // read
		t.check(remote, 6*size, size, 2), // read, then written behind the fence
	); err != nil {
		return err
	}
	for _, w := range []struct {
		p    party
		r    *region
		off  int
		want uint64
	}{{i, local, 8 * size, 40}, {i, local, 8*size + 8, 42}, {t, remote, 8 * size, 50}} {
		if got, err := word(w.p, w.r, w.off); err != nil || got != w.want {
			return errors.Join(fmt.Errorf("%s: a word of atomics is %d, want %d", w.p.who(), got, w.want), err)
		}
	}
	return nil
}
