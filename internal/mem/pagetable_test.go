package mem

import (
	"testing"

	"pgregory.net/rapid"
)

// The page table does what a map of pages would, whatever its size.
func TestPageTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.SampledFrom([]uint64{1, 63, 512, 513, 5000, branchPages, 3*branchPages + 7, 200 * branchPages}).Draw(t, "pages")
		var table pageTable
		table.init(pages)
		read, write := map[uint64]bool{}, map[uint64]bool{}
		span := func() (page, n uint64) {
			// Near an edge of something, more often than not.
			edge := rapid.SampledFrom([]uint64{0, 64, leafPages, branchPages, 64 * branchPages, 130 * branchPages, pages - 1}).Draw(t, "edge")
			page = min(edge+rapid.Uint64Range(0, 130).Draw(t, "from"), pages-1)
			if page > 65 {
				page -= 65
			}
			return page, rapid.Uint64Range(1, min(pages-page, 1200)).Draw(t, "n")
		}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			page, n := span()
			switch rapid.IntRange(0, 3).Draw(t, "do") {
			case 0:
				w := rapid.Bool().Draw(t, "write")
				news := uint64(0)
				for p := page; p < page+n; p++ {
					if w && !write[p] || !w && !read[p] {
						news++
					}
					read[p] = true
					write[p] = write[p] || w
				}
				if got := table.set(page, n, w); got != news {
					t.Fatalf("set(%d, %d, %v) = %d, want %d", page, n, w, got, news)
				}
			case 1:
				were := uint64(0)
				for p := page; p < page+n; p++ {
					if read[p] {
						were++
					}
					delete(read, p)
					delete(write, p)
				}
				if got := table.clear(page, n); got != were {
					t.Fatalf("clear(%d, %d) = %d, want %d", page, n, got, were)
				}
			case 2:
				for _, w := range []bool{false, true} {
					set := read
					if w {
						set = write
					}
					have := uint64(0)
					for have < n && set[page+have] {
						have++
					}
					if got := table.present(page, n, w); got != have {
						t.Fatalf("present(%d, %d, %v) = %d, want %d", page, n, w, got, have)
					}
				}
			case 3:
				got := uint64(0)
				table.runs(func(p, n uint64) bool {
					for q := p; q < p+n; q++ {
						if !read[q] {
							t.Fatalf("runs: page %d is not present", q)
						}
					}
					got += n
					return true
				})
				if got != uint64(len(read)) || table.count() != got {
					t.Fatalf("runs visit %d pages, want %d", got, len(read))
				}
			}
		}
	})
}

type nobody struct{}

func (nobody) changed(uintptr, uintptr) {}
func (nobody) missed()                  {}
func (nobody) sweep()                   {}

// The index finds what a search through all ranges finds.
func TestRangeIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var x rangeIndex
		all := map[*membership]bool{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			start := uintptr(rapid.Uint64Range(0, 1<<12).Draw(t, "start"))
			end := start + uintptr(1)<<rapid.IntRange(0, 13).Draw(t, "length")
			switch rapid.IntRange(0, 2).Draw(t, "do") {
			case 0:
				m := &membership{start: start, end: end, who: nobody{}}
				x.add(m)
				all[m] = true
			case 1:
				for m := range all {
					x.remove(m)
					delete(all, m)
					break
				}
			case 2:
				found := map[*membership]bool{}
				x.overlapping(start, end, func(m *membership) bool { found[m] = true; return true })
				for m := range all {
					if found[m] != (m.start < end && start < m.end) {
						t.Fatalf("[%d, %d) overlaps [%d, %d): found %v", m.start, m.end, start, end, found[m])
					}
				}
				var batch [3]*membership
				seen, after := map[*membership]bool{}, (*membership)(nil)
				for n := x.next(nil, batch[:]); n > 0; n = x.next(after, batch[:]) {
					for _, m := range batch[:n] {
						if seen[m] || !all[m] {
							t.Fatalf("next: [%d, %d) twice or not in the index", m.start, m.end)
						}
						seen[m] = true
					}
					after = batch[n-1]
				}
				if len(seen) != len(all) {
					t.Fatalf("next visits %d of %d", len(seen), len(all))
				}
			}
		}
	})
}
