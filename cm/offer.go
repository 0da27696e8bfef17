package cm

// Accept, and the connections that it has offered to peers.
//
// A request may be forged: nobody will ever confirm the connection. So no call of Accept waits for one
// peer. Each one offers connections to all peers that ask, and returns the first that is confirmed, to
// whomever it was offered by.

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// maxOffered is how many connections of a listener wait to be confirmed.
	maxOffered = 1024
	// confirmTime is how long a peer has to confirm a connection before another one may take its
	// place. If there is room, it has as long as the connection manager repeats its messages.
	confirmTime = time.Second
)

// offer is a connection that the peer has not confirmed, or that no call of Accept has returned.
type offer struct {
	conn  *Conn
	at    time.Time
	heard bool // of the peer: the connection is confirmed, or over
}

// offers are those of a listener. Listener.mu guards them.
type offers struct {
	waiting []*offer // for the peer, the oldest first
	heard   []*offer // those that the peer has answered
	making  int      // calls of Accept that are about to offer one
	changed signal
}

// takeAllLocked empties the list.
func (o *offers) takeAllLocked() []*offer {
	all := slices.Concat(o.waiting, o.heard)
	o.waiting, o.heard = nil, nil
	o.changed.send()
	return all
}

// evictLocked takes out a random one of those whose time is over; nil if there is none.
func (o *offers) evictLocked(now time.Time) *offer {
	n, _ := slices.BinarySearchFunc(o.waiting, now.Add(-confirmTime), func(w *offer, t time.Time) int { return w.at.Compare(t) })
	if n == 0 {
		return nil
	}
	i := rand.N(n)
	old := o.waiting[i]
	o.waiting = slices.Delete(o.waiting, i, i+1)
	return old
}

// hearLocked notes that the peer has answered.
func (o *offers) hearLocked(w *offer) {
	if i := slices.Index(o.waiting, w); i >= 0 {
		o.waiting = slices.Delete(o.waiting, i, i+1)
		o.heard = append(o.heard, w)
		o.changed.send()
	}
	w.heard = true
}

// Accept waits for requests, accepts them as the listener's Config says, and returns a connection when its
// peer has confirmed it. Requests of peers that go away meanwhile are passed over. While peers have not
// confirmed, it accepts further requests, 1,024 of them at most; later calls return the connections
// that are confirmed by then. A peer has a second to confirm before another one may take its place, and
// much longer if there is room.
//
// Errors, in a *net.OpError: the context's error; [ErrClosed] if the listener is closed; what keeps
// the queue pair from being made, such as ENOMEM, or what Setup returns: the peer is refused then.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	const op = "accept"
	for {
		if err := ctx.Err(); err != nil {
			return nil, opError(op, l.Addr(), err)
		}
		s := l.step(time.Now())
		switch {
		case s.closed:
			return nil, opError(op, l.Addr(), ErrClosed)
		case s.old != nil:
			_ = s.old.conn.Close() // what fails is that of a connection that nobody knows
		case s.heard != nil:
			if s.heard.confirmed() {
				return s.heard.conn, nil
			}
			_ = s.heard.conn.Close() // likewise
		case s.r != nil:
			if err := l.offer(s.r); err != nil {
				return nil, err
			}
		default:
			s.wait(ctx)
		}
	}
}

// step is what a call of Accept is to do next: one of the first four, or to wait.
type step struct {
	closed bool
	heard  *offer   // return it if it is confirmed, close it if not
	old    *offer   // close it
	r      *Request // offer a connection, for which there is room

	came    <-chan struct{} // nil: there is a request, but no room
	changed <-chan struct{}
	room    time.Duration // with came nil: when there will be room
}

func (l *Listener) step(now time.Time) (s step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := &l.offers
	if l.closed {
		s.closed = true
		return s
	}
	if len(o.heard) > 0 {
		s.heard = o.heard[0]
		o.heard = slices.Delete(o.heard, 0, 1)
		return s
	}
	s.changed = o.changed.wait()
	if l.again.Len()+l.fresh.Len() == 0 {
		s.came = l.came.wait()
		return s
	}
	if len(o.waiting)+o.making >= maxOffered {
		if s.old = o.evictLocked(now); s.old == nil && len(o.waiting) > 0 {
			s.room = o.waiting[0].at.Add(confirmTime).Sub(now)
		}
		return s
	}
	o.making++
	s.r = l.popLocked()
	return s
}

// wait waits until there may be something to do.
func (s *step) wait(ctx context.Context) {
	var room <-chan time.Time
	if s.room > 0 {
		t := time.NewTimer(s.room)
		defer t.Stop()
		room = t.C
	}
	select {
	case <-s.came:
	case <-s.changed:
	case <-room:
	case <-ctx.Done():
	}
}

// confirmed reports whether the peer has confirmed the connection.
func (o *offer) confirmed() bool {
	select {
	case e := <-o.conn.events:
		if failure(e) != nil {
			return false
		}
	default:
		return false // it has ended before
	}
	o.conn.established()
	return true
}

// offer offers a connection to a peer. It returns an error if this side is the reason why it cannot.
func (l *Listener) offer(r *Request) error {
	const op = "accept"
	o := &offer{conn: r.conn}
	err := error(nil)
	if l.take(r) {
		r.conn.state.Lock()
		r.conn.heard = func() {
			l.mu.Lock()
			l.offers.hearLocked(o)
			l.mu.Unlock()
		}
		r.conn.state.Unlock()
		r.use() // nobody else knows the request
		if err = r.offer(nil); err == nil && l.keep(o) {
			return nil
		}
		if err != nil && r.conn.failed() != nil {
			err = nil // the peer has gone, and this failed for it
		}
	}
	l.mu.Lock()
	l.offers.making--
	l.offers.changed.send()
	l.mu.Unlock()
	return opError(op, r.conn.remote, r.conn.abort(err))
}

// keep puts an offer into the list. It reports false if the listener was closed meanwhile.
func (l *Listener) keep(o *offer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.offers.making--
	o.at = time.Now() // with the lock held, so that they are in order
	l.offers.waiting = append(l.offers.waiting, o)
	l.offers.changed.send()
	if o.heard {
		l.offers.hearLocked(o)
	}
	return true
}
