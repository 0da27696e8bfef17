// Package perf measures bandwidth and latency between two devices, in one
// process, in two, or on two hosts. It is an ordinary user of package verbs.
//
// One side is the initiator: it decides what is measured and times it. The
// other is the target: it follows the initiator's messages on a side channel, and
// answers messages on the devices. A measurement, top-down:
//
//  1. params.go: what to measure; both sides validate it
//  2. side.go: the side channel, lines of JSON in both directions
//  3. rig.go: what one side has, and how the two sides connect; thread.go: buffers,
//     queue pairs and completion queue of each of its threads; memory.go, window.go, indirect.go, dmabuf.go: the kinds of memory that
//     buffers are made of
//  4. initiator.go: the phases: connect, warm up, measure, check, report
//  5. bandwidth.go, latency.go: the initiator's loops, which allocate nothing
//  6. target.go: the other side's phases and loops
//  7. pattern.go, check.go: the data, and the comparison at the end
//  8. result.go: the figures
//
// local.go runs both sides in one process, child.go starts a target in another.
package perf

import (
	"fmt"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// Op is an operation that can be measured.
type Op string

const (
	OpWrite    Op = "write"
	OpWriteImm Op = "write-imm"
	OpRead     Op = "read"
	OpSend     Op = "send"
	OpAtomic   Op = "atomic"
)

// opInfo is what the loops use of an operation.
type opInfo struct {
	code     verbs.Opcode
	receives bool // consumes a receive of the target, which has to poll for it
	returns  bool // data flows from the target to the initiator
	inline   bool // the data may be inline
}

var opTable = map[Op]opInfo{
	OpWrite:    {code: verbs.OpRDMAWrite, inline: true},
	OpWriteImm: {code: verbs.OpRDMAWriteImm, inline: true, receives: true},
	OpRead:     {code: verbs.OpRDMARead, returns: true},
	OpSend:     {code: verbs.OpSend, inline: true, receives: true},
	OpAtomic:   {code: verbs.OpAtomicFetchAdd, returns: true},
}

// Poll is how a receiver of a latency measurement notices a message.
type Poll string

const (
	// PollCQ polls the completion queue.
	PollCQ Poll = "cq"
	// PollMemory watches the last byte of the buffer, as ib_write_lat does.
	PollMemory Poll = "memory"
)

// Limits of what a peer may ask for: any host may connect to the TCP port.
const (
	maxSize    = 1 << 30
	maxQPs     = 1024
	maxThreads = 256
	maxDepth   = 1 << 15
	maxMemory  = 4 << 30 // all buffers of one side
	// slotMemory bounds the buffers of one queue pair if its messages are small:
	// messages use the slots one after the other, and all slots should fit the caches.
	slotMemory = 256 << 10
)

// Params say what is measured. Zero fields have defaults, see Complete.
type Params struct {
	Op       Op            `json:"op"`       // default OpWrite
	Size     int           `json:"size"`     // bytes; default 64 KiB, 8 for latency and atomics
	Iters    int           `json:"iters"`    // messages, or round trips; 0: run for Duration
	Duration time.Duration `json:"duration"` // default 2 s; ignored if Iters is set
	Depth    int           `json:"depth"`    // outstanding requests of a queue pair; default 64, 1 for latency
	Batch    int           `json:"batch"`    // requests of one PostSend; default by size, at most half of Depth
	Threads  int           `json:"threads"`  // posting threads of the initiator; default 1
	QPs      int           `json:"qps"`      // of all threads together; default: one for each thread
	MTU      int           `json:"mtu"`      // bytes; 0: the largest that both ports can
	Mem      string        `json:"mem"`      // default "pinned"
	Link     string        `json:"link"`     // what the devices were opened with, for the result
	Lat      bool          `json:"lat"`      // latency instead of bandwidth
	Poll     Poll          `json:"poll"`     // default PollCQ, for latency of writes PollMemory
	Inline   bool          `json:"inline"`
	Check    bool          `json:"check"` // compare the data at the end

	// BusyTarget makes the target of one-sided operations poll its completion
	// queue all the time, though nothing completes there, instead of leaving
	// progress to the device. In latency measurements by completion queue it always
	// does.
	BusyTarget bool `json:"busy_target"`
}

// Complete fills in defaults and checks the rest. The error begins with the field's name
// in JSON.
func (p *Params) Complete() error {
	if p.Op == "" {
		p.Op = OpWrite
	}
	if p.Size == 0 {
		switch {
		case p.Lat || p.Op == OpAtomic:
			p.Size = 8
		default:
			p.Size = 64 << 10
		}
	}
	if p.Iters == 0 && p.Duration == 0 {
		p.Duration = 2 * time.Second
	}
	if p.Depth == 0 {
		p.Depth = 64
		if p.Lat {
			p.Depth = 1
		}
	}
	if p.Threads == 0 {
		p.Threads = 1
	}
	if p.QPs == 0 {
		p.QPs = p.Threads
	}
	if p.Mem == "" {
		p.Mem = memKinds[0].name
	}
	if p.Poll == "" {
		p.Poll = PollCQ
		if p.Lat && p.Op == OpWrite {
			p.Poll = PollMemory
		}
	}
	if err := p.validate(); err != nil {
		return err
	}
	if p.Batch == 0 {
		// As many as fit 64 KiB, but at most half of the depth: the queue must not
		// run dry while one batch is being completed.
		p.Batch = 1
		for p.Batch < 16 && p.Batch*2*p.Size <= 64<<10 && p.Batch*2 <= p.Depth/2 {
			p.Batch *= 2
		}
	}
	return nil
}

func (p *Params) validate() error {
	op, known := opTable[p.Op]
	switch {
	case !known:
		return fmt.Errorf("op %q: want one of write, write-imm, read, send, atomic", p.Op)
	case p.Size < 1 || p.Size > maxSize:
		return fmt.Errorf("size %d: want 1 to 1G", p.Size)
	case p.Op == OpAtomic && p.Size != 8:
		return fmt.Errorf("size %d: an atomic is 8 bytes", p.Size)
	case p.Iters < 0:
		return fmt.Errorf("iters %d: want 0 or more", p.Iters)
	case p.Iters == 0 && p.Duration <= 0:
		return fmt.Errorf("duration %v: want more than 0", p.Duration)
	case p.Depth < 1 || p.Depth > maxDepth:
		return fmt.Errorf("depth %d: want 1 to %d", p.Depth, maxDepth)
	case p.Threads < 1 || p.Threads > maxThreads:
		return fmt.Errorf("threads %d: want 1 to %d", p.Threads, maxThreads)
	case p.Lat && p.Threads != 1:
		return fmt.Errorf("threads %d: latency is measured by one thread", p.Threads)
	case p.QPs < 1 || p.QPs > maxQPs:
		return fmt.Errorf("qps %d: want 1 to %d", p.QPs, maxQPs)
	case p.QPs < p.Threads:
		return fmt.Errorf("qps %d: want at least one for each of the %d threads", p.QPs, p.Threads)
	case p.Iters > 0 && p.Iters < p.Threads:
		return fmt.Errorf("iters %d: want at least one for each of the %d threads", p.Iters, p.Threads)
	case p.Batch < 0 || p.Batch > p.Depth:
		return fmt.Errorf("batch %d: want 1 to the depth, %d", p.Batch, p.Depth)
	case p.Batch&(p.Batch-1) != 0:
		return fmt.Errorf("batch %d: want a power of two", p.Batch)
	case p.MTU != 0 && mtuOf(p.MTU) == 0:
		return fmt.Errorf("mtu %d: want 256, 512, 1024, 2048 or 4096", p.MTU)
	case memKindOf(p.Mem) == nil:
		return fmt.Errorf("mem %q: want one of %s", p.Mem, strings.Join(MemKinds(), ", "))
	case p.Poll != PollCQ && p.Poll != PollMemory:
		return fmt.Errorf("poll %q: want cq or memory", p.Poll)
	case p.Poll == PollMemory && (p.Op != OpWrite || !p.Lat):
		return fmt.Errorf("poll memory: needs op write and lat, a receiver can watch nothing else")
	case p.Inline && !op.inline:
		return fmt.Errorf("inline: %s carries no data of the initiator", p.Op)
	case p.Lat && p.QPs != 1:
		return fmt.Errorf("qps %d: latency is measured on one queue pair", p.QPs)
	case p.Lat && p.Depth != 1:
		return fmt.Errorf("depth %d: latency is measured with one message under way", p.Depth)
	}
	if total := p.stride() * p.slots(); total > maxMemory/2/p.QPs {
		return fmt.Errorf("size %d: with %d queue pairs the buffers take more than 4G", p.Size, p.QPs)
	}
	return nil
}

// share returns how many of n a thread gets, and how many the threads before it have.
// Shares differ by at most one.
func (p *Params) share(n, thread int) (count, before int) {
	each, rest := n/p.Threads, n%p.Threads
	before = thread*each + min(thread, rest)
	if thread < rest {
		each++
	}
	return each, before
}

// pingPong reports whether the target answers every message with one.
func (p *Params) pingPong() bool {
	return p.Lat && !opTable[p.Op].returns && (p.Poll == PollMemory || opTable[p.Op].receives)
}

// slots returns how many messages a queue pair's buffer holds, a power of two.
// Ping-pong has one message at a time and needs one slot.
func (p *Params) slots() int {
	n := 1
	for !p.Lat && p.Op != OpAtomic && n*2 <= p.Depth && n*2*p.stride() <= slotMemory {
		n *= 2
	}
	return n
}

// stride returns the distance of slots: a multiple of a cache line.
func (p *Params) stride() int { return (p.Size + 63) &^ 63 }

// recvDepth returns how many receives a side keeps posted, at most most. They are so many
// that the target may fall behind by several polls before the initiator gets an RNR NAK.
func (p *Params) recvDepth(most int) int {
	switch {
	case !opTable[p.Op].receives:
		return 1 // a queue cannot be smaller; nothing is posted to it
	case p.Lat:
		return 16
	default:
		return min(max(4*p.Depth, 256), most)
	}
}

// mtuOf returns the MTU of a number of bytes, 0 if there is none.
func mtuOf(bytes int) verbs.MTU {
	for m := verbs.MTU256; m <= verbs.MTU4096; m++ {
		if m.Bytes() == bytes {
			return m
		}
	}
	return 0
}
