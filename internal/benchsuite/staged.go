package main

// Memory that the CPU does not address, against what its engine does by itself. The engine is
// a model: an operation takes 7 µs, up to 4 are under way, and 50 GB/s go through all of them.
// It moves nothing, since no CPU here copies as fast. Package verbs has no way to register
// such memory: the ends are the device's own.

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
)

var modelEngine = enginetest.Config{Latency: 7 * time.Microsecond, Bandwidth: 50e9, Width: 4, Idle: true, Reaches: true}

// stagedEnd is a queue pair with memory of the engine.
type stagedEnd struct {
	dev *device.Device
	pd  provider.PD
	cq  provider.CQ
	qp  provider.QP
	mr  provider.MR
}

// newStagedEnd makes one on a device of its own. The group closes it.
func (b *bench) newStagedEnd(g *enginetest.Engine, size int) (*stagedEnd, error) {
	e := new(stagedEnd)
	var err error
	if e.dev, err = device.Open("", &provider.Config{Link: "loop"}); err != nil {
		return nil, err
	}
	b.later(e.dev.Close)
	return e, b.addStaged(e, g, size)
}

// addStaged gives an end with a device all the rest.
func (b *bench) addStaged(e *stagedEnd, g *enginetest.Engine, size int) (err error) {
	if e.pd, err = e.dev.AllocPD(); err != nil {
		return err
	}
	b.later(e.pd.Close)
	m := g.Alloc(uint64(size))
	b.later(func() error { m.Free(); return nil })
	if e.mr, err = e.pd.(*device.PD).RegBacking(m, 1<<32, everything); err != nil {
		return err
	}
	b.later(e.mr.Close)
	if e.cq, err = e.dev.CreateCQ(64, nil); err != nil {
		return err
	}
	b.later(e.cq.Close)
	e.qp, err = e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq, Cap: ib.QPCap{MaxSendWR: 32, MaxSendSGE: 1}})
	if err != nil {
		return err
	}
	b.later(e.qp.Close)
	return nil
}

const stagedReads = 16

// connect brings the queue pair to RTS.
func (e *stagedEnd) connect(o *stagedEnd) error {
	for _, step := range []struct {
		attr ib.QPAttr
		mask ib.QPAttrMask
	}{
		{ib.QPAttr{State: ib.QPInit, Port: 1, Access: ib.AccessRemote}, ib.QPMaskPort | ib.QPMaskPKeyIndex | ib.QPMaskAccess},
		{ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: o.dev.GIDs()[0]}, PathMTU: ib.MTU4096, DestQPN: o.qp.Number(), MaxDestRDAtomic: stagedReads, MinRNRTimer: 12},
			ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN | ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer},
		{ib.QPAttr{State: ib.QPRTS, Timeout: 17, RetryCnt: 7, RNRRetry: 7, MaxRDAtomic: stagedReads},
			ib.QPMaskSQPSN | ib.QPMaskTimeout | ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic},
	} {
		if err := e.qp.Modify(&step.attr, step.mask|ib.QPMaskState); err != nil {
			return err
		}
	}
	return nil
}

// newStagedPair makes two ends that are connected.
func (b *bench) newStagedPair(g *enginetest.Engine, size int) (near, far *stagedEnd, err error) {
	if near, err = b.newStagedEnd(g, size); err != nil {
		return nil, nil, err
	}
	if far, err = b.newStagedEnd(g, size); err != nil {
		return nil, nil, err
	}
	return near, far, errors.Join(near.connect(far), far.connect(near))
}

// request is a WRITE or READ of size bytes.
func (e *stagedEnd) request(o *stagedEnd, op ib.Opcode, size int) []ib.SendWR {
	return []ib.SendWR{{Op: op, Flags: ib.SendSignaled, SGL: []ib.SGE{{Addr: e.mr.Addr(), Length: uint32(size), LKey: e.mr.LKey()}},
		RemoteAddr: o.mr.Addr(), RKey: o.mr.RKey()}}
}

// poll returns how many requests have completed.
func (e *stagedEnd) poll(wcs []ib.WC) (int, error) {
	n, err := e.cq.Poll(wcs)
	for i := range n {
		err = errors.Join(err, wcs[i].Err())
	}
	return n, err
}

// pump keeps depth requests under way until done, and returns how many have completed.
func (e *stagedEnd) pump(wrs []ib.SendWR, depth int, done func() bool) (completed int, err error) {
	var wcs [16]ib.WC
	for posted := 0; completed < posted || !done(); {
		for posted-completed < depth && !done() {
			if _, err := e.qp.PostSend(wrs); err != nil {
				return completed, err
			}
			posted++
		}
		n, err := e.poll(wcs[:])
		if err != nil {
			return completed, err
		}
		completed += n
	}
	return completed, nil
}

// stagedBandwidth compares WRITEs and READs with the engine.
func (b *bench) stagedBandwidth(size, depth int, least float64) ([]contender, error) {
	g := enginetest.New(modelEngine)
	near, far, err := b.newStagedPair(g, size)
	if err != nil {
		return nil, err
	}
	const alone = "the engine by itself"
	rate := func(n int, start time.Time) []float64 {
		return []float64{float64(n) * float64(size) / time.Since(start).Seconds() / 1e9}
	}
	cs := []contender{{rows: []row{{name: alone, unit: "GB/s"}}, run: func(d time.Duration) ([]float64, error) {
		start := time.Now()
		n, err := engineAlone(g, size, depth, d)
		return rate(n, start), err
	}}}
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
		wrs := near.request(far, op, size)
		cs = append(cs, contender{rows: []row{{name: op.String(), unit: "GB/s", against: alone, goal: &goal{"≥", least}}}, run: func(d time.Duration) ([]float64, error) {
			start := time.Now()
			n, err := near.pump(wrs, depth, func() bool { return time.Since(start) >= d })
			return rate(n, start), err
		}})
	}
	return cs, nil
}

// engineAlone has the engine copy within its memory for a while, and returns how often.
func engineAlone(g *enginetest.Engine, size, depth int, d time.Duration) (n int, err error) {
	m := g.Alloc(2 * uint64(size))
	defer m.Free()
	table := mem.NewTable(mem.TableConfig{})
	r, err := table.Register(mem.RegionConfig{Access: everything, Length: m.Len(), Backing: m})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	list := func(at int, acc ib.Access) *mem.List {
		return &mem.List{Table: table, Access: acc, SGEs: []ib.SGE{{Addr: uint64(at), Length: uint32(size), LKey: r.Key()}}}
	}
	var s mem.Stream
	defer s.Close()
	var under []*mem.Transfer
	for start := time.Now(); time.Since(start) < d || len(under) > 0; {
		if len(under) < depth && time.Since(start) < d {
			t := &mem.Transfer{Dst: list(0, ib.AccessLocalWrite), Src: list(size, 0), N: uint64(size), Stream: &s}
			if f, _ := t.Begin(); !f.OK() {
				return n, fmt.Errorf("the engine: %v", f)
			}
			under = append(under, t)
			continue
		}
		if f, _ := under[0].Wait(); !f.OK() {
			return n, fmt.Errorf("the engine: %v", f)
		}
		under = under[1:]
		n++
	}
	return n, nil
}

// stagedLatency is what others notice of it: 8-byte WRITEs of a queue pair of the same devices,
// to memory of the host, beside 1 MiB WRITEs to the engine's; and beside as many goroutines, as
// those keep busy, that do nothing: processors are not as fast when others of their core work.
func (b *bench) stagedLatency() ([]contender, error) {
	const size = 1 << 20
	g := enginetest.New(modelEngine)
	near, far, err := b.newStagedPair(g, size)
	if err != nil {
		return nil, err
	}
	x, y := &stagedEnd{dev: near.dev}, &stagedEnd{dev: far.dev}
	for _, e := range []*stagedEnd{x, y} {
		if err := b.addStaged(e, g, 64); err != nil {
			return nil, err
		}
		host, err := e.pd.RegMR(make([]byte, 64), everything)
		if err != nil {
			return nil, err
		}
		b.later(host.Close)
		e.mr = host
	}
	if err := errors.Join(x.connect(y), y.connect(x)); err != nil {
		return nil, err
	}
	short, long := x.request(y, ib.OpRDMAWrite, 8), near.request(far, ib.OpRDMAWrite, size)
	once := func() error {
		if _, err := x.qp.PostSend(short); err != nil {
			return err
		}
		var wc [1]ib.WC
		for {
			if n, err := x.poll(wc[:]); n > 0 || err != nil {
				return err
			}
		}
	}
	beside := func(loads ...func(done func() bool) error) func(time.Duration, *sampler) error {
		return func(d time.Duration, keep *sampler) error {
			var stop atomic.Bool
			ended := make(chan error)
			for _, load := range loads {
				go func() { ended <- load(stop.Load) }()
			}
			err := timeOnce(once, d, keep)
			stop.Store(true)
			for range loads {
				err = errors.Join(err, <-ended)
			}
			return err
		}
	}
	engine := func(done func() bool) error {
		_, err := near.pump(long, 8, done)
		return err
	}
	spin := func(done func() bool) error {
		for !done() {
			runtime.Gosched()
		}
		return nil
	}
	const alone, busy = "8-byte WRITE", "8-byte WRITE, other processors busy"
	return []contender{
		b.quantiles(alone, "ns", 1, "", nil, beside()),
		b.quantiles(busy, "ns", 1, "", nil, beside(spin, spin, spin)),
		b.quantiles("8-byte WRITE, engine busy", "ns", 1, busy, &goal{"≤", 1.25}, beside(engine)),
	}, nil
}
