package mem

// The innermost functions, which touch the application's memory.
//
// They are unsafe in three ways, all of them on purpose:
//
//   - The application may write the same bytes meanwhile. A device's access is
//     outside the memory model of the language, as it is for hardware: which
//     bytes a racing access sees is undefined, and nothing else depends on
//     them. So the race detector does not see these accesses (go:norace).
//   - The memory may be gone: unmapped, protected, or the file behind it
//     truncated. The runtime turns the fault into a panic (SetPanicOnFault),
//     in this package only here, and it is recovered here.
//   - Atomics and the end of a message are stored as aligned words, in memory
//     that was registered as bytes.

import (
	"runtime/debug"
	"unsafe"
)

const wordSize = 8

// move copies s to d, which have the same length, not zero; with last, the bytes in
// d's last aligned word are stored after the rest. Memory that may fault needs moveGuarded.
func move(d, s []byte, last bool) {
	if last {
		store(d, s)
	} else {
		copyBytes(d, s)
	}
}

// moveGuarded is move for memory that may fault: then it returns the address that
// is gone, and what d contains is undefined. It returns 0 if there was no fault.
func moveGuarded(d, s []byte, last bool) (bad uintptr) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if e := recover(); e != nil {
			bad = faultAddr(e, d, s)
		}
	}()
	move(d, s, last)
	return 0
}

// Where the target is aligned to 16 bytes and the source is not, the runtime copies long
// pieces by a string instruction that then takes up to four times as long; if the target
// is not aligned either, the runtime uses another way. Payload in packets never is aligned
// as memory is. So the copy loop moves the first few bytes on their own, which leaves the
// target of the rest unaligned too.
const (
	longPiece = 2048
	vector    = 16
	skew      = 8
)

// misaligned reports whether the target is aligned to 16 bytes and the source is not, unless
// the target begins within the source. It touches neither.
func misaligned(d, s []byte) bool {
	to, from := uintptr(unsafe.Pointer(unsafe.SliceData(d))), uintptr(unsafe.Pointer(unsafe.SliceData(s)))
	return to%vector == 0 && from%vector != 0 && to-from >= uintptr(len(d))
}

// store copies s to d, and stores the bytes in d's last aligned word after all
// the rest.
//
//go:norace
func store(d, s []byte) {
	last := unsafe.Pointer(&d[len(d)-1])
	tail := min(int(uintptr(last)%wordSize)+1, len(d))
	head := len(d) - tail
	copyBytes(d[:head], s[:head])
	storeTail(last, s[head:])
}

// swapOrAdd does an atomic operation on the first 8 bytes of b, which are
// aligned. ok is false if they are gone. (They may reach beyond the end of a heap
// object, which checkptr would refuse; they are in the object's page all the same.)
//
//go:nocheckptr
func swapOrAdd(b []byte, op AtomicOp, compare, swapAdd uint64) (orig uint64, ok bool) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if e := recover(); e != nil {
			faultAddr(e, b, nil)
		}
	}()
	return change((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), op, compare, swapAdd), true
}

// change does an atomic operation on an aligned word, and returns what was there before
// (0 for a Store).
//
//go:norace
func change(p *uint64, op AtomicOp, compare, swapAdd uint64) (orig uint64) {
	switch op {
	case FetchAdd:
		return fetchAdd(p, swapAdd)
	case Store:
		// As the end of a message: in one piece, and after all that was written before.
		storeTail(unsafe.Add(unsafe.Pointer(p), wordSize-1), (*[wordSize]byte)(unsafe.Pointer(&swapAdd))[:])
		return 0
	}
	return compareSwap(p, compare, swapAdd)
}

// faultAddr returns the address of a fault in one of two ranges. It raises any other
// panic again.
func faultAddr(e any, d, s []byte) uintptr {
	if f, ok := e.(interface{ Addr() uintptr }); ok {
		if a := f.Addr(); within(a, d) || within(a, s) {
			return a
		}
	}
	panic(e)
}

// within reports whether an address belongs to the words that b lies in.
func within(a uintptr, b []byte) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	first := start &^ (wordSize - 1)
	return a-first < uintptr(len(b))+(start-first)
}

// aligned reports whether b starts at a word.
func aligned(b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%wordSize == 0
}
