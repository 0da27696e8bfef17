package device

import (
	"time"

	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/pcap"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

// loopPeer is the loop link to a device of this process: a direct call, and one
// copy from the source's region to the target's.
type loopPeer struct {
	dev   *Device
	shift qp.Time // from the sender's time to the peer's
}

// loopWindow is the loop link's: only the number space bounds it.
const loopWindow = 1 << 22

// deliver gives a train to the peer's queue pair and lets it answer. The sender
// holds its token, never its lock. A fault is the sender's: the payload could
// not be read.
func (p *loopPeer) deliver(from *Device, t *train.Train, now qp.Time) mem.Fault {
	t.From, t.To = t.Flow.Src, t.Flow.Dst
	t.TClass, t.HopLimit = t.Flow.TClass, t.Flow.HopLimit
	if from.capture != nil {
		from.captureLoop(t, from.capture)
	}
	if p.dev.capture != nil && p.dev != from {
		p.dev.captureLoop(t, p.dev.capture)
	}
	q := p.dev.qps.Get(t.DestQP)
	if q == nil {
		p.dev.noQP.Add(uint64(t.N))
		return mem.Fault{}
	}
	now += p.shift
	fault, due := q.receive(t, now)
	if due {
		p.dev.answer(q, now)
	}
	return fault
}

// captureLoop writes the packets that the train would have been on a wire.
func (d *Device) captureLoop(t *train.Train, tap *pcap.Writer) { link.Capture(t, tap, time.Now()) }
