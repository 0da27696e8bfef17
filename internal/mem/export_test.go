package mem

// WithoutSweeper calls f while nobody sweeps, but when f calls the function that
// it is given.
func WithoutSweeper(f func(sweep func())) {
	theSpace.sweeping.Lock()
	defer theSpace.sweeping.Unlock()
	f(func() { theSpace.sweepLocked(nil) })
}

// Watched reports whether the kernel tells about changes at an address, which
// must be mapped: it asks the kernel itself.
func Watched(addr uintptr) (bool, error) { return watchedBySmaps(addr) }
