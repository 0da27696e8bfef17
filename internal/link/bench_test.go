package link

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// copySink copies what comes to memory, as a responder does, and counts it.
type copySink struct {
	dst     mem.List
	packets atomic.Int64
	drops   int
}

func (s *copySink) Deliver(t *train.Train) {
	if s.dst.Raw != nil {
		mem.Copy(&s.dst, &t.Payload, uint64(t.Len), false)
	}
	s.packets.Add(int64(t.N))
}

func (s *copySink) Drop(Reason) { s.drops++ }

// benchStream sends b.N trains of size bytes, with at most a window of packets
// unread.
func benchStream(b *testing.B, cfg UDPConfig, size int, bounce, copyOut bool) {
	from, to := openUDP(b, cfg), openUDP(b, cfg)
	const mtu = 4096
	f := flow(b, from, to.Addrs()[0], train.Flow{})
	buf := make([]byte, 4<<20)
	table, key := region(b, buf, len(buf))
	var sink copySink
	if copyOut {
		sink.dst.Raw = [][]byte{make([]byte, 1<<20)}
	}

	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			if to.Poll(&sink, 256) == 0 {
				runtime.Gosched()
			}
		}
	})
	defer wg.Wait()
	defer stop.Store(true)

	window := int64(from.Window(mtu))
	ts := []*train.Train{new(train.Train)}
	t := ts[0]
	sent := int64(0)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		for off := 0; off < size; off += train.MaxBytes {
			n := min(size-off, train.MaxBytes)
			t.Reset()
			t.Flow, t.Transport, t.Kind = f, wire.RC, wire.KindWrite
			t.Start, t.End = off == 0, off+n == size
			t.PSN, t.MTU, t.N = wire.MakePSN(uint32(sent)), mtu, packets(n, mtu)
			t.Bounce = bounce
			t.SetRange(table, actor, 0, key, iova+uint64(i*size%(len(buf)-size+1)+off), n)
			for sent+int64(t.N)-sink.packets.Load() > window {
				runtime.Gosched()
			}
			if _, err := from.Send(ts); err != nil {
				b.Fatal(err)
			}
			sent += int64(t.N)
		}
	}
	for sink.packets.Load() < sent {
		if s := to.Stats(); s.Overflows+from.Stats().TxLost > 0 {
			b.Fatalf("lost: %+v", s)
		}
		runtime.Gosched()
	}
	b.StopTimer()
	if sink.drops > 0 {
		b.Errorf("%d dropped", sink.drops)
	}
}

// WRITEs between two sockets on loopback, from the region and out of private
// copies, with and without the responder's copy.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dK", size>>10), func(b *testing.B) {
			b.Run("refer", func(b *testing.B) { benchStream(b, UDPConfig{}, size, false, false) })
			b.Run("refer-copyout", func(b *testing.B) { benchStream(b, UDPConfig{}, size, false, true) })
			b.Run("bounce-copyout", func(b *testing.B) { benchStream(b, UDPConfig{}, size, true, true) })
		})
	}
}

// How many datagrams one system call should take.
func BenchmarkRecvBuffers(b *testing.B) {
	for _, n := range []int{1, 4, 8, 16} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchStream(b, UDPConfig{RecvBuffers: n}, 64<<10, false, true) })
	}
}

// What GSO and GRO are worth.
func BenchmarkOffloads(b *testing.B) {
	b.Run("both", func(b *testing.B) { benchStream(b, UDPConfig{}, 64<<10, false, true) })
	b.Run("nogro", func(b *testing.B) { benchStream(b, UDPConfig{NoGRO: true}, 64<<10, false, true) })
	b.Run("nogso", func(b *testing.B) { benchStream(b, UDPConfig{NoGSO: true}, 64<<10, false, true) })
	b.Run("none", func(b *testing.B) { benchStream(b, UDPConfig{NoGSO: true, NoGRO: true}, 64<<10, false, true) })
}

// Half a round trip of 8 bytes, both sides polling.
func BenchmarkPingPong(b *testing.B) {
	ping, pong := openUDP(b, UDPConfig{}), openUDP(b, UDPConfig{})
	mk := func(from, to Link) []*train.Train {
		t := new(train.Train)
		t.Flow = flow(b, from, to.Addrs()[0], train.Flow{})
		t.Transport, t.Kind, t.Start, t.End, t.N, t.MTU = wire.RC, wire.KindWrite, true, true, 1, 4096
		t.SetInline([]byte("12345678"))
		return []*train.Train{t}
	}
	there, back := mk(ping, pong), mk(pong, ping)

	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		var sink copySink
		for !stop.Load() {
			if pong.Poll(&sink, 16) > 0 {
				mustSend(b, pong, back)
			}
		}
	})
	defer wg.Wait()
	defer stop.Store(true)

	var sink copySink
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if _, err := ping.Send(there); err != nil {
			b.Fatal(err)
		}
		for ping.Poll(&sink, 16) == 0 {
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/2/1000, "µs/half")
}

// Small messages in one Send.
func BenchmarkSmallMessages(b *testing.B) {
	from, to := openUDP(b, UDPConfig{}), openUDP(b, UDPConfig{})
	f := flow(b, from, to.Addrs()[0], train.Flow{})
	ts := make([]*train.Train, 62)
	for i := range ts {
		t := new(train.Train)
		t.Flow, t.Transport, t.Kind, t.Start, t.End, t.N, t.MTU = f, wire.RC, wire.KindSend, true, true, 1, 4096
		t.SetInline([]byte("12345678"))
		ts[i] = t
	}
	var sink copySink
	b.ReportAllocs()
	for range b.N {
		mustSend(b, from, ts)
		for n := 0; n < len(ts); {
			n += to.Poll(&sink, 256)
		}
	}
	b.ReportMetric(float64(b.N*len(ts))/b.Elapsed().Seconds()/1e6, "Mmsg/s")
}
