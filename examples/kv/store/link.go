package store

import (
	"context"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// config is how both sides connect. A client has one request under way, so the queues are short. A request that is not
// acknowledged is sent again after 4.096 µs × 2^16, a quarter of a second, seven times: then the peer is taken for dead.
func config(dev *verbs.Device) cm.Config {
	return cm.Config{
		Device:     dev,
		Notify:     true,
		AckTimeout: 16,
		Cap:        verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64},
	}
}

// link is a connection, and the memory for its messages. One goroutine uses it.
type link struct {
	conn    *cm.Conn
	buf     []byte
	mr      *verbs.MR
	wcs     []verbs.WC
	every   time.Duration // after how long without anything the peer is asked whether it is there
	probing bool          // it is being asked
}

func newLink(conn *cm.Conn, n int, every time.Duration) (*link, error) {
	l := &link{conn: conn, buf: make([]byte, n), wcs: make([]verbs.WC, 1), every: every}
	var err error
	l.mr, err = conn.RegMR(l.buf, verbs.AccessLocalWrite)
	return l, err
}

// receive posts a receive into a part of the buffer. Its completion has the offset as its ID.
func (l *link) receive(at, n int) error {
	_, err := l.conn.QP().PostRecv([]verbs.RecvWR{{ID: uint64(at), SGL: []verbs.SGE{l.mr.SGE(at, n)}}})
	return err
}

// send posts a request that asks for its completion.
func (l *link) send(wr verbs.SendWR) error {
	wr.Flags |= verbs.SendSignaled
	_, err := l.conn.QP().PostSend([]verbs.SendWR{wr})
	return err
}

// next returns the next completion. It polls for a while, which is faster than to be woken, and then sleeps. When the connection
// ends, the device flushes what is posted, so there is a completion then, too.
func (l *link) next(ctx context.Context, spin time.Duration) (verbs.WC, error) {
	for began := time.Now(); time.Since(began) < spin; runtime.Gosched() {
		if wc, ok, err := l.poll(); ok || err != nil {
			return wc, err
		}
	}
	for {
		// Arm first, then poll: a completion that comes in between is not missed.
		if err := l.conn.RecvCQ().RequestNotify(false); err != nil {
			return verbs.WC{}, err
		}
		if wc, ok, err := l.poll(); ok || err != nil {
			return wc, err
		}
		if err := l.sleep(ctx); err != nil {
			return verbs.WC{}, err
		}
	}
}

// poll takes a completion, if there is one. That of a probe is for nobody.
func (l *link) poll() (wc verbs.WC, ok bool, err error) {
	n, err := l.conn.RecvCQ().Poll(l.wcs)
	if err != nil || n == 0 {
		return wc, false, err
	}
	wc = l.wcs[0]
	if wc.ID == idProbe {
		l.probing = false
	}
	return wc, wc.ID != idProbe, wc.Err()
}

// idProbe is the ID of a request that asks whether the peer is there. No offset into a buffer is as large.
const idProbe = 1 << 63

// sleep waits for a completion, or a while. A peer that dies does not say so: this side finds out when a request of its own is
// not acknowledged. So if none is under way, it posts one now and then: a READ of no bytes, which needs no memory and no key.
func (l *link) sleep(ctx context.Context) error {
	wait, cancel := context.WithTimeout(ctx, l.every)
	defer cancel()
	event, err := l.conn.Channel().Next(wait)
	switch {
	case err == nil:
		event.Ack()
		return nil
	case ctx.Err() != nil || wait.Err() == nil:
		return err
	case l.probing:
		return nil
	}
	l.probing = true
	return l.send(verbs.SendWR{ID: idProbe, Op: verbs.OpRDMARead})
}
