package mem_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

func init() { memtest.Hold = mem.Hold }

// All kinds of host memory pass the suite: by slice and by address, of the Go
// heap, of a private mapping, and of a mapping whose other side is the one that
// the test looks at. So does memory in short runs.
func TestConformance(t *testing.T) {
	memtest.Run(t, memtest.Constructor{Name: "heap", New: heapMemory})
	memtest.Run(t, memtest.Constructor{Name: "mmap", New: mmapMemory})
	memtest.Run(t, memtest.Constructor{Name: "memfd", New: memfdMemory})
	memtest.Run(t, memtest.Constructor{Name: "scattered", New: scatteredMemory})
	memtest.Run(t, memtest.Constructor{Name: "allocated", New: allocatedMemory})
	memtest.Run(t, memtest.Constructor{Name: "null", New: nullMemory, Discards: true})
}

// nullMemory is memory that is not there.
func nullMemory(testing.TB, uint64, ib.Access) memtest.Memory {
	return memtest.Memory{Backing: mem.NewNull(), Read: func(_ uint64, b []byte) { clear(b) }, Write: func(uint64, []byte) {}}
}

// movesInFile returns what moves memory of a file, of n bytes, that is seen in a mapping:
// its pages are given up, after poison was written to them, and fresh ones take their
// place under the same addresses.
func movesInFile(tb testing.TB, fd int, seen []byte) func(poison byte) {
	kept := make([]byte, len(seen))
	return func(poison byte) {
		copy(kept, seen)
		for i := range seen {
			seen[i] = poison
		}
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(seen)+os.Getpagesize()-1)/int64(os.Getpagesize())*int64(os.Getpagesize())); err != nil {
			tb.Error(err)
		}
		copy(seen, kept)
	}
}

// Windows on all of them pass it too.
func TestConformanceOfWindows(t *testing.T) {
	memtest.Run(t, memtest.Constructor{Name: "type 1/heap", New: heapMemory, Window: ib.MWType1})
	memtest.Run(t, memtest.Constructor{Name: "type 2/mmap", New: mmapMemory, Window: ib.MWType2})
	memtest.Run(t, memtest.Constructor{Name: "type 2/allocated", New: allocatedMemory, Window: ib.MWType2})
	memtest.Run(t, memtest.Constructor{Name: "type 2/scattered", New: scatteredMemory, Window: ib.MWType2})
}

// scattered is memory that is contiguous in short runs only, as the pages of
// other kinds are.
type scattered struct{ mem.Backing }

const scatteredRun = 192

func (s scattered) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	return s.Backing.Run(off, min(n, scatteredRun-off%scatteredRun), acc)
}

func scatteredMemory(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	m := heapMemory(tb, n, access)
	m.Backing = scattered{m.Backing}
	return m
}

// allocatedMemory is the library's, seen through a mapping of the test's own.
func allocatedMemory(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	a, err := mem.NewAlloc(n, access, ib.LockAuto)
	if err != nil {
		tb.Fatal(err)
	}
	fd, off, ok := a.Shared()
	if !ok || off != 0 {
		tb.Fatalf("at %d, shared: %v", off, ok)
	}
	b := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return memtest.Memory{Backing: a, Bytes: b, Move: movesInFile(tb, fd, b), Free: func() { unix.Munmap(b) }}
}

func heapMemory(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	b := make([]byte, n)
	h, err := mem.NewHostBytes(b, access, ib.LockAuto)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: h, Bytes: b}
}

func mmapMemory(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	b := mmap(tb, -1, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	h, err := mem.NewHost(addrOf(b), n, access, ib.LockAuto, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: h, Bytes: b, Free: func() { unix.Munmap(b) }}
}

func memfdMemory(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	fd := memfd(tb, n)
	registered := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	seen := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	h, err := mem.NewHost(addrOf(registered), n, access, ib.LockAuto, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: h, Bytes: seen, Move: movesInFile(tb, fd, seen), Free: func() {
		unix.Munmap(registered)
		unix.Munmap(seen)
		unix.Close(fd)
	}}
}

func mmap(tb testing.TB, fd int, n uint64, prot, flags int) []byte {
	tb.Helper()
	b, err := unix.Mmap(fd, 0, int(n), prot, flags)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func memfd(tb testing.TB, n uint64) int {
	tb.Helper()
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC)
	if err != nil {
		tb.Fatal(err)
	}
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		tb.Fatal(err)
	}
	return fd
}
