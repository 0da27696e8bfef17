package main

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"
)

// header returns an IPv4 packet of n bytes with a right checksum.
func header(n int, tos byte) []byte {
	p := make([]byte, n)
	p[0], p[1], p[8], p[9] = 0x45, tos, 64, 17
	binary.BigEndian.PutUint16(p[2:], uint16(n))
	binary.BigEndian.PutUint16(p[10:], ^fold(p[:20]))
	return p
}

// fold returns the sum of RFC 791's checksum: 0xffff over a header whose checksum is right.
func fold(h []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

func TestMarkCE(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		p := header(20+rnd.IntN(100), byte(rnd.Uint32()))
		for i := 12; i < 20; i++ {
			p[i] = byte(rnd.Uint32())
		}
		p[10], p[11] = 0, 0
		binary.BigEndian.PutUint16(p[10:], ^fold(p[:20]))
		before := p[1]
		marked := markCE(p)
		if able := before&3 == 1 || before&3 == 2; marked != able {
			t.Fatalf("traffic class %#x: marked %v", before, marked)
		}
		if marked && p[1] != before|3 || !marked && p[1] != before {
			t.Fatalf("traffic class %#x became %#x", before, p[1])
		}
		if fold(p[:20]) != 0xffff {
			t.Fatalf("traffic class %#x became %#x, with a wrong checksum", before, p[1])
		}
	}
	six := make([]byte, 60)
	six[0], six[1] = 0x6a, 0x2f // traffic class 0xa2, flow label 0xf....
	if !markCE(six) || six[0] != 0x6a || six[1] != 0x3f {
		t.Fatalf("IPv6: % x", six[:2])
	}
	for _, p := range [][]byte{nil, {0x45, 2}, make([]byte, 30), header(30, 0), header(30, 3)} {
		if markCE(p) {
			t.Fatalf("marked % x", p)
		}
	}
}

// 1 Mb/s, so that 1,250 bytes take 10 ms.
var slow = link{rate: 1e6, delay: 50 * time.Millisecond, buffer: 5000, ecn: 2000}

func TestBottleneck(t *testing.T) {
	b := bottleneck{link: slow}
	const ms = time.Millisecond
	for i, want := range []struct {
		at, arrives time.Duration
		ok, marked  bool
	}{
		{0, 60 * ms, true, false},        // nothing before it
		{0, 70 * ms, true, false},        // 1,250 bytes before it
		{0, 80 * ms, true, true},         // 2,500
		{0, 90 * ms, true, true},         // 3,750: the buffer is full now
		{0, 0, false, false},             // dropped
		{30 * ms, 100 * ms, true, false}, // three have left
		{500 * ms, 560 * ms, true, false},
	} {
		p := header(1250, 2)
		at, ok := b.admit(p, want.at)
		// Durations are products of floating point.
		if ok != want.ok || ok && (at-want.arrives).Abs() > time.Microsecond {
			t.Errorf("packet %d arrives at %v (%v), not at %v (%v)", i, at, ok, want.arrives, want.ok)
		}
		if got := p[1] == 3; got != want.marked {
			t.Errorf("packet %d: marked %v", i, got)
		}
	}
	if s := &b.seen; s.packets != 7 || s.dropped != 1 || s.marked != 2 || s.bytes != 6*1250 {
		t.Errorf("seen: %d packets, %d dropped, %d marked, %d bytes", s.packets, s.dropped, s.marked, s.bytes)
	}
	// Waits of 0, 10, 20, 30, 10 and 0 ms.
	if m := b.seen.mean(); (m - 70*ms/6).Abs() > waitUnit {
		t.Errorf("the mean wait is %v", m)
	}
	if q := b.seen.quantile(0.99); (q - 30*ms).Abs() > waitUnit {
		t.Errorf("the longest wait is %v", q)
	}
	if q := b.seen.quantile(0.5); (q - 10*ms).Abs() > waitUnit {
		t.Errorf("the median wait is %v", q)
	}
}

// The rate holds for any packets: what arrives in a time is never more than the rate allows.
func TestBottleneckRate(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	b := bottleneck{link: link{rate: 1e9, buffer: 1 << 20}}
	var now, last time.Duration
	passed := 0
	for range 20_000 {
		now += time.Duration(rnd.IntN(4000))
		p := header(20+rnd.IntN(8980), 0)
		at, ok := b.admit(p, now)
		if !ok {
			continue
		}
		if at < last || at < now {
			t.Fatalf("a packet of %v arrives at %v, after one that arrives at %v", now, at, last)
		}
		last = at
		passed += len(p)
	}
	if b.seen.dropped == 0 {
		t.Error("nothing was dropped")
	}
	if rate := float64(passed) * 8 / last.Seconds(); rate > 1e9+1e6 || rate < 0.98e9 {
		t.Errorf("%g bits a second have passed", rate)
	}
}
