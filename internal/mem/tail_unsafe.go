//go:build !amd64

package mem

import "unsafe"

// storeTail stores the bytes that end a message, after everything that was
// stored before. They end at last and lie in one aligned word.
//
// The word is swapped as a whole: the bytes around the tail are written back as
// they were, and if another thread has changed them meanwhile, the swap fails
// and is made again. This is sound: an aligned word lies in one page, the one of
// the tail, and holds no pointer.
//
//go:norace
//go:nocheckptr
func storeTail(last unsafe.Pointer, tail []byte) {
	place := int(uintptr(last) % wordSize)
	word := (*uint64)(unsafe.Add(last, -place))
	for before := *word; ; {
		after := before
		copy((*[wordSize]byte)(unsafe.Pointer(&after))[place+1-len(tail):], tail)
		found := compareSwap(word, before, after)
		if found == before {
			return
		}
		before = found
	}
}
