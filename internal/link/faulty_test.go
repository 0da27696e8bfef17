package link

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// numbered makes n SENDs whose PSN and immediate data count up.
func numbered(f *train.Flow, n int) []*train.Train {
	ts := make([]*train.Train, n)
	for i := range ts {
		t := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindSend, Extra: wire.WithImm,
			Start: true, End: true, N: 1, PSN: wire.MakePSN(uint32(i)), Imm: uint32(i)}
		t.SetInline(bytes.Repeat([]byte{byte(i)}, 40))
		ts[i] = t
	}
	return ts
}

// drain polls until nothing is under way any more.
func drain(l Link, r *recorder) {
	for idle := 0; idle < 2; {
		if l.Poll(r, 100) > 0 {
			idle = 0
			continue
		}
		l.Wait(time.Second)
		idle++
	}
}

func imms(r *recorder) (out []uint32) {
	for i := range r.got {
		out = append(out, r.got[i].Imm)
	}
	return out
}

// Every mistreatment happens about as often as asked, is counted, and has the
// effect that its name says.
func TestFaults(t *testing.T) {
	const n = 2000
	for _, c := range []struct {
		name  string
		cfg   FaultyConfig
		check func(t *testing.T, s FaultyStats, r *recorder)
	}{
		{"none", FaultyConfig{}, func(t *testing.T, s FaultyStats, r *recorder) {
			if s != (FaultyStats{Packets: n}) || len(r.got) != n || !inOrder(imms(r)) {
				t.Errorf("%+v, %d came", s, len(r.got))
			}
		}},
		{"drop", FaultyConfig{Drop: 0.1}, func(t *testing.T, s FaultyStats, r *recorder) {
			about(t, s.Dropped, n/10)
			if len(r.got) != n-int(s.Dropped) || r.dropped() != 0 || !inOrder(imms(r)) {
				t.Errorf("%+v, %d came", s, len(r.got))
			}
		}},
		{"duplicate", FaultyConfig{Duplicate: 0.1}, func(t *testing.T, s FaultyStats, r *recorder) {
			about(t, s.Duplicated, n/10)
			if len(r.got) != n+int(s.Duplicated) {
				t.Errorf("%+v, %d came", s, len(r.got))
			}
		}},
		{"corrupt", FaultyConfig{Corrupt: 0.1}, func(t *testing.T, s FaultyStats, r *recorder) {
			about(t, s.Corrupted, n/10)
			if len(r.got) != n-int(s.Corrupted) || r.drops[DropICRC] != int(s.Corrupted) {
				t.Errorf("%+v, %d came, dropped %v", s, len(r.got), r.drops)
			}
		}},
		{"reorder", FaultyConfig{Reorder: 0.1}, func(t *testing.T, s FaultyStats, r *recorder) {
			about(t, s.Reordered, n/10)
			late := 0
			for i, v := range imms(r) {
				if i > 0 && v < imms(r)[i-1] {
					late++
				}
			}
			// The delayed packets come after all others, in the order they were sent.
			if len(r.got) != n || late != 1 || inOrder(imms(r)) {
				t.Errorf("%+v, %d came, %d steps back", s, len(r.got), late)
			}
		}},
		{"all", FaultyConfig{Drop: 0.1, Duplicate: 0.1, Corrupt: 0.1, Reorder: 0.1, MinDelay: time.Microsecond, MaxDelay: time.Millisecond},
			func(t *testing.T, s FaultyStats, r *recorder) {
				if inOrder(imms(r)) {
					t.Error("nothing was reordered")
				}
				if got := len(r.got) + r.dropped(); got != n-int(s.Dropped)+int(s.Duplicated) {
					t.Errorf("%+v, %d came", s, got)
				}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, seed := newRand(t)
			c.cfg.Seed = seed
			synctest.Test(t, func(t *testing.T) {
				a, b := newPair(c.cfg)
				defer a.Close()
				defer b.Close()
				f := flow(t, a, b.Addrs()[0], train.Flow{})
				if k, err := a.Send(numbered(f, n)); k != n || err != nil {
					t.Fatal(k, err)
				}
				var r recorder
				drain(b, &r)
				c.check(t, a.fabric.Stats(), &r)
			})
		})
	}
}

// about fails if a count of a binomial distribution is far off.
func about(t *testing.T, got uint64, want int) {
	t.Helper()
	if int(got) < want/2 || int(got) > want*2 {
		t.Errorf("happened %d times, want about %d", got, want)
	}
}

func inOrder(v []uint32) bool {
	for i := range v {
		if i > 0 && v[i] < v[i-1] {
			return false
		}
	}
	return true
}

// The same seed does the same, another one something else.
func TestFaultySeed(t *testing.T) {
	run := func(seed uint64) (out string) {
		synctest.Test(t, func(t *testing.T) {
			a, b := newPair(FaultyConfig{Seed: seed, Drop: 0.1, Duplicate: 0.1, Corrupt: 0.1, Reorder: 0.1,
				MaxDelay: time.Millisecond})
			defer a.Close()
			defer b.Close()
			f := flow(t, a, b.Addrs()[0], train.Flow{})
			mustSend(t, a, numbered(f, 300))
			var r recorder
			drain(b, &r)
			out = fmt.Sprint(imms(&r), r.drops, a.fabric.Stats())
		})
		return out
	}
	first, again, other := run(1), run(1), run(2)
	if first != again {
		t.Error("the same seed did not do the same")
	}
	if first == other {
		t.Error("another seed did the same")
	}
}

// Time under way is what was asked for, and Wait sleeps exactly that long.
func TestFaultyDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newPair(FaultyConfig{MinDelay: 3 * time.Millisecond, MaxDelay: 5 * time.Millisecond})
		defer a.Close()
		defer b.Close()
		f := flow(t, a, b.Addrs()[0], train.Flow{})
		var r recorder
		for range 50 {
			start := time.Now()
			mustSend(t, a, numbered(f, 1))
			if b.Poll(&r, 10) != 0 {
				t.Fatal("it was there at once")
			}
			b.Wait(time.Millisecond)
			if d := time.Since(start); d != time.Millisecond {
				t.Errorf("a wait of 1ms took %v", d)
			}
			b.Wait(time.Hour)
			if d := time.Since(start); d < 3*time.Millisecond || d > 5*time.Millisecond {
				t.Errorf("it took %v", d)
			}
			if b.Poll(&r, 10) != 1 {
				t.Error("it was not there")
			}
		}

		// A packet sent during the wait ends it, when it is due.
		start := time.Now()
		go func() {
			time.Sleep(10 * time.Millisecond)
			mustSend(t, a, numbered(f, 1))
		}()
		b.Wait(-1)
		if d := time.Since(start); d < 13*time.Millisecond || d > 15*time.Millisecond || b.Poll(&r, 10) != 1 {
			t.Errorf("the wait took %v", d)
		}

		// So does Close: the bubble must not end with a goroutine still in Wait.
		go func() {
			time.Sleep(time.Second)
			b.Close()
		}()
		start = time.Now()
		b.Wait(-1)
		if d := time.Since(start); d != time.Second {
			t.Errorf("closed after %v", d)
		}
	})
}

func TestFaultyFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hops []Hop
		cfg := FaultyConfig{Drop: 1, Filter: func(h Hop, pkt []byte) Verdict {
			hops = append(hops, h)
			var hd wire.Header
			if _, err := hd.Parse(pkt); err != nil {
				t.Error(err)
			}
			switch hd.PSN {
			case 1:
				return Discard
			case 2:
				return Duplicate
			case 3:
				return Delay
			case 4:
				pkt[len(pkt)-1] ^= 1
			case 6:
				return Chance
			}
			return Deliver
		}}
		a, b := newPair(cfg)
		defer a.Close()
		defer b.Close()
		f := flow(t, a, b.Addrs()[0], train.Flow{})
		mustSend(t, a, numbered(f, 7))
		var r recorder
		drain(b, &r)
		if got := fmt.Sprint(imms(&r)); got != "[0 2 2 5 3]" || r.drops[DropICRC] != 1 {
			t.Errorf("%s came, dropped %v", got, r.drops)
		}
		want := FaultyStats{Packets: 7, Discarded: 1, Duplicated: 1, Reordered: 1, Dropped: 1}
		if s := a.fabric.Stats(); s != want {
			t.Errorf("stats %+v, want %+v", s, want)
		}
		if len(hops) != 7 || hops[0] != (Hop{From: a.Addrs()[0], To: b.Addrs()[0]}) {
			t.Errorf("hops %v", hops)
		}
	})
}

// Three ends, one with two addresses; to nobody; into a full buffer.
func TestFabric(t *testing.T) {
	fab := NewFabric(FaultyConfig{Buffer: 10, MTU: 1024, Window: 7})
	addr := func(i byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, i}) }
	six := netip.MustParseAddr("fd00::1")
	a, b, c := fab.Attach(addr(1)), fab.Attach(addr(2)), fab.Attach(addr(3), six)
	defer a.Close()
	defer b.Close()
	if a.MTU() != 1024 || a.Window(1024) != 7 || len(c.Addrs()) != 2 || a.Offloads() != nil {
		t.Errorf("MTU %d, window %d, addresses %v", a.MTU(), a.Window(1024), c.Addrs())
	}
	for _, to := range []*Faulty{b, c, a} {
		f := flow(t, a, to.Addrs()[0], train.Flow{})
		mustSend(t, a, numbered(f, 1))
		var r recorder
		if to.Poll(&r, 10) != 1 || r.got[0].To != to.Addrs()[0] || r.got[0].From != addr(1) {
			t.Errorf("to %v: %d trains", to.Addrs(), len(r.got))
		}
	}

	f6 := &train.Flow{Src: six, Dst: six}
	if err := c.Prepare(f6); err != nil {
		t.Fatal(err)
	}
	mustSend(t, c, numbered(f6, 1))
	var r recorder
	if c.Poll(&r, 1) != 1 || len(r.got) != 1 || r.got[0].To != six {
		t.Errorf("IPv6: %d trains", len(r.got))
	}

	for _, f := range []train.Flow{
		{Src: addr(9), Dst: addr(1)}, {Src: addr(1), Dst: six}, {Src: addr(1)},
	} {
		if err := a.Prepare(&f); err == nil {
			t.Errorf("flow from %v to %v", f.Src, f.Dst)
		}
	}

	f := flow(t, a, addr(3), train.Flow{})
	c.Close()
	mustSend(t, a, numbered(f, 3))
	f = flow(t, a, addr(2), train.Flow{})
	mustSend(t, a, numbered(f, 13))
	if s := fab.Stats(); s.Unreached != 3 || s.Overflowed != 3 {
		t.Errorf("stats %+v", s)
	}
	if n := b.Poll(&r, 4); n != 4 {
		t.Errorf("polled %d with a budget of 4", n)
	}
}
