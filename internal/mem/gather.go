package mem

import "math"

// Pins holds read sections open while somebody else, usually the kernel in a
// send, reads the bytes. The zero value is empty; it is reused after Release
// and never allocates for lists of ordinary length. Pins must not be held over
// a call that may block for long: closing a region waits for them.
type Pins struct {
	n     int
	first [64]*Region
	more  []*Region // beyond the first; its storage is kept
}

// take takes over the section that is open at a cursor.
func (p *Pins) take(c *cursor) {
	switch {
	case c.region == nil: // raw bytes
		return
	case p.n < len(p.first):
		p.first[p.n] = c.region
	default:
		p.more = append(p.more, c.region)
	}
	p.n++
	c.region = nil
}

// Len returns the number of sections that are open.
func (p *Pins) Len() int { return p.n }

// Release closes all sections.
func (p *Pins) Release() { p.release(0) }

// release closes all but the first keep sections.
func (p *Pins) release(keep int) {
	for p.n > keep {
		p.n--
		if p.n < len(p.first) {
			p.first[p.n].exit()
			p.first[p.n] = nil
			continue
		}
		i := p.n - len(p.first)
		p.more[i].exit()
		p.more[i] = nil
		p.more = p.more[:i]
	}
}

// Gather appends to out the bytes that n bytes of a list consist of. They stay
// accessible until pins are released. On a fault nothing is appended, and
// nothing stays open that was not before.
func Gather(l *List, n uint64, out [][]byte, pins *Pins) ([][]byte, Fault) {
	out, f, _ := gather(l, n, out, pins, math.MaxInt)
	return out, f
}

// GatherFew is Gather into the room that out has. If the bytes lie in more pieces
// than that, which those of an indirect key may do, or in another process, it appends
// nothing and returns false: they have to be copied.
func GatherFew(l *List, n uint64, out [][]byte, pins *Pins) ([][]byte, Fault, bool) {
	return gather(l, n, out, pins, cap(out))
}

func gather(l *List, n uint64, out [][]byte, pins *Pins, most int) (_ [][]byte, _ Fault, whole bool) {
	c := cursor{list: l, skip: l.Off}
	given, held := len(out), pins.n
	for n > 0 {
		if !c.near(n, most) || !c.fill(n) || len(out) == most {
			c.close()
			pins.release(held)
			clear(out[given:])
			return out[:given], c.fault, false
		}
		out = append(out, c.b)
		n -= uint64(len(c.b))
		if c.left == 0 {
			pins.take(&c)
		}
	}
	return out, Fault{}, true
}

// near opens the next section, unless one is, and reports whether its bytes are there to
// be kept: those of another process are not, but for one who takes them all.
func (c *cursor) near(n uint64, most int) bool {
	if c.left > 0 || c.list.Table == nil {
		return true
	}
	c.close()
	return c.open(min(n, Quantum)) && (c.region.kind != KindForeign || most == math.MaxInt)
}
