package shm

// A model of requests that are executed exactly once, though the owner shuts grants without
// waiting for a peer that is inside, because it moves the memory.

import (
	"bytes"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// modelPages is how many places the memory moves between, modelBytes how long it is.
const (
	modelPages = 8
	modelBytes = 4096
)

// modelGrant is a grant and the page that it is for.
type modelGrant struct {
	p    *PeerGrant
	page []byte
}

// modelRequest is a request that comes by the ring.
type modelRequest struct {
	n     uint64 // its number among all requests of the peer, from 1
	write []byte // nil: a READ
	read  []byte
}

// grantModel is the owner, as the peer sees it. The pages are mapped, as shared memory is:
// copies are ordinary ones, which a processor may delay.
type grantModel struct {
	now  atomic.Pointer[modelGrant]
	ring chan *modelRequest
	done chan struct{}
}

// TestGrantModel: the owner moves its memory again and again, at any moment of the peer's copies,
// and scribbles over the page that it leaves. It executes requests that come by the ring: at
// that time it has counted exactly the requests before. The peer WRITEs and READs, by grants
// where it can, and reads what it has written last.
func TestGrantModel(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("VERBENA_SEED=%d repeats this", seed)
	requests := 20000
	if testing.Short() {
		requests = 5000
	}
	_, own, peer := grantPair(t)
	fd, b, err := newSegment("verbena-model", modelPages*modelBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { sys.Unmap(b); sys.CloseFD(fd) }()
	pages := make([][]byte, modelPages)
	for i := range pages {
		pages[i] = b[i*modelBytes:][:modelBytes]
	}
	m := &grantModel{ring: make(chan *modelRequest), done: make(chan struct{})}
	var total, byLane, repeated int
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		total, byLane, repeated = m.peer(t, rand.New(rand.NewPCG(seed, 1)), requests)
	}()
	moves := m.owner(t, rand.New(rand.NewPCG(seed, 2)), own, peer, pages, ended)
	t.Logf("%d of %d requests by grants, %d repeated, %d moves", byLane, total, repeated, moves.count)
	if moves.counted != uint64(total) && !t.Failed() {
		t.Errorf("%d were counted in all, of %d", moves.counted, total)
	}
	if repeated < enoughRepeated && !t.Failed() {
		t.Error("too few to show anything")
	}
}

// enoughRepeated is during how many requests the owner must have shut the grant.
const enoughRepeated = 20

// peer does requests one after the other, at least so many, and more until it had to repeat
// enoughRepeated of them. It returns how many it did, how many by grants, and how many it had
// to repeat.
func (m *grantModel) peer(t *testing.T, rng *rand.Rand, requests int) (n, byLane, repeated int) {
	last, buf := make([]byte, modelBytes), make([]byte, modelBytes)
	for (n < requests || repeated < enoughRepeated && n < 50*requests) && !t.Failed() {
		n++
		r := &modelRequest{n: uint64(n)}
		what := GrantReads
		if rng.IntN(2) == 0 {
			what = GrantWrites
			r.write = bytes.Repeat([]byte{byte(1 + rng.IntN(250))}, modelBytes)
			copy(last, r.write)
		} else {
			r.read = buf
		}
		cut := rng.IntN(modelBytes)
		if rng.IntN(4) > 0 {
			cut = modelBytes // copy all at once, without a pause in the middle
		}
		done := false
		if l := m.now.Load(); l != nil && l.p.Enter() {
			if what == GrantWrites {
				copy(l.page[:cut], r.write)
			} else {
				copy(buf[:cut], l.page)
			}
			if cut < modelBytes {
				runtime.Gosched()
				if what == GrantWrites {
					copy(l.page[cut:], r.write[cut:])
				} else {
					copy(buf[cut:], l.page[cut:])
				}
			}
			done = l.p.Count(what, 1, modelBytes)
			l.p.Leave()
			if done {
				byLane++
			} else {
				repeated++
			}
		}
		if !done {
			m.ring <- r
			<-m.done
		}
		if what == GrantReads && !bytes.Equal(buf, last) {
			t.Errorf("READ %d finds %d…%d, written was %d", n, buf[0], buf[modelBytes-1], last[0])
		}
	}
	return n, byLane, repeated
}

// modelMoves is how often the memory moved, and how many requests the owner has counted.
type modelMoves struct {
	count   int
	counted uint64
}

// owner opens and shuts grants, moves the memory and executes the requests that come by the
// ring, until the peer has ended.
func (m *grantModel) owner(t *testing.T, rng *rand.Rand, own, peer *Channel, pages [][]byte, ended <-chan struct{}) (moves modelMoves) {
	type given struct {
		*Grant
		page int
	}
	var granted []given // grants whose counts may still change
	var freed, byRing uint64
	counted := func() (n uint64) {
		kept := granted[:0]
		for _, l := range granted {
			over := l.Over() // must come before Counts: what is over counts no more
			c := l.Counts()
			if over && c[GrantWritten]+c[GrantRead] != modelBytes*(c[GrantWrites]+c[GrantReads]) {
				t.Errorf("counts %v", c)
			}
			n += c[GrantWrites] + c[GrantReads]
			if over {
				freed += c[GrantWrites] + c[GrantReads]
				n -= c[GrantWrites] + c[GrantReads]
				l.Free()
			} else {
				kept = append(kept, l)
			}
		}
		granted = kept
		return n + freed + byRing
	}
	page := 0
	serve := func(r *modelRequest) {
		if n := counted(); n != r.n-1 {
			t.Errorf("request %d comes by the ring, %d were counted before", r.n, n)
		}
		if r.write != nil {
			copy(pages[page], r.write)
		} else {
			copy(r.read, pages[page])
		}
		byRing++
		m.done <- struct{}{}
	}
	var open *Grant
	for {
		select {
		case r := <-m.ring:
			serve(r)
		case <-ended:
			moves.counted = counted()
			return moves
		default:
			switch k := rng.IntN(8); {
			case open == nil && k < 4:
				l, p := give(t, own, peer)
				open, granted = l, append(granted, given{l, page})
				m.now.Store(&modelGrant{p, pages[page]})
			case open != nil && k == 0: // shut, without Await
				open.Shut()
				open = nil
				counted() // which frees grants that are over
				old := page
				for page = (page + 1) % len(pages); slices.ContainsFunc(granted, func(g given) bool { return g.page == page }); {
					page = (page + 1) % len(pages) // the peer may still be inside a grant for that page
				}
				copy(pages[page], pages[old])
				for i := range pages[old] {
					pages[old][i] = 0xff
				}
				moves.count++
			default:
				runtime.Gosched()
			}
		}
	}
}
