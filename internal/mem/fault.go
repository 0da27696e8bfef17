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

// Await fetches the bytes that an access could not wait for (FaultPending),
// which may take as long as storage does: call it with no lock held. It returns
// what is still in the way, if anything; then the access can be tried again,
// and may fault again.
func (f Fault) Await() Fault {
	w := f.wanted
	if f.Kind != FaultPending || w == nil || !w.region.enter() {
		return Fault{} // nothing to wait for: the next access says what is wrong
	}
	p, ok := w.region.backing.(paged)
	w.region.leave()
	if !ok {
		return Fault{}
	}
	f.Kind = p.Await(w.off, f.Len, w.acc)
	return f.orNone()
}

// Ahead makes Await fetch n bytes if those are more, as far as the region goes.
func (f Fault) Ahead(n uint64) Fault {
	// A section, since the region may become another.
	if w := f.wanted; f.Kind == FaultPending && w != nil && w.region.enter() {
		r := w.region
		f.Len = max(f.Len, min(n, r.length-min(w.off-r.base, r.length)))
		r.leave()
	}
	return f
}

// orNone turns a fault whose kind is none into the zero value, which faults
// are compared with.
func (f Fault) orNone() Fault {
	if f.OK() {
		return Fault{}
	}
	return f
}

var kindNames = [NumKinds]string{KindRaw: "raw", KindPinned: "pinned", KindOnDemand: "on-demand", KindImplicit: "implicit", KindDevice: "device", KindIndirect: "indirect", KindForeign: "foreign"}

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
