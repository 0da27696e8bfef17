package device

// The short way between queue pairs of one process, where it must not be taken.

import (
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/train"
)

// Who sends to a queue pair that is connected to another one hears nothing, on the
// short way as on any other: whether that one takes the packets, since they come
// from its peer's address, or not; and whatever PSN it expects.
func TestDirectToOthersPeer(t *testing.T) {
	for _, one := range []bool{true, false} {
		t.Run(map[bool]string{true: "same address", false: "another address"}[one], func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
			b, c := connected(t, x, y, ib.RC, 4096, nil)
			from := y
			if !one {
				from = openDevice(t, provider.Config{Link: linkLoop})
			}
			a := newEnd(t, from, ib.RC, 4096)
			t.Cleanup(a.close)
			hurry(a)
			a.connect(b)
			for range 2 {
				c.post(c.write(b, 0, 8))
				c.ok()
			}
			if _, err := a.qp.PostSend([]ib.SendWR{a.write(b, 8, 8)}); err != nil {
				t.Fatal(err)
			}
			a.post(a.write(b, 8, 8)) // and now its PSN is the one that b expects
			a.status(ib.WCRetryExcErr)
			if n, _ := c.cq.Poll(make([]ib.WC, 1)); n != 0 {
				t.Error("the peer has a completion of what another one has sent")
			}
		})
	}
}

// The answer to a READ is on the long way when a WRITE is executed on the short one:
// the WRITE's acknowledgement must not be lost behind it.
func TestDirectOvertakesRead(t *testing.T) {
	a, b := pair(t, linkLoop, ib.RC, 4096)
	x, y := a.qp.(*QP), b.qp.(*QP)
	before := countsOf(a.dev)
	y.tx.Store(txBusy) // somebody sends for b
	a.post(a.read(b, 0, 64))
	var answer train.Train
	y.mu.Lock()
	ok := y.core.Pull(&answer, y.dev.now())
	y.mu.Unlock()
	if !ok {
		t.Fatal("there is no answer to the READ")
	}
	a.post(a.write(b, 64, 64))
	answer.From, answer.To = answer.Flow.Src, answer.Flow.Dst
	if f, _, _ := x.receive(&answer, x.dev.now()); !f.OK() {
		t.Fatal(f)
	}
	y.tx.Store(txIdle)
	y.dev.transmit(y, y.dev.now())
	for _, want := range []ib.WCOpcode{ib.WCRDMARead, ib.WCRDMAWrite} {
		if wc := a.ok(); wc.Op != want {
			t.Errorf("%v has completed, want %v", wc.Op, want)
		}
	}
	if c := countsOf(a.dev).since(before); c["retransmitted_packets"] != 0 {
		t.Errorf("packets were sent again: %v", c)
	}
}
