//go:build amd64 || arm64

package mem

// The processor's own atomics, for the application's memory, which may be gone.
// Those of sync/atomic call into C code under the race detector, where a fault ends
// the program; here it is a panic like any other. They are sound
// where the word is aligned and holds no pointer.

// fetchAdd adds to a word and returns what it was.
//
//go:noescape
func fetchAdd(p *uint64, n uint64) (orig uint64)

// compareSwap replaces a word if it is what it is compared with, and returns what
// it was.
//
//go:noescape
func compareSwap(p *uint64, compare, swap uint64) (orig uint64)
