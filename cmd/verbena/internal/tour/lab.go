package tour

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

const (
	// patience is how long a completion or an event may take. All peers are in this
	// process.
	patience = 3 * time.Second
	// half is the size of each half of a node's buffer: what is sent lies in
	// the first, what is received in the second.
	half = 64 << 10
	// length is that of most messages: three packets at the largest MTU, and
	// not a multiple of 4, so that there is padding.
	length = 10_001
)

// lab is what the steps work with: two devices.
type lab struct {
	ctx  context.Context
	cfg  verbs.Config // of the devices, for a step that opens another one
	a, b *node
	rand *rand.Rand // makes the data, which is other data for each step

	patience time.Duration // how long a completion may take; 0: the constant
}

// node is one device with a registered buffer and a completion queue.
type node struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	buf []byte
	mr  *verbs.MR
}

// newLab opens two devices. Only the first one captures packets: it sees both
// directions.
func newLab(ctx context.Context, cfg verbs.Config) (*lab, error) {
	l := &lab{ctx: ctx, cfg: cfg, rand: rand.New(rand.NewPCG(1, 2))}
	var err error
	if l.a, err = newNode(&cfg); err != nil {
		return nil, err
	}
	cfg.PCAP = ""
	if l.b, err = newNode(&cfg); err != nil {
		return nil, errors.Join(err, l.a.close())
	}
	return l, nil
}

// close closes the devices. A lab that could not be made needs no closing.
func (l *lab) close() error {
	if l == nil {
		return nil
	}
	return errors.Join(l.a.close(), l.b.close())
}

func newNode(cfg *verbs.Config) (n *node, err error) {
	n = &node{buf: make([]byte, 2*half)}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	return n, n.open(cfg)
}

// open opens the device of a node that has its buffer.
func (n *node) open(cfg *verbs.Config) (err error) {
	if n.dev, err = verbs.Open("", cfg); err != nil {
		return err
	}
	if n.pd, err = n.dev.AllocPD(); err != nil {
		return err
	}
	if n.cq, err = n.dev.CreateCQ(64, nil); err != nil {
		return err
	}
	n.mr, err = n.pd.RegMR(n.buf, verbs.AccessLocalWrite|verbs.AccessRemote)
	return err
}

func (n *node) close() error {
	var errs []error
	if n.mr != nil {
		errs = append(errs, n.mr.Close())
	}
	if n.cq != nil {
		errs = append(errs, n.cq.Close())
	}
	if n.pd != nil {
		errs = append(errs, n.pd.Close())
	}
	if n.dev != nil {
		errs = append(errs, n.dev.Close())
	}
	return errors.Join(errs...)
}

// source returns the first length bytes of the half that is sent, with fresh data.
func (l *lab) source(n *node, length int) []byte {
	b := n.buf[:length]
	for i := range b {
		b[i] = byte(l.rand.Uint32())
	}
	return b
}

// sink returns the first length bytes of the half that is received into, cleared,
// and their offset in the region.
func (n *node) sink(length int) ([]byte, int) {
	b := n.buf[half : half+length]
	clear(b)
	return b, half
}

// remote returns the address and key by which a peer names the byte at off.
func (n *node) remote(off int) (addr uint64, rkey uint32) {
	return n.mr.Addr() + uint64(off), n.mr.RKey()
}

// pair is two connected queue pairs.
type pair struct{ a, b *verbs.QP }

// caps is what a queue pair of the tour can hold.
var caps = verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInlineData: 64}

// pair makes two queue pairs of a type and connects them. UD queue pairs are not
// connected, but brought to RTS.
func (l *lab) pair(t verbs.QPType) (*pair, error) {
	return l.pairOf(
		&verbs.QPConfig{Type: t, SendCQ: l.a.cq, RecvCQ: l.a.cq, Cap: caps, SignalAll: true},
		&verbs.QPConfig{Type: t, SendCQ: l.b.cq, RecvCQ: l.b.cq, Cap: caps, SignalAll: true})
}

func (l *lab) pairOf(ca, cb *verbs.QPConfig) (_ *pair, err error) {
	p := new(pair)
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.a, err = l.a.pd.CreateQP(ca); err != nil {
		return nil, err
	}
	if p.b, err = l.b.pd.CreateQP(cb); err != nil {
		return nil, err
	}
	if err = p.a.Connect(p.b.Endpoint(), nil); err != nil {
		return nil, err
	}
	if err = p.b.Connect(p.a.Endpoint(), nil); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *pair) close() error {
	var errs []error
	for _, qp := range []*verbs.QP{p.a, p.b} {
		if qp != nil {
			errs = append(errs, qp.Close())
		}
	}
	return errors.Join(errs...)
}

// withPair runs part of a step with a pair that is closed afterwards.
func (l *lab) withPair(t verbs.QPType, f func(p *pair) (string, error)) (string, error) {
	p, err := l.pair(t)
	if err != nil {
		return "", err
	}
	detail, err := f(p)
	return detail, errors.Join(err, p.close(), l.nothingLeft())
}

// nothingLeft returns an error if a step has left completions that it has not polled.
func (l *lab) nothingLeft() error {
	for _, n := range []*node{l.a, l.b} {
		var wc [1]verbs.WC
		k, err := n.cq.Poll(wc[:])
		if err != nil {
			return err
		}
		if k > 0 {
			return fmt.Errorf("an unexpected completion at %v: %v, %v", n.dev.Addr(), wc[0].Op, wc[0].Status)
		}
	}
	return nil
}

func post(qp *verbs.QP, wrs ...verbs.SendWR) error {
	_, err := qp.PostSend(wrs)
	return err
}

func postRecv(qp *verbs.QP, wrs ...verbs.RecvWR) error {
	_, err := qp.PostRecv(wrs)
	return err
}

// next waits for a completion, successful or failed.
func (l *lab) next(cq *verbs.CQ) (verbs.WC, error) {
	var wc [1]verbs.WC
	limit := cmp.Or(l.patience, patience)
	for deadline := time.Now().Add(limit); ; runtime.Gosched() {
		n, err := cq.Poll(wc[:])
		if err != nil {
			return wc[0], err
		}
		if n > 0 {
			return wc[0], nil
		}
		if err := l.ctx.Err(); err != nil {
			return wc[0], err
		}
		if time.Now().After(deadline) {
			return wc[0], fmt.Errorf("no completion in %v", limit)
		}
	}
}

// expect waits for a completion and returns an error unless it is a success of op.
func (l *lab) expect(cq *verbs.CQ, op verbs.WCOpcode) (verbs.WC, error) {
	wc, err := l.next(cq)
	if err != nil {
		return wc, fmt.Errorf("waiting for %v: %w", op, err)
	}
	if err := wc.Err(); err != nil {
		return wc, err
	}
	if wc.Op != op {
		return wc, fmt.Errorf("%v completed where %v was expected", wc.Op, op)
	}
	return wc, nil
}

// expectStatus waits for a completion and returns an error unless it has the status.
func (l *lab) expectStatus(cq *verbs.CQ, status verbs.WCStatus) error {
	wc, err := l.next(cq)
	if err != nil {
		return fmt.Errorf("waiting for %q: %w", status, err)
	}
	if wc.Status != status {
		return fmt.Errorf("completed with %q where %q was expected", wc.Status, status)
	}
	return nil
}

// expectEvent waits for an asynchronous event of a type, and drops others.
func (l *lab) expectEvent(n *node, want verbs.EventType) (verbs.AsyncEvent, error) {
	ctx, cancel := context.WithTimeout(l.ctx, patience)
	defer cancel()
	for {
		ev, err := n.dev.NextEvent(ctx)
		if err != nil {
			return ev, fmt.Errorf("waiting for the event %q: %w", want, err)
		}
		if ev.Type == want {
			return ev, nil
		}
	}
}

// same compares what arrived with what was sent.
func same(got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range want {
		if i >= len(got) || got[i] != want[i] {
			return fmt.Errorf("the data differs from byte %d of %d on", i, len(want))
		}
	}
	return fmt.Errorf("%d bytes where %d were expected", len(got), len(want))
}
