package perf

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// thread is what one thread of a side has for itself: its share of the queue pairs, their
// completion queue and their memory. It posts and polls by itself. There is a tx buffer,
// the source of the data that it sends or lets the other side read, and an rx buffer, where
// data arrives. A queue pair has the same number of slots in both; message i uses slot i
// modulo their number, on both sides.
type thread struct {
	*rig
	first int // number of its first queue pair, of those of all threads
	qps   int

	cq     *verbs.CQ
	tx, rx buffer
	flows  []*flow
	wcs    []verbs.WC
	idle   idler
	_      pad
}

// pad stands at the end of what a thread writes to all the time, so that no other thread's
// data lies in the same cache line, or in the one that the processor fetches with it.
type pad [128]byte

// flow is a queue pair with its requests, made once and posted again and again.
type flow struct {
	qp    *verbs.QP
	sends []verbs.SendWR // a ring, whose length is a power of two
	recvs []verbs.RecvWR // a ring, whose length is a power of two
	tail  []verbs.SendWR // for a last batch that is shorter than the others

	posted    uint64  // send requests posted
	done      uint64  // send requests completed
	base      uint64  // how many the initiator had posted when the measurement began
	batches   []batch // under way, a ring
	head, len int     // of that ring

	recvPosted uint64
	received   uint64
	_          pad
}

// batch is the requests of one PostSend.
type batch struct {
	posted   time.Time
	requests int
}

// stallLimit is how long nothing may complete before a measurement is given up: longer
// than a queue pair takes to fail after all its retries.
const stallLimit = 10 * time.Second

// newThread returns thread i of a side, which has its share of queue pairs and nothing
// that must be closed.
func newThread(r *rig, i int) *thread {
	t := &thread{rig: r, wcs: make([]verbs.WC, 64)}
	t.qps, t.first = r.p.share(r.p.QPs, i)
	t.idle.rig = r
	// With a spinning thread for each processor there is none left for other goroutines.
	t.idle.crowded = r.p.Threads >= runtime.GOMAXPROCS(0)
	return t
}

// bytes returns the length of each of the thread's two buffers.
func (t *thread) bytes() int { return t.qps * t.p.slots() * t.p.stride() }

// open makes the thread's objects. After a failure close closes those that it made.
func (t *thread) open(dev *verbs.Device) (err error) {
	kind := memKindOf(t.p.Mem)
	if t.tx, err = kind.make(dev, t.pd, t.bytes(), verbs.AccessRemoteRead); err != nil {
		return err
	}
	const sink = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic
	if t.rx, err = kind.make(dev, t.pd, t.bytes(), sink); err != nil {
		return err
	}
	sendQueue := t.p.Depth
	if t.p.Lat {
		sendQueue = latSendQueue
	}
	if t.cq, err = dev.CreateCQ(t.qps*(sendQueue+t.recvDepth), nil); err != nil {
		return err
	}
	for range t.qps {
		qp, err := t.pd.CreateQP(&verbs.QPConfig{
			Type: verbs.RC, SendCQ: t.cq, RecvCQ: t.cq,
			Cap: verbs.QPCap{MaxSendWR: sendQueue, MaxRecvWR: t.recvDepth, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: inlineOf(t.p)},
		})
		if err != nil {
			return err
		}
		t.flows = append(t.flows, &flow{qp: qp})
	}
	return nil
}

func inlineOf(p Params) int {
	if p.Inline {
		return p.Size
	}
	return 0
}

// slot returns one slot of a queue pair of the thread in one of its buffers.
func (t *thread) slot(buf buffer, qp, slot int) []byte {
	off := t.offset(qp, slot)
	return buf.bytes[off : off+t.p.Size]
}

func (t *thread) offset(qp, slot int) int { return (qp*t.p.slots() + slot) * t.p.stride() }

// makeSends makes the ring of send requests of a queue pair. The last one of each batch
// asks for a completion, which stands for the whole batch.
func (t *thread) makeSends(i int, f *flow, peer *memoryOffer) {
	slots, size := t.p.slots(), t.p.Batch
	f.sends = make([]verbs.SendWR, max(slots, size))
	f.tail = make([]verbs.SendWR, size)
	// The ring has unused room behind it, for the reason that pad has.
	outstanding := t.p.Depth/size + 1
	f.batches = make([]batch, outstanding, outstanding+4)
	for k := range f.sends {
		off := t.offset(i, k%slots)
		wr := verbs.SendWR{ID: uint64(i), Op: t.op.code, Imm: uint32(k)}
		switch {
		case t.p.Inline:
			wr.Inline = t.slot(t.tx, i, k%slots)
		case t.op.returns:
			wr.SGL = []verbs.SGE{t.rx.sge(off, t.p.Size)}
		default:
			wr.SGL = []verbs.SGE{t.tx.sge(off, t.p.Size)}
		}
		switch t.p.Op {
		case OpRead:
			wr.RemoteAddr, wr.RKey = peer.TxAddr+uint64(off), peer.TxKey
		case OpWrite, OpWriteImm, OpAtomic:
			wr.RemoteAddr, wr.RKey = peer.RxAddr+uint64(off), peer.RxKey
		}
		if t.p.Op == OpAtomic {
			wr.CompareAdd = 1
		}
		if k%size == size-1 {
			wr.Flags |= verbs.SendSignaled
		}
		f.sends[k] = wr
	}
}

// makeRecvs makes the ring of receives of a queue pair and posts the first of them.
func (t *thread) makeRecvs(i int, f *flow) error {
	if !t.op.receives {
		return nil
	}
	f.recvs = make([]verbs.RecvWR, t.p.slots())
	for k := range f.recvs {
		f.recvs[k].ID = uint64(i)
		if t.p.Op == OpSend { // a WRITE with immediate brings its own address
			f.recvs[k].SGL = []verbs.SGE{t.rx.sge(t.offset(i, k), t.p.Size)}
		}
	}
	return f.postRecvs(t.recvDepth)
}

// postRecvs posts the next n receives.
func (f *flow) postRecvs(n int) error {
	for n > 0 {
		at := int(f.recvPosted & uint64(len(f.recvs)-1))
		k := min(n, len(f.recvs)-at)
		if _, err := f.qp.PostRecv(f.recvs[at : at+k]); err != nil {
			return err
		}
		f.recvPosted += uint64(k)
		n -= k
	}
	return nil
}

// poll polls once. A caller that gets nothing must call idle.wait before it polls again.
func (t *thread) poll() ([]verbs.WC, error) {
	n, err := t.cq.Poll(t.wcs)
	if err != nil {
		return nil, err
	}
	for i := range t.wcs[:n] {
		if wc := &t.wcs[i]; wc.Status != verbs.WCSuccess {
			return nil, wc.Err()
		}
	}
	return t.wcs[:n], nil
}

// close closes everything in the order that the objects depend on each other.
func (t *thread) close() error {
	var errs []error
	for _, f := range t.flows {
		errs = append(errs, f.qp.Close())
	}
	if t.cq != nil {
		errs = append(errs, t.cq.Close())
	}
	return errors.Join(append(errs, t.tx.close(), t.rx.close())...)
}

// idler is how a loop waits when it makes no progress. Mostly it spins: giving the
// processor away would cost more than the wait. After each interval of some 20 to 50 µs
// it yields to other threads, since the one that it waits for may need this processor. In
// every goschedOf-th interval it also yields to other goroutines; that makes the runtime
// wake a thread to look for work, so it is rare, unless each processor has a loop that
// spins. In every lookOf-th interval it checks whether the measurement has failed or
// stalled.
type idler struct {
	rig     *rig
	crowded bool // each processor has a loop that spins
	spins   uint
	since   time.Time // of the first check without progress; zero: there was none yet
}

// How many iterations of a loop take an interval: polls of a completion queue, and looks
// at a byte in memory.
const (
	pollTurns  = 64
	watchTurns = 16 << 10
)

// How many intervals pass between two yields to goroutines, and between two checks.
const (
	goschedOf = 16
	lookOf    = 64
)

// reset is called after progress.
func (w *idler) reset() { w.spins, w.since = 0, time.Time{} }

// wait is called after each iteration without progress, in a loop of which so many
// iterations take an interval.
func (w *idler) wait(turns uint) error {
	w.spins++
	if w.spins%turns != 0 {
		return nil
	}
	sys.Yield()
	if w.crowded || w.spins%(goschedOf*turns) == 0 {
		runtime.Gosched()
	}
	if w.spins%(lookOf*turns) != 0 {
		return nil
	}
	if err := w.rig.err(); err != nil {
		return err
	}
	if now := time.Now(); w.since.IsZero() {
		w.since = now
	} else if now.Sub(w.since) > stallLimit {
		return fmt.Errorf("stalled: nothing has completed for %v", stallLimit)
	}
	return nil
}
