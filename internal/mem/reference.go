package mem

// Reference is payload by reference: memory of another process, its owner. It is read where
// it is mapped in this process, and by asking for a copy where it is not. Several goroutines may read.
type Reference interface {
	// Mapped returns n bytes from an offset on if they are mapped in this process, or nil.
	// A copy of them is good only if Still returns true after it.
	Mapped(off, n uint64) []byte
	Still() bool
	// ReadRef reads len(b) bytes from an offset on. If it fails, own reports whether b
	// is what is gone, and not the owner's memory.
	ReadRef(b []byte, off uint64) (ok, own bool)
}

// beginRef makes the cursor begin with the list's payload by reference, as much of it as the
// list does not skip.
func (c *cursor) beginRef() {
	skipped := min(c.skip, c.list.RefLen)
	c.ref = c.list.RefLen - skipped
	c.skip -= skipped
}

// copyRef is a step of the copy loop whose source is payload by reference: its next bytes
// are read into those that the target offers. It returns how many were read: none if the
// cursor of the target has to offer its bytes once more, or if side, which is returned too,
// has a fault. n is what the copy has left: last counts for the step that ends it.
func copyRef(d, s *cursor, n uint64, last bool) (k int, side Side) {
	k = int(min(uint64(len(d.b)), s.ref))
	ok, own, known, bad := s.list.readRef(d.b[:k], s.list.RefLen-s.ref, d.mapped())
	switch {
	case !known:
		return 0, again(d, s)
	case !ok && own && d.region != nil:
		if d.fault = d.gone(bad); !d.fault.OK() {
			return 0, Dst
		}
		return 0, 0
	case !ok:
		s.fault = Fault{Kind: FaultStale, Extent: Extent{Len: uint64(k)}}
		return 0, Src
	case d.isStaged() && !d.written(k, uint64(k) == n, last):
		return 0, Dst
	}
	d.use(k)
	s.ref -= uint64(k)
	return k, 0
}

// readRef reads payload by reference, from off on, into b, whose place is at. known is false
// if mappings at that place have changed: then nothing was read. If the read failed, own
// reports whether b is what is gone, and bad is the address of the fault, 0 if it is not
// known.
func (l *List) readRef(b []byte, off uint64, at mapped) (ok, own, known bool, bad uintptr) {
	in, known := bracket(len(b), at, mapped{})
	if !known {
		return false, false, false, 0
	}
	if m := l.Ref.Mapped(off, uint64(len(b))); m == nil {
		ok, own = l.Ref.ReadRef(b, off)
	} else if bad = moveGuarded(b, m, false); bad != 0 {
		own = within(bad, b)
	} else {
		ok = l.Ref.Still()
	}
	if in != nil {
		in.Leave(at.host.shard)
	}
	return ok, own, true, bad
}
