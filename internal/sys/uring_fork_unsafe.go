package sys

// The child of a fork inherits the descriptors of its parent's rings and pipes: with them
// it would read and change its parent's memory. A page that the kernel clears in the child
// (MADV_WIPEONFORK) shows that this process is a child.
//
// This is sound: the page is mapped once and never unmapped, and the word in it is
// written before another goroutine can have its address.

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forkWord is 1 in the process that has mapped it and 0 in its children.
var forkWord *uint32

// markFork maps the page, unless it is mapped already. One goroutine at a time may call
// it, and the first call comes before any call of forked.
func markFork() error {
	if forkWord != nil {
		return nil
	}
	b, err := unix.Mmap(-1, 0, int(pageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("mmap of a page: %w", err)
	}
	if err := unix.Madvise(b, unix.MADV_WIPEONFORK); err != nil {
		_ = unix.Munmap(b) // the first error says more
		return fmt.Errorf("MADV_WIPEONFORK: %w", err)
	}
	forkWord = (*uint32)(unsafe.Pointer(unsafe.SliceData(b)))
	atomic.StoreUint32(forkWord, 1)
	return nil
}

// forked reports whether this process is the child of the one that called markFork.
func forked() bool { return atomic.LoadUint32(forkWord) == 0 }
