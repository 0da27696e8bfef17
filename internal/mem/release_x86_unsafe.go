//go:build amd64

package mem

// storeRelease stores a word after everything that was stored before. On this
// architecture the processor keeps the order of stores, also behind the string
// instructions that copy uses, and the compiler does not move stores across
// each other; the exchange that sync/atomic makes of a store would cost several
// nanoseconds for nothing.
//
//go:norace
func storeRelease(word *uint64, v uint64) { *word = v }
