package mem

import "github.com/verbena-rdma/verbena/internal/sys"

// Pins holds read sections open while the bytes are read outside the copy loop, usually by
// the kernel in a send. The zero value is empty; it is reused after Release
// and never allocates for lists of ordinary length. Pins must not be held over
// a call that may block for long: closing a region waits for them.
type Pins struct {
	n     int
	first [64]*Region
	more  []*Region // beyond the first; its storage is kept

	// in is not nil while memory is among them that may be remapped (remap.go); shard
	// is where the notifier counts it.
	in    *sys.Notifier
	shard uint32
}

// hold takes over a section.
func (p *Pins) hold(r *Region) {
	if p.n < len(p.first) {
		p.first[p.n] = r
	} else {
		p.more = append(p.more, r)
	}
	p.n++
}

// take takes over the sections that are open at a cursor.
func (p *Pins) take(c *cursor) {
	switch {
	case c.region == nil: // raw bytes
		return
	case c.region.mkey != nil:
		c.leaf.leave() // keepLeaf holds a section of its own
	case c.leaf != c.region: // behind a window
		p.hold(c.leaf)
	}
	p.hold(c.region)
	c.region, c.leaf = nil, nil
}

// keepLeaf holds a section on the leaf in use until the pins are released, since the cursor
// itself goes on to other leaves.
func (p *Pins) keepLeaf(c *cursor) {
	if c.leaf == nil || c.region.mkey == nil || p.n > 0 && p.last() == c.leaf {
		return
	}
	c.leaf.state.Add(1) // the cursor's own section keeps it open
	p.hold(c.leaf)
}

func (p *Pins) last() *Region {
	if p.n <= len(p.first) {
		return p.first[p.n-1]
	}
	return p.more[p.n-1-len(p.first)]
}

// Len returns the number of sections that are open.
func (p *Pins) Len() int { return p.n }

// Release closes all sections.
func (p *Pins) Release() { p.release(0) }

// release closes all but the first keep sections.
func (p *Pins) release(keep int) {
	if keep == 0 && p.in != nil {
		p.in.Leave(p.shard)
		p.in = nil
	}
	for p.n > keep {
		p.n--
		if p.n < len(p.first) {
			p.first[p.n].leave()
			p.first[p.n] = nil
			continue
		}
		i := p.n - len(p.first)
		p.more[i].leave()
		p.more[i] = nil
		p.more = p.more[:i]
	}
}

// Gather appends to out the bytes that n bytes of a list consist of. They stay
// accessible until pins are released. If they lie in more pieces than out has room for,
// which those of an indirect key may do, or are staged, whole is false: they have to be
// copied. Then, and on a fault, nothing is appended, and nothing stays open that was not
// before.
func Gather(l *List, n uint64, out [][]byte, pins *Pins) (_ [][]byte, _ Fault, whole bool) {
	c := cursor{list: l, skip: l.Off}
	given, held := len(out), pins.n
	for n > 0 {
		if !c.fill(n) || c.isStaged() || len(out) == cap(out) || !pins.keep(&c) {
			c.close()
			pins.release(held)
			clear(out[given:])
			return out[:given], c.fault, false
		}
		if len(c.b) == 0 {
			continue // they were given back
		}
		out = append(out, c.b)
		n -= uint64(len(c.b))
		if c.left == 0 {
			pins.take(&c)
		}
	}
	return out, Fault{}, true
}

// keep makes sure that the bytes in use are not remapped before the pins are released: it
// enters the bracket (remap.go), once for all bytes. If it cannot, the cursor gives the bytes
// back. It reports false if there is a fault.
func (p *Pins) keep(c *cursor) bool {
	p.keepLeaf(c)
	if !c.remappable() {
		return true
	}
	at := c.mapped()
	switch {
	case p.in != nil && !at.stale(len(c.b)):
		return true
	case p.in != nil:
		return c.giveBack()
	}
	in, known := bracket(len(c.b), mapped{}, at)
	if !known {
		return c.giveBack()
	}
	p.in, p.shard = in, at.host.shard
	return true
}
