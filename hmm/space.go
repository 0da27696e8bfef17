package hmm

import (
	"errors"
	"math"
	"os"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/goheap"
)

// page is the unit in which memory moves.
var page = uint64(os.Getpagesize())

// Features is what the kernel and the process's privileges allow.
type Features struct {
	// Transparent: system calls of the program may touch pages that are away. Without it they fail with EFAULT,
	// and the program calls [Space.Resolve] before. It takes CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1.
	Transparent bool
	// Fork: a child that a bare fork makes finds its bytes. Without it only a fork by the C library, which this package
	// sees, brings the pages home before. It takes CAP_SYS_PTRACE.
	Fork bool
}

// Stats are counters of a space. They count pages.
type Stats struct {
	OutPages       uint64 // went to a device
	HomePages      uint64 // came home
	CPUFaults      uint64 // of them, those that the CPU has touched
	FirstTouches   uint64 // were touched for the first time
	FailedCopies   uint64 // could not be copied because their device failed
	Poisoned       uint64 // were touched by the CPU when their device could not give them back: a SIGBUS
	DroppedPages   uint64 // were away when the program unmapped or discarded them
	OrphanedPages  uint64 // of devices are lost until Close: the program has unmapped or moved a coherent mapping by itself
	RemappedPages  uint64 // were away when the program moved them to another address
	ExclusivePages uint64 // were given to devices alone
	CoherentPages  uint64 // went to coherent memory
	CountedPages   uint64 // were sent to a device by access counters
	CountedMissed  uint64 // were not, because too many waited
	ForkedPages    uint64 // were away and copied into a child
	Conflicts      uint64 // were away, and found present: the CPU's bytes were kept
	Invalidations  uint64 // invalidations of mirrors
	Away           uint64 // are away or coherent now
	DeviceReads    uint64 // pieces that devices have read
	DeviceWrites   uint64 // pieces that devices have written
	DeviceAtomics  uint64
	Events         uint64 // changes of mappings that the kernel has reported
	Overruns       uint64 // times that a change has not waited for a device's access, after a millisecond
}

// Config is how a space is; nil and the zero value mean the defaults. It has no fields yet.
type Config struct{}

// Space is memory that the CPU and devices share. Its methods may be called by several goroutines.
type Space struct {
	engine   engine
	features Features

	// mu guards what follows. Calls hold it for reading while they use the engine, and Close for writing.
	mu      sync.RWMutex
	closed  bool
	devices []*Device
}

// Open makes a space. A process may have several, of different memory.
//
// Errors: EOPNOTSUPP, if the program was built without cgo, or the kernel has no UFFDIO_MOVE (Linux 6.8); ENOSYS or EPERM,
// if the kernel or seccomp refuses userfaultfd; ENODEV, in a child of a process that has used this package; ENOMEM. The
// text says what is missing.
func Open(*Config) (*Space, error) {
	e, f, why, err := openEngine()
	if err != nil {
		return nil, ib.Errorf("hmm_open", errnoOf(err), "%s", why)
	}
	return &Space{engine: e, features: f}, nil
}

func errnoOf(err error) syscall.Errno {
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return syscall.EIO
}

// explain says what an errno of the engine means.
func explain(op string, err error) error {
	if err == nil {
		return nil
	}
	e := errnoOf(err)
	text := map[syscall.Errno]string{
		syscall.EFAULT:     "not memory of the space, or not any more",
		syscall.EINVAL:     "not whole pages, or no bytes",
		syscall.EBUSY:      "pages are pinned, shared with another process, or do not come to rest",
		syscall.ENOMEM:     "out of memory of the device or of the system",
		syscall.EIO:        "the device has failed",
		syscall.EPERM:      "the memory's protection does not allow it, or it is locked",
		syscall.ENOSPC:     "a limit of the space",
		syscall.ENODEV:     "no device of the space, or the child of a fork",
		syscall.EEXIST:     "it is the space's already",
		syscall.EOPNOTSUPP: "only private anonymous memory can leave",
	}[e]
	if text == "" {
		text = e.Error()
	}
	return ib.Errorf(op, e, "%s", text)
}

// begin keeps the space open until the caller calls s.mu.RUnlock. On an error it need not.
func (s *Space) begin(op string) error {
	if s == nil {
		return ib.Errorf(op, syscall.EINVAL, "nil space")
	}
	s.mu.RLock()
	if s.closed {
		s.mu.RUnlock()
		return ib.Errorf(op, syscall.EINVAL, "the space is closed")
	}
	return nil
}

// Close brings all pages home and ends the space: memory of Alloc is freed, adopted memory is ordinary memory again. Mirrors
// of it, and memory regions on them, are closed before. Closing again does nothing.
//
// Errors: EIO, if a device does not give its pages back: of adopted memory these are lost, and a touch of them is a
// SIGBUS.
func (s *Space) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	err := explain("hmm_close", s.engine.close())
	for _, d := range s.devices {
		err = errors.Join(err, d.close())
	}
	return err
}

// Features returns what the kernel and the process's privileges allow.
func (s *Space) Features() Features { return s.features }

// Stats returns the counters.
func (s *Space) Stats() Stats {
	if s.begin("") != nil {
		return Stats{}
	}
	defer s.mu.RUnlock()
	return s.engine.stats()
}

// Alloc allocates memory, all zero, outside the Go heap. n is rounded up to whole pages. It is freed by Unmap or Close.
//
// Errors: EINVAL for no bytes; ENOMEM; ENOSPC, if the space has 4,096 ranges already.
func (s *Space) Alloc(n int) ([]byte, error) {
	const op = "hmm_alloc"
	if err := s.begin(op); err != nil {
		return nil, err
	}
	defer s.mu.RUnlock()
	if n <= 0 || uint64(n) > math.MaxInt-page {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes", n)
	}
	b, err := s.engine.alloc((uint64(n) + page - 1) &^ (page - 1))
	return b, explain(op, err)
}

// Adopt makes memory of the program a part of the space: whole pages of private anonymous mappings, which are readable and
// writable. [Space.Release] ends that.
//
// Errors: EINVAL, if it is no whole pages, or memory of the Go heap; EFAULT, if nothing is mapped there; EOPNOTSUPP for other
// mappings; EPERM for others' protection; EEXIST, if it is the space's already; EBUSY, if the memory has another userfaultfd, as
// on-demand regions of package verbs give it; ENOSPC.
func (s *Space) Adopt(b []byte) error {
	const op = "hmm_adopt"
	return s.whole(op, b, func(addr, n uint64) error {
		if goheap.Overlaps(uintptr(addr), uintptr(n)) {
			return ib.Errorf(op, syscall.EINVAL, "memory of the Go heap")
		}
		return s.engine.adopt(addr, n)
	})
}

// Release takes memory out of the space, after it has come home. It stays mapped.
//
// Errors: EFAULT, EINVAL; EIO, if a device does not give pages back; EBUSY, if other calls keep moving them.
func (s *Space) Release(b []byte) error { return s.whole("hmm_release", b, s.engine.release) }

// Unmap unmaps memory of the space, wherever its pages are. Nobody may touch it any more.
func (s *Space) Unmap(b []byte) error { return s.whole("hmm_unmap", b, s.engine.unmap) }

// Discard makes memory zero, and gives its pages back, as MADV_DONTNEED does.
func (s *Space) Discard(b []byte) error { return s.whole("hmm_discard", b, s.engine.discard) }

// Protect changes what the CPU and devices may do with memory, as mprotect does.
func (s *Space) Protect(b []byte, read, write bool) error {
	return s.whole("hmm_protect", b, func(addr, n uint64) error { return s.engine.protect(addr, n, read, write) })
}

// whole calls do with the addresses of whole pages.
func (s *Space) whole(op string, b []byte, do func(addr, n uint64) error) error {
	if err := s.begin(op); err != nil {
		return err
	}
	defer s.mu.RUnlock()
	var e *ib.OpError
	err := do(addrOf(b), uint64(len(b)))
	if errors.As(err, &e) {
		return err
	}
	return explain(op, err)
}

// around returns the pages that a slice lies in.
func around(b []byte) (addr, n uint64) {
	if len(b) == 0 {
		return 0, 0
	}
	start := addrOf(b)
	first, end := start&^(page-1), (start+uint64(len(b))+page-1)&^(page-1)
	return first, end - first
}

// device returns the engine's number of a device; nil is the process's own memory.
func (s *Space) device(op string, d *Device) (int, error) {
	switch {
	case d == nil:
		return home, nil
	case d.space != s:
		return 0, ib.Errorf(op, syscall.ENODEV, "a device of another space")
	}
	return d.id, nil
}

// Migrate moves the pages that b lies in to a device, or home if to is nil, and returns how many of them are there then.
// The CPU's next touch of a page brings it home. The error is why the first of the other pages is not there:
//
//   - EFAULT: it is not the space's, or was unmapped meanwhile;
//   - ENOMEM: the device has no memory left, or the system has not;
//   - EIO: the device has failed. The page is where it was;
//   - EBUSY: it is pinned, or did not come to rest for seconds;
//   - EPERM: it is locked in memory, or not writable;
//   - ENODEV: the device is none of the space's.
func (s *Space) Migrate(b []byte, to *Device) (pages int, err error) {
	return s.migrate("hmm_migrate", b, to, false)
}

// MigrateCoherent is Migrate to memory of the device that the CPU reaches where it is: it does not fault, and the pages stay.
//
// The mapping is replaced by one of the device's memory. A program that unmaps such pages by itself does it with Unmap.
// More errors: ENOMEM, if the process has too many mappings.
func (s *Space) MigrateCoherent(b []byte, to *Device) (pages int, err error) {
	return s.migrate("hmm_migrate_coherent", b, to, true)
}

func (s *Space) migrate(op string, b []byte, to *Device, coherent bool) (int, error) {
	if err := s.begin(op); err != nil {
		return 0, err
	}
	defer s.mu.RUnlock()
	dev, err := s.device(op, to)
	if err != nil {
		return 0, err
	}
	addr, n := around(b)
	for {
		if to != nil {
			// What there is no memory for is found below.
			_ = to.room(n / page)
		}
		there, err := s.engine.migrate(addr, n, dev, coherent)
		if to != nil && errors.Is(err, syscall.ENOMEM) && to.grow() {
			continue // others have taken the room
		}
		return int(there), explain(op, err)
	}
}

// Prefetch queues a Migrate and returns. Pages that cannot go stay where they are. [Space.Drain] waits for it.
//
// Errors: EFAULT, EINVAL, ENODEV, ENOMEM.
func (s *Space) Prefetch(b []byte, to *Device) error {
	const op = "hmm_prefetch"
	if err := s.begin(op); err != nil {
		return err
	}
	defer s.mu.RUnlock()
	dev, err := s.device(op, to)
	if err != nil {
		return err
	}
	addr, n := around(b)
	if to != nil {
		if err := to.room(n / page); err != nil {
			return err
		}
	}
	return explain(op, s.engine.prefetch(addr, n, dev))
}

// Drain waits until everything is done that is queued: prefetches, and pages whose access counters are full.
func (s *Space) Drain() error {
	if err := s.begin("hmm_drain"); err != nil {
		return err
	}
	defer s.mu.RUnlock()
	return explain("hmm_drain", s.engine.drain())
}

// Resolve makes the pages that b lies in present, so that a system call can read them, or write them if write is set. It is
// needed before system calls where [Features] has no Transparent. The page may leave again at any time.
//
// Errors: EFAULT, EPERM, EIO, EBUSY.
func (s *Space) Resolve(b []byte, write bool) error {
	const op = "hmm_resolve"
	if err := s.begin(op); err != nil {
		return err
	}
	defer s.mu.RUnlock()
	addr, n := around(b)
	for n > 0 {
		entries := make([]Entry, min(n/page, 512))
		if _, err := s.engine.fault(0, addr, write, entries, nil); err != nil {
			return explain(op, err)
		}
		addr += uint64(len(entries)) * page
		n -= uint64(len(entries)) * page
	}
	return nil
}

// Exclusive gives the pages that b lies in to devices alone, for atomic operations, until the CPU touches them. The bytes stay
// in memory of the system. It returns how many pages are so; 65,536 may be at a time.
//
// Errors: those of Migrate; ENOSPC.
func (s *Space) Exclusive(b []byte) (pages int, err error) {
	const op = "hmm_exclusive"
	if err := s.begin(op); err != nil {
		return 0, err
	}
	defer s.mu.RUnlock()
	addr, n := around(b)
	there, err := s.engine.exclusive(addr, n)
	return int(there), explain(op, err)
}

// MigrateAfter has each of the pages that b lies in move to a device when that has accessed it so many times; 0: never. It
// replaces what was said for these pages before.
//
// Errors: EFAULT, EINVAL, ENODEV; ENOSPC after 255 different pairs of a device and a count.
func (s *Space) MigrateAfter(b []byte, to *Device, accesses uint32) error {
	const op = "hmm_migrate_after"
	if err := s.begin(op); err != nil {
		return err
	}
	defer s.mu.RUnlock()
	dev, err := s.device(op, to)
	if err != nil {
		return err
	}
	if to == nil && accesses != 0 {
		return ib.Errorf(op, syscall.EINVAL, "no device")
	}
	addr, n := around(b)
	if to != nil && accesses != 0 {
		if err := to.room(n / page); err != nil {
			return err
		}
	}
	return explain(op, s.engine.policy(addr, n, dev, accesses))
}

// Advice is a wish about where pages lie.
type Advice uint8

const (
	PreferDevice Advice = iota + 1 // a page goes to the device when that accesses it first
	PreferHome                     // pages stay home; those that are away come when they are touched
)

// Advise says where pages should lie. It moves nothing by itself. Errors: those of MigrateAfter.
func (s *Space) Advise(b []byte, a Advice, dev *Device) error {
	switch {
	case a == PreferDevice && dev != nil:
		return s.MigrateAfter(b, dev, 1)
	case a == PreferHome:
		return s.MigrateAfter(b, nil, 0)
	}
	return ib.Errorf("hmm_advise", syscall.EINVAL, "advice %d", a)
}
