package mem_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// Every kind of memory that a process has passes the suite on demand, by a region
// of its own and by that of the whole address space: in the short run by one of
// the two, in turn.
func TestConformanceOnDemandKinds(t *testing.T) {
	for i, kind := range append(kindsOfMemory, kindsOfC...) {
		for _, implicit := range []bool{false, true} {
			if os.Getenv("VERBENA_FULL") == "" && implicit != (i%2 == 1) {
				continue
			}
			name := "explicit"
			if implicit {
				name = "implicit"
			}
			t.Run(kind.name+"/"+name, func(t *testing.T) {
				if kind.prepare != nil {
					kind.prepare(t)
				}
				memtest.Run(t, memtest.Constructor{
					Name: "suite", Access: ib.AccessOnDemand, New: onDemandOver(kind.make, implicit), Window: kind.window,
				})
			})
		}
	}
}

// kindOfMemory makes n zero bytes, as the program sees them.
type kindOfMemory struct {
	name    string
	make    func(tb testing.TB, n uint64) (b []byte, free func())
	prepare func(t *testing.T)
	window  ib.MWType
}

var kindsOfMemory = []kindOfMemory{
	{name: "transparent huge pages", make: hugeMemory},
	{name: "hugetlb, private", make: hugetlbMemory(unix.MAP_PRIVATE), prepare: allowHugePages},
	{name: "hugetlb, shared", make: hugetlbMemory(unix.MAP_SHARED), prepare: allowHugePages},
	{name: "file, shared", make: fileMemory(unix.MAP_SHARED)},
	{name: "file, private", make: fileMemory(unix.MAP_PRIVATE)},
	{name: "shared anonymous, through windows", make: sharedMemory, window: ib.MWType2},
}

func onDemandOver(make func(testing.TB, uint64) ([]byte, func()), implicit bool) func(testing.TB, uint64, ib.Access) memtest.Memory {
	return func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
		b, free := make(tb, n)
		if implicit {
			m, err := mem.NewImplicit(access, &paging)
			if err != nil {
				tb.Fatal(err)
			}
			return memtest.Memory{Backing: part{m, uint64(addrOf(b)), n}, Bytes: b, Free: free}
		}
		m, err := mem.NewOnDemand(addrOf(b), n, access, &paging)
		if err != nil {
			tb.Fatal(err)
		}
		return memtest.Memory{Backing: m, Bytes: b, Free: free}
	}
}

const hugePage = 2 << 20

// hugeMemory begins and ends inside huge pages.
func hugeMemory(tb testing.TB, n uint64) ([]byte, func()) {
	all := mmap(tb, -1, n+3*hugePage, readWrite, anonPages)
	off := hugePage - uint64(addrOf(all))%hugePage
	if err := unix.Madvise(all[off:][:(n+2*hugePage)&^(hugePage-1)], unix.MADV_HUGEPAGE); err != nil {
		tb.Fatal(err)
	}
	off += 128 << 10
	return all[off:][:n:n], func() { unix.Munmap(all) }
}

// hugetlbMemory cuts small memory out of huge pages: some tests want much of it.
func hugetlbMemory(flags int) func(testing.TB, uint64) ([]byte, func()) {
	var left []byte
	var of testing.TB
	return func(tb testing.TB, n uint64) ([]byte, func()) {
		tb.Helper()
		whole := (n + page - 1) &^ (page - 1)
		if of != tb || uint64(len(left)) < whole {
			left = mapHugetlb(tb, max(whole, hugePage), flags)
			of = tb
		}
		b := left[:n:n]
		left = left[whole:]
		return b, nil
	}
}

// mapHugetlb maps huge pages until the test ends.
func mapHugetlb(tb testing.TB, n uint64, flags int) []byte {
	tb.Helper()
	// Tests of other packages, and other people's, turn the same knob.
	for tries := 0; ; tries++ {
		b, err := unix.Mmap(-1, 0, int((n+hugePage-1)&^(hugePage-1)), readWrite, flags|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB|21<<unix.MAP_HUGE_SHIFT)
		if err == nil {
			tb.Cleanup(func() { unix.Munmap(b) })
			return b
		}
		if tries == 1000 {
			tb.Fatal(err)
		}
		_ = os.WriteFile(hugeKnob, []byte(strconv.Itoa(hugeEnough)), 0)
		time.Sleep(time.Millisecond)
	}
}

func sharedMemory(tb testing.TB, n uint64) ([]byte, func()) {
	b := mmap(tb, -1, n, readWrite, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	return b, func() { unix.Munmap(b) }
}

func fileMemory(flags int) func(testing.TB, uint64) ([]byte, func()) {
	return func(tb testing.TB, n uint64) ([]byte, func()) {
		tb.Helper()
		name := filepath.Join(tb.TempDir(), strconv.FormatUint(n, 10))
		if err := os.WriteFile(name, make([]byte, n), 0o600); err != nil {
			tb.Fatal(err)
		}
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			tb.Fatal(err)
		}
		defer unix.Close(fd)
		b := mmap(tb, fd, n, readWrite, flags)
		return b, func() { unix.Munmap(b) }
	}
}

const (
	hugeKnob   = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages"
	hugeEnough = 64
)

// allowHugePages lets the kernel make huge pages for as long as the test runs.
func allowHugePages(t *testing.T) {
	old, err := os.ReadFile(hugeKnob)
	if err != nil {
		t.Skip("no huge pages of 2 MiB:", err)
	}
	if have, err := strconv.Atoi(strings.TrimSpace(string(old))); err != nil || have >= hugeEnough {
		return
	}
	if err := os.WriteFile(hugeKnob, []byte(strconv.Itoa(hugeEnough)), 0); err != nil {
		t.Skip("no huge pages of 2 MiB can be had:", err)
	}
	t.Cleanup(func() { _ = os.WriteFile(hugeKnob, old, 0) })
}
