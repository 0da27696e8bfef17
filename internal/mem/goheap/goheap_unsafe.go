// Package goheap tells the memory that the Go runtime manages from all other
// memory of the process.
//
// Two decisions need it. A raw address inside the runtime's memory is not
// registered: what lies there may be a goroutine's stack, which moves, or an
// object that nothing keeps alive. And memory of the runtime is never locked:
// the runtime gives pages back by itself and must be able to.
//
// Why this is sound. The address of the heap is random since Go 1.26, its
// mappings have names only under kernels that were built for it, and several
// runtimes may live in one process; so the runtime itself is asked. Package
// reflect does the same before it makes a pointer of a number, with a function
// that the runtime exports to it by name, and this package borrows that
// function. It takes any number, reads the runtime's own index of spans, which
// only grows, and dereferences nothing else. A toolchain that drops the
// function makes the build fail, not the program.
package goheap

import _ "unsafe" // for go:linkname

// verifyNotInHeapPtr reports whether an address lies in no span of the heap:
// neither in one with objects nor in one with stacks.
//
//go:linkname verifyNotInHeapPtr reflect.verifyNotInHeapPtr
func verifyNotInHeapPtr(p uintptr) bool

// pageSize divides the size and the address of every span.
const pageSize = 8 << 10

// Contains reports whether an address lies in an object or a stack of this
// program's Go runtime. Global variables do not.
func Contains(addr uintptr) bool { return !verifyNotInHeapPtr(addr) }

// Overlaps reports whether any of n bytes, at least one, lies in an object or a
// stack. The range must not pass the end of the address space. It takes a few
// nanoseconds for each 8 KiB.
func Overlaps(addr, n uintptr) bool {
	for left := n - 1; ; addr, left = addr+pageSize, left-pageSize {
		if Contains(addr) {
			return true
		}
		if left < pageSize {
			return Contains(addr + left)
		}
	}
}
