package mem

// The way from a key to the bytes of a leaf, a region that stands on memory itself.
//
//  1. open finds the region of a key and opens a section on it; for a window, on the
//     region behind it too.
//  2. run gets bytes from the leaf's backing. Under an indirect key each piece has a leaf of
//     its own: run closes the section on the leaf before and opens one on the piece's. So
//     one leaf at a time is in use, whatever the key is made of.
//  3. close closes all sections. The caller waits for nothing before that.

import "github.com/verbena-rdma/verbena/ib"

// place is where an access has come to.
type place struct {
	region  *Region // the key's, with an open section; nil: no key is in use
	leaf    *Region // whose bytes are in use, with an open section; nil: none yet
	piece   int     // in an indirect key: the piece that was used last
	staging []byte  // the staging bytes that the leaf's backing has offered last, to give back; nil: none
}

// open opens a region that was found by a key for an access to n bytes, unless one of the
// bits of shut is set. It returns their place in it, or a fault.
func (p *place) open(r *Region, key uint32, addr, n uint64, acc ib.Access, who Actor, shut uint64) (off uint64, f Fault) {
	off, leaf, kind := r.open(key, addr, n, acc, who, shut)
	if kind != FaultNone {
		return 0, shutFault(leaf, kind, key, addr, n)
	}
	p.region, p.leaf = r, leaf
	return off, Fault{}
}

// run returns the bytes at off of the open region, at most n of them, and where in the
// leaf they lie.
func (p *place) run(off, n uint64, acc ib.Access) (b []byte, at uint64, f Fault) {
	if p.staging != nil {
		p.giveStaging()
	}
	var kind FaultKind
	if m := p.region.mkey; m == nil {
		if p.leaf.byEngine.Load() {
			return nil, 0, p.byEngine(off, n)
		}
		b, kind = p.leaf.backing.Run(off, n, acc)
		at = off
	} else {
		piece, in, left := m.layout.bottom(off, &p.piece)
		at = in
		if piece.region != p.leaf {
			if f = p.step(piece.region, off, n); !f.OK() {
				return nil, 0, f
			}
		}
		n = min(n, left)
		if piece.flat != nil {
			return piece.flat[at:][:n], at, Fault{}
		}
		if p.leaf.byEngine.Load() {
			return nil, 0, p.byEngine(off, n)
		}
		b, kind = p.leaf.backing.Run(at, n, acc)
	}
	if kind != FaultNone {
		return nil, 0, p.fault(kind, off, n, acc)
	}
	if p.leaf.staged {
		p.staging = b
	}
	return b, at, Fault{}
}

// flat is run for an indirect key whose piece at off lies in the leaf in use and has its bytes
// in the layout already, as most pieces do where there are many. It returns nil for others.
func (p *place) flat(off, n uint64) (b []byte, at uint64) {
	m := p.region.mkey
	if m == nil || p.staging != nil {
		return nil, 0
	}
	piece, at, left := m.layout.bottom(off, &p.piece)
	if piece.flat == nil || piece.region != p.leaf {
		return nil, 0
	}
	return piece.flat[at:][:min(n, left)], at
}

// byEngine is the fault of an access to memory that the CPU does not address.
func (p *place) byEngine(off, n uint64) Fault {
	r := p.region
	return Fault{Kind: FaultPending, Key: r.Key(), Extent: Extent{r.iova + off - r.base, n}, wanted: stagedBytes}
}

// giveStaging gives the staging bytes back to the leaf's backing.
func (p *place) giveStaging() {
	p.leaf.backing.(staged).Done(p.staging)
	p.staging = nil
}

// step goes on to another leaf, for n bytes at off of the indirect key.
func (p *place) step(leaf *Region, off, n uint64) Fault { // whose staging was given back by run
	if p.leaf != nil {
		p.leaf.leave()
		p.leaf = nil
	}
	if kind := leaf.enter(shutToBytes); kind != FaultNone {
		r := p.region
		return shutFault(leaf, kind, r.Key(), r.iova+off, n)
	}
	p.leaf = leaf
	return Fault{}
}

// fault completes a fault that the leaf's backing has found at off.
func (p *place) fault(kind FaultKind, off, n uint64, acc ib.Access) Fault {
	changing := kind == FaultBrief
	if changing {
		kind = FaultPending
	}
	f := p.region.fault(kind, off, n, acc)
	if f.wanted != nil {
		// Only a paged backing without staging bytes waits for storage.
		_, fetches := p.leaf.backing.(paged)
		f.wanted.brief = changing || !fetches || p.leaf.staged
	}
	return f
}

// close closes the sections that are open.
func (p *place) close() {
	if p.staging != nil {
		p.giveStaging()
	}
	if p.leaf != nil && p.leaf != p.region {
		p.leaf.leave()
	}
	if p.region != nil {
		p.region.leave()
	}
	p.region, p.leaf = nil, nil
}
