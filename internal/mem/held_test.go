package mem_test

import (
	"bytes"
	"errors"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
	"github.com/verbena-rdma/verbena/internal/sys"
)

func newHeld(tb testing.TB, b []byte, access ib.Access) *mem.Held {
	tb.Helper()
	p, err := mem.NewPinned(addrOf(b), uint64(len(b)), access, ib.LockStrict, nil)
	if err != nil {
		tb.Fatal(err)
	}
	h, ok := p.(*mem.Held)
	if !ok {
		tb.Fatalf("it is a %T", p)
	}
	return h
}

// Memory that is held passes the suite, by itself, through windows and under indirect
// keys: private memory, and the Go heap.
func TestConformanceOfHeld(t *testing.T) {
	needPins(t)
	needMemlock(t)
	private := func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
		b := mmap(tb, -1, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		return memtest.Memory{Backing: newHeld(tb, b, access), Bytes: b, Free: func() { unix.Munmap(b) }}
	}
	heap := func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
		b := make([]byte, n)
		p, err := mem.NewPinnedBytes(b, access, ib.LockStrict)
		if err != nil {
			tb.Fatal(err)
		}
		return memtest.Memory{Backing: p, Bytes: b}
	}
	memtest.Run(t, memtest.Constructor{Name: "private", New: private})
	memtest.Run(t, memtest.Constructor{Name: "heap", New: heap})
	memtest.Run(t, memtest.Constructor{Name: "type 2/private", New: private, Window: ib.MWType2})
	if !mem.RaceEnabled {
		memtest.Run(t, memtest.Constructor{Name: "list/private", New: private, Shape: memtest.List})
		memtest.Run(t, memtest.Constructor{Name: "nested/private", New: private, Shape: memtest.Nested})
	}
}

func needMemlock(tb testing.TB) {
	tb.Helper()
	if limit := sys.MemlockLimit(); unix.Getuid() != 0 && limit < 16<<20 {
		tb.Skipf("RLIMIT_MEMLOCK is %d bytes, the suite needs more", limit)
	}
}

// What a program maps over memory that is held is neither read nor written: the pages of
// registration time are.
func TestHeldSurvivesRemapping(t *testing.T) {
	needPins(t)
	needMemlock(t)
	const n = 64 << 10
	for _, way := range []struct {
		name string
		map_ func(addr uintptr)
	}{
		{"mapped over", func(addr uintptr) {
			if _, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0); errno != 0 {
				t.Fatal(errno)
			}
		}},
		{"unmapped", func(addr uintptr) {
			if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, addr, n, 0); errno != 0 {
				t.Fatal(errno)
			}
		}},
		{"discarded", func(addr uintptr) {
			if _, _, errno := unix.Syscall(unix.SYS_MADVISE, addr, n, unix.MADV_DONTNEED); errno != 0 {
				t.Fatal(errno)
			}
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			table := mem.NewTable(mem.TableConfig{})
			who := mem.Actor{PD: 1}
			b := mmap(t, -1, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			for i := range b {
				b[i] = 'o'
			}
			r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, Length: n, Backing: newHeld(t, b, ib.AccessLocalWrite)})
			if err != nil {
				t.Fatal(err)
			}
			list := func(acc ib.Access) *mem.List {
				return &mem.List{Table: table, Actor: who, Access: acc, SGEs: []ib.SGE{{Length: n, LKey: r.Key()}}}
			}
			if _, f := mem.Atomic(table, who, r.Key(), 8, mem.FetchAdd, 0, 1); !f.OK() {
				t.Errorf("an atomic while it is mapped: %v", f)
			}
			way.map_(addrOf(b))
			got := make([]byte, n)
			if f, side := mem.Copy(&mem.List{Raw: [][]byte{got}}, list(ib.AccessRemoteRead), n, true); !f.OK() {
				t.Fatal(side, f)
			}
			if !bytes.Equal(got[16:], bytes.Repeat([]byte{'o'}, n-16)) || got[8] != 'o'+1 {
				t.Errorf("the old pages are not what they were: %q…", got[:32])
			}
			if f, side := mem.Copy(list(ib.AccessRemoteWrite), &mem.List{Raw: [][]byte{bytes.Repeat([]byte{'n'}, n)}}, n, true); !f.OK() {
				t.Fatal(side, f)
			}
			if f, side := mem.Copy(&mem.List{Raw: [][]byte{got}}, list(ib.AccessRemoteRead), n, true); !f.OK() || bytes.IndexByte(got, 'o') >= 0 {
				t.Errorf("%v: %v, %q…", side, f, got[:32])
			}
			if way.name != "unmapped" {
				if !bytes.Equal(b, make([]byte, n)) {
					t.Error("the new mapping was written to")
				}
			}
			// It may have to wait until the change of mappings is known, as a queue pair does.
			_, f := mem.Atomic(table, who, r.Key(), 8, mem.FetchAdd, 0, 1)
			for ; f.Kind == mem.FaultPending; _, f = mem.Atomic(table, who, r.Key(), 8, mem.FetchAdd, 0, 1) {
				f.Await()
			}
			if f.Kind != mem.FaultStale {
				t.Errorf("an atomic after that: %v", f)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
			if way.name != "unmapped" {
				unix.Munmap(b)
			}
		})
	}
}

// What cannot be held is locked, or refused if that is what strict means there.
func TestHeldFallsBack(t *testing.T) {
	needPins(t)
	needMemlock(t)
	b := mmap(t, -1, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	defer unix.Munmap(b)
	p, err := mem.NewPinned(addrOf(b), 4096, 0, ib.LockStrict, nil)
	if err != nil {
		t.Fatal(err)
	}
	h, ok := p.(*mem.Host)
	if !ok || !h.Locked() {
		t.Errorf("a read-only mapping became a %T, locked: %v", p, ok && h.Locked())
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := mem.NewPinned(1<<40, 4096, 0, ib.LockStrict, nil); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("memory that is not there: %v", err)
	}
}
