package mem

// Memory that the CPU does not address: a GPU's, another process's. Only an engine of its
// owner reaches it, and takes its time. So a caller that must not wait does not touch such
// memory: the copy loop ends in a fault for which Fault.Staged is true, and a caller that
// may wait then moves the bytes by a Transfer (transfer.go), which makes operations of them:
//
//  1. Begin hands an operation to the engine, and returns at once.
//  2. The engine does it, in the order of its stream, beside operations of other streams.
//  3. The engine calls End when it is over.

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Engine is a Backing of bytes that the CPU does not address. Its Run is never called.
type Engine interface {
	Backing
	// Begin begins an operation. It neither waits nor calls End, which the engine calls
	// once, from a goroutine of its own. Until then the region's section stays open, and
	// Op.Bytes are the engine's.
	Begin(op *Op)
	// Owner returns what is the same, by ==, for all backings that one engine reaches: it
	// copies between them.
	Owner() any
}

// OpKind is what an operation does.
type OpKind uint8

const (
	OpLoad   OpKind = iota + 1 // from the memory to Bytes
	OpStore                    // from Bytes to the memory
	OpCopy                     // from another backing of the same owner to the memory
	OpAtomic                   // changes 8 aligned bytes in one step
)

// Op is an operation of an engine. Operations of one stream take effect in the order in
// which they were begun: what one has stored, the next one loads, and a program that watches
// the memory sees the first before the second. An engine calls Dropped just before it does an
// operation. It may do several at a time as long as their effects keep that order.
type Op struct {
	Kind   OpKind
	Stream *Stream
	Off    uint64 // where in the backing
	Bytes  []byte // OpLoad, OpStore

	// InPlace says that Bytes are the program's own, which Reaches was asked about.
	InPlace bool

	// OpCopy: where from, and how many bytes.
	From    Engine
	FromOff uint64
	N       uint64

	// Last is set if a message ends with these bytes: those in their last aligned word are
	// stored after all others.
	Last bool

	// OpAtomic: what to do; and what was there before, when it is over.
	Atomic           AtomicOp
	Compare, SwapAdd uint64
	Orig             uint64

	fault    FaultKind
	link     Link
	over     atomic.Bool
	sections [2]place // whose sections are open while the operation is under way
}

// End ends the operation: the engine calls it once, with the fault or FaultNone.
func (op *Op) End(kind FaultKind) {
	op.fault = kind
	s := op.Stream
	if kind != FaultNone {
		op.link.Fail()
	}
	for i := range op.sections {
		op.sections[i].close()
	}
	op.over.Store(true) // from here on the operation belongs to the goroutine that waits for it
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waits {
		s.waits = false
		s.wake <- struct{}{} // there is room for one, and one goroutine waits at a time
	}
}

// Dropped reports whether one before the operation in its chain has failed. Then the engine does
// not do it, and ends it with FaultDead.
func (op *Op) Dropped() bool { return op.link.Broken() }

// Unwanted reports whether the region is shut for more than a suspension: an engine that waits
// may give the operation up, so that the closing of the region does not wait for it.
func (op *Op) Unwanted() bool {
	for i := range op.sections {
		p := &op.sections[i]
		if p.region != nil && p.region.state.Load()&shutToLooks != 0 || p.leaf != nil && p.leaf.state.Load()&shutToLooks != 0 {
			return true
		}
	}
	return false
}

// wait waits until the operation is over, and returns how it has ended. It looks for a while, and then sleeps: where there
// are processors enough for longer than a GPU takes for a small copy, elsewhere for about as long as it takes to fall asleep
// and be woken.
func (op *Op) wait() FaultKind {
	var since time.Time
	for i := 0; i < opLooks || manyCPUs && time.Since(since) < opLinger; i++ {
		if op.over.Load() {
			return op.fault
		}
		if i == 0 {
			since = time.Now()
		}
		runtime.Gosched()
	}
	s := op.Stream
	for {
		s.mu.Lock()
		if op.over.Load() {
			s.mu.Unlock()
			return op.fault
		}
		if s.wake == nil {
			s.wake = make(chan struct{}, 1)
		}
		s.waits = true
		s.mu.Unlock()
		<-s.wake
	}
}

// opLooks is how often wait looks at least before it sleeps, opLinger for how long where there are processors enough.
const (
	opLooks  = 64
	opLinger = 30 * time.Microsecond
)

// manyCPUs: with few processors, one that looks for work keeps others from doing theirs.
var manyCPUs = runtime.NumCPU() >= 8

// Stream is an order of operations: each queue pair has one. The zero value is ready.
type Stream struct {
	mu     sync.Mutex // guards what follows
	states []streamState
	waits  bool          // a goroutine sleeps in wait
	wake   chan struct{} // wakes that goroutine; nil until one has slept
}

// streamState is what an engine's owner keeps for a stream.
type streamState struct {
	owner any
	state any
}

// Chain is transfers and atomics that depend on those before them: once one has failed, those
// behind it change nothing. So a program that sees a flag may rely on what was written before
// the flag.
type Chain struct {
	links  uint64        // how many have been added
	failed atomic.Uint64 // the first one that has failed, from 1 on; 0: none
}

// Link is a place in a chain. The zero value is in none: it never breaks.
type Link struct {
	chain *Chain
	at    uint64 // from 1 on
}

// Add returns the place behind all others. It is called by one goroutine at a time.
func (c *Chain) Add() Link {
	c.links++
	return Link{c, c.links}
}

// Fail breaks the chain behind the link: what is at the link has failed.
func (l Link) Fail() {
	for l.chain != nil {
		first := l.chain.failed.Load()
		if first != 0 && first <= l.at || l.chain.failed.CompareAndSwap(first, l.at) {
			return
		}
	}
}

// Broken reports whether something before the link has failed.
func (l Link) Broken() bool {
	if l.chain == nil {
		return false
	}
	first := l.chain.failed.Load()
	return first != 0 && first < l.at
}

// State returns what an owner keeps for the stream, and makes it with f if there is
// nothing yet. Stream.Close calls its method Close(), if it has one.
func (s *Stream) State(owner any, f func() any) any {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.states {
		if s.states[i].owner == owner {
			return s.states[i].state
		}
	}
	state := f()
	s.states = append(s.states, streamState{owner, state})
	return state
}

// Close gives up what owners keep for the stream. No operation is under way.
func (s *Stream) Close() {
	s.mu.Lock()
	states := s.states
	s.states = nil
	s.mu.Unlock()
	for _, e := range states {
		if c, ok := e.state.(interface{ Close() }); ok {
			c.Close()
		}
	}
}

// Staged reports whether the access has found memory that the CPU does not address: a caller
// that may wait moves the bytes with a Transfer.
func (f Fault) Staged() bool { return f.Kind == FaultPending && f.wanted == stagedBytes }

// StagedFault returns a fault for which Staged is true.
func StagedFault() Fault { return Fault{Kind: FaultPending, wanted: stagedBytes} }

// stagedBytes marks a fault for which Staged is true. It has nothing to wait for.
var stagedBytes = new(wanted)

// Owner returns the owner of the engine that moves the first n bytes of a list: nil if the CPU
// reaches some of them, if several engines do, or if they lie under an indirect key.
func (l *List) Owner(n uint64) (owner any) {
	if l.Table == nil {
		return nil
	}
	skip := l.Off
	for i := range l.SGEs {
		e := &l.SGEs[i]
		if n == 0 {
			break
		}
		if skip >= uint64(e.Length) {
			skip -= uint64(e.Length)
			continue
		}
		n -= min(n, uint64(e.Length)-skip)
		skip = 0
		o := l.Table.ownerOf(e.LKey)
		if o == nil || owner != nil && o != owner {
			return nil
		}
		owner = o
	}
	return owner
}

// Staged reports whether there may be bytes in a region that the CPU does not address.
func (t *Table) Staged(key uint32) bool {
	r := t.Lookup(key)
	return r != nil && r.byEngine.Load()
}

// ownerOf returns the owner of the engine that moves the bytes of a region, nil if none does or
// the key is indirect.
func (t *Table) ownerOf(key uint32) (owner any) {
	r := t.Lookup(key)
	if r == nil || !r.byEngine.Load() || r.enter(shutToLooks) != FaultNone {
		return nil
	}
	if e, ok := r.backing.(Engine); ok {
		owner = e.Owner()
	}
	r.leave()
	return owner
}
