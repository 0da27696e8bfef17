package hmm

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

// side is a queue pair and what belongs to it.
type side struct {
	t   testing.TB
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
}

func newSide(t testing.TB, cfg *verbs.Config) *side {
	t.Helper()
	s := &side{t: t}
	s.dev = must[*verbs.Device](t)(verbs.Open("", cfg))
	t.Cleanup(func() {
		check(t, s.qp.Close())
		check(t, s.cq.Close())
		check(t, s.pd.Close())
		check(t, s.dev.Close())
	})
	s.pd = must[*verbs.PD](t)(s.dev.AllocPD())
	s.cq = must[*verbs.CQ](t)(s.dev.CreateCQ(256, nil))
	s.qp = must[*verbs.QP](t)(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 4, MaxRecvSGE: 4}}))
	return s
}

func peers(t testing.TB, cfg *verbs.Config) (alice, bob *side) {
	t.Helper()
	alice, bob = newSide(t, cfg), newSide(t, cfg)
	check(t, alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(t, bob.qp.Connect(alice.qp.Endpoint(), nil))
	return alice, bob
}

const all = verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic

// do executes one request, and returns how it ends.
func (s *side) do(wr verbs.SendWR) verbs.WCStatus {
	s.t.Helper()
	wr.Flags |= verbs.SendSignaled
	if _, err := s.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		s.t.Fatal(err)
	}
	wcs := make([]verbs.WC, 1)
	for {
		n, err := s.cq.Poll(wcs)
		check(s.t, err)
		if n == 1 {
			return wcs[0].Status
		}
		runtime.Gosched()
	}
}

func (s *side) wantDone(what string, got, want verbs.WCStatus) {
	s.t.Helper()
	if got != want {
		s.t.Errorf("%s: %v, should be %v", what, got, want)
	}
}

// A peer writes and reads memory whose pages are in VRAM: in place if the device reaches that, otherwise they come home. Both
// sides' memory may be so, on links of all kinds.
func TestRDMA(t *testing.T) {
	for _, c := range []struct {
		name     string
		distance func(any) int
		nic      verbs.Config
	}{
		{"within a process", nil, verbs.Config{}},
		{"by packets", nil, verbs.Config{Link: verbs.LinkUDP}},
		{"no way for peers", func(any) int { return -1 }, verbs.Config{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := open(t)
			dev := must[*Device](t)(s.AddGPU("soft:10", &GPUConfig{GPU: &gpu.Config{VRAM: 4 * mib, Distance: c.distance}}))
			alice, bob := peers(t, &c.nic)
			const n = 300_000
			b := must[[]byte](t)(s.Alloc(n + int(page)))[100:][:n]
			a := must[[]byte](t)(s.Alloc(n))[:n]
			ma, mb := must[*Mirror](t)(s.MirrorFor(a, nil)), must[*Mirror](t)(s.MirrorFor(b, nil))
			from, to := must[*verbs.MR](t)(alice.pd.RegGPU(ma, all|verbs.AccessOnDemand)), must[*verbs.MR](t)(bob.pd.RegGPU(mb, all))
			if to.Addr() != mb.Addr() {
				t.Errorf("the region begins at %#x, the memory at %#x", to.Addr(), mb.Addr())
			}
			want := random(n, 8)
			copy(a, want)
			moves(t, s, a, dev)
			moves(t, s, b, dev)
			away := s.Stats().Away
			write := verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{from.SGE(0, n)}, RemoteAddr: to.Addr(), RKey: to.RKey()}
			alice.wantDone("WRITE", alice.do(write), verbs.WCSuccess)
			if st := s.Stats(); c.distance == nil && (st.Away != away || st.HomePages != 0) {
				t.Errorf("not in place: %+v", st)
			} else if c.distance != nil && st.Away != 0 {
				t.Errorf("in place: %+v", st)
			}
			same(t, "what a peer has written", b, want)
			fill(b, 88)
			want = random(n, 88)
			moves(t, s, a, dev)
			moves(t, s, b[:n/2], dev)
			read := write
			read.Op = verbs.OpRDMARead
			alice.wantDone("READ", alice.do(read), verbs.WCSuccess)
			same(t, "what was read", a, want)

			word := (100+7)&^7 - 100 + 8 // an offset whose address is a multiple of 8
			binary.LittleEndian.PutUint64(b[word:], 40)
			moves(t, s, b, dev)
			alice.wantDone("FETCH_ADD", alice.do(verbs.SendWR{Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{from.SGE(0, 8)},
				RemoteAddr: to.Addr() + uint64(word), RKey: to.RKey(), CompareAdd: 2}), verbs.WCSuccess)
			alice.wantDone("CMP_SWAP", alice.do(verbs.SendWR{Op: verbs.OpAtomicCmpSwap, SGL: []verbs.SGE{from.SGE(8, 8)},
				RemoteAddr: to.Addr() + uint64(word), RKey: to.RKey(), CompareAdd: 42, Swap: 77}), verbs.WCSuccess)
			if x, y, z := binary.LittleEndian.Uint64(a), binary.LittleEndian.Uint64(a[8:]), binary.LittleEndian.Uint64(b[word:]); x != 40 || y != 42 || z != 77 {
				t.Errorf("atomics: %d, %d, %d", x, y, z)
			}
			// What is unmapped is refused, and so is a mirror that is closed.
			check(t, s.Unmap(b[page-100:][:page]))
			alice.wantDone("WRITE to unmapped memory", alice.do(write), verbs.WCRemAccessErr)
			check(t, mb.Close())
			check(t, to.Close())
			check(t, from.Close())
			check(t, ma.Close())
			_, err := bob.pd.RegGPU(mb, all)
			wantErr(t, "a closed mirror", err, syscall.EINVAL)
			_, err = bob.pd.RegGPU(ma, verbs.AccessRemoteWrite)
			wantErr(t, "remote without local write access", err, syscall.EINVAL)
		})
	}
}

// Requests of a peer, stores of the CPU and migrations at the same time: nothing is lost.
func TestRDMAStorm(t *testing.T) {
	seed := seed(t)
	for _, c := range []struct {
		name string
		nic  verbs.Config
	}{{"within a process", verbs.Config{}}, {"by packets", verbs.Config{Link: verbs.LinkUDP}}} {
		t.Run(c.name, func(t *testing.T) {
			s := open(t)
			one, two := addGPU(t, s, "soft:10", 2*mib), addGPU(t, s, "soft:11", 2*mib)
			alice, bob := peers(t, &c.nic)
			const pages = 32
			p := int(page)
			b := must[[]byte](t)(s.Alloc(pages * p))
			a := make([]byte, pages*p)
			m := must[*Mirror](t)(s.MirrorFor(b, nil))
			from, to := must[*verbs.MR](t)(alice.pd.RegMR(a, all)), must[*verbs.MR](t)(bob.pd.RegGPU(m, all))
			var stop atomic.Bool
			var wg sync.WaitGroup
			mine := make([]byte, pages) // what the CPU has counted to in the last byte of each page
			wg.Go(func() {
				r := rand.New(rand.NewPCG(seed, 1))
				for !stop.Load() {
					i := r.IntN(pages)
					at := &b[i*p+p-1]
					if *at != mine[i] {
						t.Errorf("page %d: a store of the CPU is lost", i)
						return
					}
					mine[i]++
					*at = mine[i]
				}
			})
			wg.Go(func() {
				r := rand.New(rand.NewPCG(seed, 2))
				for !stop.Load() {
					first := r.IntN(pages)
					part := b[first*p:][:(1+r.IntN(pages-first))*p]
					var err error
					switch r.IntN(8) {
					case 0:
						_, err = s.Exclusive(part)
					case 1:
						_, err = s.MigrateCoherent(part, one)
					case 2:
						err = s.Prefetch(part, two)
					default:
						_, err = s.Migrate(part, []*Device{one, two, nil}[r.IntN(3)])
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
			r := rand.New(rand.NewPCG(seed, 3))
			model := make([]byte, len(a))
			rounds := 400
			if testing.Short() {
				rounds = 100
			}
			for i := 0; i < rounds || s.Stats().OutPages == 0 && !t.Failed(); i++ {
				first := r.IntN(pages)
				n := 1 + r.IntN(min(4, pages-first)*p-8)
				if n >= p-8 { // not the CPU's bytes
					n = p - 8
				}
				off := first * p
				if r.IntN(2) == 0 {
					fill(a[off:][:n&^7], seed+uint64(i))
					copy(model[off:], a[off:][:n])
					alice.wantDone("WRITE", alice.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{from.SGE(off, n)}, RemoteAddr: to.Addr() + uint64(off), RKey: to.RKey()}), verbs.WCSuccess)
				} else {
					clear(a[off:][:n])
					alice.wantDone("READ", alice.do(verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{from.SGE(off, n)}, RemoteAddr: to.Addr() + uint64(off), RKey: to.RKey()}), verbs.WCSuccess)
					same(t, "what was read", a[off:][:n], model[off:][:n])
				}
			}
			stop.Store(true)
			wg.Wait()
			check(t, s.Drain())
			for i := range pages {
				same(t, "the peer's bytes", b[i*p:][:p-8], model[i*p:][:p-8])
			}
			if st := s.Stats(); st.Conflicts != 0 || st.OutPages == 0 {
				t.Errorf("%+v", st)
			}
			check(t, to.Close())
			check(t, from.Close())
			check(t, m.Close())
		})
	}
}

// gpuRegion is memory of a space that bob has registered, and from where alice writes.
type gpuRegion struct {
	alice    *side
	mirror   *Mirror
	from, to *verbs.MR
}

func newGPURegion(t testing.TB, alice, bob *side, s *Space, b []byte) (*gpuRegion, error) {
	m, err := s.MirrorFor(b, nil)
	if err != nil {
		return nil, err
	}
	return &gpuRegion{alice: alice, mirror: m, from: must[*verbs.MR](t)(alice.pd.RegMR(make([]byte, len(b)), all)), to: must[*verbs.MR](t)(bob.pd.RegGPU(m, all))}, nil
}

// wantWrite writes zeros by RDMA.
func (g *gpuRegion) wantWrite(off, n int, want verbs.WCStatus) {
	g.alice.t.Helper()
	g.alice.wantDone("WRITE", g.alice.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{g.from.SGE(0, n)}, RemoteAddr: g.to.Addr() + uint64(off), RKey: g.to.RKey()}), want)
}

func (g *gpuRegion) close() {
	g.alice.t.Helper()
	check(g.alice.t, g.from.Close())
	check(g.alice.t, g.to.Close())
	check(g.alice.t, g.mirror.Close())
}
