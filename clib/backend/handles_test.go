package main

import (
	"math/rand/v2"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Adding, finding and removing at random, against a map; an old handle is never
// that of a new object, for as long as generations last.
func TestHandles(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	tab := table[int]{kind: 7}
	live := map[uint64]*int{}
	var handles, dead []uint64
	for range 20000 {
		switch k := rng.IntN(10); {
		case k < 6 || len(handles) == 0:
			o := new(int)
			h := tab.add(o)
			if h>>32 != 7 || live[h] != nil {
				t.Fatalf("handle %#x", h)
			}
			live[h] = o
			handles = append(handles, h)
		case k < 9:
			i := rng.IntN(len(handles))
			h := handles[i]
			handles = append(handles[:i], handles[i+1:]...)
			if !tab.remove(h) || tab.remove(h) {
				t.Fatalf("handle %#x cannot be removed, or twice", h)
			}
			delete(live, h)
			dead = append(dead, h)
		default:
			h := handles[rng.IntN(len(handles))]
			if tab.get(h) != live[h] || tab.get(h^1<<32) != nil || tab.get(h^1<<indexBits) != nil {
				t.Fatalf("handle %#x finds another", h)
			}
		}
	}
	for _, h := range dead[max(0, len(dead)-1000):] {
		if live[h] == nil && tab.get(h) != nil {
			t.Errorf("the old handle %#x finds something", h)
		}
	}
	for _, h := range []uint64{0, 1, 7 << 32, 1<<64 - 1} {
		if tab.get(h) != nil || tab.remove(h) {
			t.Errorf("handle %#x is one", h)
		}
	}
}

// Finding takes no lock, and sees an object whole or not at all.
func TestHandlesConcurrent(t *testing.T) {
	tab := table[[2]int]{kind: 1}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var last uint64
	stop := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				h := last
				mu.Unlock()
				if o := tab.get(h); o != nil && o[0] != o[1] {
					t.Errorf("half an object: %v", *o)
				}
			}
		})
	}
	for i := range 3000 {
		h := tab.add(&[2]int{i, i})
		mu.Lock()
		last = h
		mu.Unlock()
		if i%3 > 0 {
			tab.remove(h)
		}
	}
	close(stop)
	wg.Wait()
}

func TestHandlesAlloc(t *testing.T) {
	tab := table[int]{kind: 1}
	h := tab.add(new(int))
	if n := testing.AllocsPerRun(100, func() { tab.get(h) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
