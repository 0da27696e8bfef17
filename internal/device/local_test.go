package device

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
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
	x, y := openDevice(t, provider.Config{Link: linkLocal}), openDevice(t, provider.Config{Link: linkLocal})
	x.loopback, y.loopback = false, false
	a, b = connected(t, x, y, typ, size, tune)
	if !x.link.(*link.Shared).IsLocal(a.flow()) {
		t.Fatal("it is not by rings")
	}
	return a, b
}

// BenchmarkLocalPingPong is half a round trip of 8 bytes between two devices, in one
// goroutine: what both sides do for it, without the time that a cache line takes from
// one core to the other.
func BenchmarkLocalPingPong(b *testing.B) {
	b.Run("ring", func(b *testing.B) {
		x, y := byRings(b, ib.RC, 4096)
		benchPingPong(b, x, y)
	})
	b.Run("grant", func(b *testing.B) {
		x, y := byRings(b, ib.RC, 4096)
		x.shareMemory(4096)
		y.shareMemory(4096)
		benchPingPong(b, x, y)
	})
}

// BenchmarkUDPPingPong is the same by packets.
func BenchmarkUDPPingPong(b *testing.B) {
	x, y := pair(b, linkUDP, ib.RC, 4096)
	benchPingPong(b, x, y)
}

func benchPingPong(b *testing.B, x, y *end) {
	wr := func(from, to *end) []ib.SendWR {
		return []ib.SendWR{{Op: ib.OpRDMAWrite, Inline: make([]byte, 8), RemoteAddr: to.mr.Addr(), RKey: to.mr.RKey()}}
	}
	ends := [2]*end{x, y}
	wrs := [2][]ib.SendWR{wr(x, y), wr(y, x)}
	var wc [4]ib.WC
	b.ReportAllocs()
	for n := uint64(1); b.Loop(); n++ {
		from, to := ends[n%2], ends[1-n%2]
		w := wrs[n%2]
		binary.NativeEndian.PutUint64(w[0].Inline, n)
		w[0].Flags = 0
		if n/2%16 == 0 {
			w[0].Flags = ib.SendSignaled
		}
		if _, err := from.qp.PostSend(w); err != nil {
			b.Fatal(err)
		}
		for { // at least once: completions must be taken
			if _, err := to.cq.Poll(wc[:]); err != nil {
				b.Fatal(err)
			}
			if binary.NativeEndian.Uint64(to.buf) == n {
				break
			}
		}
	}
}

// The first datagrams to a process, sent before there is a channel to it and where
// packets are not wanted, wait for the channel: none is lost, and each completes when
// it has left.
func TestLocalFirstDatagrams(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkLocal}), openDevice(t, provider.Config{Link: linkLocal})
	x.loopback, y.loopback = false, false
	a, b := newMember(t, x), newMember(t, y)
	ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
	defer closeAll(t, ah)
	for i := range 8 {
		a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSendImm, Imm: uint32(i), Inline: []byte("early"), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: mcastKey})
	}
	for i := range 8 {
		if wc := a.ok(); wc.ID != uint64(i) {
			t.Fatalf("%+v", wc)
		}
		if wc := b.ok(); wc.Imm != uint32(i) {
			t.Fatalf("%+v", wc)
		}
	}
	if n := countsOf(x)["local_undelivered"]; n != 0 {
		t.Errorf("%d were not delivered", n)
	}
}

// A queue pair that is closed, reset or fails while it waits for a channel leaves
// nothing behind, and what it had to send is not sent any more.
func TestLocalStalledGone(t *testing.T) {
	for _, how := range []string{"close", "reset", "error"} {
		t.Run(how, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: linkLocal}), openDevice(t, provider.Config{Link: linkLocal})
			x.loopback, y.loopback = false, false
			a, b := newMember(t, x), newMember(t, y)
			ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
			defer closeAll(t, ah)
			for i := range 7 { // a receive less than there are
				a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, Inline: []byte("late"), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: mcastKey})
			}
			switch how {
			case "close":
				closeAll(t, a.qp)
			case "reset":
				a.modify(ib.QPAttr{State: ib.QPReset}, 0)
			case "error":
				a.modify(ib.QPAttr{State: ib.QPErr}, 0)
			}
			// Another one is not in the way of what it left, nor the other way round.
			c := newMember(t, x)
			ah2 := must[*ib.AH](t)(c.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
			defer closeAll(t, ah2)
			c.post(ib.SendWR{ID: 1, Op: ib.OpSendImm, Imm: 7, Inline: []byte("now"), AH: ah2, RemoteQPN: b.qp.Number(), RemoteQKey: mcastKey})
			c.ok()
			for n := 0; ; n++ {
				if wc := b.ok(); wc.Imm == 7 {
					t.Logf("%d had left before", n)
					break
				}
			}
			b.hearNothing()
		})
	}
}

const (
	fullSize  = 64 << 10
	fullCount = 64 // messages of that size: more than a ring holds
)

// fillRing sends more UC messages to a peer that does not read than the ring to it
// takes, and waits until as many have left as will.
func fillRing(t *testing.T) (a, b *end, left int) {
	t.Helper()
	a, b = byRings(t, ib.UC, fullCount*fullSize)
	b.dev.rx.Lock() // as if its process were stopped
	for i := range fullCount {
		letter(a.buf[i*fullSize:][:fullSize], uint32(i))
		b.recv(ib.RecvWR{ID: uint64(i), SGL: b.sge(i*fullSize, fullSize)})
		a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, SGL: a.sge(i*fullSize, fullSize)})
	}
	eventually(t, "it waits for the ring", a.waitsForRoom)
	for a.cq.(*CQ).Len() > 0 {
		if wc := a.ok(); wc.ID != uint64(left) {
			t.Fatalf("%+v after %d", wc, left)
		}
		left++
	}
	if left == 0 || left == fullCount {
		t.Fatalf("%d of %d messages have left, to a peer that reads none", left, fullCount)
	}
	return a, b, left
}

// waitsForRoom reports whether the end has trains that the link is too busy for.
func (e *end) waitsForRoom() bool {
	e.dev.heldQPs.Lock()
	defer e.dev.heldQPs.Unlock()
	return e.qp.(*QP).listed
}

// UC messages wait for room in the ring to a process that is slow, and none is lost.
// Meanwhile connections to the same process have their half of it, and connections
// to others are not delayed.
func TestLocalUCWaits(t *testing.T) {
	a, b, left := fillRing(t)
	c, d := connected(t, a.dev, b.dev, ib.RC, fullSize, nil)
	for range 8 {
		c.post(c.write(d, 0, 4096))
	}
	if c.waitsForRoom() {
		t.Error("a reliable connection waits for an unreliable one")
	}
	other := openDevice(t, provider.Config{Link: linkLocal})
	other.loopback = false
	e, f := connected(t, a.dev, other, ib.UC, fullSize, nil)
	f.recv(ib.RecvWR{SGL: f.sge(0, fullSize)})
	e.post(ib.SendWR{Op: ib.OpSend, SGL: e.sge(0, fullSize)})
	e.ok()
	f.ok()

	b.dev.rx.Unlock()
	for i := range fullCount {
		wc := b.ok()
		if got, err := number(b.buf[i*fullSize:][:wc.ByteLen]); wc.ID != uint64(i) || got != uint32(i) || err != nil {
			t.Fatalf("message %d: %+v, %d, %v", i, wc, got, err)
		}
	}
	for ; left < fullCount; left++ {
		if wc := a.ok(); wc.ID != uint64(left) {
			t.Fatalf("%+v, want %d", wc, left)
		}
	}
	for range 8 {
		c.ok()
	}
	if n := countsOf(a.dev)["local_undelivered"]; n != 0 {
		t.Errorf("%d trains were lost", n)
	}
}

// A queue pair that waits for room can be closed, and if the peer goes, its requests
// complete, as they do on a network without that peer.
func TestLocalUCPeerGone(t *testing.T) {
	t.Run("closed", func(t *testing.T) {
		a, b, _ := fillRing(t)
		closeAll(t, a.qp)
		b.dev.rx.Unlock()
	})
	t.Run("peer", func(t *testing.T) {
		a, b, left := fillRing(t)
		closeAll(t, b.qp, b.mr, b.cq, b.pd, b.dev)
		for ; left < fullCount; left++ {
			if wc := a.ok(); wc.ID != uint64(left) {
				t.Fatalf("%+v, want %d", wc, left)
			}
		}
		if countsOf(a.dev)["local_undelivered"] == 0 {
			t.Error("nothing was lost, though nobody has read it")
		}
	})
}

// fillWithDatagrams sends datagrams to a peer that does not read until they wait for
// room. It returns the first number that was not sent, and that has not completed.
func fillWithDatagrams(t *testing.T, patience time.Duration) (a, b *end, ah *ib.AH, next, left int) {
	t.Helper()
	x, y := openDevice(t, provider.Config{Link: linkLocal}), openDevice(t, provider.Config{Link: linkLocal})
	x.loopback, y.loopback = false, false
	x.patience = patience
	a, b = newMember(t, x), newEnd(t, y, ib.UD, 8<<10)
	t.Cleanup(b.close)
	closeAll(t, b.qp)
	b.qp = must[provider.QP](t)(b.pd.CreateQP(provider.QPConfig{Type: ib.UD, SendCQ: b.cq, RecvCQ: b.cq,
		Cap: ib.QPCap{MaxSendWR: 1, MaxRecvWR: 1024, MaxRecvSGE: 1}}))
	b.openDatagrams(mcastKey)
	for range 1024 {
		b.recv(ib.RecvWR{SGL: b.sge(0, 8<<10)})
	}
	ah = must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
	a.datagram(ah, b, 0) // makes the channel
	a.ok()
	b.ok()
	b.dev.rx.Lock() // as if its process were stopped
	q := a.qp.(*QP)
	waits := func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.heldUntil != 0
	}
	for next, left = 1, 1; next < 1000 && !waits(); next++ {
		a.datagram(ah, b, next)
		for ; a.cq.(*CQ).Len() > 0; left++ {
			a.completed(left)
		}
	}
	for ; a.cq.(*CQ).Len() > 0; left++ { // the background goroutine may have sent the last one
		a.completed(left)
	}
	if next == 1000 || next == left {
		t.Fatalf("%d of %d datagrams have left, to a peer that reads none", left, next)
	}
	return a, b, ah, next, left
}

// datagram posts a datagram of 4 KiB, or as much as the device takes.
func (e *end) datagram(ah *ib.AH, to *end, number int) {
	e.t.Helper()
	e.post(ib.SendWR{ID: uint64(number), Op: ib.OpSendImm, Imm: uint32(number), SGL: e.sge(0, min(4096, e.dev.mtu)), AH: ah,
		RemoteQPN: to.qp.Number(), RemoteQKey: mcastKey})
}

// completed waits for the completion of a request.
func (e *end) completed(number int) {
	e.t.Helper()
	if wc := e.ok(); wc.ID != uint64(number) {
		e.t.Fatalf("%+v, want %d", wc, number)
	}
}

// Datagrams wait for room in the ring to a process that is slow, and none is lost. They
// complete when they have left.
func TestLocalDatagramsWait(t *testing.T) {
	a, b, ah, next, left := fillWithDatagrams(t, time.Hour)
	for range 20 { // more than are sent at once
		a.datagram(ah, b, next)
		next++
	}
	closeAll(t, ah) // they do not need it any more
	b.dev.rx.Unlock()
	for i := 1; i < next; i++ {
		if wc := b.ok(); wc.Imm != uint32(i) {
			t.Fatalf("%+v, want %d", wc, i)
		}
	}
	for ; left < next; left++ {
		a.completed(left)
	}
	if n := countsOf(a.dev)["local_undelivered"]; n != 0 {
		t.Errorf("%d were lost", n)
	}
}

// They do not wait for ever, and those to others behind them not for each of them.
func TestLocalDatagramsPatience(t *testing.T) {
	const patience = 200 * time.Millisecond
	a, b, ah, next, left := fillWithDatagrams(t, patience)
	begin := time.Now()
	other := openDevice(t, provider.Config{Link: linkLocal})
	other.loopback = false
	c := newEnd(t, other, ib.UD, 8<<10)
	t.Cleanup(c.close)
	c.openDatagrams(mcastKey)
	c.recv(ib.RecvWR{SGL: c.sge(0, 8<<10)})
	ah2 := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: other.GIDs()[0]}))
	for range a.qp.(*QP).Room() - 1 {
		a.datagram(ah, b, next)
		next++
	}
	waiting := next - left
	a.datagram(ah2, c, next)
	if wc := c.ok(); wc.Imm != uint32(next) {
		t.Fatalf("%+v", wc)
	}
	if took := time.Since(begin); took > 10*patience {
		t.Errorf("it has waited for %v, behind %d datagrams to a process that is stopped", took, waiting)
	}
	for ; left <= next; left++ {
		a.completed(left)
	}
	lost := countsOf(a.dev)["local_undelivered"]
	if lost != uint64(waiting) {
		t.Errorf("%d were lost of %d that found no room", lost, waiting)
	}
	// Once it reads again, nothing is lost any more.
	b.dev.rx.Unlock()
	for i := 1; i < next-waiting; i++ {
		if wc := b.ok(); wc.Imm != uint32(i) {
			t.Fatalf("%+v, want %d", wc, i)
		}
	}
	a.datagram(ah, b, next+1)
	a.completed(next + 1)
	if wc := b.ok(); wc.Imm != uint32(next+1) {
		t.Errorf("%+v", wc)
	}
	closeAll(t, ah, ah2)
}

// A queue pair whose datagrams wait can fail, be reset and be closed, and does not wait
// for a process that has gone.
func TestLocalDatagramsGone(t *testing.T) {
	for _, how := range []string{"close", "reset", "error", "peer"} {
		t.Run(how, func(t *testing.T) {
			a, b, ah, next, left := fillWithDatagrams(t, time.Hour)
			defer closeAll(t, ah)
			switch how {
			case "close":
				closeAll(t, a.qp)
			case "reset":
				a.modify(ib.QPAttr{State: ib.QPReset}, 0)
				a.openDatagrams(mcastKey)
			case "error":
				a.modify(ib.QPAttr{State: ib.QPErr}, 0)
				for range next - left {
					a.status(ib.WCWRFlushErr)
				}
			case "peer":
				closeAll(t, b.qp, b.mr, b.cq, b.pd, b.dev)
				for ; left < next; left++ {
					a.completed(left)
				}
				return
			}
			b.dev.rx.Unlock()
			for i := 1; i < left; i++ {
				if wc := b.ok(); wc.Imm != uint32(i) {
					t.Fatalf("%+v, want %d", wc, i)
				}
			}
			if how == "reset" {
				a.datagram(ah, b, next)
				a.completed(next)
				if wc := b.ok(); wc.Imm != uint32(next) {
					t.Fatalf("%+v, want %d", wc, next)
				}
			}
			b.hearNothing()
		})
	}
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

// WRITEs and SENDs from memory that both sides can map arrive whole, as from any
// other, and without being fetched.
func TestLocalSharedMemory(t *testing.T) {
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	a, b := byRings(t, ib.RC, 1<<20)
	a.shareMemory(1 << 20)
	for i := range 80 {
		n := 8 * (1 + rng.IntN(1<<16))
		off := rng.IntN(1<<20 - n)
		letter(a.buf[off:][:n], uint32(i))
		wr := ib.SendWR{ID: uint64(i), Op: ib.OpRDMAWriteImm, Imm: uint32(i), SGL: a.sge(off, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}
		if i%2 == 0 {
			wr.Op = ib.OpSendImm
		}
		b.recv(ib.RecvWR{SGL: b.sge(0, 1<<20)})
		a.post(wr)
		wc := b.ok()
		if got, err := number(b.buf[:n]); err != nil || got != uint32(i) || wc.Imm != got {
			t.Fatalf("message %d of %d bytes: %d, %v", i, n, got, err)
		}
		if a.ok().ID != uint64(i) {
			t.Fatal("another request has completed")
		}
	}
	c := countsOf(b.dev)
	t.Logf("%d fetched, %d from mapped memory", c["local_fetched_trains"], c["local_mapped_trains"])
	if c["local_mapped_trains"] < 20 {
		t.Error("the memory was not mapped")
	}
}

// READs bring long payloads in one copy, from the responder's memory or from a
// mapping of it; what cannot be fetched any more is asked for again, and comes by the
// ring.
func TestLocalRead(t *testing.T) {
	const size = 100 << 10 // one train
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shared), func(t *testing.T) {
			a, b := tunedByRings(t, ib.RC, size, func(e *end) { e.timeout = 21 }) // no timeout, however busy the machine is
			if shared {
				b.dev.grants.off.Store(true) // by the ring
				b.shareMemory(size)
			}
			next := uint32(0)
			read := func(meanwhile func()) {
				t.Helper()
				next++
				letter(b.buf, next)
				a.post(a.read(b, 0, size))
				meanwhile()
				a.ok()
				if got, err := number(a.buf); err != nil || got != next {
					t.Fatalf("READ %d: %d, %v", next, got, err)
				}
			}
			for range 50 {
				read(func() {})
			}
			c := countsOf(a.dev)
			t.Logf("%d fetched, %d from mapped memory", c["local_fetched_trains"], c["local_mapped_trains"])
			if c["local_fetched_trains"]+c["local_mapped_trains"] != 50 || shared && c["local_mapped_trains"] < 20 || c["implied_nak_seq_err"] != 0 {
				t.Errorf("%v", c)
			}
			a.dev.rx.Lock() // the answer comes, and is not read
			read(func() {
				eventually(t, "it is answered", func() bool { return b.counted()[qp.CntTxBytes] == 51*size })
				b.dev.giveUpFetches()
				a.dev.rx.Unlock()
			})
			if now := countsOf(a.dev); now["implied_nak_seq_err"] != 1 || b.counted()[qp.CntTxBytes] != 52*size {
				t.Errorf("%v", now)
			}

			// Regions come and go beside it, and each end of one makes others give up.
			var stop atomic.Bool
			var wg sync.WaitGroup
			wg.Go(func() {
				for !stop.Load() {
					mr, err := b.pd.RegMR(make([]byte, 4096), allRemote)
					if err != nil {
						t.Error(err)
						return
					}
					closeAll(t, mr)
					time.Sleep(200 * time.Microsecond)
				}
			})
			for range 100 {
				read(func() {})
			}
			stop.Store(true)
			wg.Wait()
		})
	}
}

// BenchmarkLocalWrite is WRITEs with several outstanding, both sides in one
// goroutine.
func BenchmarkLocalWrite(b *testing.B) {
	for _, size := range []int{8, 4096, 65536, -65536, 1 << 20} {
		name := fmt.Sprint(size)
		if size < 0 {
			size, name = -size, fmt.Sprint(-size, "-shared")
		}
		b.Run(name, func(b *testing.B) {
			x, y := byRings(b, ib.RC, 4<<20)
			if strings.HasSuffix(name, "shared") {
				x.shareMemory(4 << 20)
			}
			wrs := []ib.SendWR{{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: x.sge(0, size), RemoteAddr: y.mr.Addr(), RKey: y.mr.RKey()}}
			var wc [16]ib.WC
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for out := 0; b.Loop(); {
				if _, err := x.qp.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				for out++; out >= 8; {
					_, _ = y.cq.Poll(wc[:])
					n, _ := x.cq.Poll(wc[:])
					out -= n
				}
			}
		})
	}
}

// flow is how the end's packets travel.
func (e *end) flow() *train.Flow {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.core.Flow()
}
