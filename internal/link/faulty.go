package link

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// A network in memory that loses, duplicates, corrupts and delays packets, for tests.
// They are real packets: the code that the UDP link uses packetizes, checksums, checks
// and reassembles them.
//
//  1. Send makes packets, and the fabric decides what happens to each.
//  2. A packet waits at its destination, in order of its time of arrival.
//  3. Poll takes the packets whose time has come.
//
// The fabric makes no system calls and starts no goroutines, takes the time from package
// time and waits only on channels, so it works in a testing/synctest bubble. Driven by
// one goroutine, it repeats itself for the same seed.

// FaultyConfig says what a fabric does to packets. The zero value delivers all of them
// unchanged and at once.
type FaultyConfig struct {
	Seed uint64

	// Probabilities, of each packet by itself.
	Drop      float64
	Duplicate float64
	Corrupt   float64 // one bit is changed, of those that the ICRC covers
	Reorder   float64 // the packet comes ReorderDelay later than it would

	// Every packet takes between MinDelay and MaxDelay, evenly distributed; if
	// both are 0 it is there at once. Different delays reorder packets too.
	MinDelay, MaxDelay time.Duration
	// ReorderDelay is how much later a reordered packet arrives; 0 means 50 µs.
	ReorderDelay time.Duration

	// Filter, if not nil, is called for every packet, and its verdict overrides the
	// probabilities. It may change the packet's bytes. It must not call the link.
	Filter func(h Hop, pkt []byte) Verdict

	MTU    int // 0 means 4096
	Window int // packets under way to a queue pair; 0 means 128
	// Buffer is how many packets one end holds unread; more are lost. 0 means 4096.
	Buffer int
}

// Hop is where a packet comes from and goes to.
type Hop struct{ From, To netip.Addr }

// Verdict is what a Filter wants done with a packet.
type Verdict uint8

const (
	Chance    Verdict = iota // the probabilities decide
	Deliver                  // deliver it once, unchanged
	Discard                  // lose it
	Duplicate                // deliver it twice
	Delay                    // deliver it ReorderDelay later
)

// FaultyStats count what a fabric did.
type FaultyStats struct {
	Packets    uint64 // that were sent
	Dropped    uint64
	Duplicated uint64
	Corrupted  uint64
	Reordered  uint64
	Discarded  uint64 // by the filter
	Unreached  uint64 // no end had the address
	Overflowed uint64 // the destination's buffer was full
}

// Fabric is a network that any number of ends attach to.
type Fabric struct {
	cfg FaultyConfig

	mu    sync.Mutex // guards everything below, and the ends' queues
	rng   *rand.Rand
	ends  []*Faulty
	seq   uint64
	stats FaultyStats
}

// NewFabric makes a network.
func NewFabric(cfg FaultyConfig) *Fabric {
	if cfg.ReorderDelay <= 0 {
		cfg.ReorderDelay = 50 * time.Microsecond
	}
	if cfg.MTU <= 0 {
		cfg.MTU = wire.MaxPayload
	}
	if cfg.Window <= 0 {
		cfg.Window = 128
	}
	if cfg.Buffer <= 0 {
		cfg.Buffer = 4096
	}
	return &Fabric{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x76657262656e61))}
}

// Attach adds an end with one or more addresses. Of two ends with the same
// address the first gets the packets.
func (f *Fabric) Attach(addrs ...netip.Addr) *Faulty {
	e := &Faulty{
		fabric: f,
		news:   make(chan struct{}, 1),
		wake:   make(chan struct{}, 1),
		done:   make(chan struct{}),
	}
	for _, a := range addrs {
		e.addrs = append(e.addrs, a.Unmap())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ends = append(f.ends, e)
	return e
}

// Stats returns what the fabric has done so far.
func (f *Fabric) Stats() FaultyStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stats
}

// flightPacket is a packet under way.
type flightPacket struct {
	due      time.Time
	seq      uint64 // the order among those due at the same time
	from     netip.AddrPort
	to       netip.Addr
	tclass   uint8
	hopLimit uint8
	b        []byte
}

// Faulty is one end of a Fabric: a Link.
type Faulty struct {
	fabric *Fabric
	addrs  []netip.Addr

	queue  []flightPacket // by due and seq; guarded by Fabric.mu
	closed bool           // guarded by Fabric.mu

	news chan struct{} // a packet was put into the queue
	wake chan struct{} // Wake was called
	done chan struct{} // closed by Close

	polling     sync.Mutex // guards what Poll uses
	reassembler reassembler
	taken       []flightPacket
}

var _, _ Link = (*Faulty)(nil), (*UDP)(nil)

// faultyFlow is a flow prepared for this link.
type faultyFlow struct {
	src      netip.AddrPort
	dst      netip.Addr
	tclass   uint8
	hopLimit uint8
	pseudo   wire.Pseudo
}

// Prepare prepares a flow from one of the end's addresses to anywhere.
func (e *Faulty) Prepare(f *train.Flow) error {
	src, dst := f.Src.Unmap(), f.Dst.Unmap()
	if err := checkAddr(dst); err != nil {
		return ib.Errorf("prepare_flow", syscall.EINVAL, "peer address: %v", err)
	}
	if !slices.Contains(e.addrs, src) {
		return ib.Errorf("prepare_flow", syscall.EADDRNOTAVAIL, "%v is not an address of this device", src)
	}
	if src.Is4() != dst.Is4() {
		return ib.Errorf("prepare_flow", syscall.EINVAL, "from %v to %v: not the same address family", src, dst)
	}
	if f.SrcPort < firstSrcPort {
		f.SrcPort = firstSrcPort + uint16(flowHash(dst, f.SrcPort, f.Label)%(lastSrcPort-firstSrcPort+1))
	}
	hop := f.HopLimit
	if hop == 0 {
		hop = sys.DefaultHopLimit
	}
	f.Link = &faultyFlow{
		src: netip.AddrPortFrom(src, f.SrcPort), dst: dst, tclass: f.TClass, hopLimit: hop,
		pseudo: wire.NewPseudo(src, dst, f.SrcPort, wire.RoCEPort),
	}
	return nil
}

// Send sends trains in order.
func (e *Faulty) Send(ts []*train.Train) (int, error) {
	f := e.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.closed {
		return 0, ErrClosed
	}
	var c packetizer
	for k, t := range ts {
		if t.Flow == nil {
			return k, ErrTrain
		}
		way, ok := t.Flow.Link.(*faultyFlow)
		if !ok {
			return k, ErrTrain
		}
		if err := c.start(t); err != nil {
			return k, err
		}
		for i := range t.N {
			b, err := c.whole(make([]byte, 0, wire.MaxPacket), i, &way.pseudo)
			if err != nil {
				return k, err
			}
			f.sendLocked(way, b)
		}
	}
	return len(ts), nil
}

// sendLocked decides what happens to a packet, and delivers it or not.
func (f *Fabric) sendLocked(way *faultyFlow, b []byte) {
	f.stats.Packets++
	verdict := Chance
	if f.cfg.Filter != nil {
		verdict = f.cfg.Filter(Hop{From: way.src.Addr(), To: way.dst}, b)
	}
	// All numbers are drawn for every packet, so that a filter's verdict on one
	// packet does not change what happens to later ones.
	drop := f.chance(f.cfg.Drop)
	twice := f.chance(f.cfg.Duplicate)
	corrupt := f.chance(f.cfg.Corrupt)
	late := f.chance(f.cfg.Reorder)
	bit := f.rng.IntN(8 * len(b))
	delays := [2]time.Duration{f.delayLocked(), f.delayLocked()}

	switch verdict {
	case Chance:
	case Discard:
		f.stats.Discarded++
		return
	default:
		drop, corrupt = false, false
		twice, late = verdict == Duplicate, verdict == Delay
	}
	if drop {
		f.stats.Dropped++
		return
	}
	if corrupt {
		const unprotected = 4 // the BTH's byte for congestion marks (IBA 7.8.1)
		if bit/8 == unprotected {
			bit += 8
		}
		b[bit/8] ^= 1 << (bit % 8)
		f.stats.Corrupted++
	}
	if late {
		delays[0] += f.cfg.ReorderDelay
		f.stats.Reordered++
	}
	f.deliverLocked(way, b, delays[0])
	if twice {
		f.stats.Duplicated++
		f.deliverLocked(way, slices.Clone(b), delays[1])
	}
}

func (f *Fabric) chance(p float64) bool { return f.rng.Float64() < p }

func (f *Fabric) delayLocked() time.Duration {
	spread := max(f.cfg.MaxDelay-f.cfg.MinDelay, 0)
	return f.cfg.MinDelay + time.Duration(f.rng.Int64N(int64(spread)+1))
}

// deliverLocked puts a packet into the queue of its destination.
func (f *Fabric) deliverLocked(way *faultyFlow, b []byte, delay time.Duration) {
	i := slices.IndexFunc(f.ends, func(e *Faulty) bool { return slices.Contains(e.addrs, way.dst) })
	if i < 0 {
		f.stats.Unreached++
		return
	}
	e := f.ends[i]
	if len(e.queue) >= f.cfg.Buffer {
		f.stats.Overflowed++
		return
	}
	f.seq++
	p := flightPacket{
		due: time.Now().Add(delay), seq: f.seq,
		from: way.src, to: way.dst, tclass: way.tclass, hopLimit: way.hopLimit, b: b,
	}
	at, _ := slices.BinarySearchFunc(e.queue, p, func(q, p flightPacket) int {
		if d := q.due.Compare(p.due); d != 0 {
			return d
		}
		return int(int64(q.seq - p.seq))
	})
	e.queue = slices.Insert(e.queue, at, p)
	signal(e.news)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Poll hands the packets whose time has come to the sink.
func (e *Faulty) Poll(sink Sink, budget int) int {
	e.polling.Lock()
	defer e.polling.Unlock()
	e.take(budget)
	for i := range e.taken {
		p := &e.taken[i]
		ps := wire.NewPseudo(p.from.Addr(), p.to, p.from.Port(), wire.RoCEPort)
		e.reassembler.packet(sink, &ps, &arrival{
			from: p.from, to: p.to, tclass: p.tclass, hopLimit: p.hopLimit, b: p.b,
		})
	}
	e.reassembler.flush(sink)
	n := len(e.taken)
	clear(e.taken)
	return n
}

// take moves at most n packets that are due from the queue to e.taken.
func (e *Faulty) take(n int) {
	e.fabric.mu.Lock()
	defer e.fabric.mu.Unlock()
	now := time.Now()
	k := 0
	for k < min(n, len(e.queue)) && !e.queue[k].due.After(now) {
		k++
	}
	e.taken = append(e.taken[:0], e.queue[:k]...)
	e.queue = slices.Delete(e.queue, 0, k)
}

// Wait blocks until a packet's time has come, d has passed (negative: for ever),
// Wake was called or the end was closed.
func (e *Faulty) Wait(d time.Duration) {
	var deadline time.Time
	if d >= 0 {
		deadline = time.Now().Add(d)
	}
	for {
		next := e.nextDue(deadline)
		if next.IsZero() {
			if !e.sleep(nil) {
				return
			}
			continue
		}
		left := time.Until(next)
		if left <= 0 {
			return
		}
		t := time.NewTimer(left)
		again := e.sleep(t.C)
		t.Stop()
		if !again {
			return
		}
	}
}

// sleep waits for news, the timeout, Wake or Close, and reports whether it was news: a
// packet that may be due earlier than those before.
func (e *Faulty) sleep(timeout <-chan time.Time) bool {
	select {
	case <-e.news:
		return true
	case <-timeout:
	case <-e.wake:
	case <-e.done:
	}
	return false
}

// nextDue returns when the first packet is due, or the deadline if that is earlier. A zero
// deadline means none, and a zero result never.
func (e *Faulty) nextDue(deadline time.Time) time.Time {
	e.fabric.mu.Lock()
	defer e.fabric.mu.Unlock()
	if len(e.queue) > 0 && (deadline.IsZero() || e.queue[0].due.Before(deadline)) {
		return e.queue[0].due
	}
	return deadline
}

// Wake makes Wait return: the call that is under way, or else the next.
func (e *Faulty) Wake() { signal(e.wake) }

// MTU returns the configured MTU.
func (e *Faulty) MTU() int { return e.fabric.cfg.MTU }

// Window returns the configured window.
func (e *Faulty) Window(int) int { return e.fabric.cfg.Window }

// Addrs are the end's addresses.
func (e *Faulty) Addrs() []netip.Addr { return slices.Clone(e.addrs) }

// Offloads returns nothing: there is nothing to offload to.
func (e *Faulty) Offloads() []string { return nil }

// Close detaches the end: packets to it are lost from now on. It is idempotent.
func (e *Faulty) Close() error {
	f := e.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	e.queue = nil
	f.ends = slices.DeleteFunc(f.ends, func(x *Faulty) bool { return x == e })
	close(e.done)
	return nil
}
