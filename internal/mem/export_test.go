package mem

// WithoutSweeper calls f while nobody sweeps, but when f calls the function that
// it is given.
func WithoutSweeper(f func(sweep func())) {
	theSpace.sweeping.Lock()
	defer theSpace.sweeping.Unlock()
	f(func() { theSpace.sweepLocked(nil) })
}

// Doubt has presence asked for at each access, and NoDoubt ends it.
func Doubt()   { theSpace.doubtful.Store(true) }
func NoDoubt() { theSpace.doubtful.Store(false) }

// Watched reports whether the kernel tells about changes at an address, which
// must be mapped: it asks the kernel itself.
func Watched(addr uintptr) (bool, error) { return watchedBySmaps(addr) }

// HasPage tells whether the device's table has the page of an offset, for reading
// and for writing.
func (m *OnDemand) HasPage(off uint64) (read, write bool) {
	return m.have(off, 1, 0) == 1, m.have(off, 1, writing) == 1
}
