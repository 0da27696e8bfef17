package nvme

import "unsafe"

// aligned reports whether memory begins at a multiple of n. Sound: the address is only looked at.
func aligned(b []byte, n int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(n) == 0 //nolint:gosec // n is positive
}

// alignedBytes makes memory that begins at a page, as any disk takes it. Sound: the address is only looked at, and Go
// does not move what it has allocated on the heap.
func alignedBytes(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	off := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) % page
	return b[off:][:n:n]
}
