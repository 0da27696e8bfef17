package perf

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// rig is what one side needs for a measurement. Each side has a tx buffer, the
// source of the data it sends or lets the other read, and an rx buffer, where
// data arrives. A queue pair has the same number of slots in both; message i
// uses slot i modulo their number, on both sides.
type rig struct {
	p    Params
	op   opInfo
	side *SideChannel

	pd        *verbs.PD
	cq        *verbs.CQ
	tx, rx    buffer
	flows     []*flow
	recvDepth int // receives of each queue pair
	wcs       []verbs.WC
	idle      idler
}

// flow is a queue pair with its requests, made once and posted again and again.
type flow struct {
	qp    *verbs.QP
	sends []verbs.SendWR // a ring, whose length is a power of two
	recvs []verbs.RecvWR // a ring, whose length is a power of two
	tail  []verbs.SendWR // for a last batch that is shorter than the others

	posted    uint64      // send requests posted
	done      uint64      // send requests completed
	base      uint64      // how many the initiator had posted when the measurement began
	stamps    []time.Time // when each batch was posted, a ring
	batches   []int       // how many requests each has, a ring
	head, len int         // of those two rings

	recvPosted uint64
	received   uint64
}

// stallLimit is how long nothing may complete before a measurement is given up: longer
// than a queue pair takes to fail after all its retries.
const stallLimit = 10 * time.Second

// newRig makes buffers and queue pairs on a device. On failure nothing is left.
func newRig(dev *verbs.Device, side *SideChannel, p Params) (_ *rig, err error) {
	attr := dev.Attr()
	if p.Inline && p.Size > attr.MaxInlineData {
		return nil, fmt.Errorf("inline: %d bytes, the device takes %d", p.Size, attr.MaxInlineData)
	}
	r := &rig{p: p, op: opTable[p.Op], side: side, recvDepth: p.recvDepth(attr.MaxQPWR), wcs: make([]verbs.WC, 64)}
	r.idle.side = side
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
		}
	}()
	if r.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	bytes := p.QPs * p.slots() * p.stride()
	kind := memKindOf(p.Mem)
	if r.tx, err = kind.make(dev, r.pd, bytes, verbs.AccessRemoteRead); err != nil {
		return nil, err
	}
	const sink = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic
	if r.rx, err = kind.make(dev, r.pd, bytes, sink); err != nil {
		return nil, err
	}
	sendQueue := p.Depth
	if p.Lat {
		sendQueue = latSendQueue
	}
	if r.cq, err = dev.CreateCQ(p.QPs*(sendQueue+r.recvDepth), nil); err != nil {
		return nil, err
	}
	for range p.QPs {
		qp, err := r.pd.CreateQP(&verbs.QPConfig{
			Type: verbs.RC, SendCQ: r.cq, RecvCQ: r.cq,
			Cap: verbs.QPCap{MaxSendWR: sendQueue, MaxRecvWR: r.recvDepth, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: inlineOf(p)},
		})
		if err != nil {
			return nil, err
		}
		r.flows = append(r.flows, &flow{qp: qp})
	}
	return r, nil
}

func inlineOf(p Params) int {
	if p.Inline {
		return p.Size
	}
	return 0
}

// slot returns one slot of a queue pair in one of the buffers.
func (r *rig) slot(buf buffer, qp, slot int) []byte {
	off := r.offset(qp, slot)
	return buf.bytes[off : off+r.p.Size]
}

func (r *rig) offset(qp, slot int) int { return (qp*r.p.slots() + slot) * r.p.stride() }

// offer returns what the peer has to know.
func (r *rig) offer(dev *verbs.Device) (*offer, error) {
	port, err := dev.Port(1)
	if err != nil {
		return nil, err
	}
	o := &offer{
		TxAddr: r.tx.addr, TxKey: r.tx.rkey,
		RxAddr: r.rx.addr, RxKey: r.rx.rkey,
		MTU: port.ActiveMTU.Bytes(), Device: dev.Addr().String(),
	}
	for _, f := range r.flows {
		o.Endpoints = append(o.Endpoints, f.qp.Endpoint())
	}
	return o, nil
}

// connect connects to what the peer offered and makes all requests.
func (r *rig) connect(peer *offer, mtu int) error {
	if peer == nil || len(peer.Endpoints) != len(r.flows) {
		return errors.New("side channel: the peer's offer does not fit the measurement")
	}
	cfg := &verbs.ConnectConfig{
		MTU: mtuOf(mtu),
		// 10 µs: a receiver that falls behind for a moment should not cost more.
		MinRNRTimer: 1,
	}
	for i, f := range r.flows {
		if err := f.qp.Connect(peer.Endpoints[i], cfg); err != nil {
			return err
		}
		r.makeSends(i, f, peer)
		if err := r.makeRecvs(i, f); err != nil {
			return err
		}
	}
	return nil
}

// makeSends makes the ring of send requests. The last one of each batch asks
// for a completion, which stands for the whole batch.
func (r *rig) makeSends(i int, f *flow, peer *offer) {
	slots, batch := r.p.slots(), r.p.Batch
	f.sends = make([]verbs.SendWR, max(slots, batch))
	f.tail = make([]verbs.SendWR, batch)
	outstanding := r.p.Depth/batch + 1
	f.stamps, f.batches = make([]time.Time, outstanding), make([]int, outstanding)
	for k := range f.sends {
		off := r.offset(i, k%slots)
		wr := verbs.SendWR{ID: uint64(i), Op: r.op.code, Imm: uint32(k)}
		switch {
		case r.p.Inline:
			wr.Inline = r.slot(r.tx, i, k%slots)
		case r.op.returns:
			wr.SGL = []verbs.SGE{r.rx.sge(off, r.p.Size)}
		default:
			wr.SGL = []verbs.SGE{r.tx.sge(off, r.p.Size)}
		}
		switch r.p.Op {
		case OpRead:
			wr.RemoteAddr, wr.RKey = peer.TxAddr+uint64(off), peer.TxKey
		case OpWrite, OpWriteImm, OpAtomic:
			wr.RemoteAddr, wr.RKey = peer.RxAddr+uint64(off), peer.RxKey
		}
		if r.p.Op == OpAtomic {
			wr.CompareAdd = 1
		}
		if k%batch == batch-1 {
			wr.Flags |= verbs.SendSignaled
		}
		f.sends[k] = wr
	}
}

// makeRecvs makes the ring of receives and posts the first of them.
func (r *rig) makeRecvs(i int, f *flow) error {
	if !r.op.receives {
		return nil
	}
	f.recvs = make([]verbs.RecvWR, r.p.slots())
	for k := range f.recvs {
		f.recvs[k].ID = uint64(i)
		if r.p.Op == OpSend { // a WRITE with immediate brings its own address
			f.recvs[k].SGL = []verbs.SGE{r.rx.sge(r.offset(i, k), r.p.Size)}
		}
	}
	return f.postRecvs(r.recvDepth)
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
func (r *rig) poll() ([]verbs.WC, error) {
	n, err := r.cq.Poll(r.wcs)
	if err != nil {
		return nil, err
	}
	for i := range r.wcs[:n] {
		if wc := &r.wcs[i]; wc.Status != verbs.WCSuccess {
			return nil, wc.Err()
		}
	}
	return r.wcs[:n], nil
}

// close closes everything in the order that the objects depend on each other.
func (r *rig) close() error {
	var errs []error
	for _, f := range r.flows {
		errs = append(errs, f.qp.Close())
	}
	if r.cq != nil {
		errs = append(errs, r.cq.Close())
	}
	errs = append(errs, r.tx.close(), r.rx.close())
	if r.pd != nil {
		errs = append(errs, r.pd.Close())
	}
	return errors.Join(errs...)
}

// idler is how a loop waits when it makes no progress. Mostly it spins: giving the
// processor away would cost more than the wait. After each interval of some 20 to 50 µs
// it yields to other threads, since the one that it waits for may need this processor. In
// every goschedOf-th interval it also yields to other goroutines; that makes the runtime
// wake a thread to look for work, so it is rare, unless there is only one processor. In
// every lookOf-th interval it checks whether the measurement has failed or stalled.
type idler struct {
	side  *SideChannel
	spins uint
	since time.Time // of the first check without progress; zero: there was none yet
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

var oneProcessor = runtime.GOMAXPROCS(0) == 1

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
	if oneProcessor || w.spins%(goschedOf*turns) == 0 {
		runtime.Gosched()
	}
	if w.spins%(lookOf*turns) != 0 {
		return nil
	}
	if err := w.side.err(); err != nil {
		return err
	}
	if now := time.Now(); w.since.IsZero() {
		w.since = now
	} else if now.Sub(w.since) > stallLimit {
		return fmt.Errorf("stalled: nothing has completed for %v", stallLimit)
	}
	return nil
}
