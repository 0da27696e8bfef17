package shm

// The end of a channel. The peer closes it (a message on the socket), ends (the
// end of the socket, or the process's own descriptor), or writes nonsense; or
// we close it. The first of these is its cause (fail); the poller delivers what
// the peer had committed before, reports the cause, and closes.

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// watchPeers is the one goroutine that an inbox has. It waits for the ends of
// all channels.
func (in *Inbox) watchPeers() {
	defer close(in.ended)
	var tags [32]int32
	for {
		n, err := in.watch.Wait(tags[:])
		if err != nil {
			return // stopWatching
		}
		for _, slot := range tags[:n] {
			if c := in.channel(int(slot)); c != nil {
				c.hear()
			}
		}
	}
}

func (in *Inbox) stopWatching() {
	_ = in.watch.Close() // it only ends the waiting
	<-in.ended
}

// hear finds out what the socket or the process has to say. The slot may have
// changed hands since, so there may be nothing.
func (c *Channel) hear() {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	var b [maxMessage]byte
	n, err := sys.RecvNow(c.conn, b[:])
	exited := c.life.ended()
	c.mu.Unlock()

	switch {
	case errors.Is(err, syscall.EAGAIN):
		if exited {
			c.fail(ErrPeerDied)
		}
	case err != nil || n == 0:
		c.fail(ErrPeerDied)
	case kindOf(b[:n]) == msgBye:
		c.fail(ErrPeerClosed)
	default:
		c.fail(fmt.Errorf("%w: message of kind %d", ErrBroken, kindOf(b[:n])))
	}
}

// Check is Err, but does not wait to be told that the peer has ended.
func (c *Channel) Check() error {
	c.hear()
	return c.Err()
}

// fail takes the channel down, for the first cause only: nothing is sent any
// more, and Poll will come by and report it.
func (c *Channel) fail(err error) {
	if !c.setDown(err) {
		return
	}
	c.unwatch()
	c.in.poke(c.slot)
}

func (c *Channel) setDown(err error) bool { return c.down.CompareAndSwap(nil, &cause{err}) }

// watch begins to watch for the peer's end.
func (c *Channel) watch() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClosed
	}
	err := c.in.watch.AddConn(c.conn, int32(c.slot))
	if err == nil {
		err = c.in.watch.Add(c.life.fd, int32(c.slot))
	}
	return err
}

// unwatch ends the watching: a socket at its end is readable for ever.
func (c *Channel) unwatch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.unwatchLocked()
	}
}

func (c *Channel) unwatchLocked() {
	_ = c.in.watch.RemoveConn(c.conn) // an error: it is not watched
	_ = c.in.watch.Remove(c.life.fd)  // likewise
}

// Close ends the channel: the peer is told, what has arrived and was not polled
// is dropped. It waits for nobody; memory is unmapped when the last goroutine
// that is inside leaves. It is idempotent, and may be called by a sink.
func (c *Channel) Close() {
	c.setDown(ErrClosed)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.unwatchLocked()
	_ = sys.SendNow(c.conn, message(msgBye)) // if it does not arrive, the end does
	_ = c.conn.Close()                       // likewise
	c.life.drop()
	c.mu.Unlock()

	reach.deny(c.peer.pid)
	c.tx.close()
	c.rx.close()
	c.unblock()
	c.in.freeSlot(c.slot)
}
