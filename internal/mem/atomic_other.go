//go:build !amd64 && !arm64

package mem

import "sync/atomic"

// Under the race detector a fault in these ends the program.

// fetchAdd adds to a word and returns what it was.
func fetchAdd(p *uint64, n uint64) (orig uint64) { return atomic.AddUint64(p, n) - n }

// compareSwap replaces a word if it is what it is compared with, and returns what
// it was.
func compareSwap(p *uint64, compare, swap uint64) (orig uint64) {
	for {
		orig = atomic.LoadUint64(p)
		if orig != compare || atomic.CompareAndSwapUint64(p, compare, swap) {
			return orig
		}
	}
}
