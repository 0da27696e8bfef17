package device

// Memory that moves while peers use it, on every link, and by grant.

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
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
	if err := unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(m.seen))); err != nil {
		t.Error(err)
	}
	copy(m.seen, m.kept)
}

// WRITEs, READs, SENDs and atomics go on while the memory of both sides moves: nothing
// is lost, nothing is done twice, and no request reads poison.
func TestMovingMemory(t *testing.T) {
	const size, counter = 256 << 10, 256<<10 - 4096
	for _, way := range []struct {
		name, link    string
		rings, shared bool
	}{{"loop", linkLoop, false, false}, {"rings", "", true, false}, {"grants", "", true, true}, {"udp", linkUDP, false, false}} {
		t.Run(way.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(testSeed(t), 0))
			var a, b *end
			if way.rings {
				a, b = byRings(t, ib.RC, 4096)
			} else {
				a, b = pair(t, way.link, ib.RC, 4096)
			}
			both := []*moving{a.makeMoving(size, way.shared), b.makeMoving(size, way.shared)}
			var stop atomic.Bool
			moved := make(chan int)
			seed := rng.Uint64()
			go func() {
				rng, n := rand.New(rand.NewPCG(seed, 1)), 0
				for ; !stop.Load(); n++ {
					both[min(rng.IntN(4), 1)].move(t)
					for until := time.Now().Add(time.Duration(rng.IntN(200)) * time.Microsecond); time.Now().Before(until); {
						runtime.Gosched() // sleeping would take a millisecond
					}
				}
				moved <- n
			}()
			adds := uint64(0)
			for began, i := time.Now(), 0; (i < 200 || time.Since(began) < lasting(time.Second, 4*time.Second)) && !t.Failed(); i++ {
				n := 8 * (1 + rng.IntN(1+rng.IntN(12<<10)))
				at := rng.IntN((counter-n)/8) * 8
				from := rng.IntN((counter-n)/8) * 8
				want := make([]byte, n)
				letter(want, uint32(i%200))
				place := func(to *end, off int) { // as a program writes: into memory that does not move just now
					for {
						l := mem.List{Table: to.dev.table, Actor: mem.Actor{PD: to.pd.(*PD).id}, Access: ib.AccessLocalWrite,
							SGEs: []ib.SGE{{Addr: to.mr.Addr() + uint64(off), Length: uint32(n), LKey: to.mr.LKey()}}}
						f, _ := mem.Copy(&l, &mem.List{Raw: [][]byte{want}}, uint64(n), true)
						if f.OK() {
							return
						}
						f.Await()
					}
				}
				look := func(at *end, off int) []byte {
					got := make([]byte, n)
					for {
						l := mem.List{Table: at.dev.table, Actor: mem.Actor{PD: at.pd.(*PD).id},
							SGEs: []ib.SGE{{Addr: at.mr.Addr() + uint64(off), Length: uint32(n), LKey: at.mr.LKey()}}}
						f, _ := mem.Copy(&mem.List{Raw: [][]byte{got}}, &l, uint64(n), true)
						if f.OK() {
							return got
						}
						f.Await()
					}
				}
				pause := func() { time.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond) } // or all of it would come just after a move
				switch i % 4 {
				case 0:
					place(a, from)
					pause()
					a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(from, n), RemoteAddr: b.mr.Addr() + uint64(at), RKey: b.mr.RKey()})
					a.ok()
					if !bytes.Equal(look(b, at), want) {
						t.Errorf("WRITE %d of %d bytes has left other bytes", i, n)
					}
				case 1:
					place(b, at)
					pause()
					a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(from, n), RemoteAddr: b.mr.Addr() + uint64(at), RKey: b.mr.RKey()})
					a.ok()
					if got := look(a, from); !bytes.Equal(got, want) {
						t.Errorf("READ %d of %d bytes has brought other bytes, poison at %d", i, n, bytes.IndexByte(got, movingPoison))
					}
				case 2:
					b.recv(ib.RecvWR{SGL: b.sge(at, n)})
					place(a, from)
					pause()
					a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(from, n)})
					a.ok()
					b.ok()
					if !bytes.Equal(look(b, at), want) {
						t.Errorf("SEND %d of %d bytes has left other bytes", i, n)
					}
				case 3:
					pause()
					a.post(ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(counter, 8), CompareAdd: 3, RemoteAddr: b.mr.Addr() + counter, RKey: b.mr.RKey()})
					a.ok()
					adds += 3
				}
			}
			stop.Store(true)
			t.Logf("%d moves", <-moved)
			if got := binary.NativeEndian.Uint64(b.buf[counter:]); got != adds {
				t.Errorf("additions of %d have left %d", adds, got)
			}
			if held := countsOf(b.dev)["memory_holds"]; held == 0 && !t.Failed() {
				t.Error("no request ever found its memory suspended")
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
	for range 200 {
		free.post(free.write(other, 0, 4096))
		free.ok()
	}
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
// letGo lets it go on.
func stuckInside(t *testing.T) (a, b *end, letGo func()) {
	t.Helper()
	a, b = byGrants(t, 4096)
	closeAll(t, b.mr)
	b.mr = must[provider.MR](t)(b.pd.RegMR(b.buf, allRemote|ib.AccessRemoteInvalidate))
	a.warm(b)
	stuck, r, wr := a.stuckWrite(b, "late word")
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
	fa, fb := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
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
	fa, fb := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
	ga, gb := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
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
