//go:build cgo

package hmm

// The engine in C (hmm.h). Why this is sound: addresses go to C as numbers, and are of memory outside the Go heap,
// which the collector neither moves nor frees. Byte slices that C fills or reads are passed as pointers for the
// time of the call. The engine calls nothing in Go. The word of a mirror lies in memory of the engine, which stays
// mapped until the engine is closed.

// #cgo CFLAGS: -O2 -Wall -Wextra
// #cgo LDFLAGS: -pthread
// #include "hmm.h"
// static void *vh_pointer(uint64_t addr) { return (void *)(uintptr_t)addr; }
import "C"

import (
	"sync/atomic"
	"syscall"
	"unsafe"
)

const haveEngine = true

// home as a device is the process's own memory.
const home = C.VH_HOME

type engine struct{ s *C.struct_vh_space }

// word is a mirror's sequence number.
type word = *atomic.Uint64

func errno(e C.int) error {
	if e == 0 {
		return nil
	}
	return syscall.Errno(e)
}

func openEngine() (e engine, f Features, why string, err error) {
	var have C.struct_vh_features
	var text [256]C.char
	if err := errno(C.vh_open(&e.s, &have, &text[0], C.size_t(len(text)))); err != nil {
		return e, f, C.GoString(&text[0]), err
	}
	return e, Features{Transparent: have.transparent != 0, Fork: have.fork_events != 0}, "", nil
}

func (e engine) close() error { return errno(C.vh_close(e.s)) }

func (e engine) alloc(n uint64) ([]byte, error) {
	var addr C.uint64_t
	if err := errno(C.vh_alloc(e.s, C.uint64_t(n), &addr)); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(C.vh_pointer(addr)), n), nil
}

// addrOf returns where a slice lies.
func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func (e engine) adopt(addr, n uint64) error {
	return errno(C.vh_adopt(e.s, C.uint64_t(addr), C.uint64_t(n)))
}

func (e engine) release(addr, n uint64) error {
	return errno(C.vh_release(e.s, C.uint64_t(addr), C.uint64_t(n)))
}

func (e engine) unmap(addr, n uint64) error {
	return errno(C.vh_unmap(e.s, C.uint64_t(addr), C.uint64_t(n)))
}

func (e engine) discard(addr, n uint64) error {
	return errno(C.vh_discard(e.s, C.uint64_t(addr), C.uint64_t(n)))
}

func (e engine) protect(addr, n uint64, read, write bool) error {
	return errno(C.vh_protect(e.s, C.uint64_t(addr), C.uint64_t(n), flag(read), flag(write)))
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

func (e engine) owns(addr, n uint64) error {
	return errno(C.vh_owns(e.s, C.uint64_t(addr), C.uint64_t(n)))
}

func (e engine) addDevice() (int, error) {
	var dev C.int
	err := errno(C.vh_device_add(e.s, &dev))
	return int(dev), err
}

func (e engine) addVRAM(dev int, b []byte, fd int, off uint64) error {
	return errno(C.vh_vram_add(e.s, C.int(dev), C.uint64_t(addrOf(b)), C.uint64_t(uint64(len(b))/page), C.int(fd), C.uint64_t(off)))
}

func (e engine) freeVRAM(dev int) (uint64, error) {
	var n C.uint64_t
	err := errno(C.vh_vram_free(e.s, C.int(dev), &n))
	return uint64(n), err
}

func (e engine) failDevice(dev int, after int64) error {
	return errno(C.vh_device_fail(e.s, C.int(dev), C.int64_t(after)))
}

func (e engine) migrate(addr, n uint64, dev int, coherent bool) (uint64, error) {
	var there C.uint64_t
	err := errno(C.vh_migrate(e.s, C.uint64_t(addr), C.uint64_t(n), C.int(dev), flag(coherent)*C.VH_COHERENT, &there))
	return uint64(there), err
}

func (e engine) prefetch(addr, n uint64, dev int) error {
	return errno(C.vh_prefetch(e.s, C.uint64_t(addr), C.uint64_t(n), C.int(dev), 0))
}

func (e engine) drain() error { return errno(C.vh_drain(e.s)) }

func (e engine) exclusive(addr, n uint64) (uint64, error) {
	var there C.uint64_t
	err := errno(C.vh_exclusive(e.s, C.uint64_t(addr), C.uint64_t(n), &there))
	return uint64(there), err
}

func (e engine) policy(addr, n uint64, dev int, after uint32) error {
	return errno(C.vh_policy(e.s, C.uint64_t(addr), C.uint64_t(n), C.int(dev), C.uint32_t(after)))
}

func (e engine) mirror(addr, n uint64) (word, error) {
	var seq *C.uint64_t
	if err := errno(C.vh_mirror(e.s, C.uint64_t(addr), C.uint64_t(n), &seq)); err != nil {
		return nil, err
	}
	return word(unsafe.Pointer(seq)), nil
}

func (e engine) current(w word) uint64 {
	return uint64(C.vh_current(e.s, (*C.uint64_t)(unsafe.Pointer(w))))
}

func (e engine) endMirror(w word) { C.vh_mirror_end(e.s, (*C.uint64_t)(unsafe.Pointer(w))) }

func (e engine) read(self int, reach, addr uint64, b []byte) error {
	return errno(C.vh_read(e.s, C.int(self), C.uint64_t(reach), C.uint64_t(addr), unsafe.Pointer(unsafe.SliceData(b)), C.uint64_t(len(b))))
}

func (e engine) write(self int, reach, addr uint64, b []byte) error {
	return errno(C.vh_write(e.s, C.int(self), C.uint64_t(reach), C.uint64_t(addr), unsafe.Pointer(unsafe.SliceData(b)), C.uint64_t(len(b))))
}

// steady is read or write with staging bytes, which lie in no space; with last, a message ends with them.
func (e engine) steady(self int, reach, addr uint64, b []byte, write, last bool) error {
	return errno(C.vh_access(e.s, C.int(self), C.uint64_t(reach), C.uint64_t(addr), unsafe.Pointer(unsafe.SliceData(b)), C.uint64_t(len(b)),
		C.VH_STEADY|flag(write)*C.VH_WRITE|flag(last)*C.VH_LAST))
}

// Operations of atomic.
const (
	atomicAdd  = C.VH_ATOMIC_ADD
	atomicCAS  = C.VH_ATOMIC_CAS
	atomicSwap = C.VH_ATOMIC_SWAP
)

func (e engine) atomic(reach, addr uint64, op int, x, y uint64) (uint64, error) {
	var old C.uint64_t
	err := errno(C.vh_atomic(e.s, C.uint64_t(reach), C.uint64_t(addr), C.int(op), C.uint64_t(x), C.uint64_t(y), &old))
	return uint64(old), err
}

func (e engine) snapshot(reach, addr uint64, entries []Entry, w word) (seq uint64, err error) {
	var at C.uint64_t
	err = errno(C.vh_snapshot(e.s, C.uint64_t(reach), C.uint64_t(addr), C.uint64_t(len(entries)),
		(*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(entries))), (*C.uint64_t)(unsafe.Pointer(w)), &at))
	return uint64(at), err
}

func (e engine) fault(reach, addr uint64, write bool, entries []Entry, w word) (seq uint64, err error) {
	var at C.uint64_t
	err = errno(C.vh_fault(e.s, C.uint64_t(reach), C.uint64_t(addr), C.uint64_t(len(entries)), flag(write),
		(*C.uint32_t)(unsafe.Pointer(unsafe.SliceData(entries))), (*C.uint64_t)(unsafe.Pointer(w)), &at))
	return uint64(at), err
}

func (e engine) stats() Stats {
	var s C.struct_vh_stats
	C.vh_get_stats(e.s, &s)
	return Stats{
		OutPages: uint64(s.out_pages), HomePages: uint64(s.home_pages), CPUFaults: uint64(s.cpu_faults),
		FirstTouches: uint64(s.first_touches), FailedCopies: uint64(s.failed_copies), Poisoned: uint64(s.poisoned),
		DroppedPages: uint64(s.dropped_pages), OrphanedPages: uint64(s.orphaned_pages), RemappedPages: uint64(s.remapped_pages),
		ExclusivePages: uint64(s.exclusive_pages), CoherentPages: uint64(s.coherent_pages),
		CountedPages: uint64(s.counted_pages), CountedMissed: uint64(s.counted_missed),
		ForkedPages: uint64(s.forked_pages), Conflicts: uint64(s.conflicts), Invalidations: uint64(s.invalidations),
		Away: uint64(s.away), DeviceReads: uint64(s.device_reads), DeviceWrites: uint64(s.device_writes),
		DeviceAtomics: uint64(s.device_atomics), Events: uint64(s.events),
		Overruns: uint64(s.overruns),
	}
}
