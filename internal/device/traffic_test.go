package device

// Random traffic that checks itself. A plan lists what one side of a connection
// does, operation by operation, and is made before anything starts, so that the
// other side can check what arrives:
//
//  1. newPlan draws operations of every kind and size;
//  2. side.post prepares an operation's memory on both sides and posts it;
//  3. side.sent and side.received check each completion: that it is the next
//     one that is due, that its fields are right, that all bytes are there
//     and none behind them;
//  4. side.finish checks that nothing else ever completes, and the counters
//     that atomics counted in.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// action is one operation of a plan.
type action struct {
	op         ib.Opcode
	size       int
	at         int    // where in noise its bytes are
	splits     [3]int // where the local list is split into pieces
	inline     bool
	unsignaled bool
	fenced     bool // a WRITE of what the READ before it brought
	imm        uint32
	add        uint64 // atomics
	equal      bool   // compare-and-swap: compares with the value that is there
	key        int    // SEND with invalidate: which of the peer's spare regions
}

// receives reports whether the peer gets a completion.
func (a *action) receives() bool {
	switch a.op {
	case ib.OpSend, ib.OpSendImm, ib.OpSendInv, ib.OpRDMAWriteImm:
		return true
	}
	return false
}

// noise is what all memory is filled from: an operation's bytes are a piece of it.
var noise = func() []byte {
	b := make([]byte, 3<<20)
	r := rand.New(rand.NewPCG(7, 7))
	for i := 0; i < len(b); i += 8 {
		binary.NativeEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}()

const (
	slots     = 4 // requests that a side has outstanding, and receives posted
	canary    = 64
	spareKeys = 3
	maxInl    = 128
)

// sizesFor are the sizes at which packets begin and end, for an MTU, up to max.
func sizesFor(mtu, max int) []int {
	var s []int
	for _, n := range []int{0, 1, mtu - 1, mtu, mtu + 1, 64 << 10, 1 << 20} {
		if n <= max {
			s = append(s, n)
		}
	}
	return s
}

// newPlan draws n operations. Every kind of operation comes once with every
// size, as far as n goes, in random order.
func newPlan(rng *rand.Rand, n int, sizes []int) []action {
	var all []action
	for len(all) < n {
		var round []action
		for _, op := range []ib.Opcode{ib.OpSend, ib.OpSendImm, ib.OpRDMAWrite, ib.OpRDMAWriteImm, ib.OpRDMARead} {
			for _, size := range sizes {
				round = append(round, action{op: op, size: size})
			}
		}
		for range len(sizes) {
			round = append(round, action{op: ib.OpAtomicFetchAdd, size: 8}, action{op: ib.OpAtomicCmpSwap, size: 8})
		}
		rng.Shuffle(len(round), func(i, j int) { round[i], round[j] = round[j], round[i] })
		all = append(all, round...)
	}
	all = all[:n]
	for k := range spareKeys {
		all[rng.IntN(n)] = action{op: ib.OpSendInv, size: sizes[rng.IntN(len(sizes))], key: k}
	}
	seen := 0 // the keys in the order in which they come
	for i := range all {
		a := &all[i]
		if a.op == ib.OpSendInv {
			a.key = seen
			seen++
		}
		a.at = rng.IntN(len(noise) - a.size - canary)
		for c := range a.splits {
			a.splits[c] = rng.IntN(a.size + 1)
		}
		a.imm, a.add = rng.Uint32(), uint64(1+rng.IntN(1000))
		a.equal = rng.IntN(2) == 0
		a.inline = a.size <= maxInl && rng.IntN(3) == 0 &&
			a.op != ib.OpRDMARead && a.op != ib.OpAtomicFetchAdd && a.op != ib.OpAtomicCmpSwap
		a.unsignaled = rng.IntN(4) == 0 && i%slots != slots-1 && i != n-1
		if i > 0 && a.op == ib.OpRDMAWrite && all[i-1].op == ib.OpRDMARead && !all[i-1].unsignaled {
			all[i-1].size, a.size, a.at = min(a.size, all[i-1].size), min(a.size, all[i-1].size), all[i-1].at
			a.fenced, a.inline, a.unsignaled = true, false, false
			for c := range a.splits {
				a.splits[c] = min(a.splits[c], a.size)
				all[i-1].splits[c] = min(all[i-1].splits[c], a.size)
			}
		}
	}
	return all
}

// side is one side of a connection with traffic: it initiates its own plan and
// is the target of its peer's.
type side struct {
	*end
	name string
	peer *side
	plan []action

	slotSize int
	spare    []provider.MR

	posted, done int          // of its own plan
	arrived      atomic.Int64 // of its peer's plan: those that receive
	recvs        int          // receives posted
	due          []int        // of its peer's plan: those that receive, in order
	sum, word    uint64       // what the peer's two words must be by now
	rng          *rand.Rand
}

// Areas of a side's buffer, in slots: its own requests' memory, the target of
// the peer's WRITEs, receives, the source of the peer's READs, words.
func (s *side) local(i int) int   { return (i % slots) * s.slotSize }
func (s *side) target(i int) int  { return (slots + i%slots) * s.slotSize }
func (s *side) receive(i int) int { return (2*slots + i%slots) * s.slotSize }
func (s *side) words() int        { return 3 * slots * s.slotSize }

func sideBytes(maxSize int) (slotSize, total int) {
	slotSize = (maxSize + canary + 7) &^ 7
	return slotSize, 3*slots*slotSize + 64
}

// newSides connects two ends for traffic in both directions, of n operations
// each.
func newSides(t testing.TB, name string, x, y *Device, rng *rand.Rand, n int, mtu ib.MTU, maxSize int, tune func(e *end)) [2]*side {
	t.Helper()
	slotSize, total := sideBytes(maxSize)
	a, b := connected(t, x, y, ib.RC, total, func(e *end) {
		e.mtu, e.psn = mtu, rng.Uint32()&(1<<24-1)
		if tune != nil {
			tune(e)
		}
	})
	var s [2]*side
	for i, e := range []*end{a, b} {
		s[i] = &side{end: e, name: fmt.Sprint(name, "ab"[i:i+1]), slotSize: slotSize,
			plan: newPlan(rng, n, sizesFor(mtu.Bytes(), maxSize)), rng: rand.New(rand.NewPCG(rng.Uint64(), 0))}
	}
	s[0].peer, s[1].peer = s[1], s[0]
	for _, s := range s {
		for i := range s.peer.plan {
			if s.peer.plan[i].receives() {
				s.due = append(s.due, i)
			}
		}
		for range spareKeys {
			mr := must[provider.MR](t)(s.pd.RegMR(make([]byte, 8), allRemote|ib.AccessRemoteInvalidate))
			s.spare = append(s.spare, mr)
			t.Cleanup(func() { closeAll(t, mr) })
		}
	}
	return s
}

// run carries the plan out and returns when it, and the peer's, are done.
func (s *side) run(ctx context.Context) error {
	for s.recvs < slots && s.recvs < len(s.due) {
		if err := s.repost(); err != nil {
			return s.wrap(err)
		}
	}
	for s.done < len(s.plan) || int(s.arrived.Load()) < len(s.due) {
		posted, taken, err := s.step()
		if err == nil && posted+taken == 0 {
			err = s.idle(ctx)
		}
		if err != nil {
			return s.wrap(err)
		}
	}
	return nil
}

func (s *side) wrap(err error) error {
	return fmt.Errorf("%s: posted %d, done %d of %d, arrived %d of %d: %w",
		s.name, s.posted, s.done, len(s.plan), s.arrived.Load(), len(s.due), err)
}

// step posts what can be posted and takes completions.
func (s *side) step() (posted, taken int, err error) {
	for s.posted < len(s.plan) && s.free(s.posted) {
		if err := s.post(); err != nil {
			return posted, 0, err
		}
		posted++
	}
	var wcs [3]ib.WC
	taken, err = s.cq.Poll(wcs[:1+s.rng.IntN(len(wcs))])
	for i := range taken {
		if err := s.take(&wcs[i]); err != nil {
			return posted, taken, err
		}
	}
	return posted, taken, err
}

// free reports whether the slot of operation i is free: the one before in it is
// done, and the peer has looked at what it brought; nor does a fenced WRITE
// still read it.
func (s *side) free(i int) bool {
	j := i - slots
	switch {
	case j < 0:
		return true
	case s.done <= j || s.plan[j+1].fenced && s.done <= j+1:
		return false
	}
	k, receives := slices.BinarySearch(s.peer.due, j)
	return !receives || int(s.peer.arrived.Load()) > k
}

// idle waits for more: a little while, or for the event of the queue.
func (s *side) idle(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.channel == nil {
		s.pause()
		return nil
	}
	if err := s.cq.RequestNotify(false); err != nil {
		return err
	}
	if posted, taken, err := s.step(); posted+taken > 0 || err != nil {
		return err
	}
	// Not for ever: that the peer has made a slot free raises no event.
	short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	cq, err := s.channel.Next(short)
	if err != nil {
		_, taken, err := s.step()
		if err != nil || taken == 0 {
			return err
		}
		if cq, err = s.channel.Next(short); err != nil {
			return errors.New("a completion came without its event")
		}
	}
	if cq != s.cq {
		return errors.New("an event of a strange queue")
	}
	cq.Ack(1)
	return nil
}

// take checks a completion of either queue.
func (s *side) take(wc *ib.WC) error {
	if err := wc.Err(); err != nil {
		return fmt.Errorf("%w (vendor %#x)", err, wc.VendorErr)
	}
	if wc.QPN != s.qp.Number() {
		return fmt.Errorf("completion of queue pair %#x in the queue of %#x", wc.QPN, s.qp.Number())
	}
	if wc.ID >= recvID {
		return s.received(wc)
	}
	return s.sent(wc)
}

const recvID = 1 << 32 // and up: receives

// pieces makes a list of up to four pieces of a range.
func (s *side) pieces(off int, a *action) []ib.SGE {
	splits := a.splits
	for i := range splits { // in order
		for j := range i {
			if splits[j] > splits[i] {
				splits[i], splits[j] = splits[j], splits[i]
			}
		}
	}
	var l []ib.SGE
	from := 0
	for _, to := range append(splits[:], a.size) {
		l = append(l, s.sge(off+from, to-from)...)
		from = to
	}
	return l
}

// post posts the next operation of the plan.
func (s *side) post() error {
	i := s.posted
	a, p := &s.plan[i], s.peer
	local, target := s.buf[s.local(i):][:s.slotSize], p.buf[p.target(i):][:s.slotSize]
	source := i
	if a.fenced {
		source = i - 1
	}
	wr := ib.SendWR{ID: uint64(i), Op: a.op, Imm: a.imm, SGL: s.pieces(s.local(source), a), RKey: p.mr.RKey()}
	if !a.unsignaled {
		wr.Flags |= ib.SendSignaled
	}
	if a.fenced {
		wr.Flags |= ib.SendFence
	}
	switch a.op {
	case ib.OpSend, ib.OpSendImm, ib.OpSendInv, ib.OpRDMAWrite, ib.OpRDMAWriteImm:
		if !a.fenced {
			copy(local, noise[a.at:][:a.size])
		}
		if a.inline {
			wr.Inline, wr.SGL = local[:a.size:a.size], nil
		}
		if a.op == ib.OpSendInv {
			wr.InvalidateKey = p.spare[a.key].RKey()
		}
		stamp(target[a.size:])
		wr.RemoteAddr = p.mr.Addr() + uint64(p.target(i))
	case ib.OpRDMARead:
		stamp(local[a.size:])
		// The source is the target area of the peer, where this slot is free.
		copy(target, noise[a.at:][:a.size])
		wr.RemoteAddr = p.mr.Addr() + uint64(p.target(i))
	case ib.OpAtomicFetchAdd:
		wr.RemoteAddr, wr.CompareAdd = p.mr.Addr()+uint64(p.words()), a.add
	case ib.OpAtomicCmpSwap:
		wr.RemoteAddr, wr.Swap = p.mr.Addr()+uint64(p.words())+8, a.add|1<<40
		wr.CompareAdd = s.expectWord(i)
		if !a.equal {
			wr.CompareAdd++
		}
	}
	if a.op == ib.OpAtomicFetchAdd || a.op == ib.OpAtomicCmpSwap {
		wr.SGL = s.sge(s.local(i), 8)
		stamp(local[8:])
	}
	s.posted++
	_, err := s.qp.PostSend([]ib.SendWR{wr})
	return err
}

// expectWord is what the compare-and-swap word is when operation i comes to it.
func (s *side) expectWord(i int) uint64 {
	w := s.word
	for _, a := range s.plan[s.done:i] {
		if a.op == ib.OpAtomicCmpSwap && a.equal {
			w = a.add | 1<<40
		}
	}
	return w
}

func stamp(b []byte) {
	for i := range min(canary, len(b)) {
		b[i] = 0xee
	}
}

func stamped(b []byte) bool {
	for i := range min(canary, len(b)) {
		if b[i] != 0xee {
			return false
		}
	}
	return true
}

// sent checks the completion of a request, and with it those before it that
// were not signaled.
func (s *side) sent(wc *ib.WC) error {
	for s.done < s.posted {
		i := s.done
		a := &s.plan[i]
		if a.unsignaled == (wc.ID == uint64(i)) {
			return fmt.Errorf("completion of request %d, when %d is due", wc.ID, i)
		}
		if err := s.check(i, a, wc); err != nil {
			return fmt.Errorf("request %d, %v of %d bytes: %w", i, a.op, a.size, err)
		}
		s.done++
		if !a.unsignaled {
			return nil
		}
	}
	return fmt.Errorf("completion of request %d, when none is due", wc.ID)
}

var wcOps = map[ib.Opcode]ib.WCOpcode{ib.OpSend: ib.WCSend, ib.OpSendImm: ib.WCSend, ib.OpSendInv: ib.WCSend,
	ib.OpRDMAWrite: ib.WCRDMAWrite, ib.OpRDMAWriteImm: ib.WCRDMAWrite, ib.OpRDMARead: ib.WCRDMARead,
	ib.OpAtomicCmpSwap: ib.WCCompSwap, ib.OpAtomicFetchAdd: ib.WCFetchAdd}

// check checks what an operation has done to memory.
func (s *side) check(i int, a *action, wc *ib.WC) error {
	if !a.unsignaled && wc.Op != wcOps[a.op] {
		return fmt.Errorf("completed as %v", wc.Op)
	}
	p := s.peer
	want := noise[a.at:][:a.size]
	got := s.buf[s.local(i):][:s.slotSize]
	switch a.op {
	case ib.OpRDMAWrite, ib.OpRDMAWriteImm:
		got = p.buf[p.target(i):][:s.slotSize]
	case ib.OpRDMARead:
		if !a.unsignaled && int(wc.ByteLen) != a.size {
			return fmt.Errorf("%d bytes read", wc.ByteLen)
		}
	case ib.OpAtomicFetchAdd, ib.OpAtomicCmpSwap:
		return s.checkAtomic(a, got)
	default:
		return nil // its bytes are the receiver's business
	}
	if k := firstDifference(got[:a.size], want); k >= 0 {
		return fmt.Errorf("wrong from byte %d on", k)
	}
	if !stamped(got[a.size:]) {
		return errors.New("bytes behind the end have changed")
	}
	return nil
}

func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// checkAtomic checks the value that an atomic returned: it proves that each atomic before it
// was done exactly once.
func (s *side) checkAtomic(a *action, got []byte) error {
	orig := binary.NativeEndian.Uint64(got)
	if !stamped(got[8:]) {
		return errors.New("bytes behind the result have changed")
	}
	switch {
	case a.op == ib.OpAtomicCmpSwap:
		if orig != s.word {
			return fmt.Errorf("found %#x, want %#x", orig, s.word)
		}
		if a.equal {
			s.word = a.add | 1<<40
		}
	default:
		if orig != s.sum {
			return fmt.Errorf("found %d, want %d", orig, s.sum)
		}
		s.sum += a.add
	}
	return nil
}

// repost posts the next receive.
func (s *side) repost() error {
	_, err := s.qp.PostRecv([]ib.RecvWR{{ID: recvID + uint64(s.recvs), SGL: s.sge(s.receive(s.recvs), s.slotSize)}})
	s.recvs++
	return err
}

// received checks the completion of a receive.
func (s *side) received(wc *ib.WC) error {
	k := int(s.arrived.Load())
	if k == len(s.due) {
		return fmt.Errorf("receive %d: nothing was to come", wc.ID-recvID)
	}
	a := &s.peer.plan[s.due[k]]
	if wc.ID != recvID+uint64(k) {
		return fmt.Errorf("receive %d completed, when %d is due", wc.ID-recvID, k)
	}
	want := ib.WC{ID: wc.ID, Op: ib.WCRecv, ByteLen: uint32(a.size), QPN: s.qp.Number()}
	got := s.buf[s.receive(k):][:a.size]
	switch a.op {
	case ib.OpSendImm:
		want.Imm, want.Flags = a.imm, ib.WCWithImm
	case ib.OpSendInv:
		want.InvalidatedKey, want.Flags = s.spare[a.key].RKey(), ib.WCWithInv
	case ib.OpRDMAWriteImm:
		want.Op, want.Imm, want.Flags = ib.WCRecvRDMAWithImm, a.imm, ib.WCWithImm
		got = s.buf[s.target(s.due[k]):][:a.size]
	}
	if *wc != want {
		return fmt.Errorf("receive %d: %+v, want %+v", k, *wc, want)
	}
	if d := firstDifference(got, noise[a.at:][:a.size]); d >= 0 {
		return fmt.Errorf("receive %d, %v of %d bytes: wrong from byte %d on", k, a.op, a.size, d)
	}
	s.arrived.Add(1)
	if s.recvs < len(s.due) {
		return s.repost()
	}
	return nil
}

// finish checks what is left when all is done: no completion, and the words.
func (s *side) finish(t testing.TB) {
	t.Helper()
	var wc [1]ib.WC
	if n, err := s.cq.Poll(wc[:]); n != 0 || err != nil {
		t.Errorf("%s: one more completion, %+v, %v", s.name, wc, err)
	}
	p := s.peer
	words := p.buf[p.words():]
	if got := binary.NativeEndian.Uint64(words); got != s.sum {
		t.Errorf("%s: fetch-and-adds have made %d of the peer's word, want %d", s.name, got, s.sum)
	}
	if got := binary.NativeEndian.Uint64(words[8:]); got != s.word {
		t.Errorf("%s: compare-and-swaps have made %#x of the peer's word, want %#x", s.name, got, s.word)
	}
}

// exchange runs traffic on all connections at once.
func exchange(t testing.TB, sides []*side, longest time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	results := make(chan error)
	for _, s := range sides {
		go func() { results <- s.run(ctx) }()
	}
	for range sides {
		if err := <-results; err != nil {
			t.Error(err)
			stop(err)
		}
	}
}
