package mem

// Reference is memory of another process, which is read by asking for it, or directly if
// it is mapped here.
type Reference interface {
	// Mapped returns n bytes from an offset on if they are mapped here, or nil.
	// What was copied from them counts only if Still says so then.
	Mapped(off, n uint64) []byte
	Still() bool
	// ReadFar reads len(b) bytes from an offset on. own says that it failed
	// because b is not there, and not the other process's memory.
	ReadFar(b []byte, off uint64) (ok, own bool)
}

// startFar makes the cursor begin with the bytes that lie in another process, unless the
// list skips all of them.
func (c *cursor) startFar() {
	skipped := min(c.skip, c.list.RefLen)
	c.ref = c.list.RefLen - skipped
	c.skip -= skipped
}

// readFar is a step of the copy loop whose source lies in another process: the next bytes
// of it, n at most, go straight to those that the target offers. It returns how many did;
// none if the target's have to be asked for once more, or if a side has a fault.
func readFar(d, s *cursor, n uint64, last bool) (k int, side Side) {
	k = int(min(uint64(len(d.b)), s.ref))
	ok, own, known, bad := s.list.readFar(d.b[:k], s.list.RefLen-s.ref, d.mapped())
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
	case d.isStaged() && !d.store(k, last && uint64(k) == n):
		return 0, Dst
	}
	d.use(k)
	s.ref -= uint64(k)
	return k, 0
}

// readFar reads far bytes into b, which lies at a place: by itself where both processes
// have mapped them, or by asking. known is false if it is not known what lies at the
// place: then nothing was done. own says that it failed because b is not there, and bad
// where, if that is known.
func (l *List) readFar(b []byte, off uint64, at mapped) (ok, own, known bool, bad uintptr) {
	in, known := bracket(len(b), at, mapped{})
	if !known {
		return false, false, false, 0
	}
	if m := l.Ref.Mapped(off, uint64(len(b))); m == nil {
		ok, own = l.Ref.ReadFar(b, off)
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
