package mem

// pageTable is the device's cache of the state of an on-demand region's pages: which
// ones are present, and which of those may be written. It is what a translation table
// is in hardware; the kernel's own page tables may differ.
//
// It is a tree of three levels whose parts are made when a page in them first
// becomes present, so that a region costs nothing for pages that are never
// accessed: a leaf for 512 pages (2 MiB), a branch for 512 leaves (1 GiB), and
// one slice of branches, with a bit for each that was made, so that the walk
// through a whole address space skips what was never accessed. A region of at most
// 512 pages has a leaf and nothing else. Reading takes no lock; bits are set and
// cleared atomically, and what was made is not freed before the region is.

import (
	"math/bits"
	"sync/atomic"
)

const (
	leafPages   = 512
	branchPages = leafPages * 512
	wordPages   = 64
)

// leaf holds two bits for each page. A page that may be written can be read: the
// bit that lets it be written is set first and cleared last, so that a set and a
// clear at the same time leave at most a page that may only be read.
type leaf struct {
	read, write [leafPages / wordPages]atomic.Uint64
}

type branch [branchPages / leafPages]atomic.Pointer[leaf]

type pageTable struct {
	pages uint64               // how many there are
	only  atomic.Pointer[leaf] // a small region's
	large *branches            // a larger one's; nil for a small one
}

// branches are those of a large table.
type branches struct {
	top  []atomic.Pointer[branch]
	made []atomic.Uint64 // a bit for each, set before it gets a leaf
}

// init sizes an empty table.
func (t *pageTable) init(pages uint64) {
	t.pages = pages
	if pages > leafPages {
		n := (pages-1)/branchPages + 1
		t.large = &branches{make([]atomic.Pointer[branch], n), make([]atomic.Uint64, (n-1)/64+1)}
	}
}

// leaf returns the leaf of a page, or nil if none of its pages was ever present.
func (t *pageTable) leaf(page uint64) *leaf {
	if t.large == nil {
		return t.only.Load()
	}
	b := t.large.top[page/branchPages].Load()
	if b == nil {
		return nil
	}
	return b[page/leafPages%uint64(len(b))].Load()
}

// makeLeaf is leaf, and makes the leaf if there is none.
func (t *pageTable) makeLeaf(page uint64) *leaf {
	if l := t.leaf(page); l != nil {
		return l
	}
	place := &t.only
	if t.large != nil {
		i := page / branchPages
		b := orMake(&t.large.top[i])
		t.large.made[i/64].Or(1 << (i % 64))
		place = &b[page/leafPages%uint64(len(b))]
	}
	return orMake(place)
}

// orMake returns what a pointer points to, making it if it is nil. Of two that
// make it at once one wins.
func orMake[T any](p *atomic.Pointer[T]) *T {
	if v := p.Load(); v != nil {
		return v
	}
	if v := new(T); p.CompareAndSwap(nil, v) {
		return v
	}
	return p.Load()
}

// present returns how many pages from page on, and at most n, are present, and
// writable if write is set.
func (t *pageTable) present(page, n uint64, write bool) uint64 {
	have := uint64(0)
	for have < n {
		l := t.leaf(page + have)
		if l == nil {
			break
		}
		words := &l.read
		if write {
			words = &l.write
		}
		for {
			at := (page + have) % leafPages
			in := at % wordPages
			run := uint64(bits.TrailingZeros64(^(words[at/wordPages].Load() >> in)))
			run = min(run, wordPages-in)
			have += run
			if have >= n {
				return n
			}
			if run < wordPages-in {
				return have
			}
			if (page+have)%leafPages == 0 {
				break // the next leaf
			}
		}
	}
	return have
}

// set marks n pages present, and writable if write is set. It returns how many of
// them were not so before.
func (t *pageTable) set(page, n uint64, write bool) (news uint64) {
	for w := range words(page, n) {
		l := t.makeLeaf(w.page)
		i := w.page % leafPages / wordPages
		was := ^uint64(0)
		if write {
			was = l.write[i].Or(w.mask)
		}
		was &= l.read[i].Or(w.mask)
		news += uint64(bits.OnesCount64(w.mask &^ was))
	}
	return news
}

// clear marks n pages absent and returns how many of them were present.
func (t *pageTable) clear(page, n uint64) (were uint64) {
	return t.change(page, n, func(l *leaf, i uint64, mask uint64) uint64 {
		were := l.read[i].And(^mask)
		l.write[i].And(^mask)
		return were
	})
}

// protect marks n pages as not writable and returns how many of them were.
func (t *pageTable) protect(page, n uint64) (were uint64) {
	return t.change(page, n, func(l *leaf, i uint64, mask uint64) uint64 { return l.write[i].And(^mask) })
}

// change takes bits away from n pages, and counts those that were set.
func (t *pageTable) change(page, n uint64, take func(l *leaf, i uint64, mask uint64) uint64) (were uint64) {
	for n > 0 {
		skip := t.empty(page)
		if skip > 0 {
			skip = min(skip, n)
			page, n = page+skip, n-skip
			continue
		}
		here := min(n, leafPages-page%leafPages)
		l := t.leaf(page)
		for w := range words(page, here) {
			were += uint64(bits.OnesCount64(take(l, w.page%leafPages/wordPages, w.mask) & w.mask))
		}
		page, n = page+here, n-here
	}
	return were
}

// empty returns how many pages from page on are certain to be absent, because
// nothing was ever made for them.
func (t *pageTable) empty(page uint64) uint64 {
	switch {
	case t.leaf(page) != nil:
		return 0
	case t.large == nil:
		return t.pages - page
	case t.large.top[page/branchPages].Load() == nil:
		return t.nextBranch(page/branchPages+1)*branchPages - page
	default:
		return leafPages - page%leafPages
	}
}

// nextBranch returns the first branch from i on that was made, or a number behind
// the last if there is none.
func (t *pageTable) nextBranch(i uint64) uint64 {
	for skip := i % 64; i/64 < uint64(len(t.large.made)); skip = 0 {
		if rest := t.large.made[i/64].Load() >> skip; rest != 0 {
			return i + uint64(bits.TrailingZeros64(rest))
		}
		i += 64 - skip
	}
	return i
}

// runs visits the runs of pages that are present: whole words of them at a
// time, so a run may be visited in pieces. It stops when visit returns false.
func (t *pageTable) runs(visit func(page, n uint64) bool) {
	for page := uint64(0); page < t.pages; {
		if skip := t.empty(page); skip > 0 {
			page += min(skip, t.pages-page)
			continue
		}
		n := t.present(page, t.pages-page, false)
		if n > 0 && !visit(page, n) {
			return
		}
		page += n
		if page < t.pages { // absent: go to the next one that is not
			l := t.leaf(page)
			if l == nil {
				continue
			}
			at := page % leafPages
			next := bits.TrailingZeros64(l.read[at/wordPages].Load() >> (at % wordPages))
			page += min(uint64(next), wordPages-at%wordPages)
		}
	}
}

// count returns how many pages are present.
func (t *pageTable) count() (n uint64) {
	t.runs(func(_, k uint64) bool { n += k; return true })
	return n
}

// word is some pages whose bits lie in one word.
type word struct {
	page uint64 // the first page of the word
	mask uint64
}

// words splits a range of pages into words.
func words(page, n uint64) func(yield func(word) bool) {
	return func(yield func(word) bool) {
		for n > 0 {
			in := page % wordPages
			k := min(n, wordPages-in)
			mask := ^uint64(0) >> (wordPages - k) << in
			if !yield(word{page - in, mask}) {
				return
			}
			page, n = page+k, n-k
		}
	}
}
