package device

// Memory that moves while peers use it, on every link, and by grant.

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

const movingPoison = 0xdb

// moving is memory of an end that moves: a file in memory, whose pages are replaced.
type moving struct {
	e    *end
	fd   int
	seen []byte // another mapping of it
	kept []byte

	dma *dmabuf.Memory // not nil: it is a dma-buf, whose exporter moves it
}

// makeDMABuf gives an end a dma-buf of several segments as its memory, at another address than
// where it lies. Of one segment, other processes may map it.
func (e *end) makeDMABuf(size, segments int) *moving {
	e.t.Helper()
	closeAll(e.t, e.mr)
	m := &moving{e: e, dma: must[*dmabuf.Memory](e.t)(dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(size) + 4096, Segments: segments}))}
	e.mr = must[provider.MR](e.t)(importer.Register(e.pd, importer.Range{Buffer: m.dma.Buffer(), Offset: 4096, Length: uint64(size), IOVA: 0x7f00_0000_0000}, allRemote))
	e.t.Cleanup(func() { closeAll(e.t, e.qp, e.mr, m.dma) })
	return m
}

// makeMoving gives an end such memory, which other processes may map if shared is set.
func (e *end) makeMoving(size int, shared bool) *moving {
	e.t.Helper()
	m := &moving{e: e, fd: must[int](e.t)(sys.NewMemfd("verbena-test", size)), kept: make([]byte, size)}
	closeAll(e.t, e.mr)
	e.buf = must[[]byte](e.t)(sys.MapMemfd(m.fd, size))
	m.seen = must[[]byte](e.t)(sys.MapMemfd(m.fd, size))
	var s *mem.Segment
	if shared {
		s = mem.AddSegment(e.buf, m.fd)
	}
	e.mr = must[provider.MR](e.t)(e.pd.RegMR(e.buf, allRemote))
	buf := e.buf
	e.t.Cleanup(func() { // what is registered last is closed first: the region is still there
		closeAll(e.t, e.qp, e.mr)
		if s != nil {
			s.Close()
		}
		_, _ = sys.Unmap(buf), sys.Unmap(m.seen)
		_ = sys.CloseFD(m.fd)
	})
	return m
}

// move suspends the region, gives its pages up full of poison, and resumes it on others.
func (m *moving) move(t testing.TB) {
	if m.dma != nil {
		must0(t, m.dma.Move(context.Background()))
		return
	}
	r := m.e.mr.(*MR).region
	if !r.Suspend() {
		t.Error("not suspended")
		return
	}
	defer r.Resume()
	copy(m.kept, m.seen)
	for i := range m.seen {
		m.seen[i] = movingPoison
	}
	time.Sleep(20 * time.Microsecond) // requests come now, also where there is one processor
	if err := unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(m.seen))); err != nil {
		t.Error(err)
	}
	copy(m.seen, m.kept)
}

// access copies bytes to or from the memory of an end as a program does: while the memory does
// not move.
func (m *moving) access(off int, b []byte, write bool) {
	l := mem.List{Table: m.e.dev.table, Actor: mem.Actor{PD: m.e.pd.(*PD).id}, SGEs: m.e.sge(off, len(b))}
	raw := mem.List{Raw: [][]byte{b}}
	to, from := &raw, &l
	if write {
		l.Access = ib.AccessLocalWrite
		to, from = &l, &raw
	}
	for {
		f, _ := mem.Copy(to, from, uint64(len(b)), true)
		if f.OK() {
			return
		}
		f.Await()
	}
}

// WRITEs, READs, SENDs and atomics go on while the memory of both sides moves: nothing
// is lost, nothing is done twice, and no request reads poison.
func TestMovingMemory(t *testing.T) {
	const size, counter = 64 << 10, 64<<10 - 4096
	for _, way := range []struct {
		name, link    string
		rings, shared bool
		dmabuf        bool
	}{
		{"loop", linkLoop, false, false, false}, {"rings", "", true, false, false},
		{"grants", "", true, true, false}, {"udp", linkUDP, false, false, false},
		{"dmabuf/loop", linkLoop, false, false, true}, {"dmabuf/rings", "", true, false, true}, {"dmabuf/grants", "", true, true, true}, {"dmabuf/udp", linkUDP, false, false, true},
	} {
		t.Run(way.name, func(t *testing.T) {
			seed := testSeed(t)
			rng := rand.New(rand.NewPCG(seed, 0))
			var a, b *end
			if way.rings {
				a, b = byRings(t, ib.RC, 4096)
			} else {
				a, b = pair(t, way.link, ib.RC, 4096)
			}
			var ma, mb *moving
			if way.dmabuf {
				segments := 3
				if way.shared {
					segments = 1
				}
				ma, mb = a.makeDMABuf(size, segments), b.makeDMABuf(size, segments)
			} else {
				ma, mb = a.makeMoving(size, way.shared), b.makeMoving(size, way.shared)
			}
			var stop atomic.Bool
			var wg sync.WaitGroup
			moves := 0
			wg.Go(func() {
				for rng := rand.New(rand.NewPCG(seed, 1)); !stop.Load(); moves++ {
					[]*moving{ma, mb}[min(rng.IntN(4), 1)].move(t)
					stormPause(rng, 200)
				}
			})
			defer wg.Wait()
			defer stop.Store(true)
			adds := uint64(0)
			enough := func(i int) bool { return i >= lastingOps(60, 1000) && countsOf(b.dev)["memory_holds"] > 0 }
			for i := 0; !enough(i) && !t.Failed(); i++ {
				if i == 10_000 {
					t.Fatal("no request ever finds its memory suspended")
				}
				n := 8 * (1 + rng.IntN(1+rng.IntN(4<<10)))
				at, from := rng.IntN((counter-n)/8)*8, rng.IntN((counter-n)/8)*8
				want, got := make([]byte, n), make([]byte, n)
				letter(want, uint32(i%200))
				wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(from, n), RemoteAddr: b.mr.Addr() + uint64(at), RKey: b.mr.RKey()}
				source, sourceAt, target, targetAt := ma, from, mb, at
				switch i % 4 {
				case 1:
					wr.Op = ib.OpRDMARead
					source, sourceAt, target, targetAt = mb, at, ma, from
				case 2:
					wr.Op = ib.OpSend
					b.recv(ib.RecvWR{SGL: b.sge(at, n)})
				case 3:
					wr = ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(counter, 8), CompareAdd: 3, RemoteAddr: b.mr.Addr() + counter, RKey: b.mr.RKey()}
					adds += 3
				}
				source.access(sourceAt, want, true)
				stormPause(rng, 200) // or every request would come just after a move
				a.post(wr)
				a.ok()
				if wr.Op == ib.OpSend {
					b.ok()
				}
				if target.access(targetAt, got, false); i%4 != 3 && !bytes.Equal(got, want) {
					t.Errorf("%v %d of %d bytes has left other bytes, poison at %d", wr.Op, i, n, bytes.IndexByte(got, movingPoison))
				}
			}
			stop.Store(true)
			wg.Wait()
			t.Logf("%d moves", moves)
			var sum [8]byte
			mb.access(counter, sum[:], false)
			if got := binary.NativeEndian.Uint64(sum[:]); got != adds {
				t.Errorf("additions of %d have left %d", adds, got)
			}
		})
	}
}

// Only the queue pairs that need suspended memory wait, also when there are more of them than
// workers; and a queue pair that is closed meanwhile, or a region that is revoked, ends the
// wait.
func TestSuspendedKeepsNobodyWaiting(t *testing.T) {
	const many = maxWorkers + 8
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	var as, bs [many]*end
	for i := range as {
		as[i], bs[i] = connected(t, x, y, ib.RC, 4096, nil)
	}
	free, other := connected(t, x, y, ib.RC, 4096, nil)
	for _, b := range bs {
		if !b.mr.(*MR).region.Suspend() {
			t.Fatal("not suspended")
		}
	}
	for i, a := range as {
		a.post(a.write(bs[i], 0, 4096))
	}
	eventually(t, "all of them wait", func() bool { return countsOf(y)["page_fault_rnr_naks"] >= many })
	goesOn(t, free, other)
	// Fetching from a disk finds a worker all the same.
	s := newSlowMemory(t, other.pd, 64<<10)
	free.post(ib.SendWR{Op: ib.OpRDMARead, SGL: free.sge(0, 4096), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
	free.ok()
	closeAll(t, as[0].qp, bs[0].qp)
	bs[1].mr.(*MR).region.Revoke()
	as[1].status(ib.WCRemAccessErr)
	for i := 2; i < many; i++ {
		bs[i].mr.(*MR).region.Resume()
		as[i].ok()
	}
	bs[0].mr.(*MR).region.Resume()
	bs[1].mr.(*MR).region.Resume()
}

// stuckInside makes a stay amid a copy by grant to the memory of b, which may be invalidated;
// letGo lets it go on. The device of a stands for a stopped process: until then a test must not
// use it.
func stuckInside(t *testing.T) (a, b *end, letGo func()) {
	t.Helper()
	a, b = byGrants(t, 4096)
	closeAll(t, b.mr)
	b.mr = must[provider.MR](t)(b.pd.RegMR(b.buf, allRemote|ib.AccessRemoteInvalidate))
	a.warm(b)
	stuck, r, wr := a.stuckWrite(b, "last word")
	t.Cleanup(func() { closeAll(t, r) })
	posted := make(chan struct{})
	go func() {
		a.post(wr)
		close(posted)
	}()
	<-stuck.begun
	return a, b, func() {
		close(stuck.end)
		<-posted
	}
}

// beside makes another queue pair in the domain of an end, connected with itself.
func (e *end) beside() *end {
	e.t.Helper()
	c := *e
	c.cq = must[provider.CQ](e.t)(e.dev.CreateCQ(16, nil))
	c.qp = must[provider.QP](e.t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: c.cq, RecvCQ: c.cq,
		Cap: ib.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}}))
	c.connect(&c)
	e.t.Cleanup(func() { closeAll(e.t, c.qp, c.cq) })
	return &c
}

// goesOn wants a connection to work.
func goesOn(t *testing.T, a, b *end) {
	t.Helper()
	for range 100 {
		a.post(a.write(b, 0, 64))
		a.ok()
	}
}

// A peer that stays amid a copy by grant delays the invalidation of the region, and nothing
// else: neither the poster, nor the queue pair's other half, nor other connections.
func TestInvalidateWaitsForNobodyUnderLocks(t *testing.T) {
	a, b, letGo := stuckInside(t)
	fa, fb := connected(t, openFor(t, linkRings), b.dev, ib.RC, 4096, nil)
	c := b.beside()
	c.post(ib.SendWR{ID: 7, Op: ib.OpLocalInv, InvalidateKey: b.mr.RKey()})
	if b.mr.(*MR).region.Alive() {
		t.Error("the key is still good")
	}
	must[ib.QPAttr](t)(b.qp.Query())
	must[ib.QPAttr](t)(c.qp.Query())
	goesOn(t, fa, fb)
	// However often it is tried, one goroutine waits for the peer.
	before := runtime.NumGoroutine()
	for range 1000 {
		if f := b.dev.table.Invalidate(b.mr.RKey(), b.qp.(*QP).core.Actor()); f.Kind != mem.FaultPending {
			t.Fatal(f)
		}
	}
	if n := runtime.NumGoroutine(); n > before+10 {
		t.Errorf("%d goroutines, %d before", n, before)
	}
	var wc [1]ib.WC
	if n := must[int](t)(c.cq.Poll(wc[:])); n != 0 {
		t.Fatalf("it is done though the peer is inside: %+v", wc[0])
	}
	letGo()
	if done := c.ok(); done.ID != 7 || done.Op != ib.WCLocalInv {
		t.Errorf("%+v", done)
	}
	a.status(ib.WCRemAccessErr) // it comes again, by the ring
}

// While the closing of a region waits for a peer, a request that invalidates it is refused
// at once, whichever peer has sent it, and no other queue pair is affected.
func TestInvalidateDuringClose(t *testing.T) {
	a, b, letGo := stuckInside(t)
	other := openFor(t, linkRings)
	fa, fb := connected(t, other, b.dev, ib.RC, 4096, nil)
	ga, gb := connected(t, other, b.dev, ib.RC, 4096, nil)
	c := b.beside()
	key := b.mr.RKey()
	closed := make(chan struct{})
	go func() {
		closeAll(t, b.mr)
		close(closed)
	}()
	eventually(t, "the key is dead", func() bool { return !b.mr.(*MR).region.Alive() })
	gb.recv(ib.RecvWR{SGL: gb.sge(0, 64)})
	ga.post(ib.SendWR{Op: ib.OpSendInv, SGL: ga.sge(0, 8), InvalidateKey: key})
	ga.status(ib.WCRemAccessErr) // another domain: it is not looked at for longer than that
	c.post(ib.SendWR{Op: ib.OpLocalInv, InvalidateKey: key})
	c.status(ib.WCMWBindErr)
	must[ib.QPAttr](t)(c.qp.Query())
	goesOn(t, fa, fb)
	select {
	case <-closed:
		t.Error("the region is closed though the peer is inside")
	default:
	}
	letGo()
	<-closed
	a.status(ib.WCRemAccessErr)
}

// A completion whose bytes go to suspended memory is announced when the memory is back:
// the program has polled nothing, armed, polled nothing, and sleeps.
func TestSuspendedCompletionIsAnnounced(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	var ch provider.Channel
	a, b := connected(t, x, y, ib.RC, 4096, func(e *end) {
		if e.dev == y {
			ch = must[provider.Channel](t)(y.CreateChannel())
			e.withQueue(16, ch)
			e.channel = ch
		}
	})
	b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 8)})
	must0(t, b.cq.RequestNotify(false))
	r := b.mr.(*MR).region
	if !r.Suspend() {
		t.Fatal("not suspended")
	}
	a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 8)})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	next := func() {
		t.Helper()
		_, err := ch.Next(ctx)
		must0(t, err)
		b.cq.Ack(1)
	}
	next()
	var wc [1]ib.WC
	for range 2 {
		if n := must[int](t)(b.cq.Poll(wc[:])); n != 0 {
			t.Fatalf("%+v", wc[0])
		}
		must0(t, b.cq.RequestNotify(false))
	}
	r.Resume()
	next()
	b.ok()
	a.ok()
}
