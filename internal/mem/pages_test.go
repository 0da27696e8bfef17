package mem_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// needPins skips a test where the kernel does not let the process pin pages.
func needPins(tb testing.TB) {
	tb.Helper()
	if err := sys.CanPin(); err != nil {
		tb.Skipf("kernel: %v", err)
	}
}

func newPages(tb testing.TB, b []byte, access ib.Access) *mem.Pages {
	tb.Helper()
	p, err := mem.NewPages(addrOf(b), uint64(len(b)), access)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// Pinned pages pass the suite, but for atomics: those of private memory, and those of a
// shared file in memory that are not mapped where they were any more.
func TestConformanceOfPages(t *testing.T) {
	needPins(t)
	needMemlock(t)
	if k := (&mem.Pages{}).Kind(); k != mem.KindPinned {
		t.Errorf("they are %v", k)
	}
	memtest.Run(t, memtest.Constructor{Name: "private", NoAtomics: true, New: func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
		b := mmap(tb, -1, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		return memtest.Memory{Backing: newPages(tb, b, access), Bytes: b, Free: func() { unix.Munmap(b) }}
	}})
	memtest.Run(t, memtest.Constructor{Name: "unmapped", NoAtomics: true, New: func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
		fd := memfd(tb, n)
		defer unix.Close(fd)
		registered := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		seen := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		p := newPages(tb, registered, access)
		if err := unix.Munmap(registered); err != nil {
			tb.Fatal(err)
		}
		return memtest.Memory{Backing: p, Bytes: seen, Free: func() { unix.Munmap(seen) }}
	}})
}

// Run, Store and Done against a model, with messages that end in every place of a word.
func TestPagesRunAndStore(t *testing.T) {
	needPins(t)
	rng := rand.New(rand.NewPCG(memtest.Seed(t), 0))
	const n = 2*mem.Quantum + 123
	b := mmap(t, -1, n+5, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	defer unix.Munmap(b)
	p := newPages(t, b[5:], ib.AccessLocalWrite)
	model := make([]byte, n)
	for round := range 2000 {
		off := rng.Uint64N(n)
		size := min(rng.Uint64N(1<<rng.IntN(20))+1, n-off)
		place, kind := p.Run(off, size, ib.AccessRemoteWrite)
		if kind != mem.FaultNone || uint64(len(place)) != min(size, mem.Quantum) {
			t.Fatalf("room for %d bytes at %d: %d, %v", size, off, len(place), kind)
		}
		for i := range place {
			place[i] = byte(rng.Uint32())
		}
		if kind := p.Store(off, place, round%2 == 0); kind != mem.FaultNone {
			t.Fatal(kind)
		}
		copy(model[off:], place)
		p.Done(place)
		off = rng.Uint64N(n)
		size = min(rng.Uint64N(1<<rng.IntN(20))+1, n-off)
		got, kind := p.Run(off, size, ib.AccessRemoteRead)
		if kind != mem.FaultNone || uint64(len(got)) != min(size, mem.Quantum) || !bytes.Equal(got, model[off:][:len(got)]) {
			t.Fatalf("round %d: %d bytes at %d: %d, %v, or they differ", round, size, off, len(got), kind)
		}
		p.Done(got)
	}
	if !bytes.Equal(b[5:], model) {
		t.Error("the program sees something else")
	}
	for _, c := range []struct{ off, n uint64 }{{n, 1}, {n - 1, 2}, {0, n + 1}, {^uint64(0), 2}} {
		if _, kind := p.Run(c.off, c.n, 0); kind != mem.FaultBounds {
			t.Errorf("%d bytes at %d: %v", c.n, c.off, kind)
		}
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Error(err)
	}
	if _, kind := p.Run(0, 1, 0); kind != mem.FaultDead {
		t.Errorf("a read after the end: %v", kind)
	}
	if kind := p.Store(0, []byte{1}, true); kind != mem.FaultDead {
		t.Errorf("a write after the end: %v", kind)
	}
}

// Memory that was registered to be read is not written; what cannot be pinned is an error.
func TestPagesRefused(t *testing.T) {
	needPins(t)
	b := mmap(t, -1, 2*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	defer unix.Munmap(b)
	p := newPages(t, b[:4096], ib.AccessRemoteRead)
	defer p.Close()
	if kind := p.Store(0, []byte{1}, true); kind != mem.FaultAccess || b[0] != 0 {
		t.Errorf("a write: %v", kind)
	}
	if err := unix.Mprotect(b[4096:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	var pinErr *sys.PinError
	if _, err := mem.NewPages(addrOf(b), 2*4096, 0); !errors.Is(err, syscall.EFAULT) || !errors.As(err, &pinErr) {
		t.Errorf("memory that cannot be pinned: %v", err)
	}
	if _, err := mem.NewPages(addrOf(b), ^uint64(0), 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("more than there are addresses: %v", err)
	}
}

// Goroutines that write, read and close at the same time never share staging bytes.
func TestPagesTogether(t *testing.T) {
	needPins(t)
	const n, workers = 64 << 10, 6
	b := mmap(t, -1, n*workers, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	defer unix.Munmap(b)
	p := newPages(t, b, ib.AccessLocalWrite)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for round := range 200 {
				mine := bytes.Repeat([]byte{byte(w*40 + round%40)}, n)
				place, _ := p.Run(uint64(w*n), n, ib.AccessLocalWrite)
				copy(place, mine)
				if kind := p.Store(uint64(w*n), place, true); kind != mem.FaultNone {
					t.Error(kind)
				}
				p.Done(place)
				got, kind := p.Run(uint64(w*n), n, 0)
				if kind != mem.FaultNone || !bytes.Equal(got, mine) {
					t.Errorf("worker %d, round %d: %v, or the bytes differ", w, round, kind)
					return
				}
				p.Done(got)
			}
		})
	}
	wg.Wait()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// An access allocates nothing.
func TestPagesAlloc(t *testing.T) {
	if mem.RaceEnabled {
		t.Skip("race: the detector allocates")
	}
	needPins(t)
	b := mmap(t, -1, mem.Quantum, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	defer unix.Munmap(b)
	p := newPages(t, b, ib.AccessLocalWrite)
	defer p.Close()
	if n := testing.AllocsPerRun(200, func() {
		for _, size := range []uint64{8, 5000, mem.Quantum} {
			place, _ := p.Run(0, size, ib.AccessLocalWrite)
			p.Store(0, place, true)
			p.Done(place)
			got, _ := p.Run(0, size, 0)
			p.Done(got)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
