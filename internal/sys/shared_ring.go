package sys

// Rings for another process: it writes to pinned pages of this process by itself, and this
// process can take that back at any time without waiting for the other one.
//
//	the owner of the pages                     the other process
//	NewLentRings: rings without buffers
//	Lend: the pages' buffers, to some slots
//	says: descriptors, slot ──────────────────▶ BorrowRings: copies of the descriptors
//	                                           Write: bytes into a pipe, and from there,
//	                                           by a request on a ring, into the pages;
//	                                           Read: the same in reverse
//	TakeBack: the slots are empty              Write fails
//	Free: the slots may be lent again          (it has no Write under way)
//
// What is written goes to the pages that were pinned, whatever is mapped at their address
// meanwhile. The kernel executes a request inside the system call that submits it, and holds
// the ring's lock while it does: the pipe has the bytes already, so nothing makes the request
// wait. TakeBack needs the same lock. So when it returns, no request is under way, and later
// ones fail. A process is never stopped inside such a request, only before or after it: for
// a stopped process TakeBack does not wait.
//
// A ring serves one thread at a time, so there are several with the same buffers.
//
// The kernel does not pass rings through sockets (since Linux 6.7). The other process copies
// the descriptors out of this process by pidfd_getfd(2), for which it needs the permission to
// debug this one, as it does to read this one's memory. A process that has it can write to all
// of this process's memory anyway, so the rings are not restricted to the requests of Write and Read.

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// MaxLentRings is how many rings lead to the same pages at most.
	MaxLentRings = 8

	lentSlots   = 256 // of each ring
	lentEntries = 2   // requests at a time: the first bytes of a message, and its last word
)

// ringCount is how many rings this process has open, of one end or the other, for all peers. They
// take one in ringShare of the descriptors that the process may have, at most: the others are the
// program's.
type ringCount struct {
	mu sync.Mutex // guards n
	n  int
}

const ringShare = 8

var lentCount, borrowedCount ringCount

// reserve reserves up to most rings for a peer, and returns how many: the fewer are left the
// fewer, 0 if none are.
func (c *ringCount) reserve(most int) int {
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) // it cannot fail
	c.mu.Lock()
	defer c.mu.Unlock()
	left := int(min(limit.Cur, 1<<20)/ringShare) - c.n
	if left <= 0 {
		return 0
	}
	n := min(most, max(left/MaxLentRings, 1))
	c.n += n
	return n
}

// release undoes reserve.
func (c *ringCount) release(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n -= n
}

// LentRings are rings for one other process: the end of the process whose pages are written.
type LentRings struct {
	rings    []*uring // they are not mapped here: this process submits nothing
	reserved int      // of lentCount

	mu   sync.Mutex // guards used
	used []bool     // which slots are lent
}

// Loan is pages that another process may write to. It ends with TakeBack and Free.
type Loan struct {
	rings    *LentRings
	slot, n  int
	takeBack sync.Once
	err      error // what TakeBack returns
}

// NewLentRings makes rings. The error is a *PinError: ENOSYS also if the kernel cannot lend
// pages to several rings (before Linux 6.13), EMFILE also if those for other peers take as many
// descriptors as rings may.
func NewLentRings() (*LentRings, error) {
	t, err := pins()
	switch {
	case err != nil:
		return nil, &PinError{"not possible here", err}
	case forked():
		return nil, errForked
	case !t.clones:
		return nil, &PinError{"the kernel's io_uring does not clone buffers (before Linux 6.13)", unix.ENOSYS}
	}
	s := &LentRings{used: make([]bool, lentSlots), reserved: lentCount.reserve(min(runtime.GOMAXPROCS(0), MaxLentRings))}
	if s.reserved == 0 {
		return nil, &PinError{"rings for other processes have their share of this process's descriptors", unix.EMFILE}
	}
	for range s.reserved {
		r, err := newUnmappedRing(lentEntries, lentSlots)
		if err != nil {
			s.Close()
			return nil, &PinError{"a ring for another process", err}
		}
		s.rings = append(s.rings, r)
	}
	return s, nil
}

// FDs returns the descriptors of the rings, which the other process needs for BorrowRings.
func (s *LentRings) FDs() []int {
	fds := make([]int, len(s.rings))
	for i, r := range s.rings {
		fds[i] = r.fd
	}
	return fds
}

// Close closes the rings. All loans have been freed.
func (s *LentRings) Close() {
	for _, r := range s.rings {
		r.close()
	}
	lentCount.release(s.reserved)
}

// Lend lets the other process write to pages, from now until TakeBack. The caller calls Free in
// the end. The pages may be
// closed before that: they stay pinned as long as they are lent. The error is a *PinError:
// EBADF if the pages are closed, ENOSPC if too many are lent.
func (s *LentRings) Lend(p *PinnedPages) (*Loan, error) {
	if forked() {
		return nil, errForked
	}
	slot := s.reserve(p.slots)
	if slot < 0 {
		return nil, &PinError{fmt.Sprintf("%d buffers for another process", p.slots), unix.ENOSPC}
	}
	l := &Loan{rings: s, slot: slot, n: p.slots}
	for _, r := range s.rings {
		if err := p.cloneTo(r, slot); err != nil {
			err = errors.Join(err, l.TakeBack())
			l.Free()
			return nil, &PinError{"for another process", err}
		}
	}
	return l, nil
}

// cloneTo puts the pages into slots of a ring.
func (p *PinnedPages) cloneTo(r *uring, slot int) error {
	from := p.bank.rings[0]
	from.mu.Lock()
	defer from.mu.Unlock()
	if p.closed.Load() { // if not, Close waits until this lock is free
		return unix.EBADF
	}
	return r.clone(slot, from.uring, p.slot, p.slots)
}

// reserve finds n free slots that follow each other and returns the first, or -1.
func (s *LentRings) reserve(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := 0
	for i, used := range s.used {
		if free++; used {
			free = 0
		}
		if free == n {
			first := i + 1 - n
			for k := range n {
				s.used[first+k] = true
			}
			return first
		}
	}
	return -1
}

// Slot returns the first slot of the pages, which the other process needs for Write.
func (l *Loan) Slot() int { return l.slot }

// TakeBack ends the loan. When it returns, the other process does not write to the pages and
// never will, whether it runs, is stopped or has ended. A second call returns the same as the
// first, and not before it. If there is an error, which no kernel has a reason for, the
// process may still write.
func (l *Loan) TakeBack() error {
	l.takeBack.Do(func() {
		if forked() {
			l.err = errForked
			return
		}
		for _, r := range l.rings.rings {
			if err := clearSlots(r, l.slot, l.n); err != nil {
				l.err = errors.Join(l.err, err, r.unregisterBuffers())
			}
		}
	})
	return l.err
}

// Free gives the slots of a loan that was taken back to later loans, and reports whether it did:
// not if TakeBack has failed. The caller calls it once, when the other process has no Write by
// this loan under way. A Write that has not submitted its request yet would go to the pages of the
// next loan, if these have the same address: the kernel compares slot and address alone.
func (l *Loan) Free() bool {
	if l.TakeBack() != nil {
		return false
	}
	s := l.rings
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range l.n {
		s.used[l.slot+k] = false
	}
	return true
}

// BorrowedRings are rings of another process: the end of the process that writes.
type BorrowedRings struct {
	rings    []*pinRing
	reserved int // of borrowedCount
}

// borrowPipes are the pipes that Write uses.
var borrowPipes pinPipes

// BorrowRings takes copies of the rings that process pid has at descriptors of its own. The
// process may have closed them, and have another file there, or the process may be another
// one. So still is called when the copies are made: if it returns true, they are the rings. It
// takes copies of some of them alone where descriptors are scarce: each leads to the same pages.
func BorrowRings(pid int, fds []int, still func() bool) (*BorrowedRings, error) {
	if len(fds) == 0 || len(fds) > MaxLentRings {
		return nil, fmt.Errorf("%d rings of another process: %w", len(fds), unix.EINVAL)
	}
	layout, err := ringLayout()
	if err != nil {
		return nil, err
	}
	process, err := OpenPidfd(pid)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	defer func() { _ = CloseFD(process) }() // it was open: it cannot fail
	s := &BorrowedRings{reserved: borrowedCount.reserve(len(fds))}
	if s.reserved == 0 {
		return nil, fmt.Errorf("rings of other processes have their share of this process's descriptors: %w", unix.EMFILE)
	}
	for _, fd := range fds[:s.reserved] {
		own, err := unix.PidfdGetfd(process, fd, 0)
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("a ring of process %d: %w", pid, err)
		}
		s.rings = append(s.rings, &pinRing{uring: &uring{fd: own}})
	}
	if !still() {
		s.Close()
		return nil, fmt.Errorf("the rings of process %d are gone: %w", pid, unix.ESTALE)
	}
	for _, r := range s.rings {
		if err := r.mapRings(layout); err != nil {
			s.Close()
			return nil, err
		}
	}
	return s, nil
}

// Close gives the copies up. Nothing uses them any more.
func (s *BorrowedRings) Close() {
	for _, r := range s.rings {
		r.close()
	}
	borrowedCount.release(s.reserved)
}

// Write copies the pieces of src, in a row, to a place in lent pages: from off on, counted
// from start, the address of the first byte, whose loan has the slot. The bytes in the last
// aligned word are stored after the rest. Write reports false if not all was written, because
// the loan has ended or a piece cannot be read: some bytes may have been written. It uses
// one of the rings that is idle, from number hint on.
func (s *BorrowedRings) Write(slot int, start, off uint64, src [][]byte, hint int) bool {
	n := 0
	for _, b := range src {
		n += len(b)
	}
	slot, ok := slotOf(slot, off, n)
	if !ok {
		return false
	}
	pipe, err := borrowPipes.get()
	if err != nil {
		return false
	}
	ok = s.write(pipe, slot, start+off, src, hint)
	borrowPipes.put(pipe, ok) // closed if bytes are left in it
	return ok
}

func (s *BorrowedRings) write(pipe *pinPipe, slot int, to uint64, src [][]byte, hint int) bool {
	for i, b := range src {
		for len(b) > 0 {
			// This may wait for a page of the source, so it is no request of the ring.
			n, errno := pipe.fill(b)
			if errno != 0 {
				return false
			}
			tail := 0
			if n == len(b) && i == len(src)-1 {
				tail = min(int((to+uint64(n)-1)%8)+1, n)
			}
			if !s.move(uringOpReadFixed, pipe.r, slot, to, n-tail, tail, hint) {
				return false
			}
			b, to = b[n:], to+uint64(n)
		}
	}
	return true
}

// MaxBorrowedRead is how many bytes Read copies at most: an empty pipe has room for them.
const MaxBorrowedRead = 4096

// Read copies bytes of lent pages to b, from a place that is given as for Write. It is for
// short messages, since it copies twice. It reports false if not all was read, because the loan
// has ended or b cannot be written.
func (s *BorrowedRings) Read(slot int, start, off uint64, b []byte, hint int) bool {
	slot, ok := slotOf(slot, off, len(b))
	if !ok || len(b) > MaxBorrowedRead {
		return false
	}
	pipe, err := borrowPipes.get()
	if err != nil {
		return false
	}
	ok = s.move(uringOpWriteFixed, pipe.w, slot, start+off, len(b), 0, hint) && pipe.empty(b) == 0
	borrowPipes.put(pipe, ok) // closed if bytes are left in it
	return ok
}

// slotOf returns the slot of the buffer that has n bytes, off bytes behind the start of the
// first. It reports false if there are no bytes, or no request reaches them: they lie in two
// buffers, or beyond the table.
func slotOf(first int, off uint64, n int) (slot int, ok bool) {
	at := off % uringMaxBuffer
	if n == 0 || first < 0 || first >= lentSlots || off/uringMaxBuffer >= lentSlots || uint64(n) > uringMaxBuffer-at {
		return 0, false
	}
	slot = first + int(off/uringMaxBuffer)
	return slot, slot < lentSlots
}

// move copies head bytes between a pipe and lent pages, and then tail bytes more.
func (s *BorrowedRings) move(opcode uint8, pipe, slot int, at uint64, head, tail, hint int) bool {
	r := lockIdle(s.rings, hint)
	defer r.mu.Unlock()
	return r.moveTwice(opcode, pipe, slot, at, head, tail)
}

// lockIdle locks the mu of a ring and returns the ring: an idle one if there is one, from
// number hint on.
func lockIdle(rings []*pinRing, hint int) *pinRing {
	for i := range rings {
		if r := rings[(hint+i)%len(rings)]; r.mu.TryLock() {
			return r
		}
	}
	r := rings[hint%len(rings)]
	r.mu.Lock()
	return r
}
