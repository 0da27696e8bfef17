package qp

// One end's program in the games of pair_test.go: what it posts, and what must come of it.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

const (
	areaSize  = 32 << 10
	slotSize  = 12 << 10 // a receive, or the result of a READ
	slots     = 16
	nCounters = 8
)

// pending is a request that has been posted: how it must end.
type pending struct {
	id       uint64
	op       ib.WCOpcode
	signaled bool
	verify   func() error
}

// message is what a receive must find.
type message struct {
	data []byte
	imm  uint32
	with ib.WCFlags
	op   ib.WCOpcode
}

// side is the program at one end.
type side struct {
	*end
	rng    *rand.Rand
	peer   *side
	left   int // requests to post
	nextID uint64
	posted []pending // oldest first
	fence  bool      // the next request must wait for READs

	window *mem.Window
	bound  bool   // by what was posted
	tag    uint32 // of the key that it was bound with last

	// What the peer's memory must look like once all that was posted is done.
	dst      []byte
	counters [nCounters]uint64
	inbox    []message // what has been sent to this side, oldest first

	recvLeft           int // receives to post
	recvPosted, recvID uint64

	failed    bool        // a completion was not a success
	flushing  bool        // one of a request was not: all that follow are flushed
	first     ib.WCStatus // that one's
	completed int
	received  int
}

func (s *side) reg(name string) *region { return s.regions[name] }

// newSide makes an end's memory: what it sends from, what its peer may write,
// read and count in, and where messages and results go.
func newSide(e *end, rng *rand.Rand, requests int) *side {
	s := &side{end: e, rng: rng, left: requests, dst: make([]byte, areaSize)}
	for _, r := range []struct {
		name string
		size int
	}{{"src", areaSize}, {"dst", areaSize}, {"ctr", 8 * nCounters}, {"rcv", slots * slotSize}, {"res", slots * slotSize}, {"lent", 64}} {
		m := e.register(r.name, r.size, testPD, allRights|ib.AccessFlush|ib.AccessMWBind)
		clear(m.buf)
	}
	var err error
	if s.window, err = e.table.AllocWindow(testPD, ib.MWType2); err != nil {
		e.w.t.Fatal(err)
	}
	for i := range s.reg("src").buf {
		s.reg("src").buf[i] = byte(rng.Uint32())
	}
	return s
}

// size draws the length of a message: often none, short, or just about a
// multiple of the MTU.
func (s *side) size() int {
	switch mtu := s.q.mtu; s.rng.IntN(5) {
	case 0:
		return s.rng.IntN(3)
	case 1:
		return min(max(0, mtu*s.rng.IntN(4)+s.rng.IntN(3)-1), slotSize)
	case 2:
		return s.rng.IntN(slotSize)
	default:
		return s.rng.IntN(600)
	}
}

// pieces divides a range of a region into a scatter/gather list.
func (s *side) pieces(r *region, off uint64, n int) (l []ib.SGE) {
	for len(l) < 3 && n > 0 && s.rng.IntN(2) == 0 {
		k := 1 + s.rng.IntN(n)
		l = append(l, r.at(off, k))
		off, n = off+uint64(k), n-k
	}
	if n > 0 {
		l = append(l, r.at(off, n))
	}
	return l
}

// post posts a request at random, with what must come of it.
func (s *side) post() bool {
	id := s.nextID
	n := s.size()
	from := s.rng.IntN(areaSize - n + 1)
	data := s.reg("src").buf[from:][:n]
	slot := id % slots * slotSize
	wr := ib.SendWR{ID: id, SGL: s.pieces(s.reg("src"), uint64(from), n), RemoteSRQN: testSRQ}
	p := pending{id: id, verify: func() error { return nil }}
	if s.fence {
		wr.Flags |= ib.SendFence
	}
	fenceNext := false
	remote := func(name string, off int) {
		r := s.peer.reg(name)
		wr.RKey, wr.RemoteAddr = r.Key(), r.IOVA()+uint64(off)
	}
	var after func() // what changes when it is posted
	kinds := 12
	if s.q.Type == ib.RC {
		kinds++
	}
	switch k := s.rng.IntN(kinds); {
	case k == 12: // BIND_MW and LOCAL_INV in turn
		wr.SGL = nil
		index := s.window.Key() &^ 0xff
		if s.bound {
			p.op, wr.Op, wr.InvalidateKey = ib.WCLocalInv, ib.OpLocalInv, index|s.tag
		} else {
			s.tag = uint32(s.rng.IntN(256))
			r := s.reg("lent")
			p.op, wr.Op = ib.WCBindMW, ib.OpBindMW
			wr.Bind = ib.MWBind{MW: index, RKey: s.tag, LKey: r.Key(), Addr: r.IOVA(), Length: 64, Access: ib.AccessRemote}
		}
		after = func() { s.bound = !s.bound }
	case k < 3: // SEND
		p.op, wr.Op = ib.WCSend, ib.OpSend
		m := message{data: data, op: ib.WCRecv}
		if s.rng.IntN(2) == 0 {
			wr.Op, wr.Imm = ib.OpSendImm, s.rng.Uint32()
			m.imm, m.with = wr.Imm, ib.WCWithImm
		}
		if n <= 64 && s.rng.IntN(2) == 0 {
			wr.Inline, wr.SGL = data, nil
		}
		after = func() { s.peer.expect(m) }
	case k < 6: // WRITE
		p.op, wr.Op = ib.WCRDMAWrite, ib.OpRDMAWrite
		to := s.rng.IntN(areaSize - n + 1)
		remote("dst", to)
		imm := s.rng.IntN(3) == 0
		if imm {
			wr.Op, wr.Imm = ib.OpRDMAWriteImm, s.rng.Uint32()
		}
		after = func() {
			copy(s.dst[to:], data)
			if imm {
				s.peer.expect(message{data: make([]byte, n), imm: wr.Imm, with: ib.WCWithImm, op: ib.WCRecvRDMAWithImm})
			}
		}
	case k < 8: // READ, of what does not change, or of what does with a fence behind it
		p.op, wr.Op = ib.WCRDMARead, ib.OpRDMARead
		want := s.peer.reg("src").buf
		remote("src", from)
		if s.rng.IntN(2) == 0 {
			want = bytes.Clone(s.dst)
			remote("dst", from)
			fenceNext = true
		}
		wr.SGL = s.pieces(s.reg("res"), slot, n)
		p.verify = func() error {
			if !bytes.Equal(s.reg("res").buf[slot:][:n], want[from:][:n]) {
				return fmt.Errorf("READ %d of %d bytes brought other bytes", id, n)
			}
			return nil
		}
	case k == 10: // ATOMIC WRITE
		p.op, wr.Op = ib.WCAtomicWrite, ib.OpAtomicWrite
		i := s.rng.IntN(nCounters)
		remote("ctr", 8*i)
		from &^= 7
		wr.SGL = s.pieces(s.reg("src"), uint64(min(from, areaSize-8)), 8)
		word := s.reg("src").buf[min(from, areaSize-8):][:8]
		if s.rng.IntN(2) == 0 {
			wr.SGL, wr.Inline = nil, word
		}
		after = func() { s.counters[i] = binary.NativeEndian.Uint64(word) }
	case k == 11: // FLUSH: what was written before is in storage when it completes
		p.op, wr.Op, wr.SGL = ib.WCFlush, ib.OpFlush, nil
		remote("dst", from)
		wr.RemoteLength, wr.FlushLevel = uint32(n), ib.FlushRange
		if s.rng.IntN(3) == 0 {
			wr.FlushLevel = ib.FlushMR
			from, n = 0, areaSize
		}
		wr.FlushType = ib.FlushType(1 + s.rng.IntN(3))
		if wr.FlushType&ib.FlushPersistent == 0 {
			break
		}
		// The fence keeps later WRITEs away, so that all is as it was when it is
		// looked at.
		want := bytes.Clone(s.dst[from:][:n])
		fenceNext = true
		stored := s.peer.reg("dst").disk.stored
		p.verify = func() error {
			if !bytes.Equal(stored[from:][:n], want) {
				return fmt.Errorf("FLUSH %d of %d bytes completed before they were stored", id, n)
			}
			return nil
		}
	default: // atomic
		i := s.rng.IntN(nCounters)
		remote("ctr", 8*i)
		wr.SGL = []ib.SGE{s.reg("res").at(slot, 8)}
		before, now := s.counters[i], s.counters[i]
		if k == 8 {
			p.op, wr.Op, wr.CompareAdd = ib.WCFetchAdd, ib.OpAtomicFetchAdd, s.rng.Uint64()
			now += wr.CompareAdd
		} else {
			p.op, wr.Op, wr.CompareAdd, wr.Swap = ib.WCCompSwap, ib.OpAtomicCmpSwap, s.rng.Uint64(), s.rng.Uint64()
			if s.rng.IntN(2) == 0 {
				wr.CompareAdd, now = before, wr.Swap
			}
		}
		after = func() { s.counters[i] = now }
		p.verify = func() error {
			if got := binary.NativeEndian.Uint64(s.reg("res").buf[slot:]); got != before {
				return fmt.Errorf("atomic %d returned %d, not %d", id, got, before)
			}
			return nil
		}
	}
	// A request that asks for no completion keeps its place in the queue until a
	// later one that does has completed.
	if often := max(1, uint64(s.q.sq.max)/2); s.rng.IntN(3) == 0 || id%often == 0 || s.left == 1 || p.op == ib.WCFlush {
		p.signaled = true
		wr.Flags |= ib.SendSignaled
	}
	if s.q.Shortcut != nil && s.postShort(wr) {
		s.w.log("%s: %v %d was done at once", s.name, wr.Op, id)
	} else if _, err := s.q.PostSend([]ib.SendWR{wr}); err != nil {
		return false // the queue is full
	}
	if after != nil {
		after()
	}
	s.nextID++
	s.left--
	s.fence = fenceNext
	s.posted = append(s.posted, p)
	return true
}

// expect notes that a message is on its way to this side, which needs a receive.
func (s *side) expect(m message) {
	s.inbox = append(s.inbox, m)
	s.recvLeft++
}

// hasRoom reports whether another receive may be posted: at most half of the slots
// are in use.
func (s *side) hasRoom() bool { return s.recvID-s.recvPosted < slots/2 }

// postRecv posts a receive in the next slot.
func (s *side) postRecv() {
	off := s.recvID % slots * slotSize
	if s.recv.Post([]ib.RecvWR{{ID: s.recvID, SGL: s.pieces(s.reg("rcv"), off, slotSize)}}) != 1 {
		return
	}
	s.recvLeft--
	s.recvID++
	s.q.FlushReceive()
}

// poll takes completions and checks them.
func (s *side) poll() error {
	var wcs [8]ib.WC
	for n := s.sendCQ.Poll(wcs[:]); n > 0; n = s.sendCQ.Poll(wcs[:]) {
		for i := range n {
			if err := s.sent(&wcs[i]); err != nil {
				return err
			}
		}
	}
	for n := s.recvCQ.Poll(wcs[:]); n > 0; n = s.recvCQ.Poll(wcs[:]) {
		for i := range n {
			if err := s.arrived(&wcs[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// sent checks the completion of a request: it is the next one that asked for a
// completion, and all before it are done.
func (s *side) sent(wc *ib.WC) error {
	s.w.log("%s", describeWC(s.end, "send", wc))
	for len(s.posted) > 0 {
		p := s.posted[0]
		if s.flushing && p.id != wc.ID {
			return fmt.Errorf("%s: completion of %d before that of %d", s.name, wc.ID, p.id)
		}
		s.posted = s.posted[1:]
		s.completed++
		if p.id != wc.ID {
			if p.signaled {
				return fmt.Errorf("%s: request %d was passed over by %d", s.name, p.id, wc.ID)
			}
			if err := p.verify(); err != nil {
				return err
			}
			continue
		}
		switch {
		case s.flushing && wc.Status != ib.WCWRFlushErr:
			return fmt.Errorf("%s: request %d ended with %v after a failure", s.name, wc.ID, wc.Status)
		case wc.Status != ib.WCSuccess:
			if !s.flushing {
				s.failed, s.flushing, s.first = true, true, wc.Status
			}
			return nil
		case !p.signaled || wc.Op != p.op:
			return fmt.Errorf("%s: request %d completed as %+v", s.name, wc.ID, wc)
		}
		return p.verify()
	}
	return fmt.Errorf("%s: completion of %d, which is not outstanding", s.name, wc.ID)
}

// arrived checks a receive: it is the next one posted, with the next message.
func (s *side) arrived(wc *ib.WC) error {
	s.w.log("%s", describeWC(s.end, "recv", wc))
	if wc.ID != s.recvPosted {
		return fmt.Errorf("%s: receive %d completed, it was the turn of %d", s.name, wc.ID, s.recvPosted)
	}
	s.recvPosted++
	if wc.Status != ib.WCSuccess {
		s.failed = true
		return nil
	}
	if len(s.inbox) == 0 {
		return fmt.Errorf("%s: receive %d found a message that nobody sent", s.name, wc.ID)
	}
	m := s.inbox[0]
	s.inbox = s.inbox[1:]
	s.received++
	if wc.Op != m.op || wc.ByteLen != uint32(len(m.data)) || wc.Imm != m.imm || wc.Flags != m.with {
		return fmt.Errorf("%s: receive %d completed as %+v, sent was %v of %d bytes, imm %d", s.name, wc.ID, *wc, m.op, len(m.data), m.imm)
	}
	if m.op == ib.WCRecv && !bytes.Equal(s.reg("rcv").buf[wc.ID%slots*slotSize:][:len(m.data)], m.data) {
		return fmt.Errorf("%s: receive %d holds other bytes", s.name, wc.ID)
	}
	return nil
}

// done reports whether nothing is outstanding.
func (s *side) done() bool {
	return s.left == 0 && len(s.posted) == 0 && (s.failed || s.peer.failed || len(s.inbox) == 0)
}
