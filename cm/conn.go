package cm

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// closeWait is how long Close waits for the peer to confirm the end of the connection.
const closeWait = time.Second

// Conn is a connection: a queue pair that is connected to that of a peer. All methods are safe for
// concurrent use.
type Conn struct {
	cfg           Config
	s             *shared
	id            *cma.ID
	local, remote netip.AddrPort
	private       []byte

	qp             *verbs.QP
	pd             *verbs.PD
	sendCQ, recvCQ *verbs.CQ
	channel        *verbs.Channel // of the connection's own completion queue; nil: it has none

	events chan *cma.Event // of the connection in the making
	down   chan struct{}   // gets a value when the connection manager reports the end
	done   chan struct{}   // is closed when the connection has ended
	ends   sync.WaitGroup  // peerLeft

	room int // for this side's private data

	state   sync.Mutex // guards what follows
	heard   func()     // is called when an event has come, by the connection manager; nil: nothing is
	setup   bool       // Setup is under way
	live    bool       // established: what fails ends the connection
	closing bool
	err     error
	mrs     []*verbs.MR

	close   sync.Mutex // held by Close; guards what follows
	up      bool       // established
	closers []func() error
}

// newConn makes a connection without an id and a queue pair.
func newConn(s *shared, cfg *Config, room int) *Conn {
	// The room for events is more than a connection can have before it is established.
	return &Conn{cfg: *cfg, s: s, room: room, events: make(chan *cma.Event, 16), down: make(chan struct{}, 1), done: make(chan struct{})}
}

// sink takes the events of the id.
func (c *Conn) sink(e *cma.Event) {
	switch e.Type {
	case cma.TimewaitExit:
	case cma.Disconnected:
		c.ended()
	default:
		select {
		case c.events <- e:
		default:
		}
		c.state.Lock()
		live := c.live
		c.state.Unlock()
		if live && failure(e) != nil {
			c.ended()
		}
	}
	c.state.Lock()
	heard := c.heard
	c.state.Unlock()
	if heard != nil {
		heard()
	}
}

// ended takes the end of the connection from the connection manager.
func (c *Conn) ended() {
	select {
	case c.down <- struct{}{}:
	default:
	}
	c.state.Lock()
	closing := c.closing
	if !closing {
		c.ends.Add(1)
	}
	c.state.Unlock()
	if closing {
		return
	}
	_ = c.id.Disconnect() // confirms it to the peer, which waits; fails if Close has done it
	go c.peerLeft()
}

// peerLeft ends the connection on this side, when the peer has.
func (c *Conn) peerLeft() {
	defer c.ends.Done()
	c.fail()
	c.end(ErrDisconnected)
}

// fail moves the queue pair to ERR, where it completes all its requests.
func (c *Conn) fail() {
	if c.qp != nil {
		_ = c.qp.Modify(&verbs.QPAttr{State: verbs.QPErr}, verbs.QPMaskState) // fails if it is closed
	}
}

// end records why the connection has ended: the first reason counts.
func (c *Conn) end(err error) {
	c.state.Lock()
	defer c.state.Unlock()
	if c.err == nil {
		c.err = err
		close(c.done)
	}
}

// wait waits for an event of a type. Another one is the error that it reports.
func (c *Conn) wait(ctx context.Context, want cma.EventType) (*cma.Event, error) {
	for {
		select {
		case e := <-c.events:
			if err := failure(e); err != nil {
				return nil, err
			}
			if e.Type == want {
				return e, nil
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.done:
			return nil, c.Err()
		}
	}
}

// failed returns what an event that has come reports, nil if there is none.
func (c *Conn) failed() error {
	select {
	case e := <-c.events:
		return failure(e)
	default:
		return nil
	}
}

// makeQP makes the queue pair and what it needs, and moves it to INIT.
func (c *Conn) makeQP() (err error) {
	dev := c.s.dev
	if c.pd = c.cfg.PD; c.pd == nil {
		if c.pd, err = dev.AllocPD(); err != nil {
			return err
		}
		c.closers = append(c.closers, c.pd.Close)
	}
	c.closers = append(c.closers, c.closeMRs)
	c.sendCQ, c.recvCQ = c.cfg.SendCQ, c.cfg.RecvCQ
	if c.sendCQ == nil || c.recvCQ == nil {
		if c.cfg.Notify {
			if c.channel, err = dev.CreateChannel(); err != nil {
				return err
			}
			c.closers = append(c.closers, c.channel.Close)
		}
		cq, err := dev.CreateCQ(max(1, c.cfg.Cap.MaxSendWR+c.cfg.Cap.MaxRecvWR), c.channel)
		if err != nil {
			return err
		}
		c.closers = append(c.closers, cq.Close)
		if c.sendCQ == nil {
			c.sendCQ = cq
		}
		if c.recvCQ == nil {
			c.recvCQ = cq
		}
	}
	c.qp, err = c.pd.CreateQP(&verbs.QPConfig{Type: c.cfg.Type, SendCQ: c.sendCQ, RecvCQ: c.recvCQ, SRQ: c.cfg.SRQ, Cap: c.cfg.Cap, SignalAll: c.cfg.SignalAll})
	if err != nil {
		return err
	}
	c.closers = append(c.closers, c.qp.Close)
	if err := c.modify(verbs.QPInit, nil); err != nil {
		return err
	}
	if c.cfg.Setup == nil {
		return nil
	}
	c.setSetup(true)
	defer c.setSetup(false)
	return c.cfg.Setup(c)
}

func (c *Conn) setSetup(on bool) {
	c.state.Lock()
	c.setup = on
	c.state.Unlock()
}

// SetPrivate sets what the peer is told, instead of Private in the Config: such as the key of a region
// that Setup has registered. Only Setup may call it.
//
// Errors: EINVAL if there is more than the message has room for, or outside of Setup.
func (c *Conn) SetPrivate(private []byte) error {
	const op = "set_private"
	c.state.Lock()
	defer c.state.Unlock()
	switch {
	case !c.setup:
		return invalid(op, "the peer has been told already")
	case len(private) > c.room:
		return tooLong(op, len(private), c.room)
	}
	c.cfg.Private = append([]byte(nil), private...)
	return nil
}

// modify moves the queue pair to a state. The connection manager knows the attributes; what own
// says of READs and atomics bounds them.
func (c *Conn) modify(to verbs.QPState, own *cma.ConnParam) error {
	a, mask, err := c.id.QPAttr(to)
	if err != nil {
		return err
	}
	switch to {
	case verbs.QPInit:
		a.Access = c.cfg.Access
	case verbs.QPRTR:
		a.MinRNRTimer = c.cfg.MinRNRTimer
		a.MaxDestRDAtomic = min(a.MaxDestRDAtomic, own.ResponderResources)
	case verbs.QPRTS:
		a.MaxRDAtomic = min(a.MaxRDAtomic, own.InitiatorDepth)
	}
	return c.qp.Modify(&a, mask)
}

// ready moves the queue pair to RTS.
func (c *Conn) ready(own *cma.ConnParam) error {
	if err := c.modify(verbs.QPRTR, own); err != nil {
		return err
	}
	return c.modify(verbs.QPRTS, own)
}

// established marks the connection as one that is ended in order. The peer may refuse it even now: this
// side's last message was not there when its process died, or gave up.
func (c *Conn) established() {
	c.close.Lock()
	c.up = true
	c.close.Unlock()
	c.state.Lock()
	c.live = true
	c.state.Unlock()
	if c.failed() != nil { // it came before live was set
		c.ended()
	}
}

// QP returns the queue pair. It is the connection's: the program posts to it, and leaves its state and
// its end to [Conn.Close].
func (c *Conn) QP() *verbs.QP { return c.qp }

// PD returns the protection domain of the queue pair.
func (c *Conn) PD() *verbs.PD { return c.pd }

// SendCQ returns the completion queue of sends.
func (c *Conn) SendCQ() *verbs.CQ { return c.sendCQ }

// RecvCQ returns the completion queue of receives; without a Config that says otherwise it is that of
// sends, too.
func (c *Conn) RecvCQ() *verbs.CQ { return c.recvCQ }

// Channel returns the completion channel of the connection's own completion queue, if the Config has Notify; nil otherwise.
func (c *Conn) Channel() *verbs.Channel { return c.channel }

// Device returns the device.
func (c *Conn) Device() *verbs.Device { return c.s.dev }

// LocalAddr returns the local address.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

// Private returns what the peer has said when the connection was made, padded with zeros to the room
// that the message has. The slice is the caller's.
func (c *Conn) Private() []byte { return append([]byte(nil), c.private...) }

// Done returns a channel that is closed when the connection has ended: the peer has disconnected, its
// process is known to be dead, or Close was called. All requests of the queue pair then complete, those that had
// not with [verbs.WCWRFlushErr].
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns nil while the connection is up, then why it ended: [ErrDisconnected] or [ErrClosed].
func (c *Conn) Err() error {
	c.state.Lock()
	defer c.state.Unlock()
	return c.err
}

// RegMR registers memory in the connection's protection domain, as [verbs.PD.RegMR] does. Close closes
// the region too.
func (c *Conn) RegMR(buf []byte, access verbs.Access) (*verbs.MR, error) {
	return c.keep(c.pd.RegMR(buf, access))
}

// AllocMR allocates memory and registers it in the connection's protection domain, as [verbs.PD.AllocMR] does. Close closes
// the region too, and then the memory is gone.
func (c *Conn) AllocMR(length int, access verbs.Access) (*verbs.MR, error) {
	return c.keep(c.pd.AllocMR(length, access))
}

// keep makes Close close a region.
func (c *Conn) keep(mr *verbs.MR, err error) (*verbs.MR, error) {
	if err != nil {
		return nil, err
	}
	c.state.Lock()
	c.mrs = append(c.mrs, mr)
	c.state.Unlock()
	return mr, nil
}

func (c *Conn) closeMRs() error {
	c.state.Lock()
	mrs := c.mrs
	c.state.Unlock()
	for _, mr := range slices.Backward(mrs) { // a later region may lie in the memory of an earlier one
		if err := mr.Close(); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the connection. The queue pair goes to ERR, so that its requests end. The peer is told,
// and Close waits for it to confirm, a second at most. Then the queue pair is closed, the regions of
// RegMR and AllocMR, and the completion queue, domain and device if they are the connection's own; with the queue
// pair go its completions that were not polled. A program that wants its last requests done waits for
// their completions first. It is idempotent.
//
// Errors: EBUSY while something of the program's stands on an object of the connection, such as a
// region that was registered by PD. The connection has ended, and Close may be called again.
func (c *Conn) Close() error {
	c.close.Lock()
	defer c.close.Unlock()
	c.state.Lock()
	first := !c.closing
	c.closing = true
	c.state.Unlock()
	if first {
		c.shutdown()
	}
	for n := len(c.closers); n > 0; n-- {
		if err := c.closers[n-1](); err != nil {
			return err
		}
		c.closers = c.closers[:n-1]
	}
	return nil
}

// shutdown ends the connection, and leaves what it is made of.
func (c *Conn) shutdown() {
	c.fail()
	if c.up && c.id.Disconnect() == nil {
		t := time.NewTimer(closeWait)
		select {
		case <-c.down:
		case <-t.C:
		}
		t.Stop()
	}
	c.ends.Wait()
	if c.id != nil {
		_ = c.id.Close() // returns nil
	}
	c.end(ErrClosed)
}

// abort closes a connection that was not established, and returns why with what fails on the way.
func (c *Conn) abort(why error) error {
	if err := c.Close(); err != nil {
		return errors.Join(why, err)
	}
	return why
}
