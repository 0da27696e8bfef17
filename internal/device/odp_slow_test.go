package device

// On-demand memory on a file system that takes as long as a test wants. Only the requests that
// need its bytes wait.

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
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
	s.mr = must[provider.MR](t)(pd.RegMRAddr(s.addr, n, uint64(s.addr), odpAccess))
	t.Cleanup(func() { closeAll(t, s.mr) })
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

// A request whose memory has to be read from storage, on either side, waits; another
// connection of the same devices works on meanwhile. When the storage has answered, the
// request is done, and right. (TestFetchKeepsNobodyWaiting has every operation, and what is
// sent meanwhile; here the kernel's answers lead there.)
func TestSlowStorageKeepsNobodyWaiting(t *testing.T) {
	const n = 64 << 10
	for _, link := range []string{linkLoop, linkUDP} {
		for _, c := range []struct {
			name   string
			op     ib.Opcode
			remote bool // the storage is the peer's
			writes bool // the request writes to it
		}{
			{"READ from it", ib.OpRDMARead, true, false}, {"READ into it", ib.OpRDMARead, false, true},
			{"WRITE to it", ib.OpRDMAWrite, true, true}, {"WRITE from it", ib.OpRDMAWrite, false, false},
		} {
			t.Run(link+"/"+c.name, func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				a, b := connected(t, x, y, ib.RC, n, nil)
				otherA, otherB := connected(t, x, y, ib.RC, n, nil)
				owner, waits := a, func() bool { return a.counted()[qp.CntFaultWaits] > 0 }
				if c.remote {
					owner, waits = b, func() bool { return b.counted()[qp.CntFaultRNR] > 0 && b.counted()[qp.CntRNRNaksSent] > 0 }
				}
				s := newSlowMemory(t, owner.pd, 2*n)
				s.fs.Hold()
				wr, user := ib.SendWR{ID: 1, Op: c.op, SGL: s.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}, b
				if c.remote {
					wr, user = ib.SendWR{ID: 1, Op: c.op, SGL: a.sge(0, n), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()}, a
				}
				if c.writes {
					copy(user.buf, noise)
				}
				a.post(wr)
				eventually(t, "the request waits for its memory", waits)
				for range lastingOps(50, 1000) {
					otherA.post(otherA.write(otherB, 0, 4096))
					otherA.ok()
				}
				var wc [1]ib.WC
				if k, err := a.cq.Poll(wc[:]); k != 0 || err != nil {
					t.Fatalf("it is done: %+v, %v", wc[0], err)
				}
				if waits := a.counted()[qp.CntFaultWaits]; waits > 1 {
					t.Errorf("the requester waits %d times", waits)
				}
				s.fs.Go()
				a.ok()
				got, want := user.buf[:n], slowBytes(0, n)
				if c.writes {
					got, want = s.bytes()[:n], noise[:n]
				}
				if !bytes.Equal(got, want) {
					t.Error("not the bytes that should be there")
				}
				if mr := s.mr.PagingStats(); mr.PageFaults == 0 || mr.PageFaultPages < n/4096 || mr.FailedResolutions != 0 {
					t.Errorf("%+v", mr)
				}
			})
		}
	}
}

// While a request waits for storage, on either side, the storage ends, or the region is
// closed, which does not wait. The request fails at the right side, and a prefetch that is
// under way delays the closing of its own region alone.
func TestSlowStorageEnds(t *testing.T) {
	const n = 16 << 10
	for _, link := range []string{linkLoop, linkUDP} {
		for _, c := range []struct {
			name         string
			remote, dies bool
			want         ib.WCStatus
		}{
			{"storage/remote", true, true, ib.WCRemAccessErr}, {"storage/local", false, true, ib.WCLocProtErr},
			{"region/remote", true, false, ib.WCRemAccessErr},
		} {
			t.Run(link+"/"+c.name, func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				a, b := connected(t, x, y, ib.RC, n, nil)
				owner, waits := a, func() bool { return a.counted()[qp.CntFaultWaits] > 0 }
				if c.remote {
					owner, waits = b, func() bool { return b.counted()[qp.CntFaultRNR] > 0 }
				}
				s := newSlowMemory(t, owner.pd, 4*n)
				s.fs.Hold()
				if c.remote {
					a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, n), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
				} else {
					a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: s.sge(0, n), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				}
				eventually(t, "the request waits", waits)
				if c.dies {
					s.fs.Kill()
					a.status(c.want)
					return
				}
				other := must[provider.MR](t)(b.pd.RegMRAddr(s.addr, 4*n, uint64(s.addr), odpAccess))
				must0(t, b.pd.Advise(ib.AdvisePrefetch, false, []ib.SGE{{Addr: uint64(s.addr) + 2*n, Length: 2 * n, LKey: other.LKey()}}))
				closeAll(t, s.mr)
				a.status(c.want)
				closed := make(chan error)
				go func() { closed <- other.Close() }()
				eventually(t, "the closing has begun", func() bool { return !other.(*MR).region.Alive() })
				_ = other.PagingStats() // does not wait for storage
				s.fs.Go()
				must0(t, <-closed)
			})
		}
	}
}

// A prefetch is asynchronous, unless the caller asks to wait for it; then it has happened
// when the call returns. Using the memory afterwards faults no more.
func TestPrefetchSlow(t *testing.T) {
	const n = 1 << 20
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	a, b := connected(t, x, y, ib.RC, n, nil)
	s, other := newSlowMemory(t, b.pd, n), newSlowMemory(t, b.pd, n)
	s.fs.Hold()
	list := append(s.sge(0, n/2), other.sge(n/2, n/2)...)
	must0(t, b.pd.Advise(ib.AdvisePrefetch, false, list))
	if st := s.mr.PagingStats(); st.Prefetches != 0 {
		t.Fatalf("it has not come yet: %+v", st)
	}
	var pages uint64
	waited := make(chan error)
	go func() {
		err := b.pd.Advise(ib.AdvisePrefetch, true, s.sge(n/2, n/2))
		pages = s.mr.PagingStats().PrefetchPages
		waited <- err
	}()
	s.fs.Go()
	if err := <-waited; err != nil || pages < n/2>>12 {
		t.Errorf("%v; %d pages are there when the call that waits returns", err, pages)
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
	must0(t, pd.Advise(ib.AdvisePrefetch, false, list))
	access := odpAccess | ib.AccessRelaxedOrdering
	must0(t, mr.Rereg(provider.MRChange{Access: &access}))
	must0(t, pd.Advise(ib.AdvisePrefetch, false, []ib.SGE{{Length: n / 2, LKey: mr.LKey()}}))
	s.fs.Go()
	eventually(t, "the last prefetch is done", func() bool { return mr.PagingStats().Prefetches > 0 })
	if st := mr.PagingStats(); st.Prefetches != 1 || st.PrefetchPages != n>>13 {
		t.Errorf("%+v", st)
	}
	closeAll(t, mr, s.mr, pd)
}
