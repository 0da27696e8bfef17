package driver

// A pair of queues. A command's way: submit takes a free slot, whose number is the command's CID, writes the entry and
// rings the doorbell; wait polls the completion queue until that slot has completed. Whoever waits takes all
// completions that are there, for others too.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/nvme"
)

// Why commands end without a completion.
var (
	ErrReset   = errors.New("nvme: the controller was reset")
	ErrClosed  = errors.New("nvme: the controller or the queue is closed")
	ErrGone    = errors.New("nvme: the controller is gone: its registers read as all ones")
	ErrFatal   = errors.New("nvme: the controller reports a fatal error (CSTS.CFS)")
	ErrTimeout = errors.New("nvme: no completion in time")
	ErrBroken  = errors.New("nvme: a completion of no command")
)

// givenUp reports whether a command that ended with an error may still be under way, so that the controller may use its
// memory. All other errors come after a completion, a reset or a deletion of the queue, or of a controller that is gone.
func givenUp(err error) bool {
	for _, why := range []error{ErrTimeout, ErrFatal, ErrBroken, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, why) {
			return true
		}
	}
	return false
}

const (
	sqEntry = 64
	cqEntry = 16
)

// ring is a submission queue and a completion queue of the same length.
type ring struct {
	regs     nvme.Registers
	id       uint16
	sqBell   uint32 // offsets of the doorbells
	cqBell   uint32
	entries  int
	page     int
	sgl      bool // data pointers are SGLs
	timeout  time.Duration
	sq, cq   Memory
	lists    Memory // a page for each slot: its PRP list, or the ranges of a dataset management command
	listOf   func(slot int) Memory
	maxBytes int

	mu       sync.Mutex // guards what follows, and the memory of the queues
	tail     int
	head     int // of the completion queue
	phase    bool
	requests []*Request // by CID; nil: free
	free     []uint16
	muted    bool  // the doorbell of completions is not rung: the queue may not exist any more
	refusing error // new commands are refused
	dead     error // no completion will come
}

// Request is a command under way.
type Request struct {
	ring *ring
	name string
	done bool // guarded by ring.mu, as is what follows
	cpl  nvme.Completion
	err  error // no completion will come
}

// reset makes the queues empty, after the controller has been reset or before it knows of them.
func (r *ring) reset() {
	clear(r.cq.Bytes)
	clear(r.sq.Bytes)
	r.tail, r.head, r.phase = 0, 0, true
	r.requests = make([]*Request, r.entries-1)
	r.free = r.free[:0]
	for cid := r.entries - 2; cid >= 0; cid-- {
		r.free = append(r.free, uint16(cid))
	}
	r.muted, r.refusing, r.dead = false, nil, nil
}

// release gives the memory of the queues back. The controller does not use it any more.
func (r *ring) release() {
	r.sq.Free()
	r.cq.Free()
	r.lists.Free()
}

// refuse ends the ring for new commands.
func (r *ring) refuse(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refusing == nil {
		r.refusing = why
	}
}

// mute has no doorbell rung any more. New commands are refused, so there is room for the completions of all others.
func (r *ring) mute() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pollLocked()
	r.muted = true
}

// kill ends the ring: commands that wait return why.
func (r *ring) kill(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.muted = true
	r.pollLocked()
	r.killLocked(why)
}

func (r *ring) killLocked(why error) {
	if r.dead != nil {
		return
	}
	r.dead, r.refusing = why, why
	for cid, req := range r.requests {
		if req != nil {
			req.err = why
			r.requests[cid] = nil
		}
	}
}

// refusal returns why the ring takes no new commands; nil: it does.
func (r *ring) refusal() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refusing
}

// submit is submitAt with data in memory that the program sees.
func (r *ring) submit(ctx context.Context, admin bool, cmd nvme.Command, data Memory, n int, ranges []byte) (*Request, error) {
	if n > len(data.Bytes) {
		return nil, ib.Errorf("nvme_submit", syscall.EINVAL, "%d bytes of data: the memory has %d", n, len(data.Bytes))
	}
	return r.submitAt(ctx, admin, cmd, data.Addr, n, ranges)
}

// submitAt hands a command to the controller, as soon as there is a slot. n bytes of data are moved, at an address of
// the bus. If ranges is not nil, they are the data, and the slot's own page takes them.
func (r *ring) submitAt(ctx context.Context, admin bool, cmd nvme.Command, at uint64, n int, ranges []byte) (*Request, error) {
	if n < 0 || n > r.maxBytes {
		return nil, ib.Errorf("nvme_submit", syscall.EINVAL, "%d bytes of data: a command moves %d", n, r.maxBytes)
	}
	if n > 0 && at%4 != 0 && !r.sgl {
		return nil, ib.Errorf("nvme_submit", syscall.EINVAL, "data at %#x: PRPs begin at multiples of 4", at)
	}
	req := &Request{ring: r, name: nvme.CommandName(admin, cmd.Opcode)}
	w := waiter{limit: r.timeout}
	for {
		placed, err := r.trySubmit(req, &cmd, at, n, ranges)
		if placed || err != nil {
			return req, err
		}
		if err := w.pause(ctx, r); err != nil {
			return nil, fmt.Errorf("%s: %w", req.name, err)
		}
	}
}

func (r *ring) trySubmit(req *Request, cmd *nvme.Command, at uint64, n int, ranges []byte) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pollLocked() // which may find that the ring is broken
	if r.refusing != nil {
		return false, fmt.Errorf("%s: %w", req.name, r.refusing)
	}
	if len(r.free) == 0 {
		return false, nil
	}
	cid := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.requests[cid] = req
	cmd.CID = cid
	list := r.listOf(int(cid))
	switch {
	case ranges != nil:
		copy(list.Bytes, ranges)
		cmd.SetPRP(list.Addr, 0)
	case n > 0 && r.sgl:
		cmd.SetSGL(nvme.SGL{Addr: at, Length: uint32(n), Type: nvme.SGLData})
	case n > 0:
		r.setPRP(cmd, at, n, list)
	}
	cmd.Put((*[sqEntry]byte)(r.sq.Bytes[sqEntry*r.tail:]))
	r.tail = (r.tail + 1) % r.entries
	r.regs.Write32(r.sqBell, uint32(r.tail))
	return true, nil
}

// setPRP points to n bytes at an address: by one entry, two, or a list in the slot's page.
func (r *ring) setPRP(cmd *nvme.Command, addr uint64, n int, list Memory) {
	page := uint64(r.page)
	first := page - addr%page
	if uint64(n) <= first {
		cmd.SetPRP(addr, 0)
		return
	}
	rest, next := uint64(n)-first, addr+first
	if rest <= page {
		cmd.SetPRP(addr, next)
		return
	}
	for i := uint64(0); i*page < rest; i++ {
		binary.LittleEndian.PutUint64(list.Bytes[8*i:], next+i*page)
	}
	cmd.SetPRP(addr, list.Addr)
}

// pollLocked takes the completions that are there.
func (r *ring) pollLocked() {
	if r.dead != nil {
		return
	}
	taken := false
	for {
		cpl, ok := nvme.PollCompletion((*[cqEntry]byte)(r.cq.Bytes[cqEntry*r.head:]), r.phase)
		if !ok {
			break
		}
		taken = true
		if r.head++; r.head == r.entries {
			r.head, r.phase = 0, !r.phase
		}
		if int(cpl.CID) >= len(r.requests) || r.requests[cpl.CID] == nil {
			r.killLocked(ErrBroken)
			return
		}
		req := r.requests[cpl.CID]
		req.cpl, req.done = cpl, true
		r.requests[cpl.CID] = nil
		r.free = append(r.free, cpl.CID)
	}
	if taken && !r.muted {
		r.regs.Write32(r.cqBell, uint32(r.head))
	}
}

// Wait returns the completion. Its status is the error if it is not success.
//
// Errors: nvme.Status; ErrReset, ErrClosed, ErrGone, ErrFatal, ErrTimeout; the context's.
func (q *Request) Wait(ctx context.Context) (nvme.Completion, error) {
	return q.wait(ctx, q.ring.timeout)
}

// wait is Wait with a limit of its own.
func (q *Request) wait(ctx context.Context, limit time.Duration) (nvme.Completion, error) {
	w := waiter{limit: limit}
	for {
		r := q.ring
		r.mu.Lock()
		r.pollLocked()
		done, cpl, err := q.done, q.cpl, q.err
		r.mu.Unlock()
		switch {
		case done && cpl.Status.Err() != nil:
			return cpl, fmt.Errorf("%s: %w", q.name, cpl.Status)
		case done:
			return cpl, nil
		case err != nil:
			return cpl, fmt.Errorf("%s: %w", q.name, err)
		}
		if err := w.pause(ctx, r); err != nil {
			return cpl, fmt.Errorf("%s: %w", q.name, err)
		}
	}
}

// waiter waits for a controller: by yielding first, then by sleeping longer and longer.
type waiter struct {
	limit  time.Duration // ErrTimeout follows
	rounds int
	began  time.Time
}

const (
	yields   = 200
	maxPause = time.Millisecond

	forever time.Duration = math.MaxInt64 // a limit that never passes
)

func (w *waiter) pause(ctx context.Context, r *ring) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	w.rounds++
	if w.rounds < yields {
		runtime.Gosched()
		return nil
	}
	if w.began.IsZero() {
		w.began = time.Now()
	}
	if err := alive(r.regs); err != nil {
		r.kill(err)
		return err
	}
	if time.Since(w.began) > w.limit {
		return ErrTimeout
	}
	time.Sleep(min(time.Duration(w.rounds-yields+1)*10*time.Microsecond, maxPause))
	return nil
}

// alive reports what keeps a controller from completing anything.
func alive(regs nvme.Registers) error {
	switch v := regs.Read32(nvme.RegCSTS); {
	case v == ^uint32(0):
		return ErrGone
	case nvme.CSTS(v)&nvme.CSTSFatal != 0:
		return ErrFatal
	}
	return nil
}
