//go:build !amd64

package mem

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// storeTail stores the bytes that end a message, after everything that was
// stored before. They end at last and lie in one aligned word.
//
// A whole word is one atomic store. For less there is no such store, so the
// word is swapped as a whole: the bytes around the tail are written back as
// they were, and if somebody else has changed them meanwhile, the swap fails
// and is made again. This is sound: an aligned word lies in one page, the one of
// the tail, and holds no pointer.
//
//go:norace
//go:nocheckptr
func storeTail(last unsafe.Pointer, tail []byte) {
	place := int(uintptr(last) % wordSize)
	word := (*uint64)(unsafe.Add(last, -place))
	if len(tail) == wordSize {
		atomic.StoreUint64(word, binary.NativeEndian.Uint64(tail))
		return
	}
	for {
		before := atomic.LoadUint64(word)
		after := before
		copy((*[wordSize]byte)(unsafe.Pointer(&after))[place+1-len(tail):], tail)
		if atomic.CompareAndSwapUint64(word, before, after) {
			return
		}
	}
}
