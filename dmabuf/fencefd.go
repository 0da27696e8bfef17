package dmabuf

// Descriptors of fences: those that this process gives away, and fences that are made from a
// descriptor. One goroutine watches all of them, and exists only while there are some.
//
//  1. FD makes a socket pair, keeps one end and returns the other. When the fence is signalled, its
//     status is sent through the kept end, which is closed then. When all copies of the other end are
//     closed, the goroutine closes the kept one.
//  2. FenceFromFD keeps a copy of the descriptor until it is readable: then the goroutine reads the
//     status and signals the fence.

import (
	"context"
	"errors"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// ErrFenceLost is what a fence from a descriptor is signalled with if the process that has the
// fence has ended before it was signalled. Its errno is EOWNERDEAD.
var ErrFenceLost = sys.ErrFenceLost

// fenceNumber counts the descriptors that were given away: their names differ by it.
var fenceNumber atomic.Uint64

// FD returns a descriptor of the fence, which the caller closes. It is closed on exec. poll(2) and
// epoll(7) find it readable once the fence is signalled, in whatever process it is. FenceFromFD
// makes a fence of it again.
//
// All else that the descriptor can do is to be duplicated, inherited, sent and closed. If this
// process ends while the fence is pending, the descriptor is readable, and its fence has failed with
// ErrFenceLost. The number of an error crosses to other processes, its text does not:
// EIO if it has no number, ECANCELED for a request that was flushed.
//
// Errors: EMFILE, ENFILE.
func (f *Fence) FD() (int, error) { return f.newFD(nil) }

// newFD is FD. It has abandoned called, if that is not nil, when all copies of the descriptor are
// closed before the fence is signalled.
func (f *Fence) newFD(abandoned func()) (int, error) {
	const op = "sync_file_create"
	name := server.token() + ":" + strconv.FormatUint(fenceNumber.Add(1), 16)
	kept, given, err := sys.NewFencePair(name)
	if err != nil {
		return -1, descriptorError(op, err)
	}
	if f.Signaled() {
		sys.SignalFence(kept, statusOf(f.Err()))
		return given, nil
	}
	w := &watchedFence{fence: f, fd: kept, kind: watchHangup, name: name, abandoned: abandoned}
	if w.id, err = sys.HandleIDOf(given); err == nil {
		err = fences.add(w)
	}
	if err != nil {
		_, _ = sys.CloseFD(kept), sys.CloseFD(given) // the first error says more
		return -1, descriptorError(op, err)
	}
	w.follow(func(err error) { sys.SignalFence(kept, statusOf(err)) })
	return given, nil
}

// statusOf returns the number of an error, for other processes.
func statusOf(err error) syscall.Errno {
	switch errno := syscall.EIO; {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return errno
	case errors.Is(err, ib.ErrFenceFlushed), errors.Is(err, context.Canceled):
		return syscall.ECANCELED
	case errors.Is(err, context.DeadlineExceeded):
		return syscall.ETIMEDOUT
	}
	return syscall.EIO
}

// FenceFromFD returns the fence of a descriptor. The descriptor stays the caller's, and may be closed
// afterwards. It may be
//
//   - one that [Fence.FD] has returned, in whatever process. In this process, the fence is the same
//     one while it is pending;
//   - a sync file of the kernel;
//   - an eventfd: the fence is signalled once it is readable.
//
// A fence that is made from a descriptor holds a copy of it until it is signalled, or until Forget.
// Signal ends such a fence for this process alone.
//
// Errors: EBADF if the descriptor is not open; EINVAL if it is of another kind; EMFILE, ENFILE.
func FenceFromFD(fd int) (*Fence, error) {
	const op = "sync_file_get_fence"
	own, err := sys.DupFD(fd) // the program may close or replace its own meanwhile
	if err != nil {
		if errors.Is(err, syscall.EBADF) {
			return nil, ib.Errorf(op, syscall.EBADF, "descriptor %d is not open", fd)
		}
		return nil, descriptorError(op, err)
	}
	f, watched, err := fenceOf(op, own)
	if !watched {
		_ = sys.CloseFD(own) // it is our own
	}
	return f, err
}

// fenceOf returns the fence of a descriptor, and whether the descriptor is watched from now on.
func fenceOf(op string, fd int) (f *Fence, watched bool, err error) {
	kind, name, err := sys.FenceFDOf(fd)
	if err != nil {
		return nil, false, ib.Errorf(op, syscall.EINVAL, "%v", err)
	}
	if kind == sys.FenceOwn {
		if f := fences.find(fd, name); f != nil {
			return f, false, nil
		}
	}
	f = &Fence{imported: true}
	if signaled, failure := sys.FenceStatus(fd, kind); signaled {
		f.Signal(failure)
		return f, false, nil
	}
	w := &watchedFence{fence: f, fd: fd, kind: watchReadable}
	w.id, err = sys.HandleIDOf(fd)
	w.status = func() (bool, error) { return sys.FenceStatus(fd, kind) }
	if err == nil {
		err = fences.add(w)
	}
	if err != nil {
		return nil, false, descriptorError(op, err)
	}
	w.follow(func(error) { w.close() })
	return f, true, nil
}

// Forget gives up the copy of a descriptor, if the fence was made from one and is pending: it fails with
// ECANCELED, for this process alone. Other fences stay as they are.
func (f *Fence) Forget() {
	if f.imported {
		f.Signal(syscall.ECANCELED)
	}
}

// FenceToSignal returns a fence whose Signal is seen by those who have a descriptor: for the work
// request that ends the work, while others wait for the descriptor. It may be
//
//   - one that [Fence.FD] has returned in this process, while the fence is pending: the fence is the
//     same one. Other processes cannot signal it;
//   - an eventfd: one is added to its counter, also if the work has failed.
//
// The descriptor stays the caller's, and may be closed afterwards. giveUp ends the use of the fence, if it
// will not be signalled.
//
// Errors: EBADF if the descriptor is not open; EINVAL if it is of another kind; EMFILE, ENFILE.
func FenceToSignal(fd int) (f *Fence, giveUp func(), err error) {
	const op = "sync_file_get_fence"
	own, err := sys.DupFD(fd) // the program may close or replace its own meanwhile
	if err != nil {
		if errors.Is(err, syscall.EBADF) {
			return nil, nil, ib.Errorf(op, syscall.EBADF, "descriptor %d is not open", fd)
		}
		return nil, nil, descriptorError(op, err)
	}
	kind, name, err := sys.FenceFDOf(own)
	if err == nil && kind == sys.FenceEvent {
		f = NewFence()
		cancel := f.OnSignal(func(error) {
			_ = sys.WriteEvent(own) // if it is not open for writing, nobody can be told
			_ = sys.CloseFD(own)
		})
		return f, func() {
			if cancel() {
				_ = sys.CloseFD(own) // it is our own
			}
		}, nil
	}
	if err == nil && kind == sys.FenceOwn {
		f = fences.find(own, name)
	}
	_ = sys.CloseFD(own) // it is our own
	if f == nil {
		return nil, nil, ib.Errorf(op, syscall.EINVAL, "the descriptor is none of a fence of this process that is pending")
	}
	return f, func() {}, nil
}

// FenceStatus returns the status of the fence of a descriptor: whether it was signalled, and then what
// with. It is for those who wait for the descriptor by poll(2).
//
// Errors: EBADF if the descriptor is not open; EINVAL if it is of another kind than [FenceFromFD] takes.
func FenceStatus(fd int) (signaled bool, failure, err error) {
	const op = "sync_file_info"
	kind, _, err := sys.FenceFDOf(fd)
	if err != nil {
		errno := syscall.EINVAL
		_ = errors.As(err, &errno)
		return false, nil, ib.Errorf(op, errno, "%v", err)
	}
	signaled, failure = sys.FenceStatus(fd, kind)
	return signaled, failure, nil
}

// watchKind is what of a descriptor is watched.
type watchKind int

const (
	watchHangup   watchKind = iota // that all copies of the other end are closed
	watchReadable                  // that it is readable
	watchWritable                  // that it is writable
)

// watchedFence is a fence that is pending, and a descriptor that the goroutine watches for it.
type watchedFence struct {
	fence *Fence
	fd    int
	id    sys.HandleID // of fd; of watchHangup, of the descriptor that was given away
	kind  watchKind
	name  string // of watchHangup: of the descriptor that was given away
	tag   int32

	// abandoned, with watchHangup, is called when nobody has the descriptor any more; nil: nothing is.
	abandoned func()
	// status returns whether the fence is signalled, and its failure. nil with watchHangup.
	status func() (bool, error)

	mu     sync.Mutex // guards cancel
	cancel func() bool
}

// follow has ends called when the fence is signalled, unless the goroutine gives the descriptor up
// before. fences.add has added the fence.
func (w *watchedFence) follow(ends func(error)) {
	cancel := w.fence.OnSignal(func(err error) {
		if fences.remove(w) {
			ends(err)
		}
	})
	w.mu.Lock()
	w.cancel = cancel
	w.mu.Unlock()
	if !fences.has(w) { // the goroutine was faster
		cancel()
	}
}

// forget ends what follow has begun.
func (w *watchedFence) forget() {
	w.mu.Lock()
	cancel := w.cancel
	w.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

// close closes the descriptor, unless the program has done so and its number stands for another file.
func (w *watchedFence) close() {
	if id, err := sys.HandleIDOf(w.fd); w.kind == watchHangup || err == nil && id == w.id {
		_ = sys.CloseFD(w.fd) // it is open: it cannot fail
	}
}

// ready does what is due when the descriptor is ready.
func (w *watchedFence) ready() {
	if w.kind == watchHangup {
		if fences.remove(w) {
			w.forget()
			w.close()
			if w.abandoned != nil {
				w.abandoned()
			}
		}
		return
	}
	signaled, failure := w.status()
	if signaled {
		w.fence.Signal(failure) // follow's function gives the descriptor up
	}
}

// fences are the descriptors of fences that are watched.
var fences fenceWatch

type fenceWatch struct {
	mu     sync.Mutex // guards what follows
	watch  *sys.Watch // nil while nothing is watched
	tag    int32      // of the last one that was added
	byTag  map[int32]*watchedFence
	byFile map[sys.HandleID]*watchedFence // those of watchHangup, by the descriptor that was given away
}

// add begins to watch a descriptor.
func (s *fenceWatch) add(w *watchedFence) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	begins := s.watch == nil
	if begins {
		watch, err := sys.NewWatch()
		if err != nil {
			return err
		}
		s.watch = watch
		if s.byTag == nil {
			s.byTag, s.byFile = make(map[int32]*watchedFence), make(map[sys.HandleID]*watchedFence)
		}
	}
	for s.tag++; s.byTag[s.tag] != nil; s.tag++ {
		continue // it is taken: the numbers have wrapped around
	}
	w.tag = s.tag
	var err error
	switch w.kind {
	case watchHangup:
		err = s.watch.AddHangup(w.fd, w.tag)
	case watchReadable:
		err = s.watch.Add(w.fd, w.tag)
	case watchWritable:
		err = s.watch.AddWritable(w.fd, w.tag)
	}
	if err != nil {
		if begins {
			_ = s.watch.Close() // it has watched nothing
			s.watch = nil
		}
		return err
	}
	s.byTag[w.tag] = w
	if w.kind == watchHangup {
		s.byFile[w.id] = w
	}
	if begins {
		go s.run(s.watch)
	}
	return nil
}

// remove ends the watching of a descriptor. It reports whether the descriptor was watched: then the
// caller closes it. With the last one the goroutine ends.
func (s *fenceWatch) remove(w *watchedFence) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byTag[w.tag] != w {
		return false
	}
	delete(s.byTag, w.tag)
	if s.byFile[w.id] == w {
		delete(s.byFile, w.id)
	}
	_ = s.watch.Remove(w.fd) // it fails if the program has closed it, and then it is not watched
	if len(s.byTag) == 0 {
		_ = s.watch.Close() // it ends run
		s.watch = nil
	}
	return true
}

// has reports whether a descriptor is watched.
func (s *fenceWatch) has(w *watchedFence) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byTag[w.tag] == w
}

// find returns the fence that this process has given a descriptor of away; nil if it has not, or
// the fence is not pending.
func (s *fenceWatch) find(fd int, name string) *Fence {
	id, err := sys.HandleIDOf(fd)
	if err != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.byFile[id]; w != nil && w.name == name {
		return w.fence
	}
	return nil
}

// run waits for descriptors until the watch is closed.
func (s *fenceWatch) run(watch *sys.Watch) {
	var tags [32]int32
	for {
		n, err := watch.Wait(tags[:])
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				s.fail(watch, err)
			}
			return
		}
		for _, tag := range tags[:n] {
			s.mu.Lock()
			w := s.byTag[tag]
			if s.watch != watch {
				w = nil // the tag is of a later watch
			}
			s.mu.Unlock()
			if w != nil {
				w.ready()
			}
		}
	}
}

// fail ends all fences that are made from descriptors: nobody watches these any more.
func (s *fenceWatch) fail(watch *sys.Watch, err error) {
	s.mu.Lock()
	var all []*watchedFence
	if s.watch == watch {
		for _, w := range s.byTag {
			all = append(all, w)
		}
	}
	s.mu.Unlock()
	for _, w := range all {
		if w.kind == watchHangup {
			continue // its descriptor is still readable once it is signalled
		}
		w.fence.Signal(err)
	}
}

// MergeFences returns a fence that is signalled when all of some fences are, with the error of
// the first of them in the list that has failed.
func MergeFences(list ...*Fence) *Fence {
	merged, _ := merge(list)
	return merged
}

// merge is MergeFences. give has the merged fence forgotten: it is not signalled by the others any
// more.
func merge(list []*Fence) (merged *Fence, give func()) {
	merged = NewFence()
	var left atomic.Int64
	left.Store(int64(len(list)) + 1)
	done := func(error) {
		if left.Add(-1) > 0 {
			return
		}
		for _, f := range list {
			if err := f.Err(); err != nil {
				merged.Signal(err)
				return
			}
		}
		merged.Signal(nil)
	}
	cancels := make([]func() bool, len(list))
	for i, f := range list {
		cancels[i] = f.OnSignal(done)
	}
	done(nil)
	return merged, func() {
		for _, cancel := range cancels {
			cancel()
		}
	}
}
