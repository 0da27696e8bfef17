package mem

import "fmt"

var faultNames = [numFaultKinds]string{
	FaultNone:             "no fault",
	FaultKey:              "no such key",
	FaultDead:             "region closed or invalidated",
	FaultDomain:           "region of another protection domain or queue pair",
	FaultAccess:           "right not granted",
	FaultBounds:           "out of bounds",
	FaultAlign:            "atomic not aligned",
	FaultStale:            "registered memory is gone",
	FaultNotInvalidatable: "key cannot be invalidated",
	FaultStorage:          "storage failed",
	FaultUnmapped:         "nothing is mapped there, or not for this access",
	FaultPending:          "the bytes have to be fetched first",
	FaultWindow:           "window cannot be bound like this",
	FaultNotFree:          "indirect key is not free",
	FaultLayout:           "indirect key cannot be made like this",
	FaultDepth:            "too many indirect keys on each other",
	FaultRevoked:          "the memory's owner has taken it away",
	FaultTimeout:          "what the request waits for has not come about in time",
}

// String describes the kind.
func (k FaultKind) String() string {
	if int(k) < len(faultNames) {
		return faultNames[k]
	}
	return fmt.Sprintf("FaultKind(%d)", k)
}

// String describes the fault.
func (f Fault) String() string {
	if f.OK() {
		return f.Kind.String()
	}
	return fmt.Sprintf("%v: key %#08x, %d bytes at %#x", f.Kind, f.Key, f.Len, f.Addr)
}

// Await waits until an access that ended in FaultPending may succeed: until its bytes are
// fetched, pending changes of mappings are applied, or the region is suspended no more. That
// may take as long as storage takes, or the caller of Suspend: the caller of Await holds no
// lock. It returns a fault if bytes could not be fetched. If it returns none, the access can
// be tried again, and may fault again.
func (f Fault) Await() Fault {
	if f.Kind != FaultPending || f.wanted == nil {
		return Fault{} // nothing to wait for: the next access returns the fault
	}
	w := f.wanted
	if c := f.Suspended(); c != nil {
		<-c
	}
	if w.region == nil {
		return Fault{}
	}
	theSpace.applyChanges()
	if w.region.enter(shutToLooks) != FaultNone {
		return Fault{}
	}
	p, ok := w.region.backing.(paged)
	w.region.leave()
	if !ok {
		return Fault{}
	}
	f.Kind = p.Await(w.off, f.Len, w.acc)
	return f.orNone()
}

// Owner returns what Await waits for: the owner of the memory, which several regions may have
// (Owned), or else the region. It returns nil if Await does not wait for such a one.
func (f Fault) Owner() (owner any, owned bool) {
	w := f.wanted
	if f.Kind != FaultPending || w == nil || w.region == nil || w.region.enter(shutToLooks) != FaultNone {
		return nil, false
	}
	defer w.region.leave()
	if o, ok := w.region.backing.(Owned); ok {
		return o.Owner(), true
	}
	return w.region, false
}

// WaitFault returns the fault of a request that waits until a channel is closed.
func WaitFault(c <-chan struct{}) Fault {
	return Fault{Kind: FaultPending, wanted: &wanted{left: c, brief: true}}
}

// Suspended returns a channel that is closed when the region is suspended no more, or when
// another process accesses the memory no more, if that is what Await waits for; nil if not.
func (f Fault) Suspended() <-chan struct{} {
	switch w := f.wanted; {
	case f.Kind != FaultPending || w == nil:
		return nil
	case w.shut != nil:
		return w.shut.Reopened()
	default:
		return w.left
	}
}

// Brief reports whether Await does not wait for storage, as far as is known: the bytes are out
// of reach for a moment only.
func (f Fault) Brief() bool { return f.Kind == FaultPending && f.wanted != nil && f.wanted.brief }

// Ahead returns the fault with a length of at least n bytes, within the region, for Await to
// fetch.
func (f Fault) Ahead(n uint64) Fault {
	w := f.wanted
	if f.Kind != FaultPending || w == nil || w.region == nil {
		return f
	}
	// Inside a section, since re-registration may change the region.
	if r := w.region; r.enter(shutToLooks) == FaultNone {
		f.Len = max(f.Len, min(n, r.length-min(w.off-r.base, r.length)))
		r.leave()
	}
	return f
}

// orNone returns the zero value for a fault whose kind is FaultNone, since callers compare
// with that.
func (f Fault) orNone() Fault {
	if f.OK() {
		return Fault{}
	}
	return f
}

var kindNames = [NumKinds]string{KindRaw: "raw", KindPinned: "pinned", KindOnDemand: "on-demand", KindImplicit: "implicit", KindDevice: "device", KindIndirect: "indirect", KindImported: "imported", KindDMABuf: "dmabuf", KindPeer: "peer", KindGPU: "gpu"}

// String names the kind as counters do.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", k)
}

var sideNames = [...]string{"neither", Dst: "target", Src: "source"}

// String names the side.
func (s Side) String() string {
	if int(s) < len(sideNames) {
		return sideNames[s]
	}
	return fmt.Sprintf("Side(%d)", s)
}
