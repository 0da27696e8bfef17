//go:build !race

package mem

import "unsafe"

// Where the target is aligned to 16 bytes and the source is not, the runtime copies long
// pieces by a string instruction that then takes up to four times as long; if the target
// is not either, it does not. Payload in packets never is aligned as memory is.
const (
	longPiece = 2048
	vector    = 16
	aside     = 8 // bytes that go first, to leave the rest out of line
)

// copyBytes copies s to d, which have the same length. The addresses are only looked at.
// A target that begins within the source is left to the runtime.
func copyBytes(d, s []byte) {
	to, from := uintptr(unsafe.Pointer(unsafe.SliceData(d))), uintptr(unsafe.Pointer(unsafe.SliceData(s)))
	if len(d) >= longPiece && to%vector == 0 && from%vector != 0 && to-from >= uintptr(len(d)) {
		copy(d[:aside], s[:aside])
		d, s = d[aside:], s[aside:]
	}
	copy(d, s)
}
