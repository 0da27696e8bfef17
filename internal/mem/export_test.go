package mem

import "github.com/verbena-rdma/verbena/ib"

// Hold opens a read section on n bytes of the region with a key, which stays open until
// release is called. bytes returns the first of them that lie together; under an indirect
// key it opens the section on the leaf that they belong to. After a fault nothing is open,
// and release does nothing, as when it is called again.
func Hold(t *Table, key uint32, addr, n uint64, acc ib.Access, who Actor) (bytes func() ([]byte, Fault), release func(), f Fault) {
	p := new(place)
	r := t.Lookup(key)
	if r == nil {
		return nil, p.close, Fault{Kind: FaultKey, Key: key, Extent: Extent{addr, n}}
	}
	off, f := p.open(r, key, addr, n, acc, who, shutToBytes)
	return func() ([]byte, Fault) {
		b, _, f := p.run(off, n, acc)
		return b, f
	}, p.close, f
}

// Sweep looks now for pages that are gone, as happens from time to time anyway.
func Sweep() { theSpace.sweep(nil) }

// WithoutSweeper calls f while there are no sweeps but those that f makes, with the function
// that it is given.
func WithoutSweeper(f func(sweep func())) {
	theSpace.sweeping.Lock()
	defer theSpace.sweeping.Unlock()
	f(func() { theSpace.sweepLocked(nil) })
}

// Doubt has presence asked for at each access, and NoDoubt ends it.
func Doubt()   { theSpace.doubtful.Store(true) }
func NoDoubt() { theSpace.doubtful.Store(false) }

// Watched reports whether the kernel reports changes at an address, which must be
// mapped: it asks the kernel itself.
func Watched(addr uintptr) (bool, error) { return watchedBySmaps(addr) }

// HasPage reports whether the device's table has the page of an offset, for reading
// and for writing.
func (m *OnDemand) HasPage(off uint64) (read, write bool) {
	return m.have(off, 1, 0) == 1, m.have(off, 1, writing) == 1
}

// LockedPieces is how many pieces of staging bytes are page-locked, and LockedLargest how many of
// the largest.
var LockedPieces, LockedLargest = stagingSizes[1].kept + stagingSizes[2].kept, stagingSizes[2].kept

// TryStaging is Staging, but returns nil if pages are locked, and all pieces of that length are in
// use.
func TryStaging(n int) []byte { return staging.tryGet(n) }

// WithHelpers lets so many goroutines help with copies until the function that it returns is called.
func WithHelpers(n int) (end func()) {
	was := helpers.Swap(int32(n))
	return func() { helpers.Store(was) }
}

// Together is together.
func Together(n int, do func(i int)) { together(n, do) }
