package device

// Memory as words, for tests that watch it: unsafe, because the device sees the
// same memory as bytes. It is sound for memory that is aligned, as large slices
// of the Go heap are.

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// wordOf reads the first word of memory that peers do atomics on.
func wordOf(b []byte) uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[:8][0]))) }

type spinMemory []uint64

func spinWords(size int) spinMemory { return make([]uint64, size/8) }

func (w spinMemory) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), 8*len(w)) }

// last loads the last word as a program would that waits for it.
func (w spinMemory) last() uint64 { return atomic.LoadUint64(&w[len(w)-1]) }

// differsFrom returns the first word that is not n, or -1.
func (w spinMemory) differsFrom(n uint64) int {
	for i := range w {
		if w[i] != n {
			return i
		}
	}
	return -1
}

// spinFill fills a buffer with a word.
func spinFill(b []byte, n uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.NativeEndian.PutUint64(b[i:], n)
	}
}
