package pcap

import (
	"encoding/binary"
	"io"
	"runtime"
	"time"
)

// blocks collects whole pcapng blocks and writes them together. If a write fails, it
// finds out which blocks the file has.
type blocks struct {
	to      io.Writer
	written int64  // bytes written, up to the end of a block
	waiting []byte // whole blocks that are not written yet
}

// Of pcapng (draft-ietf-opsawg-pcapng). A block begins with its type and its length, and ends
// with its length. All is in the byte order that the section's header shows, and is
// padded to words of 4 bytes.
const (
	blockHeader    = 8
	sectionBlock   = 0x0A0D0D0A // Section Header Block
	interfaceBlock = 1          // Interface Description Block
	packetBlock    = 6          // Enhanced Packet Block

	byteOrderMagic = 0x1A2B3C4D
	unknownLength  = 1<<64 - 1 // of a section
	linkTypeRaw    = 101       // packets begin with the IP header

	optionEnd         = 0
	optionHardware    = 2 // of a section
	optionOS          = 3 // of a section
	optionApplication = 4 // of a section
	optionName        = 2 // of an interface
	optionResolution  = 9 // of an interface's times: 10 to the power of minus this in seconds
	optionSystem      = 12

	nanoseconds   = 9
	enoughWaiting = 4096
)

var little = binary.LittleEndian

// begin appends the header of the section, and its one interface.
func (b *blocks) begin() {
	b.block(sectionBlock, func(p []byte) []byte {
		p = little.AppendUint32(p, byteOrderMagic)
		p = little.AppendUint16(p, 1) // version 1.0
		p = little.AppendUint16(p, 0)
		p = little.AppendUint64(p, unknownLength)
		p = appendOption(p, optionHardware, runtime.GOARCH)
		p = appendOption(p, optionOS, runtime.GOOS)
		p = appendOption(p, optionApplication, "verbena")
		return appendOption(p, optionEnd, "")
	})
	b.block(interfaceBlock, func(p []byte) []byte {
		p = little.AppendUint16(p, linkTypeRaw)
		p = little.AppendUint16(p, 0) // reserved
		p = little.AppendUint32(p, 0) // packets may have any length
		p = appendOption(p, optionName, "verbena")
		p = appendOption(p, optionResolution, string(rune(nanoseconds)))
		p = appendOption(p, optionSystem, runtime.GOOS)
		return appendOption(p, optionEnd, "")
	})
}

func appendOption(p []byte, code uint16, value string) []byte {
	p = little.AppendUint16(p, code)
	p = little.AppendUint16(p, uint16(len(value)))
	return pad(append(p, value...), len(value))
}

// packet appends a packet, which data appends to a slice.
func (b *blocks) packet(ts time.Time, data func([]byte) []byte) {
	b.block(packetBlock, func(p []byte) []byte {
		at := uint64(ts.UnixNano())
		p = little.AppendUint32(p, 0) // the interface
		p = little.AppendUint32(p, uint32(at>>32))
		p = little.AppendUint32(p, uint32(at))
		lengths := len(p)
		p = little.AppendUint64(p, 0) // set below
		begin := len(p)
		p = data(p)
		n := len(p) - begin
		little.PutUint32(p[lengths:], uint32(n))   // in the capture
		little.PutUint32(p[lengths+4:], uint32(n)) // of the packet
		return pad(p, n)
	})
}

// block appends a block, whose contents body appends to a slice.
func (b *blocks) block(kind uint32, body func([]byte) []byte) {
	begin := len(b.waiting)
	p := little.AppendUint32(b.waiting, kind)
	p = body(little.AppendUint32(p, 0)) // the length is set below
	n := uint32(len(p) + 4 - begin)
	little.PutUint32(p[begin+4:], n)
	b.waiting = little.AppendUint32(p, n)
}

// pad appends zeros after n bytes, up to a whole word.
func pad(p []byte, n int) []byte { return append(p, make([]byte, -n&3)...) }

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
		kind, length := little.Uint32(b.waiting[at:]), int(little.Uint32(b.waiting[at+4:]))
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
