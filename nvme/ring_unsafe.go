package nvme

// Completion queues are memory that a controller writes and a host polls. The dword with the phase bit makes the
// others valid, so it is stored last and loaded first, each as one access.

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// Publish writes an entry of a completion queue that a host may be polling: its phase bit last.
func (c *Completion) Publish(b *[16]byte) {
	p := dword3(b)
	if p == nil {
		c.Put(b)
		return
	}
	le.PutUint64(b[:], c.Result)
	le.PutUint32(b[8:], uint32(c.SQHead)|uint32(c.SQID)<<16)
	var last [4]byte
	le.PutUint32(last[:], c.last())
	atomic.StoreUint32(p, nativeUint32(last))
}

// PollCompletion reads an entry of a completion queue if its phase bit is the one that the host waits for.
func PollCompletion(b *[16]byte, phase bool) (Completion, bool) {
	p := dword3(b)
	if p == nil {
		c := ParseCompletion(b)
		return c, c.Phase == phase
	}
	last := nativeBytes(atomic.LoadUint32(p))
	if last[2]&1 != 0 != phase {
		return Completion{}, false
	}
	return ParseCompletion(b), true
}

// dword3 returns the last dword of an entry, or nil if it is misaligned: queues begin at pages, so that is memory
// which nobody else polls.
//
// Sound: the pointer is into the array, which outlives the access, and aligned for its type.
func dword3(b *[16]byte) *uint32 {
	p := unsafe.Pointer(&b[12])
	if uintptr(p)&3 != 0 {
		return nil
	}
	return (*uint32)(p)
}

func nativeUint32(b [4]byte) uint32 { return binary.NativeEndian.Uint32(b[:]) }

func nativeBytes(v uint32) (b [4]byte) {
	binary.NativeEndian.PutUint32(b[:], v)
	return b
}
