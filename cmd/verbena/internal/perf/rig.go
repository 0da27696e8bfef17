package perf

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/verbs"
)

// rig is what one side needs for a measurement. Both sides have as many threads, with as
// many queue pairs each: thread i of the initiator is connected to thread i of the target.
type rig struct {
	p         Params
	op        opInfo
	side      *SideChannel
	recvDepth int // receives of each queue pair

	pd      *verbs.PD
	threads []*thread

	// failed is set when a thread has failed: the loops of the other threads end.
	failed atomic.Bool
}

// newRig makes buffers and queue pairs on a device. On failure nothing is left.
func newRig(dev *verbs.Device, side *SideChannel, p Params) (_ *rig, err error) {
	attr := dev.Attr()
	if p.Inline && p.Size > attr.MaxInlineData {
		return nil, fmt.Errorf("inline: %d bytes, the device takes %d", p.Size, attr.MaxInlineData)
	}
	r := &rig{p: p, op: opTable[p.Op], side: side, recvDepth: p.recvDepth(attr.MaxQPWR)}
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
		}
	}()
	if r.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	for i := range p.Threads {
		t := newThread(r, i)
		r.threads = append(r.threads, t)
		if err := t.open(dev); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// errOther is what the loop of a thread returns when another thread has failed.
var errOther = errors.New("another thread has failed")

// err returns why the loops of the threads must end, nil if they go on.
func (r *rig) err() error {
	if err := r.side.err(); err != nil {
		return err
	}
	if r.failed.Load() {
		return errOther
	}
	return nil
}

// pending reports whether a message waits on the side channel, the channel has failed or
// a thread has: what ends the target's loops.
func (r *rig) pending() bool { return r.side.pending() || r.failed.Load() }

// each calls f for every thread, all at the same time, and waits until all calls have
// returned. The first thread's call is made by the caller's goroutine. It returns the first
// error, which makes the other threads' loops end.
func (r *rig) each(f func(i int) error) error {
	var first error
	var once sync.Once // guards first
	call := func(i int) {
		if err := f(i); err != nil {
			once.Do(func() {
				first = err
				r.failed.Store(true)
			})
		}
	}
	var others sync.WaitGroup
	for i := 1; i < len(r.threads); i++ {
		others.Go(func() { call(i) })
	}
	call(0)
	others.Wait()
	return first
}

// offer returns what the peer has to know.
func (r *rig) offer(dev *verbs.Device) (*offer, error) {
	port, err := dev.Port(1)
	if err != nil {
		return nil, err
	}
	o := &offer{MTU: port.ActiveMTU.Bytes(), Device: dev.Addr().String()}
	for _, t := range r.threads {
		o.Memory = append(o.Memory, memoryOffer{TxAddr: t.tx.addr, TxKey: t.tx.rkey, RxAddr: t.rx.addr, RxKey: t.rx.rkey})
		for _, f := range t.flows {
			o.Endpoints = append(o.Endpoints, f.qp.Endpoint())
		}
	}
	return o, nil
}

// fits returns an error unless an offer has what each thread of this side needs.
func (r *rig) fits(o *offer) error {
	if o == nil || len(o.Endpoints) != r.p.QPs || len(o.Memory) != r.p.Threads {
		return errors.New("side channel: the peer's offer does not fit the measurement")
	}
	for i, t := range r.threads {
		last := math.MaxUint64 - uint64(t.bytes())
		if m := &o.Memory[i]; m.TxAddr > last || m.RxAddr > last {
			return fmt.Errorf("side channel: the peer's memory for thread %d ends behind the last address", i)
		}
	}
	return nil
}

// connect connects to what the peer offered and makes all requests.
func (r *rig) connect(peer *offer, mtu int) error {
	if err := r.fits(peer); err != nil {
		return err
	}
	cfg := &verbs.ConnectConfig{
		MTU: mtuOf(mtu),
		// 10 µs: a receiver that falls behind for a moment should not cost more.
		MinRNRTimer: 1,
	}
	for i, t := range r.threads {
		for k, f := range t.flows {
			if err := f.qp.Connect(peer.Endpoints[t.first+k], cfg); err != nil {
				return err
			}
			t.makeSends(k, f, &peer.Memory[i])
			if err := t.makeRecvs(k, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// close closes everything in the order that the objects depend on each other.
func (r *rig) close() error {
	var errs []error
	for _, t := range r.threads {
		errs = append(errs, t.close())
	}
	if r.pd != nil {
		errs = append(errs, r.pd.Close())
	}
	return errors.Join(errs...)
}
