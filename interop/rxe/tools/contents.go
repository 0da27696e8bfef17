package tools

import (
	"bytes"
	"fmt"
)

// contents makes and checks the messages of a ping-pong.
//
// The programs have one buffer: they receive into it and send from it. So they
// send what they received last, and a client's first message is what it has
// filled the buffer with. This side sends another pattern in each message, and
// the same must come back; or, if the other side is this package too, the pattern
// of that side.
//
// If a program has several queue pairs, they share its buffer, and messages
// overwrite each other there. So all messages are then the same: the client's,
// which a server sends back.
type contents struct {
	role  Role
	alike bool // all messages are the same
	zeros bool // the first byte of every page is 0, as option -c wants it
	fill  byte // the rest of a program's first message

	last  []byte // what this side sent last; with alike, the only message
	other []byte // scratch
}

// checkedPage is the distance of the bytes that option -c checks: the page size.
const checkedPage = 4096

func newContents(cfg *PingpongConfig) contents {
	c := contents{
		role: cfg.Role, alike: cfg.QPs > 1, zeros: cfg.Check, fill: pingpongs[cfg.Program].fill,
		last: make([]byte, cfg.Size), other: make([]byte, cfg.Size),
	}
	if c.alike && c.role == Client {
		c.make(c.last, Client, 0)
	}
	return c
}

// make fills b with message n of a side.
func (c *contents) make(b []byte, side Role, n int) {
	pattern(b, uint64(side)<<32|uint64(n)&(1<<32-1))
	c.clear(b)
}

// clear makes b pass option -c.
func (c *contents) clear(b []byte) {
	for i := 0; c.zeros && i < len(b); i += checkedPage {
		b[i] = 0
	}
}

// next fills b with this side's message n.
func (c *contents) next(b []byte, n int) {
	if c.alike {
		copy(b, c.last)
		return
	}
	c.make(b, c.role, n)
	copy(c.last, b)
}

// check checks message n of the peer.
func (c *contents) check(b []byte, n int) error {
	if c.role == Server && n == 0 {
		return c.checkFirst(b)
	}
	if bytes.Equal(b, c.last) { // the echo
		return nil
	}
	at := firstDifference(b, c.last)
	if !c.alike {
		c.make(c.other, Client+Server-c.role, n)
		if bytes.Equal(b, c.other) {
			return nil
		}
	}
	return fmt.Errorf("contents differ at byte %d of %d: %#02x, not %#02x", at, len(b), b[at], c.last[at])
}

// checkFirst checks the first message of a client, which is not an echo.
func (c *contents) checkFirst(b []byte) error {
	for i := range c.other {
		c.other[i] = c.fill
	}
	filled := bytes.Equal(b, c.other)
	c.clear(c.other)
	filled = filled || bytes.Equal(b, c.other)
	if !filled {
		c.make(c.other, Client, 0)
		if !bytes.Equal(b, c.other) {
			return fmt.Errorf("first message is neither filled with %#02x nor one of ours: it starts with % x", c.fill, b[:min(8, len(b))])
		}
	}
	if c.alike {
		copy(c.last, b)
	}
	return nil
}
