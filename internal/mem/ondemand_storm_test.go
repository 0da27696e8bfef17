package mem_test

// Everything at once: mappings come and go, files shrink and grow, the collector
// runs, the process forks, while the device reads and writes from several
// goroutines, prefetches, and is swept.

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// forkChild forks as a C program does; nil without cgo.
var forkChild func(b []byte) error

// storm runs things at once, each again and again, until the time is over.
type storm struct {
	wg   sync.WaitGroup
	stop atomic.Bool
	seed uint64
	n    uint64
}

func newStorm(t *testing.T) *storm { return &storm{seed: memtest.Seed(t)} }

func (s *storm) run(do func(rng *rand.Rand)) {
	s.n++
	rng := rand.New(rand.NewPCG(s.seed, s.n))
	s.wg.Go(func() {
		for !s.stop.Load() {
			do(rng)
		}
	})
}

func (s *storm) pass(d time.Duration) {
	time.Sleep(d)
	s.stop.Store(true)
	s.wg.Wait()
}

// call makes a system call that may fail: in a storm, mappings are whose they are.
func stormCall(number, addr, n, arg uintptr) { unix.Syscall(number, addr, n, arg) }

func (o *odp) stormMap(off, n uint64, prot, flags, fd int) {
	unix.Syscall6(unix.SYS_MMAP, o.addr+uintptr(off), uintptr(n), uintptr(prot), uintptr(flags|unix.MAP_FIXED), uintptr(fd), uintptr(off))
}

// What was brought in and what was taken away differ by what is there, whatever
// happens at once. Pages are only written, and never protected: then each is
// counted once on its way in and once on its way out, but where two are at the
// same page at once.
func TestOnDemandStormCounts(t *testing.T) {
	needNotifier(t)
	const n = 600 * page // more than a leaf of the page table
	for _, implicit := range []bool{false, true} {
		t.Run(fmt.Sprintf("implicit %v", implicit), func(t *testing.T) {
			o := newODP(t, n)
			o.mapAt(0, n, readWrite, anonPages, -1)
			r, base := o, uint64(0)
			if implicit {
				r, base = implicitOver(o), uint64(o.addr)
				defer r.region.Close()
			}
			s := newStorm(t)
			span := func(rng *rand.Rand) (off, len uint64) {
				return rng.Uint64N(580) * page, (1 + rng.Uint64N(20)) * page
			}
			var worked atomic.Int64
			for range 2 {
				s.run(func(rng *rand.Rand) {
					off, _ := span(rng)
					switch f := r.write(off, pattern(1+rng.IntN(5*page), byte(off))); f.Kind {
					case mem.FaultNone:
						worked.Add(1)
					case mem.FaultUnmapped, mem.FaultPending:
					default:
						t.Error(f)
					}
				})
			}
			s.run(func(rng *rand.Rand) {
				off, len := span(rng)
				switch kind := r.prefetch(base+off, len, true, false); kind {
				case mem.FaultNone, mem.FaultUnmapped:
				default:
					t.Error(kind)
				}
			})
			s.run(func(rng *rand.Rand) {
				off, len := span(rng)
				switch rng.IntN(4) {
				case 0:
					stormCall(unix.SYS_MUNMAP, o.addr+uintptr(off), uintptr(len), 0)
				case 1:
					stormCall(unix.SYS_MADVISE, o.addr+uintptr(off), uintptr(len), unix.MADV_DONTNEED)
				case 2:
					o.stormMap(off, len, readWrite, anonPages, -1)
				case 3:
					o.stormMap(0, n, readWrite, anonPages, -1)
				}
			})
			s.run(func(rng *rand.Rand) {
				mem.Sweep()
				r.backing.Stats()
				time.Sleep(time.Millisecond)
			})
			s.pass(lasting(250*time.Millisecond, 6*time.Second))
			st := r.backing.Stats()
			if in, out := st.PageFaultPages+st.PrefetchPages, st.InvalidationPages+r.backing.Present(); in < out || in-out > 20*st.Contentions+in/100 {
				t.Errorf("%d pages came, %d went or are there: %+v", in, out, st)
			}
			o.unmap(0, n)
			if got := r.backing.Present(); got != 0 {
				t.Errorf("nothing is mapped, and %d pages are present", got)
			}
			if worked.Load() == 0 {
				t.Error("nothing worked")
			}
			t.Logf("%d accesses worked: %+v", worked.Load(), st)
		})
	}
}

// Words that the device writes contain where and when they were written: reads of the
// device and of the CPU find such words or zeros, and in the end everything works.
// Files, protections, moves and forks are included.
func TestOnDemandStormOfAll(t *testing.T) {
	const n = 64 * page
	fd := memfd(t, n)
	defer unix.Close(fd)
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, anonPages, -1)
	s := newStorm(t)
	span := func(rng *rand.Rand) (off, len uint64) {
		off = rng.Uint64N(64)
		return off * page, (1 + rng.Uint64N(min(12, 64-off))) * page
	}
	var worked, refused atomic.Int64
	outcome := func(f mem.Fault) bool {
		switch f.Kind {
		case mem.FaultNone:
			worked.Add(1)
			return true
		case mem.FaultUnmapped, mem.FaultPending:
			refused.Add(1)
		default:
			t.Error(f)
		}
		return false
	}
	for range 2 {
		s.run(func(rng *rand.Rand) { // every byte of page p is p+1, or 0
			off, len := span(rng)
			data := make([]byte, len)
			for i := range data {
				data[i] = byte(off/page) + byte(i/page) + 1
			}
			outcome(o.write(off, data))
		})
	}
	s.run(func(rng *rand.Rand) {
		off, len := span(rng)
		data, f := o.read(off, len)
		if !outcome(f) {
			return
		}
		for i, b := range data {
			if want := byte(off/page) + byte(i/page) + 1; b != 0 && b != want {
				t.Errorf("page %d has a byte %d", off/page+uint64(i/page), b)
				s.stop.Store(true)
				return
			}
		}
	})
	s.run(func(rng *rand.Rand) {
		off, len := span(rng)
		at := o.addr + uintptr(off)
		switch rng.IntN(9) {
		case 0:
			stormCall(unix.SYS_MUNMAP, at, uintptr(len), 0)
		case 1:
			stormCall(unix.SYS_MADVISE, at, uintptr(len), unix.MADV_DONTNEED)
		case 2:
			o.stormMap(off, len, readWrite, anonPages, -1)
		case 3:
			o.stormMap(off, len, readWrite, unix.MAP_SHARED, fd)
		case 4:
			stormCall(unix.SYS_MPROTECT, at, uintptr(len), uintptr(rng.IntN(4)&unix.PROT_READ))
		case 5:
			stormCall(unix.SYS_MPROTECT, at, uintptr(len), readWrite)
		case 6: // away, and back to where it was
			to := nextODPAway
			if _, _, e := unix.Syscall6(unix.SYS_MREMAP, at, uintptr(len), uintptr(len), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0); e == 0 {
				unix.Syscall6(unix.SYS_MREMAP, to, uintptr(len), uintptr(len), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, at, 0)
			}
		case 7:
			o.stormMap(0, n, readWrite, anonPages, -1)
		case 8:
			stormCall(unix.SYS_MADVISE, at, uintptr(len), unix.MADV_FREE)
		}
	})
	s.run(func(rng *rand.Rand) {
		off, len := span(rng)
		if rng.IntN(2) == 0 {
			_ = unix.Ftruncate(fd, int64(off))
			_ = unix.Ftruncate(fd, n)
		} else {
			_ = unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(len))
		}
	})
	private := make([]byte, 2*page)
	s.run(func(rng *rand.Rand) {
		if rng.IntN(4) == 0 || forkChild == nil {
			if err := exec.Command("/bin/true").Run(); err != nil {
				t.Error(err)
			}
		} else if err := forkChild(private); err != nil {
			t.Error(err)
		}
		mem.Sweep()
		time.Sleep(2 * time.Millisecond)
	})
	s.pass(lasting(300*time.Millisecond, 10*time.Second))
	if !bytes.Equal(private, make([]byte, 2*page)) {
		t.Error("the child of a fork has written into its parent")
	}
	o.mapAt(0, n, readWrite, anonPages, -1)
	o.mustWrite(0, pattern(n, 2))
	o.mustRead(0, pattern(n, 2))
	t.Logf("%d accesses worked, %d were refused: %+v", worked.Load(), refused.Load(), o.backing.Stats())
	if worked.Load() == 0 {
		t.Error("none worked")
	}
}

// nextODPAway is where nothing else is.
const nextODPAway = uintptr(0x3000_0000_0000)

// The collector frees and gives back memory around slices that the device works
// with, under a key of their own and under that of everything.
func TestOnDemandStormOfGC(t *testing.T) {
	o := newODP(t, page)
	all := implicitOver(o)
	defer all.region.Close()
	s := newStorm(t)
	for range 2 {
		s.run(func(rng *rand.Rand) {
			b := make([]byte, 1+rng.IntN(64*page))
			data := pattern(len(b), byte(rng.Uint32()))
			key, addr := all.region.Key(), uint64(addrOf(b))
			if rng.IntN(2) == 0 {
				m, err := mem.NewOnDemandBytes(b, odpAccess, o.table.Paging())
				if err != nil {
					t.Error(err)
					return
				}
				r, err := o.table.Register(mem.RegionConfig{PD: 1, Access: odpAccess, IOVA: addr, Length: m.Len(), Backing: m})
				if err != nil {
					t.Error(err)
					return
				}
				defer r.Close()
				key = r.Key()
			}
			list := mem.List{Table: o.table, Actor: mem.Actor{PD: 1}, SGEs: []ib.SGE{{Addr: addr, Length: uint32(len(b)), LKey: key}}}
			to, from := list, list
			to.Access, from.Access = ib.AccessRemoteWrite, ib.AccessRemoteRead
			if f := patiently(func() mem.Fault {
				f, _ := mem.Copy(&to, &mem.List{Raw: [][]byte{data}}, uint64(len(b)), true)
				return f
			}); !f.OK() {
				t.Error(f)
			}
			got := make([]byte, len(b))
			if f := patiently(func() mem.Fault {
				f, _ := mem.Copy(&mem.List{Raw: [][]byte{got}}, &from, uint64(len(b)), false)
				return f
			}); !f.OK() {
				t.Error(f)
			}
			if !bytes.Equal(got, data) || !bytes.Equal(b, data) {
				t.Error("something else was read than was written")
				s.stop.Store(true)
			}
			runtime.KeepAlive(b)
		})
	}
	s.run(func(*rand.Rand) {
		debug.FreeOSMemory()
		time.Sleep(time.Millisecond)
	})
	s.pass(lasting(250*time.Millisecond, 6*time.Second))
	t.Logf("%+v", all.backing.Stats())
}
