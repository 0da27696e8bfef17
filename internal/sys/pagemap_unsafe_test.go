package sys

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func pagemapSources(t testing.TB) map[string]pagemapSource {
	t.Helper()
	p, err := pagemapFile()
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]pagemapSource{"pagemap": {fd: p.fd}}
	if p.scan {
		sources["scan"] = p
	}
	return sources
}

type pageRun struct{ start, end uintptr }

// presentPages returns runs as numbers of pages from start on.
func presentPages(t *testing.T, p pagemapSource, start, end uintptr) (found []pageRun) {
	t.Helper()
	if err := p.present(start, end, func(from, to uintptr) bool {
		found = append(found, pageRun{(from - start) / pageSize, (to - start) / pageSize})
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

func TestPresentKinds(t *testing.T) {
	for _, kind := range kinds {
		if kind.name == "without rights" {
			continue // it never has pages
		}
		t.Run(kind.name, func(t *testing.T) {
			start, end := kind.make(t)
			for name, p := range pagemapSources(t) {
				if kind.write { // memory of other kinds may have been read, and be present, before
					if got := presentPages(t, p, start, end); len(got) != 0 {
						t.Errorf("%s, untouched: %v", name, got)
					}
				}
			}
			if r := PopulateRange(start, end, kind.write); r.Outcome != Populated {
				t.Fatal(r)
			}
			for name, p := range pagemapSources(t) {
				if got := presentPages(t, p, start, end); !slices.Equal(got, []pageRun{{0, (end - start) / pageSize}}) {
					t.Errorf("%s, populated: %v", name, got)
				}
			}
		})
	}
}

// TestPresentPattern: runs of random lengths, over mappings and holes, are found
// exactly, by both ways, and Absent finds the rest.
func TestPresentPattern(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 5))
	const pages = 5000 // more runs than fit one call
	a := mapPages(t, pages, readWrite, unix.MAP_PRIVATE)
	end := a + pages*pageSize
	syscall6(t, unix.SYS_MADVISE, a, pages*pageSize, unix.MADV_NOHUGEPAGE)
	var present [pages]bool
	for i := uintptr(0); i < pages; {
		n := min(1+rng.UintN(6), uint(pages-i))
		switch to := i + uintptr(n); rng.IntN(5) {
		case 0, 1:
			if r := PopulateRange(a+i*pageSize, a+to*pageSize, rng.IntN(2) == 0); r.Outcome != Populated {
				t.Fatal(r)
			}
			for j := i; j < to; j++ {
				present[j] = true
			}
		case 2:
			if rng.IntN(10) == 0 {
				munmapRange(t, a+i*pageSize, a+to*pageSize)
			}
		}
		i += uintptr(n)
	}
	var want, rest []pageRun
	for i := uintptr(0); i < pages; {
		j := i
		for j < pages && present[j] == present[i] {
			j++
		}
		if present[i] {
			want = append(want, pageRun{i, j})
		} else {
			rest = append(rest, pageRun{i, j})
		}
		i = j
	}
	for name, p := range pagemapSources(t) {
		if got := presentPages(t, p, a, end); !slices.Equal(got, want) {
			t.Errorf("%s: %d runs, should be %d", name, len(got), len(want))
		}
		calls := 0
		if err := p.present(a, end, func(_, _ uintptr) bool { calls++; return calls < 3 }); err != nil || calls != 3 {
			t.Errorf("%s: %d calls, %v", name, calls, err)
		}
	}
	var got []pageRun
	if err := Absent(a, end, func(from, to uintptr) bool {
		got = append(got, pageRun{(from - a) / pageSize, (to - a) / pageSize})
		return true
	}); err != nil || !slices.Equal(got, rest) {
		t.Errorf("%d absent runs, should be %d: %v", len(got), len(rest), err)
	}
	calls := 0
	if err := Absent(a, end, func(_, _ uintptr) bool { calls++; return calls < 3 }); err != nil || calls != 3 {
		t.Errorf("absent: %d calls, %v", calls, err)
	}
}

// TestPresentEdges: empty ranges, ranges where nothing is mapped or can be, and pages that
// a program took away without an event.
func TestPresentEdges(t *testing.T) {
	a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
	if err := Present(a, a, func(_, _ uintptr) bool { t.Error("called"); return true }); err != nil {
		t.Error(err)
	}
	top := uintptr(1) << 47
	for name, p := range pagemapSources(t) {
		if got := presentPages(t, p, 0, 16*pageSize); len(got) != 0 {
			t.Errorf("%s: at zero %v", name, got)
		}
		if got := presentPages(t, p, top-16*pageSize, top); len(got) != 0 {
			t.Errorf("%s: at the end %v", name, got)
		}
	}
	if p, err := pagemapFile(); err == nil && p.scan {
		// The addresses of a process end somewhere in this range.
		PopulateRange(a, a+pageSize, true)
		got := presentPages(t, p, a, ^uintptr(0)&^(pageSize-1))
		if len(got) == 0 || got[0] != (pageRun{0, 1}) {
			t.Errorf("up to the end of everything: %v", got)
		}
	}
	fd := memfd(t, 8, 0)
	f := mapFile(t, 8, readWrite, unix.MAP_SHARED, fd)
	if r := PopulateRange(f, f+8*pageSize, true); r.Outcome != Populated {
		t.Fatal(r)
	}
	if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(pageSize), int64(pageSize)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 6*int64(pageSize)); err != nil {
		t.Fatal(err)
	}
	for name, p := range pagemapSources(t) {
		if got := presentPages(t, p, f, f+8*pageSize); !slices.Equal(got, []pageRun{{0, 1}, {2, 6}}) {
			t.Errorf("%s: a hole and a shorter file: %v", name, got)
		}
	}
}

func TestPresentAllocs(t *testing.T) {
	a := mapPages(t, 64, readWrite, unix.MAP_PRIVATE)
	PopulateRange(a+8*pageSize, a+16*pageSize, true)
	pages := uintptr(0)
	visit := func(from, to uintptr) bool { pages += (to - from) / pageSize; return true }
	for name, p := range pagemapSources(t) {
		if n := testing.AllocsPerRun(100, func() { p.present(a, a+64*pageSize, visit) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkPresentGiB(b *testing.B) {
	const n = 1 << 30
	a := mapPages(b, n/pageSize, readWrite, unix.MAP_PRIVATE)
	syscall6(b, unix.SYS_MADVISE, a, n, unix.MADV_NOHUGEPAGE)
	for _, state := range []string{"empty", "populated", "every 64th absent"} {
		switch state {
		case "populated":
			PopulateRange(a, a+n, false)
		case "every 64th absent":
			for i := uintptr(0); i < n/pageSize; i += 64 {
				syscall6(b, unix.SYS_MADVISE, a+i*pageSize, pageSize, unix.MADV_DONTNEED)
			}
		}
		for name, p := range pagemapSources(b) {
			b.Run(name+"/"+state, func(b *testing.B) {
				for b.Loop() {
					p.present(a, a+n, func(_, _ uintptr) bool { return true })
				}
			})
		}
	}
}

// StillPresent stops at the first page that is not there.
func TestStillPresent(t *testing.T) {
	const pages = 200 // more than are read at once
	a := mapPages(t, pages, readWrite, unix.MAP_PRIVATE)
	b := bytesAt(a, a+pages*pageSize)
	for _, c := range []struct{ touch, start, end, want uintptr }{
		{0, 0, pages, 0}, {1, 0, pages, 1}, {70, 0, pages, 70}, {70, 10, 60, 60}, {70, 70, 71, 70}, {pages, 0, pages, pages}, {pages, 5, 5, 5},
	} {
		for i := range c.touch {
			b[i*pageSize] = 1
		}
		upto, err := StillPresent(a+c.start*pageSize, a+c.end*pageSize)
		if got := (upto - a) / pageSize; got != c.want || err != nil {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
}
