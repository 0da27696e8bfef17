package sys

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

// onDisk skips a test where the files of tests do not lie on a disk.
func onDisk(t testing.TB) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(t.TempDir(), &st); err != nil {
		t.Fatal(err)
	}
	if st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC {
		t.Skip("the directory for temporary files is in memory")
	}
}

// evict makes pages of a file leave memory, also those that only others would keep.
func evict(t testing.TB, fd int, start, end uintptr) {
	t.Helper()
	syscall6(t, unix.SYS_MADVISE, start, end-start, unix.MADV_DONTNEED)
	if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}

func mustBeSlow(t testing.TB, what string, start, end uintptr, want bool) {
	t.Helper()
	for _, write := range []bool{false, true} {
		if slow, err := MayBlock(start, end, write); slow != want || err != nil {
			t.Errorf("%s, write %v: %v, %v", what, write, slow, err)
		}
	}
}

func TestMayBlockMemory(t *testing.T) {
	p := pageSize
	for _, kind := range kinds {
		if strings.Contains(kind.name, "file") || strings.Contains(kind.name, "program") {
			continue // TestMayBlockFile
		}
		t.Run(kind.name, func(t *testing.T) {
			if kind.file && !strings.Contains(kind.name, "hugetlb") && swapInUse() {
				t.Skip("something is in swap, so this may be, too")
			}
			start, end := kind.make(t)
			mustBeSlow(t, "untouched", start, end, false)
			if kind.write {
				mid := start + (end-start)/2
				if r := PopulateRange(start, mid, true); r.Outcome != Populated {
					t.Fatal(r)
				}
				mustBeSlow(t, "populated in part", start, end, false)
				mustBeSlow(t, "populated", start, start+p, false)
			}
			munmapRange(t, start, end)
			mustBeSlow(t, "unmapped", start, end, false)
		})
	}
	t.Run("guard pages", func(t *testing.T) {
		a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
		if _, _, e := unix.Syscall(unix.SYS_MADVISE, a+4*p, p, unix.MADV_GUARD_INSTALL); e != 0 {
			t.Skip("this kernel has no guard pages:", e)
		}
		mustBeSlow(t, "", a, a+8*p, false)
	})
	t.Run("the end of everything", func(t *testing.T) {
		mustBeSlow(t, "", 1<<47, 1<<47+p, false)
		mustBeSlow(t, "", ^uintptr(0)&^(p-1)-p, ^uintptr(0)&^(p-1), false)
		mustBeSlow(t, "empty", p, p, false)
	})
	t.Run("/dev/shm", func(t *testing.T) {
		f, err := os.CreateTemp("/dev/shm", "verbena-test")
		if err != nil {
			t.Skip(err)
		}
		defer f.Close()
		defer os.Remove(f.Name())
		if err := f.Truncate(8 * int64(p)); err != nil {
			t.Fatal(err)
		}
		if swapInUse() {
			t.Skip("something is in swap, so this may be, too")
		}
		a := mapFile(t, 8, readWrite, unix.MAP_SHARED, int(f.Fd()))
		mustBeSlow(t, "a hole", a, a+8*p, false)
	})
}

// TestMayBlockFile: pages of a file on a disk that are in memory, in it but not in our
// page tables, and not in it.
func TestMayBlockFile(t *testing.T) {
	onDisk(t)
	p := pageSize
	for name, flags := range map[string]int{"shared": unix.MAP_SHARED, "private": unix.MAP_PRIVATE} {
		t.Run(name, func(t *testing.T) {
			const pages = 200 // more than are judged at once
			fd := tempFile(t, pages)
			a := mapFile(t, pages, readWrite, flags, fd)
			end := a + pages*p
			mustBeSlow(t, "written, not in the page tables", a, end, false)
			PopulateRange(a, end, false)
			mustBeSlow(t, "present", a, end, false)
			evict(t, fd, a, end)
			mustBeSlow(t, "evicted", a, end, true)
			mustBeSlow(t, "evicted, one page", a+7*p, a+8*p, true)
			// Others read a part of it: in memory, not in our page tables.
			b := make([]byte, p)
			unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM) // nothing beyond what is asked for
			if _, err := unix.Pread(fd, b, 100*int64(p)); err != nil {
				t.Fatal(err)
			}
			mustBeSlow(t, "read by somebody", a+100*p, a+101*p, false)
			mustBeSlow(t, "and its neighbour", a+100*p, a+102*p, true)
			// All but one.
			if r := PopulateRange(a, end, flags == unix.MAP_PRIVATE); r.Outcome != Populated {
				t.Fatal(r)
			}
			mustBeSlow(t, "present again", a, end, false)
		})
	}
	t.Run("a sparse file", func(t *testing.T) {
		fd := tempFile(t, 1)
		if err := unix.Ftruncate(fd, 8*int64(p)); err != nil {
			t.Fatal(err)
		}
		a := mapFile(t, 8, readWrite, unix.MAP_SHARED, fd)
		mustBeSlow(t, "what is written", a, a+p, false)
		mustBeSlow(t, "a hole", a, a+8*p, true)
	})
	t.Run("several mappings", func(t *testing.T) {
		fd := tempFile(t, 8)
		a := mapPages(t, 24, readWrite, unix.MAP_PRIVATE)
		syscall6(t, unix.SYS_MMAP, a+8*p, 8*p, readWrite, unix.MAP_SHARED|unix.MAP_FIXED, uintptr(fd), 0)
		munmapRange(t, a+20*p, a+21*p)
		mustBeSlow(t, "all in memory", a, a+24*p, false)
		evict(t, fd, a+8*p, a+16*p)
		mustBeSlow(t, "evicted in the middle", a, a+24*p, true)
		mustBeSlow(t, "before it", a, a+8*p, false)
		mustBeSlow(t, "behind it", a+16*p, a+24*p, false)
	})
}

// unprivilegedFileChild runs as a user that may read one file and not write it, and owns
// another.
func unprivilegedFileChild() error {
	var bad problems
	for _, c := range []struct {
		name    string
		trusted bool
	}{{os.Getenv("VERBENA_TEST_THEIRS"), false}, {os.Getenv("VERBENA_TEST_OURS"), true}} {
		fd, err := unix.Open(c.name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		ptr, err := unix.MmapPtr(fd, 0, nil, 8*pageSize, unix.PROT_READ, unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		a := uintptr(ptr)
		var vec [8]byte
		expect := func(what string, want bool) {
			if slow, err := MayBlock(a, a+8*pageSize, false); slow != want || err != nil {
				mincore(a, a+8*pageSize, vec[:])
				bad.addf("%s, %s: slow %v, %v; mincore says %v", c.name, what, slow, err, vec)
			}
		}
		expect("in memory", !c.trusted) // mincore is not honest about a file of another user
		if r := PopulateRange(a, a+8*pageSize, false); r.Outcome != Populated {
			bad.addf("%s: %+v", c.name, r)
		}
		expect("present", false)
		madvise(a, a+8*pageSize, unix.MADV_DONTNEED)
		unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
		expect("evicted", true)
		if err := mincore(a, a+8*pageSize, vec[:]); err != nil || (vec[0]&1 == 0) != c.trusted {
			bad.addf("%s: mincore says %v, %v: this kernel has another rule", c.name, vec, err)
		}
	}
	return bad.err()
}

// TestMayBlockUnprivileged: mincore reports every page of a file as in memory to a process
// that may not write the file.
func TestMayBlockUnprivileged(t *testing.T) {
	onDisk(t)
	if os.Getuid() != 0 {
		t.Skip("only root can be two users")
	}
	dir, err := os.MkdirTemp("", "verbena-test")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755)
	const nobody = 65534
	names := map[string]int{"theirs": 0, "ours": nobody}
	for name, owner := range names {
		path := filepath.Join(dir, name)
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(make([]byte, 8*pageSize)); err != nil {
			t.Fatal(err)
		}
		f.Sync()
		f.Close()
		if err := os.Chown(path, owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	runChild(t, "unprivileged-2", nobody,
		"VERBENA_TEST_THEIRS="+filepath.Join(dir, "theirs"), "VERBENA_TEST_OURS="+filepath.Join(dir, "ours"))
}

// TestMayBlockSwap: anonymous and shared memory in swap on a compressed memory device,
// which root can make for the time of the test.
func TestMayBlockSwap(t *testing.T) {
	modetest.Swap(t, "64M")
	const pages = 64
	for _, c := range []struct {
		name string
		make func() uintptr
	}{
		{"anonymous", func() uintptr { return mapPages(t, pages, readWrite, unix.MAP_PRIVATE) }},
		{"memfd", func() uintptr { return mapFile(t, pages, readWrite, unix.MAP_SHARED, memfd(t, pages, 0)) }},
		{"memfd, private", func() uintptr { return mapFile(t, pages, readWrite, unix.MAP_PRIVATE, memfd(t, pages, 0)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := c.make()
			end := a + pages*pageSize
			b := bytesAt(a, end)
			for i := range b {
				b[i] = byte(i/int(pageSize)) ^ byte(i)
			}
			mustBeSlow(t, "in memory", a, end, false)
			if swapInUse() {
				t.Log("something is in swap before")
			}
			for try := 0; ; try++ { // reclaim may leave pages that the kernel uses just then
				syscall6(t, unix.SYS_MADVISE, a, pages*pageSize, unix.MADV_PAGEOUT)
				if firstAbsent(a, end) == a {
					break
				}
				if try == 100 {
					t.Fatal("nothing is swapped out")
				}
				runtime.Gosched()
			}
			swapKnown.Store(0) // it would be known in a moment
			mustBeSlow(t, "swapped out", a, end, true)
			mustBeSlow(t, "swapped out, one page", a, a+pageSize, true)
			if r := PopulateRange(a, end, true); r.Outcome != Populated {
				t.Fatal(r)
			}
			mustBeSlow(t, "in memory again", a, end, false)
			for i := range b {
				if b[i] != byte(i/int(pageSize))^byte(i) {
					t.Fatalf("byte %d is %#x", i, b[i])
				}
			}
		})
	}
	t.Run("untouched", func(t *testing.T) {
		a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
		mustBeSlow(t, "", a, a+8*pageSize, false)
	})
}

func TestParseMount(t *testing.T) {
	for _, c := range []struct {
		line   string
		device uint64
		kind   string
		ok     bool
	}{
		{"36 35 98:12 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue", 98<<32 | 12, "ext3", true},
		{"24 28 0:22 / /dev/shm rw,relatime - tmpfs tmpfs rw", 22, "tmpfs", true},
		{"24 28 0:22 / /dev/shm rw,relatime tmpfs tmpfs rw", 0, "", false},
		{"24 28 0 / /dev/shm rw - tmpfs tmpfs rw", 0, "tmpfs", false},
		{"", 0, "", false},
	} {
		device, kind, ok := parseMount([]byte(c.line))
		if ok != c.ok || ok && (device != c.device || string(kind) != c.kind) {
			t.Errorf("%q: %#x, %q, %v", c.line, device, kind, ok)
		}
	}
}

func TestMayBlockAllocs(t *testing.T) {
	a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
	m := mapFile(t, 8, readWrite, unix.MAP_SHARED, memfd(t, 8, 0))
	f := mapFile(t, 8, readWrite, unix.MAP_SHARED, tempFile(t, 8))
	s, err := mapsFile()
	if err != nil {
		t.Fatal(err)
	}
	if !s.query {
		t.Skip("this kernel has no PROCMAP_QUERY")
	}
	if n := testing.AllocsPerRun(100, func() {
		for _, at := range []uintptr{a, m, f} {
			MayBlock(at, at+pageSize, true)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkMayBlock(b *testing.B) {
	a := mapPages(b, 8, readWrite, unix.MAP_PRIVATE)
	PopulateRange(a, a+pageSize, true)
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Close(fd)
	unix.Ftruncate(fd, 8*int64(pageSize))
	m := mapFile(b, 8, readWrite, unix.MAP_SHARED, fd)
	file := tempFile(b, 8)
	f := mapFile(b, 8, readWrite, unix.MAP_SHARED, file)
	evicted := tempFile(b, 8)
	e := mapFile(b, 8, readWrite, unix.MAP_SHARED, evicted)
	evict(b, evicted, e, e+8*pageSize)
	for _, c := range []struct {
		name  string
		start uintptr
	}{
		{"present", a}, {"untouched", a + pageSize}, {"memfd hole", m}, {"file in memory", f}, {"file not in memory", e},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				MayBlock(c.start, c.start+pageSize, true)
			}
		})
	}
}
