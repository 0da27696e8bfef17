package pcap

import (
	"encoding/binary"
	"io"
)

// blocks collects whole pcapng blocks and writes them together. If a write fails, it
// finds out which blocks the file has.
type blocks struct {
	to      io.Writer
	written int64  // bytes written, up to the end of a block
	waiting []byte // whole blocks that are not written yet
}

// A block of pcapng begins with its type and its length.
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

// flush writes the blocks that wait. If a write fails, flush truncates the file after
// the last whole block, if it can be truncated, and lost is how many packets are not in
// it.
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

// split returns how many of the first n waiting bytes are whole blocks, and how many
// packets the rest of waiting has.
func (b *blocks) split(n int) (whole int, lost uint64) {
	for at := 0; len(b.waiting)-at >= blockHeader; {
		kind, length := binary.LittleEndian.Uint32(b.waiting[at:]), int(binary.LittleEndian.Uint32(b.waiting[at+4:]))
		if length < blockHeader || length > len(b.waiting)-at {
			break // not a block that this package has written
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
