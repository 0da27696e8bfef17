package rconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// MinRing and MaxRing are the sizes that a ring may have, in bytes.
const (
	MinRing = 4 << 10
	MaxRing = 64 << 20
)

const (
	defaultRing      = 256 << 10
	defaultKeepAlive = 15 * time.Second
)

// Config is how connections are made. A nil *Config, and the zero value of each field, mean the default.
type Config struct {
	// Ring is the size of each of the two rings of a connection, a power of two from MinRing to MaxRing: how many bytes may be
	// under way each way. Memory is used as bytes move. Zero: 256 KiB.
	Ring int

	// KeepAlive is after how long without anything from the peer it is asked whether it is still there. Zero: 15 s; negative:
	// never.
	KeepAlive time.Duration

	// Config is how the queue pairs are connected: Device, if the package is not to open one, addresses, retries, TOS. Queue
	// pairs, completion queues, domains, rights, private data and Setup are the package's own.
	Config cm.Config
}

func (cfg *Config) complete(op string) (Config, error) {
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if c.Ring == 0 {
		c.Ring = defaultRing
	}
	if c.KeepAlive == 0 {
		c.KeepAlive = defaultKeepAlive
	}
	switch {
	case c.Ring < MinRing || c.Ring > MaxRing || c.Ring&(c.Ring-1) != 0:
		return c, fmt.Errorf("%s: a ring of %d bytes: %w", op, c.Ring, syscall.EINVAL)
	case c.Config.PD != nil || c.Config.Access != 0 || c.Config.SignalAll || c.Config.SendCQ != nil || c.Config.RecvCQ != nil || c.Config.SRQ != nil || c.Config.Type != 0 || c.Config.Setup != nil || c.Config.Private != nil || c.Config.Cap != (verbs.QPCap{}):
		return c, fmt.Errorf("%s: queues, domains, rights and private data are the connection's own: %w", op, syscall.EINVAL)
	}
	c.Config.Notify = true
	c.Config.Cap = verbs.QPCap{MaxSendWR: sends, MaxRecvWR: receives, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: controlBytes}
	return c, nil
}

// past is a context that is done.
var past = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// newConn makes a side of a connection, in Setup: its memory, and its receives.
func newConn(conn *cm.Conn, cfg *Config) (*Conn, error) {
	ring, out, words := make([]byte, cfg.Ring), make([]byte, cfg.Ring), make([]byte, receives*controlStride)
	mr, err := conn.RegMR(ring, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	if err != nil {
		return nil, err
	}
	own, err := conn.RegMR(out, verbs.AccessLocalWrite)
	if err != nil {
		return nil, err
	}
	room, err := conn.RegMR(words, verbs.AccessLocalWrite)
	if err != nil {
		return nil, err
	}
	c := &Conn{cm: conn, memory: own, words: room, bytes: words, every: cfg.KeepAlive, readable: newEvent(), writable: newEvent(), watching: make(chan struct{}, 1)}
	c.in.ring, c.out.ring = ring, out
	var all []verbs.RecvWR
	for i := range receives {
		all = append(all, c.receive(i))
	}
	if _, err := conn.QP().PostRecv(all); err != nil {
		return nil, err
	}
	me := hello{addr: mr.Addr(), rkey: mr.RKey(), size: uint32(cfg.Ring), messages: messages} //nolint:gosec // at most MaxRing
	return c, conn.SetPrivate(me.pack())
}

// start lets a connection work, when it is known where the peer's ring is.
func (c *Conn) start(peer hello) {
	c.out.peer = peer
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if c.every > 0 {
		c.mu.Lock()
		c.alive = time.AfterFunc(c.every, c.keepAlive)
		c.mu.Unlock()
	}
}

// Dial connects to a [Listener]. The address is "host:port", as in [cm.Dial].
//
// Errors: those of cm.Dial; EINVAL for a Config that cannot be; EPROTO in a *net.OpError if what listens there is something else.
func Dial(ctx context.Context, address string, cfg *Config) (*Conn, error) {
	conf, err := cfg.complete("dial")
	if err != nil {
		return nil, err
	}
	var c *Conn
	conf.Config.Setup = func(conn *cm.Conn) (err error) {
		c, err = newConn(conn, &conf)
		return err
	}
	conn, err := cm.Dial(ctx, address, &conf.Config)
	if err != nil {
		return nil, err
	}
	peer, err := parseHello(conn.Private())
	if err != nil {
		err = &net.OpError{Op: "dial", Net: "rdma", Source: Addr{conn.LocalAddr()}, Addr: Addr{conn.RemoteAddr()}, Err: fmt.Errorf("%w: %w", err, syscall.EPROTO)}
		return nil, errors.Join(err, conn.Close())
	}
	c.start(peer)
	return c, nil
}

// Dialer dials with a Config: for programs that take a function which dials.
type Dialer struct{ Config Config }

// DialContext is [Dial] in the shape of [net.Dialer.DialContext]. The network's name says nothing here, and may be any.
func (d *Dialer) DialContext(ctx context.Context, _, address string) (net.Conn, error) {
	c, err := Dial(ctx, address, &d.Config)
	if err != nil {
		return nil, err // not c: that would be a net.Conn that is not nil
	}
	return c, nil
}

// Listener takes connections. It is a [net.Listener], and all methods are safe for concurrent use.
type Listener struct {
	l      *cm.Listener
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	ready  chan *Conn
	places chan struct{} // one is taken by each request that is being answered
	all    sync.WaitGroup
	close  sync.Once
	ended  error // what Close returns
}

var _ net.Listener = (*Listener)(nil)

// Listen listens at a local address, "host:port", as [cm.Listen] does.
//
// Errors: those of cm.Listen; EINVAL for a Config that cannot be.
func Listen(ctx context.Context, address string, cfg *Config) (*Listener, error) {
	conf, err := cfg.complete("listen")
	if err != nil {
		return nil, err
	}
	inner, err := cm.Listen(ctx, address, &conf.Config)
	if err != nil {
		return nil, err
	}
	l := &Listener{l: inner, cfg: conf, ready: make(chan *Conn), places: make(chan struct{}, 256)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.all.Go(l.accept)
	return l, nil
}

// accept answers requests until the listener is closed. Peers that do not confirm keep others waiting only when there are
// as many as places.
func (l *Listener) accept() {
	for {
		r, err := l.l.Next(l.ctx)
		if err != nil {
			return // the listener is closed
		}
		select {
		case l.places <- struct{}{}:
		case <-l.ctx.Done():
			_ = r.Reject(cm.ReasonProgram, nil) // the peer may be gone
			return
		}
		l.all.Go(func() {
			defer func() { <-l.places }()
			l.answer(r)
		})
	}
}

// answer accepts a request, and waits until somebody takes the connection.
func (l *Listener) answer(r *cm.Request) {
	peer, err := parseHello(r.Private())
	if err != nil {
		_ = r.Reject(cm.ReasonProgram, []byte(err.Error())) // the peer may be gone
		return
	}
	conf := l.cfg
	var c *Conn
	conf.Config.Setup = func(conn *cm.Conn) (err error) {
		c, err = newConn(conn, &conf)
		return err
	}
	if _, err := r.Accept(l.ctx, &conf.Config); err != nil {
		return // the peer has heard of it, or is gone
	}
	c.start(peer)
	select {
	case l.ready <- c:
	case <-l.ctx.Done():
		_ = c.Close() // it has served nobody
	}
}

// Accept waits for a connection.
//
// Errors: net.ErrClosed in a *net.OpError when the listener is closed.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.ctx.Done():
		return nil, &net.OpError{Op: "accept", Net: "rdma", Addr: l.Addr(), Err: net.ErrClosed}
	}
}

// Addr returns the address.
func (l *Listener) Addr() net.Addr { return Addr{l.l.Addr()} }

// Close ends the listener. Connections that Accept has returned stay. It is idempotent.
func (l *Listener) Close() error {
	l.close.Do(func() {
		l.cancel()
		l.ended = l.l.Close()
		l.all.Wait()
	})
	return l.ended
}
