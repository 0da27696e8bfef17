package device

// Memory that the CPU does not address, when things go wrong: engines that stand still or
// fail, queue pairs that end, and memory that is taken away, while bytes are on their way.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// heldEngine is an engine that stands still, until the test ends at the latest.
func heldEngine() *enginetest.Engine {
	g := enginetest.New(enginetest.Config{})
	g.Hold()
	return g
}

// stagedPair makes a connection. The memory of the ends that are named, a and b, is on
// engine g.
func stagedPair(t testing.TB, way string, typ ib.QPType, g *enginetest.Engine, on string) (a, b *end) {
	t.Helper()
	const size = 1 << 20
	if way == "rings" {
		a, b = byRings(t, typ, size)
	} else {
		a, b = pair(t, map[string]string{"loop": linkLoop, "udp": linkUDP}[way], typ, size)
	}
	for _, e := range []*end{a, b} {
		if name := map[*end]rune{a: 'a', b: 'b'}[e]; strings.ContainsRune(on, name) {
			e.onEngine(g)
		} else {
			e.makeMoving(size, false) // outside the Go heap: the race detector sees no order between devices
		}
	}
	t.Cleanup(g.Release)
	return a, b
}

var stagedWays = []string{"loop", "rings", "udp"}

// onStagedWays runs a test on every link.
func onStagedWays(t *testing.T, test func(t *testing.T, way string)) {
	for _, way := range stagedWays {
		t.Run(way, func(t *testing.T) { test(t, way) })
	}
}

// silent wants no completion for a while.
func (e *end) silent(what string) {
	e.t.Helper()
	var wc [1]ib.WC
	for until := time.Now().Add(20 * time.Millisecond); time.Now().Before(until); time.Sleep(time.Millisecond) {
		if n := must[int](e.t)(e.cq.Poll(wc[:])); n != 0 {
			e.t.Fatalf("%s: request %d has completed, %v", what, wc[0].ID, wc[0].Status)
		}
	}
}

// waitBegun waits until an engine has begun n operations.
func waitBegun(t testing.TB, g *enginetest.Engine, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d operations", n), func() bool { return g.Begun() >= n })
}

// A message completes neither at the sender nor at the receiver before its bytes are there,
// nor does a READ or an atomic behind it overtake it.
func TestStagedAcknowledgedBehindBytes(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMAWriteImm, ib.OpSend, ib.OpAtomicFetchAdd, ib.OpAtomicWrite} {
			t.Run(fmt.Sprint(op), func(t *testing.T) {
				g := heldEngine()
				a, b := stagedPair(t, way, ib.RC, g, "b")
				b.recv(ib.RecvWR{ID: 9, SGL: b.sge(4096, 4096)})
				fill(a.buf, 7)
				wr := a.write(b, 0, 4096)
				wr.ID, wr.Op = 1, op
				switch op {
				case ib.OpSend:
					wr.RemoteAddr, wr.RKey = 0, 0
				case ib.OpAtomicFetchAdd, ib.OpAtomicWrite:
					wr.SGL = a.sge(0, 8)
				}
				a.post(wr)
				a.post(ib.SendWR{ID: 2, Op: ib.OpRDMARead, SGL: a.sge(8192, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				waitBegun(t, g, 1)
				a.silent("before its bytes are there")
				b.silent("before its bytes are there")
				if way == "udp" { // where the sender asks again soon
					for range 2 {
						a.silent("asked again")
					}
				}
				g.Release()
				for id := range uint64(2) {
					if wc := a.ok(); wc.ID != id+1 {
						t.Fatalf("%d completes, want %d", wc.ID, id+1)
					}
				}
				if op == ib.OpSend || op == ib.OpRDMAWriteImm {
					b.ok()
				}
			})
		}
	})
}

// A queue pair that fails while messages wait for an engine completes each of their receives
// once, flushed.
func TestStagedReceivesFlushed(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		g := heldEngine()
		a, b := stagedPair(t, way, ib.RC, g, "b")
		for i := range 8 {
			b.recv(ib.RecvWR{ID: uint64(i), SGL: b.sge(i*4096, 4096)})
		}
		for i := range 5 {
			a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, SGL: a.sge(i*4096, 1000)})
		}
		eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxPackets] >= 5 })
		waitBegun(t, g, 1)
		b.modify(ib.QPAttr{State: ib.QPErr}, 0)
		g.Release()
		for i := range 8 {
			if wc := b.status(ib.WCWRFlushErr); wc.ID != uint64(i) {
				t.Errorf("receive %d, want %d", wc.ID, i)
			}
		}
		b.silent("all are flushed")
	})
}

// Bytes of a queue pair that has failed do not arrive in a buffer that its program was given
// back.
func TestStagedFlushedBehindBytes(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		g := heldEngine()
		a, b := stagedPair(t, way, ib.RC, g, "b")
		b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
		b.recv(ib.RecvWR{ID: 2, SGL: b.sge(4096, 4096)})
		a.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: a.sge(0, 1000)})
		waitBegun(t, g, 1)
		b.modify(ib.QPAttr{State: ib.QPErr}, 0)
		b.silent("an engine is at its receive")
		g.Release()
		b.status(ib.WCWRFlushErr)
		b.status(ib.WCWRFlushErr)
	})
}

// A queue pair that is reset or closed leaves memory alone when the call has returned.
func TestStagedEndsBehindBytes(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		for _, how := range []string{"reset", "close"} {
			t.Run(how, func(t *testing.T) {
				g := heldEngine()
				a, b := stagedPair(t, way, ib.RC, g, "b")
				for i := range 20 {
					a.post(a.write(b, i*4096, 4096))
				}
				waitBegun(t, g, 1)
				done := make(chan struct{})
				go func() {
					defer close(done)
					if how == "close" {
						closeAll(t, b.qp)
					} else {
						b.modify(ib.QPAttr{State: ib.QPReset}, 0)
					}
				}()
				select {
				case <-done:
					t.Error("an engine is at its memory")
				case <-time.After(20 * time.Millisecond):
				}
				g.Release()
				<-done
			})
		}
	})
}

// Reset does not wait for memory that is suspended: nothing is moved there any more.
func TestStagedResetSuspended(t *testing.T) {
	g := heldEngine()
	a, b := stagedPair(t, "loop", ib.RC, g, "a") // what is loaded goes to the host's memory
	a.post(a.write(b, 0, 4096))
	waitBegun(t, g, 1)
	r := b.mr.(*MR).region
	if !r.Suspend() {
		t.Fatal("not suspended")
	}
	defer r.Resume()
	go func() {
		time.Sleep(5 * time.Millisecond)
		g.Release()
	}()
	b.modify(ib.QPAttr{State: ib.QPReset}, 0)
}

// memory returns the memory of an end that is on an engine.
func (e *end) memory() *enginetest.Memory { return e.mr.(*MR).region.Backing().(*enginetest.Memory) }

// registerAgain registers the memory of an end, which is on an engine, with other rights.
func (e *end) registerAgain(access ib.Access) {
	e.t.Helper()
	m := e.memory()
	closeAll(e.t, e.mr)
	e.mr = must[provider.MR](e.t)(e.pd.(*PD).registerWith(memoryAt(0, 0, 0x7000_0000), access, func() (mem.Backing, error) { return m, nil }))
}

// An invalidation of memory that an engine accesses, by whatever request, waits for the engine,
// and delays no other queue pair; then it is done.
func TestStagedInvalidateWaitsForNobody(t *testing.T) {
	for _, way := range stagedWays {
		for _, kind := range []string{"SEND_INV", "LOCAL_INV", "BIND"} {
			for _, region := range []bool{false, true} {
				if region && kind == "BIND" || way != "loop" && kind != "SEND_INV" && !fullMatrix() {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/region %v", way, kind, region), func(t *testing.T) {
					g := heldEngine()
					a, b := stagedPair(t, way, ib.RC, g, "b")
					c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil) // others
					b.registerAgain(allRemote | ib.AccessMWBind | ib.AccessRemoteInvalidate)
					typ := ib.MWType2
					if kind == "BIND" {
						typ = ib.MWType1 // the others cannot be bound again
					}
					w := b.window(typ)
					key := b.bind(w, 0, 64<<10, ib.AccessRemoteWrite)
					if region {
						closeAll(t, w)
						key = b.mr.RKey()
					}
					b.recv(ib.RecvWR{ID: 3, SGL: d.sge(0, 64)}) // of another domain: nothing comes there
					wr := a.write(b, 0, 512)                    // one packet, or the rest might find the key dead
					wr.RKey = key
					a.post(wr)
					waitBegun(t, g, 1)
					switch kind {
					case "SEND_INV":
						a.post(ib.SendWR{ID: 2, Op: ib.OpSendInv, InvalidateKey: key})
					case "LOCAL_INV":
						b.post(ib.SendWR{ID: 2, Op: ib.OpLocalInv, InvalidateKey: key})
					case "BIND":
						must[uint32](t)(b.qp.BindMW(w, 2, ib.SendSignaled, b.onto(w, 0, 4096, ib.AccessRemoteWrite)))
					}
					b.silent("an engine is at the memory")
					must[ib.QPAttr](t)(b.qp.Query())
					goesOn(t, c, d)
					g.Release()
					a.ok()
					if kind == "SEND_INV" {
						a.ok()
					}
					b.ok()
					wr.ID = 9
					a.post(wr)
					a.status(ib.WCRemAccessErr)
				})
			}
		}
	}
}

// A SEND that invalidates what another queue pair's engine is at completes when that is over.
func TestStagedSendInvalidates(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		if way == "rings" {
			return // a queue pair is not connected with itself there
		}
		g, h := heldEngine(), enginetest.New(enginetest.Config{})
		a, b := stagedPair(t, way, ib.RC, h, "b") // its receives
		b.registerAgain(allRemote | ib.AccessRemoteInvalidate)
		m := g.Alloc(4096)
		mr := must[provider.MR](t)(b.pd.(*PD).registerWith(memoryAt(0, 0, 0x100_0000), allRemote|ib.AccessRemoteInvalidate, func() (mem.Backing, error) { return m, nil }))
		t.Cleanup(m.Free)
		t.Cleanup(func() { closeAll(t, mr) })
		t.Cleanup(g.Release)
		c := b.beside() // works on what is invalidated
		c.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: c.sge(0, 64), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
		waitBegun(t, g, 1)
		b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
		b.recv(ib.RecvWR{ID: 2, SGL: b.sge(4096, 4096)})
		a.post(ib.SendWR{ID: 1, Op: ib.OpSendInv, SGL: a.sge(0, 4096), InvalidateKey: mr.RKey()})
		a.post(ib.SendWR{ID: 2, Op: ib.OpSend, SGL: a.sge(0, 4096)})
		waitBegun(t, h, 1)
		b.silent("its key is in use")
		g.Release()
		for id := range uint64(2) {
			if wc := b.ok(); wc.ID != id+1 {
				t.Errorf("%+v", wc)
			}
			a.ok()
		}
		c.ok()
	})
}

// While an engine stands still, many WRITEs wait in bounds, and other queue pairs go on; then
// all of them arrive.
func TestStagedPushback(t *testing.T) {
	for _, typ := range []ib.QPType{ib.RC, ib.UC} {
		onStagedWays(t, func(t *testing.T, way string) {
			t.Run(typ.String(), func(t *testing.T) {
				n, size := lastingOps(300, 1000), 1000
				g, h := heldEngine(), enginetest.New(enginetest.Config{})
				a, b := stagedPair(t, way, typ, g, "b")
				c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
				d.onEngine(h)
				done := make(chan int)
				go func() {
					ok := 0
					for i := 0; i < n; {
						wr := a.write(b, i*size, size)
						wr.Flags, wr.ID = ib.SendSignaled, uint64(i)
						if k, _ := a.qp.PostSend([]ib.SendWR{wr}); k == 1 {
							i++
							continue
						}
						ok += drainOK(a)
						time.Sleep(50 * time.Microsecond)
					}
					for deadline := time.Now().Add(10 * time.Second); ok < n && time.Now().Before(deadline); time.Sleep(50 * time.Microsecond) {
						ok += drainOK(a)
					}
					done <- ok
				}()
				waitBegun(t, g, 1)
				goesOn(t, c, d)
				if most := g.Begun(); most > 256 {
					t.Errorf("%d operations under way", most)
				}
				g.Release()
				if ok := <-done; ok != n {
					t.Errorf("%d have completed", ok)
				}
				goesOn(t, c, d)
			})
		})
	}
}

// drainOK polls what there is and returns how many were successful.
func drainOK(e *end) (ok int) {
	var wcs [16]ib.WC
	n, err := e.cq.Poll(wcs[:])
	if err != nil {
		e.t.Error(err)
	}
	for _, wc := range wcs[:n] {
		if wc.Status == ib.WCSuccess {
			ok++
		} else {
			e.t.Errorf("request %d: %v, vendor %#x", wc.ID, wc.Status, wc.VendorErr)
		}
	}
	return ok
}

// What a UC queue pair has sent is its program's again, and what arrives is what it was.
func TestStagedUCSource(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		g := heldEngine()
		a, b := stagedPair(t, way, ib.UC, g, "b")
		for i := range a.buf[:4096] {
			a.buf[i] = 1
		}
		a.post(a.write(b, 8192, 64)) // the engine is at this
		a.ok()
		waitBegun(t, g, 1)
		a.post(a.write(b, 0, 4096))
		a.ok()
		for i := range a.buf[:4096] {
			a.buf[i] = 2
		}
		g.Release()
		m := b.memory()
		eventually(t, "it has arrived", func() bool {
			m.Lock()
			defer m.Unlock()
			if m.Bytes[0] == 2 || m.Bytes[4095] == 2 {
				t.Fatal("other bytes have arrived")
			}
			return m.Bytes[4095] == 1
		})
	})
}

// A WRITE of data that fails, and a flag behind it: the flag is never seen.
func TestStagedFlagBehindFailedData(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		g := heldEngine()
		a, b := stagedPair(t, way, ib.RC, g, "b")
		m := g.Alloc(64 << 10)
		mr := must[provider.MR](t)(b.pd.(*PD).registerWith(memoryAt(0, 0, 0x100_0000), allRemote, func() (mem.Backing, error) { return m, nil }))
		t.Cleanup(m.Free)
		t.Cleanup(func() { closeAll(t, mr) })
		t.Cleanup(g.Release)
		fill(a.buf, 1)
		a.post(a.write(b, 8192, 64)) // the engine is at this
		waitBegun(t, g, 1)
		a.post(ib.SendWR{ID: 1, Op: ib.OpRDMAWrite, SGL: a.sge(0, 1024), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
		a.post(a.write(b, 0, 8))
		eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxPackets] >= 3 })
		mr.(*MR).region.Revoke()
		g.Release()
		a.ok()
		a.status(ib.WCRemAccessErr)
		a.status(ib.WCWRFlushErr)
		flag := b.memory()
		b.silent("no receive")
		flag.Lock()
		defer flag.Unlock()
		if flag.Bytes[0] != 0 || flag.Bytes[1] != 0 {
			t.Error("the flag is there, and the data is not")
		}
	})
}

// arrive gives a request of a peer to the end's queue pair, as if it had come by its link.
func (e *end) arrive(from *end, t train.Train) {
	q := e.qp.(*QP)
	t.Transport, t.From, t.To, t.N, t.Start, t.End, t.MTU = wire.RC, from.dev.addrs[0], e.dev.addrs[0], 1, true, true, 1024
	now := e.dev.now()
	q.receive(&t, now)
	e.dev.answer(q, now)
}

// A peer that asks for a READ again and again, while its bytes are loaded, takes no more room
// and no more time than one that asks once.
func TestStagedReadAskedAgain(t *testing.T) {
	for _, whole := range []bool{true, false} {
		t.Run(fmt.Sprintf("whole %v", whole), func(t *testing.T) {
			const n = 512 << 10
			g := heldEngine()
			a, b := stagedPair(t, "udp", ib.RC, g, "b")
			fill(b.buf, 3)
			a.post(a.read(b, 0, n))
			waitBegun(t, g, 1)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for i := range 1000 {
				again := train.Train{Kind: wire.KindReadRequest, PSN: wire.MakePSN(a.psn), AckReq: true,
					RETH: wire.RETH{VA: b.mr.Addr(), RKey: b.mr.RKey(), Len: n}}
				if !whole { // a part of it, another one each time
					again.RETH.Len -= uint32(1 + i)
				}
				b.arrive(a, again)
			}
			runtime.ReadMemStats(&after)
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 32<<20 {
				t.Errorf("%d bytes", grown)
			}
			g.Release()
			if !whole { // the answer to another READ than its own may fail it
				a.wait()
				return
			}
			if wc := a.ok(); wc.ByteLen != n || !bytes.Equal(a.buf[:n], b.buf[:n]) {
				t.Error("other bytes have come")
			}
		})
	}
}

// What is loaded ahead of many short WRITEs does not count as what a peer has sent.
func TestStagedLoadsDoNotPushBack(t *testing.T) {
	g, h := heldEngine(), enginetest.New(enginetest.Config{})
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	a, b := connected(t, x, y, ib.RC, 4096, func(e *end) {
		closeAll(t, e.qp)
		e.qp = must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq,
			Cap: ib.QPCap{MaxSendWR: 1024, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}}))
	})
	a.onEngine(g)
	b.onEngine(h)
	t.Cleanup(g.Release)
	for range 500 {
		a.post(a.write(b, 0, 64))
	}
	waitBegun(t, g, 1)
	b.post(b.write(a, 128, 64))
	eventually(t, "it has come", func() bool { return a.counted()[qp.CntRxPackets] > 0 })
	if n := a.counted()[qp.CntFaultRNR]; n != 0 {
		t.Errorf("pushed back %d times", n)
	}
	g.Release()
	for range 500 {
		a.ok()
	}
	b.ok()
}

// A program that watches the memory sees the data of a message before the flag behind it,
// wherever the two lie: on an engine or in the host's memory.
func TestStagedOrderSeen(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		for _, where := range []string{"engine engine", "engine host", "host engine", "engine other"} {
			t.Run(where, func(t *testing.T) {
				const size = 64 << 10
				g, h := enginetest.New(slowEngine), enginetest.New(slowEngine)
				a, b := stagedPair(t, way, ib.RC, g, "")
				place := func(name string, iova uint64) (*enginetest.Memory, *end) {
					e := *b
					switch name {
					case "engine", "other":
						m := map[string]*enginetest.Engine{"engine": g, "other": h}[name].Alloc(size)
						e.mr = must[provider.MR](t)(b.pd.(*PD).registerWith(memoryAt(0, 0, iova), allRemote, func() (mem.Backing, error) { return m, nil }))
						t.Cleanup(m.Free)
						t.Cleanup(func() { closeAll(t, b.qp, e.mr) })
						return m, &e
					}
					m := enginetest.New(enginetest.Config{}).Alloc(size)
					e.mr = must[provider.MR](t)(b.pd.RegMR(m.Bytes, allRemote))
					t.Cleanup(m.Free)
					t.Cleanup(func() { closeAll(t, b.qp, e.mr) })
					return m, &e
				}
				names := strings.Fields(where)
				data, toData := place(names[0], 0x100_0000)
				flag, toFlag := place(names[1], 0x200_0000)
				stop, watched := make(chan struct{}), make(chan struct{})
				go func() {
					defer close(watched)
					for {
						select {
						case <-stop:
							return
						default:
						}
						flag.Lock()
						n := lookWord(flag.Bytes)
						flag.Unlock()
						data.Lock()
						first, last := lookWord(data.Bytes), lookWord(data.Bytes[size-8:])
						data.Unlock()
						if first < n || last < n {
							t.Errorf("the flag says %d, the data %d and %d", n, first, last)
							return
						}
						time.Sleep(10 * time.Microsecond)
					}
				}()
				a.pause = runtime.Gosched
				for i := range uint64(lastingOps(9, 300)) {
					binary.NativeEndian.PutUint64(a.buf, i+1)
					binary.NativeEndian.PutUint64(a.buf[size-8:], i+1)
					a.post(a.write(toData, 0, size))
					wr := a.write(toFlag, 0, 8)
					switch i % 3 {
					case 1:
						wr.Op = ib.OpAtomicWrite
					case 2:
						wr = ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(size, 8), RemoteAddr: wr.RemoteAddr, RKey: wr.RKey, CompareAdd: 1}
					}
					a.post(wr)
					a.ok()
					a.ok()
				}
				close(stop)
				<-watched
			})
		}
	})
}

// lookWord looks at a word that an engine or a peer may be storing.
//
//go:norace
func lookWord(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

// Queue pairs fail, are reset and closed, memory is revoked, suspended and deregistered, and
// engines fail, at random moments while messages of every kind are under way: each receive
// and each request completes once at most, all of them unless the queue pair is reset or
// closed, and nothing stays behind.
func TestStagedEndsAtRandom(t *testing.T) {
	seed := testSeed(t)
	for i := range lastingOps(12, 300) {
		way := stagedWays[i%3]
		t.Run(fmt.Sprintf("%d/%s", i, way), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			const n = 40
			g := enginetest.New(slowEngine)
			a, b := stagedPair(t, way, ib.RC, g, []string{"a", "b", "ab"}[rng.IntN(3)])
			a.timeoutSoon()
			for id := range uint64(n) {
				b.recv(ib.RecvWR{ID: 1000 + id, SGL: b.sge(int(id)*8192, 8192)})
			}
			how := rng.IntN(6)
			at := time.Duration(rng.IntN(600)) * time.Microsecond
			ended := make(chan struct{})
			victim := []*end{a, b}[rng.IntN(2)]
			go func() {
				defer close(ended)
				time.Sleep(at)
				switch how {
				case 0:
					victim.modify(ib.QPAttr{State: ib.QPErr}, 0)
				case 1:
					victim.modify(ib.QPAttr{State: ib.QPReset}, 0)
				case 2:
					closeAll(t, victim.qp)
				case 3:
					victim.mr.(*MR).region.Revoke()
				case 4:
					if m, ok := victim.mr.(*MR).region.Backing().(*enginetest.Memory); ok {
						m.Fail(mem.FaultStorage)
					} else {
						victim.mr.(*MR).region.Revoke()
					}
				case 5:
					if r := victim.mr.(*MR).region; r.Suspend() {
						victim.modify(ib.QPAttr{State: ib.QPErr}, 0)
						r.Resume()
					}
				}
			}()
			posted := 0
			for id := range n {
				wr := a.write(b, id*8192, 8*(1+rng.IntN(1024)))
				wr.ID, wr.Flags = uint64(id), ib.SendSignaled
				switch rng.IntN(5) {
				case 0:
					wr.Op, wr.RemoteAddr, wr.RKey = ib.OpSend, 0, 0
				case 1:
					wr.Op = ib.OpRDMAWriteImm
				case 2:
					wr.Op = ib.OpRDMARead
				case 3:
					wr.Op, wr.SGL = ib.OpAtomicFetchAdd, a.sge(id*8192, 8)
				}
				if _, err := a.qp.PostSend([]ib.SendWR{wr}); err != nil {
					break // it was reset or closed
				}
				posted++
			}
			<-ended
			seen := map[uint64]bool{}
			sent, received := 0, 0
			gone := how == 1 || how == 2
			poll := func(e *end) {
				var wcs [8]ib.WC
				k := must[int](t)(e.cq.Poll(wcs[:]))
				for _, wc := range wcs[:k] {
					if seen[wc.ID] {
						t.Errorf("%d has completed twice", wc.ID)
					}
					seen[wc.ID] = true
					if wc.ID >= 1000 {
						received++
					} else {
						sent++
					}
				}
			}
			for until := time.Now().Add(10 * time.Second); !(gone && victim == a) && sent < posted && time.Now().Before(until); time.Sleep(20 * time.Microsecond) {
				poll(a)
				poll(b)
			}
			if sent != posted && !(gone && victim == a) {
				t.Errorf("%d of %d requests have completed", sent, posted)
			}
			if !(gone && victim == b) {
				b.modify(ib.QPAttr{State: ib.QPErr}, 0)
				for until := time.Now().Add(10 * time.Second); received < n && time.Now().Before(until); time.Sleep(20 * time.Microsecond) {
					poll(b)
				}
				if received != n {
					t.Errorf("%d of %d receives have completed", received, n)
				}
			}
		})
	}
}

// A UC queue pair loses the message whose memory is gone, and none of those that wait behind it.
func TestStagedUCGoesOn(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		g := heldEngine()
		a, b := stagedPair(t, way, ib.UC, g, "b")
		m := g.Alloc(4096)
		mr := must[provider.MR](t)(b.pd.(*PD).registerWith(memoryAt(0, 0, 0x100_0000), allRemote, func() (mem.Backing, error) { return m, nil }))
		t.Cleanup(m.Free)
		t.Cleanup(func() { closeAll(t, mr) })
		t.Cleanup(g.Release)
		b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
		b.recv(ib.RecvWR{ID: 2, SGL: b.sge(4096, 4096)})
		a.post(a.write(b, 8192, 64)) // the engine is at this
		waitBegun(t, g, 1)
		a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 512), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 512)})
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 4096)})
		for range 4 {
			a.ok()
		}
		eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxPackets] >= 7 })
		mr.(*MR).region.Revoke()
		g.Release()
		for id := range uint64(2) {
			if wc := b.ok(); wc.ID != id+1 {
				t.Errorf("%+v", wc)
			}
		}
		if s := b.state(); s != ib.QPRTS {
			t.Error(s)
		}
	})
}

// A request that fails, behind one that is loaded to be sent again, waits for that.
func TestStagedFailsBehindLoad(t *testing.T) {
	g := heldEngine()
	a, b := stagedPair(t, "loop", ib.RC, g, "a")
	bad := a.write(b, 0, 64)
	bad.ID, bad.SGL[0].LKey, bad.Flags = 2, bad.SGL[0].LKey^1, ib.SendSignaled
	if _, err := a.qp.PostSend([]ib.SendWR{a.write(b, 0, 4096), bad}); err != nil {
		t.Fatal(err)
	}
	waitBegun(t, g, 1)
	a.silent("the first is not done")
	g.Release()
	if wc := a.status(ib.WCLocProtErr); wc.ID != 2 {
		t.Errorf("%+v", wc)
	}
}
