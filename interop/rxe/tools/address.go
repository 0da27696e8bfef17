package tools

import (
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// Address is what the ping-pong programs tell each other about a queue pair. It is sent as
// the line
//
//	LID:QPN:PSN:GID
//
// of 4, 6, 6 and 32 hexadecimal digits, with a zero byte at the end.
type Address struct {
	LID uint16 // 0 on Ethernet
	QPN uint32 // 24 bits
	PSN uint32 // 24 bits
	GID verbs.GID
}

const addressLen = len("0000:000000:000000:") + 32 + 1

// Append appends the line to b. Numbers that have more digits than the line has
// room for lose their upper ones.
func (a Address) Append(b []byte) []byte {
	b = fmt.Appendf(b, "%04x:%06x:%06x:", a.LID, a.QPN&maxPSN, a.PSN&maxPSN)
	b = fmt.Appendf(b, "%x", a.GID[:])
	return append(b, 0)
}

// maxPSN is the largest packet sequence number, and the largest queue pair
// number.
const maxPSN = 1<<24 - 1

// ParseAddress reads a line with its zero byte, and accepts nothing else.
func ParseAddress(line []byte) (Address, error) {
	f := fields{rest: line}
	var a Address
	a.LID = uint16(f.hex(4))
	f.want(':')
	a.QPN = uint32(f.hex(6))
	f.want(':')
	a.PSN = uint32(f.hex(6))
	f.want(':')
	a.GID = f.gid(0)
	f.want(0)
	if err := f.end(); err != nil {
		return Address{}, fmt.Errorf("address line %q: %w", line, err)
	}
	return a, nil
}

// done is the last message of the exchange, with its zero byte.
var done = []byte("done\x00")
