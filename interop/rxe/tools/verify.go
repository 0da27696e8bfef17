package tools

// Checks that what arrived by perftest is what was sent. expectation has the contents of the
// peer's buffer; the methods of bench compute which part of it a message, a READ or a slot of
// memory must be.

import (
	"bytes"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// expectation is the peer's buffer, for every seed that is still possible.
type expectation struct {
	off   bool // nothing is checked
	peers []*peerBuffer
}

func newExpectation(cfg *PerftestConfig, from, to time.Time) *expectation {
	e := &expectation{off: cfg.NoVerify}
	if e.off {
		return e
	}
	for _, seed := range seeds(from, to) {
		e.peers = append(e.peers, &peerBuffer{stream: newRandStream(seed)})
	}
	return e
}

// verdict is the result of comparing data with the peer's buffer.
type verdict uint8

const (
	unknown verdict = iota // not checked
	right
	wrong
)

// compare compares data with the peer's buffer from offset off on. It drops the seeds for
// which the data is wrong, unless it is wrong for all of them.
func (e *expectation) compare(data []byte, off int) verdict {
	if e.off {
		return unknown
	}
	var left []*peerBuffer
	for _, p := range e.peers {
		want := p.at(off, len(data))
		if want == nil {
			return unknown
		}
		if bytes.Equal(want, data) {
			left = append(left, p)
		}
	}
	if len(left) == 0 {
		return wrong
	}
	e.peers = left
	return right
}

// count counts right data, and returns an error for wrong data.
func (b *bench) count(v verdict, what string, args ...any) error {
	switch v {
	case right:
		b.result.Verified++
	case wrong:
		return fmt.Errorf("contents of "+what+" are not the peer's", args...)
	}
	return nil
}

// checkMessage checks a message that came by SEND. Over UC and UD messages before it may be
// lost, so it may be a later one.
func (b *bench) checkMessage(f *flow, data []byte) error {
	tries := 1
	if b.cfg.Type != verbs.RC {
		tries = b.slots
	}
	v := wrong
	for k := 0; k < tries && v == wrong; k++ {
		v = b.expect.compare(data, b.source(f.index)+b.place(f.received+f.lost+uint64(k)))
		if v == right {
			f.lost += uint64(k)
		}
	}
	return b.count(v, "message %d", f.received)
}

// returned checks the data that a READ or an atomic has returned.
func (b *bench) returned(f *flow, n uint64, wc *verbs.WC) error {
	b.result.ReceivedBytes += uint64(b.cfg.Size)
	if int(wc.ByteLen) != b.cfg.Size {
		return fmt.Errorf("request %d brought %d bytes, not %d", n, wc.ByteLen, b.cfg.Size)
	}
	data := b.in[b.inSlot(f.index, n):][:b.cfg.Size]
	if b.verb == verbAtomic {
		return b.returnedWord(f, n, data)
	}
	return b.count(b.expect.compare(data, b.target(f.index)+b.place(n)), "READ %d", n)
}

// verifyMemory checks what the peer has left in this side's memory.
func (b *bench) verifyMemory() error {
	if b.cfg.Role == Client && !b.cfg.Duplex && !b.lat {
		return nil
	}
	for _, f := range b.flows {
		for s := range b.writtenSlots() {
			if err := b.verifySlot(f, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// writtenSlots returns the number of slots that the peer has changed.
func (b *bench) writtenSlots() int {
	if b.cfg.Imm && b.cfg.Duplex {
		return 1
	}
	return min(b.slots, b.cfg.Iters)
}

func (b *bench) verifySlot(f *flow, s int) error {
	off := s * b.stride
	data := b.main[b.target(f.index)+off:][:b.cfg.Size]
	switch {
	case b.verb == verbWrite && b.lat:
		// Zeros, and the number of the last message.
		v := unknown
		if !b.expect.off {
			v = right
			if len(bytes.Trim(data[:len(data)-1], "\x00")) > 0 {
				v = wrong
			}
		}
		return b.count(v, "the last message")
	case b.verb == verbWrite:
		from := off
		if b.cfg.Imm && b.cfg.Duplex {
			from = b.place(uint64(b.cfg.Iters - 1)) // all messages went here: the last one is left
		}
		v := b.expect.compare(data, b.source(f.index)+from)
		// UC has no acknowledgements: packets may arrive a little after the peer has
		// come to the end.
		for wait := 0; v == wrong && b.cfg.Type == verbs.UC && wait < 100; wait++ {
			time.Sleep(5 * time.Millisecond)
			v = b.expect.compare(data, b.source(f.index)+from)
		}
		if v == wrong && b.cfg.Type == verbs.UC {
			return nil // packets were lost
		}
		return b.count(v, "slot %d of queue pair %d", s, f.index)
	case b.verb == verbAtomic && (b.cfg.Role == Server || b.cfg.Duplex):
		return b.verifyWord(f, s)
	}
	return nil
}
