package cm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	proto "github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/verbs"
)

// forger sends requests of peers that do not exist.
type forger struct {
	t   testing.TB
	dev *verbs.Device
	rng *rand.Rand
	m   proto.Send
}

func newForger(t testing.TB, dev *verbs.Device, to netip.AddrPort) *forger {
	t.Helper()
	c := proto.New(proto.Config{GUID: 1, NewID: func() uint32 { return 1 }, Rand: rand.Uint64, Listener: func(*proto.Request) proto.Verdict { return proto.Verdict{} }})
	_, err := c.Connect(0, uint64(0x0106)<<16|uint64(to.Port()), proto.RC, &proto.Path{Local: dev.Addr(), Remote: to.Addr(), HopLimit: 64, MTU: ib.MTU1024, LifeTime: 16},
		&proto.IPHeader{Src: netip.AddrPortFrom(dev.Addr(), 1), Dst: to.Addr()}, &proto.Params{QPN: 1, PSN: 1}, 15)
	check(t, err)
	m, _ := c.NextMAD()
	return &forger{t: t, dev: dev, rng: rand.New(rand.NewPCG(1, 2)), m: m}
}

func (f *forger) send(n int) {
	f.t.Helper()
	const data, guid, qpn = 24, 16, 32 // IBA 12.6.5
	for range n {
		b := f.m.MAD[:]
		binary.BigEndian.PutUint32(b[data:], f.rng.Uint32()|1)
		binary.BigEndian.PutUint64(b[data+guid:], f.rng.Uint64())
		binary.BigEndian.PutUint32(b[data+qpn:], f.rng.Uint32()&^0xff)
		check(f.t, provider.DeviceOf(f.dev).Management().Send(&provider.MAD{From: f.m.From, To: f.m.To, HopLimit: f.m.HopLimit, Bytes: b}))
	}
}

// waitFor waits until a condition that the listener's lock guards holds.
func waitFor(t testing.TB, l *Listener, what string, f func() bool) {
	t.Helper()
	for ctx := within(t); ; time.Sleep(time.Millisecond) {
		l.mu.Lock()
		ok := f()
		l.mu.Unlock()
		if ok {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(what)
		}
	}
}

// Accept does not wait for a peer that never confirms, neither does it forget it: the listener's end
// closes what was offered.
func TestAcceptPassesOverSilentPeers(t *testing.T) {
	server, client := device(t, verbs.LinkLoop), device(t, verbs.LinkLoop)
	l := listenOn(t, anyPort(server), &Config{Device: server})
	var b *Conn
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { b, err = l.Accept(within(t)) })
	newForger(t, client, l.Addr()).send(5)
	waitFor(t, l, "the forged requests are not answered", func() bool { return len(l.offers.waiting) == 5 })
	a, dialErr := Dial(within(t), l.Addr().String(), &Config{Device: client})
	wg.Wait()
	check(t, errors.Join(err, dialErr))
	if a.LocalAddr() != b.RemoteAddr() {
		t.Errorf("a connection of %v, not of %v", b.RemoteAddr(), a.LocalAddr())
	}
	if n := len(l.offers.waiting); n != 5 {
		t.Errorf("%d offers are left", n)
	}
	closeAll(t, l, a, b)
}

// A connection that was confirmed while no call of Accept waited is returned by the next one.
func TestAcceptReturnsEarlierOffers(t *testing.T) {
	d := device(t, verbs.LinkLoop)
	l := listenOn(t, anyPort(d), &Config{Device: d})
	var wg sync.WaitGroup
	conns, errs := make([]*Conn, 2), make([]error, 2)
	for i := range conns {
		wg.Go(func() { conns[i], errs[i] = Dial(within(t), l.Addr().String(), &Config{Device: d}) })
	}
	waitFor(t, l, "the requests do not come", func() bool { return l.fresh.Len() == 2 })
	for range conns {
		c, err := l.Accept(within(t))
		check(t, err)
		defer closeAll(t, c)
	}
	wg.Wait()
	check(t, errors.Join(errs...))
	closeAll(t, conns[0], conns[1])
}

// A flood leaves bounded lists, and a real peer is connected when the time of forged ones is over.
func TestFlood(t *testing.T) {
	server, client := device(t, verbs.LinkLoop), device(t, verbs.LinkLoop)
	l := listenOn(t, anyPort(server), &Config{Device: server, Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
	ctx, cancel := context.WithCancel(context.Background())
	accepted := make(chan *Conn, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			accepted <- c
		}
	})
	f := newForger(t, client, l.Addr())
	for range 300 {
		f.send(16)
		l.mu.Lock()
		offered, queued, known := len(l.offers.waiting)+l.offers.making, l.again.Len()+l.fresh.Len(), len(l.byID)
		l.mu.Unlock()
		if offered > maxOffered || queued > 1024 || known > 1025 {
			t.Fatalf("%d offers, %d requests in the queue, %d known", offered, queued, known)
		}
		time.Sleep(time.Millisecond) // the queue of queue pair 1 is short
	}
	waitFor(t, l, "there are fewer offers than room for them", func() bool { return len(l.offers.waiting) >= maxOffered-1 })
	a, err := Dial(within(t), l.Addr().String(), &Config{Device: client})
	check(t, err)
	b := <-accepted
	if b.RemoteAddr() != a.LocalAddr() {
		t.Errorf("a connection of %v, not of %v", b.RemoteAddr(), a.LocalAddr())
	}
	cancel()
	wg.Wait()
	closeAll(t, l, a, b)
}

// Of the offers a random one makes room, and none before its time is over.
func TestOffersEvicted(t *testing.T) {
	now := time.Now()
	seen := map[string]bool{}
	for range 1000 {
		var o offers
		for i := range 10 { // the first five are old
			o.waiting = append(o.waiting, &offer{at: now.Add(-confirmTime + time.Duration(i-5)*time.Millisecond)})
		}
		all := append([]*offer(nil), o.waiting...)
		order := ""
		for range 5 {
			old := o.evictLocked(now)
			for i, w := range all {
				if w == old {
					order += fmt.Sprint(i)
				}
			}
			if old == nil || !old.at.Before(now.Add(-confirmTime)) {
				t.Fatalf("offer %+v is taken", old)
			}
		}
		if old := o.evictLocked(now); old != nil || len(o.waiting) != 5 {
			t.Fatalf("offer %+v is taken, %d are left", old, len(o.waiting))
		}
		seen[order] = true
	}
	if len(seen) < 60 { // of 120 orders
		t.Errorf("%d orders in 1,000 tries", len(seen))
	}
}
