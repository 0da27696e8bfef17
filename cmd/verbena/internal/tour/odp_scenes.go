package tour

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
	"github.com/verbena-rdma/verbena/verbs"
)

// interval is what happened in a part of a scene, and what was counted.
type interval struct {
	accesses int // messages of one page
	fresh    int // pages that were not present before, as the scene has kept track of them
	dropped  int // pages that the scene took away
	counted  verbs.PagingStats
}

// faultsAddUp compares the counters with what happened: each page that was not present
// was brought in by a fault of its own, of the peer's request. There may be more faults
// only for pages that the kernel had reclaimed: as many as were counted as taken away,
// beyond those that the scene took.
func faultsAddUp(list []interval) error {
	reclaimed := 0
	for i, v := range list {
		c := &v.counted
		reclaimed += int(c.InvalidationPages) - v.dropped
		switch {
		case reclaimed < 0:
			return fmt.Errorf("interval %d: %d pages were taken away, and fewer counted", i, v.dropped)
		case int(c.PageFaultPages) < v.fresh || int(c.PageFaultPages) > v.fresh+reclaimed:
			return fmt.Errorf("interval %d: %d pages were absent, and faults brought in %d", i, v.fresh, c.PageFaultPages)
		case c.PageFaults != c.PageFaultPages:
			return fmt.Errorf("interval %d: %d faults of one page each brought in %d pages", i, c.PageFaults, c.PageFaultPages)
		case c.RemoteFaults != c.PageFaults || c.LocalFaults != 0:
			return fmt.Errorf("interval %d: of %d faults a peer had %d and this side %d", i, c.PageFaults, c.RemoteFaults, c.LocalFaults)
		}
	}
	return nil
}

// warmUpScene accesses random pages of a working set, which moves half-way.
func warmUpScene(l *pagingLab) (detail string, err error) {
	const set, intervals, accesses = 512, 32, 160
	random := rand.New(rand.NewPCG(3, 4))
	var list []interval
	err = l.withRegion(2*set, func(r *onDemand) error {
		present := make(map[int]bool)
		var at verbs.PagingStats
		for i := range intervals {
			l.progress("interval %d of %d", i+1, intervals)
			v := interval{accesses: accesses}
			base := 0
			if i >= intervals/2 {
				base = set
			}
			for range accesses {
				page := base + random.IntN(set)
				if !present[page] {
					present[page] = true
					v.fresh++
				}
				if err := r.write(page, 1); err != nil {
					return err
				}
			}
			at, v.counted = r.since(at)
			list = append(list, v)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	var faults []float64
	for _, v := range list {
		faults = append(faults, float64(v.counted.PageFaults))
	}
	l.plot(fmt.Sprintf("num_page_faults in each of %d intervals of %d accesses", intervals, accesses), faults)
	total := 0
	for _, v := range list {
		total += v.fresh
	}
	return fmt.Sprintf("%d faults for %d accesses: one for each page, none in the steady state", total, intervals*accesses), faultsAddUp(list)
}

// efficiency is what was counted in the first pass over a region with messages of a size.
type efficiency struct {
	pages   int // of a message
	counted verbs.PagingStats
}

func (e *efficiency) perFault() float64 {
	return float64(e.counted.PageFaultPages) / float64(max(e.counted.PageFaults, 1))
}

// efficiencyAddsUp checks that all pages were brought in once, and that longer messages
// bring in more pages with each fault. A message of 16 pages or fewer is one access, so
// one fault.
func efficiencyAddsUp(list []efficiency, pages int) error {
	last := 0.0
	for i := range list {
		e := &list[i]
		reclaimed := int(e.counted.InvalidationPages)
		if got := int(e.counted.PageFaultPages); got < pages || got > pages+reclaimed {
			return fmt.Errorf("messages of %d pages: faults brought in %d pages of %d", e.pages, got, pages)
		}
		if e.pages <= 16 && reclaimed == 0 && e.perFault() != float64(e.pages) {
			return fmt.Errorf("messages of %d pages: a fault brings in %v", e.pages, e.perFault())
		}
		if reclaimed == 0 && e.perFault() < last {
			return fmt.Errorf("messages of %d pages: a fault brings in %v, shorter ones %v", e.pages, e.perFault(), last)
		}
		last = e.perFault()
	}
	return nil
}

func efficiencyScene(l *pagingLab) (string, error) {
	const pages = 1024
	var list []efficiency
	rows := [][]string{{"message", "num_page_faults", "num_page_fault_pages", "pages a fault"}}
	for n := 1; n <= 256 && n*pageSize <= longest; n *= 4 {
		e := efficiency{pages: n}
		err := l.withRegion(pages, func(r *onDemand) error {
			l.progress("messages of %s", units.FormatSize(n*pageSize))
			for first := 0; first < pages; first += n {
				if err := r.write(first, n); err != nil {
					return err
				}
			}
			_, e.counted = r.since(verbs.PagingStats{})
			return nil
		})
		if err != nil {
			return "", err
		}
		list = append(list, e)
		rows = append(rows, []string{units.FormatSize(n * pageSize), strconv.FormatUint(e.counted.PageFaults, 10),
			strconv.FormatUint(e.counted.PageFaultPages, 10), units.FormatFigure(e.perFault())})
	}
	l.table(rows)
	best := &list[len(list)-1]
	return fmt.Sprintf("%s pages a fault with messages of %s", units.FormatFigure(best.perFault()), units.FormatSize(best.pages*pageSize)), efficiencyAddsUp(list, pages)
}

// keeper plays the kernel's reclaim, at known times: it lets at most so many pages of a
// region stay, and takes the oldest away for a new one.
type keeper struct {
	r     *onDemand
	most  int
	pages []int // those that are present, oldest first
	here  map[int]bool
}

// touch is called before each access to a page. It reports whether the page is
// fresh, and whether another one was taken away for it.
func (k *keeper) touch(page int) (fresh, dropped bool, err error) {
	if k.here[page] {
		return false, false, nil
	}
	if len(k.pages) == k.most {
		oldest := k.pages[0]
		if err := k.r.discard(oldest); err != nil {
			return false, false, err
		}
		k.pages, dropped = k.pages[1:], true
		delete(k.here, oldest)
	}
	k.pages = append(k.pages, page)
	k.here[page] = true
	return true, dropped, nil
}

// thrashes reports, from counters alone, whether memory is too small for the working set:
// most accesses fault, and pages that come in drive out as many others.
func thrashes(v *interval) bool {
	c := &v.counted
	return c.PageFaults > uint64(v.accesses)/2 && c.InvalidationPages > c.PageFaultPages/2
}

// thrashingSeen checks that the counters distinguish the working set that fits from the
// one that does not, in every pass but the first, which has to bring in the pages anyway.
func thrashingSeen(fits, not []interval) error {
	for i := 1; i < len(fits); i++ {
		if thrashes(&fits[i]) || !thrashes(&not[i]) {
			return fmt.Errorf("pass %d: thrashing is seen where all fits: %v, and where it does not: %v", i, thrashes(&fits[i]), thrashes(&not[i]))
		}
	}
	return nil
}

func thrashingScene(l *pagingLab) (string, error) {
	const most, passes = 256, 12
	const small, large = most * 3 / 4, most * 5 / 4
	goThrough := func(set int) (list []interval, err error) {
		err = l.withRegion(set, func(r *onDemand) error {
			k := &keeper{r: r, most: most, here: make(map[int]bool)}
			var at verbs.PagingStats
			for i := range passes {
				l.progress("%d pages, pass %d of %d", set, i+1, passes)
				v := interval{accesses: set}
				for page := range set {
					fresh, dropped, err := k.touch(page)
					if err != nil {
						return err
					}
					if fresh {
						v.fresh++
					}
					if dropped {
						v.dropped++
					}
					if err := r.write(page, 1); err != nil {
						return err
					}
				}
				at, v.counted = r.since(at)
				list = append(list, v)
			}
			return nil
		})
		return list, err
	}
	fits, err := goThrough(small)
	if err != nil {
		return "", err
	}
	not, err := goThrough(large)
	if err != nil {
		return "", err
	}
	var plots [2][]float64
	for i, list := range [][]interval{fits, not} {
		for _, v := range list {
			plots[i] = append(plots[i], float64(v.counted.PageFaultPages))
		}
	}
	l.plot(fmt.Sprintf("num_page_fault_pages in each of %d passes; line: %d pages, stars: %d pages, %d may stay", passes, small, large, most), plots[0], plots[1])
	if !l.told() {
		return "the data is right; without a notifier, what was taken away is found by a sweep, later than these passes", nil
	}
	return fmt.Sprintf("%d pages fit and fault no more; %d do not, and every access faults and drives a page out", small, large),
		errors.Join(faultsAddUp(fits), faultsAddUp(not), thrashingSeen(fits, not))
}

// pass is a first pass over a region.
type pass struct {
	took    time.Duration // without the prefetch
	advised time.Duration // the prefetch
	counted verbs.PagingStats
}

// prefetchHelped checks that without advice every page is brought in by a fault, and that
// with advice the prefetch brings in every page, and no access faults.
func prefetchHelped(plain, advised *pass, pages int) error {
	p, a := &plain.counted, &advised.counted
	switch {
	case p.Prefetches != 0 || p.PrefetchPages != 0 || int(p.PageFaultPages) < pages:
		return fmt.Errorf("without advice: %d prefetches, %d pages brought in by %d faults", p.Prefetches, p.PageFaultPages, p.PageFaults)
	case a.Prefetches != 1 || int(a.PrefetchPages) != pages:
		return fmt.Errorf("with advice: %d prefetches brought in %d pages of %d", a.Prefetches, a.PrefetchPages, pages)
	case a.PageFaultPages > a.InvalidationPages: // but for what was reclaimed in between
		return fmt.Errorf("with advice: still %d faults, for %d pages", a.PageFaults, a.PageFaultPages)
	}
	return nil
}

func prefetchScene(l *pagingLab) (string, error) {
	const pages, message = 4096, 16
	first := func(advise bool) (p pass, err error) {
		err = l.withRegion(pages, func(r *onDemand) error {
			if advise {
				l.progress("prefetching %s", units.FormatSize(pages*pageSize))
				began := time.Now()
				if err := l.b.pd.AdviseMR(verbs.AdvisePrefetchWrite, verbs.AdviseFlush, r.mr.SGE(0, pages*pageSize)); err != nil {
					return err
				}
				p.advised = time.Since(began)
			}
			l.progress("the first pass over %s", units.FormatSize(pages*pageSize))
			for page := 0; page < pages; page += message {
				r.prepare(page, message)
				began := time.Now()
				if err := r.send(page, message); err != nil {
					return err
				}
				p.took += time.Since(began)
			}
			_, p.counted = r.since(verbs.PagingStats{})
			return nil
		})
		return p, err
	}
	plain, err := first(false)
	if err != nil {
		return "", err
	}
	advised, err := first(true)
	if err != nil {
		return "", err
	}
	rows := [][]string{{"", "without", "with prefetch"}}
	row := func(name string, f func(p *pass) string) { rows = append(rows, []string{name, f(&plain), f(&advised)}) }
	count := func(name string, f func(c *verbs.PagingStats) uint64) {
		row(name, func(p *pass) string { return strconv.FormatUint(f(&p.counted), 10) })
	}
	count("num_page_faults", func(c *verbs.PagingStats) uint64 { return c.PageFaults })
	count("num_page_fault_pages", func(c *verbs.PagingStats) uint64 { return c.PageFaultPages })
	count("num_prefetches_handled", func(c *verbs.PagingStats) uint64 { return c.Prefetches })
	count("page_prefetch", func(c *verbs.PagingStats) uint64 { return c.PrefetchPages })
	row("the prefetch", func(p *pass) string { return units.FormatFigure(units.Micros(p.advised)/1e3) + " ms" })
	row("the first pass", func(p *pass) string { return units.FormatFigure(units.Micros(p.took)/1e3) + " ms" })
	l.table(rows)
	return fmt.Sprintf("%d pages in messages of %s: %d faults, after the prefetch %d", pages, units.FormatSize(message*pageSize),
		plain.counted.PageFaults, advised.counted.PageFaults), prefetchHelped(&plain, &advised, pages)
}
