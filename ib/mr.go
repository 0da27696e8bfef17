package ib

import "fmt"

// MWType is the type of a memory window. The numbers are those of ibv_mw_type.
type MWType uint8

const (
	// MWType1 is bound by a verb and gets a new rkey each time. It serves all
	// queue pairs of its protection domain.
	MWType1 MWType = 1
	// MWType2 is bound by a work request, with an rkey whose low 8 bits the
	// program chooses, and invalidated by one. It serves only the queue pair that
	// it was bound on (the specification calls that type 2B).
	MWType2 MWType = 2
)

var mwTypeNames = [...]string{MWType1: "type 1", MWType2: "type 2"}

// String returns "type 1" or "type 2".
func (t MWType) String() string { return nameOf(mwTypeNames[:], int(t), "MWType") }

// MWBind is what a memory window is bound to.
type MWBind struct {
	MW     uint32 // the window: any rkey that it has had
	RKey   uint32 // type 2: the rkey that it is to have; only the low 8 bits count
	LKey   uint32 // the region, which must grant AccessMWBind
	Addr   uint64 // the first byte, as requests to the region name it
	Length uint64 // bytes; 0 frees a type 1 window
	Access Access // remote rights, and for type 2 AccessZeroBased
}

// ReregState is what a region is after a re-registration that failed.
type ReregState uint8

const (
	ReregOldValid ReregState = iota + 1 // nothing has changed: the old keys work
	ReregNewValid                       // it is changed as asked for: only the new keys work
	ReregUnusable                       // no key works
)

var reregStateNames = [...]string{ReregOldValid: "the old region is still valid",
	ReregNewValid: "the new region is valid", ReregUnusable: "the region is unusable"}

// String describes the state.
func (s ReregState) String() string { return nameOf(reregStateNames[:], int(s), "ReregState") }

// ReregError is the error of a re-registration that fails. The region can be closed
// in every state.
type ReregError struct {
	State ReregState
	Err   error // an *OpError
}

func (e *ReregError) Error() string { return fmt.Sprintf("%v (%v)", e.Err, e.State) }

// Unwrap returns the cause, which wraps an errno.
func (e *ReregError) Unwrap() error { return e.Err }
