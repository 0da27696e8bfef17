package sys

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestPopulateOutcomes: eight pages, one of which cannot be made present, and the result.
func TestPopulateOutcomes(t *testing.T) {
	p := pageSize
	for _, c := range []struct {
		name  string
		make  func(t *testing.T) uintptr
		write bool
		want  PopulateOutcome
		upto  uintptr // in pages
		errno unix.Errno
	}{
		{"all", func(t *testing.T) uintptr { return mapPages(t, 8, readWrite, unix.MAP_PRIVATE) }, true, Populated, 8, 0},
		{"a hole", func(t *testing.T) uintptr {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			munmapRange(t, a+3*p, a+4*p)
			return a
		}, true, NotMapped, 3, unix.ENOMEM},
		{"a hole at the start", func(t *testing.T) uintptr {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			munmapRange(t, a, a+p)
			return a
		}, false, NotMapped, 0, unix.ENOMEM},
		{"read-only in the middle", func(t *testing.T) uintptr {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			syscall6(t, unix.SYS_MPROTECT, a+5*p, p, unix.PROT_READ)
			return a
		}, true, WrongProtection, 5, unix.EINVAL},
		{"read-only, for reading", func(t *testing.T) uintptr {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			syscall6(t, unix.SYS_MPROTECT, a+5*p, p, unix.PROT_READ)
			return a
		}, false, Populated, 8, 0},
		{"without rights in the middle", func(t *testing.T) uintptr {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			syscall6(t, unix.SYS_MPROTECT, a+2*p, p, unix.PROT_NONE)
			return a
		}, false, WrongProtection, 2, unix.EINVAL},
		{"a guard page", func(t *testing.T) uintptr {
			a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
			if _, _, e := unix.Syscall(unix.SYS_MADVISE, a+4*p, p, unix.MADV_GUARD_INSTALL); e != 0 {
				t.Skip("this kernel has no guard pages:", e)
			}
			return a
		}, false, NoPage, 4, unix.EFAULT},
		{"behind the end of a file", func(t *testing.T) uintptr {
			return mapFile(t, 8, readWrite, unix.MAP_SHARED, tempFile(t, 6))
		}, true, NoPage, 6, unix.EFAULT},
		{"behind the end of a memfd", func(t *testing.T) uintptr {
			return mapFile(t, 8, readWrite, unix.MAP_SHARED, memfd(t, 1, 0))
		}, false, NoPage, 1, unix.EFAULT},
		{"behind the end, private", func(t *testing.T) uintptr {
			return mapFile(t, 8, readWrite, unix.MAP_PRIVATE, memfd(t, 7, 0))
		}, true, NoPage, 7, unix.EFAULT},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := c.make(t)
			got := PopulateRange(a, a+8*p, c.write)
			if want := (PopulateResult{c.want, a + c.upto*p, c.errno}); got != want {
				t.Errorf("%+v, page %d, should be %+v", got, (got.Upto-a)/p, want)
			}
			// What it says that it has done is done.
			if c.upto > 0 {
				if at := firstAbsent(a, a+8*p); at < a+c.upto*p {
					t.Errorf("page %d is absent", (at-a)/p)
				}
			}
		})
	}
}

// TestPopulateHugetlb: a byte's worth of a huge page makes all of it present; where
// the pool has none left there is no page.
func TestPopulateHugetlb(t *testing.T) {
	start, end := mapHuge(t, unix.MAP_PRIVATE)
	m, err := QueryMapping(start + pageSize)
	if err != nil {
		t.Fatal(err)
	}
	if r := PopulateRange(start+5*pageSize, start+6*pageSize, true); r.Outcome != Populated {
		t.Fatal(r)
	}
	from, to := m.Clip(start+5*pageSize, start+6*pageSize)
	if from != start || to != start+hugePage {
		t.Errorf("clipped to %#x to %#x of %#x", from, to, start)
	}
	if at := firstAbsent(start, end); at != to {
		t.Errorf("present up to %#x, should be %#x", at, to)
	}
	// A page that was not reserved: more than there can be.
	const many = 1 << 40
	p, err := unix.MmapPtr(-1, 0, nil, many, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_HUGETLB|21<<unix.MAP_HUGE_SHIFT)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.MunmapPtr(p, many)
	const tried = 64 * hugePage // allowHugePages lets there be eight
	if r := PopulateRange(uintptr(p), uintptr(p)+tried, true); r.Outcome != NoPage && r.Outcome != NoMemory || (r.Upto-uintptr(p))%hugePage != 0 {
		t.Errorf("%+v, after %d bytes", r, r.Upto-uintptr(p))
	}
}

// TestPopulateWhy: what can hardly be arranged: no memory, and reasons that have gone
// away.
func TestPopulateWhy(t *testing.T) {
	a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
	end := a + 8*pageSize
	PopulateRange(a, a+2*pageSize, true)
	for _, c := range []struct {
		errno unix.Errno
		want  PopulateOutcome
		known bool
		upto  uintptr
	}{
		{unix.ENOMEM, NoMemory, false, 2},
		{unix.EINVAL, WrongProtection, false, 2},
		{unix.EHWPOISON, NoPage, true, 2},
		{unix.EPERM, CannotPopulate, true, 0},
		{unix.ENOSYS, CannotPopulate, true, 0},
	} {
		got, known := whyNotPopulated(a, end, true, c.errno)
		if want := (PopulateResult{c.want, a + c.upto*pageSize, c.errno}); got != want || known != c.known {
			t.Errorf("%v: %+v, %v, should be %+v, %v", c.errno, got, known, want, c.known)
		}
	}
	// A hole explains ENOMEM, not EINVAL; a mapping without the right the other way.
	munmapRange(t, a+3*pageSize, a+4*pageSize)
	if got, known := whyNotPopulated(a, end, true, unix.EINVAL); known || got.Outcome != WrongProtection {
		t.Errorf("a hole: %+v, %v", got, known)
	}
	syscall6(t, unix.SYS_MPROTECT, a+pageSize, pageSize, unix.PROT_READ)
	if got, known := whyNotPopulated(a, end, true, unix.ENOMEM); known || got.Outcome != NoMemory {
		t.Errorf("a page that is read-only: %+v, %v", got, known)
	}
}

func BenchmarkPopulate(b *testing.B) {
	for _, c := range []struct {
		name  string
		pages uintptr
	}{{"1", 1}, {"64", 64}} {
		b.Run(c.name, func(b *testing.B) {
			const all = 64 << 20
			a := mapPages(b, all/pageSize, readWrite, unix.MAP_PRIVATE)
			at := a
			for b.Loop() {
				if at+c.pages*pageSize > a+all {
					b.StopTimer()
					syscall6(b, unix.SYS_MADVISE, a, all, unix.MADV_DONTNEED)
					at = a
					b.StartTimer()
				}
				if r := PopulateRange(at, at+c.pages*pageSize, true); r.Outcome != Populated {
					b.Fatal(r)
				}
				at += c.pages * pageSize
			}
		})
	}
	b.Run("not mapped", func(b *testing.B) {
		a := mapPages(b, 8, readWrite, unix.MAP_PRIVATE)
		munmapRange(b, a, a+pageSize)
		for b.Loop() {
			if r := PopulateRange(a, a+pageSize, true); r.Outcome != NotMapped {
				b.Fatal(r)
			}
		}
	})
}
