//go:build !amd64

package mem

import "sync/atomic"

// storeRelease stores a word after everything that was stored before.
//
//go:norace
func storeRelease(word *uint64, v uint64) { atomic.StoreUint64(word, v) }
