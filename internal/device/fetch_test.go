package device

// Memory that has to be fetched before it can be read or written, by storage that
// takes as long as a test wants it to: only the requests that need it wait, nothing is
// sent in vain, and everything arrives.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// pages is memory whose pages are there or have to be fetched first.
type pages struct {
	*mem.Host
	fetch func()      // if set: what storage does meanwhile
	evict func() bool // if set: whether a page goes, whenever some are used

	mu      sync.Mutex // guards what follows
	rng     *rand.Rand
	there   []bool
	fetches int
	at      int // fetches that are under way
	most    int // … at a time
}

const pageSize = 4 << 10

func (p *pages) NeverFaults() bool { return false }

// drop makes all pages of a range absent.
func (p *pages) drop(off, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := off / pageSize; i*pageSize < off+n; i++ {
		p.there[i] = false
	}
}

func (p *pages) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.evict != nil && p.evict() {
		p.there[p.rng.IntN(len(p.there))] = false
	}
	have := uint64(0)
	for have < n && p.there[(off+have)/pageSize] {
		have += min(n-have, pageSize-(off+have)%pageSize)
	}
	if have == 0 {
		return nil, mem.FaultPending
	}
	return p.Host.Run(off, have, acc)
}

func (p *pages) Gone(uint64, uint64, ib.Access) mem.FaultKind { return mem.FaultStale }

func (p *pages) Await(off, n uint64, _ ib.Access) mem.FaultKind {
	p.mu.Lock()
	p.fetches++
	p.at++
	p.most = max(p.most, p.at)
	p.mu.Unlock()
	if p.fetch != nil {
		p.fetch()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at--
	for i := off / pageSize; i*pageSize < off+n; i++ {
		p.there[i] = true
	}
	return mem.FaultNone
}

func (p *pages) busy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at > 0
}

// lazily makes the memory of an end absent, all of it.
func (e *end) lazily() *pages {
	e.t.Helper()
	closeAll(e.t, e.mr)
	h, err := mem.NewHostBytes(e.buf, allRemote, ib.LockOff)
	if err != nil {
		e.t.Fatal(err)
	}
	p := &pages{Host: h, there: make([]bool, (len(e.buf)+pageSize-1)/pageSize)}
	pd := e.pd.(*PD)
	e.mr, err = pd.registerWith(memoryOf(e.buf), allRemote, func() (mem.Backing, error) { return p, nil })
	if err != nil {
		e.t.Fatal(err)
	}
	return p
}

// counted returns the counters of the end's queue pair.
func (e *end) counted() qp.Counters {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.core.Counters
}

// Every operation, with the memory of either side absent, on the real links.
func TestFetch(t *testing.T) {
	const size = 96 << 10
	for _, l := range []string{linkLoop, linkUDP} {
		t.Run(l, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
			var lazy []*pages
			a, b := connected(t, x, y, ib.RC, 2*size+8, func(e *end) { lazy = append(lazy, e.lazily()) })
			for _, op := range []ib.Opcode{ib.OpSend, ib.OpRDMAWrite, ib.OpRDMAWriteImm, ib.OpRDMARead, ib.OpAtomicFetchAdd, ib.OpAtomicWrite} {
				for who := range 4 {
					for i, p := range lazy {
						if who>>i&1 != 0 {
							p.drop(0, 2*size+8)
						}
					}
					fill(a.buf[:size], byte(op)+byte(who))
					fill(b.buf[:size], byte(op)+byte(who)+100)
					n := size
					wr := ib.SendWR{Op: op, RemoteAddr: b.mr.Addr() + size, RKey: b.mr.RKey(), CompareAdd: 1}
					from, to := a.buf[:size], b.buf[size:]
					switch op {
					case ib.OpRDMARead:
						wr.RemoteAddr -= size
						from, to = b.buf[:size], a.buf[size:]
						wr.SGL = a.sge(size, n)
					case ib.OpAtomicFetchAdd: // to a word that counts
						wr.RemoteAddr += size
						from, to, n = binary.NativeEndian.AppendUint64(nil, uint64(who)), a.buf[size:], 8
						wr.SGL = a.sge(size, n)
					default:
						if op == ib.OpAtomicWrite {
							n = 8
						}
						wr.SGL = a.sge(0, n)
						b.recv(ib.RecvWR{SGL: b.sge(size, size)})
					}
					a.post(wr)
					a.ok()
					if k := firstDifference(from[:n], to[:n]); k >= 0 {
						t.Fatalf("%v, absent %b: wrong from byte %d on", op, who, k)
					}
				}
			}
			ca, cb := a.counted(), b.counted()
			if ca[qp.CntFaultWaits] < 10 || cb[qp.CntFaultRNR] < 10 || ca[qp.CntFaultRNR]+cb[qp.CntFaultWaits] != 0 {
				t.Errorf("waits %d and %d, put off %d and %d", ca[qp.CntFaultWaits], cb[qp.CntFaultWaits], ca[qp.CntFaultRNR], cb[qp.CntFaultRNR])
			}
			if c := countsOf(y); c["page_fault_rnr_naks"] != cb[qp.CntFaultRNR] {
				t.Errorf("the device counts %d, its only queue pair %d", c["page_fault_rnr_naks"], cb[qp.CntFaultRNR])
			}
		})
	}
}

// Storage takes 200 ms for one queue pair's memory, and retries are few: nothing
// is used up, few packets are sent, and another queue pair on the same devices
// does not notice.
func TestFetchSlowly(t *testing.T) {
	t.Setenv("VERBENA_SCATTER_TO_CQE", "0") // or short results would not wait for memory, but in their completion
	const size, slow = 64 << 10, 200 * time.Millisecond
	for _, c := range []struct {
		op    ib.Opcode
		local bool // the memory of the requester is absent
	}{
		{ib.OpRDMAWrite, false}, {ib.OpRDMAWrite, true}, {ib.OpRDMARead, false}, {ib.OpRDMARead, true},
		{ib.OpSend, false}, {ib.OpSend, true}, {ib.OpAtomicFetchAdd, false}, {ib.OpAtomicFetchAdd, true},
		{ib.OpAtomicWrite, false}, {ib.OpAtomicWrite, true},
	} {
		bubble(t, fmt.Sprintf("%v/local=%v", c.op, c.local), func(t *testing.T) {
			_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
			fastA, fastB := connected(t, devs[0], devs[1], ib.RC, 4096, func(e *end) { e.pause = virtualPause })
			var lazy *pages
			var ends []*end
			a, b := connected(t, devs[0], devs[1], ib.RC, size, func(e *end) {
				e.timeout, e.retries, e.pause = 12, 1, virtualPause // 17 ms
				if ends = append(ends, e); (len(ends) == 1) == c.local {
					lazy = e.lazily()
					lazy.fetch = func() { time.Sleep(slow) }
				}
			})
			one := func() time.Duration {
				start := time.Now()
				fastA.post(fastA.write(fastB, 0, 4096))
				fastA.ok()
				return time.Since(start)
			}
			alone := one()

			n, from, to := size, a.buf, b.buf
			if c.op == ib.OpRDMARead || c.op == ib.OpAtomicFetchAdd {
				from, to = b.buf, a.buf
			}
			if c.op == ib.OpAtomicFetchAdd || c.op == ib.OpAtomicWrite {
				n = 8
			}
			fill(from, 9)
			want := bytes.Clone(from[:n])
			if c.op == ib.OpSend {
				b.recv(ib.RecvWR{SGL: b.sge(0, size)})
			}
			start := time.Now()
			a.post(ib.SendWR{Op: c.op, SGL: a.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(), CompareAdd: 1})
			for !lazy.busy() {
				time.Sleep(near)
			}
			for range 500 {
				if took := one(); took > 2*alone {
					t.Fatalf("a WRITE took %v beside it, %v alone", took, alone)
				}
			}
			if !lazy.busy() {
				t.Fatal("it was not slow")
			}
			a.ok()
			took := time.Since(start)
			if took < slow || took > slow+slow/4 {
				t.Errorf("it took %v", took)
			}
			if !bytes.Equal(to[:n], want) {
				t.Error("other bytes")
			}
			ca, cb := a.counted(), b.counted()
			t.Logf("%v, %d packets one way, %d the other, %d sent again, %d RNR NAKs, %d fetches",
				took, ca[qp.CntTxPackets], cb[qp.CntTxPackets], ca[qp.CntRetransmits], cb[qp.CntFaultRNR], lazy.fetches)
			if sent := ca[qp.CntTxPackets] + cb[qp.CntTxPackets]; sent > 4*size/1024+100 {
				t.Errorf("%d packets", sent)
			}
			if lazy.fetches != 1 {
				t.Errorf("%d fetches", lazy.fetches)
			}
			if ca[qp.CntTimeouts]+cb[qp.CntTimeouts] != 0 {
				t.Errorf("%d timeouts", ca[qp.CntTimeouts]+cb[qp.CntTimeouts])
			}
			if c.local && (ca[qp.CntFaultWaits] != 1 || cb[qp.CntFaultRNR] != 0) || !c.local && (ca[qp.CntFaultWaits] != 0 || cb[qp.CntFaultRNR] == 0) {
				t.Errorf("%d waits, put off %d times", ca[qp.CntFaultWaits], cb[qp.CntFaultRNR])
			}
		})
	}
}

// Everything that a reliable connection does, on a network that loses packets,
// with memory on both sides that has to be fetched, and goes again at any time.
func TestFetchFaulty(t *testing.T) {
	seed := testSeed(t)
	for _, w := range weathers() {
		for li, loss := range losses() {
			bubble(t, fmt.Sprintf("%s/loss%g%%", w.name, 100*loss), func(t *testing.T) {
				cfg := w.cfg
				cfg.Drop, cfg.Seed = loss, seed
				rng := rand.New(rand.NewPCG(seed, uint64(li)))
				fabric, devs := simulated(t, 2, cfg, nil)
				var sides []*side
				for c := range 2 {
					two := newSides(t, fmt.Sprint(c), devs[0], devs[1], rng, lastingOps(40, 80), ib.MTU1024, 64<<10, func(e *end) {
						e.rd, e.pause = uint8(1+rng.IntN(16)), virtualPause
						withChannel(t, e)
						p := e.lazily()
						p.rng = rand.New(rand.NewPCG(seed, rng.Uint64()))
						p.evict = func() bool { return p.rng.IntN(8) == 0 }
						p.fetch = func() {
							p.mu.Lock()
							d := time.Duration(p.rng.IntN(200)) * time.Microsecond
							if p.rng.IntN(16) == 0 {
								d += time.Duration(p.rng.IntN(100)) * time.Millisecond
							}
							p.mu.Unlock()
							time.Sleep(d)
						}
					})
					sides = append(sides, two[:]...)
				}
				start := time.Now()
				exchange(t, sides, 5*time.Minute)
				took := time.Since(start)
				time.Sleep(time.Second) // what is still under way arrives
				for _, s := range sides {
					s.finish(t)
				}
				var naks, waits, sent uint64
				for _, d := range devs {
					c := countsOf(d)
					sent += c["tx_packets"]
					naks += c["page_fault_rnr_naks"]
					waits += c["page_fault_waits"]
				}
				if n := fabric.Stats().Packets; sent != n {
					t.Errorf("the devices count %d packets handed to the link, which has had %d", sent, n)
				}
				t.Logf("%v of virtual time, put off %d times, waited %d times", took, naks, waits)
				if naks < 20 || waits < 20 {
					t.Errorf("put off %d times, waited %d times: that shows little", naks, waits)
				}
			})
		}
	}
}

// Queue pairs, regions and devices go away while memory is being fetched for
// them, on either side.
func TestFetchEndings(t *testing.T) {
	endings := map[string]func(t *testing.T, e *end){
		"close": func(t *testing.T, e *end) { closeAll(t, e.qp) },
		"error": func(t *testing.T, e *end) { e.modify(ib.QPAttr{State: ib.QPErr}, 0) },
		"reset": func(t *testing.T, e *end) { e.modify(ib.QPAttr{State: ib.QPReset}, 0) },
		"region": func(t *testing.T, e *end) {
			closed := make(chan struct{})
			go func() {
				closeAll(t, e.mr)
				close(closed)
			}()
			select {
			case <-closed:
			case <-time.After(10 * time.Second):
				t.Error("closing the region waits for storage")
			}
		},
	}
	for _, l := range []string{linkLoop, linkUDP} {
		for name, ending := range endings {
			for _, local := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/local=%v", l, name, local), func(t *testing.T) {
					x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
					var lazy *pages
					begun, end1 := make(chan struct{}, 8), make(chan struct{})
					var ends []*end
					a, b := connected(t, x, y, ib.RC, 64<<10, func(e *end) {
						if ends = append(ends, e); (len(ends) == 1) == local {
							lazy = e.lazily()
							lazy.fetch = func() { begun <- struct{}{}; <-end1 }
						}
					})
					a.post(a.write(b, 0, 64<<10))
					<-begun
					e := b
					if local {
						e = a
					}
					ending(t, e)
					if name == "error" && local {
						a.status(ib.WCWRFlushErr)
					}
					close(end1)
					switch {
					case name == "region" && local:
						a.status(ib.WCLocProtErr)
					case name == "region":
						a.status(ib.WCRemAccessErr)
					case name == "reset" && local: // it lives on
						b.modify(ib.QPAttr{State: ib.QPReset}, 0)
						a.connect(b)
						b.connect(a)
						fill(a.buf, 3)
						a.post(a.write(b, 0, 64<<10))
						a.ok()
						if !bytes.Equal(a.buf, b.buf) {
							t.Error("other bytes")
						}
					}
				})
			}
		}
	}
}

// Queue pairs come and go while workers fetch for them.
func TestFetchChurn(t *testing.T) {
	for _, l := range []string{linkLoop, linkUDP} {
		t.Run(l, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
			var wg sync.WaitGroup
			var fetched atomic.Int64
			for w := range 4 {
				rng := rand.New(rand.NewPCG(uint64(w), 4))
				wg.Go(func() {
					for range lastingOps(15, 200) {
						rec := &recorder{}
						func() {
							defer func() { _ = recover() }() // Fatal: rec has it
							a, b := newEnd(rec, x, ib.RC, 32<<10), newEnd(rec, y, ib.RC, 32<<10)
							defer a.close()
							defer b.close()
							for _, e := range []*end{a, b} {
								e.pause = virtualPause // there are two cores, and workers
								e.lazily().fetch = func() {
									fetched.Add(1)
									time.Sleep(time.Duration(w) * 100 * time.Microsecond)
								}
							}
							a.connect(b)
							b.connect(a)
							a.post(a.write(b, 0, 32<<10))
							b.post(b.read(a, 0, 32<<10))
							switch rng.IntN(3) {
							case 0:
								a.ok()
							case 1:
								a.modify(ib.QPAttr{State: ib.QPErr}, 0)
							}
						}()
						if rec.err != nil {
							t.Error(rec.err)
							return
						}
					}
				})
			}
			wg.Wait()
			t.Logf("%d fetches", fetched.Load())
		})
	}
}

// More queue pairs wait for memory than there are workers.
func TestFetchMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
		var senders []*end
		for range maxWorkers + 8 {
			a, b := connected(t, devs[0], devs[1], ib.RC, 8192, func(e *end) {
				e.pause = virtualPause
				e.lazily().fetch = func() { time.Sleep(20 * time.Millisecond) }
			})
			a.post(a.write(b, 0, 8192))
			senders = append(senders, a)
		}
		for _, a := range senders {
			a.ok()
		}
	})
}

// UC and UD: the receiver drops what it would have to wait for, and fetches, so
// that the next one finds the memory; the sender waits.
func TestFetchUnreliable(t *testing.T) {
	bubble(t, "uc", func(t *testing.T) {
		_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
		a, b := connected(t, devs[0], devs[1], ib.UC, 16<<10, func(e *end) {
			e.pause = virtualPause
			e.lazily().fetch = func() { time.Sleep(50 * time.Millisecond) }
		})
		b.recv(ib.RecvWR{ID: 7, SGL: b.sge(0, 16<<10)})
		fill(a.buf, 5)
		start := time.Now()
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 16<<10)})
		a.ok()
		if took := time.Since(start); took < 50*time.Millisecond {
			t.Errorf("it was sent after %v", took)
		}
		time.Sleep(100 * time.Millisecond)
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 16<<10)})
		a.ok()
		if wc := b.ok(); wc.ID != 7 || !bytes.Equal(a.buf, b.buf) {
			t.Errorf("%+v, or other bytes", wc)
		}
		ca, cb := a.counted(), b.counted()
		if ca[qp.CntFaultWaits] != 1 || cb[qp.CntDropFault] != 1 || ca[qp.CntRetransmits] != 0 {
			t.Errorf("%d waits, %d dropped, %d sent again", ca[qp.CntFaultWaits], cb[qp.CntDropFault], ca[qp.CntRetransmits])
		}
	})
}

func TestFetchDatagrams(t *testing.T) {
	for _, l := range []string{linkLoop, linkUDP} {
		t.Run(l, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
			a, b := newEnd(t, x, ib.UD, 4096), newEnd(t, y, ib.UD, 4096)
			t.Cleanup(a.close)
			t.Cleanup(b.close)
			a.lazily()
			lazy := b.lazily()
			a.openDatagrams(7)
			b.openDatagrams(7)
			ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
			t.Cleanup(func() { closeAll(t, ah) })
			b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
			fill(a.buf, 4)
			send := func() {
				a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 1000), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: 7})
				a.ok()
			}
			send()
			eventually(t, "the receiver has fetched", func() bool {
				lazy.mu.Lock()
				defer lazy.mu.Unlock()
				return lazy.fetches == 1 && lazy.at == 0
			})
			send()
			if wc := b.ok(); wc.ID != 1 || !bytes.Equal(b.buf[ib.GRHLength:][:1000], a.buf[:1000]) {
				t.Errorf("%+v, or other bytes", wc)
			}
			ca, cb := a.counted(), b.counted()
			if ca[qp.CntFaultWaits] != 1 || cb[qp.CntDropFault] != 1 || cb[qp.CntFaultRNR] != 0 {
				t.Errorf("%d waits, %d dropped, %d RNR NAKs", ca[qp.CntFaultWaits], cb[qp.CntDropFault], cb[qp.CntFaultRNR])
			}
		})
	}
}
