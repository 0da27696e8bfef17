package hmm

import (
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

const (
	errClosed = syscall.EINVAL
	errNoVRAM = syscall.ENOMEM
)

// Entry is what a page is for a device: an entry of its page table.
type Entry uint32

const (
	Valid     Entry = 1 << iota // the device may read the page
	Write                       // and write it
	Error                       // nothing is mapped there, or nothing that may be read, or it is not the space's
	Private                     // it lies in device-private memory, of Device
	Coherent                    // it lies in device-coherent memory, of Device
	Exclusive                   // devices have it alone
	Zero                        // it is the kernel's zero page
	Huge                        // it is a part of a huge page
)

// Device returns the number of the device whose memory the page lies in, in the order of AddGPU; -1: the process's own.
func (e Entry) Device() int { return int(e>>8) - 1 }

func (e Entry) String() string {
	var words []string
	for i, name := range []string{"valid", "write", "error", "private", "coherent", "exclusive", "zero", "huge"} {
		if e>>i&1 != 0 {
			words = append(words, name)
		}
	}
	if d := e.Device(); d >= 0 {
		words = append(words, fmt.Sprint("device ", d))
	}
	if len(words) == 0 {
		return "absent"
	}
	return strings.Join(words, ",")
}

// Mirror is a range of a space as a device sees it. Its methods may be called by several goroutines.
//
// The device's page table follows the process's by sequence and retry: [Mirror.Fault] returns entries and a sequence number.
// The number changes before one of the pages does. So the device uses entries only while [Mirror.Current] reports true, and
// takes new ones otherwise. ReadAt, WriteAt and the atomics do so by themselves.
type Mirror struct {
	space  *Space
	self   int
	reach  uint64
	addr   uint64
	n      uint64
	word   word
	closed atomic.Bool
}

// Mirror returns the memory b as the GPU sees it. The GPU reaches pages in its own memory; those in another GPU's come home
// when it accesses them.
//
// Errors: EFAULT, if b is not all of the space; EINVAL for no bytes; ENOSPC, if the space has 256 mirrors.
func (d *Device) Mirror(b []byte) (*Mirror, error) {
	return d.space.newMirror("hmm_mirror", b, d.id, func(o *Device) bool { return o == d })
}

// MirrorFor returns the memory b as another device sees it, such as a protection domain of package verbs: it reaches pages in
// the memory of those GPUs that say so (gpu.Config.Distance, of which package p2p makes one by the PCI topology). Pages
// in the memory of others come home when it accesses them. A nil device reaches none.
func (s *Space) MirrorFor(b []byte, device any) (*Mirror, error) {
	return s.newMirror("hmm_mirror", b, home, func(d *Device) bool { return device != nil && d.reachedBy(device) })
}

func (d *Device) reachedBy(device any) bool {
	distance := d.gpu.Config().Distance
	return distance == nil || distance(device) >= 0
}

func (s *Space) newMirror(op string, b []byte, self int, reaches func(*Device) bool) (*Mirror, error) {
	if err := s.begin(op); err != nil {
		return nil, err
	}
	defer s.mu.RUnlock()
	m := &Mirror{space: s, self: self, addr: addrOf(b), n: uint64(len(b))}
	if m.n == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	}
	for _, d := range s.devices {
		if reaches(d) {
			m.reach |= 1 << d.id
		}
	}
	err := s.engine.owns(m.addr, m.n)
	if err == nil {
		addr, n := around(b)
		m.word, err = s.engine.mirror(addr, n)
	}
	if err != nil {
		return nil, explain(op, err)
	}
	return m, nil
}

// Close ends the mirror. Memory regions of it are closed before. Closing again does nothing.
func (m *Mirror) Close() error {
	if m.closed.Swap(true) || m.space.begin("") != nil {
		return nil
	}
	defer m.space.mu.RUnlock()
	m.space.engine.endMirror(m.word)
	return nil
}

func (m *Mirror) begin(op string) error {
	if m == nil || m.closed.Load() {
		return ib.Errorf(op, syscall.EINVAL, "the mirror is closed")
	}
	return m.space.begin(op)
}

// Addr returns the address of the first byte: the process's, and the device's.
func (m *Mirror) Addr() uint64 { return m.addr }

// Len returns the number of bytes.
func (m *Mirror) Len() uint64 { return m.n }

// entries calls look with the pages that n bytes at off lie in.
func (m *Mirror) entries(op string, off, n uint64, look func(addr uint64, e []Entry) (uint64, error)) ([]Entry, uint64, error) {
	if err := m.begin(op); err != nil {
		return nil, 0, err
	}
	defer m.space.mu.RUnlock()
	if err := m.inside(op, off, n); err != nil {
		return nil, 0, err
	}
	first := (m.addr + off) &^ (page - 1)
	e := make([]Entry, (m.addr+off+n-1)/page-first/page+1)
	seq, err := look(first, e)
	if err != nil {
		return nil, 0, explain(op, err)
	}
	return e, seq, nil
}

func (m *Mirror) inside(op string, off, n uint64) error {
	if n == 0 || off > m.n || n > m.n-off {
		return ib.Errorf(op, syscall.EFAULT, "%d bytes at %d of %d", n, off, m.n)
	}
	return nil
}

// Snapshot returns what the pages of n bytes at off are now, and the sequence number of before. It faults nothing in.
func (m *Mirror) Snapshot(off, n uint64) ([]Entry, uint64, error) {
	return m.entries("hmm_snapshot", off, n, func(addr uint64, e []Entry) (uint64, error) {
		return m.space.engine.snapshot(m.reach, addr, e, m.word)
	})
}

// Fault makes the pages of n bytes at off valid for the device, and writable if write is set. Pages in memory that it reaches
// stay there, others come home. It returns what they are, and the sequence number of before.
//
// Errors: EFAULT, if nothing is mapped there; EPERM, if the mapping does not allow it; EIO, if a device has failed; EBUSY, if the
// pages do not come to rest for seconds.
func (m *Mirror) Fault(off, n uint64, write bool) ([]Entry, uint64, error) {
	return m.entries("hmm_fault", off, n, func(addr uint64, e []Entry) (uint64, error) {
		return m.space.engine.fault(m.reach, addr, write, e, m.word)
	})
}

// Current reports whether no page of the mirror has changed since Snapshot or Fault returned a sequence number.
func (m *Mirror) Current(seq uint64) bool {
	if m.begin("") != nil {
		return false
	}
	defer m.space.mu.RUnlock()
	return m.space.engine.current(m.word) == seq
}

// ReadAt reads memory as the device does, wherever its pages are, and faults them in if need be.
//
// Errors: those of Fault. Then some of the bytes may have been read.
func (m *Mirror) ReadAt(b []byte, off int64) (int, error) {
	return m.access("hmm_read", b, off, m.space.engine.read)
}

// WriteAt writes memory as the device does. Errors: as ReadAt.
func (m *Mirror) WriteAt(b []byte, off int64) (int, error) {
	return m.access("hmm_write", b, off, m.space.engine.write)
}

func (m *Mirror) access(op string, b []byte, off int64, do func(self int, reach, addr uint64, b []byte) error) (int, error) {
	if err := m.begin(op); err != nil {
		return 0, err
	}
	defer m.space.mu.RUnlock()
	if len(b) == 0 {
		return 0, nil
	}
	if off < 0 {
		return 0, ib.Errorf(op, syscall.EFAULT, "offset %d", off)
	}
	if err := m.inside(op, uint64(off), uint64(len(b))); err != nil {
		return 0, err
	}
	if err := do(m.self, m.reach, m.addr+uint64(off), b); err != nil {
		return 0, explain(op, err)
	}
	return len(b), nil
}

// Add adds to 8 bytes, and returns what they were. It is atomic towards all devices of the space and towards the CPU: a page
// that is home is given to devices alone before, until the CPU touches it.
//
// Errors: those of Fault; EINVAL, if the address is no multiple of 8.
func (m *Mirror) Add(off, value uint64) (uint64, error) { return m.atomic(off, atomicAdd, value, 0) }

// Swap stores 8 bytes, and returns what they were: see Add.
func (m *Mirror) Swap(off, value uint64) (uint64, error) { return m.atomic(off, atomicSwap, value, 0) }

// CompareAndSwap stores 8 bytes if they are compare, and returns what they were: see Add.
func (m *Mirror) CompareAndSwap(off, compare, value uint64) (uint64, error) {
	return m.atomic(off, atomicCAS, compare, value)
}

func (m *Mirror) atomic(off uint64, op int, x, y uint64) (uint64, error) {
	const name = "hmm_atomic"
	if err := m.begin(name); err != nil {
		return 0, err
	}
	defer m.space.mu.RUnlock()
	if off > math.MaxUint64-8 {
		return 0, ib.Errorf(name, syscall.EFAULT, "offset %d", off)
	}
	if err := m.inside(name, off, 8); err != nil {
		return 0, err
	}
	old, err := m.space.engine.atomic(m.reach, m.addr+off, op, x, y)
	return old, explain(name, err)
}
