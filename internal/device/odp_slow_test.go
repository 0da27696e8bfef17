package device

// Memory on a file system that takes as long as it likes. Only the requests that need it wait,
// and the network does not suffer.

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys/slowfs"
)

// slowMemory is a slow file, mapped and registered on demand. It is not to be
// touched by the test while the file system holds reads: the goroutine could not
// be stopped.
type slowMemory struct {
	fs *slowfs.FS
	*mapped
	mr provider.MR
}

func newSlowMemory(t testing.TB, pd provider.PD, n uint64) *slowMemory {
	t.Helper()
	s := &slowMemory{fs: slowfs.New(t, int64(n)), mapped: newMapped(t, n)}
	file := s.fs.Open()
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, s.addr, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_FIXED, file.Fd(), 0); errno != 0 {
		t.Fatal(errno)
	}
	mr, err := pd.RegMRAddr(s.addr, n, uint64(s.addr), odpAccess)
	if err != nil {
		t.Fatal(err)
	}
	s.mr = mr
	t.Cleanup(func() { closeAll(t, mr) })
	t.Cleanup(s.fs.Kill) // before the region is closed: a request may wait for the file system
	return s
}

func (s *slowMemory) sge(off, n int) []ib.SGE {
	return []ib.SGE{{Addr: uint64(s.addr) + uint64(off), Length: uint32(n), LKey: s.mr.LKey()}}
}

func slowBytes(off, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = slowfs.Byte(int64(off + i))
	}
	return b
}

// A request whose memory is slow, on either side, waits; another connection of the
// same devices works on meanwhile as if nothing were. When the memory has come, the
// request is done, and right.
func TestSlowMemoryKeepsNobodyWaiting(t *testing.T) {
	const n, fastOps = 64 << 10, 1000
	for _, link := range []string{linkLoop, linkUDP} {
		for _, c := range []struct {
			name   string
			remote bool // it is the peer's memory that is slow
			post   func(a, b *end, s *slowMemory)
			check  func(a, b *end, s *slowMemory) []byte // what must be the slow bytes, or what was written there
			writes bool
		}{
			{"READ from it", true, func(a, _ *end, s *slowMemory) {
				a.post(ib.SendWR{ID: 1, Op: ib.OpRDMARead, SGL: a.sge(0, n), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
			}, func(a, _ *end, _ *slowMemory) []byte { return a.buf[:n] }, false},
			{"READ into it", false, func(a, b *end, s *slowMemory) {
				copy(b.buf, noise)
				a.post(ib.SendWR{ID: 1, Op: ib.OpRDMARead, SGL: s.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			}, func(_, _ *end, s *slowMemory) []byte { return s.bytes()[:n] }, true},
			{"WRITE to it", true, func(a, _ *end, s *slowMemory) {
				copy(a.buf, noise)
				a.post(ib.SendWR{ID: 1, Op: ib.OpRDMAWrite, SGL: a.sge(0, n), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
			}, func(_, _ *end, s *slowMemory) []byte { return s.bytes()[:n] }, true},
			{"WRITE from it", false, func(a, b *end, s *slowMemory) {
				a.post(ib.SendWR{ID: 1, Op: ib.OpRDMAWrite, SGL: s.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			}, func(_, b *end, _ *slowMemory) []byte { return b.buf[:n] }, false},
			{"SEND to it", true, func(a, b *end, s *slowMemory) {
				copy(a.buf, noise)
				b.recv(ib.RecvWR{ID: 2, SGL: s.sge(0, n)})
				a.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: a.sge(0, n)})
			}, func(_, _ *end, s *slowMemory) []byte { return s.bytes()[:n] }, true},
			{"SEND from it", false, func(a, b *end, s *slowMemory) {
				b.recv(ib.RecvWR{ID: 2, SGL: b.sge(0, n)})
				a.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: s.sge(0, n)})
			}, func(_, b *end, _ *slowMemory) []byte { return b.buf[:n] }, false},
		} {
			t.Run(link+"/"+c.name, func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				a, b := connected(t, x, y, ib.RC, n, nil)
				fa, fb := connected(t, x, y, ib.RC, n, nil)
				owner := a
				if c.remote {
					owner = b
				}
				s := newSlowMemory(t, owner.pd, 2*n)
				s.fs.Hold()
				beforeX, beforeY, began := countsOf(x), countsOf(y), time.Now()
				c.post(a, b, s)
				waits := func() bool {
					cx, cy := countsOf(x).since(beforeX), countsOf(y).since(beforeY)
					if c.remote {
						return cy["page_fault_rnr_naks"] > 0 && cy["rnr_naks_sent"] > 0
					}
					return cx["page_fault_waits"] > 0
				}
				eventually(t, "the request waits for its memory", waits)
				fill(fa.buf, 3)
				for i := range fastOps {
					fa.post(fa.write(fb, 0, 4096))
					if wc := fa.ok(); wc.Op != ib.WCRDMAWrite {
						t.Fatalf("%d: %+v", i, wc)
					}
				}
				var wc [1]ib.WC
				for _, e := range []*end{a, b} {
					if k, err := e.cq.Poll(wc[:]); k != 0 || err != nil {
						t.Fatalf("it is done: %+v, %v", wc[0], err)
					}
				}
				// The sender does not hammer: a few attempts at first, then one in 50 ms.
				took := time.Since(began)
				cx, cy := countsOf(x).since(beforeX), countsOf(y).since(beforeY)
				// (On a busy machine the others' packets may be sent again, too.)
				most := uint64(100 + took/(10*time.Millisecond))
				if cy["rnr_naks_sent"] > most || cx["retransmitted_packets"] > most+fastOps || cx["page_fault_waits"] > 1 {
					t.Errorf("in %v: %v, %v", took, cx, cy)
				}
				s.fs.Go()
				a.ok()
				want := slowBytes(0, n)
				if c.writes {
					want = noise[:n]
				}
				if !bytes.Equal(c.check(a, b, s), want) {
					t.Error("not the bytes that should be there")
				}
				if mr := s.mr.PagingStats(); mr.PageFaults == 0 || mr.PageFaultPages != n/4096 || mr.FailedResolutions != 0 {
					t.Errorf("%+v", mr)
				}
			})
		}
	}
}

// UC and UD cannot wait: a message whose receive is slow is dropped and counted,
// and fetched for the next. What they send waits.
func TestSlowMemoryUnreliable(t *testing.T) {
	const n, qkey = 1024, 0x1234
	for _, link := range []string{linkLoop, linkUDP} {
		for _, typ := range []ib.QPType{ib.UC, ib.UD} {
			t.Run(fmt.Sprintf("%s/%v", link, typ), func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				a, b := newEnd(t, x, typ, 8192), newEnd(t, y, typ, 8192)
				t.Cleanup(a.close)
				t.Cleanup(b.close)
				wr := ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, n)}
				if typ == ib.UD {
					a.openDatagrams(qkey)
					b.openDatagrams(qkey)
					ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
					t.Cleanup(func() { closeAll(t, ah) })
					wr.AH, wr.RemoteQPN, wr.RemoteQKey = ah, b.qp.Number(), qkey
				} else {
					a.connect(b)
					b.connect(a)
				}
				to, from := newSlowMemory(t, b.pd, 16<<12), newSlowMemory(t, a.pd, 16<<12)
				copy(a.buf, noise)
				to.fs.Hold()
				b.recv(ib.RecvWR{ID: 1, SGL: to.sge(0, 4096)})
				before := countsOf(y)
				wr.ID = 10
				a.post(wr)
				a.ok()
				eventually(t, "the message is dropped", func() bool { return countsOf(y).since(before)["drop_page_fault"] == 1 })
				to.fs.Go()
				eventually(t, "the memory is fetched", func() bool { return to.mr.PagingStats().PageFaultPages > 0 })
				// The next one arrives.
				got := ib.WC{}
				for i := uint64(11); got.ID == 0; i++ {
					wr.ID = i
					a.post(wr)
					a.ok()
					for deadline := time.Now().Add(20 * time.Millisecond); time.Now().Before(deadline) && got.ID == 0; {
						var wc [1]ib.WC
						if k, err := b.cq.Poll(wc[:]); k == 1 {
							got = wc[0]
						} else if err != nil {
							t.Fatal(err)
						}
					}
					if i == 100 {
						t.Fatalf("nothing arrives: %v", countsOf(y).since(before))
					}
				}
				at := to.bytes()[(got.ID-1)*4096:]
				if typ == ib.UD {
					at = at[ib.GRHLength:]
				}
				if got.Status != ib.WCSuccess || !bytes.Equal(at[:n], noise[:n]) {
					t.Fatalf("%+v: not what was sent", got)
				}
				// What is sent waits for its memory.
				from.fs.Hold()
				b.recv(ib.RecvWR{ID: 3, SGL: b.sge(0, 8192)})
				before = countsOf(x)
				wr.ID, wr.SGL = 200, from.sge(0, n)
				a.post(wr)
				eventually(t, "the sender waits", func() bool { return countsOf(x).since(before)["page_fault_waits"] == 1 })
				from.fs.Go()
				if wc := a.ok(); wc.ID != 200 {
					t.Fatalf("%+v", wc)
				}
			})
		}
	}
}

// A file system that ends while a request waits for it: the request fails at the
// right side, the process lives, and regions and devices can be closed.
func TestSlowMemoryDies(t *testing.T) {
	const n = 16 << 10
	for _, link := range []string{linkLoop, linkUDP} {
		for _, remote := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/remote %v", link, remote), func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				a, b := connected(t, x, y, ib.RC, n, nil)
				want := ib.WCLocProtErr
				owner := a
				if remote {
					owner, want = b, ib.WCRemAccessErr
				}
				s := newSlowMemory(t, owner.pd, n)
				s.fs.Hold()
				if remote {
					a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, n), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
				} else {
					a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: s.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				}
				time.Sleep(5 * time.Millisecond)
				s.fs.Kill()
				a.status(want)
			})
		}
	}
}

// A region, its queue pair and its device are closed while a request waits for its
// memory, and a prefetch is under way. When the storage answers, all end.
func TestCloseWhileSlow(t *testing.T) {
	const n = 4 << 20
	for _, link := range []string{linkLoop, linkUDP} {
		t.Run(link, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
			a, b := newEnd(t, x, ib.RC, 4096), newEnd(t, y, ib.RC, 4096)
			a.connect(b)
			b.connect(a)
			s := newSlowMemory(t, b.pd, n)
			s.fs.Hold()
			a.post(ib.SendWR{ID: 1, Op: ib.OpRDMARead, SGL: a.sge(0, 4096), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
			eventually(t, "the request waits", func() bool { return countsOf(y)["page_fault_rnr_naks"] > 0 })
			other, err := b.pd.RegMRAddr(s.addr, n, uint64(s.addr), odpAccess)
			if err != nil {
				t.Fatal(err)
			}
			if err := b.pd.Advise(ib.AdvisePrefetch, false, []ib.SGE{{Addr: uint64(s.addr) + n/2, Length: n / 2, LKey: other.LKey()}}); err != nil {
				t.Fatal(err)
			}
			// A fault that waits does not keep the region from being closed; then the
			// peer's request fails.
			closeAll(t, s.mr)
			a.status(ib.WCRemAccessErr)
			// Of the prefetch one step is waited for.
			closed := make(chan error)
			go func() { closed <- other.Close() }()
			time.Sleep(5 * time.Millisecond)
			_ = other.PagingStats() // does not wait for storage
			s.fs.Go()
			if err := <-closed; err != nil {
				t.Fatal(err)
			}
			a.close()
			b.close()
		})
	}
}

// A prefetch is asynchronous, unless it is asked for to the end; then it has
// happened when the call returns, and using the memory faults no more.
func TestPrefetchSlow(t *testing.T) {
	const n = 1 << 20
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	a, b := connected(t, x, y, ib.RC, n, nil)
	s, other := newSlowMemory(t, b.pd, n), newSlowMemory(t, b.pd, n)
	s.fs.Hold()
	list := append(s.sge(0, n/2), other.sge(n/2, n/2)...)
	if err := b.pd.Advise(ib.AdvisePrefetch, false, list); err != nil {
		t.Fatal(err)
	}
	if st := s.mr.PagingStats(); st.Prefetches != 0 {
		t.Fatalf("it has not come yet: %+v", st)
	}
	done := make(chan error, 1)
	go func() { done <- b.pd.Advise(ib.AdvisePrefetch, true, s.sge(n/2, n/2)) }()
	select {
	case err := <-done:
		t.Fatal("it was not waited for:", err)
	case <-time.After(10 * time.Millisecond):
	}
	s.fs.Go()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other prefetches are done", func() bool {
		return s.mr.PagingStats().Prefetches == 2 && other.mr.PagingStats().Prefetches == 1
	})
	if calls := y.PagingStats().Prefetches; calls != 2 {
		t.Errorf("the device counts %d calls", calls)
	}
	a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, n), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
	a.ok()
	if !bytes.Equal(a.buf, slowBytes(0, n)) {
		t.Error("not the bytes of the file")
	}
	if st := s.mr.PagingStats(); st.PageFaults != 0 || st.PrefetchPages != n>>12 {
		t.Errorf("%+v", st)
	}
	if st := other.mr.PagingStats(); st.PrefetchPages != n>>13 {
		t.Errorf("%+v", st)
	}
}

// A prefetch that has not begun when its region becomes another one does nothing:
// it was about other memory.
func TestPrefetchReregistered(t *testing.T) {
	const n = 1 << 20
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd := must[provider.PD](t)(d.AllocPD())
	s, m := newSlowMemory(t, pd, n), newMapped(t, n)
	mr := must[provider.MR](t)(pd.RegMRAddr(m.addr, n, 0, odpAccess))
	s.fs.Hold()
	// The first element keeps the worker busy, and the others wait.
	list := append(s.sge(0, n), ib.SGE{Length: n, LKey: mr.LKey()})
	if err := pd.Advise(ib.AdvisePrefetch, false, list); err != nil {
		t.Fatal(err)
	}
	access := odpAccess | ib.AccessRelaxedOrdering
	if err := mr.Rereg(provider.MRChange{Access: &access}); err != nil {
		t.Fatal(err)
	}
	last := ib.SGE{Length: n / 2, LKey: mr.LKey()}
	if err := pd.Advise(ib.AdvisePrefetch, false, []ib.SGE{last}); err != nil {
		t.Fatal(err)
	}
	s.fs.Go()
	eventually(t, "the last prefetch is done", func() bool { return mr.PagingStats().Prefetches > 0 })
	if st := mr.PagingStats(); st.Prefetches != 1 || st.PrefetchPages != n>>13 {
		t.Errorf("%+v", st)
	}
	closeAll(t, mr, s.mr, pd)
}
