package main

// A bottleneck is one direction of the box: a buffer that is emptied at a rate, and a wire behind it. It does no I/O
// and is given the time, so that it can be tested without waiting.
//
//  1. A packet that finds the buffer full is dropped.
//  2. A packet that finds more than the ECN threshold in the buffer gets the mark CE, if it is of an ECN-capable
//     transport.
//  3. It leaves the buffer when those before it have left and it was sent itself, and arrives after the delay.

import (
	"math"
	"time"

	"github.com/verbena-rdma/verbena/internal/wire"
)

// link says what a bottleneck is like.
type link struct {
	rate   float64       // bits a second
	delay  time.Duration // in one direction
	buffer int           // bytes
	ecn    int           // bytes; 0: nothing is marked
}

// seen is what a bottleneck has seen.
type seen struct {
	packets, marked, dropped int
	bytes                    int64   // that have passed
	waits                    []int32 // of packets that have passed, in the buffer: how many took so many waitUnits
}

// waitUnit is how finely waits in the buffer are counted.
const waitUnit = 20 * time.Microsecond

// maxWait is the longest wait that is told apart from longer ones.
const maxWait = 2 * time.Second

type bottleneck struct {
	link
	free time.Duration // when the buffer is empty
	seen seen
}

// admit takes a packet at a time, which never goes back, and returns when it arrives at the other end; false if it is
// dropped.
func (b *bottleneck) admit(packet []byte, now time.Duration) (arrives time.Duration, ok bool) {
	b.seen.packets++
	wait := max(b.free-now, 0)
	queued := int(wait.Seconds() * b.rate / 8)
	if queued+len(packet) > b.buffer {
		b.seen.dropped++
		return 0, false
	}
	if b.ecn > 0 && queued > b.ecn && markCE(packet) {
		b.seen.marked++
	}
	b.seen.bytes += int64(len(packet))
	if b.seen.waits == nil {
		b.seen.waits = make([]int32, maxWait/waitUnit+1)
	}
	b.seen.waits[min(wait, maxWait)/waitUnit]++
	b.free = now + wait + time.Duration(float64(len(packet))*8/b.rate*float64(time.Second))
	return b.free + b.delay, true
}

// mean returns the mean wait in the buffer.
func (s *seen) mean() time.Duration {
	sum, n := 0, 0
	for i, k := range s.waits {
		sum, n = sum+i*int(k), n+int(k)
	}
	return time.Duration(sum) * waitUnit / time.Duration(max(n, 1))
}

// quantile returns the wait that a part of the packets did not exceed.
func (s *seen) quantile(part float64) time.Duration {
	n := 0
	for _, k := range s.waits {
		n += int(k)
	}
	rank := int(math.Ceil(part * float64(n)))
	for i, k := range s.waits {
		if rank -= int(k); rank <= 0 {
			return time.Duration(i) * waitUnit
		}
	}
	return maxWait
}

// markCE marks a packet of an ECN-capable transport. It reports whether the packet bears the mark now and did not
// before.
func markCE(p []byte) bool {
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		old := p[1]
		if old&wire.ECNMask == 0 || old&wire.ECNMask == wire.ECNMark {
			return false
		}
		p[1] |= wire.ECNMark
		// RFC 1624, equation 3: the header's checksum changes by what its first word has changed.
		sum := uint32(^(uint16(p[10])<<8 | uint16(p[11]))) + uint32(^(uint16(p[0])<<8 | uint16(old))) + uint32(uint16(p[0])<<8|uint16(p[1]))
		for sum > 0xffff {
			sum = sum&0xffff + sum>>16
		}
		p[10], p[11] = byte(^sum>>8), byte(^sum)
		return true
	case len(p) >= 40 && p[0]>>4 == 6:
		const shift = 4 // the traffic class is the low half of byte 0 and the high half of byte 1
		if ecn := p[1] >> shift & wire.ECNMask; ecn == 0 || ecn == wire.ECNMark {
			return false
		}
		p[1] |= wire.ECNMark << shift
		return true
	}
	return false
}
