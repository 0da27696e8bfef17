package main

// A TCP ping-pong of the same kind as the one over Verbena: two processes, 8
// bytes, both sides spin on a socket that does not block.

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
)

// newTCP connects to a peer process. The group closes the connection.
func (b *bench) newTCP() (*peer, *sys.Conn, error) {
	p, err := b.newPeer()
	if err != nil {
		return nil, nil, err
	}
	r, err := p.call(request{Op: opListen})
	if err != nil {
		return nil, nil, err
	}
	c, err := sys.Dial(r.Port)
	if err != nil {
		return nil, nil, err
	}
	b.later(func() error { c.Close(); return nil })
	return p, c, nil
}

// pingTCP sends numbers and spins until they come back.
func pingTCP(c *sys.Conn, d time.Duration, keep *sampler) error {
	var out, in [pingPongSize]byte
	start := time.Now()
	last := time.Duration(0)
	for seq := uint64(1); ; seq++ {
		binary.NativeEndian.PutUint64(out[:], seq)
		if err := sendTCP(c, out[:]); err != nil {
			return err
		}
		if err := recvTCP(c, in[:], nil); err != nil {
			return err
		}
		if in != out {
			return fmt.Errorf("TCP: sent %x, got %x", out, in)
		}
		now := time.Since(start)
		if !keep.add((now-last)/oneWayParts) || now >= d {
			return nil
		}
		last = now
	}
}

// pongTCP sends back what comes.
func pongTCP(c *sys.Conn, stop *atomic.Bool) error {
	var b [pingPongSize]byte
	for {
		if err := recvTCP(c, b[:], stop); err != nil {
			return err
		}
		if stop.Load() {
			return nil
		}
		if err := sendTCP(c, b[:]); err != nil {
			return err
		}
	}
}

// recvTCP spins until b is full or, if stop is not nil, until stop is set.
func recvTCP(c *sys.Conn, b []byte, stop *atomic.Bool) error {
	var wait spinner
	for len(b) > 0 {
		n, err := c.Recv(b)
		b = b[n:]
		switch {
		case err == nil:
		case err != sys.ErrAgain:
			return fmt.Errorf("TCP: %w", err)
		case stop != nil && stop.Load():
			return nil
		case stop != nil:
			wait.pause()
		default:
			if err := wait.idle(); err != nil {
				return err
			}
		}
	}
	return nil
}

func sendTCP(c *sys.Conn, b []byte) error {
	var wait spinner
	for len(b) > 0 {
		n, err := c.Send(b)
		b = b[n:]
		if err != nil {
			if err != sys.ErrAgain {
				return fmt.Errorf("TCP: %w", err)
			}
			if err := wait.idle(); err != nil {
				return err
			}
		}
	}
	return nil
}
