package device

// Results of requests as inline data, in a completion queue that several queue pairs share and
// several goroutines poll, while fenced requests use them and their pages come and go.

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

const (
	relayConns  = 4
	relaySlots  = 8   // of a relay: rounds under way
	relaySlot   = 256 // bytes of a slot, here and in the peer's memory
	relayRounds = 64  // of a relay at a time, then what has arrived is compared
	relayLog    = relayRounds * relaySlot
	relayMemory = relayLog + relaySlot // of a relay: its copies and its word, or its slots
)

// relay is a queue pair that copies from one part of its peer's memory to another: a
// READ or an atomic, and a fenced request that sends the result on, posted at once.
type relay struct {
	*end
	at    int // where its memory begins, on both sides
	rng   *rand.Rand
	added uint64
	left  [relayRounds]atomic.Int32 // completions of a round that are still to be looked at
	check [relayRounds][]byte       // what the result must be
}

// round posts the two requests of a round.
func (r *relay) round(t testing.TB, b *end, i int, source []byte) {
	n := 1 + r.rng.IntN(64)
	if r.rng.IntN(4) == 0 {
		n = 1 + r.rng.IntN(relaySlot)
	}
	slot, off := r.at+i%relaySlots*relaySlot, r.rng.IntN(len(source)-n)
	get := ib.SendWR{ID: uint64(i), Op: ib.OpRDMARead, SGL: r.sge(slot, n), RemoteAddr: b.mr.Addr() + uint64(len(b.buf)-len(source)+off), RKey: b.mr.RKey()}
	r.check[i] = source[off : off+n]
	if r.rng.IntN(3) == 0 {
		n = 8
		add := uint64(r.rng.IntN(1000))
		get.Op, get.SGL, get.CompareAdd = ib.OpAtomicFetchAdd, r.sge(slot, 8), add
		get.RemoteAddr = b.mr.Addr() + uint64(r.at+relayLog)
		r.check[i] = binary.NativeEndian.AppendUint64(nil, r.added)
		r.added += add
	}
	r.left[i].Store(1)
	if r.rng.IntN(5) > 0 {
		get.Flags = ib.SendSignaled
		r.left[i].Store(2)
	}
	to := i * relaySlot
	put := ib.SendWR{ID: uint64(i) + relayRounds, Op: ib.OpRDMAWrite, Flags: ib.SendSignaled | ib.SendFence, SGL: r.sge(slot, n),
		RemoteAddr: b.mr.Addr() + uint64(r.at+to), RKey: b.mr.RKey()}
	if _, err := r.qp.PostSend([]ib.SendWR{get, put}); err != nil {
		t.Error(err)
	}
}

// take looks at a completion.
func (r *relay) take(t testing.TB, wc *ib.WC) {
	if wc.Status != ib.WCSuccess {
		t.Errorf("%+v: %v", *wc, wc.Err())
		return
	}
	// That of the WRITE comes behind that of the result: either way it must be there.
	i := wc.ID % relayRounds
	if got := r.buf[r.at+int(i)%relaySlots*relaySlot:][:len(r.check[i])]; !bytes.Equal(got, r.check[i]) {
		t.Errorf("round %d: a completion whose result is not there: %x, want %x", i, got, r.check[i])
	}
	r.left[i].Add(-1)
}

// drive goes through all rounds once; a slot is used again when what was in it is sent.
func (r *relay) drive(t testing.TB, b *end, source []byte) {
	deadline := time.Now().Add(time.Minute)
	wait := func(i int) {
		for r.left[i].Load() != 0 && !t.Failed() {
			if time.Now().After(deadline) {
				t.Errorf("round %d never ends", i)
			}
			runtime.Gosched()
		}
	}
	for i := range relayRounds {
		if i >= relaySlots {
			wait(i - relaySlots)
		}
		r.round(t, b, i, source)
	}
	for i := range relaySlots {
		wait(relayRounds - relaySlots + i)
	}
}

// A READ or an atomic, whose result waits for a poll or not, and a fenced WRITE of it,
// which does not wait: the peer gets what it is to get, and a completion is never
// there before its result. Several queue pairs and several pollers share a completion
// queue; pages of the results are there, or go whenever they are used.
func TestInlineReceiveTorture(t *testing.T) {
	for _, mode := range allLinks {
		for _, absent := range []bool{false, true} {
			t.Run(mode+map[bool]string{true: "/absent"}[absent], func(t *testing.T) {
				seed := testSeed(t)
				until := time.Now().Add(lasting(100*time.Millisecond, 6*time.Second))
				inlineTorture(t, openFor(t, mode), openFor(t, mode), seed, absent, until)
			})
		}
	}
}

func inlineTorture(t *testing.T, x, y *Device, seed uint64, absent bool, until time.Time) {
	rng := rand.New(rand.NewPCG(seed, 1))
	source := make([]byte, 4096)
	for i := range source {
		source[i] = byte(rng.Uint32())
	}
	first := newEnd(t, x, ib.RC, relayConns*relayMemory)
	b := newEnd(t, y, ib.RC, relayConns*relayMemory+len(source))
	t.Cleanup(b.close)
	copy(b.buf[relayConns*relayMemory:], source)
	if absent {
		p := first.lazily()
		p.rng = rng
		p.evict = func() bool { return rng.IntN(3) == 0 }
	}
	t.Cleanup(first.close)
	byQPN := map[uint32]*relay{}
	var relays []*relay
	for i := range relayConns {
		e, peer := *first, *b
		e.rd, peer.rd = 8, 8
		create := func(e *end) {
			e.qp = must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq, Cap: first.qp.(*QP).core.Query().Cap}))
			t.Cleanup(func() { closeAll(t, e.qp) })
		}
		create(&e)
		create(&peer)
		e.connect(&peer)
		peer.connect(&e)
		r := &relay{end: &e, at: i * relayMemory, rng: rand.New(rand.NewPCG(seed, uint64(i)+2))}
		relays = append(relays, r)
		byQPN[e.qp.Number()] = r
	}
	var stop atomic.Bool
	var pollers sync.WaitGroup
	for i := range 3 {
		pollers.Go(func() {
			wcs := make([]ib.WC, 1+3*i)
			for !stop.Load() {
				n, err := first.cq.Poll(wcs)
				if err != nil {
					t.Error(err)
				}
				for k := range n {
					byQPN[wcs[k].QPN].take(t, &wcs[k])
				}
				if n == 0 {
					runtime.Gosched()
				}
			}
		})
	}
	defer pollers.Wait()
	defer stop.Store(true)
	rounds := 0
	for ; rounds == 0 || time.Now().Before(until) && !t.Failed(); rounds++ {
		var wg sync.WaitGroup
		for _, r := range relays {
			wg.Go(func() { r.drive(t, b, source) })
		}
		wg.Wait()
		for i, r := range relays {
			got := b.buf[r.at:][:relayLog]
			for k := range relayRounds {
				if n := len(r.check[k]); !bytes.Equal(got[k*relaySlot:][:n], r.check[k]) {
					t.Fatalf("relay %d, round %d: the peer got %x, want %x", i, k, got[k*relaySlot:][:n], r.check[k])
				}
			}
			if got := wordOf(b.buf[r.at+relayLog:]); got != r.added {
				t.Fatalf("relay %d: the word counts %d, want %d", i, got, r.added)
			}
		}
	}
	if countsOf(x)["inline_receives"] == 0 {
		t.Error("no result has waited")
	}
	t.Logf("%d times %d rounds, %d results waited", rounds, relayConns*relayRounds, countsOf(x)["inline_receives"])
}
