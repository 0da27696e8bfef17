package tour

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// refusedStep writes to memory of the peer that it may only read, and checks everything
// that follows: the completions on both sides, the states, the event.
func refusedStep(l *lab) (string, error) {
	memory := bytes.Repeat([]byte{0x5a}, 4096)
	mr, err := l.b.pd.RegMR(memory, verbs.AccessRemoteRead)
	if err != nil {
		return "", err
	}
	detail, err := l.withPair(verbs.RC, func(p *pair) (string, error) {
		l.source(l.a, len(memory))
		_, off := l.b.sink(16)
		if err := postRecv(p.b, verbs.RecvWR{SGL: []verbs.SGE{l.b.mr.SGE(off, 16)}}); err != nil {
			return "", err
		}
		err := post(p.a,
			verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, len(memory))}, RemoteAddr: mr.Addr(), RKey: mr.RKey()},
			verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.a.mr.SGE(0, 16)}})
		if err != nil {
			return "", err
		}
		// The write is refused; the request behind it is flushed, and so is the
		// receive at the peer: both queue pairs are in ERR.
		if err := l.expectStatus(l.a.cq, verbs.WCRemAccessErr); err != nil {
			return "", fmt.Errorf("the write: %w", err)
		}
		if err := l.expectStatus(l.a.cq, verbs.WCWRFlushErr); err != nil {
			return "", fmt.Errorf("the request behind it: %w", err)
		}
		if err := l.expectStatus(l.b.cq, verbs.WCWRFlushErr); err != nil {
			return "", fmt.Errorf("the receive at the peer: %w", err)
		}
		for _, qp := range []*verbs.QP{p.a, p.b} {
			attr, err := qp.Query()
			if err != nil {
				return "", err
			}
			if attr.State != verbs.QPErr {
				return "", fmt.Errorf("queue pair %#x is in %v, not in ERR", qp.Number(), attr.State)
			}
		}
		for {
			ev, err := l.expectEvent(l.b, verbs.EventQPAccessErr)
			if err != nil {
				return "", err
			}
			if ev.QPN == p.b.Number() { // events of earlier steps may come before it
				break
			}
		}
		if !bytes.Equal(memory, bytes.Repeat([]byte{0x5a}, len(memory))) {
			return "", errors.New("the memory has changed all the same")
		}
		return fmt.Sprintf("sender: %q, then %q; peer: %q and an event", verbs.WCRemAccessErr, verbs.WCWRFlushErr, verbs.WCWRFlushErr), nil
	})
	return detail, errors.Join(err, mr.Close())
}
