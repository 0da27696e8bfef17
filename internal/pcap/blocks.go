package pcap

import (
	"encoding/binary"
	"io"
)

// blocks holds what a capture has made and not written yet, whole blocks of pcapng. It
// writes them together, and knows which of them a file has when a write fails.
type blocks struct {
	to      io.Writer
	written int64 // bytes that to has, up to the end of a block
	waiting []byte
}

// A block begins with its type and its length; these are of the file format.
const (
	blockHeader   = 8
	packetBlock   = 6 // Enhanced Packet Block
	enoughWaiting = 4096
)

// Write takes the next bytes of the capture; it always succeeds.
func (b *blocks) Write(p []byte) (int, error) {
	b.waiting = append(b.waiting, p...)
	return len(p), nil
}

// flush writes what waits, all of it whole blocks. If a write fails, to is cut off behind
// the last whole block, where it can be, and lost is how many packets it does not have.
func (b *blocks) flush() (lost uint64, err error) {
	if len(b.waiting) == 0 {
		return 0, nil
	}
	n, err := b.to.Write(b.waiting)
	whole, lost := b.split(n)
	b.written += int64(whole)
	b.waiting = b.waiting[:0]
	if err == nil {
		return 0, nil
	}
	if f, ok := b.to.(interface{ Truncate(size int64) error }); ok && n > whole {
		_ = f.Truncate(b.written) // a pipe cannot, and the first error says more
	}
	return lost, err
}

// split reports how many of the first n bytes are whole blocks, and how many packets are
// in the rest.
func (b *blocks) split(n int) (whole int, lost uint64) {
	for at := 0; len(b.waiting)-at >= blockHeader; {
		kind, length := binary.LittleEndian.Uint32(b.waiting[at:]), int(binary.LittleEndian.Uint32(b.waiting[at+4:]))
		if length < blockHeader || length > len(b.waiting)-at {
			break // it is not ours
		}
		at += length
		if at <= n {
			whole = at
		} else if kind == packetBlock {
			lost++
		}
	}
	return whole, lost
}
