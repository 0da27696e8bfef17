package mem

import (
	"math"

	"github.com/verbena-rdma/verbena/ib"
)

// Null is memory that is not there: what is read from it is zero, what is written
// to it is discarded. It is as long as can be. See ibv_alloc_null_mr(3).
type Null struct {
	sink []byte // takes what is written; not shared with other null regions, and never read
}

// nullRun is how many bytes it offers at a time.
const nullRun = 64 << 10

var zeros = make([]byte, nullRun) // never written

// NewNull makes memory that is not there.
func NewNull() *Null { return &Null{sink: make([]byte, nullRun)} }

// Kind returns KindRaw.
func (n *Null) Kind() Kind { return KindRaw }

// Len returns the largest length there is.
func (n *Null) Len() uint64 { return math.MaxUint64 }

// NeverFaults returns true: the bytes are the device's own.
func (n *Null) NeverFaults() bool { return true }

// Run returns zeros to read, or a place to write to.
func (n *Null) Run(_, length uint64, acc ib.Access) ([]byte, FaultKind) {
	b := zeros
	if acc&writing != 0 {
		b = n.sink
	}
	return b[:min(length, nullRun)], FaultNone
}

// Close has nothing to give up.
func (n *Null) Close() error { return nil }
