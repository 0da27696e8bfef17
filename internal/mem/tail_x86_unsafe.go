//go:build amd64

package mem

import (
	"encoding/binary"
	"unsafe"
)

// storeTail stores the bytes that end a message, after everything that was
// stored before. They end at last and lie in one aligned word.
//
// On this architecture plain stores do: the processor keeps their order, also
// behind the string instructions that copy uses, and the compiler does not move
// stores across each other. The exchange that sync/atomic makes of a store
// would cost several nanoseconds for nothing. What fits an aligned store is one
// store; anything else goes byte by byte, and the last byte is the last. The
// arithmetic is sound: it stays within the tail's own bytes.
//
//go:norace
//go:nocheckptr
func storeTail(last unsafe.Pointer, tail []byte) {
	n := len(tail)
	first := unsafe.Add(last, 1-n)
	switch {
	case n == wordSize:
		*(*uint64)(first) = binary.NativeEndian.Uint64(tail)
	case n == 4 && uintptr(first)%4 == 0:
		*(*uint32)(first) = binary.NativeEndian.Uint32(tail)
	case n == 2 && uintptr(first)%2 == 0:
		*(*uint16)(first) = binary.NativeEndian.Uint16(tail)
	default:
		for i := range n {
			*(*byte)(unsafe.Add(first, i)) = tail[i]
		}
	}
}
