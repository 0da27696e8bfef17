package link

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// flowBetween prepares a flow from one link to another.
func flowBetween(t testing.TB, a, b *Shared) *train.Flow {
	t.Helper()
	f := &train.Flow{Src: a.Addrs()[0], Dst: b.Addrs()[0]}
	if err := a.Prepare(f); err != nil {
		t.Fatal(err)
	}
	return f
}

// Two processes that dial each other at the same time end up with one channel, and
// talk by it in both directions.
func TestSharedBothDial(t *testing.T) {
	for range 20 {
		a, b := sharedPair(t)
		ab, ba := flowBetween(t, a, b), flowBetween(t, b, a)
		var wg sync.WaitGroup
		errs := make([]error, 2)
		wg.Go(func() { errs[0] = a.Reach(ab, 9) })
		wg.Go(func() { errs[1] = b.Reach(ba, 9) })
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if !a.IsLocal(ab) || !b.IsLocal(ba) {
			t.Fatal("one side has given up")
		}
		for i, way := range []struct {
			from, to *Shared
			flow     *train.Flow
		}{{a, b, ab}, {b, a, ba}} {
			tr := &train.Train{Flow: way.flow, Transport: wire.RC, Kind: wire.KindAck, Start: true, End: true, DestQP: 9, N: 1, PSN: wire.PSN(i)}
			if n, err := way.from.Send([]*train.Train{tr}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			var k taker
			for deadline := time.Now().Add(5 * time.Second); len(k.psns) == 0 && time.Now().Before(deadline); {
				way.to.Wait(time.Millisecond)
				way.to.Poll(&k, 100)
			}
			if len(k.psns) != 1 || k.psns[0] != wire.PSN(i) {
				t.Fatalf("%v arrived", k.psns)
			}
		}
		// What was refused may take a moment to be forgotten.
		for deadline := time.Now().Add(5 * time.Second); a.inbox.Peers() != 1 || b.inbox.Peers() != 1; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d and %d channels", a.inbox.Peers(), b.inbox.Peers())
			}
		}
	}
}

// A sender never waits for a channel to be made: Send returns ErrBusy, and Freed is called
// when that has changed. Datagrams go by packets meanwhile, unless NoPackets forbids it.
func TestSharedNotConnected(t *testing.T) {
	a, b := sharedPair(t)
	if _, err := b.First().Listen(0, nil, func(int, int) error { return nil }); err != nil {
		t.Fatal(err)
	}
	by := &train.Train{Flow: flowBetween(t, a, b), Transport: wire.UD, Kind: wire.KindSend, Start: true, End: true, DestQP: 9, N: 1, PSN: 77}
	if n, err := a.Send([]*train.Train{by}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	var k taker
	for deadline := time.Now().Add(5 * time.Second); len(k.psns) == 0 && time.Now().Before(deadline); {
		b.Poll(&k, 10)
	}
	if len(k.psns) != 1 || k.psns[0] != 77 || a.Stats().TxPackets != 1 {
		t.Errorf("%v arrived, %d packets were sent", k.psns, a.Stats().TxPackets)
	}

	a, b = sharedPair(t)
	a.cfg.NoPackets = true
	freed := make(chan struct{}, 10)
	a.cfg.Freed = func() { freed <- struct{}{} }
	f := flowBetween(t, a, b)
	tr := &train.Train{Flow: f, Transport: wire.UD, Kind: wire.KindSend, Start: true, End: true, DestQP: 9, N: 1}
	n, err := a.Send([]*train.Train{tr})
	if n != 0 || err != ErrBusy {
		t.Fatal(n, err)
	}
	<-freed
	if n, err := a.Send([]*train.Train{tr}); n != 1 || err != nil || a.Lost() != 0 {
		t.Fatal(n, err, a.Lost())
	}
}

// A process that cannot be reached by rings is reached by packets; with NoPackets, Reach
// fails.
func TestSharedNoChannel(t *testing.T) {
	for _, packets := range []bool{true, false} {
		a, b := sharedPair(t)
		a.cfg.NoPackets = !packets
		dead := errors.New("no more peers")
		a.cfg.Look = func(netip.Addr) (Neighbours, error) {
			return &others{id: 99, dial: dialFails(dead)}, nil
		}
		f := flowBetween(t, a, b)
		err := a.Reach(f, 9)
		if packets && (err != nil || a.IsLocal(f)) {
			t.Errorf("%v, local %v", err, a.IsLocal(f))
		}
		if !packets && err == nil {
			t.Error("nobody complains")
		}
	}
}

// A full ring makes Send return ErrBusy, for datagrams at half of the ring already, so that
// connections, which send again what is lost, keep room; nothing is lost.
func TestSharedFull(t *testing.T) {
	a, b := sharedPair(t)
	f := flowBetween(t, a, b)
	if err := a.Reach(f, 9); err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 4096)
	send := func(tp wire.Transport, psn int) error {
		tr := &train.Train{Flow: f, Transport: tp, Kind: wire.KindSend, Start: true, End: true, DestQP: 9, PSN: wire.PSN(psn), MTU: 4096,
			N: 1, Len: len(payload), Payload: mem.List{Raw: [][]byte{payload}}}
		_, err := a.Send([]*train.Train{tr})
		return err
	}
	// Datagrams alone may use half of the ring, and then wait.
	datagrams := 0
	for ; ; datagrams++ {
		err := send(wire.UD, 0)
		if err == ErrBusy {
			break
		}
		if err != nil || a.Lost() > 0 {
			t.Fatal(err, a.Lost())
		}
	}
	if n := datagrams * len(payload); n < ringBytes/3 || n > ringBytes/2 {
		t.Errorf("%d bytes of datagrams fit a ring of %d", n, ringBytes)
	}
	sent := 0
	for ; ; sent++ {
		err := send(wire.RC, sent)
		if err == ErrBusy {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if sent*len(payload) < ringBytes/3 {
		t.Errorf("only %d trains of a connection found room", sent)
	}
	// Sending goes on as the peer reads.
	var k taker
	total := 4 * sent
	for deadline := time.Now().Add(20 * time.Second); sent < total; {
		before := a.Frees()
		if err := send(wire.RC, sent); err == nil {
			sent++
			continue
		}
		for a.Frees() == before {
			if time.Now().After(deadline) {
				t.Fatal("no room")
			}
			b.Poll(&k, 16)
			a.Poll(&taker{}, 16)
		}
	}
	for deadline := time.Now().Add(5 * time.Second); len(k.psns) < total+datagrams && time.Now().Before(deadline); {
		b.Poll(&k, 100)
	}
	if a.Lost() != 0 || k.bad != 0 || len(k.psns) != total+datagrams {
		t.Fatalf("%d of %d arrived, %d bad, %d lost", len(k.psns), total+datagrams, k.bad, a.Lost())
	}
	for i, p := range k.psns[datagrams:] {
		if p != wire.PSN(i) {
			t.Fatalf("train %d is %v", i, p)
		}
	}
}
