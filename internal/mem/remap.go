package mem

// Pinned memory that the program may remap while it is accessed. If the copy only followed
// a check that the memory is not stale, the program could unmap the memory between the two
// and map something else there, which the copy would overwrite. So the check and the copy
// are inside a bracket that the notifier sees: while an access is inside, a call that unmaps
// or discards watched memory does not return (sys.Notifier.Enter).
//
//  1. A backing finds bytes, after it has applied the pending changes of mappings.
//  2. moveRemappable enters the bracket, unless mappings have changed since, checks once
//     more whether the bytes are stale, and moves them.
//  3. If it could not, again gives the bytes back, and the cursor gets them anew.

import "github.com/verbena-rdma/verbena/internal/sys"

// mapped is a place in pinned memory that the program may remap. The zero value stands for
// memory that it cannot remap.
type mapped struct {
	host *Host
	off  uint64
}

func (m mapped) stale(n int) bool { return m.host != nil && m.host.staleAt(m.off, uint64(n)) }

// bracket enters the bracket for an access to n bytes at each of two places. ok is false, and
// it has not entered, if mappings have changed or the bytes are stale. After the access the
// caller calls Leave of the notifier that is returned, unless that is nil: then there is no
// notifier, or neither place can be remapped.
func bracket(n int, dst, src mapped) (in *sys.Notifier, ok bool) {
	if in = theSpace.notifier.Load(); in == nil || dst.host == nil && src.host == nil {
		return nil, true
	}
	if !in.Enter(shardOf(dst, src)) {
		return nil, false
	}
	if dst.stale(n) || src.stale(n) {
		in.Leave(shardOf(dst, src))
		return nil, false
	}
	return in, true
}

// shardOf returns which of the notifier's counters counts an access.
func shardOf(dst, src mapped) uint32 {
	if dst.host != nil {
		return dst.host.shard
	}
	return src.host.shard
}

// moveRemappable is moveGuarded where one of the two places may be remapped. known is false if
// mappings have changed or bytes are stale: then nothing was moved.
func moveRemappable(d, s []byte, last bool, dst, src mapped) (bad uintptr, known bool) {
	in, known := bracket(len(d), dst, src)
	if !known {
		return 0, false
	}
	bad = moveGuarded(d, s, last)
	if in != nil {
		in.Leave(shardOf(dst, src))
	}
	return bad, true
}

// remappable reports whether the bytes in use may be remapped.
func (c *cursor) remappable() bool { return c.leaf != nil && c.leaf.pinned != nil }

// mapped returns the place of the bytes in use.
func (c *cursor) mapped() mapped {
	if !c.remappable() {
		return mapped{}
	}
	return mapped{c.leaf.pinned, c.at}
}

// again gives back the bytes in use that may have been remapped, so that the cursors get them
// once more. It returns the side to which this has happened too often: its access has to wait.
func again(d, s *cursor) Side {
	if d.remappable() && !d.giveBack() {
		return Dst
	}
	if s.remappable() && !s.giveBack() {
		return Src
	}
	return 0
}

// giveBack makes the cursor offer the bytes in use once more. It reports false, with a
// fault, after it has done so too often.
func (c *cursor) giveBack() bool {
	n := uint64(len(c.b))
	c.off -= n
	c.left += n
	c.b = nil
	if c.lost++; c.lost < maxGone {
		return true
	}
	return c.fail(c.place.fault(FaultPending, c.off, c.left, c.list.Access))
}
