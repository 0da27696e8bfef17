package tools

// What perftest sends over TCP, in the order in which it first appears: version,
// machine parameters, MTU, keys, report. Numbers that are not text are in network
// byte order.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"

	"github.com/verbena-rdma/verbena/verbs"
)

// The version that this side claims. Programs of later versions use the exchange of that
// version with it, which is the one implemented here.
const (
	ourVersion = "6.06"
	minVersion = 5.70 // programs before that use another exchange
)

const versionLen = 16

// appendVersion appends a version as a field of 16 bytes, filled with zeros.
func appendVersion(b []byte, v string) []byte {
	var field [versionLen]byte
	copy(field[:versionLen-1], v)
	return append(b, field[:]...)
}

// parseVersion reads such a field, and refuses a version with another exchange.
func parseVersion(b []byte) (string, error) {
	text, _, ok := bytes.Cut(b, []byte{0})
	if len(b) != versionLen || !ok {
		return "", fmt.Errorf("version %q has no end", b)
	}
	v, err := strconv.ParseFloat(string(text), 64)
	if err != nil {
		return "", fmt.Errorf("version %q is no number", text)
	}
	if !(v >= minVersion) { // nor is NaN a version
		return "", fmt.Errorf("perftest version %s: %w, %.2f is the oldest that is", text, ErrUnsupported, minVersion)
	}
	return string(text), nil
}

// mtuLen is the length of an MTU's message: one digit, the number of the verbs
// enumeration, and a zero byte.
const mtuLen = 2

func appendMTU(b []byte, m verbs.MTU) []byte { return append(b, '0'+byte(m), 0) }

func parseMTU(b []byte) (verbs.MTU, error) {
	if len(b) != mtuLen || b[1] != 0 {
		return 0, fmt.Errorf("MTU %q is not one digit", b)
	}
	m := verbs.MTU(b[0] - '0')
	if m.Bytes() == 0 {
		return 0, fmt.Errorf("MTU %q is none of 1 to 5", b[0])
	}
	return m, nil
}

// Keys is what perftest's sides tell each other about each queue pair, on
// Ethernet and with a GID, as the line
//
//	LID:OUTREADS:QPN:PSN:RKEY:VADDR:GID:SRQN:
//
// of 4, 4, 6, 6, 8, 16, 16 times 2 and 8 hexadecimal digits, with a zero byte at
// the end.
type Keys struct {
	LID      uint16 // 0 on Ethernet
	OutReads uint16 // READs and atomics that it serves at a time
	QPN      uint32 // 24 bits
	PSN      uint32 // 24 bits
	RKey     uint32
	VAddr    uint64
	GID      verbs.GID
	SRQN     uint32 // 0 but for XRC
}

const keysLen = len("0000:0000:000000:000000:00000000:0000000000000000:") + 16*3 + len("00000000:") + 1

// Append appends the line to b. Numbers that have more digits than the line has
// room for lose their upper ones.
func (k Keys) Append(b []byte) []byte {
	b = fmt.Appendf(b, "%04x:%04x:%06x:%06x:%08x:%016x:",
		k.LID, k.OutReads, k.QPN&maxPSN, k.PSN&maxPSN, k.RKey, k.VAddr)
	for _, c := range k.GID {
		b = fmt.Appendf(b, "%02x:", c)
	}
	b = fmt.Appendf(b, "%08x:", k.SRQN)
	return append(b, 0)
}

// ParseKeys reads a line with its zero byte, and accepts nothing else.
func ParseKeys(line []byte) (Keys, error) {
	f := fields{rest: line}
	var k Keys
	number := func(digits int) uint64 {
		v := f.hex(digits)
		f.want(':')
		return v
	}
	k.LID = uint16(number(4))
	k.OutReads = uint16(number(4))
	k.QPN = uint32(number(6))
	k.PSN = uint32(number(6))
	k.RKey = uint32(number(8))
	k.VAddr = number(16)
	k.GID = f.gid(':')
	f.want(':')
	k.SRQN = uint32(number(8))
	f.want(0)
	if err := f.end(); err != nil {
		return Keys{}, fmt.Errorf("key line %q: %w", line, err)
	}
	return k, nil
}

// Report is what the sides of a bandwidth test tell each other at the end.
type Report struct {
	Size    uint64  // bytes of a message
	Iters   uint64  // messages, of all queue pairs together
	Peak    float64 // MiB/s
	Average float64 // MiB/s
	MsgRate float64 // million messages per second
}

// reportFields is the number of messages that a report takes, 8 bytes each.
const reportFields = 5

func (r *Report) field(i int) uint64 {
	switch i {
	case 0:
		return r.Size
	case 1:
		return r.Iters
	case 2:
		return math.Float64bits(r.Peak)
	case 3:
		return math.Float64bits(r.Average)
	}
	return math.Float64bits(r.MsgRate)
}

func (r *Report) setField(i int, v uint64) {
	switch i {
	case 0:
		r.Size = v
	case 1:
		r.Iters = v
	case 2:
		r.Peak = math.Float64frombits(v)
	case 3:
		r.Average = math.Float64frombits(v)
	default:
		r.MsgRate = math.Float64frombits(v)
	}
}

// parseParam reads a machine parameter: page size or cache line. Both sides use the larger
// one, so a wrong one would become ours.
func parseParam(b []byte) (int, error) {
	v := int32(binary.BigEndian.Uint32(b))
	if v < 1 || v > 1<<20 || v&(v-1) != 0 {
		return 0, fmt.Errorf("%d is no size of a page or a cache line", v)
	}
	return int(v), nil
}
