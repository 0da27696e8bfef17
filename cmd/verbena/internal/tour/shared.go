package tour

import (
	"context"
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// srqStep has two connections take their receives from one shared receive queue, which
// raises an event when it runs low.
func srqStep(l *lab) (string, error) {
	srq, err := l.b.pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 8, MaxSGE: 1})
	if err != nil {
		return "", err
	}
	detail, err := l.withSRQ(srq)
	return detail, errors.Join(err, srq.Close(), l.nothingLeft())
}

func (l *lab) withSRQ(srq *verbs.SRQ) (_ string, err error) {
	var pairs [2]*pair
	defer func() {
		for _, p := range pairs {
			if p != nil {
				err = errors.Join(err, p.close())
			}
		}
	}()
	for i := range pairs {
		pairs[i], err = l.pairOf(
			&verbs.QPConfig{Type: verbs.RC, SendCQ: l.a.cq, RecvCQ: l.a.cq, Cap: caps, SignalAll: true},
			&verbs.QPConfig{Type: verbs.RC, SendCQ: l.b.cq, RecvCQ: l.b.cq, SRQ: srq, Cap: caps, SignalAll: true})
		if err != nil {
			return "", err
		}
	}
	const size, receives, low = 1000, 3, 2
	_, off := l.b.sink(receives * size)
	for i := range receives {
		if _, err := srq.PostRecv([]verbs.RecvWR{{ID: uint64(i), SGL: []verbs.SGE{l.b.mr.SGE(off+i*size, size)}}}); err != nil {
			return "", err
		}
	}
	if err := srq.SetLimit(low); err != nil {
		return "", err
	}
	for i, p := range pairs {
		src := l.source(l.a, size)
		if err := post(p.a, verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.a.mr.SGE(0, size)}}); err != nil {
			return "", err
		}
		wc, err := l.expect(l.b.cq, verbs.WCRecv)
		if err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCSend); err != nil {
			return "", err
		}
		if wc.QPN != p.b.Number() || wc.ID != uint64(i) {
			return "", fmt.Errorf("message %d: the receive says %+v", i, wc)
		}
		if err := same(l.b.buf[off+i*size:off+(i+1)*size], src); err != nil {
			return "", err
		}
	}
	ev, err := l.expectEvent(l.b, verbs.EventSRQLimitReached)
	if err != nil {
		return "", err
	}
	if ev.SRQ != srq.Number() {
		return "", fmt.Errorf("the event names queue %d, not %d", ev.SRQ, srq.Number())
	}
	return "two connections receive from one queue, an event says that it runs low", nil
}

// eventStep sleeps until a message has come, instead of polling for it.
func eventStep(l *lab) (_ string, err error) {
	ch, err := l.b.dev.CreateChannel()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, ch.Close()) }()
	cq, err := l.b.dev.CreateCQ(8, ch)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, cq.Close(), l.nothingLeft()) }()
	p, err := l.pairOf(
		&verbs.QPConfig{Type: verbs.RC, SendCQ: l.a.cq, RecvCQ: l.a.cq, Cap: caps, SignalAll: true},
		&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: caps, SignalAll: true})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	src := l.source(l.a, length)
	dst, off := l.b.sink(length)
	if err := postRecv(p.b, verbs.RecvWR{SGL: []verbs.SGE{l.b.mr.SGE(off, length)}}); err != nil {
		return "", err
	}
	if err := cq.RequestNotify(false); err != nil {
		return "", err
	}
	if err := post(p.a, verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}}); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(l.ctx, patience)
	defer cancel()
	ev, err := ch.Next(ctx)
	if err != nil {
		return "", fmt.Errorf("waiting for a completion event: %w", err)
	}
	ev.Ack()
	if ev.CQ != cq {
		return "", errors.New("the event is for another queue")
	}
	if _, err := l.expect(cq, verbs.WCRecv); err != nil {
		return "", err
	}
	if _, err := l.expect(l.a.cq, verbs.WCSend); err != nil {
		return "", err
	}
	return "the receiver sleeps until a message wakes it", same(dst, src)
}
