package rconn

import (
	"encoding/binary"
	"fmt"
)

// hello is what the sides tell each other in the private data of their connection: where the ring is that the peer writes into.
//
//	 0  4  "VRC1": the protocol, and its version
//	 4  4  rkey
//	 8  8  address
//	16  4  size in bytes, a power of two
//	20  2  messages that may be under way
//	22  2  zero
type hello struct {
	addr     uint64
	rkey     uint32
	size     uint32
	messages uint16
}

const (
	helloBytes = 24
	magic      = "VRC1"
)

var be = binary.BigEndian

func (h *hello) pack() []byte {
	b := make([]byte, helloBytes)
	copy(b, magic)
	be.PutUint32(b[4:], h.rkey)
	be.PutUint64(b[8:], h.addr)
	be.PutUint32(b[16:], h.size)
	be.PutUint16(b[20:], h.messages)
	return b
}

// parseHello checks what a peer says of itself.
func parseHello(b []byte) (h hello, err error) {
	if len(b) < helloBytes || string(b[:4]) != magic {
		return h, fmt.Errorf("rconn: the peer does not speak this protocol")
	}
	h = hello{rkey: be.Uint32(b[4:]), addr: be.Uint64(b[8:]), size: be.Uint32(b[16:]), messages: be.Uint16(b[20:])}
	if h.size < MinRing || h.size > MaxRing || h.size&(h.size-1) != 0 || h.messages < minMessages || h.messages > maxMessages || h.addr+uint64(h.size) < h.addr {
		return h, fmt.Errorf("rconn: the peer has a ring of %d bytes at %#x, for %d messages", h.size, h.addr, h.messages)
	}
	return h, nil
}

// control is a message of a few bytes beside the data: how much of the peer's data was taken in all, and whether more comes.
//
//	0  8  bytes that were read
//	8  8  messages that were taken
//	16 1  1: no more data comes
type control struct {
	bytes, messages uint64
	end             bool
}

const controlBytes = 17

func (c *control) put(b *[controlBytes]byte) {
	be.PutUint64(b[:], c.bytes)
	be.PutUint64(b[8:], c.messages)
	b[16] = 0
	if c.end {
		b[16] = 1
	}
}

func parseControl(b []byte, n uint32) (c control, ok bool) {
	if n != controlBytes || len(b) < controlBytes || b[16] > 1 {
		return c, false
	}
	return control{bytes: be.Uint64(b), messages: be.Uint64(b[8:]), end: b[16] == 1}, true
}

// How many receives a side posts. Of them, messages of data may use a part, and the rest is for control messages: a peer
// that is told of nothing sends at most one for each quarter of the ring or of the messages, and one at the end.
const (
	messages    = 48
	receives    = messages + 16
	minMessages = 16
	maxMessages = 4096
)

// sends is how many requests the send queue holds: messages, control messages, and what asks whether the peer is there. One
// in signalEvery asks for a completion, which is for all before it.
const (
	sends       = 128
	signalEvery = 16
)

func (h *hello) at(off uint64) (addr uint64) { return h.addr + off&uint64(h.size-1) }
