package link

// Grants to plain memory: what malloc, make or mmap return, which no other process can map.
// The kernel copies for the initiator (grant.go has the rest of a grant):
//
//   - A READ reads the owner process's memory at its address (process_vm_readv(2)), or if it is
//     short and the pages are lent, from there. The owner process waits for no reader: what
//     was read after the grant was revoked does not count.
//   - A WRITE goes to the pages of the region, which the owner process has pinned and lent
//     (sys.LentRings). The owner process takes the loan back before the region is closed or
//     changes. Then no WRITE reaches the pages any more, even if the initiator is stopped
//     right before the system call, and the owner process does not wait for it.
//
// The initiator needs the permission to debug the owner process for both, which the handshake
// of the channel tries out (package shm). Without pinned pages (no io_uring, not enough
// RLIMIT_MEMLOCK, memory that is not lent: mem.PinToLend) a grant is for READs alone.
//
// When the owner process unmaps or discards memory of a region, accesses to it must fail. The
// initiator cannot see which memory it was. So the grant carries the value of a word of the
// owner process that every such change counts up (tickets.remaps). If the word has another
// value before the access or after it, the access does not count and the grant is used no more.
// The owner process gives another one if the region is whole.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// plainBytes is the length of what a record says of plain memory: the value of the word, the
// slot of the loan, and the descriptors of the rings.
const plainBytes = 8 + 2*4 + 4*sys.MaxLentRings

// plainShort is the length up to which bytes go through a buffer of the grant's own, which is
// less work than to find out where they lie.
const plainShort = sys.MaxBorrowedRead

// lent is the memory of this process that one peer writes to by itself.
type lent struct {
	mu    sync.Mutex // guards what follows
	rings *sys.LentRings
	id    uint64 // by which the peer names the rings
	loans int    // with the last one the rings are closed
}

// Loan is memory of this process that a peer may write to by itself. It ends with End and Free.
type Loan struct {
	from *lent
	id   uint64
	loan *sys.Loan
	fds  []int // of the rings, in this process
}

// Plain reports whether the peer may have a grant to plain memory: whether it can read the
// memory of this process and learns of changes of mappings.
func (v Via) Plain() bool {
	_, ok := v.s.tickets.remapped()
	return ok && v.c.PeerReads()
}

// Remaps returns how often mappings of this process have changed. The caller asks before it
// looks whether memory is stale.
func (v Via) Remaps() uint64 {
	n, _ := v.s.tickets.remapped()
	return n
}

// Lend lends pages to the peer. The peer writes to them once it has a grant (Tell), until
// Loan.End. The caller calls Loan.Free in the end. It makes system calls.
func (v Via) Lend(p *sys.PinnedPages) (*Loan, error) {
	k := &v.c.Tag().(*tag).lent
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rings == nil {
		rings, err := sys.NewLentRings()
		if err != nil {
			return nil, err
		}
		k.rings, k.id = rings, mem.NewLoanNumber()
	}
	l, err := k.rings.Lend(p)
	if err != nil {
		k.closeUnusedLocked()
		return nil, err
	}
	k.loans++
	return &Loan{from: k, id: k.id, loan: l, fds: k.rings.FDs()}, nil
}

// closeUnusedLocked closes the rings if nothing is lent by them.
func (k *lent) closeUnusedLocked() {
	if k.loans == 0 {
		k.rings.Close()
		k.rings = nil
	}
}

// number returns the number of the rings; 0 for no loan.
func (l *Loan) number() uint64 {
	if l == nil {
		return 0
	}
	return l.id
}

// End takes the memory back. When it returns, the peer does not write to the pages and never
// will. Every call returns no earlier than that. The grant that has the loan is shut. End makes
// system calls; it waits for a copy that the kernel is making, never for the peer.
func (l *Loan) End() {
	_ = l.loan.TakeBack() // no kernel has a reason to refuse
}

// Free ends the loan, and gives up what it takes in the rings: with the last loan, the rings. It
// is called once, when the grant that has the loan is over, or if the peer never got it: a peer
// that is inside may be about to write by the loan, and must not find another one in its place.
// It makes system calls.
func (l *Loan) Free() {
	if !l.loan.Free() {
		return // no kernel has a reason for that; the rings stay, with what is lent by them
	}
	k := l.from
	k.mu.Lock()
	k.loans--
	k.closeUnusedLocked()
	gone := k.rings == nil
	k.mu.Unlock()
	if gone {
		mem.ForgetLoan(l.id)
	}
}

// packPlain writes what a record says of plain memory.
func packPlain(b []byte, o *Offer) {
	p := packer{b}
	p.u64(o.Remaps)
	if o.Loan == nil {
		return // zeros: no ring
	}
	p.u32(uint32(o.Loan.loan.Slot()))
	p.u32(uint32(len(o.Loan.fds)))
	for _, fd := range o.Loan.fds {
		p.u32(uint32(fd))
	}
}

// plain is what the initiator needs for plain memory of another process.
type plain struct {
	remaps uint64 // the grant holds while the owner's word has this value
	slot   int    // of the loan
	hint   int    // which ring to try first
	broken bool   // the memory cannot be read any more

	// Scratch space of one access.
	base   uint64 // in the owner process, of the bytes to read
	refLen uint64 // bytes of a READ that are read into their place
	copier shm.Copier
	runs   [maxFarRuns + 1][]byte
	pins   mem.Pins
	from   [1]shm.Range
	own    [2][]byte
	short  [plainShort]byte
}

// unpackPlain reads what packPlain has written. It reports false if that is malformed.
func unpackPlain(b []byte, number int) (l *plain, fds []int, ok bool) {
	p := unpacker{b}
	l = &plain{hint: number, remaps: p.u64(), slot: int(p.u32())}
	n := p.u32()
	if n > sys.MaxLentRings {
		return nil, nil, false
	}
	for range n {
		fds = append(fds, int(p.u32()))
	}
	return l, fds, true
}

// reachPlain finds the way to plain memory: rings, or if the grant has none or they cannot be
// had, only the channel, for READs.
func (s *Shared) reachPlain(l *PeerGrant, k segmentKey, fds []int) {
	if l.rights&grantWrite != 0 && len(fds) > 0 {
		l.m = s.mapGranted(grantKey{k, true}, func() (*mapping, error) {
			// The owner process closes the rings only when the grant is shut. So while the serial
			// is shown, and the process is the owner, the descriptors are those of the rings.
			rings, err := sys.BorrowRings(k.c.PeerPID(), fds, func() bool { return k.c.IsPeer() && l.grant.Shown() })
			return &mapping{c: k.c, rings: rings}, err
		})
	}
	if l.m == nil {
		l.rights &^= grantWrite
		l.m = s.mapGranted(grantKey{segmentKey{k.c, 0}, false}, func() (*mapping, error) { return &mapping{c: k.c}, nil })
	}
}

// plainGood reports whether mappings of the owner process are what they were when the grant
// was given, and its memory can be read. The caller holds the mapping's mu.
func (l *PeerGrant) plainGood() bool { return !l.plain.broken && l.m.c.PeerRemaps() == l.plain.remaps }

// copyPlain is Copy in plain memory, off bytes behind its start. It reports whether it has
// copied all.
func (l *PeerGrant) copyPlain(off uint64, own *mem.List, n int, read bool) bool {
	if !l.plainGood() {
		return false
	}
	if read {
		return l.fetchPlain(off, own, n) && l.plainGood()
	}
	return l.m.rings != nil && l.storePlain(off, own, n) && l.plainGood()
}

// storePlain writes to the owner's pages.
func (l *PeerGrant) storePlain(off uint64, own *mem.List, n int) bool {
	p := l.plain
	if n <= plainShort {
		l.piece[0] = p.short[:n]
		l.there = mem.List{Raw: l.piece[:]}
		f, _ := mem.Copy(&l.there, own, uint64(n), false)
		return f.OK() && l.m.rings.Write(p.slot, l.off, off, l.piece[:], p.hint)
	}
	runs, f, whole := mem.Gather(own, uint64(n), p.runs[:0:maxFarRuns], &p.pins)
	if !f.OK() || !whole {
		return false
	}
	ok := l.m.rings.Write(p.slot, l.off, off, runs, p.hint)
	clear(runs)
	p.pins.Release()
	return ok
}

// fetchPlain reads the owner's memory. Of a long message all but the end is read into its
// place; the end is stored last, for programs that poll it.
func (l *PeerGrant) fetchPlain(off uint64, own *mem.List, n int) bool {
	p := l.plain
	p.base = l.off + off
	tail := n
	if n > plainShort {
		tail = refTail
	}
	p.refLen = uint64(n - tail)
	l.piece[0] = p.short[:tail]
	l.there = mem.List{Raw: l.piece[:]}
	switch {
	case p.refLen > 0:
		l.there.Ref, l.there.RefLen = l, p.refLen
	case l.m.rings != nil: // which takes two thirds of the time
		if !l.m.rings.Read(p.slot, l.off, off, l.piece[0], p.hint) {
			return false
		}
	case !l.readPlain(nil, 0):
		return false
	}
	f, _ := mem.Copy(own, &l.there, uint64(n), true)
	l.there = mem.List{}
	return f.OK()
}

// readPlain reads into b from off on, if b is not empty; and if that is where the READ's end
// begins, the end too.
func (l *PeerGrant) readPlain(b []byte, off uint64) bool {
	p := l.plain
	n := len(b)
	p.own[0], p.own[1] = b, nil
	if off+uint64(n) == p.refLen {
		p.own[1] = l.piece[0]
		n += len(p.own[1])
	}
	p.from[0] = shm.Range{Addr: p.base + off, Len: n}
	got, err := l.m.c.CopyFrom(&p.copier, p.own[:], p.from[:])
	p.own = [2][]byte{}
	p.broken = p.broken || err == shm.ErrNotPermitted || err == shm.ErrPeerGone
	return err == nil && got == n
}

// Mapped implements mem.Reference: plain memory is not mapped here.
func (l *PeerGrant) Mapped(uint64, uint64) []byte { return nil }

// Still implements mem.Reference.
func (l *PeerGrant) Still() bool { return l.plainGood() }

// ReadRef implements mem.Reference. If it fails, the request goes by the ring, whosever memory
// is gone.
func (l *PeerGrant) ReadRef(b []byte, off uint64) (ok, own bool) { return l.readPlain(b, off), false }
