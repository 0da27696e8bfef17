package cmtools

// What all programs need, top-down: a Meeting listens or dials and has lines then, which are
// connections with a buffer for messages; a line posts requests and waits for their completions.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// The ports of the programs.
const (
	RpingPort      = "7174"
	UcmatosePort   = "7471"
	UdaddyPort     = "7174"
	RdmaServerPort = "7471"
	CmtimePort     = "7471"
)

// Meeting is a run of a program against this side.
type Meeting struct {
	Device *verbs.Device
	Addr   string // "host:port": where this side listens, or the program does
	Count  int    // connections; of rping, pings. Zero: 1
	Size   int    // bytes of a message. Zero: the program's default

	// Listening is called by a server when the program may connect. Nil: nothing is called.
	Listening func()
}

// redial is how long a client waits before it dials again a program that does not listen yet.
const redial = 100 * time.Millisecond

// filled returns a copy with the defaults.
func (m *Meeting) filled(size int) *Meeting {
	f := *m
	if f.Count == 0 {
		f.Count = 1
	}
	if f.Size == 0 {
		f.Size = size
	}
	return &f
}

// shape is what the connections of a program have.
type shape struct {
	depth    int // messages that are sent, and that are received, at a time
	size     int // bytes of a message
	rdatomic int // READs at a time; -1: none
}

// line is a connection with room for messages in both directions.
type line struct {
	conn *cm.Conn
	shape
	in, out     []byte // slots of the messages received, and to be sent
	inMR, outMR *verbs.MR

	completions
}

// config returns the Config of a connection, and the line that it makes.
func (m *Meeting) config(s shape) (*line, *cm.Config) {
	l := &line{shape: s}
	return l, &cm.Config{
		Device: m.Device,
		Cap:    verbs.QPCap{MaxSendWR: s.depth + 2, MaxRecvWR: s.depth, MaxSendSGE: 1, MaxRecvSGE: 1},
		Setup:  l.setup, ResponderResources: s.rdatomic, InitiatorDepth: s.rdatomic,
	}
}

// setup registers the slots and posts all receives.
func (l *line) setup(c *cm.Conn) (err error) {
	l.conn, l.cq = c, c.SendCQ() // which is that of receives too
	l.in, l.out = make([]byte, max(1, l.depth*l.size)), make([]byte, max(1, l.depth*l.size))
	if l.inMR, err = c.RegMR(l.in, verbs.AccessLocalWrite); err != nil {
		return err
	}
	if l.outMR, err = c.RegMR(l.out, 0); err != nil {
		return err
	}
	if l.size == 0 {
		return nil
	}
	for slot := range l.depth {
		if err := l.receive(slot); err != nil {
			return err
		}
	}
	return nil
}

// serve listens, and calls accept with each request in turn until there were as many as the
// meeting has connections.
func (m *Meeting) serve(ctx context.Context, connections int, accept func(*cm.Request) error) (err error) {
	l, err := cm.Listen(ctx, m.Addr, &cm.Config{Device: m.Device})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if m.Listening != nil {
		m.Listening()
	}
	for range connections {
		r, err := l.Next(ctx)
		if err != nil {
			return err
		}
		if err := checkPrivate(r.Private(), cm.MaxDialPrivate); err != nil {
			return errors.Join(err, r.Reject(0, nil))
		}
		if err := accept(r); err != nil {
			return err
		}
	}
	return nil
}

// accept accepts a request.
func (m *Meeting) accept(ctx context.Context, r *cm.Request, s shape) (*line, error) {
	l, cfg := m.config(s)
	_, err := r.Accept(ctx, cfg)
	return l, err
}

// dial connects, as soon as the program listens.
func (m *Meeting) dial(ctx context.Context, s shape) (*line, error) {
	l, cfg := m.config(s)
	err := whenListening(ctx, func() error {
		c, err := cm.Dial(ctx, m.Addr, cfg)
		if err == nil {
			err = checkPrivate(c.Private(), cm.MaxAcceptPrivate)
			if err != nil {
				err = errors.Join(err, c.Close())
			}
		}
		return err
	})
	return l, err
}

// whenListening calls connect again while it is refused because nobody listens.
func whenListening(ctx context.Context, connect func() error) error {
	for {
		err := connect()
		var refused *cm.RejectError
		if !errors.As(err, &refused) || refused.Reason != cm.ReasonNoListener {
			return err
		}
		if !errors.Is(err, cm.ErrRefused) {
			return fmt.Errorf("errors.Is does not find ErrRefused in %w", err)
		}
		select {
		case <-time.After(redial):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}

// checkPrivate checks the private data of a program that sends none.
func checkPrivate(b []byte, room int) error {
	if len(b) != room || !bytes.Equal(b, make([]byte, room)) {
		return fmt.Errorf("private data of %d bytes, want %d zeros: %x", len(b), room, b)
	}
	return nil
}

// inSlot returns the message that was received into a slot.
func (l *line) inSlot(slot int) []byte { return l.in[slot*l.size:][:l.size] }

// receive posts a receive into a slot.
func (l *line) receive(slot int) error {
	_, err := l.conn.QP().PostRecv([]verbs.RecvWR{{ID: uint64(slot), SGL: []verbs.SGE{l.inMR.SGE(slot*l.size, l.size)}}})
	return err
}

// send posts a message from a slot.
func (l *line) send(slot int) error {
	return l.post(verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.outMR.SGE(slot*l.size, l.size)}})
}

// post posts a request that produces a completion.
func (l *line) post(wr verbs.SendWR) error {
	wr.Flags |= verbs.SendSignaled
	_, err := l.conn.QP().PostSend([]verbs.SendWR{wr})
	return err
}

// completions has the completions of a queue.
type completions struct {
	cq   *verbs.CQ
	came map[verbs.WCOpcode][]verbs.WC // what has come and was not waited for yet, by kind
}

// wait waits for a completion of a kind. Those of other kinds are kept for later.
func (c *completions) wait(ctx context.Context, op verbs.WCOpcode) (verbs.WC, error) {
	for tries := 0; ; tries++ {
		if q := c.came[op]; len(q) > 0 {
			c.came[op] = q[1:]
			return q[0], nil
		}
		var wc [1]verbs.WC
		n, err := c.cq.Poll(wc[:])
		if n == 1 {
			err = wc[0].Err()
		} else if err == nil {
			err = rest(ctx, tries)
		}
		if err != nil {
			return wc[0], fmt.Errorf("waiting for %v: %w", op, err)
		}
		if n == 1 {
			if c.came == nil {
				c.came = map[verbs.WCOpcode][]verbs.WC{}
			}
			c.came[wc[0].Op] = append(c.came[wc[0].Op], wc[0])
		}
	}
}

// rest sleeps after some polls in vain: the program needs the processor too.
func rest(ctx context.Context, tries int) error {
	if tries > 16 {
		time.Sleep(50 * time.Microsecond)
	}
	return ctx.Err()
}

// message waits for a message, and returns its slot.
func (l *line) message(ctx context.Context) (slot int, err error) {
	wc, err := l.wait(ctx, verbs.WCRecv)
	if err == nil && int(wc.ByteLen) != l.size {
		err = fmt.Errorf("a message of %d bytes, want %d", wc.ByteLen, l.size)
	}
	return int(wc.ID), err
}

// untilPeerEnds waits until the peer has ended the connection.
func (l *line) untilPeerEnds(ctx context.Context) error {
	select {
	case <-l.conn.Done():
	case <-ctx.Done():
		return fmt.Errorf("the peer has not disconnected: %w", ctx.Err())
	}
	if err := l.conn.Err(); !errors.Is(err, cm.ErrDisconnected) {
		return fmt.Errorf("the connection has ended with %w, want %w", err, cm.ErrDisconnected)
	}
	return nil
}

// end closes lines, those that were connected, and returns err with what fails.
func end(err error, lines ...*line) error {
	for _, l := range lines {
		if l != nil && l.conn != nil {
			err = errors.Join(err, l.conn.Close())
		}
	}
	return err
}
