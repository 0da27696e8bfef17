package device

// The rings of the local link, which lead to other processes of the host.

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
)

// byRings makes a connection between two devices of this process that talk as those
// of two processes do, by rings.
func byRings(t testing.TB, typ ib.QPType, size int) (a, b *end) {
	t.Helper()
	return tunedByRings(t, typ, size, nil)
}

func tunedByRings(t testing.TB, typ ib.QPType, size int, tune func(e *end)) (a, b *end) {
	t.Helper()
	x, y := openFor(t, linkRings), openFor(t, linkRings)
	a, b = connected(t, x, y, typ, size, tune)
	if !x.link.(*link.Shared).IsLocal(a.flow()) {
		t.Fatal("it is not by rings")
	}
	return a, b
}

// flow is how the end's packets travel.
func (e *end) flow() *train.Flow {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.core.Flow()
}

// shareMemory gives an end memory that other processes may map.
func (e *end) shareMemory(size int) {
	e.t.Helper()
	fd := must[int](e.t)(sys.NewMemfd("verbena-test", size))
	closeAll(e.t, e.mr)
	e.buf = must[[]byte](e.t)(sys.MapMemfd(fd, size))
	s := mem.AddSegment(e.buf, fd)
	e.mr = must[provider.MR](e.t)(e.pd.RegMR(e.buf, allRemote))
	buf := e.buf
	e.t.Cleanup(func() { // what is registered last is closed first: the region is still there
		closeAll(e.t, e.qp, e.mr)
		s.Close()
		_ = sys.Unmap(buf)
		_ = sys.CloseFD(fd)
	})
}

// The first datagrams to a process, sent before there is a channel to it and where packets
// are not wanted, wait for the channel: none is lost, and each completes when it has left. A
// queue pair that is closed, reset or fails while it waits leaves nothing behind, and what it
// had to send is not sent any more.
func TestLocalFirstDatagrams(t *testing.T) {
	for name, end := range map[string]func(a *end){
		"sent":  nil,
		"close": func(a *end) { closeAll(a.t, a.qp) },
		"reset": func(a *end) { a.modify(ib.QPAttr{State: ib.QPReset}, 0) },
		"error": func(a *end) { a.modify(ib.QPAttr{State: ib.QPErr}, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			x, y := openFor(t, linkRings), openFor(t, linkRings)
			x.patience = time.Hour // however long the channel takes
			a, b := newMember(t, x), newMember(t, y)
			ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
			defer closeAll(t, ah)
			for i := range 7 { // a receive less than there are
				a.datagram(ah, b, i)
			}
			if end == nil {
				for i := range 7 {
					a.completed(i)
					b.heard(i)
				}
				if n := countsOf(x)["local_undelivered"]; n != 0 {
					t.Errorf("%d were not delivered", n)
				}
				return
			}
			end(a)
			// Another queue pair is not in the way of what it left, nor the other way round.
			c := newMember(t, x)
			other := must[*ib.AH](t)(c.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
			defer closeAll(t, other)
			c.datagram(other, b, 99)
			c.completed(99)
			left := 0
			for wc := b.ok(); wc.Imm != 99; wc = b.ok() { // those that had left before, in order
				if wc.Imm != uint32(left) {
					t.Errorf("%+v, want %d", wc, left)
				}
				left++
			}
			b.hearNothing()
		})
	}
}

// datagram posts a datagram of as many bytes as the device takes.
func (e *end) datagram(ah *ib.AH, to *end, number int) {
	e.t.Helper()
	e.post(ib.SendWR{ID: uint64(number), Op: ib.OpSendImm, Imm: uint32(number), SGL: e.sge(0, min(datagramBytes, e.dev.mtu)), AH: ah,
		RemoteQPN: to.qp.Number(), RemoteQKey: mcastKey})
}

const datagramBytes = 900 // fits the receives of newMember

// completed waits for the completion of a request.
func (e *end) completed(number int) {
	e.t.Helper()
	if wc := e.ok(); wc.ID != uint64(number) {
		e.t.Fatalf("%+v, want %d", wc, number)
	}
}

// heard waits for the message that has a number as immediate data.
func (e *end) heard(number int) {
	e.t.Helper()
	if wc := e.ok(); wc.Imm != uint32(number) {
		e.t.Fatalf("%+v, want %d", wc, number)
	}
}

// fullRing is a UC or UD sender whose messages wait for room in the ring to a peer process
// that does not read. Messages are numbered, and have places of their own in both memories.
type fullRing struct {
	t           *testing.T
	a, b        *end
	ah          *ib.AH // nil for UC
	size, slot  int    // bytes of a message, and of its place
	header      int    // bytes before the message in its receive
	next, left  int    // the first messages that are not posted, and that have not left
	count, more int    // how many there may be; and how many more are posted when the ring is full
}

// fillRing posts messages until they wait, also datagrams as long as it takes.
func fillRing(t *testing.T, typ ib.QPType) *fullRing {
	t.Helper()
	x, y := openFor(t, linkRings), openFor(t, linkRings)
	x.patience = time.Hour
	f := &fullRing{t: t, size: 64 << 10, count: 64, more: 4}
	if typ == ib.UD {
		f.size, f.count, f.more, f.header = min(4096, x.mtu), 640, 20, ib.GRHLength // more than are sent at once
	}
	f.slot = f.size + f.header
	f.a, f.b = newEnd(t, x, typ, f.count*f.slot), newEnd(t, y, typ, f.count*f.slot)
	t.Cleanup(f.a.close)
	t.Cleanup(f.b.close)
	closeAll(t, f.b.qp)
	f.b.qp = must[provider.QP](t)(f.b.pd.CreateQP(provider.QPConfig{Type: typ, SendCQ: f.b.cq, RecvCQ: f.b.cq,
		Cap: ib.QPCap{MaxSendWR: 1, MaxRecvWR: f.count, MaxRecvSGE: 1}}))
	if typ == ib.UD {
		f.a.openDatagrams(mcastKey)
		f.b.openDatagrams(mcastKey)
		f.ah = must[*ib.AH](t)(f.a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
		t.Cleanup(func() { closeAll(t, f.ah) })
	} else {
		f.a.connect(f.b)
		f.b.connect(f.a)
	}
	for i := range f.count {
		f.b.recv(ib.RecvWR{ID: uint64(i), SGL: f.b.sge(i*f.slot, f.slot)})
	}
	f.post() // a datagram makes the channel
	f.a.completed(0)
	f.arrived(0, 1)
	f.left = 1
	y.first.rx.Lock() // as if its process were stopped
	for f.next < f.count/2 && !f.waits() {
		f.post()
		f.completeLeft()
	}
	for range f.more {
		f.post()
	}
	f.completeLeft()
	if f.left == f.next {
		t.Fatalf("%d of %d messages have left, to a peer that reads none", f.left, f.next)
	}
	return f
}

// waits reports whether messages wait.
func (f *fullRing) waits() bool {
	if f.ah == nil {
		return f.a.waitsForRoom()
	}
	q := f.a.qp.(*QP) // it may still be listed because it has waited for the channel
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.heldUntil != 0
}

// waitsForRoom reports whether the end has trains that the link is too busy for.
func (e *end) waitsForRoom() bool {
	e.dev.heldQPs.Lock()
	defer e.dev.heldQPs.Unlock()
	return e.qp.(*QP).listed
}

// post posts the next message.
func (f *fullRing) post() {
	f.t.Helper()
	letter(f.a.buf[f.next*f.slot:][:f.size], uint32(f.next))
	wr := ib.SendWR{ID: uint64(f.next), Op: ib.OpSendImm, Imm: uint32(f.next), SGL: f.a.sge(f.next*f.slot, f.size)}
	if f.ah != nil {
		wr.AH, wr.RemoteQPN, wr.RemoteQKey = f.ah, f.b.qp.Number(), mcastKey
	}
	f.a.post(wr)
	f.next++
}

// completeLeft takes the completions of messages that have left.
func (f *fullRing) completeLeft() {
	f.t.Helper()
	for ; f.a.cq.(*CQ).Len() > 0; f.left++ {
		f.a.completed(f.left)
	}
}

// arrived checks that the messages from one number to another arrive next, in order and whole.
func (f *fullRing) arrived(from, to int) {
	f.t.Helper()
	for i := from; i < to; i++ {
		wc := f.b.ok()
		got, err := number(f.b.buf[i*f.slot+f.header:][:f.size])
		if wc.ID != uint64(i) || wc.Imm != uint32(i) || int(wc.ByteLen) != f.header+f.size || got != uint32(i) || err != nil {
			f.t.Fatalf("message %d: %+v, %d, %v", i, wc, got, err)
		}
	}
}

// UC messages and datagrams wait for room in the ring to a process that is slow, and none is
// lost. Meanwhile reliable connections to the same process have their half of the ring, and
// other processes are reached as ever. A queue pair whose messages wait can fail, be reset and
// be closed; if the peer goes, they complete, as they do on a network without that peer.
func TestLocalRingFull(t *testing.T) {
	for _, typ := range []ib.QPType{ib.UC, ib.UD} {
		for name, end := range map[string]func(f *fullRing){
			"room again": func(f *fullRing) {
				c, d := connected(f.t, f.a.dev, f.b.dev, ib.RC, 4096, nil)
				for range 8 {
					c.post(c.write(d, 0, 4096))
				}
				if c.waitsForRoom() {
					f.t.Error("a reliable connection waits for an unreliable one")
				}
				g, h := connected(f.t, f.a.dev, openFor(f.t, linkRings), ib.UC, 4096, nil)
				h.recv(ib.RecvWR{SGL: h.sge(0, 4096)})
				g.post(ib.SendWR{Op: ib.OpSend, SGL: g.sge(0, 4096)})
				g.ok()
				h.ok()
				f.b.dev.first.rx.Unlock()
				f.arrived(1, f.next)
				for ; f.left < f.next; f.left++ {
					f.a.completed(f.left)
				}
				for range 8 {
					c.ok()
				}
				if n := countsOf(f.a.dev)["local_undelivered"]; n != 0 {
					f.t.Errorf("%d trains were lost", n)
				}
			},
			"sender closed": func(f *fullRing) {
				closeAll(f.t, f.a.qp)
				f.b.dev.first.rx.Unlock()
				f.arrived(1, f.left)
				f.b.noCompletion("what was given up")
			},
			"sender reset": func(f *fullRing) {
				f.a.modify(ib.QPAttr{State: ib.QPReset}, 0)
				f.b.dev.first.rx.Unlock()
				f.arrived(1, f.left)
				if f.ah != nil { // it can be used again
					f.a.openDatagrams(mcastKey)
					f.a.datagram(f.ah, f.b, f.next)
					f.a.completed(f.next)
					f.b.heard(f.next)
				}
				f.b.noCompletion("what was given up")
			},
			"sender in the error state": func(f *fullRing) {
				f.a.modify(ib.QPAttr{State: ib.QPErr}, 0)
				for range f.next - f.left {
					f.a.status(ib.WCWRFlushErr)
				}
				f.b.dev.first.rx.Unlock()
				f.arrived(1, f.left)
				f.b.noCompletion("what was given up")
			},
			"peer closed": func(f *fullRing) {
				b := f.b
				closeAll(f.t, b.qp, b.mr, b.cq, b.pd, b.dev)
				for ; f.left < f.next; f.left++ {
					f.a.completed(f.left)
				}
				if countsOf(f.a.dev)["local_undelivered"] == 0 {
					f.t.Error("nothing was lost, though no process has read it")
				}
			},
		} {
			t.Run(fmt.Sprintf("%v/%s", typ, name), func(t *testing.T) { end(fillRing(t, typ)) })
		}
	}
}

// Datagrams do not wait for ever, and those to other processes behind them not for each of
// them. Once the process reads again, nothing is lost any more.
func TestLocalDatagramsGivenUp(t *testing.T) {
	const longest = 50 * time.Millisecond
	f := fillRing(t, ib.UD)
	a, b := f.a, f.b
	c := newMember(t, openFor(t, linkRings))
	other := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: c.dev.GIDs()[0]}))
	t.Cleanup(func() { closeAll(t, other) })
	d := newMember(t, a.dev) // makes the channel to c's process
	first := must[*ib.AH](t)(d.pd.CreateAH(ib.AHAttr{DGID: c.dev.GIDs()[0]}))
	d.datagram(first, c, 0)
	d.completed(0)
	c.heard(0)
	closeAll(t, first)
	q := a.qp.(*QP)
	q.mu.Lock() // from now on datagrams wait for so long at most, also the one that waits already
	a.dev.patience, q.heldUntil = longest, a.dev.now()+longest
	q.rearmLocked()
	q.mu.Unlock()
	begin := time.Now()
	for q.Room() > 1 {
		f.post()
	}
	waiting := f.next - f.left
	a.datagram(other, c, f.next)
	c.heard(f.next)
	if took := time.Since(begin); took > time.Duration(waiting)*longest/2 {
		t.Errorf("it has waited for %v, behind %d datagrams to a process that is stopped", took, waiting)
	}
	for i := f.left; i <= f.next; i++ {
		a.completed(i)
	}
	if lost := countsOf(a.dev)["local_undelivered"]; lost != uint64(waiting) {
		t.Errorf("%d were lost of %d that found no room", lost, waiting)
	}
	b.dev.first.rx.Unlock()
	f.arrived(1, f.left)
	a.datagram(f.ah, b, f.next+1)
	a.completed(f.next + 1)
	b.heard(f.next + 1)
}

// WRITEs and SENDs from memory that both sides can map arrive whole, as from any
// other, and without being fetched.
func TestLocalSharedMemory(t *testing.T) {
	const size = 256 << 10
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	a, b := byRings(t, ib.RC, size)
	a.shareMemory(size)
	i := uint32(0)
	eventually(t, "the memory is mapped", func() bool {
		i++
		n := 8 * (1 + rng.IntN(1<<14))
		off := rng.IntN(size - n)
		letter(a.buf[off:][:n], i)
		wr := ib.SendWR{ID: uint64(i), Op: ib.OpRDMAWriteImm, Imm: i, SGL: a.sge(off, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}
		if i%2 == 0 {
			wr.Op = ib.OpSendImm
		}
		b.recv(ib.RecvWR{SGL: b.sge(0, size)})
		a.post(wr)
		wc := b.ok()
		if got, err := number(b.buf[:n]); err != nil || got != i || wc.Imm != got {
			t.Fatalf("message %d of %d bytes: %d, %v", i, n, got, err)
		}
		if a.ok().ID != uint64(i) {
			t.Fatal("another request has completed")
		}
		return countsOf(b.dev)["local_mapped_trains"] >= 10
	})
}

// READs bring long payloads in one copy, from the responder's memory or from a
// mapping of it; what cannot be fetched any more is asked for again, and comes by the
// ring.
func TestLocalRead(t *testing.T) {
	const size = 100 << 10 // one train
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shared), func(t *testing.T) {
			a, b := tunedByRings(t, ib.RC, size, func(e *end) { e.timeout = 21 }) // no timeout, however busy the machine is
			b.dev.grants.off.Store(true)                                          // by the ring
			if shared {
				b.shareMemory(size)
			}
			reads := 0
			read := func(meanwhile func()) {
				t.Helper()
				reads++
				letter(b.buf, uint32(reads))
				a.post(a.read(b, 0, size))
				meanwhile()
				a.ok()
				if got, err := number(a.buf); err != nil || got != uint32(reads) {
					t.Fatalf("READ %d: %d, %v", reads, got, err)
				}
			}
			way := map[bool]string{false: "local_fetched_trains", true: "local_mapped_trains"}[shared]
			eventually(t, way, func() bool {
				read(func() {})
				return countsOf(a.dev)[way] >= 10
			})
			if c := countsOf(a.dev); c["local_fetched_trains"]+c["local_mapped_trains"] != uint64(reads) || c["implied_nak_seq_err"] != 0 {
				t.Errorf("%d READs: %v", reads, c)
			}
			a.dev.first.rx.Lock() // the answer comes, and is not read
			read(func() {
				eventually(t, "it is answered", func() bool { return b.counted()[qp.CntTxBytes] == uint64(reads*size) })
				b.dev.giveUpFetches()
				a.dev.first.rx.Unlock()
			})
			if c := countsOf(a.dev); c["implied_nak_seq_err"] != 1 || b.counted()[qp.CntTxBytes] != uint64((reads+1)*size) {
				t.Errorf("%v", c)
			}

			// Regions come and go beside it, and each end of one makes others give up.
			var closed atomic.Int64
			var stop atomic.Bool
			var wg sync.WaitGroup
			wg.Go(func() {
				for ; !stop.Load(); closed.Add(1) {
					mr, err := b.pd.RegMR(make([]byte, 4096), allRemote)
					if err != nil {
						t.Error(err)
						return
					}
					closeAll(t, mr)
					time.Sleep(200 * time.Microsecond) // so that not every READ is hit; nothing depends on it
				}
			})
			eventually(t, "regions come and go", func() bool {
				read(func() {})
				return reads >= 40 && closed.Load() >= 20
			})
			stop.Store(true)
			wg.Wait()
		})
	}
}
