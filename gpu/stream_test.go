package gpu

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
)

func newStream(t testing.TB, d *Device) *Stream {
	t.Helper()
	return must[*Stream](t)(d.NewStream())
}

// scattered returns a buffer that lies in several pieces of VRAM.
func scattered(t testing.TB, d *Device, n uint64) *Buffer {
	t.Helper()
	var gaps []*Buffer
	for i := uint64(0); i < n; i += 8192 {
		gap := alloc(t, d, 8192)
		alloc(t, d, 4096)
		gaps = append(gaps, gap)
	}
	rest := alloc(t, d, d.Stats().VRAMFree)
	for _, g := range gaps {
		check(t, g.Free())
	}
	b := alloc(t, d, n)
	if len(b.obj.place.extents) < 2 {
		t.Fatalf("the object lies in %d pieces", len(b.obj.place.extents))
	}
	check(t, rest.Free())
	return b
}

func TestCompute(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 8 * mib, NoEvict: true})
	s := newStream(t, d)
	const n = 100_000
	for _, kind := range []string{"one piece", "several pieces"} {
		t.Run(kind, func(t *testing.T) {
			mk := func() *Buffer {
				if kind == "one piece" {
					return alloc(t, d, n)
				}
				return scattered(t, d, n)
			}
			a, b, c := mk(), mk(), mk()
			da, db := random(n, 1), random(n, 2)
			check(t, s.Copy(a.All(), Host(da)))
			check(t, s.Copy(b.At(1000, n-1000), Host(db[1000:])))
			check(t, s.Copy(b.At(0, 1000), Host(db[:1000])))
			check(t, s.Fill(c.At(4, n-4), 0xaa))
			check(t, s.Copy(c.At(n-5001, 5000), a.At(3, 5000)))
			check(t, s.Sync(longTime(t)))
			want := bytes.Repeat([]byte{0xaa}, n)
			copy(want, make([]byte, 4))
			copy(want[n-5001:], da[3:5003])
			holds(t, "a", a, da)
			holds(t, "b", b, db)
			holds(t, "c", c, want)

			var floats [n]byte
			for i := 0; i < n; i += 4 {
				binary.LittleEndian.PutUint32(floats[i:], math.Float32bits(float32(i)/3))
			}
			check(t, s.Add(c.All(), a.All(), b.All(), Uint32))
			check(t, s.Copy(a.All(), Host(floats[:])))
			check(t, s.Add(a.All(), a.All(), a.All(), Float32))
			result := alloc(t, d, 12)
			check(t, s.Reduce(result.At(0, 4), a.All(), Float32))
			check(t, s.Reduce(result.At(4, 4), b.At(8, n-8), Uint32))
			check(t, s.Checksum(result.At(8, 4), b.At(1, 70001)))
			out := make([]byte, 12)
			check(t, s.Copy(Host(out), result.All()))
			check(t, s.Sync(longTime(t)))
			var fsum float32
			var usum uint32
			for i := 0; i < n; i += 4 {
				binary.LittleEndian.PutUint32(want[i:], binary.LittleEndian.Uint32(da[i:])+binary.LittleEndian.Uint32(db[i:]))
				x := float32(i) / 3
				binary.LittleEndian.PutUint32(floats[i:], math.Float32bits(x+x))
				fsum += x + x
				if i >= 8 {
					usum += binary.LittleEndian.Uint32(db[i:])
				}
			}
			holds(t, "a sum of vectors", c, want)
			holds(t, "a sum of floats", a, floats[:])
			le := binary.LittleEndian
			if got := math.Float32frombits(le.Uint32(out)); got != fsum {
				t.Errorf("the floats' sum is %v, should be %v", got, fsum)
			}
			if got := le.Uint32(out[4:]); got != usum {
				t.Errorf("the integers' sum is %d, should be %d", got, usum)
			}
			if got := le.Uint32(out[8:]); got != crc32.Checksum(db[1:70002], crc32.MakeTable(crc32.Castagnoli)) {
				t.Errorf("the checksum is %#x", got)
			}
		})
	}
	if st := d.Stats(); st.Operations < 20 || st.Bytes < 10*n {
		t.Errorf("the counters are %+v", st)
	}
}

func TestBadOperations(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib})
	s := newStream(t, d)
	b, freed := alloc(t, d, 100), alloc(t, d, 100)
	check(t, freed.Free())
	for what, c := range map[string]struct{ err, want error }{
		"lengths":       {s.Copy(b.At(0, 10), b.At(0, 11)), syscall.EINVAL},
		"range":         {s.Copy(b.At(91, 10), b.At(0, 10)), ErrRange},
		"a wrap":        {s.Copy(b.At(math.MaxUint64-3, 8), b.At(0, 8)), ErrRange},
		"nothing":       {s.Fill(b.At(0, 0), 1), ErrRange},
		"no memory":     {s.Fill(Mem{}, 1), syscall.EINVAL},
		"freed":         {s.Fill(freed.All(), 1), ErrFreed},
		"freed source":  {s.Copy(b.All(), freed.All()), ErrFreed},
		"odd vector":    {s.Add(b.At(2, 4), b.At(0, 4), b.At(0, 4), Uint32), syscall.EINVAL},
		"odd length":    {s.Reduce(b.At(0, 4), b.At(0, 5), Uint32), syscall.EINVAL},
		"long sum":      {s.Reduce(b.At(0, 8), b.At(0, 8), Uint32), syscall.EINVAL},
		"type":          {s.Reduce(b.At(0, 4), b.At(0, 8), 7), syscall.EINVAL},
		"long checksum": {s.Checksum(b.At(0, 8), b.At(0, 8)), syscall.EINVAL},
		"no fence":      {s.Wait(nil), syscall.EINVAL},
		"no event":      {s.Wait((*Event)(nil)), syscall.EINVAL},
		"no event's":    {s.Signal((*NamedFence)(nil)), syscall.EINVAL},
		"no signal":     {s.Signal(nil), syscall.EINVAL},
		"no function":   {s.Call(nil), syscall.EINVAL},
	} {
		wantErr(t, what, c.err, c.want)
	}
	check(t, s.Sync(longTime(t))) // what was refused has not failed the stream
	check(t, s.Close())
	check(t, s.Close())
	wantErr(t, "after Close", s.Fill(b.All(), 1), ErrClosed)
	_, err := s.Record()
	wantErr(t, "after Close", err, ErrClosed)
}

// TestOrder: streams wait for each other's events and for fences of the program, and a buffer that is freed lives until
// what was queued with it is executed.
func TestOrder(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib, Engines: 1})
	producer, consumer := newStream(t, d), newStream(t, d)
	gate := dmabuf.NewFence()
	check(t, producer.Wait(gate))
	b := alloc(t, d, 1000)
	check(t, producer.Fill(b.All(), 7))
	made := must[*Event](t)(producer.Record())
	check(t, consumer.Wait(made))
	got := make([]byte, 1000)
	check(t, consumer.Copy(Host(got), b.All()))
	used := must[*Event](t)(consumer.Record())
	check(t, b.Free())
	if producer.Query() || made.Signaled() {
		t.Error("the stream does not wait for the fence")
	}
	if _, err := made.Elapsed(used); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("the time between events that have not come: %v", err)
	}
	if s := d.Stats(); s.Objects != 1 {
		t.Error("the buffer does not live until it was used")
	}
	gate.Signal(nil)
	check(t, used.Wait(longTime(t)))
	if !bytes.Equal(got, bytes.Repeat([]byte{7}, 1000)) {
		t.Error("the consumer was too early")
	}
	eventually(t, "the buffer is freed", func() bool { return d.Stats().Objects == 0 })
	if took := must[time.Duration](t)(made.Elapsed(used)); took < 0 {
		t.Errorf("the second event came %v before the first", -took)
	}

	// A fence that failed fails the stream, and whoever waits for that.
	bad, broken := dmabuf.NewFence(), errors.New("broken")
	c := alloc(t, d, 100)
	check(t, producer.Wait(bad))
	check(t, producer.Fill(c.All(), 9))
	made = must[*Event](t)(producer.Record())
	check(t, consumer.Wait(made))
	check(t, consumer.Fill(c.All(), 9))
	last := must[*Event](t)(consumer.Record())
	bad.Signal(broken)
	wantErr(t, "after a failure", last.Wait(longTime(t)), broken)
	wantErr(t, "the stream", producer.Err(), broken)
	holds(t, "what was not executed", c, make([]byte, 100))
	wantErr(t, "Reset", producer.Reset(), broken)
	check(t, producer.Fill(c.All(), 9))
	check(t, producer.Sync(longTime(t)))
	holds(t, "after Reset", c, bytes.Repeat([]byte{9}, 100))

	var called error
	check(t, consumer.Call(func(err error) { called = err }))
	_ = consumer.Sync(longTime(t))
	wantErr(t, "a call of a stream that has failed", called, broken)
}

// TestCloseWaiting: Close ends a stream that waits for a fence which never comes, and fails what is behind it.
func TestCloseWaiting(t *testing.T) {
	d := must[*Device](t)(Open("soft:0", &Config{VRAM: mib}))
	s, other := newStream(t, d), newStream(t, d)
	never, behind := dmabuf.NewFence(), dmabuf.NewFence()
	b := alloc(t, d, 100)
	check(t, s.Wait(never))
	check(t, s.Fill(b.All(), 1))
	check(t, s.Signal(behind))
	check(t, other.Wait(behind))
	e := must[*Event](t)(other.Record())
	check(t, s.Close())
	wantErr(t, "the fence of a stream that was closed", behind.Wait(longTime(t)), ErrClosed)
	wantErr(t, "who waited for it", e.Wait(longTime(t)), ErrClosed)
	third := newStream(t, d)
	check(t, third.Wait(never))
	check(t, third.Copy(b.All(), b.All()))
	check(t, d.Close())
	never.Signal(nil) // nobody listens
	wantErr(t, "a stream of a device that was closed", third.Copy(Host(make([]byte, 1)), Host(make([]byte, 1))), ErrClosed)
	noWaits(t)
}

// noWaits checks that no queue has waits or signals.
func noWaits(t *testing.T) {
	t.Helper()
	waits.mu.Lock()
	defer waits.mu.Unlock()
	if len(waits.queues) != 0 || len(waits.signals) != 0 || len(waits.waiting) != 0 {
		t.Errorf("waits are left: %v", waits.queues)
	}
}

// TestLongPipeline: two streams that wait for each other in turn, so often that a search by all ways from one fence
// to another would not end. In the second half each wait is queued before its signal is.
func TestLongPipeline(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib})
	a, b := newStream(t, d), newStream(t, d)
	gate := NewFence("gate")
	check(t, a.Wait(gate))
	for range 300 {
		check(t, b.Wait(must[*Event](t)(a.Record())))
		check(t, a.Wait(must[*Event](t)(b.Record())))
	}
	var first *NamedFence
	for range 100 {
		there, back := NewFence("there"), NewFence("back")
		if first == nil {
			first = there
		}
		check(t, b.Wait(there))
		check(t, a.Signal(there))
		check(t, a.Wait(back))
		check(t, b.Signal(back))
	}
	check(t, b.Wait(NewFence("another")))
	wantErr(t, "a signal of the gate behind it", b.Signal(gate), ErrDeadlock)
	if first.Signaled() {
		t.Error("a stream has not waited")
	}
	gate.Signal(nil)
	check(t, a.Sync(longTime(t)))
	check(t, b.Close()) // it waits for a fence that nobody signals
	check(t, a.Close())
	noWaits(t)
}

// TestIdle: streams that are idle, or wait, have no goroutine.
func TestIdle(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib})
	before := runtime.NumGoroutine()
	gate := dmabuf.NewFence()
	var all []*Stream
	for range 1000 {
		s := newStream(t, d)
		check(t, s.Wait(gate))
		all = append(all, s)
	}
	eventually(t, "the workers end", func() bool { return runtime.NumGoroutine() <= before })
	gate.Signal(nil)
	for _, s := range all {
		check(t, s.Sync(longTime(t)))
	}
}

// TestDeadlock: work that waits for itself is refused, and named.
func TestDeadlock(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib})
	a, b, c := newStream(t, d), newStream(t, d), newStream(t, d)
	x, y, z := NewFence("x"), NewFence("y"), NewFence("z")
	check(t, a.Wait(x))
	wantErr(t, "a stream that waits for itself", a.Signal(x), ErrDeadlock)
	check(t, a.Signal(y))
	check(t, b.Wait(y))
	check(t, b.Signal(z))
	check(t, c.Wait(z))
	err := c.Signal(x)
	wantErr(t, "three streams", err, syscall.EDEADLK)
	for _, word := range []string{a.name + ` waits for "x" before it signals "y"`, b.name + ` waits for "y" before it signals "z"`, c.name + ` waits for "z" before it signals "x"`} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v: it should say %s", err, word)
		}
	}
	// The same order without the circle, and a second signal that comes, are good.
	free := newStream(t, d)
	check(t, free.Signal(x))
	check(t, c.Signal(NewFence("w")))
	check(t, c.Sync(longTime(t)))

	p, q := NewFence("p"), NewFence("q")
	check(t, a.Wait(p))
	check(t, a.Signal(q))
	check(t, b.Wait(q))
	gate := dmabuf.NewFence()
	check(t, free.Wait(gate))
	check(t, free.Signal(p)) // when the gate opens
	check(t, b.Signal(p))    // never, but there is another
	gate.Signal(nil)
	check(t, b.Sync(longTime(t)))
}

// TestCostsDoNotWrap: a bandwidth that is next to nothing.
func TestCostsDoNotWrap(t *testing.T) {
	if d := (Cost{Bandwidth: 1}).of(math.MaxUint64); d != longest {
		t.Errorf("so many bytes take %v", d)
	}
}

// TestCosts: an operation takes as long as it costs.
func TestCosts(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib, Engines: 1, Costs: Costs{
		ToDevice: Cost{Bandwidth: 50_000_000}, FromDevice: Cost{Latency: 3 * time.Millisecond}, Within: Cost{Latency: 5 * time.Millisecond}, BAR: Cost{Latency: 7 * time.Millisecond}}})
	s := newStream(t, d)
	b, host := alloc(t, d, mib), make([]byte, mib)
	for _, c := range []struct {
		what    string
		do      func() error
		atLeast time.Duration
	}{
		{"to the device", func() error { return s.Copy(b.All(), Host(host)) }, 20 * time.Millisecond},
		{"from the device", func() error { return s.Copy(Host(host), b.All()) }, 3 * time.Millisecond},
		{"within", func() error { return s.Fill(b.All(), 1) }, 5 * time.Millisecond},
		{"the BAR", func() error { _, err := b.ReadAt(host[:8], 0); return err }, 7 * time.Millisecond},
	} {
		start := time.Now()
		check(t, c.do())
		check(t, s.Sync(longTime(t)))
		if took := time.Since(start); took < c.atLeast {
			t.Errorf("%s: it took %v, it costs %v", c.what, took, c.atLeast)
		}
	}
	if got := H200.ToDevice.of(54_600_000_000); got < time.Second || got > time.Second+time.Millisecond {
		t.Errorf("the H200 takes %v", got)
	}
}

// TestPressure: streams work with twice as much memory as there is VRAM, and objects are moved meanwhile.
func TestPressure(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib / 2, Host: 2 * mib, Engines: 4})
	const n = 64 << 10
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			s, err := d.NewStream()
			if err != nil {
				t.Error(err)
				return
			}
			var all []*Buffer
			for range 4 {
				b, err := d.Alloc(n)
				if err != nil {
					t.Error(err)
					return
				}
				all = append(all, b)
			}
			for round := range 12 {
				v := byte(g*12 + round)
				for i := range all {
					to := all[(i+1)%4]
					if err := errors.Join(s.Fill(all[i].All(), v), s.Copy(to.All(), all[i].All()), s.Add(to.All(), to.All(), all[i].All(), Uint32)); err != nil {
						t.Error(err)
					}
				}
				if round%10 == g {
					if err := all[round%4].Evict(context.Background()); err != nil && !errors.Is(err, ErrOutOfMemory) {
						t.Error(err)
					}
				}
				got := make([]byte, n)
				if err := errors.Join(s.Copy(Host(got), all[0].All()), s.Sync(context.Background())); err != nil {
					t.Error(err)
					return
				}
				want := binary.LittleEndian.AppendUint32(nil, 2*(uint32(v)*0x01010101))
				for i := range got {
					if got[i] != want[i%4] {
						t.Errorf("stream %d, round %d: byte %d is %#x, should be %#x", g, round, i, got[i], want[i%4])
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if s := d.Stats(); s.Evictions == 0 || s.InPlace+s.Returns == 0 {
		t.Errorf("there was no pressure: %+v", s)
	}
}
