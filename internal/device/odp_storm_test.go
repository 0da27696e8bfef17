package device

// Traffic in on-demand memory while everything around it changes.

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/queue"
)

// forkChild forks as a C program does; nil without cgo.
var forkChild func(b []byte) error

// implicitMR is the region of the whole address space, which begins where one's
// own memory begins.
type implicitMR struct {
	provider.MR
	addr, length uint64
}

func (m implicitMR) Addr() uint64   { return m.addr }
func (m implicitMR) Length() uint64 { return m.length }

// onDemandShared gives an end memory of a file in memory, on demand: what it has
// stays when pages are discarded or mapped again.
func (e *end) onDemandShared(implicit bool) (m *mapped, fd int) {
	e.t.Helper()
	n := (uint64(len(e.buf)) + 4095) &^ 4095
	closeAll(e.t, e.mr)
	m = newMapped(e.t, n)
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = unix.Close(fd) })
	m.mapFile(fd, 0, n)
	if implicit {
		mr := must[provider.MR](e.t)(e.pd.RegImplicitMR(allRemote | ib.AccessOnDemand))
		e.mr = implicitMR{mr, uint64(m.addr), n}
	} else {
		e.mr = must[provider.MR](e.t)(e.pd.RegMRAddr(m.addr, n, uint64(m.addr), allRemote|ib.AccessOnDemand))
	}
	e.buf = m.bytes()[:len(e.buf)]
	return m, fd
}

// mapFile maps a part of a file over what is there: an access sees the one or the other, and
// never nothing.
func (m *mapped) mapFile(fd int, off, n uint64) {
	if _, _, e := unix.Syscall6(unix.SYS_MMAP, m.addr+uintptr(off), uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED, uintptr(fd), uintptr(off)); e != 0 {
		m.t.Error(e)
	}
}

// Random traffic of every kind in both directions, in on-demand memory on both
// sides, while the pages are discarded and mapped again, the collector runs and
// the process forks: all of it is done and right, and nothing was ever missing.
func TestOnDemandTraffic(t *testing.T) {
	seed := testSeed(t)
	for _, link := range []string{linkLoop, linkUDP} {
		for _, implicit := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/implicit %v", link, implicit), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 0))
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				type area struct {
					*mapped
					fd int
				}
				var areas []area
				var sides []*side
				for i := range 2 {
					s := newSides(t, fmt.Sprint(i), x, y, rng, lastingOps(70, 400), ib.MTU1024, 64<<10, func(e *end) {
						m, fd := e.onDemandShared(implicit)
						areas = append(areas, area{m, fd})
						e.pause = func() { time.Sleep(10 * time.Microsecond) }
					})
					sides = append(sides, s[:]...)
				}
				var stop atomic.Bool
				var wg sync.WaitGroup
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(seed, 1))
					for !stop.Load() {
						a := areas[rng.IntN(len(areas))]
						pages := a.n >> 12
						p := rng.Uint64N(pages)
						k := 1 + rng.Uint64N(min(pages-p, 40))
						if rng.IntN(2) == 0 {
							unix.Syscall(unix.SYS_MADVISE, a.addr+uintptr(p<<12), uintptr(k<<12), unix.MADV_DONTNEED)
						} else {
							a.mapFile(a.fd, p<<12, k<<12)
						}
						time.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
					}
				})
				own := make([]byte, 8192)
				wg.Go(func() {
					for i := 0; !stop.Load(); i++ {
						debug.FreeOSMemory()
						var err error
						if i%4 == 0 || forkChild == nil {
							err = exec.Command("/bin/true").Run()
						} else {
							err = forkChild(own)
						}
						if err != nil {
							t.Error(err)
						}
						time.Sleep(3 * time.Millisecond)
					}
				})
				exchange(t, sides, 2*time.Minute)
				stop.Store(true)
				wg.Wait()
				for _, s := range sides {
					s.finish(t)
				}
				for _, d := range []*Device{x, y} {
					s := d.PagingStats()
					t.Logf("%+v", s)
					if s.FailedResolutions != 0 || s.PageFaults == 0 || s.PageFaults != s.LocalFaults+s.RemoteFaults {
						t.Errorf("%+v", s)
					}
				}
			})
		}
	}
}

// again makes a connection anew that has failed: with other PSNs, so that packets
// of the old one that are still under way are not taken for the new one's. The new
// ones are smaller: then what is old looks like the future, and is asked for again.
// Like the past it would be repeated, and a READ whose memory is gone meanwhile
// fails the new connection.
func again(a, b *end) {
	for _, e := range []*end{a, b} {
		e.psn = (e.psn - 1<<20) & (1<<24 - 1)
		e.modify(ib.QPAttr{State: ib.QPReset}, 0)
	}
	var wc [64]ib.WC
	for _, e := range []*end{a, b} {
		for {
			if n, err := e.cq.Poll(wc[:]); n == 0 || err != nil {
				break
			}
		}
	}
	a.connect(b)
	b.connect(a)
}

// Pages go and come, are forbidden and allowed again, on both sides: a request
// ends well, or with the error of the side whose memory it was; and the process
// lives.
func TestOnDemandStormOfHoles(t *testing.T) {
	const pages = 32
	for _, link := range []string{linkLoop, linkUDP} {
		for _, implicit := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/implicit %v", link, implicit), func(t *testing.T) {
				seed := testSeed(t)
				x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
				var areas []*mapped
				a, b := connected(t, x, y, ib.RC, pages<<12, func(e *end) {
					m, _ := e.onDemandShared(implicit)
					m.remap() // private: what goes is gone
					areas = append(areas, m)
				})
				var stop atomic.Bool
				var wg sync.WaitGroup
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(seed, 1))
					for !stop.Load() {
						m := areas[rng.IntN(2)]
						p := rng.IntN(pages)
						at, n := m.addr+uintptr(p<<12), uintptr(1+rng.IntN(min(8, pages-p)))<<12
						switch rng.IntN(6) {
						case 0:
							unix.Syscall(unix.SYS_MUNMAP, at, n, 0)
						case 1:
							unix.Syscall(unix.SYS_MPROTECT, at, n, uintptr(rng.IntN(2))*unix.PROT_READ)
						case 2:
							unix.Syscall(unix.SYS_MADVISE, at, n, unix.MADV_DONTNEED)
						default:
							m.remap() // so that something works
						}
						time.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond)
					}
				})
				defer wg.Wait()
				defer stop.Store(true)
				rng := rand.New(rand.NewPCG(seed, 2))
				outcomes := map[ib.WCStatus]int{}
				for end := time.Now().Add(lasting(400*time.Millisecond, 6*time.Second)); time.Now().Before(end); {
					p := rng.IntN(pages)
					n := 1 + rng.IntN(min(6, pages-p))<<12
					wr := a.write(b, p<<12, n)
					receives := false
					beforeX, beforeY := countsOf(x), countsOf(y)
					switch rng.IntN(3) {
					case 0:
						wr = a.read(b, p<<12, n)
					case 1:
						wr.Op, receives = ib.OpSend, true
						b.recv(ib.RecvWR{ID: 5, SGL: b.sge(p<<12, n)})
					}
					a.post(wr)
					wc := a.wait()
					outcomes[wc.Status]++
					switch wc.Status {
					case ib.WCSuccess:
						if !receives {
							break
						}
						// A short one waits beside its completion, and finds out when that is polled.
						if wc := b.wait(); n <= queue.MaxInlineData && wc.Status == ib.WCLocProtErr {
							again(a, b)
						} else if wc.Status != ib.WCSuccess {
							t.Fatalf("the receive of %d bytes: %v", n, wc.Status)
						}
					case ib.WCLocProtErr:
						again(a, b)
					case ib.WCRemAccessErr:
						if receives {
							t.Fatalf("a SEND: %v", wc.Status)
						}
						again(a, b)
					case ib.WCRemOpErr:
						if !receives {
							t.Fatalf("not a SEND: %v", wc.Status)
						}
						b.status(ib.WCLocProtErr)
						again(a, b)
					default:
						t.Fatalf("%v: %v (vendor %#x)\nhere %v, the peer %v: %v\n%v\n%v", wr.Op, wc.Status, wc.VendorErr, a.state(), b.state(), outcomes,
							countsOf(x).since(beforeX), countsOf(y).since(beforeY))
					}
				}
				t.Logf("%v; %+v", outcomes, x.PagingStats())
				if outcomes[ib.WCSuccess] == 0 {
					t.Error("nothing worked")
				}
			})
		}
	}
}

// Prefetches of several regions at once, while their pages are unmapped, mapped
// and discarded, and while the regions are closed: they end with the regions.
func TestPrefetchStorm(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd := must[provider.PD](t)(d.AllocPD())
	defer closeAll(t, pd)
	const n = 4 << 20
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	m := newMapped(t, 3*n)
	wg.Go(func() {
		for !stop.Load() {
			unix.Syscall(unix.SYS_MADVISE, m.addr, uintptr(m.n), unix.MADV_DONTNEED)
			time.Sleep(100 * time.Microsecond)
			unix.Syscall(unix.SYS_MUNMAP, m.addr+n/2, n/4, 0)
			m.remap()
		}
	})
	for range lastingOps(40, 500) {
		var list []ib.SGE
		var mrs []closer
		for i := range 3 {
			mr := must[provider.MR](t)(pd.RegMRAddr(m.addr+uintptr(i*n), n, 0, odpAccess))
			mrs = append(mrs, mr)
			off := rng.IntN(n / 2)
			list = append(list, ib.SGE{Addr: uint64(off), Length: n / 2, LKey: mr.LKey()})
		}
		began := d.PagingStats()
		advice := []ib.Advice{ib.AdvisePrefetch, ib.AdvisePrefetchWrite, ib.AdvisePrefetchNoFault}[rng.IntN(3)]
		flush := rng.IntN(3) == 0
		if err := pd.Advise(advice, flush, list); err != nil && (!flush || !isErrno(err, unix.EFAULT)) {
			t.Fatal(err)
		}
		if rng.IntN(2) == 0 {
			time.Sleep(time.Duration(rng.IntN(500)) * time.Microsecond)
		}
		closeAll(t, mrs...)
		after := d.PagingStats()
		if after.MRs != 0 || after.Prefetches-began.Prefetches > 1 {
			t.Fatalf("%+v", after)
		}
		// What was under way is over: nothing is counted any more.
		time.Sleep(50 * time.Microsecond)
		if later := d.PagingStats(); later.PrefetchPages != after.PrefetchPages {
			t.Fatalf("pages were prefetched after the regions were closed: %+v, then %+v", after, later)
		}
	}
}
