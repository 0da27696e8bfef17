package shm

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Many peers at once: every record arrives, in order, at the right channel.
func TestManyPeers(t *testing.T) {
	const peers, each = 100, 300
	hub := newInbox(t, &Config{RingBytes: MinRing})
	inboxes := make([]*Inbox, peers)
	chans := make([]*Channel, peers)
	index := make(map[*Channel]int)
	for i := range peers {
		inboxes[i] = newInbox(t, &Config{RingBytes: MinRing})
		var back *Channel
		chans[i], back = joinPair(t, inboxes[i], hub)
		index[back] = i
	}
	var wg sync.WaitGroup
	for i := range peers {
		wg.Go(func() {
			s := &recorder{}
			for number := uint64(0); number < each; {
				p := make([]byte, number%200)
				fill(p, number)
				switch err := chans[i].Send(recData, p); {
				case err == nil:
					number++
				case errors.Is(err, ErrFull):
					if inboxes[i].Poll(s, 1) == 0 {
						wait(inboxes[i], time.Second) // for Room
					}
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	got, total := make([]uint64, peers), 0
	pollUntil(t, hub, &recorder{record: func(c *Channel, _ byte, p []byte) {
		i := index[c]
		if uint64(len(p)) != got[i]%200 || !filled(p, got[i]) {
			t.Errorf("peer %d, record %d: %d bytes", i, got[i], len(p))
		}
		got[i]++
		total++
	}}, "all records", func() bool { return total == peers*each })
	wg.Wait()
}

// No wake-up is lost: the receiver sleeps without a limit, the sender sends at
// any moment around it.
func TestSleep(t *testing.T) {
	a, b := newInbox(t, nil), newInbox(t, nil)
	ab, _ := joinPair(t, a, b)
	const count = 1000
	var got atomic.Uint64
	var wg sync.WaitGroup
	wg.Go(func() {
		s := &recorder{record: func(*Channel, byte, []byte) { got.Add(1) }}
		for got.Load() < count {
			if b.Poll(s, 16) == 0 && got.Load() < count {
				wait(b, -1)
			}
		}
	})
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range uint64(count) {
		for range rng.IntN(300) {
			runtime.Gosched()
		}
		if err := ab.Send(recData); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(patience); got.Load() <= i; runtime.Gosched() {
			if time.Now().After(end) {
				b.event.Signal()
				t.Fatalf("record %d: the receiver sleeps, at %d", i, got.Load())
			}
		}
	}
	wg.Wait()
}

// The moments that TestSleep meets by chance, one by one: a record that was stored before
// Announce keeps the owner awake, though its sender has not rung the bell.
func TestLookAgain(t *testing.T) {
	a, b := newInbox(t, nil), newInbox(t, &Config{RingBytes: MinRing})
	ab, ba := joinPair(t, a, b)
	index, bit := slotBit(ba.slot)
	got := 0
	s := &recorder{record: func(*Channel, byte, []byte) { got++ }, room: func(*Channel) { got++ }}
	expect := func(what string) {
		t.Helper()
		if b.Announce() {
			t.Fatalf("%s: would sleep", what)
		}
		if got = 0; b.Poll(s, 8) != 1 || got != 1 {
			t.Fatalf("%s: %d calls", what, got)
		}
		if !b.Announce() {
			t.Fatalf("%s: would not sleep after it", what)
		}
		b.Awake()
	}
	commit := func() { // a record whose sender is stopped before it rings the bell
		ab.Begin()
		ab.Reserve(recData, 1)
		ab.tx.ring.Commit()
		ab.End()
	}
	b.Poll(s, 8) // finds the bit that attach has set

	commit()
	expect("a ring that is looked at")

	for range idleVisits {
		b.Poll(s, 8)
	}
	if !b.Announce() {
		t.Fatal("nothing is there")
	}
	b.Awake()
	ab.Send(recData)
	expect("a ring that is looked at again")

	// A record that comes right after the last look at its ring, while the bit is still
	// set, so that its sender does not set it: the record must be found.
	commit()
	b.slots[ba.slot].Load().rx.enter()
	b.unlist(ba.slot, ba)
	ba.rx.leave()
	if b.active[index].Load()&bit == 0 {
		t.Fatal("a ring with a record was left alone")
	}
	expect("a ring that is left alone")
	// Likewise if the peer ends, or the slot is taken, at that moment.
	ba.rx.enter()
	ba.setDown(ErrPeerDied)
	b.unlist(ba.slot, ba)
	ba.rx.leave()
	if b.active[index].Load()&bit == 0 || b.Announce() {
		t.Fatal("the end of a peer was forgotten")
	}
	b.unlist(ba.slot, nil)
	if b.active[index].Load()&bit == 0 {
		t.Fatal("a new peer was forgotten")
	}

	// Room that the peer has signalled before Announce.
	b.Poll(s, 8) // the end
	ba, ab = joinPair(t, b, a)
	for ba.Send(recData, make([]byte, 1000)) == nil {
	}
	if ba.Err() != nil || b.blocked.Load() != 1 {
		t.Fatal(ba.Err(), b.blocked.Load())
	}
	if !b.Announce() {
		t.Fatal("nothing is there")
	}
	b.Awake()
	drained := 0
	pollUntil(t, a, &recorder{record: func(*Channel, byte, []byte) { drained++ }}, "records", func() bool { return drained > 400 })
	if b.Announce() {
		t.Fatal("room is there: would sleep")
	}
	if got = 0; b.Poll(&recorder{room: func(c *Channel) { got++ }}, 8) == 0 || got != 1 {
		t.Errorf("%d times room", got)
	}
}

// Room is announced to a sender that sleeps until there is some.
func TestRoom(t *testing.T) {
	a, b := newInbox(t, nil), newInbox(t, &Config{RingBytes: MinRing})
	ab, _ := joinPair(t, a, b)
	const count = 5000
	var wg sync.WaitGroup
	wg.Go(func() {
		rooms := 0
		s := &recorder{room: func(c *Channel) {
			if rooms++; c != ab {
				t.Error("room in another channel")
			}
		}}
		for sent := 0; sent < count; {
			switch err := ab.Send(recData, make([]byte, 1000)); {
			case err == nil:
				sent++
			case errors.Is(err, ErrFull):
				for before := rooms; rooms == before; {
					if a.Poll(s, 1) == 0 {
						wait(a, -1)
					}
				}
			default:
				t.Error(err)
				return
			}
		}
		if rooms == 0 {
			t.Error("the ring was never full")
		}
	})
	got := 0
	pollUntil(t, b, &recorder{record: func(*Channel, byte, []byte) { got++ }}, "all records", func() bool { return got == count })
	wg.Wait()
}

// A ring that stays empty is not visited until its writer rings the bell.
func TestUnlist(t *testing.T) {
	a, b := newInbox(t, nil), newInbox(t, nil)
	ab, ba := joinPair(t, a, b)
	got := 0
	s := &recorder{record: func(*Channel, byte, []byte) { got++ }}
	index, bit := slotBit(ba.slot)
	for round := range 3 {
		ab.Send(recData)
		if b.Poll(s, 8); got != round+1 {
			t.Fatalf("%d records", got)
		}
		if b.active[index].Load()&bit == 0 || b.words.pending[index].Load()&bit == 0 {
			t.Fatal("a busy ring is not looked at")
		}
		for range idleVisits + 1 {
			b.Poll(s, 8)
		}
		if b.active[index].Load()&bit != 0 || b.words.pending[index].Load()&bit != 0 {
			t.Fatal("an idle ring is looked at")
		}
	}
	// Bits without a channel do no harm.
	for i := range slotWords {
		b.words.pending[i].Store(^uint64(0))
		b.words.room[i].Store(^uint64(0))
	}
	b.inUse.Store(slotWords)
	ab.Send(recData)
	if b.Poll(s, 8); got != 4 {
		t.Errorf("%d records", got)
	}
	for range idleVisits + 1 {
		b.Poll(s, 8)
	}
	for i := range slotWords {
		if v := b.words.pending[i].Load(); v != 0 {
			t.Errorf("word %d is left %#x", i, v)
		}
	}
}

// One busy ring does not keep others from being read.
func TestFair(t *testing.T) {
	hub := newInbox(t, nil)
	var chans []*Channel
	for range 3 {
		c, _ := joinPair(t, newInbox(t, nil), hub)
		chans = append(chans, c)
	}
	seen := make(map[*Channel]int)
	s := &recorder{record: func(c *Channel, _ byte, _ []byte) { seen[c]++ }}
	for range 6 {
		for _, c := range chans {
			for c.Send(recData, make([]byte, 10)) == nil && len(c.tx.ring.data)-int(c.tx.ring.reserved-c.tx.ring.given) > 4096 {
			}
		}
		hub.Poll(s, visitRecords)
	}
	for c, n := range seen {
		if n != 2*visitRecords {
			t.Errorf("slot %d: %d records", c.slot, n)
		}
	}
	if len(seen) != 3 {
		t.Errorf("%d rings were read", len(seen))
	}
}

// A broken ring ends its channel, on both sides, and no other.
func TestBrokenRing(t *testing.T) {
	for _, side := range []string{"reader", "writer"} {
		t.Run(side, func(t *testing.T) {
			a, b := newInbox(t, nil), newInbox(t, nil)
			ab, ba := joinPair(t, a, b)
			_, other := joinPair(t, newInbox(t, nil), b)
			if side == "reader" {
				word(ab.tx.mem, controlPage).Store(12345)
				ab.bell.record()
			} else {
				word(ab.tx.mem, freedAt).Store(12345)
				for ba.Send(recData, make([]byte, 4096)) == nil || ba.Err() == nil {
					word(ba.tx.mem, freedAt).Store(12345)
				}
			}
			var gone *Channel
			var why error
			pollUntil(t, b, &recorder{gone: func(c *Channel, err error) { gone, why = c, err }}, "the end", func() bool { return gone != nil })
			if gone != ba || !errors.Is(why, ErrBroken) || !errors.Is(ba.Err(), ErrBroken) {
				t.Errorf("%v: %v", gone, why)
			}
			if other.Err() != nil {
				t.Errorf("another channel: %v", other.Err())
			}
			awaitDown(t, ab)
			if !errors.Is(ab.Err(), ErrPeerClosed) {
				t.Error(ab.Err())
			}
		})
	}
}

// Channels are closed, also by sinks, while other goroutines use them.
func TestCloseUnderLoad(t *testing.T) {
	before := holding(t)
	func() {
		a, err := NewInbox(&Config{RingBytes: MinRing})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		b, err := NewInbox(&Config{RingBytes: MinRing})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		var stop atomic.Bool
		var wg sync.WaitGroup
		for _, in := range []*Inbox{a, b} {
			wg.Go(func() {
				s := &recorder{record: func(c *Channel, typ byte, p []byte) {
					c.Send(typ, p)
					if typ == recDone {
						c.Close()
					}
				}}
				for !stop.Load() {
					if in.Poll(s, 16) == 0 {
						wait(in, time.Millisecond)
					}
				}
			})
		}
		for i := range 100 {
			ab, ba := joinPair(t, a, b)
			var senders sync.WaitGroup
			for _, c := range []*Channel{ab, ba} {
				for range 2 {
					senders.Go(func() {
						for {
							if err := c.Send(recData, make([]byte, 100)); err != nil && !errors.Is(err, ErrFull) {
								return
							}
							runtime.Gosched()
						}
					})
				}
			}
			time.Sleep(time.Duration(i%10) * 50 * time.Microsecond)
			switch i % 3 {
			case 0:
				ab.Close()
			case 1:
				for { // until there is room, or the channel is down
					if err := ba.Send(recDone); err == nil || !errors.Is(err, ErrFull) {
						break
					}
					runtime.Gosched()
				}
			case 2:
				go ab.Close()
				ba.Close()
			}
			senders.Wait()
			awaitDown(t, ab)
			awaitDown(t, ba)
		}
		stop.Store(true)
		wg.Wait()
		if n := a.blocked.Load() + b.blocked.Load(); n != 0 {
			// Channels whose end has not been polled any more may be among them.
			for i := range a.slots {
				for _, in := range []*Inbox{a, b} {
					if c := in.slots[i].Load(); c != nil && c.blocked.Load() {
						n--
					}
				}
			}
			if n != 0 {
				t.Errorf("%d channels too many wait for room", n)
			}
		}
	}()
	// Sockets of package net are closed by their last user, a moment later.
	after := holding(t)
	for end := time.Now().Add(patience); after.maps != before.maps && time.Now().Before(end); after = holding(t) {
		time.Sleep(time.Millisecond)
	}
	if after.maps != before.maps {
		t.Errorf("%d mappings before, %d after", before.maps, after.maps)
	}
}

func TestInboxCloses(t *testing.T) {
	before := holding(t)
	a, err := NewInbox(nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewInbox(nil)
	if err != nil {
		t.Fatal(err)
	}
	ab, ba := joinPair(t, a, b)
	a.Close()
	a.Close()
	if !errors.Is(ab.Err(), ErrClosed) || ab.Begin() {
		t.Errorf("own channel: %v", ab.Err())
	}
	awaitDown(t, ba)
	if !errors.Is(ba.Err(), ErrPeerClosed) {
		t.Errorf("the other's: %v", ba.Err())
	}
	b.Close()
	ba.Close()
	if after := holding(t); after.maps != before.maps {
		t.Errorf("%d mappings before, %d after", before.maps, after.maps)
	}
}

func TestInboxFull(t *testing.T) {
	hub := newInbox(t, &Config{RingBytes: MinRing})
	other := newInbox(t, &Config{RingBytes: MinRing})
	var last *Channel
	for range MaxPeers {
		_, last = joinPair(t, other, hub)
	}
	a, b := connPair(t)
	third := newInbox(t, nil)
	dialled := make(chan error)
	go func() {
		_, err := third.Dial(testContext(t), a, nil)
		dialled <- err
	}()
	if _, err := hub.Accept(testContext(t), b, nil); !errors.Is(err, ErrRefused) {
		t.Error(err)
	}
	if err := <-dialled; !errors.Is(err, ErrRefused) {
		t.Errorf("the dialler was told %v", err)
	}
	last.Close()
	// The other side of the last one occupies its slot until it is polled.
	gone := false
	pollUntil(t, other, &recorder{gone: func(*Channel, error) { gone = true }}, "the end", func() bool { return gone })
	joinPair(t, other, hub)
}

func TestConfig(t *testing.T) {
	for _, n := range []int{-1, 1, MinRing - 1, MinRing + 1, MaxRing + RingUnit} {
		if in, err := NewInbox(&Config{RingBytes: n}); err == nil {
			in.Close()
			t.Errorf("a ring of %d bytes", n)
		}
	}
}

func TestInboxAllocs(t *testing.T) {
	a, b := newInbox(t, nil), newInbox(t, nil)
	ab, _ := joinPair(t, a, b)
	s := &recorder{}
	msg := make([]byte, 100)
	p, err := sys.NewPoller(nil, b.Event())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if n := testing.AllocsPerRun(1000, func() {
		if ab.Begin() {
			p, _ := ab.Reserve(recData, len(msg))
			copy(p, msg)
			ab.Commit()
			ab.End()
		}
		b.Poll(s, 16)
		b.Poll(s, 16)
		if b.Announce() {
			p.Wait(0)
			b.Awake()
		}
	}); n != 0 {
		t.Errorf("%v allocations a record", n)
	}
}

// A sink whose Full reports true gets the rest with the next polls, even if Full always does.
func TestSinkFull(t *testing.T) {
	a, b := newInbox(t, nil), newInbox(t, nil)
	ab, _ := joinPair(t, a, b)
	for i := range 5 {
		if err := ab.Send(byte(i), nil); err != nil {
			t.Fatal(err)
		}
	}
	var got []byte
	s := &recorder{record: func(_ *Channel, typ byte, _ []byte) { got = append(got, typ) }}
	s.full = func() bool { return len(got) == 2 || len(got) >= 4 }
	for _, want := range []int{2, 4, 5, 5} {
		if b.Poll(s, 100); len(got) != want {
			t.Fatalf("%d records, want %d", len(got), want)
		}
	}
	if string(got) != "\x00\x01\x02\x03\x04" {
		t.Errorf("%v", got)
	}
}
