package device

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/pcap"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

// loopPeer is the loop link to an address of this process: the sender calls the receiver,
// and each byte is copied once, from the source's region to the target's.
type loopPeer struct {
	addr   netip.Addr
	target atomic.Pointer[loopTarget]
	rest   *train.Flow // to queue pairs of other processes that share the device; nil: there are none
}

// loopTarget is the device that stands at the address, or stood there last.
type loopTarget struct {
	dev   *Device
	shift qp.Time // from the sender's time to the device's
}

// newLoopPeer returns the loop link from a device to an address. It returns nil if no device
// of this process with a loop link is there, or if other processes share that device and it
// has no queue pair destQP in this process.
func newLoopPeer(from *Device, f *train.Flow, destQP uint32) *loopPeer {
	p := &loopPeer{addr: f.Dst}
	to := p.find(from)
	if to == nil {
		return nil
	}
	if to.dev.member == nil {
		return p
	}
	if destQP != 0 {
		if to.dev.findQP(destQP) == nil {
			return nil
		}
		return p
	}
	rest := *f
	if from.link.Prepare(&rest) == nil {
		p.rest = &rest
	}
	return p
}

// find looks the address up.
func (p *loopPeer) find(from *Device) *loopTarget {
	dev := lookupDevice(p.addr)
	if dev == nil || !dev.loopback {
		return nil
	}
	t := &loopTarget{dev: dev, shift: from.base.Sub(dev.base)}
	p.target.Store(t)
	return t
}

// loopWindow is the loop link's window, in packets: only the space of PSNs bounds it.
const loopWindow = 1 << 21

// debt is a queue pair that has something to send because of a train that it received, and
// the time of that.
type debt struct {
	q   *QP
	now qp.Time
}

// pay lets the queue pair send.
func (o *debt) pay() {
	if o.q != nil {
		o.q.dev.answer(o.q, o.now)
		o.q = nil
	}
}

// deliver gives a train to the peer's queue pair. The answer is put into owed: one answer
// does for several trains, so it is sent when no more follow for the same queue pair. The
// sender holds its token, never its lock. A fault is the sender's: the payload could not be
// read. busy is that the peer's queue pair can take no more now or, where it is another
// process's, that the link cannot.
func (p *loopPeer) deliver(from *Device, one []*train.Train, now qp.Time, owed *debt) (fault mem.Fault, busy bool) {
	t := one[0]
	t.From, t.To = t.Flow.Src, t.Flow.Dst
	t.TClass, t.HopLimit = t.Flow.TClass, t.Flow.HopLimit
	if from.capture != nil {
		from.captureLoop(t, from.capture)
	}
	to := p.target.Load()
	if to.dev.stopped.Load() {
		if to = p.find(from); to == nil {
			return mem.Fault{}, false // lost: no device is there
		}
	}
	if to.dev.capture != nil && to.dev != from {
		to.dev.captureLoop(t, to.dev.capture)
	}
	q := to.dev.findQP(t.DestQP)
	if q == nil && p.rest != nil {
		t.Flow = p.rest
		_, fault, busy = from.sendLink(one)
		return fault, busy
	}
	if q == nil {
		to.dev.noQP.Add(uint64(t.N))
		return mem.Fault{}, false
	}
	if owed.q != q {
		owed.pay()
	}
	if q.full.Load() && q.stillFull() {
		return mem.Fault{}, true // its mover has the sender go on
	}
	now += to.shift
	var due bool
	if fault, due, _ = q.receive(t, now); due {
		*owed = debt{q, now}
	}
	return fault, false
}

// captureLoop writes the packets that the train would have been on a wire. What cannot be
// read is left out: the receiver will report the fault.
func (d *Device) captureLoop(t *train.Train, tap *pcap.Writer) {
	_ = link.Capture(t, tap, time.Now())
}
