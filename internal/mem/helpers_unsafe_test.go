package mem_test

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// addrOf returns the address of a slice's first byte.
func addrOf(b []byte) uintptr { return uintptr(ptr(b)) }

func ptr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// strAddr returns the address of a string's first byte.
func strAddr(s string) uintptr { return uintptr(unsafe.Pointer(unsafe.StringData(s))) }

// stackAddr returns an address on the stack of the goroutine that calls it.
//
//go:noinline
func stackAddr() uintptr {
	var x [16]byte
	return uintptr(unsafe.Pointer(&x))
}

func mincore(b, vec []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, addrOf(b), uintptr(len(b)), addrOf(vec))
	if errno != 0 {
		return errno
	}
	return nil
}

// memoryAt returns memory that a test has mapped, while it is.
func memoryAt(addr uintptr, n uint64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}
