package device

// Memory that has to be fetched before it can be read or written, by storage that
// takes as long as a test wants it to: only the requests that need it wait, nothing is
// sent in vain, and everything arrives.

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
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

// Storage takes 200 ms for one queue pair's memory, and retries are few: nothing
// is used up, few packets are sent, and another queue pair on the same devices
// works as if nothing were.
func TestFetchKeepsNobodyWaiting(t *testing.T) {
	t.Setenv("VERBENA_SCATTER_TO_CQE", "0") // or short results would not wait for memory, but in their completion
	const size, storageTime = 64 << 10, 200 * time.Millisecond
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead, ib.OpSend, ib.OpAtomicFetchAdd, ib.OpAtomicWrite} {
		for _, local := range []bool{false, true} { // the memory of the requester is absent
			bubble(t, fmt.Sprintf("%v/local=%v", op, local), func(t *testing.T) {
				_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
				otherA, otherB := connected(t, devs[0], devs[1], ib.RC, 4096, func(e *end) { e.pause = virtualPause })
				var lazy *pages
				var ends []*end
				a, b := connected(t, devs[0], devs[1], ib.RC, size, func(e *end) {
					e.timeout, e.retries, e.pause = 12, 1, virtualPause // 17 ms
					if ends = append(ends, e); (len(ends) == 1) == local {
						lazy = e.lazily()
						lazy.fetch = func() { time.Sleep(storageTime) }
					}
				})
				one := func() time.Duration {
					start := time.Now()
					otherA.post(otherA.write(otherB, 0, 4096))
					otherA.ok()
					return time.Since(start)
				}
				alone := one()

				n, from, to := size, a.buf, b.buf
				if op == ib.OpRDMARead || op == ib.OpAtomicFetchAdd {
					from, to = b.buf, a.buf
				}
				if op == ib.OpAtomicFetchAdd || op == ib.OpAtomicWrite {
					n = 8
				}
				fill(from, 9)
				want := bytes.Clone(from[:n])
				if op == ib.OpSend {
					b.recv(ib.RecvWR{SGL: b.sge(0, size)})
				}
				start := time.Now()
				a.post(ib.SendWR{Op: op, SGL: a.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(), CompareAdd: 1})
				for !lazy.busy() {
					time.Sleep(near)
				}
				for range lastingOps(50, 500) {
					if took := one(); took > 2*alone {
						t.Fatalf("a WRITE took %v beside it, %v alone", took, alone)
					}
				}
				if !lazy.busy() {
					t.Fatal("the storage was too fast")
				}
				a.ok()
				if took := time.Since(start); took < storageTime || took > storageTime+storageTime/4 {
					t.Errorf("it took %v", took)
				}
				if !bytes.Equal(to[:n], want) {
					t.Error("other bytes")
				}
				ca, cb := a.counted(), b.counted()
				if sent := ca[qp.CntTxPackets] + cb[qp.CntTxPackets]; sent > 4*size/1024+100 {
					t.Errorf("%d packets", sent)
				}
				if lazy.fetches != 1 {
					t.Errorf("%d fetches", lazy.fetches)
				}
				if ca[qp.CntTimeouts]+cb[qp.CntTimeouts] != 0 {
					t.Errorf("%d timeouts", ca[qp.CntTimeouts]+cb[qp.CntTimeouts])
				}
				if local && (ca[qp.CntFaultWaits] != 1 || cb[qp.CntFaultRNR] != 0) || !local && (ca[qp.CntFaultWaits] != 0 || cb[qp.CntFaultRNR] == 0) {
					t.Errorf("%d waits, put off %d times", ca[qp.CntFaultWaits], cb[qp.CntFaultRNR])
				}
			})
		}
	}
}

// Everything that a reliable connection does, on a network that loses packets,
// with memory on both sides that has to be fetched, and goes again at any time. (Package qp
// plays every seed through, in TestPairPending.)
func TestFetchFaulty(t *testing.T) {
	seed := testSeed(t)
	for wi, w := range weathers() {
		for li, loss := range losses() {
			if !fullMatrix() && li != 2*wi { // one loss for each weather: none, and 5 %
				continue
			}
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
					begun, answer := make(chan struct{}, 8), make(chan struct{})
					var ends []*end
					a, b := connected(t, x, y, ib.RC, 64<<10, func(e *end) {
						if ends = append(ends, e); (len(ends) == 1) == local {
							lazy = e.lazily()
							lazy.fetch = func() { begun <- struct{}{}; <-answer }
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
					close(answer)
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

// More queue pairs wait for memory, and for storage, than there are workers.
func TestDeferredMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
		var senders []*end
		for range maxWorkers + 8 {
			a, b := connected(t, devs[0], devs[1], ib.RC, 8192, func(e *end) {
				e.pause = virtualPause
				e.lazily().fetch = func() { time.Sleep(20 * time.Millisecond) }
			})
			disk, r := b.slowRegion(t)
			go func() {
				<-disk.begun
				time.Sleep(20 * time.Millisecond)
				disk.end <- nil
			}()
			a.post(a.write(b, 0, 8192))
			a.post(flushRegion(r))
			senders = append(senders, a)
		}
		for _, a := range senders {
			a.ok()
			a.ok()
		}
	})
}

// UC and UD: the receiver drops a message whose memory is absent, and fetches the memory, so
// that the next message finds it; the sender waits for its own.
func TestFetchUnreliable(t *testing.T) {
	const n = 1000
	for _, l := range []string{linkLoop, linkUDP} {
		for _, typ := range []ib.QPType{ib.UC, ib.UD} {
			t.Run(fmt.Sprintf("%s/%v", l, typ), func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
				a, b := newEnd(t, x, typ, 4096), newEnd(t, y, typ, 4096)
				t.Cleanup(a.close)
				t.Cleanup(b.close)
				from, to := a.lazily(), b.lazily()
				wr := ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, n)}
				reach(a, b, &wr)
				header := 0
				if typ == ib.UD {
					header = ib.GRHLength
				}
				b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
				fill(a.buf, 4)
				from.Await(0, 4096, 0) // the sender's memory is there at first
				a.post(wr)
				a.ok()
				eventually(t, "the receiver has fetched", func() bool {
					to.mu.Lock()
					defer to.mu.Unlock()
					return to.fetches == 1 && to.at == 0
				})
				answer := make(chan struct{})
				from.fetch = func() { <-answer }
				from.drop(0, 4096)
				a.post(wr)
				eventually(t, "the sender waits", from.busy)
				if k, err := a.cq.Poll(make([]ib.WC, 1)); k != 0 || err != nil {
					t.Fatalf("%d completions, %v, of a message that has not left", k, err)
				}
				close(answer)
				a.ok()
				if wc := b.ok(); wc.ID != 1 || !bytes.Equal(b.buf[header:][:n], a.buf[:n]) {
					t.Errorf("%+v, or other bytes", wc)
				}
				ca, cb := a.counted(), b.counted()
				if ca[qp.CntFaultWaits] != 1 || cb[qp.CntDropFault] != 1 || cb[qp.CntFaultRNR]+ca[qp.CntRetransmits] != 0 {
					t.Errorf("%d waits, %d dropped, %d RNR NAKs, %d sent again", ca[qp.CntFaultWaits], cb[qp.CntDropFault], cb[qp.CntFaultRNR], ca[qp.CntRetransmits])
				}
			})
		}
	}
}
