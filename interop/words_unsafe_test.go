package interop

import (
	"sync/atomic"
	"unsafe"
)

// wordAt reads a word atomically, since a peer does atomics on it. It is sound for aligned
// memory: large slices of the Go heap are aligned, and so are the offsets used here.
func wordAt(b []byte, off int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[off:][:8][0])))
}
