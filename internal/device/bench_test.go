package device

import (
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
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
