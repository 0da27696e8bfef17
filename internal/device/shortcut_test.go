package device

// Shortcuts and exchanges between queue pairs of one process, where they must not be taken.

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/train"
)

// A sender to a queue pair that is connected with another one gets no answer, by a shortcut as
// by any other way: whether that queue pair takes the packets, since they come from its peer's
// address, or not; and whatever PSN it expects.
func TestShortcutToOthersPeer(t *testing.T) {
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
			a.timeout, a.retries = 8, 1 // no answer ever comes
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

// A queue pair remembers its neighbour, and forgets it: when the neighbour is closed requests
// get no answer, and a queue pair that is connected anew writes to its new peer.
func TestShortcutNeighbourGone(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	a, b := connected(t, x, y, ib.RC, 4096, nil)
	a.buf[0] = 1
	a.post(a.write(b, 0, 8))
	a.ok()
	closeAll(t, b.qp)
	a.timeoutSoon()
	a.buf[0] = 2
	a.post(a.write(b, 0, 8))
	a.status(ib.WCRetryExcErr)
	c := newEnd(t, y, ib.RC, 4096)
	t.Cleanup(c.close)
	a.modify(ib.QPAttr{State: ib.QPReset}, 0)
	a.connect(c)
	c.connect(a)
	a.buf[0] = 3
	a.post(a.write(c, 0, 8))
	a.ok()
	if near := a.qp.(*QP).near; b.buf[0] != 1 || c.buf[0] != 3 || near != c.qp.(*QP) {
		t.Errorf("%d and %d were written; the neighbour is %p of %p", b.buf[0], c.buf[0], near, c.qp)
	}
}

// The answer to a READ goes by token when a WRITE is executed by an exchange: the
// WRITE's acknowledgement must not be lost behind it.
func TestShortcutOvertakesRead(t *testing.T) {
	a, b := pair(t, linkLoop, ib.RC, 4096)
	x, y := a.qp.(*QP), b.qp.(*QP)
	before := countsOf(a.dev)
	y.tx.Store(txBusy) // as if another goroutine sent for b
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

// A short WRITE that goes without a train does what one with trains does, whether it
// succeeds or not, among requests that go by trains: the same bytes, completions and
// states. (Packets are not the same: trains may share an acknowledgement.)
func TestShortWriteLikeAnyOther(t *testing.T) {
	seed := testSeed(t)
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	seen := openDevice(t, provider.Config{Link: linkLoop, PCAP: filepath.Join(t.TempDir(), "x.pcapng")})
	for i := range uint64(60) {
		var logs [2]string
		for k, from := range []*Device{x, seen} {
			rng := rand.New(rand.NewPCG(seed, i)) // the same requests twice
			a, b := connected(t, from, y, ib.RC, 3*4096, nil)
			fill(a.buf, byte(i))
			logs[k] = someRequests(t, rng, a, b) + fmt.Sprint(crc32.ChecksumIEEE(b.buf))
		}
		if logs[0] != logs[1] {
			t.Fatalf("pair %d, without trains:\n%s\nby trains:\n%s", i, logs[0], logs[1])
		}
	}
}

// someRequests posts lists of requests until one fails, and returns what completed.
func someRequests(t *testing.T, rng *rand.Rand, a, b *end) (log string) {
	t.Helper()
	id := uint64(0)
	for range 30 {
		wrs := make([]ib.SendWR, 1+rng.IntN(3))
		signaled := 0
		for i := range wrs {
			id++
			wrs[i] = someRequest(rng, a, b)
			wrs[i].ID = id
			if i == len(wrs)-1 {
				wrs[i].Flags |= ib.SendSignaled
			}
			signaled += int(wrs[i].Flags & ib.SendSignaled / ib.SendSignaled)
		}
		n, err := a.qp.PostSend(wrs)
		if err != nil {
			return fmt.Sprint(log, "refused ", n, " ", err, " ")
		}
		for ; signaled > 0; signaled-- {
			wc := a.wait()
			if log += fmt.Sprintln(wc.ID, wc.Op, wc.Status, wc.VendorErr, wc.ByteLen); wc.Status != ib.WCSuccess {
				return fmt.Sprint(log, a.state(), b.state(), " ")
			}
		}
	}
	return log
}

func someRequest(rng *rand.Rand, a, b *end) ib.SendWR {
	n := []int{0, 1, 7, 8, 64, 100, 4095, 4096, 4097, 8192}[rng.IntN(10)]
	wr := a.write(b, 8+rng.IntN(4096-8), n) // behind what READs write to: the order of the two is not defined
	wr.Flags = ib.SendFlags(rng.IntN(2)) * ib.SendSignaled
	switch rng.IntN(100) {
	case 0:
		wr.RKey ^= 1
	case 1:
		wr.RemoteAddr += 2 * 4096
	case 2:
		wr.SGL[0].LKey ^= 1
	case 3:
		wr.SGL[0].Addr -= 4096 + 1
	case 4:
		wr.SGL = append(wr.SGL, wr.SGL...)
	case 5, 6, 7:
		wr.Flags |= ib.SendFence
	case 8, 9, 10, 11:
		wr = a.read(b, 0, 8)
	}
	return wr
}
