package tools

import (
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// The atomics of perftest add 1, or compare with 0 and swap in 0, each on the next word of an
// area, round after round. Compare-and-swap of the programs thus never changes anything. This
// side's does from the second round on, when it knows the value of the word.

// atomic makes request n of a queue pair.
func (b *bench) atomic(f *flow, n uint64, wr *verbs.SendWR) {
	if !b.cfg.CAS {
		wr.Op, wr.CompareAdd = verbs.OpAtomicFetchAdd, 1
		return
	}
	wr.Op = verbs.OpAtomicCmpSwap
	if s := n % uint64(b.slots); f.known[s] {
		wr.CompareAdd, wr.Swap = f.there[s], swapped(f.index, n)
	}
}

// swapped returns the value that this side's compare-and-swap n stores.
func swapped(qp int, n uint64) uint64 { return 0x5a<<56 | uint64(qp)<<40 | n }

// returnedWord checks what request n found in the peer's memory.
func (b *bench) returnedWord(f *flow, n uint64, data []byte) error {
	got, s := loadWord(data), int(n%uint64(b.slots))
	v := right
	if !f.known[s] {
		v = b.expect.compare(data, b.target(f.index)+b.place(n))
	} else if got != f.there[s] {
		return fmt.Errorf("atomic %d found %#x, not %#x", n, got, f.there[s])
	}
	switch {
	case !b.cfg.CAS:
		f.there[s] = got + 1
	case f.known[s]:
		f.there[s] = swapped(f.index, n)
	default:
		f.there[s] = got
	}
	f.known[s] = true
	return b.count(v, "the word that atomic %d found", n)
}

// verifyWord checks a word that the peer's atomics worked on.
func (b *bench) verifyWord(f *flow, s int) error {
	got := loadWord(b.main[b.target(f.index)+s*b.stride:])
	times := (b.cfg.Iters - s + b.slots - 1) / b.slots
	want := f.here[s]
	if !b.cfg.CAS {
		want += uint64(times)
	} else if last := s + (times-1)*b.slots; times > 1 && got == swapped(f.index, uint64(last)) {
		want = got // the peer is this package too
	}
	if got != want {
		return fmt.Errorf("word %d of queue pair %d is %#x, not %#x: it was %#x before %d atomics",
			s, f.index, got, want, f.here[s], times)
	}
	b.result.Verified++
	return nil
}
