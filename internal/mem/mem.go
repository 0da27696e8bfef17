// Package mem turns keys into bytes: key table → rights → backing → bytes.
//
// The way of an address, top-down:
//
//  1. table.go: a key's index is unpermuted to a slot; the slot holds a Region
//     or nothing. No lock, no hash. (A Memo saves the lookup to a caller that uses
//     one key again and again.)
//  2. region.go: an access opens a read section on the region, which checks the state,
//     the domain, the rights and the bounds once, and closes it. The closing of a region
//     marks it dead, then waits for the sections that are open; suspend.go shuts it
//     for a moment. rereg.go changes what a region is; window.go has keys that open a
//     part of one, mkey.go keys that are made of several: place.go leads through both
//     to the region whose bytes they are.
//  3. A Backing finds the bytes. There is a file for each kind of memory: host.go,
//     held.go, ondemand.go, device.go, imported.go.
//  4. copy.go: one loop moves bytes between any two lists of any two kinds.
//     gather.go hands them to the kernel instead, atomic.go changes 8 of them,
//     flush.go makes them visible to all, or persistent. An engine moves bytes that
//     the CPU does not address (engine.go, transfer.go).
//
// Nothing here depends on queue pairs or packets.
package mem

import "github.com/verbena-rdma/verbena/ib"

// writing are the rights of accesses that write: a backing that is asked for bytes
// with any of them must be prepared for a store.
const writing = ib.AccessLocalWrite | ib.AccessRemoteWrite | ib.AccessRemoteAtomic

// Actor is the queue pair on whose behalf memory is accessed.
type Actor struct {
	PD  uint32 // the protection domain of the queue pair
	QPN uint32 // the queue pair: some keys are good for one alone
}

// Kind is a kind of memory, for counters and for people.
type Kind uint8

const (
	KindRaw      Kind = iota // bytes of the device's own: packets, inline data, null memory
	KindPinned               // host memory as it was when registered
	KindOnDemand             // host memory as it is
	KindImplicit             // all host memory as it is
	KindDevice               // memory of the device
	KindIndirect             // made of other regions
	KindImported             // memory that another process has registered and shares
	KindDMABuf               // a buffer of another device, by its dma-buf
	KindPeer                 // memory of another device, by its PeerDirect client
	KindGPU                  // memory of a GPU, which its engine alone reaches
	NumKinds
)

// Backing is what a region's bytes are made of. A new kind of memory is one
// file that implements it and passes the conformance suite.
//
// Run is called inside a read section: concurrently with itself, never after
// Close. A backing whose bytes cannot be gone, whatever the application does, may
// have a method NeverFaults() bool that returns true: then the copy loop does not
// guard against faults.
type Backing interface {
	Kind() Kind
	// Len returns the number of bytes; no region on it is longer.
	Len() uint64
	// Run returns the bytes at off: at least one and at most n of them,
	// contiguous in this process and good for acc until the section closes;
	// or why not. The caller has checked off+n against the region's length.
	Run(off, n uint64, acc ib.Access) ([]byte, FaultKind)
	// Close gives up what the backing holds. It is called once, when no
	// section is open and none will be.
	Close() error
}

// paged is a Backing whose bytes come and go. Its Run may answer FaultPending.
type paged interface {
	// Gone is called when bytes which Run has offered were not there when they
	// were accessed, at off; n is how many were left from there. If it returns
	// FaultNone they are there again. It is called inside the read section.
	Gone(off, n uint64, acc ib.Access) FaultKind
	// Await fetches bytes. It may block for as long as storage takes, and is
	// called outside any read section: perhaps after Close, when it must do no
	// harm.
	Await(off, n uint64, acc ib.Access) FaultKind
}

// Movable is a Backing whose owner may move the bytes, or take them away. It then calls the
// region's Suspend and Resume, or Revoke.
type Movable interface {
	// Bind is called with the region that stands on the backing, before any access.
	Bind(*Region)
}

// Owned is a Backing whose Await waits for the owner of the memory, which may have lent it to
// several regions, and may not answer.
type Owned interface {
	// Owner returns the owner, as a key that can be compared.
	Owner() any
}

// Placed is a Movable whose bytes may lie in a memory file that other processes can map. The
// owner gives the file up when it moves the bytes: what a process writes there late is lost, and
// harms nobody.
type Placed interface {
	// Segment returns the number of the segment that the bytes b lie in, which Run has returned,
	// and where in it; 0 if they lie in none. With write, other processes may be allowed to write
	// to the segment. It is called inside the read section that Run was called in.
	Segment(b []byte, write bool) (id, off uint64)
}

// staged is a Backing of bytes that the CPU does not reach where they are: what Run
// offers are copies, staging bytes. Run fills them for an access that reads; Store brings
// what was written to them to where it belongs. off is that of b's first byte; last is set
// if a message ends with b. No caller keeps such bytes, or their addresses, longer than a
// copy takes.
//
// A type that implements it may have a method Staged() bool that returns false for a backing
// whose bytes the CPU does reach.
type staged interface {
	Store(off uint64, b []byte, last bool) FaultKind
	// Done takes back bytes that Run has returned, as they were returned, when they are
	// not used any more.
	Done(b []byte)
}

// isStaged reports whether the backing is a staged one.
func isStaged(b Backing) bool {
	_, ok := b.(staged)
	if is, says := b.(interface{ Staged() bool }); says && !is.Staged() {
		return false
	}
	return ok
}

// FaultKind is why memory could not be accessed. The zero value means that
// it could.
type FaultKind uint8

const (
	FaultNone             FaultKind = iota
	FaultKey                        // no region has this key
	FaultDead                       // the region is being closed or was invalidated
	FaultDomain                     // the region belongs to another protection domain, or queue pair
	FaultAccess                     // the region does not grant the right
	FaultBounds                     // the range is not inside the region
	FaultAlign                      // an atomic that is not 8-byte aligned
	FaultStale                      // what was registered is not there any more
	FaultNotInvalidatable           // the key's kind cannot be invalidated, or windows are bound to the region
	FaultStorage                    // the storage behind the memory failed
	FaultWindow                     // the window cannot be bound like this: its type forbids it, or it is bound
	FaultUnmapped                   // on demand: nothing is mapped there, or not for this access
	FaultPending                    // the bytes cannot be had at once: Fault.Await
	FaultNotFree                    // the indirect key is configured already
	FaultLayout                     // an indirect key cannot be made like this: no bytes, too many pieces or bytes
	FaultDepth                      // too many indirect keys would stand on each other
	FaultRevoked                    // the owner of the memory has taken it away, for good
	FaultTimeout                    // what a request waits for has not come about in time
	numFaultKinds

	// FaultBrief is what Run returns instead of FaultPending if the access does not wait for
	// storage: only for pending changes of mappings, or for memory that moves. place.fault
	// makes FaultPending of it.
	FaultBrief FaultKind = 0xff
)

// Fault is why an access failed. It is a value: compare with Fault{} or call OK.
// All that moves bytes returns one, so it is no longer than what the compiler keeps in
// registers: four words and four fields.
type Fault struct {
	Kind FaultKind
	Key  uint32
	Extent
	wanted *wanted // FaultPending: what Await waits for
}

// Extent is a range of addresses.
type Extent struct{ Addr, Len uint64 }

// wanted is what a FaultPending waits for: a region that is shut for a moment, another
// process that still accesses memory which was taken away, or the bytes at off in a region.
type wanted struct {
	shut  *Region         // nil: not that
	left  <-chan struct{} // closed when the other process accesses it no more; nil: not that
	brief bool            // no storage is waited for

	acc    ib.Access
	region *Region
	off    uint64
}

// OK reports that there is no fault.
func (f Fault) OK() bool { return f.Kind == FaultNone }

// List is memory by reference: the bytes of a message, in order. Either SGEs
// in a Table, checked for an Actor and an Access, or Raw bytes.
type List struct {
	Table    *Table
	Actor    Actor
	Access   ib.Access // what every piece must grant; 0 is local read
	SGEs     []ib.SGE
	Raw      [][]byte // used when Table is nil
	MayFault bool     // Raw may be gone when it is accessed
	// Raw is staging bytes: copies to them are not counted, those from them as from rawKind.
	uncounted bool
	rawKind   Kind
	Off       uint64 // bytes of the pieces to skip first
	Memo      *Memo  // if set, where a region is remembered for the next list

	// Ref, if set, is payload by reference: the first RefLen bytes of the list. Raw's one
	// piece follows them. Only a source has it.
	Ref    Reference
	RefLen uint64
}

// Memo remembers the region that a list has last led to: the next list with the Memo looks a
// region up only if it has another key, or that region is closed.
type Memo struct{ region *Region }

// Side names the list of a Copy that failed.
type Side uint8

const (
	Dst Side = iota + 1
	Src
)
