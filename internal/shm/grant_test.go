package shm

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// grantPair returns an inbox that gives grants, its channel to a peer, and the peer's channel.
func grantPair(t testing.TB) (owner *Inbox, own, peer *Channel) {
	t.Helper()
	owner = newInbox(t, nil)
	peer, own = joinPair(t, newInbox(t, nil), owner)
	return owner, own, peer
}

// give opens a grant, and returns both ends.
func give(t testing.TB, own, peer *Channel) (*Grant, *PeerGrant) {
	t.Helper()
	l := own.NewGrant()
	if l == nil {
		t.Fatal("no grant")
	}
	p := peer.PeerGrant(l.Number(), l.Serial())
	if p == nil {
		t.Fatalf("grant %d with serial %d is none", l.Number(), l.Serial())
	}
	return l, p
}

func wantCounts(t *testing.T, l *Grant, packets, messages, bytes uint64) {
	t.Helper()
	if c := l.Counts(); c != (GrantCounts{GrantWrites: messages, GrantWritePackets: packets, GrantWritten: bytes}) {
		t.Errorf("%v; want %d messages of %d packets and %d bytes", c, messages, packets, bytes)
	}
}

// TestGrant: what the owner and the peer of a grant see of each other.
func TestGrant(t *testing.T) {
	_, own, peer := grantPair(t)
	l, p := give(t, own, peer)
	if !l.Open() || l.Inside() || !p.Shown() {
		t.Fatalf("open %v, inside %v, shown %v", l.Open(), l.Inside(), p.Shown())
	}
	if !p.Enter() || !l.Inside() {
		t.Fatal("the peer is not inside")
	}
	p.Count(GrantWrites, 3, 2000)
	p.Leave()
	if l.Inside() {
		t.Error("the peer has not left")
	}
	wantCounts(t, l, 3, 1, 2000)
	p.Enter()
	p.Leave() // without Count: the peer had nothing to store after all
	wantCounts(t, l, 3, 1, 2000)

	p.Enter()
	l.Shut()
	if l.Open() || p.Shown() || !l.Inside() {
		t.Errorf("open %v, shown %v, inside %v", l.Open(), p.Shown(), l.Inside())
	}
	var left atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.Await()
		if !left.Load() {
			t.Error("the owner did not wait for the peer")
		}
	}()
	time.Sleep(time.Millisecond)
	left.Store(true)
	if p.Count(GrantWrites, 1, 8) {
		t.Error("it counts what it may not have stored in time")
	}
	p.Leave()
	<-done
	wantCounts(t, l, 3, 1, 2000)
	if p.Enter() || l.Inside() {
		t.Error("the peer enters a grant that is shut")
	}
	l.Free()
}

// TestGrantNone: PeerGrant returns nil for numbers and serials that no grant has.
func TestGrantNone(t *testing.T) {
	_, _, peer := grantPair(t)
	for _, k := range []struct {
		number int
		serial uint64
	}{{-1, 1}, {MaxGrants, 1}, {0, 0}} {
		if peer.PeerGrant(k.number, k.serial) != nil {
			t.Errorf("there is a grant %d with serial %d", k.number, k.serial)
		}
	}
	if peer.PeerGrant(MaxGrants-1, 1) == nil {
		t.Error("the last grant is missing")
	}
}

// TestGrantReused: a slot is used again for a grant with another serial. A peer with the old
// serial cannot enter, but may keep the new peer out for a moment.
func TestGrantReused(t *testing.T) {
	_, own, peer := grantPair(t)
	l1, p1 := give(t, own, peer)
	p1.Enter()
	p1.Count(GrantWrites, 1, 100)
	p1.Leave()
	l1.Shut()
	l1.Free()
	l2, p2 := give(t, own, peer)
	if l2.Number() != l1.Number() || l2.Serial() == l1.Serial() {
		t.Fatalf("grant %d with serial %d after grant %d with serial %d", l2.Number(), l2.Serial(), l1.Number(), l1.Serial())
	}
	wantCounts(t, l2, 0, 0, 0)
	if p1.Enter() || p1.Shown() || l2.Inside() {
		t.Error("the old serial is good for the new grant")
	}
	// Between the two steps of its Enter, the old peer keeps the new one out.
	l2.words.inside.Store(l1.Serial())
	if l2.Inside() || p2.Enter() {
		t.Error("the old one is taken for the new one, or not seen")
	}
	l2.words.inside.Store(0)
	if !p2.Enter() {
		t.Error("the new one cannot enter")
	}
	p1.back() // the second step, after p2 has entered
	if !l2.Inside() {
		t.Error("the old one has put the new one out")
	}
	l1.Shut() // leaves the new serial alone
	if !l2.Open() {
		t.Error("the old grant's end has shut the new one")
	}
	p2.Count(GrantWrites, 1, 1)
	p2.Leave()
	wantCounts(t, l2, 1, 1, 1)
}

func TestGrantsExhausted(t *testing.T) {
	owner, own, _ := grantPair(t)
	seen := map[int]bool{}
	var all []*Grant
	for range MaxGrants {
		l := own.NewGrant()
		if l == nil || seen[l.Number()] {
			t.Fatalf("after %d grants: %+v", len(all), l)
		}
		seen[l.Number()] = true
		all = append(all, l)
	}
	if own.NewGrant() != nil {
		t.Error("one more than there are")
	}
	all[17].Shut()
	all[17].Free()
	if l := own.NewGrant(); l == nil || l.Number() != all[17].Number() {
		t.Errorf("%+v after grant %d was freed", l, all[17].Number())
	}
	owner.Close()
	if own.NewGrant() != nil {
		t.Error("a grant of an inbox that is closed")
	}
	all[1].Free() // must not touch memory, which is unmapped
}

// TestGrantKilled: Await returns when a process that is inside a grant has ended, and the slot
// can be used again.
func TestGrantKilled(t *testing.T) {
	owner := newInbox(t, nil)
	k := startChild(t, listen(t), "grant", 0)
	c, err := k.accept(t, owner)
	if err != nil {
		t.Fatal(err)
	}
	l := c.NewGrant()
	told := binary.NativeEndian.AppendUint64(nil, uint64(l.Number()))
	if err := c.Send(recData, binary.NativeEndian.AppendUint64(told, l.Serial())); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); !l.Inside(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not enter")
		}
	}
	l.Shut()
	done := make(chan struct{})
	go func() { l.Await(); close(done) }()
	select {
	case <-done:
		t.Fatal("the owner does not wait")
	case <-time.After(20 * time.Millisecond):
	}
	k.kill()
	<-done
	if err := c.Check(); !errors.Is(err, ErrPeerDied) {
		t.Error(err)
	}
	if !l.Inside() {
		t.Error("who has died inside has left")
	}
	l.Free()
	if again := c.NewGrant(); again.Number() != l.Number() || again.words.inside.Load() != 0 {
		t.Errorf("grant %d, in which %d is, after grant %d", again.Number(), again.words.inside.Load(), l.Number())
	}
}

// TestCheck: Check reports at once that a process has ended.
func TestCheck(t *testing.T) {
	owner := newInbox(t, nil)
	k := startChild(t, listen(t), "grant", 0)
	c, err := k.accept(t, owner)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Check(); err != nil {
		t.Fatal(err)
	}
	k.kill()
	if err := c.Check(); !errors.Is(err, ErrPeerDied) {
		t.Errorf("%v", err)
	}
}

// TestGrantHeld: Hold keeps the peer's inbox mapped after the channel is closed.
func TestGrantHeld(t *testing.T) {
	before := holding(t).maps
	_, own, peer := grantPair(t)
	l, p := give(t, own, peer)
	peer.Hold()
	peer.Close()
	if !p.Enter() { // faults if the inbox is unmapped
		t.Error("it cannot enter")
	}
	p.Count(GrantWrites, 1, 1)
	p.Leave()
	wantCounts(t, l, 1, 1, 1)
	peer.Release()
	own.Close()
	own.in.Close()
	peer.in.Close()
	for end := time.Now().Add(patience); holding(t).maps != before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d mappings, before there were %d", holding(t).maps, before)
		}
	}
}

// TestGrantTorture: the owner opens and shuts grants while the peer stores all the time. After
// Await nothing changes any more, and the counts are what was stored.
func TestGrantTorture(t *testing.T) {
	rounds := 3000
	if testing.Short() {
		rounds = 500
	}
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	_, own, peer := grantPair(t)
	words := make([]atomic.Uint64, 16)
	var next atomic.Pointer[PeerGrant]
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := uint64(1); !stop.Load(); {
			p := next.Load()
			if p == nil || !p.Enter() {
				runtime.Gosched()
				continue
			}
			for i := range words {
				words[i].Store(n)
			}
			if p.Count(GrantWrites, 1, 8*len(words)) {
				n++ // otherwise the peer stores the same value again
			}
			p.Leave()
		}
	})
	var old atomic.Pointer[PeerGrant]
	wg.Go(func() { // a peer whose serial is always an old one
		for !stop.Load() {
			if p := old.Load(); p != nil && p.Enter() {
				t.Error("a serial that was taken away is good")
				return
			}
			runtime.Gosched()
		}
	})
	stored := uint64(0)
	for round := range rounds {
		l, p := give(t, own, peer)
		next.Store(p)
		for range rng.IntN(200) {
			runtime.Gosched()
		}
		l.Shut()
		l.Await()
		first := words[0].Load()
		c := l.Counts()
		messages, bytes := c[GrantWrites], c[GrantWritten]
		stored += messages
		for range 1 + rng.IntN(50) {
			for i := range words {
				if v := words[i].Load(); v != first {
					t.Fatalf("round %d: word %d changes from %d to %d", round, i, first, v)
				}
			}
			runtime.Gosched()
		}
		if stored != first && stored+1 != first || bytes != messages*uint64(8*len(words)) {
			t.Fatalf("round %d: %d are counted, %d was stored", round, stored, first)
		}
		l.Free()
		old.Store(peer.PeerGrant(l.Number(), l.Serial()))
	}
	stop.Store(true)
	wg.Wait()
	if stored == 0 {
		t.Error("nothing was stored")
	}
	t.Logf("%d stored in %d rounds", stored, rounds)
}
