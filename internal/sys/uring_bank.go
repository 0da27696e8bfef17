package sys

// Banks keep pages pinned. A bank is a few rings with tables of the same registered
// buffers. The kernel copies while it holds a ring's lock, so one ring serves one thread at
// a time; as many threads as a bank has rings copy in parallel.
//
// How pages are pinned (place):
//
//  1. The pages are pinned in a staging ring, which no access uses: pinning 1 GiB takes a
//     long time, in which the kernel holds the ring's lock.
//  2. Slots of a bank are reserved.
//  3. Each of its rings clones the buffers: its table refers to the same pages. The
//     kernel copies the table, some microseconds.
//  4. The staging ring gives the buffers up.
//
// Unpinning (remove) does the same in reverse, so that no access waits for the kernel
// to unpin many pages.
//
// Before Linux 6.13 buffers cannot be cloned one by one. Then a bank has one ring, and
// its buffers are short, since accesses wait while one of them is pinned.

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	pinBankSlots    = 256      // of an ordinary bank
	pinMaxRings     = 8        // of a bank
	pinStagingSlots = 16       // of an ordinary staging ring
	pinShortBuffer  = 64 << 20 // bytes of a buffer where buffers cannot be cloned
	pinQuickRelease = 1 << 20  // bytes that are unpinned without a staging ring
)

// pinRing is one of a bank's rings.
type pinRing struct {
	mu sync.Mutex // guards the queues of the ring: one request at a time
	*uring
	_ [64]byte // rings do not share cache lines
}

// pinBank is rings that have the same buffers.
type pinBank struct {
	rings []*pinRing
	used  []bool // which slots are reserved; guarded by pinTable.mu
	count int    // how many of them

	retired bool // find reserves no slot here any more; guarded by pinTable.mu
}

// pinTable is all banks of the process.
type pinTable struct {
	clones     bool    // buffers can be cloned
	bufferSize uintptr // of the buffers that longer memory is split into
	pipes      pinPipes

	mu      sync.Mutex // guards what follows, and which slots of the banks are used
	banks   []*pinBank
	staging []*uring // idle ones, with empty tables
}

// newPinTable makes a table without banks, if there is an io_uring, and finds out whether it
// clones buffers.
func newPinTable() (*pinTable, error) {
	a, err := newRing(pinStagingSlots)
	if err != nil {
		return nil, err
	}
	b, err := newRing(pinStagingSlots)
	if err != nil {
		a.close()
		return nil, err
	}
	t := &pinTable{bufferSize: uringMaxBuffer, clones: b.clone(1, a, 0, 1) == nil}
	if !t.clones {
		t.bufferSize = pinShortBuffer
	}
	b.close()
	t.staging = append(t.staging, a)
	return t, nil
}

// place pins buffers and reserves slots for them, which follow each other.
func (t *pinTable) place(buffers []uringBuffer) (bank *pinBank, slot int, err error) {
	if !t.clones {
		return t.placeDirectly(buffers)
	}
	bank, slot, err = t.placeCloned(buffers)
	if errors.Is(err, unix.EINVAL) {
		// The process has changed its user: the kernel counts pinned pages by user, and
		// clones nothing between rings of different ones.
		t.retire()
		bank, slot, err = t.placeCloned(buffers)
	}
	return bank, slot, err
}

func (t *pinTable) placeCloned(buffers []uringBuffer) (*pinBank, int, error) {
	n := len(buffers)
	stage, err := t.stage(n)
	if err != nil {
		return nil, 0, err
	}
	defer t.unstage(stage, n)
	if err := updateAll(stage, 0, buffers); err != nil {
		return nil, 0, err
	}
	bank, slot, err := t.reserve(n)
	if err != nil {
		return nil, 0, err
	}
	if err := bank.clone(slot, stage, n); err != nil {
		t.release(bank, slot, n)
		return nil, 0, err
	}
	return bank, slot, nil
}

func (t *pinTable) placeDirectly(buffers []uringBuffer) (*pinBank, int, error) {
	bank, slot, err := t.reserve(len(buffers))
	if err != nil {
		return nil, 0, err
	}
	for i := range buffers { // one by one: accesses go on in between
		if err := updateAll(bank.rings[0].uring, slot+i, buffers[i:i+1]); err != nil {
			if failed := clearSlots(bank.rings[0].uring, slot, i); failed != nil {
				return nil, 0, errors.Join(err, failed)
			}
			t.release(bank, slot, len(buffers))
			return nil, 0, err
		}
	}
	return bank, slot, nil
}

// remove unpins what place has pinned, of size bytes. No access uses the slots any more.
// If it fails, which no kernel has a reason for, the slots are never used again.
func (t *pinTable) remove(bank *pinBank, slot, n int, size uintptr) error {
	var stage *uring
	if t.clones && size > pinQuickRelease {
		// Without a staging ring accesses to other buffers wait while pages are unpinned.
		if s, err := t.stage(n); err == nil {
			if stage = s; s.clone(0, bank.rings[0].uring, slot, n) != nil {
				t.unstage(stage, n)
				stage = nil
			}
		}
	}
	var err error
	step := n
	if !t.clones {
		step = 1 // clearSlots unpins the pages: accesses go on in between
	}
	for _, r := range bank.rings {
		for i := 0; i < n; i += step {
			err = errors.Join(err, clearSlots(r.uring, slot+i, step))
		}
	}
	if stage != nil {
		t.unstage(stage, n)
	}
	if err == nil {
		t.release(bank, slot, n)
	}
	return err
}

// stage returns a staging ring with n empty slots at least.
func (t *pinTable) stage(n int) (*uring, error) {
	if n > pinStagingSlots {
		return newRing(n)
	}
	t.mu.Lock()
	if k := len(t.staging); k > 0 {
		r := t.staging[k-1]
		t.staging = t.staging[:k-1]
		t.mu.Unlock()
		return r, nil
	}
	t.mu.Unlock()
	return newRing(pinStagingSlots)
}

// unstage empties the first n slots of a staging ring, and keeps the ring for the next
// caller of stage, or closes it.
func (t *pinTable) unstage(r *uring, n int) {
	if err := clearSlots(r, 0, n); err == nil && n <= pinStagingSlots {
		t.mu.Lock()
		if len(t.staging) < 2 {
			t.staging = append(t.staging, r)
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
	}
	r.close()
}

// reserve finds n free slots that follow each other.
func (t *pinTable) reserve(n int) (*pinBank, int, error) {
	if b, slot := t.find(n); b != nil {
		return b, slot, nil
	}
	b, err := t.newBank(max(n, pinBankSlots))
	if err != nil {
		return nil, 0, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.banks = append(t.banks, b)
	b.take(0, n)
	return b, 0, nil
}

// find reserves slots in one of the banks that there are, the newest first, which is the
// emptiest; nil if none has room.
func (t *pinTable) find(n int) (*pinBank, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := len(t.banks) - 1; i >= 0; i-- {
		b := t.banks[i]
		if b.retired || len(b.used)-b.count < n {
			continue
		}
		free := 0
		for slot, used := range b.used {
			if free++; used {
				free = 0
			}
			if free == n {
				b.take(slot+1-n, n)
				return b, slot + 1 - n
			}
		}
	}
	return nil, 0
}

// take marks slots as used. The caller holds pinTable.mu.
func (b *pinBank) take(slot, n int) {
	for i := range n {
		b.used[slot+i] = true
	}
	b.count += n
}

// release gives slots back, and closes the banks that are empty, except for one.
func (t *pinTable) release(bank *pinBank, slot, n int) {
	t.mu.Lock()
	for i := range n {
		bank.used[slot+i] = false
	}
	bank.count -= n
	unused := t.unusedLocked(1)
	t.mu.Unlock()
	for _, b := range unused {
		b.close()
	}
}

// retire keeps the banks and the staging rings that there are from being used for new
// registrations.
func (t *pinTable) retire() {
	t.mu.Lock()
	for _, b := range t.banks {
		b.retired = true
	}
	unused, stages := t.unusedLocked(0), t.staging
	t.staging = nil
	t.mu.Unlock()
	for _, b := range unused {
		b.close()
	}
	for _, r := range stages {
		r.close()
	}
}

// unusedLocked takes the banks that are empty out of the table, except for keep of them that
// are not retired, and returns them.
func (t *pinTable) unusedLocked(keep int) (unused []*pinBank) {
	t.banks = slices.DeleteFunc(t.banks, func(b *pinBank) bool {
		if b.count > 0 {
			return false
		}
		if !b.retired && keep > 0 {
			keep--
			return false
		}
		unused = append(unused, b)
		return true
	})
	return unused
}

func (t *pinTable) newBank(slots int) (*pinBank, error) {
	if slots > uringMaxBuffers {
		return nil, fmt.Errorf("%d registered buffers: %w", slots, unix.EINVAL)
	}
	rings := 1
	if t.clones {
		rings = min(runtime.GOMAXPROCS(0), pinMaxRings)
	}
	b := &pinBank{used: make([]bool, slots)}
	for range rings {
		r, err := newRing(slots)
		if err != nil {
			b.close()
			return nil, err
		}
		b.rings = append(b.rings, &pinRing{uring: r})
	}
	return b, nil
}

func (b *pinBank) close() {
	for _, r := range b.rings {
		r.close()
	}
}

// clone clones n buffers of a staging ring to all rings, from slot on. If it fails, none has
// them.
func (b *pinBank) clone(slot int, stage *uring, n int) error {
	for i, r := range b.rings {
		if err := r.clone(slot, stage, 0, n); err != nil {
			for _, r := range b.rings[:i] {
				err = errors.Join(err, clearSlots(r.uring, slot, n))
			}
			return err
		}
	}
	return nil
}

// lock locks the mu of a ring and returns the ring: an idle one if there is one.
func (b *pinBank) lock(hint int) *pinRing { return lockIdle(b.rings, hint) }

// drain waits until each access that has a ring locked now has ended.
func (b *pinBank) drain() {
	for _, r := range b.rings {
		r.mu.Lock()
		r.mu.Unlock() //nolint:staticcheck // an empty section is what waits
	}
}

// updateAll pins all buffers, or none.
func updateAll(r *uring, slot int, buffers []uringBuffer) error {
	for done := 0; done < len(buffers); {
		n, err := r.update(slot+done, buffers[done:])
		if err == nil && n == 0 {
			err = unix.EIO // the kernel pins at least one buffer, or returns an error
		}
		if err != nil {
			if failed := clearSlots(r, slot, done); failed != nil {
				return errors.Join(err, failed)
			}
			return err
		}
		done += min(n, len(buffers)-done)
	}
	return nil
}

var emptyBuffers [64]uringBuffer

// clearSlots empties n slots of a ring. If no other ring has the buffers, their pages are
// unpinned when it returns.
func clearSlots(r *uring, slot, n int) error {
	for n > 0 {
		done, err := r.update(slot, emptyBuffers[:min(n, len(emptyBuffers))])
		if err != nil || done == 0 {
			return fmt.Errorf("%d registered buffers at %d: %w", n, slot, errors.Join(err, unix.EIO))
		}
		slot, n = slot+min(done, n), n-min(done, n)
	}
	return nil
}
