package main

// Memory of dma-bufs: how fast it is while it stays where it is, what a move costs those who
// use it, and what registering it costs.

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// dmabufAddr is the address of a dma-buf in requests. Any whole page will do.
const dmabufAddr = 1 << 32

// makeDMABuf makes a buffer of a dma-buf.
func (b *buffer) makeDMABuf(pd *verbs.PD, n int) (err error) {
	if b.exporter, err = dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(n), Name: "benchsuite"}); err != nil {
		return err
	}
	b.bytes, b.addr = make([]byte, n), dmabufAddr
	b.mr, err = regDMABuf(pd, b.exporter)
	return err
}

// regDMABuf registers all of a dma-buf.
func regDMABuf(pd *verbs.PD, m *dmabuf.Memory) (*verbs.MR, error) {
	return pd.RegDMABufMR(verbs.DMABuf{Buffer: m.Buffer(), Length: m.Buffer().Size(), IOVA: dmabufAddr}, everything)
}

// store brings what was written to bytes to the memory, if that is elsewhere.
func (b *buffer) store() (err error) {
	if b.exporter != nil {
		_, err = b.exporter.WriteAt(b.bytes, 0)
	}
	if b.vram != nil {
		_, err = b.vram.WriteAt(b.bytes, 0)
	}
	if b.space != nil {
		_, err = b.space.mirror.WriteAt(b.bytes, 0)
	}
	return err
}

// load brings what the memory holds to bytes, if that is elsewhere.
func (b *buffer) load() (err error) {
	if b.exporter != nil {
		_, err = b.exporter.ReadAt(b.bytes, 0)
	}
	if b.vram != nil {
		_, err = b.vram.ReadAt(b.bytes, 0)
	}
	if b.space != nil {
		_, err = b.space.mirror.ReadAt(b.bytes, 0)
	}
	return err
}

// dmabufSteady compares dma-bufs that do not move with mapped memory that is registered as it
// is. In all contenders both buffers are of one kind.
func (b *bench) dmabufSteady(newRig func(spec) (*rig, error), link verbs.LinkMode, depth int) ([]contender, error) {
	sp := spec{Link: link, Type: verbs.RC, QPs: 1, Size: 64 << 10, Slots: 1, Sends: depth, Mapped: true}
	list, under := 1, depth
	if link == verbs.LinkLoop {
		sp.Slots, list, under = depth, depth, 1
	}
	const plain = "plain memory"
	var cs []contender
	for _, c := range []struct {
		name string
		kind memory
	}{{plain, ""}, {"dma-bufs", movable}, {"dma-bufs, pinned", held}} {
		sp.From, sp.Into = c.kind, c.kind
		r, err := newRig(sp)
		if err != nil {
			return nil, err
		}
		for _, op := range []struct {
			name string
			code verbs.Opcode
		}{{"WRITE, ", verbs.OpRDMAWrite}, {"READ, ", verbs.OpRDMARead}} {
			rw := row{name: op.name + c.name, unit: "GB/s"}
			if c.name != plain {
				rw.against, rw.goal = op.name+plain, &goal{"≥", 0.95}
			}
			cs = append(cs, r.bandwidth(rw, op.code, list, under, inTurn, modePassive))
		}
	}
	return cs, nil
}

// movedSize is the size of the buffers that move.
const movedSize = 2 << 20

// moving is a rig within the process whose far side is a dma-buf that moves.
type moving struct {
	r      *rig
	target *dmabuf.Memory
}

// newMoving makes a rig for messages of some size, which fill a buffer of movedSize in turn.
func (b *bench) newMoving(size int) (*moving, error) {
	r, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: size, Slots: movedSize / size, Sends: movesList * movesDepth, Mapped: true, Into: movable})
	if err != nil {
		return nil, err
	}
	return &moving{r, r.far.rx.exporter}, nil
}

func (m *moving) move() error { return m.target.Move(context.Background()) }

// dmabufMove measures moves: of the one who waits for the first byte after one, of a peer that
// writes all the time, and of an exporter that has many importers to tell.
func (b *bench) dmabufMove() ([]contender, error) {
	m, err := b.newMoving(64 << 10)
	if err != nil {
		return nil, err
	}
	short, err := b.newMoving(64)
	if err != nil {
		return nil, err
	}
	telling, err := b.telling()
	if err != nil {
		return nil, err
	}
	once := short.r.once(verbs.OpRDMAWrite)
	var perSecond float64 // moves that whileMoving has made
	const stays, still = "64-byte WRITE, the buffer stays", "64 KiB WRITEs, the buffer stays"
	return []contender{
		b.quantiles("a move of 2 MiB, nobody waits", "µs", 1e3, "", nil, func(d time.Duration, keep *sampler) error {
			return timeOnce(short.move, d, keep)
		}),
		b.quantiles(stays, "µs", 1e3, "", nil, func(d time.Duration, keep *sampler) error { return timeOnce(once, d, keep) }),
		b.quantiles("the first 64-byte WRITE after a move", "µs", 1e3, stays, nil, func(d time.Duration, keep *sampler) error {
			return short.firstAfterMove(once, d, keep)
		}),
		b.quantiles("pause of 64 KiB WRITEs by a move", "µs", 1e3, "", nil, m.pauses),
		m.r.bandwidth(row{name: still, unit: "GB/s"}, verbs.OpRDMAWrite, movesList, movesDepth, inTurn, modePassive),
		m.whileMoving(row{"64 KiB WRITEs, a move each millisecond", "GB/s", still, &goal{"≥", 0.7}}, &perSecond),
		{rows: []row{{name: "moves of the row above", unit: "1/s"}}, run: func(time.Duration) ([]float64, error) { return []float64{perSecond}, nil }},
		telling,
	}, nil
}

// While the buffer moves, movesDepth lists of movesList requests are under way. Of 64 KiB they are
// as many as the buffer has slots: however short a measurement is, it writes to all of them, and
// a slot that holds something else in the end was lost.
const movesList, movesDepth = 2, 16

// firstAfterMove keeps how long the first request after a move takes.
func (m *moving) firstAfterMove(once func() error, d time.Duration, keep *sampler) error {
	for start := time.Now(); ; {
		before := m.r.far.rx.mr.PagingStats().Invalidations
		if err := m.move(); err != nil {
			return err
		}
		began := time.Now()
		if err := once(); err != nil {
			return err
		}
		took := time.Since(began)
		if m.r.far.rx.mr.PagingStats().Invalidations != before+1 {
			return errors.New("the region had not mapped the buffer")
		}
		if !keep.add(took) || time.Since(start) >= d {
			return nil
		}
	}
}

// keepMoving moves the buffer again and again, with pause between the beginnings of two moves
// where that is possible, until stop is set. before and after are called around each move.
func (m *moving) keepMoving(stop *atomic.Bool, pause time.Duration, before, after func()) error {
	next := time.Now()
	for !stop.Load() {
		before()
		err := m.move()
		after()
		if err != nil {
			return err
		}
		if next = next.Add(pause); time.Until(next) <= 0 {
			next = time.Now() // a move took longer than the pause: those that were missed are not caught up with
			continue
		}
		time.Sleep(time.Until(next))
	}
	return nil
}

// pauses keeps how long each move stops a peer that keeps requests under way: see gaps.
func (m *moving) pauses(d time.Duration, keep *sampler) error {
	var stop atomic.Bool
	var phase atomic.Uint64 // odd: a move is under way
	ended := make(chan error, 1)
	step := func() { phase.Add(1) }
	go func() { ended <- m.keepMoving(&stop, 5*time.Millisecond, step, step) }()
	err := m.watch(d, &phase, keep)
	stop.Store(true)
	return errors.Join(err, <-ended)
}

// watch keeps requests under way for d, or longer if there was no move, and keeps the gaps.
func (m *moving) watch(d time.Duration, phase *atomic.Uint64, keep *sampler) error {
	p := newPump(m.r.near, verbs.OpRDMAWrite, movesList, movesDepth, inTurn)
	for range movesDepth {
		if err := p.post(0); err != nil {
			return err
		}
	}
	start := time.Now()
	g := gaps{phase: phase.Load(), last: start}
	var wait spinner
	for {
		wcs, err := p.s.poll()
		if err != nil {
			return err
		}
		if len(wcs) == 0 {
			if err := wait.idle(); err != nil {
				return err
			}
			continue
		}
		wait.reset()
		now := time.Now()
		full := false
		if gap, ok := g.completed(now, phase.Load()); ok {
			full = !keep.add(gap)
		}
		if full || now.Sub(start) >= d && len(keep.ns) > 0 {
			return p.drain(movesDepth - len(wcs))
		}
		for range wcs {
			if err := p.post(0); err != nil {
				return err
			}
		}
	}
}

// gaps finds, for each move, the longest time between two completions from the last one before
// the move to the first one after it.
type gaps struct {
	phase   uint64 // of the last completion; odd: a move was under way
	last    time.Time
	longest time.Duration // since the move began
}

// completed is called for each completion, with the phase that it found. If a move has ended
// since the last completion, it returns the longest gap.
func (g *gaps) completed(now time.Time, phase uint64) (longest time.Duration, ok bool) {
	gap := now.Sub(g.last)
	if g.phase%2 == 0 {
		g.longest = 0
	}
	g.longest = max(g.longest, gap)
	// A move has ended if the phase was odd, or two steps or more have been made.
	ok = phase != g.phase && (g.phase%2 == 1 || phase-g.phase >= 2)
	longest = g.longest
	if ok {
		g.longest = gap // another move may have begun in the same gap
	}
	g.last, g.phase = now, phase
	return longest, ok
}

// whileMoving is a contender that keeps requests under way while the buffer moves each
// millisecond, or as often as it can. It sets perSecond to how often that was.
func (m *moving) whileMoving(rw row, perSecond *float64) contender {
	c := m.r.bandwidth(rw, verbs.OpRDMAWrite, movesList, movesDepth, inTurn, modePassive)
	rates := c.rates
	c.rates = func(d time.Duration) ([]rate, error) {
		var stop atomic.Bool
		ended := make(chan error, 1)
		nothing := func() {}
		before, start := m.target.Moves(), time.Now()
		go func() { ended <- m.keepMoving(&stop, time.Millisecond, nothing, nothing) }()
		got, err := rates(d)
		stop.Store(true)
		err = errors.Join(err, <-ended)
		moves := m.target.Moves() - before
		if err == nil && moves == 0 {
			err = errors.New("the buffer did not move")
		}
		*perSecond = float64(moves) / time.Since(start).Seconds()
		return got, err
	}
	return c
}

// telling measures how long it takes to tell importers that the buffer moves. All of them have
// mapped it.
func (b *bench) telling() (contender, error) {
	r, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: 64, Slots: 1, Sends: 1, Mapped: true})
	if err != nil {
		return contender{}, err
	}
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: 4096, Name: "benchsuite"})
	if err != nil {
		return contender{}, err
	}
	b.later(m.Close)
	var mrs []*verbs.MR
	for range b.importers {
		mr, err := regDMABuf(r.far.pd, m)
		if err != nil {
			return contender{}, err
		}
		b.later(mr.Close)
		mrs = append(mrs, mr)
	}
	wrs := r.near.list(verbs.OpRDMAWrite, 0, 1)
	// mapAll has each importer map the buffer, by writing to it.
	mapAll := func() error {
		for _, mr := range mrs {
			wrs[0].RemoteAddr, wrs[0].RKey = mr.Addr(), mr.RKey()
			if err := r.near.postAndWait(wrs); err != nil {
				return err
			}
		}
		return nil
	}
	tell := func() time.Duration {
		resv := m.Buffer().Reservation()
		resv.Lock()
		defer resv.Unlock()
		began := time.Now()
		m.Buffer().InvalidateMappings()
		return time.Since(began)
	}
	rw := row{name: fmt.Sprintf("telling %d importers, each", b.importers), unit: "µs", goal: &goal{"≤", 1}}
	return contender{rows: []row{rw}, run: func(d time.Duration) ([]float64, error) {
		var each []float64
		for start := time.Now(); ; {
			if err := mapAll(); err != nil {
				return nil, err
			}
			before := mrs[b.importers-1].PagingStats().Invalidations
			each = append(each, float64(tell())/float64(b.importers)/1e3)
			if mrs[b.importers-1].PagingStats().Invalidations != before+1 {
				return nil, errors.New("the last importer was not told")
			}
			if time.Since(start) >= d {
				return []float64{median(each)}, nil
			}
		}
	}}, nil
}

// dmabufRegister measures registering and closing a large dma-buf.
func (b *bench) dmabufRegister() ([]contender, error) {
	pd, err := b.domain()
	if err != nil {
		return nil, err
	}
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(b.region), Name: "benchsuite"})
	if err != nil {
		return nil, err
	}
	b.later(m.Close)
	return []contender{b.quantiles("register and close "+sizeName(b.region), "µs", 1e3, "", &goal{"≤", 50}, func(d time.Duration, keep *sampler) error {
		return timeOnce(func() error {
			mr, err := regDMABuf(pd, m)
			if err != nil {
				return err
			}
			return mr.Close()
		}, d, keep)
	})}, nil
}
