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

// onDemandWays are the links, each with one of the two sorts of keys to on-demand memory; in the
// full matrix with both.
func onDemandWays(t *testing.T, test func(t *testing.T, link string, implicit bool)) {
	for _, way := range []struct {
		link     string
		implicit bool
	}{{linkLoop, true}, {linkUDP, false}, {linkLoop, false}, {linkUDP, true}}[:lastingOps(2, 4)] {
		t.Run(fmt.Sprintf("%s/implicit %v", way.link, way.implicit), func(t *testing.T) { test(t, way.link, way.implicit) })
	}
}

// Random traffic of every kind in both directions, in on-demand memory on both
// sides, while the pages are discarded and mapped again, the collector runs and
// the process forks: all of it is done and right, and nothing was ever missing.
func TestOnDemandTraffic(t *testing.T) {
	seed := testSeed(t)
	onDemandWays(t, func(t *testing.T, link string, implicit bool) {
		rng := rand.New(rand.NewPCG(seed, 0))
		x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
		type area struct {
			*mapped
			fd int
		}
		var areas []area
		var sides []*side
		for i := range 2 {
			s := newSides(t, fmt.Sprint(i), x, y, rng, lastingOps(60, 400), ib.MTU1024, 64<<10, func(e *end) {
				m, fd := e.onDemandShared(implicit)
				areas = append(areas, area{m, fd})
				e.pause = func() { time.Sleep(10 * time.Microsecond) } // leaves the processors to the others
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
				stormPause(rng, 300)
			}
		})
		own := make([]byte, 8192)
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 2))
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
				stormPause(rng, 6000)
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

// stormPause waits for a random time between two strokes of a storm. No verdict depends on how
// long it is.
func stormPause(rng *rand.Rand, most int) {
	time.Sleep(time.Duration(rng.IntN(most)) * time.Microsecond)
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

// Pages go and come, are forbidden and allowed again, on both sides, while requests use them: a
// request ends well, or with the error of the side whose page was bad just then; and the
// process lives. (TestOnDemandFaults shows which fault ends in which error.)
func TestOnDemandStormOfHoles(t *testing.T) {
	const pages = 32
	seed := testSeed(t)
	remote := map[ib.Opcode]ib.WCStatus{ib.OpRDMAWrite: ib.WCRemAccessErr, ib.OpRDMARead: ib.WCRemAccessErr, ib.OpSend: ib.WCRemOpErr}
	onDemandWays(t, func(t *testing.T, link string, implicit bool) {
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
				stormPause(rng, 200)
			}
		})
		defer wg.Wait()
		defer stop.Store(true)
		rng := rand.New(rand.NewPCG(seed, 2))
		outcomes := map[ib.WCStatus]int{}
		for i := 0; i < lastingOps(300, 5000) || outcomes[ib.WCSuccess] == 0; i++ {
			p := rng.IntN(pages)
			n := (1 + rng.IntN(min(6, pages-p))) << 12 // too long to wait beside a completion
			wr := a.write(b, p<<12, n)
			wr.Op = []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead, ib.OpSend}[rng.IntN(3)]
			if wr.Op == ib.OpSend {
				b.recv(ib.RecvWR{ID: 5, SGL: b.sge(p<<12, n)})
			}
			a.post(wr)
			wc := a.wait()
			outcomes[wc.Status]++
			switch wc.Status {
			case ib.WCSuccess:
				if wr.Op == ib.OpSend {
					b.ok()
				}
			case ib.WCLocProtErr:
				again(a, b)
			case remote[wr.Op]:
				if wr.Op == ib.OpSend {
					b.status(ib.WCLocProtErr)
				}
				again(a, b)
			default:
				t.Fatalf("%v: %v (vendor %#x); here %v, the peer %v: %v\nhere %v\nthe peer %v",
					wr.Op, wc.Status, wc.VendorErr, a.state(), b.state(), outcomes, countsOf(x), countsOf(y))
			}
		}
		t.Logf("%v; %+v", outcomes, x.PagingStats())
	})
}

// Prefetches of several regions at once, while their pages are unmapped, mapped
// and discarded, and while the regions are closed: they end with the regions.
func TestPrefetchStorm(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd := must[provider.PD](t)(d.AllocPD())
	defer closeAll(t, pd)
	const n = 4 << 20
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	m := newMapped(t, 3*n)
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 1))
		for !stop.Load() {
			unix.Syscall(unix.SYS_MADVISE, m.addr, uintptr(m.n), unix.MADV_DONTNEED)
			stormPause(rng, 200)
			unix.Syscall(unix.SYS_MUNMAP, m.addr+n/2, n/4, 0)
			m.remap()
		}
	})
	closed := d.PagingStats() // as of the last round's end
	for range lastingOps(40, 500) {
		var list []ib.SGE
		var mrs []closer
		for i := range 3 {
			mr := must[provider.MR](t)(pd.RegMRAddr(m.addr+uintptr(i*n), n, 0, odpAccess))
			mrs = append(mrs, mr)
			off := rng.IntN(n / 2)
			list = append(list, ib.SGE{Addr: uint64(off), Length: n / 2, LKey: mr.LKey()})
		}
		if now := d.PagingStats(); now.PrefetchPages != closed.PrefetchPages || now.Prefetches != closed.Prefetches {
			t.Fatalf("pages were prefetched after the regions were closed: %+v, then %+v", closed, now)
		}
		advice := []ib.Advice{ib.AdvisePrefetch, ib.AdvisePrefetchWrite, ib.AdvisePrefetchNoFault}[rng.IntN(3)]
		flush := rng.IntN(3) == 0
		if err := pd.Advise(advice, flush, list); err != nil && (!flush || !isErrno(err, unix.EFAULT)) {
			t.Fatal(err)
		}
		if rng.IntN(2) == 0 {
			stormPause(rng, 500)
		}
		closeAll(t, mrs...)
		was := closed
		if closed = d.PagingStats(); closed.MRs != 0 || closed.Prefetches-was.Prefetches > 1 {
			t.Fatalf("%+v", closed)
		}
	}
}
