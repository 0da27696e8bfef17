package mem

import (
	"testing"

	"golang.org/x/sys/unix"
)

// allPresent finds a page that is missing anywhere.
func TestAllPresent(t *testing.T) {
	const pages, size = 8, 8 * 4096
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	for i := range pages {
		b[i*4096] = 1
	}
	addr := addrOf(b)
	if !allPresent(addr, size) || !allPresent(addr+100, size-100) {
		t.Fatal("all pages were touched")
	}
	for i := range pages {
		if err := unix.Madvise(b[i*4096:][:4096], unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if allPresent(addr, size) || allPresent(addr+uintptr(i)*4096+4095, 1) {
			t.Errorf("page %d is missing", i)
		}
		b[i*4096] = 1
	}
}
