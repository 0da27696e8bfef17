package interop

import (
	"sync/atomic"
	"unsafe"
)

// wordAt reads a word that a peer does atomics on, as a program must that shares
// it with others. It is sound for memory that is aligned: large slices of the Go
// heap are, and so are the offsets used here.
func wordAt(b []byte, off int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[off:][:8][0])))
}
