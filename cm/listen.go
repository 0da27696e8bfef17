package cm

import (
	"container/list"
	"context"
	"errors"
	"net/netip"
	"sync"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// Listener takes requests for connections. All methods are safe for concurrent use.
type Listener struct {
	cfg   Config
	space cma.PortSpace
	typ   verbs.QPType
	at    netip.AddrPort
	// unfollow ends the watch for devices that appear; nil: there is none.
	unfollow func()

	mu           sync.Mutex // guards what follows
	parts        []*part    // the first one lives as long as the listener
	again, fresh list.List  // of *Request that Next has not returned; again: those that were turned away before
	byID         map[*cma.ID]*Request
	came         signal // requests
	offers       offers // of Accept
	closed       bool

	adding  sync.Mutex // held while parts are added; taken before mu
	closing sync.Mutex // held by Close; guards done
	done    bool
}

// part is a listener at the addresses of one device.
type part struct {
	s  *shared
	id *cma.ID
}

// Listen listens at a local address, "host:port". Port 0 stands for any; [Listener.Addr] returns it. cfg
// is what Accept makes connections of; nil means defaults.
//
// No host stands for all addresses, and so do 127.0.0.1 and ::1: all those of the Device in cfg, or,
// without one, of all devices that [verbs.Devices] lists, also of those that appear later. The loopback
// interface counts if there is no other. What the program or another user has opened is left out.
//
// Errors, in a *net.OpError: EADDRINUSE if the port is taken, EADDRNOTAVAIL if a listener at another
// address stands in the way; ENODEV if no device has the address; EACCES for a port that needs
// privileges; the context's error, of looking up the host; those of [verbs.Open]; EINVAL for a Config
// that cannot be.
func Listen(ctx context.Context, address string, cfg *Config) (*Listener, error) {
	const op = "listen"
	c, err := cfg.filled(op, MaxAcceptPrivate)
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, err)
	}
	l, at, err := listen(ctx, op, address, cma.PSTCP, c.Type, &c)
	if err != nil {
		return nil, opError(op, at, err)
	}
	return l, nil
}

// listen makes a listener, at the first address that the address stands for.
func listen(ctx context.Context, op, address string, space cma.PortSpace, t verbs.QPType, c *Config) (*Listener, netip.AddrPort, error) {
	var at netip.AddrPort
	if err := ctx.Err(); err != nil {
		return nil, at, err
	}
	all, err := lookup(ctx, address)
	if err != nil {
		return nil, at, err
	}
	at = all[0]
	l := &Listener{cfg: *c, space: space, typ: t, at: at, byID: map[*cma.ID]*Request{}}
	if c.Device == nil && cma.IsAny(at.Addr()) {
		err = l.listenAll(op)
	} else {
		_, err = l.add(op, at.Addr())
	}
	if err != nil {
		return nil, at, errors.Join(err, l.Close())
	}
	return l, at, nil
}

// add makes the listener listen at the device that has a local address, or at that of the Config. With
// an error, opened reports whether the device is there.
func (l *Listener) add(op string, local netip.Addr) (opened bool, err error) {
	s, err := acquire(op, &l.cfg, local)
	if err != nil {
		return false, err
	}
	p := &part{s: s}
	if err := l.start(p); err != nil {
		return true, errors.Join(err, p.close())
	}
	l.mu.Lock()
	if len(l.parts) == 0 {
		l.at = p.id.Info().Src // with the port that the other parts get, too
	}
	l.parts = append(l.parts, p)
	l.mu.Unlock()
	return true, nil
}

func (l *Listener) start(p *part) (err error) {
	if p.id, err = p.s.mgr.NewID(l.space, l.typ, func(e *cma.Event) { l.sink(p, e) }); err != nil {
		return err
	}
	if err := p.id.Bind(l.at); err != nil {
		return err
	}
	return p.id.ListenEvicting(l.cfg.Backlog)
}

// close ends the part. On an error it is called again.
func (p *part) close() error {
	if p.id != nil {
		_ = p.id.Close() // returns nil; no request comes after it
	}
	return p.s.release()
}

// sink takes requests, and the events of those that Next has not returned.
func (l *Listener) sink(p *part, e *cma.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch e.Type {
	case cma.ConnectRequest:
	case cma.Withdrawn:
		if r := l.byID[e.New]; r != nil { // otherwise take finds out
			l.removeLocked(r)
			delete(l.byID, e.New)
		}
		return
	default:
		if r := l.byID[e.ID]; r != nil {
			r.conn.sink(e)
		}
		return
	}
	r := &Request{l: l, conn: newConn(p.s, &l.cfg, MaxAcceptPrivate), private: e.Conn.Private, peer: e.Conn}
	r.conn.id = e.New
	if len(e.UD.Private) > 0 {
		r.private = e.UD.Private
	}
	r.queue = &l.fresh
	if e.Again {
		r.queue = &l.again
	}
	r.place = r.queue.PushBack(r)
	l.byID[e.New] = r
	l.came.send()
}

// removeLocked takes a request out of the queue that it is in.
func (l *Listener) removeLocked(r *Request) {
	if r.queue != nil {
		r.queue.Remove(r.place)
		r.queue = nil
	}
}

// popLocked takes the next request out of its queue; nil if there is none.
func (l *Listener) popLocked() *Request {
	for _, q := range []*list.List{&l.again, &l.fresh} {
		if e := q.Front(); e != nil {
			r := e.Value.(*Request)
			l.removeLocked(r)
			return r
		}
	}
	return nil
}

// signal wakes those that wait. The caller's lock guards it.
type signal struct{ c chan struct{} }

// wait returns a channel that is closed when send is called.
func (s *signal) wait() <-chan struct{} {
	if s.c == nil {
		s.c = make(chan struct{})
	}
	return s.c
}

func (s *signal) send() {
	if s.c != nil {
		close(s.c)
		s.c = nil
	}
}

// Addr returns the local address.
func (l *Listener) Addr() netip.AddrPort { return l.at }

// Next waits for a request, and returns it. The program must call its Accept or Reject; meanwhile the
// peer waits.
//
// Errors, in a *net.OpError: the context's error; [ErrClosed] if the listener is closed.
func (l *Listener) Next(ctx context.Context) (*Request, error) {
	r, err := l.next(ctx)
	if err != nil {
		return nil, opError("accept", l.Addr(), err)
	}
	return r, nil
}

func (l *Listener) next(ctx context.Context) (*Request, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return nil, ErrClosed
		}
		if r := l.popLocked(); r != nil {
			l.mu.Unlock()
			if l.take(r) {
				return r, nil
			}
			continue
		}
		came := l.came.wait()
		l.mu.Unlock()
		select {
		case <-came:
		case <-ctx.Done():
		}
	}
}

// take makes a request that was in the queue the caller's. It reports whether the peer still waits.
func (l *Listener) take(r *Request) bool {
	id := r.conn.id
	id.SetSink(r.conn.sink)
	there := id.Seen()
	l.mu.Lock()
	delete(l.byID, id)
	l.mu.Unlock()
	if !there || len(r.conn.events) > 0 { // the only event that there can be is the end
		_ = id.Close() // returns nil
		return false
	}
	in := id.Info()
	r.conn.local, r.conn.remote = in.Src, in.Dst
	r.conn.private = r.private
	return true
}

// Close ends the listener. Requests that wait are refused, and connections that no call of Accept has
// returned end; the others stay. It is idempotent.
func (l *Listener) Close() error {
	if l.unfollow != nil {
		l.unfollow() // no part is added after it
	}
	l.closing.Lock()
	defer l.closing.Unlock()
	if l.done {
		return nil
	}
	l.mu.Lock()
	parts := l.parts
	l.mu.Unlock()
	for _, p := range parts {
		_ = p.id.Close() // returns nil; no request comes after it
	}
	l.mu.Lock()
	var queue []*Request
	for r := l.popLocked(); r != nil; r = l.popLocked() {
		queue = append(queue, r)
	}
	l.closed = true
	offered := l.offers.takeAllLocked()
	l.came.send()
	l.mu.Unlock()
	for _, r := range queue {
		_ = r.conn.id.Close() // returns nil
	}
	for _, o := range offered {
		_ = o.conn.Close() // what fails is that of a connection that nobody knows
	}
	for n := len(parts); n > 0; n-- {
		if err := parts[n-1].close(); err != nil {
			return err
		}
		l.mu.Lock()
		l.parts = parts[:n-1]
		l.mu.Unlock()
	}
	l.done = true
	return nil
}

// Request is a peer's request for a connection. It is accepted or rejected, once.
type Request struct {
	l       *Listener
	conn    *Conn
	private []byte
	peer    cma.ConnParam

	queue *list.List // of the listener, whose mu guards it; nil: in none
	place *list.Element

	mu   sync.Mutex // guards used
	used bool
}

// Private returns what the peer has said, padded with zeros to MaxDialPrivate bytes. The slice is the
// caller's.
func (r *Request) Private() []byte { return append([]byte(nil), r.private...) }

// LocalAddr returns the address that the peer wants to be connected to.
func (r *Request) LocalAddr() netip.AddrPort { return r.conn.local }

// RemoteAddr returns the peer's address.
func (r *Request) RemoteAddr() netip.AddrPort { return r.conn.remote }

// use makes the request used. It reports whether it was not.
func (r *Request) use() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.used
	r.used = true
	return !was
}

// Accept accepts the request, and returns the connection when the peer has confirmed it. A nil cfg means
// that of the listener; its Device must be the one that the request has come to, or nil. If Accept fails, the peer is
// refused.
//
// Errors, in a *net.OpError: a [*RejectError] if the peer has given up; ETIMEDOUT if it does not
// answer; the context's error; EINVAL for a Config that cannot be, or a request that is accepted or
// rejected already; what keeps the queue pair from being made; what Setup returns.
func (r *Request) Accept(ctx context.Context, cfg *Config) (*Conn, error) {
	if _, err := r.tryAccept(ctx, cfg); err != nil {
		return nil, err
	}
	return r.conn, nil
}

// tryAccept is Accept. With an error, gone reports whether the peer is the reason for it.
func (r *Request) tryAccept(ctx context.Context, cfg *Config) (gone bool, err error) {
	const op = "accept"
	if !r.use() {
		return false, opError(op, r.conn.remote, invalid(op, "the request is accepted or rejected already"))
	}
	if err = r.offer(cfg); err == nil {
		if _, err = r.conn.wait(ctx, cma.Established); err == nil {
			r.conn.established()
			return false, nil
		}
		gone = ctx.Err() == nil
	} else if why := r.conn.failed(); why != nil {
		gone, err = true, why // and not what failed for it
	}
	return gone, opError(op, r.conn.remote, r.conn.abort(err))
}

// offer makes the queue pair and tells the peer of it.
func (r *Request) offer(cfg *Config) error {
	const op = "accept"
	c := r.conn
	if cfg != nil {
		f := *cfg
		switch f.Device {
		case nil:
			f.Device = c.s.dev
		case c.s.dev:
		default:
			return invalid(op, "the Device is not the one that the request has come to")
		}
		var err error
		if c.cfg, err = f.filled(op, MaxAcceptPrivate); err != nil {
			return err
		}
		if c.cfg.Type != r.l.cfg.Type {
			return invalid(op, "type %v: the listener's is %v", c.cfg.Type, r.l.cfg.Type)
		}
	}
	if err := r.l.hold(c); err != nil {
		return err
	}
	if err := c.makeQP(); err != nil {
		return err
	}
	attr := c.s.dev.Attr()
	own := c.cfg.params(&attr)
	own.QPN = c.qp.Number()
	own.ResponderResources = min(own.ResponderResources, r.peer.ResponderResources)
	own.InitiatorDepth = min(own.InitiatorDepth, r.peer.InitiatorDepth)
	if err := c.ready(&own); err != nil {
		return err
	}
	return c.id.Accept(&own)
}

// hold makes a connection a user of its device.
func (l *Listener) hold(c *Conn) error {
	l.closing.Lock()
	defer l.closing.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	inUse.mu.Lock()
	defer inUse.mu.Unlock()
	c.s.users++
	c.closers = append(c.closers, c.s.release)
	return nil
}

// Reject refuses the request, for a reason and with at most MaxRejectPrivate bytes of private data. The
// usual reason is [ReasonProgram], which 0 stands for.
//
// Errors: EINVAL if the data is too long or the request is accepted or rejected already.
func (r *Request) Reject(reason Reason, private []byte) error {
	const op = "reject"
	if len(private) > MaxRejectPrivate {
		return opError(op, r.conn.remote, tooLong(op, len(private), MaxRejectPrivate))
	}
	if !r.use() {
		return opError(op, r.conn.remote, invalid(op, "the request is accepted or rejected already"))
	}
	err := r.conn.id.Reject(int(reason), private)
	if len(r.conn.events) > 0 {
		err = nil // the peer has given up
	}
	return opError(op, r.conn.remote, r.conn.abort(err))
}
