package shm

// The end of a channel. The peer closes it (a message on the socket), ends (the
// end of the socket, or of the process, see life.go), or writes nonsense; or we close it. The
// first of these is its cause (fail). If it is not our own Close, Poll delivers what the peer
// had committed before, reports the cause to the sink, and closes the channel.

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// watchPeers is the one goroutine that an inbox has. It waits until a peer's socket or process
// has something to report.
func (in *Inbox) watchPeers() {
	defer close(in.ended)
	var tags [32]int32
	for {
		n, err := in.watch.Wait(tags[:])
		if err != nil {
			return // stopWatching has closed the watch
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

// hear takes the channel down if a message has come on the socket, or the socket or the
// process has ended. There may be no such thing: the watch reported a slot, which may belong
// to another channel since.
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

// Check is Err, but first looks whether the peer has closed the channel or ended, which
// watchPeers may not have noticed yet.
func (c *Channel) Check() error {
	c.hear()
	return c.Err()
}

// fail takes the channel down, unless it is down already: Begin reports false from now on, and
// Poll will report the cause.
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
	_ = c.in.watch.RemoveConn(c.conn) // an error means that it is not watched
	_ = c.in.watch.Remove(c.life.fd)  // likewise
}

// Close ends the channel: it sends the peer bye, and drops what has arrived and was not polled.
// It does not wait for a goroutine that sends or polls: that one unmaps its ring when it
// leaves. It is idempotent, and a sink may call it.
func (c *Channel) Close() {
	c.setDown(ErrClosed)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.unwatchLocked()
	_ = sys.SendNow(c.conn, message(msgBye)) // if bye does not arrive, the end of the socket does
	_ = c.conn.Close()                       // likewise
	c.life.drop()
	c.mu.Unlock()

	reach.deny(c.peer.pid)
	c.tx.close()
	c.rx.close()
	c.unblock()
	c.in.freeSlot(c.slot)
}
