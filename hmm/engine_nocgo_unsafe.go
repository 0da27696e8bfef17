//go:build !cgo

package hmm

import (
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Without cgo there is no thread that could serve faults: no space can be opened, and so none of the methods below is ever
// called. It is sound to take the address of a slice, as addrOf does, since nobody makes a pointer of it again.

const haveEngine = false

const (
	home       = -1
	atomicAdd  = 0
	atomicCAS  = 1
	atomicSwap = 2
)

type engine struct{}

type word = *atomic.Uint64

const errNoCgo = syscall.EOPNOTSUPP

func openEngine() (engine, Features, string, error) {
	return engine{}, Features{}, "built without cgo, which the threads that serve page faults need; GPU memory and on-demand regions work without it", errNoCgo
}

func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func (engine) close() error                                            { return errNoCgo }
func (engine) alloc(uint64) ([]byte, error)                            { return nil, errNoCgo }
func (engine) adopt(_, _ uint64) error                                 { return errNoCgo }
func (engine) release(_, _ uint64) error                               { return errNoCgo }
func (engine) unmap(_, _ uint64) error                                 { return errNoCgo }
func (engine) discard(_, _ uint64) error                               { return errNoCgo }
func (engine) protect(_, _ uint64, _, _ bool) error                    { return errNoCgo }
func (engine) owns(_, _ uint64) error                                  { return errNoCgo }
func (engine) addDevice() (int, error)                                 { return 0, errNoCgo }
func (engine) addVRAM(int, []byte, int, uint64) error                  { return errNoCgo }
func (engine) freeVRAM(int) (uint64, error)                            { return 0, errNoCgo }
func (engine) failDevice(int, int64) error                             { return errNoCgo }
func (engine) migrate(_, _ uint64, _ int, _ bool) (uint64, error)      { return 0, errNoCgo }
func (engine) prefetch(_, _ uint64, _ int) error                       { return errNoCgo }
func (engine) drain() error                                            { return errNoCgo }
func (engine) exclusive(_, _ uint64) (uint64, error)                   { return 0, errNoCgo }
func (engine) policy(_, _ uint64, _ int, _ uint32) error               { return errNoCgo }
func (engine) mirror(_, _ uint64) (word, error)                        { return nil, errNoCgo }
func (engine) current(word) uint64                                     { return 0 }
func (engine) endMirror(word)                                          {}
func (engine) read(_ int, _, _ uint64, _ []byte) error                 { return errNoCgo }
func (engine) write(_ int, _, _ uint64, _ []byte) error                { return errNoCgo }
func (engine) steady(_ int, _, _ uint64, _ []byte, _, _ bool) error    { return errNoCgo }
func (engine) atomic(_, _ uint64, _ int, _, _ uint64) (uint64, error)  { return 0, errNoCgo }
func (engine) snapshot(_, _ uint64, _ []Entry, _ word) (uint64, error) { return 0, errNoCgo }
func (engine) fault(_, _ uint64, _ bool, _ []Entry, _ word) (uint64, error) {
	return 0, errNoCgo
}
func (engine) stats() Stats { return Stats{} }
