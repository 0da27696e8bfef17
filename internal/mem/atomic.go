package mem

import "github.com/verbena-rdma/verbena/ib"

// AtomicOp is what an atomic request does to 8 bytes.
type AtomicOp uint8

const (
	CmpSwap  AtomicOp = iota + 1 // store swapAdd if the value equals compare
	FetchAdd                     // add swapAdd
	Store                        // store swapAdd: an ATOMIC WRITE, which needs the right to write
)

// Atomic changes 8 bytes in one step and returns what they were before, as a
// number in the byte order of this machine. It uses the CPU's own atomic
// instructions, so it is atomic towards programs that do the same
// (ATOMIC_GLOB).
//
// The bytes must be aligned both by the address in the request (IBA 9.4.5) and
// where they really lie, because an atomic instruction across two cache lines
// would stop all cores, or kill the program where the kernel forbids it.
func Atomic(t *Table, who Actor, key uint32, addr uint64, op AtomicOp, compare, swapAdd uint64) (orig uint64, f Fault) {
	acc := ib.AccessRemoteAtomic
	if op == Store {
		acc = ib.AccessRemoteWrite // an ATOMIC WRITE does not return what was there
	}
	r := t.Lookup(key)
	if r == nil {
		return 0, Fault{Kind: FaultKey, Key: key, Extent: Extent{addr, 8}}
	}
	var p place
	off, f := p.open(r, key, addr, 8, acc, who, shutToBytes)
	if !f.OK() {
		return 0, f
	}
	defer p.close()
	for times := 1; ; times++ {
		if orig, f, ok := p.byBacking(off, addr, acc, op, compare, swapAdd); ok {
			return orig, f
		}
		b, at, f := p.word(off, acc)
		if !f.OK() {
			return 0, f
		}
		if addr%8 != 0 || len(b) < 8 || !aligned(b) {
			return 0, r.fault(FaultAlign, off, 8, acc)
		}
		in, known := bracket(8, at, mapped{})
		if !known {
			if times < maxGone {
				continue
			}
			return 0, p.fault(FaultPending, off, 8, acc)
		}
		orig, ok := swapOrAdd(b, op, compare, swapAdd)
		if in != nil {
			in.Leave(at.host.shard)
		}
		if ok {
			return orig, Fault{}
		}
		if f := r.gone(off, 8, acc, times); !f.OK() {
			return 0, f
		}
	}
}

// changer is a staged Backing that changes 8 bytes by itself.
type changer interface {
	Atomic(off uint64, op AtomicOp, compare, swapAdd uint64) (orig uint64, kind FaultKind)
}

// byBacking has the backing change 8 bytes, if it is a changer; otherwise ok is false.
func (p *place) byBacking(off, addr uint64, acc ib.Access, op AtomicOp, compare, swapAdd uint64) (orig uint64, f Fault, ok bool) {
	if p.leaf != nil && !p.leaf.staged {
		return 0, Fault{}, false
	}
	b, in, f := p.run(off, 8, acc) // which finds the leaf
	if !f.OK() {
		return 0, f, true
	}
	c, ok := p.leaf.backing.(changer)
	if !ok {
		return 0, Fault{}, false
	}
	if addr%8 != 0 || len(b) < 8 {
		return 0, p.region.fault(FaultAlign, off, 8, acc), true
	}
	orig, kind := c.Atomic(in, op, compare, swapAdd)
	if kind != FaultNone {
		return 0, p.fault(kind, off, 8, acc), true
	}
	return orig, Fault{}, true
}

// word returns 8 bytes at an address of this process, and their place if the program may
// remap them. A staged backing has them at an address only if it is addressed.
func (p *place) word(off uint64, acc ib.Access) (b []byte, at mapped, f Fault) {
	b, in, f := p.run(off, 8, acc)
	if !f.OK() {
		return nil, mapped{}, f
	}
	at = mapped{p.leaf.pinned, in}
	if !p.leaf.staged {
		return b, at, Fault{}
	}
	where, ok := p.leaf.backing.(addressed)
	if !ok {
		return nil, mapped{}, p.region.fault(FaultAccess, off, 8, acc)
	}
	var kind FaultKind
	if b, at.host, kind = where.InPlace(in, 8); kind != FaultNone {
		return nil, mapped{}, p.fault(kind, off, 8, acc)
	}
	return b, at, Fault{}
}
