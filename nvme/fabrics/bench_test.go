package fabrics

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// BenchmarkRead: our host reads from our target by packets, 32 reads at a time. A profile shows where the target's time goes
// (queue.serve) and where the host's does.
func BenchmarkRead(b *testing.B) {
	for _, size := range []int{4 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("%dk", size>>10), func(b *testing.B) {
			const room = 64 << 20
			tgt := serve(b, TargetConfig{Subsystems: []*nvme.Subsystem{disk(b, room, 4096)}, MaxTransfer: 1 << 20}, verbs.LinkUDP)
			h := dial(b, tgt, HostConfig{QueueSize: 64}, verbs.LinkUDP)
			d := must[*Disk](b)(h.Namespace(longTime(b), 1))
			if _, err := d.WriteAt(make([]byte, room), 0); err != nil {
				b.Fatal(err)
			}
			var next atomic.Int64
			b.SetBytes(int64(size))
			b.SetParallelism(16)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				p := make([]byte, size)
				for pb.Next() {
					off := next.Add(1) * 7919 * int64(size) % room
					if _, err := d.ReadAt(p, off); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
