package mem

// Far is memory of another process, which is read by asking for it, or directly if
// it is mapped here.
type Far interface {
	// Mapped returns n bytes from an offset on if they are mapped here, or nil.
	// What was copied from them counts only if Still says so then.
	Mapped(off, n uint64) []byte
	Still() bool
	// ReadFar reads len(b) bytes from an offset on. own says that it failed
	// because b is not there, and not the other process's memory.
	ReadFar(b []byte, off uint64) (ok, own bool)
}

// copyFar is Copy from a list that lies in another process but for its last
// bytes, which are at hand: they are stored last.
func copyFar(dst, src *List, n uint64, last bool) (f Fault, side Side) {
	d, s := cursor{list: dst, skip: dst.Off}, cursor{list: src}
	off := src.Off
	for n > 0 {
		if len(d.b) == 0 {
			if !d.fill(n) {
				f, side = d.fault, Dst
				break
			}
		}
		k := uint64(len(d.b))
		if off < src.FarLen {
			k = min(k, src.FarLen-off)
			ok, own, known, bad := src.readFar(d.b[:k], off, d.mapped())
			if !known {
				if side = again(&d, &s); side != 0 {
					f = d.fault
					break
				}
				continue
			}
			if !ok {
				if !own || d.region == nil {
					f, side = Fault{Kind: FaultStale, Extent: Extent{Len: k}}, Src
					break
				}
				if f, side = d.gone(bad), Dst; !f.OK() {
					break
				}
				continue
			}
		} else {
			tail := src.near(off - src.FarLen)
			if k = min(k, uint64(len(tail))); k == 0 {
				f, side = Fault{Kind: FaultBounds, Extent: Extent{Len: n}}, Src
				break
			}
			bad, known := moveRemappable(d.b[:k], tail[:k], last && k == n, d.mapped(), mapped{})
			if !known {
				if side = again(&d, &s); side != 0 {
					f = d.fault
					break
				}
				continue
			}
			if bad != 0 {
				if f, side = d.gone(bad), Dst; !f.OK() {
					break
				}
				continue
			}
		}
		if d.isStaged() && !d.store(int(k), last && k == n) {
			f, side = d.fault, Dst
			break
		}
		count(&d, &s, int(k))
		d.use(int(k))
		off, n = off+k, n-k
	}
	d.close()
	return f, side
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
	if m := l.Far.Mapped(off, uint64(len(b))); m == nil {
		ok, own = l.Far.ReadFar(b, off)
	} else if bad = moveGuarded(b, m, false); bad != 0 {
		own = within(bad, b)
	} else {
		ok = l.Far.Still()
	}
	if in != nil {
		in.Leave(at.host.shard)
	}
	return ok, own, true, bad
}

// near returns the bytes that are at hand, from an offset on.
func (l *List) near(off uint64) []byte {
	if len(l.Raw) == 0 || off >= uint64(len(l.Raw[0])) {
		return nil
	}
	return l.Raw[0][off:]
}
