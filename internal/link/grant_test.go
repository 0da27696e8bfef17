package link

import (
	"bytes"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// grantWorld is two links, a of which has a grant to memory of b.
type grantWorld struct {
	t     *testing.T
	a, b  *Shared
	flow  *train.Flow
	k     taker
	seg   *mem.Segment
	buf   []byte
	given *Grant
	got   *PeerGrant
}

const grantVA, grantAt, grantSize = 0x7000_0000, 4096, 8192 // of the region, which is a part of the segment

// newGrantWorld makes b give a grant to a segment as soon as a request is offered, and waits
// until a has it.
func newGrantWorld(t *testing.T) *grantWorld {
	t.Helper()
	w := &grantWorld{t: t}
	w.buf, w.seg = newSegment(t, 1<<16)
	w.give(func(Via) *Offer {
		id, off := mem.SegmentOf(w.buf[grantAt:][:grantSize])
		return &Offer{Bytes: w.buf[grantAt:][:grantSize], Segment: id, Off: off}
	})
	return w
}

// give makes b give a grant to what offer returns.
func (w *grantWorld) give(offer func(Via) *Offer) {
	t := w.t
	t.Helper()
	w.a, w.b = sharedPair(t)
	granted := make(chan *PeerGrant, 1)
	w.b.cfg.Offer = func(_ *train.Train, via Via) bool {
		o := offer(via)
		o.QPN, o.Peer, o.RKey, o.VA, o.Write, o.Read = 9, 5, 77, grantVA, true, true
		w.given = via.NewGrant()
		return w.given.Tell(o)
	}
	w.a.cfg.Granted = func(qpn, remote uint32, l *PeerGrant) {
		if qpn != 5 || remote != 9 {
			t.Errorf("a grant from %d to %d", remote, qpn)
		}
		granted <- l
	}
	w.flow = reached(t, w.a, w.b)
	w.send()
	for deadline := time.Now().Add(10 * time.Second); w.got == nil; {
		if time.Now().After(deadline) {
			t.Fatal("no grant is given")
		}
		w.b.Poll(&w.k, 10)
		w.a.Poll(&w.k, 10)
		select {
		case w.got = <-granted:
		default:
		}
	}
}

// send sends WRITEs by the ring, just enough for one of them to be offered.
func (w *grantWorld) send() {
	w.t.Helper()
	for range offerMin {
		tr := &train.Train{Flow: w.flow, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: 1}
		tr.SetInline([]byte("eight by"))
		tr.RETH.Len = 8
		if n, err := w.a.Send([]*train.Train{tr}); n != 1 || err != nil {
			w.t.Fatal(n, err)
		}
	}
}

// write stores bytes by grant.
func (w *grantWorld) write(off uint64, b []byte) bool {
	return w.got.Copy(grantVA+off, &mem.List{Raw: [][]byte{b}}, len(b), 1, false)
}

// Bytes written by grant are where they belong, and counted. The grant ends when its owner
// shuts it, closes the segment, or is gone.
func TestGrant(t *testing.T) {
	for name, end := range map[string]func(w *grantWorld){
		"shut":    func(w *grantWorld) { w.given.Shut() },
		"segment": func(w *grantWorld) { w.seg.Close(); w.a.Poll(&w.k, 10) },
		"closed":  func(w *grantWorld) { w.got.m.c.Close() }, // as if another process had the number
		"gone": func(w *grantWorld) {
			if err := w.b.Close(); err != nil {
				w.t.Error(err)
			}
			for deadline := time.Now().Add(10 * time.Second); w.got.Good() && time.Now().Before(deadline); {
				w.a.Poll(&w.k, 10)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newGrantWorld(t)
			if !w.got.Good() || !w.a.LeadsTo(w.flow, 9, w.got) {
				t.Fatal("the grant is no good")
			}
			text := []byte("where it belongs")
			if !w.write(100, text) || !bytes.Equal(w.buf[grantAt+100:][:len(text)], text) {
				t.Error("it is not there")
			}
			if !w.write(grantSize-3, []byte("end")) || string(w.buf[grantAt+grantSize-3:][:3]) != "end" {
				t.Error("the end is not there")
			}
			back := make([]byte, len(text))
			if !w.got.Copy(grantVA+100, &mem.List{Raw: [][]byte{back}}, len(back), 1, true) || !bytes.Equal(back, text) {
				t.Errorf("%q comes back", back)
			}
			if c, want := w.given.Counts(), (shm.GrantCounts{2, 2, uint64(len(text) + 3), 1, 1, uint64(len(text))}); c != want {
				t.Errorf("counted are %v, want %v", c, want)
			}
			end(w)
			if w.got.Good() || w.write(100, []byte("too late")) {
				t.Error("the grant is still good")
			}
			if !bytes.Equal(w.buf[grantAt+100:][:len(text)], text) {
				t.Error("something was written")
			}
		})
	}
}

func TestGrantCovers(t *testing.T) {
	l := &PeerGrant{rkey: 77, rights: grantRead, va: grantVA, size: grantSize}
	if l.Covers(77, grantVA, 1, false) {
		t.Error("it may be written to")
	}
	for _, c := range []struct {
		key  uint32
		va   uint64
		n    int
		want bool
	}{
		{77, grantVA, grantSize, true}, {77, grantVA + grantSize - 1, 1, true}, {78, grantVA, 1, false},
		{77, grantVA, grantSize + 1, false}, {77, grantVA - 1, 2, false}, {77, grantVA + grantSize, 1, false}, {77, ^uint64(0), 1, false},
	} {
		if l.Covers(c.key, c.va, c.n, true) != c.want {
			t.Errorf("%d bytes at %#x with key %d: %v", c.n, c.va, c.key, !c.want)
		}
	}
}

// A copy whose source cannot be read is not counted.
func TestGrantUnread(t *testing.T) {
	w := newGrantWorld(t)
	if w.got.Copy(grantVA, &mem.List{Raw: [][]byte{{1}}}, 2, 1, false) {
		t.Error("two bytes of one are written")
	}
	if c := w.given.Counts(); c != (shm.GrantCounts{}) || w.given.Inside() || !w.got.Good() {
		t.Errorf("counted are %v, inside %v, good %v", c, w.given.Inside(), w.got.Good())
	}
}

// Malformed records are refused; records of grants to memory that does not exist have no
// effect.
func TestGrantRecord(t *testing.T) {
	w := newGrantWorld(t)
	w.a.cfg.Granted = func(uint32, uint32, *PeerGrant) { t.Error("a grant is granted") }
	id, _ := mem.SegmentOf(w.buf)
	record := func(number uint32, serial, size, segment, off uint64) []byte {
		b := make([]byte, grantRecord)
		p := packer{b}
		p.u32(5)
		p.u32(9)
		p.u32(77)
		p.u32(grantWrite | grantRead)
		p.u32(number)
		p.u64(serial)
		p.u64(grantVA)
		p.u64(size)
		p.u64(segment)
		p.u64(off)
		return b
	}
	c := w.got.m.c
	for _, bad := range [][]byte{nil, make([]byte, grantRecord-1), make([]byte, grantRecord+1),
		record(shm.MaxGrants, 1, 8, id, 0), record(1<<31, 1, 8, id, 0), record(0, 0, 8, id, 0)} {
		if w.a.takeGrant(c, bad) {
			t.Errorf("%x is taken", bad)
		}
	}
	for _, useless := range [][]byte{record(0, 1, 1<<16+1, id, 0), record(0, 1, 8, id, 1<<16-7), record(0, 1, ^uint64(0), id, 1),
		record(0, 1, 8, id, ^uint64(0)), record(0, 1, 8, 99999, 0)} {
		if !w.a.takeGrant(c, useless) {
			t.Errorf("%x is none", useless)
		}
	}
	w.a.wg.Wait() // the goroutines that would call Granted
}

// A segment can be had for writing once it was opened for that, as Tell does, and not before.
func TestPassSegmentWritable(t *testing.T) {
	memory, _ := newSegment(t, 4096)
	id, _ := mem.SegmentOf(memory)
	if _, err := PassSegment(id, true); err == nil {
		t.Fatal("it can be had")
	}
	mem.OpenSegment(id)
	fd, err := PassSegment(id, true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sys.CloseFD(fd) }()
	b, err := sys.MapMemfdWhole(fd, true)
	if err != nil {
		t.Fatal(err)
	}
	if b[5] = 7; memory[5] != 7 {
		t.Error("it is other memory")
	}
	if err := sys.Unmap(b); err != nil {
		t.Error(err)
	}
}

// Of queue pairs that send in rotation, each has requests offered, also if every offer is
// refused.
func TestGrantByTurns(t *testing.T) {
	a, b := sharedPair(t)
	for turns := uint32(2); turns <= 8; turns++ {
		looked := map[uint32]bool{}
		b.cfg.Offer = func(t *train.Train, _ Via) bool { looked[t.DestQP] = true; return false }
		reached(t, a, b)
		var c *shm.Channel
		for deadline := time.Now().Add(10 * time.Second); c == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if d, err := b.deviceAt(a.Addrs()[0]); err == nil {
				c = d.working(7)
			}
		}
		*c.Tag().(*tag) = tag{dev: c.Tag().(*tag).dev, process: 7}
		for i := range uint32(20 * offerMax) {
			b.offer(c, &train.Train{Kind: wire.KindWrite, Start: true, RETH: wire.RETH{Len: 8}, DestQP: i % turns})
		}
		if len(looked) != int(turns) {
			t.Errorf("%d of %d are looked at", len(looked), turns)
		}
	}
}
