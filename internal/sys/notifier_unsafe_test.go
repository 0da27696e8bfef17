package sys

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// openTestNotifier opens the notifier, which must be possible wherever the tests of
// a build with cgo run.
func openTestNotifier(t testing.TB) *Notifier {
	t.Helper()
	n, err := OpenNotifier()
	if !haveCgo {
		if !errors.Is(err, unix.ENOTSUP) {
			t.Fatalf("without cgo: %v", err)
		}
		t.Skip("this build has no cgo")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// mapPages maps pages of anonymous memory, in the middle of a larger range without
// rights, so that no neighbour becomes one mapping with it and nothing else is
// mapped where a test has unmapped something.
func mapPages(t testing.TB, pages uintptr, prot, flags int) uintptr {
	t.Helper()
	return mapFile(t, pages, prot, flags|unix.MAP_ANONYMOUS, -1)
}

func mapFile(t testing.TB, pages uintptr, prot, flags, fd int) uintptr {
	t.Helper()
	const margin = 16
	n := (pages + 2*margin) * pageSize
	outer, err := unix.MmapPtr(-1, 0, nil, n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(outer, n) })
	addr := unsafe.Add(outer, margin*pageSize)
	if _, err := unix.MmapPtr(fd, 0, addr, pages*pageSize, prot, flags|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	return uintptr(addr)
}

// bytesAt returns memory that the test has mapped. The address was a number all the
// time, which is no matter for memory that Go does not manage.
func bytesAt(start, end uintptr) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&start)), end-start)
}

func syscall6(t testing.TB, nr uintptr, args ...uintptr) {
	t.Helper()
	var a [6]uintptr
	copy(a[:], args)
	if _, _, e := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); e != 0 {
		t.Fatalf("system call %d of %#x: %v", nr, args, e)
	}
}

func munmapRange(t testing.TB, start, end uintptr) {
	t.Helper()
	syscall6(t, unix.SYS_MUNMAP, start, end-start)
}

// takeAll takes everything there is, and leaves Changed false.
func takeAll(t testing.TB, n *Notifier) (all []MapChange, lost bool) {
	t.Helper()
	buf := make([]MapChange, 8)
	for {
		k, l, more := n.Take(buf, true)
		all = append(all, buf[:k]...)
		lost = lost || l
		if k == 0 && !l {
			if more {
				t.Fatal("nothing was taken, and there is more")
			}
			return all, lost
		}
	}
}

const readWrite = unix.PROT_READ | unix.PROT_WRITE

// TestNotifierEvents: how each change of a mapping of eight pages is reported.
func TestNotifierEvents(t *testing.T) {
	n := openTestNotifier(t)
	p := pageSize
	for _, c := range []struct {
		name string
		do   func(a uintptr)
		want []MapChange // addresses from the mapping's start
	}{
		{"munmap", func(a uintptr) { munmapRange(t, a, a+8*p) }, []MapChange{{Unmapped, 0, 8 * p, 0}}},
		{"munmap in the middle", func(a uintptr) { munmapRange(t, a+2*p, a+5*p) }, []MapChange{{Unmapped, 2 * p, 5 * p, 0}}},
		{"mmap over it", func(a uintptr) {
			syscall6(t, unix.SYS_MMAP, a+p, 2*p, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0)
		}, []MapChange{{Unmapped, p, 3 * p, 0}}},
		{"mremap, smaller", func(a uintptr) { syscall6(t, unix.SYS_MREMAP, a, 8*p, 3*p, 0, 0) },
			[]MapChange{{Unmapped, 3 * p, 8 * p, 0}}},
		{"mremap, elsewhere", func(a uintptr) {
			syscall6(t, unix.SYS_MREMAP, a, 4*p, 4*p, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, a+10*p)
		}, []MapChange{{Moved, 0, 4 * p, 10 * p}, {Unmapped, 0, 4 * p, 0}}},
		{"MADV_DONTNEED", func(a uintptr) { syscall6(t, unix.SYS_MADVISE, a+p, p, unix.MADV_DONTNEED) },
			[]MapChange{{Discarded, p, 2 * p, 0}}},
		{"MADV_FREE", func(a uintptr) { syscall6(t, unix.SYS_MADVISE, a, 8*p, unix.MADV_FREE) },
			[]MapChange{{Discarded, 0, 8 * p, 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			if err := n.Watch(a, a+8*p); err != nil {
				t.Fatal(err)
			}
			if err := n.Watch(a, a+8*p); err != nil {
				t.Errorf("again: %v", err)
			}
			if r := PopulateRange(a, a+8*p, true); r.Outcome != Populated {
				t.Fatal(r)
			}
			if _, lost := takeAll(t, n); lost || n.Changed() { // what the case before has left, and unmapped at its end
				t.Fatalf("before: lost %v, changed %v", lost, n.Changed())
			}
			c.do(a)
			if !n.Changed() {
				t.Error("not changed")
			}
			got, lost := takeAll(t, n)
			for i := range got {
				got[i].Start -= a
				got[i].End -= a
				if got[i].Kind == Moved {
					got[i].To -= a
				}
			}
			slices.SortFunc(got, func(x, y MapChange) int { return int(y.Kind) - int(x.Kind) })
			if !slices.Equal(got, c.want) || lost {
				t.Errorf("%v, should be %v; lost %v", got, c.want, lost)
			}
			if n.Changed() {
				t.Error("changed after all was taken")
			}
		})
	}
	t.Run("what was moved is still watched", func(t *testing.T) {
		a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
		if err := n.Watch(a, a+4*p); err != nil {
			t.Fatal(err)
		}
		syscall6(t, unix.SYS_MREMAP, a, 4*p, 4*p, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, a+8*p)
		takeAll(t, n)
		munmapRange(t, a+8*p, a+12*p)
		if got, _ := takeAll(t, n); !slices.Equal(got, []MapChange{{Unmapped, a + 8*p, a + 12*p, 0}}) {
			t.Error(got)
		}
	})
	t.Run("unwatched", func(t *testing.T) {
		a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
		if err := n.Watch(a, a+4*p); err != nil {
			t.Fatal(err)
		}
		if err := n.Unwatch(a, a+4*p); err != nil {
			t.Fatal(err)
		}
		takeAll(t, n)
		munmapRange(t, a, a+4*p)
		if got, lost := takeAll(t, n); len(got) != 0 || lost {
			t.Error(got, lost)
		}
	})
	t.Run("nothing there", func(t *testing.T) {
		a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
		munmapRange(t, a, a+4*p)
		for _, r := range [][2]uintptr{{a, a + 4*p}, {a, a}, {a + p, a}, {a + 1, a + p}} {
			if err := n.Watch(r[0], r[1]); !errors.Is(err, unix.EINVAL) {
				t.Errorf("%#x to %#x: %v", r[0], r[1], err)
			}
		}
	})
}

// kinds are the kinds of memory that a program may have. Each is made of n pages of
// its size and is filled with zeros, or with text of the program.
var kinds = []struct {
	name string
	make func(t *testing.T) (start, end uintptr)
	// what QueryMapping says of it
	file, shared, write bool
}{
	{"anonymous", func(t *testing.T) (uintptr, uintptr) {
		a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
		return a, a + 8*pageSize
	}, false, false, true},
	{"shared anonymous", func(t *testing.T) (uintptr, uintptr) {
		a := mapPages(t, 8, readWrite, unix.MAP_SHARED)
		return a, a + 8*pageSize
	}, true, true, true},
	{"without rights", func(t *testing.T) (uintptr, uintptr) {
		a := mapPages(t, 8, unix.PROT_NONE, unix.MAP_PRIVATE)
		syscall6(t, unix.SYS_MADVISE, a, 8*pageSize, unix.MADV_DONTDUMP) // so that no neighbour joins it
		return a, a + 8*pageSize
	}, false, false, false},
	{"memfd, shared", func(t *testing.T) (uintptr, uintptr) {
		a := mapFile(t, 8, readWrite, unix.MAP_SHARED, memfd(t, 8, 0))
		return a, a + 8*pageSize
	}, true, true, true},
	{"memfd, private", func(t *testing.T) (uintptr, uintptr) {
		a := mapFile(t, 8, readWrite, unix.MAP_PRIVATE, memfd(t, 8, 0))
		return a, a + 8*pageSize
	}, true, false, true},
	{"file, shared", func(t *testing.T) (uintptr, uintptr) {
		a := mapFile(t, 8, readWrite, unix.MAP_SHARED, tempFile(t, 8))
		return a, a + 8*pageSize
	}, true, true, true},
	{"file, private", func(t *testing.T) (uintptr, uintptr) {
		a := mapFile(t, 8, readWrite, unix.MAP_PRIVATE, tempFile(t, 8))
		return a, a + 8*pageSize
	}, true, false, true},
	{"file, read-only", func(t *testing.T) (uintptr, uintptr) {
		a := mapFile(t, 8, unix.PROT_READ, unix.MAP_SHARED, tempFile(t, 8))
		return a, a + 8*pageSize
	}, true, true, false},
	{"text of a program", func(t *testing.T) (uintptr, uintptr) {
		fd, err := unix.Open("/proc/self/exe", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		a := mapFile(t, 8, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE, fd)
		return a, a + 8*pageSize
	}, true, false, false},
	{"a stack", func(t *testing.T) (uintptr, uintptr) {
		a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE|unix.MAP_GROWSDOWN|unix.MAP_STACK)
		return a, a + 8*pageSize
	}, false, false, true},
	{"transparent huge pages", func(t *testing.T) (uintptr, uintptr) {
		const huge = 2 << 20
		a := mapPages(t, 3*huge/pageSize, readWrite, unix.MAP_PRIVATE)
		start := (a + huge - 1) &^ (huge - 1)
		munmapRange(t, a, start)
		munmapRange(t, start+huge, a+3*huge)
		syscall6(t, unix.SYS_MADVISE, start, huge, unix.MADV_HUGEPAGE)
		return start, start + huge
	}, false, false, true},
	{"hugetlb, private", func(t *testing.T) (uintptr, uintptr) { return mapHuge(t, unix.MAP_PRIVATE) }, true, false, true},
	{"hugetlb, shared", func(t *testing.T) (uintptr, uintptr) { return mapHuge(t, unix.MAP_SHARED) }, true, true, true},
}

func memfd(t *testing.T, pages int64, flags int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, pages*int64(pageSize)); err != nil {
		t.Fatal(err)
	}
	return fd
}

// tempFile makes a file with content.
func tempFile(t testing.TB, pages int) int {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "pages")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	b := make([]byte, pages*int(pageSize))
	for i := range b {
		b[i] = byte(i / int(pageSize))
	}
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	return int(f.Fd())
}

const hugetlbPage = 2 << 20

// mapHuge maps two huge pages. Where there are none in the pool, root may ask the
// kernel to make some, for the time of the test.
func mapHuge(t *testing.T, flags int) (start, end uintptr) {
	t.Helper()
	allowHugePages(t)
	p, err := unix.MmapPtr(-1, 0, nil, 2*hugetlbPage, readWrite, flags|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB|21<<unix.MAP_HUGE_SHIFT)
	if err != nil {
		t.Skip("no huge pages of 2 MiB can be had:", err)
	}
	t.Cleanup(func() { unix.MunmapPtr(p, 2*hugetlbPage) })
	return uintptr(p), uintptr(p) + 2*hugetlbPage
}

func allowHugePages(t *testing.T) {
	t.Helper()
	const knob = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages"
	old, err := os.ReadFile(knob)
	if err != nil {
		return
	}
	var have int
	if _, err := fmt.Sscan(string(old), &have); err != nil || have >= 8 {
		return
	}
	if os.WriteFile(knob, []byte("8"), 0) == nil {
		t.Cleanup(func() { os.WriteFile(knob, old, 0) })
	}
}

// TestNotifierKinds: every kind of memory can be watched, its changes are reported, and its
// content stays.
func TestNotifierKinds(t *testing.T) {
	n := openTestNotifier(t)
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			start, end := kind.make(t)
			if err := n.Watch(start, end); err != nil {
				t.Fatal(err)
			}
			want := Populated
			if kind.name == "without rights" {
				want = WrongProtection
			}
			for _, write := range []bool{false, kind.write} {
				if r := PopulateRange(start, end, write); r.Outcome != want {
					t.Errorf("populate, write %v: %+v", write, r)
				}
			}
			if kind.write { // the memory works while it is watched
				b := bytesAt(start, end)
				b[0], b[len(b)-1] = 0x5a, 0xa5
				if b[0] != 0x5a || b[len(b)-1] != 0xa5 {
					t.Error("it does not keep what is written")
				}
			}
			takeAll(t, n)
			munmapRange(t, start, end)
			if got, lost := takeAll(t, n); !slices.Equal(got, []MapChange{{Unmapped, start, end, 0}}) || lost {
				t.Errorf("%v, lost %v, should be %#x to %#x", got, lost, start, end)
			}
		})
	}
	t.Run("a range with holes", func(t *testing.T) {
		p := pageSize
		a := mapPages(t, 12, readWrite, unix.MAP_PRIVATE)
		munmapRange(t, a+2*p, a+4*p)
		munmapRange(t, a+8*p, a+9*p)
		if err := n.Watch(a, a+12*p); err != nil {
			t.Fatal(err)
		}
		takeAll(t, n)
		munmapRange(t, a, a+12*p)
		if got, lost := takeAll(t, n); !slices.Equal(got, []MapChange{{Unmapped, a, a + 12*p, 0}}) || lost {
			t.Error(got, lost)
		}
	})
	t.Run("the first thread's stack", func(t *testing.T) {
		// Its mapping is the highest one that may be written.
		var stack Mapping
		if err := Mappings(0, ^uintptr(0), func(m *Mapping) bool {
			if m.Allows(true) && !m.File {
				stack = *m
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
		if err := n.Watch(stack.Start, stack.End); err != nil {
			t.Fatal(err)
		}
		if err := n.Unwatch(stack.Start, stack.End); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("MADV_REMOVE", func(t *testing.T) {
		p := pageSize
		a := mapFile(t, 8, readWrite, unix.MAP_SHARED, memfd(t, 8, 0))
		if err := n.Watch(a, a+8*p); err != nil {
			t.Fatal(err)
		}
		takeAll(t, n)
		syscall6(t, unix.SYS_MADVISE, a+p, 2*p, unix.MADV_REMOVE)
		if got, lost := takeAll(t, n); !slices.Equal(got, []MapChange{{Discarded, a + p, a + 3*p, 0}}) || lost {
			t.Error(got, lost)
		}
	})
}

// TestNotifierOne: there is one at a time; closing twice is closing once; a closed
// one refuses, and says nothing.
func TestNotifierOne(t *testing.T) {
	n := openTestNotifier(t)
	if other, err := OpenNotifier(); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("a second one: %v, %v", other, err)
	}
	a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+4*pageSize); err != nil {
		t.Fatal(err)
	}
	munmapRange(t, a, a+pageSize)
	for range 2 {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	munmapRange(t, a, a+2*pageSize) // would wait for ever if it were watched
	if err := n.Watch(a+2*pageSize, a+4*pageSize); !errors.Is(err, unix.EBADF) {
		t.Errorf("watching after the end: %v", err)
	}
	if k, lost, more := n.Take(make([]MapChange, 4), true); k != 0 || lost || more || n.Changed() {
		t.Error("events after the end", k, lost, more, n.Changed())
	}
	again := openTestNotifier(t)
	if got, lost := takeAll(t, again); len(got) != 0 || lost || again.Changed() {
		t.Errorf("a new one begins with %v, lost %v", got, lost)
	}
}

// TestNotifierSmallBuffer: what does not fit stays for the next Take, in order.
func TestNotifierSmallBuffer(t *testing.T) {
	n := openTestNotifier(t)
	p := pageSize
	a := mapPages(t, 16, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+16*p); err != nil {
		t.Fatal(err)
	}
	for i := range uintptr(8) {
		munmapRange(t, a+2*i*p, a+2*i*p+p)
	}
	if k, lost, more := n.Take(nil, true); k != 0 || lost || !more {
		t.Fatal("without room:", k, lost, more)
	}
	for i := range uintptr(8) {
		var buf [1]MapChange
		k, lost, more := n.Take(buf[:], true)
		if want := (MapChange{Unmapped, a + 2*i*p, a + 2*i*p + p, 0}); k != 1 || buf[0] != want || lost || more != (i < 7) || !n.Changed() {
			t.Fatalf("%d: %d %v, lost %v, more %v, changed %v", i, k, buf, lost, more, n.Changed())
		}
	}
	if k, lost, more := n.Take(make([]MapChange, 1), true); k != 0 || lost || more || n.Changed() {
		t.Fatal("at the end:", k, lost, more, n.Changed())
	}
}

// TestNotifierOverflow: no goroutine takes events, so some are lost. No thread waits for
// that, Take reports it, and later events are complete again.
func TestNotifierOverflow(t *testing.T) {
	n := openTestNotifier(t)
	p := pageSize
	a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+4*p); err != nil {
		t.Fatal(err)
	}
	const extra = 100
	for range ringSlots + extra {
		syscall6(t, unix.SYS_MADVISE, a, p, unix.MADV_DONTNEED)
	}
	got, lost := takeAll(t, n)
	if len(got) != ringSlots || !lost || n.Changed() {
		t.Fatalf("%d events, lost %v, changed %v", len(got), lost, n.Changed())
	}
	munmapRange(t, a, a+4*p)
	if got, lost := takeAll(t, n); !slices.Equal(got, []MapChange{{Unmapped, a, a + 4*p, 0}}) || lost {
		t.Error(got, lost)
	}
}

func TestNotifierAllocs(t *testing.T) {
	n := openTestNotifier(t)
	a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
	buf := make([]MapChange, 4)
	if k := testing.AllocsPerRun(100, func() {
		n.Watch(a, a+4*pageSize)
		madvise(a, a+pageSize, unix.MADV_DONTNEED)
		for n.Changed() {
			n.Take(buf, true)
		}
	}); k != 0 {
		t.Errorf("%v allocations", k)
	}
}

func BenchmarkNotifier(b *testing.B) {
	n := openTestNotifier(b)
	buf := make([]MapChange, 4)
	b.Run("changed", func(b *testing.B) {
		yes := 0
		for b.Loop() {
			if n.Changed() {
				yes++
			}
		}
	})
	b.Run("take nothing", func(b *testing.B) {
		for b.Loop() {
			n.Take(buf, true)
		}
	})
	for name, size := range map[string]uintptr{"1 MiB": 1 << 20, "64 GiB": 64 << 30} {
		a := mapPages(b, size/pageSize, readWrite, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
		b.Run("watch again "+name, func(b *testing.B) {
			for b.Loop() {
				n.Watch(a, a+size)
			}
		})
		b.Run("watch and unwatch "+name, func(b *testing.B) {
			for b.Loop() {
				n.Watch(a, a+size)
				n.Unwatch(a, a+size)
			}
		})
	}
	// Two pages by turns, so that each call has one to give back.
	a := mapPages(b, 2, readWrite, unix.MAP_PRIVATE)
	for _, watched := range []bool{false, true} {
		name := "discard unwatched"
		if watched {
			name = "discard, told"
			if err := n.Watch(a, a+2*pageSize); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				madvise(a, a+2*pageSize, unix.MADV_DONTNEED)
				for n.Changed() {
					n.Take(buf, true)
				}
			}
		})
	}
}
