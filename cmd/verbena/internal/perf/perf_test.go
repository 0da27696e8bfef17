package perf

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// openPair opens two devices that are closed with the test.
func openPair(t testing.TB, link verbs.LinkMode) (a, b *verbs.Device) {
	t.Helper()
	open := func() *verbs.Device {
		dev, err := verbs.Open("", &verbs.Config{Link: link})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		})
		return dev
	}
	return open(), open()
}

func TestCompleteDefaults(t *testing.T) {
	tests := []struct {
		in, want Params
	}{
		{Params{}, Params{Op: OpWrite, Size: 64 << 10, Duration: 2 * time.Second, Depth: 64, Batch: 1, Threads: 1, QPs: 1, Mem: "pinned", Poll: PollCQ}},
		{Params{Lat: true}, Params{Op: OpWrite, Size: 8, Duration: 2 * time.Second, Depth: 1, Batch: 1, Threads: 1, QPs: 1, Mem: "pinned", Poll: PollMemory, Lat: true}},
		{Params{Lat: true, Op: OpSend}, Params{Op: OpSend, Size: 8, Duration: 2 * time.Second, Depth: 1, Batch: 1, Threads: 1, QPs: 1, Mem: "pinned", Poll: PollCQ, Lat: true}},
		{Params{Op: OpAtomic, Iters: 5}, Params{Op: OpAtomic, Size: 8, Iters: 5, Depth: 64, Batch: 16, Threads: 1, QPs: 1, Mem: "pinned", Poll: PollCQ}},
		{Params{Size: 4096, Depth: 7, Iters: 1}, Params{Op: OpWrite, Size: 4096, Iters: 1, Depth: 7, Batch: 2, Threads: 1, QPs: 1, Mem: "pinned", Poll: PollCQ}},
		{Params{Size: 32 << 10, Iters: 1}, Params{Op: OpWrite, Size: 32 << 10, Iters: 1, Depth: 64, Batch: 2, Threads: 1, QPs: 1, Mem: "pinned", Poll: PollCQ}},
		{Params{Threads: 4, Iters: 4}, Params{Op: OpWrite, Size: 64 << 10, Iters: 4, Depth: 64, Batch: 1, Threads: 4, QPs: 4, Mem: "pinned", Poll: PollCQ}},
		{Params{Threads: 3, QPs: 7, Iters: 3}, Params{Op: OpWrite, Size: 64 << 10, Iters: 3, Depth: 64, Batch: 1, Threads: 3, QPs: 7, Mem: "pinned", Poll: PollCQ}},
	}
	for _, tt := range tests {
		got := tt.in
		if err := got.Complete(); err != nil || got != tt.want {
			t.Errorf("%+v became %+v, %v; want %+v", tt.in, got, err, tt.want)
		}
		again := got
		if err := again.Complete(); err != nil || again != got {
			t.Errorf("completing %+v twice gives %+v, %v", got, again, err)
		}
	}
}

// Whatever parameters are accepted, the rings of requests and the buffers fit
// together: slots and batches are powers of two, and memory is bounded.
func TestCompleteInvariants(t *testing.T) {
	for _, size := range []int{1, 7, 8, 64, 65, 4096, 10_001, 1 << 20, maxSize} {
		for _, depth := range []int{1, 2, 3, 5, 64, 100, maxDepth} {
			for _, op := range []Op{OpWrite, OpWriteImm, OpRead, OpSend} {
				p := Params{Op: op, Size: size, Depth: depth, Iters: 5 * depth}
				if size < maxSize {
					p.Threads = min(3, 1+depth/2)
				}
				if err := p.Complete(); err != nil {
					t.Fatalf("%+v: %v", p, err)
				}
				if n := p.slots(); n < 1 || n&(n-1) != 0 || (n > 1 && n*p.stride() > slotMemory) {
					t.Errorf("%+v has %d slots of %d bytes", p, n, p.stride())
				}
				if p.Batch < 1 || p.Batch&(p.Batch-1) != 0 || p.Batch > depth {
					t.Errorf("%+v has batches of %d", p, p.Batch)
				}
				if p.stride() < size || p.stride()%64 != 0 {
					t.Errorf("%+v has a stride of %d", p, p.stride())
				}
				if w := p.warmUp(); w.iters%(p.Batch*p.Threads) != 0 {
					t.Errorf("%+v warms up with %d messages in batches of %d", p, w.iters, p.Batch)
				}
			}
		}
	}
}

func TestPattern(t *testing.T) {
	for _, n := range []int{1, 7, 8, 9, 4096, 10_001} {
		b := make([]byte, n)
		fill(b, 42)
		if err := verify(b, 42); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		for _, i := range []int{0, n / 2, n - 1} {
			b[i] ^= 1
			if err := verify(b, 42); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("byte %d of %d", i, n)) {
				t.Errorf("a wrong byte %d of %d: %v", i, n, err)
			}
			b[i] ^= 1
		}
	}
	// Data in the wrong slot, queue pair or phase is wrong data.
	b := make([]byte, 64)
	fill(b, seedOf(phaseMeasure, 1, 2))
	for _, seed := range []uint64{seedOf(phaseWarmUp, 1, 2), seedOf(phaseMeasure, 2, 1), seedOf(phaseMeasure, 1, 3), seedOf(phaseMeasure, 0, 2)} {
		if verify(b, seed) == nil {
			t.Error("data of another place is accepted")
		}
	}
	if verify(make([]byte, 64), seedOf(phaseMeasure, 1, 2)) == nil {
		t.Error("empty memory is accepted")
	}
}

// rigFor returns a rig of buffers alone, as after a measurement that went well.
func rigFor(t *testing.T, p Params, base, posted uint64) *rig {
	t.Helper()
	if err := p.Complete(); err != nil {
		t.Fatal(err)
	}
	r := &rig{p: p, op: opTable[p.Op]}
	for i := range p.Threads {
		t := newThread(r, i)
		t.tx.bytes, t.rx.bytes = make([]byte, t.bytes()), make([]byte, t.bytes())
		for range t.qps {
			t.flows = append(t.flows, &flow{base: base, posted: posted})
		}
		r.threads = append(r.threads, t)
	}
	if p.pingPong() {
		r.fillTx(phaseWarmUp)
	} else {
		r.fillTx(phaseMeasure)
	}
	for _, t := range r.threads {
		copy(t.rx.bytes, t.tx.bytes)
	}
	return r
}

// The check notices one wrong byte anywhere that a message went to, and nothing
// where none went.
func TestCheckNotices(t *testing.T) {
	tests := []struct {
		name         string
		p            Params
		base, posted uint64
		thread       int // that has the wrong byte
		wrong        int // offset of the wrong byte
		noticed      bool
	}{
		{"first byte", Params{Size: 1000, Depth: 4, Iters: 100}, 16, 116, 0, 0, true},
		{"last byte of the last slot", Params{Size: 1000, Depth: 4, Iters: 100}, 16, 116, 0, 3*1024 + 999, true},
		{"between slots", Params{Size: 1000, Depth: 4, Iters: 100}, 16, 116, 0, 1000, false},
		{"second queue pair", Params{Size: 1000, Depth: 4, QPs: 2, Iters: 100}, 16, 116, 0, 4 * 1024, true},
		{"second thread", Params{Size: 1000, Depth: 4, Threads: 2, QPs: 3, Iters: 100}, 16, 116, 1, 0, true},
		{"second queue pair of the first thread", Params{Size: 1000, Depth: 4, Threads: 2, QPs: 3, Iters: 100}, 16, 116, 0, 4 * 1024, true},
		{"slot of one message", Params{Size: 1000, Depth: 4, Iters: 1}, 18, 19, 0, 2 * 1024, true},
		{"slot without a message", Params{Size: 1000, Depth: 4, Iters: 1}, 18, 19, 0, 3 * 1024, false},
		{"ping-pong", Params{Size: 1000, Lat: true, Op: OpSend}, 0, 100, 0, 999, true},
		{"ping-pong, number", Params{Size: 1000, Lat: true}, 0, 100, 0, 999, false},
		{"ping-pong, before the number", Params{Size: 1000, Lat: true}, 0, 100, 0, 998, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, op := range []Op{OpWrite, OpRead} {
				if tt.p.Lat && op == OpRead {
					continue
				}
				p := tt.p
				if p.Op == "" {
					p.Op = op
				}
				r := rigFor(t, p, tt.base, tt.posted)
				check := func() error {
					if r.op.returns {
						return r.checkInitiator()
					}
					return r.checkTarget(r.sent())
				}
				if err := check(); err != nil {
					t.Fatalf("%s: right data: %v", p.Op, err)
				}
				r.threads[tt.thread].rx.bytes[tt.wrong] ^= 0x80
				if err := check(); (err != nil) != tt.noticed {
					t.Errorf("%s: a wrong byte: %v", p.Op, err)
				}
			}
		})
	}
	t.Run("atomic", func(t *testing.T) {
		r := rigFor(t, Params{Op: OpAtomic, Threads: 2, QPs: 3}, 0, 5)
		first, second := r.threads[0], r.threads[1]
		set := func(a, b, c byte) {
			first.rx.bytes[0], first.rx.bytes[first.offset(1, 0)], second.rx.bytes[0] = a, b, c
		}
		clear(first.rx.bytes)
		clear(second.rx.bytes)
		set(5, 5, 5)
		if err := r.checkTarget(r.sent()); err != nil {
			t.Error(err)
		}
		set(5, 5, 4)
		if r.checkTarget(r.sent()) == nil {
			t.Error("a lost addition is not noticed at the target")
		}
		set(4, 4, 4)
		if err := r.checkInitiator(); err != nil {
			t.Error(err)
		}
		set(4, 3, 4)
		if r.checkInitiator() == nil {
			t.Error("a lost addition is not noticed at the initiator")
		}
	})
}

// A device that damages data makes the whole measurement fail: here the data
// changes under its hands.
func TestCheckFailsMeasurement(t *testing.T) {
	a, b := openPair(t, verbs.LinkLoop)
	p := Params{Iters: 1000, Size: 4096, Check: true, Link: "loop"}
	if err := p.Complete(); err != nil {
		t.Fatal(err)
	}
	corrupt = func(r *rig) { r.threads[0].tx.bytes[100] ^= 1 }
	defer func() { corrupt = nil }()
	res, err := Local(t.Context(), a, b, p, nil)
	if res != nil || err == nil || !strings.Contains(err.Error(), "check failed at the target: queue pair 0, slot 0: byte 100 of 4096") {
		t.Errorf("result %+v, error %v", res, err)
	}
}

func TestLocalOverUDP(t *testing.T) {
	a, b := openPair(t, verbs.LinkUDP)
	for _, p := range []Params{{Op: OpWrite}, {Op: OpSend, Size: 100_000}, {Op: OpSend, Lat: true}, {Op: OpSend, Size: 5000, Threads: 2, QPs: 3}} {
		p.Iters, p.Check, p.Link = 200, true, "udp"
		if err := p.Complete(); err != nil {
			t.Fatal(err)
		}
		res, err := Local(t.Context(), a, b, p, nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.Iters != 200 || !res.Checked {
			t.Errorf("the result is %+v", res)
		}
	}
}

// A measurement ends with its context, whatever it is doing.
func TestLocalCancelled(t *testing.T) {
	a, b := openPair(t, verbs.LinkLoop)
	for _, p := range []Params{{}, {Op: OpSend}, {Threads: 3}, {Op: OpSend, Threads: 3}, {Lat: true}, {Lat: true, Op: OpSend}, {Lat: true, Op: OpRead}} {
		p.Duration = time.Minute
		if err := p.Complete(); err != nil {
			t.Fatal(err)
		}
		why := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(100*time.Millisecond, func() { cancel(why) })
		if _, err := Local(ctx, a, b, p, nil); !errors.Is(err, why) {
			t.Errorf("%s, latency %v: ended with %v", p.Op, p.Lat, err)
		}
	}
}
