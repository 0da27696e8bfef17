package device

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// BenchmarkLoopWrite is post to completion over the loop link, one at a time.
func BenchmarkLoopWrite(b *testing.B) {
	for _, size := range []int{8, 4096, 65536, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			x, y := pair(b, linkLoop, ib.RC, 4<<20)
			wrs := []ib.SendWR{{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: x.sge(0, size), RemoteAddr: y.mr.Addr(), RKey: y.mr.RKey()}}
			var wc [1]ib.WC
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := x.qp.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				for {
					if n, _ := x.cq.Poll(wc[:]); n == 1 {
						break
					}
				}
			}
		})
	}
}

// BenchmarkCopy is what the loop link is measured against.
func BenchmarkCopy(b *testing.B) {
	for _, size := range []int{8, 4096, 65536, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			src, dst := make([]byte, size), make([]byte, size)
			b.SetBytes(int64(size))
			for b.Loop() {
				copy(dst, src)
			}
		})
	}
}

// BenchmarkUDPWrite runs both ends of a udp connection in one goroutine, with
// several requests outstanding: the cost of both sides together.
func BenchmarkUDPWrite(b *testing.B) {
	for _, size := range []int{8, 65536, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			x, y := pairMTU(b, linkUDP, ib.RC, 4<<20, ib.MTU4096)
			wrs := []ib.SendWR{{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: x.sge(0, size), RemoteAddr: y.mr.Addr(), RKey: y.mr.RKey()}}
			var wc [16]ib.WC
			b.SetBytes(int64(size))
			b.ReportAllocs()
			out := 0
			for b.Loop() {
				for out >= 8 {
					n, _ := x.cq.Poll(wc[:])
					_, _ = y.cq.Poll(wc[:])
					out -= n
				}
				if _, err := x.qp.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				out++
			}
			for out > 0 {
				n, _ := x.cq.Poll(wc[:])
				_, _ = y.cq.Poll(wc[:])
				out -= n
			}
			b.StopTimer()
			for _, c := range x.dev.Counters() {
				if c.Name == "retransmitted_packets" && c.Value > 0 {
					b.Log(c)
				}
			}
		})
	}
}

// BenchmarkLocalPingPong is half a round trip of 8 bytes between two devices, in one
// goroutine: what both sides do for it, without the time that a cache line takes from
// one core to the other.
func BenchmarkLocalPingPong(b *testing.B) {
	b.Run("ring", func(b *testing.B) {
		x, y := byRings(b, ib.RC, 4096)
		benchPingPong(b, x, y)
	})
	b.Run("grant", func(b *testing.B) {
		x, y := byRings(b, ib.RC, 4096)
		x.shareMemory(4096)
		y.shareMemory(4096)
		benchPingPong(b, x, y)
	})
}

// BenchmarkUDPPingPong is the same by packets.
func BenchmarkUDPPingPong(b *testing.B) {
	x, y := pair(b, linkUDP, ib.RC, 4096)
	benchPingPong(b, x, y)
}

func benchPingPong(b *testing.B, x, y *end) {
	wr := func(from, to *end) []ib.SendWR {
		return []ib.SendWR{{Op: ib.OpRDMAWrite, Inline: make([]byte, 8), RemoteAddr: to.mr.Addr(), RKey: to.mr.RKey()}}
	}
	ends := [2]*end{x, y}
	wrs := [2][]ib.SendWR{wr(x, y), wr(y, x)}
	var wc [4]ib.WC
	b.ReportAllocs()
	for n := uint64(1); b.Loop(); n++ {
		from, to := ends[n%2], ends[1-n%2]
		w := wrs[n%2]
		binary.NativeEndian.PutUint64(w[0].Inline, n)
		w[0].Flags = 0
		if n/2%16 == 0 {
			w[0].Flags = ib.SendSignaled
		}
		if _, err := from.qp.PostSend(w); err != nil {
			b.Fatal(err)
		}
		for { // at least once: completions must be taken
			if _, err := to.cq.Poll(wc[:]); err != nil {
				b.Fatal(err)
			}
			if binary.NativeEndian.Uint64(to.buf) == n {
				break
			}
		}
	}
}

// BenchmarkLocalWrite is WRITEs with several outstanding, both sides in one
// goroutine.
func BenchmarkLocalWrite(b *testing.B) {
	for _, size := range []int{8, 4096, 65536, -65536, 1 << 20} {
		name := fmt.Sprint(size)
		if size < 0 {
			size, name = -size, fmt.Sprint(-size, "-shared")
		}
		b.Run(name, func(b *testing.B) {
			x, y := byRings(b, ib.RC, 4<<20)
			if strings.HasSuffix(name, "shared") {
				x.shareMemory(4 << 20)
			}
			wrs := []ib.SendWR{{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: x.sge(0, size), RemoteAddr: y.mr.Addr(), RKey: y.mr.RKey()}}
			var wc [16]ib.WC
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for out := 0; b.Loop(); {
				if _, err := x.qp.PostSend(wrs); err != nil {
					b.Fatal(err)
				}
				for out++; out >= 8; {
					_, _ = y.cq.Poll(wc[:])
					n, _ := x.cq.Poll(wc[:])
					out -= n
				}
			}
		})
	}
}

// BenchmarkShards is half a round trip of 8 bytes by packets between two devices, in one
// goroutine, where the completion queue of each has 8 queue pairs, of which one has traffic: in
// one shard, or spread over four.
func BenchmarkShards(b *testing.B) {
	for _, receivers := range []int{1, 4} {
		cfg := provider.Config{Link: linkUDP, Receivers: receivers}
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpSend} {
			b.Run(fmt.Sprint(op, "/", receivers), func(b *testing.B) {
				var first [2]*end
				for i := range first {
					first[i] = newEnd(b, openDevice(b, cfg), ib.RC, 4096)
					b.Cleanup(first[i].close)
				}
				first[0].connect(first[1])
				first[1].connect(first[0])
				for range 7 {
					x, y := first[0].another(), first[1].another()
					b.Cleanup(func() { closeAll(b, x.qp, x.mr, y.qp, y.mr) })
					x.connect(y)
					y.connect(x)
				}
				if n := len(first[0].cq.(*CQ).polled.shards()); n != receivers {
					b.Fatalf("a poll reads %d shards", n)
				}
				if op == ib.OpSend {
					benchSend(b, first)
				} else {
					benchPingPong(b, first[0], first[1])
				}
			})
		}
	}
}

// benchSend sends 8 bytes back and forth.
func benchSend(b *testing.B, ends [2]*end) {
	wrs := []ib.SendWR{{Op: ib.OpSend, Inline: make([]byte, 8)}}
	recv := [2][]ib.RecvWR{{{SGL: ends[0].sge(0, 8)}}, {{SGL: ends[1].sge(0, 8)}}}
	for i, e := range ends {
		for range 4 {
			e.recv(recv[i][0])
		}
	}
	var wc [4]ib.WC
	b.ReportAllocs()
	for n := uint64(1); b.Loop(); n++ {
		from, to := ends[n%2], ends[1-n%2]
		wrs[0].Flags = 0
		if n/2%16 == 0 {
			wrs[0].Flags = ib.SendSignaled
		}
		if _, err := from.qp.PostSend(wrs); err != nil {
			b.Fatal(err)
		}
		for got := false; !got; {
			k, err := to.cq.Poll(wc[:])
			if err != nil {
				b.Fatal(err)
			}
			for _, w := range wc[:k] {
				got = got || w.Op == ib.WCRecv
			}
		}
		if _, err := to.qp.PostRecv(recv[1-n%2]); err != nil {
			b.Fatal(err)
		}
	}
}
