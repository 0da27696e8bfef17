package main

// Memory that the CPU does not address, compared with what its engine does by itself. The
// engine is a model (package enginetest): an operation takes 7 µs, up to 4 are under way, and
// together they take as long as at 50 GB/s. Of each operation the model moves only the first
// and the last bytes, since no CPU copies as fast. Package verbs has no way to register such
// memory, so the ends use package device.

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
)

var modelEngine = enginetest.Config{Latency: 7 * time.Microsecond, Bandwidth: 50e9, Width: 4, Idle: true, Reaches: true}

// stagedEnd is one end of a connection: a queue pair, and a region of the engine's memory.
type stagedEnd struct {
	dev     *device.Device
	pd      provider.PD
	cq      provider.CQ
	qp      provider.QP
	mr      provider.MR
	closers []func() error
}

// stagedOffer is what the other side must know to connect to an end.
type stagedOffer struct {
	GID  ib.GID
	QPN  uint32
	Addr uint64
	RKey uint32
}

// newStagedEnd makes an end on a device of its own.
func newStagedEnd(link string, g *enginetest.Engine, size int) (*stagedEnd, error) {
	e := new(stagedEnd)
	var err error
	if e.dev, err = device.Open("", &provider.Config{Link: link}); err != nil {
		return nil, err
	}
	e.closers = append(e.closers, e.dev.Close)
	if err := e.fill(g, size); err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, nil
}

// close closes all that the end has, newest first.
func (e *stagedEnd) close() (err error) {
	for _, f := range slices.Backward(e.closers) {
		err = errors.Join(err, f())
	}
	e.closers = nil
	return err
}

// fill makes the objects of an end that has a device.
func (e *stagedEnd) fill(g *enginetest.Engine, size int) (err error) {
	later := func(f func() error) { e.closers = append(e.closers, f) }
	if e.pd, err = e.dev.AllocPD(); err != nil {
		return err
	}
	later(e.pd.Close)
	m := g.Alloc(uint64(size))
	later(func() error { m.Free(); return nil })
	if e.mr, err = e.pd.(*device.PD).RegBacking(m, 1<<32, everything); err != nil {
		return err
	}
	later(e.mr.Close)
	if e.cq, err = e.dev.CreateCQ(64, nil); err != nil {
		return err
	}
	later(e.cq.Close)
	e.qp, err = e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq, Cap: ib.QPCap{MaxSendWR: 32, MaxSendSGE: 1}})
	if err != nil {
		return err
	}
	later(e.qp.Close)
	return nil
}

func (e *stagedEnd) offer() *stagedOffer {
	return &stagedOffer{e.dev.GIDs()[0], e.qp.Number(), e.mr.Addr(), e.mr.RKey()}
}

const stagedReads = 16

// connect brings the queue pair to RTS.
func (e *stagedEnd) connect(o *stagedOffer) error {
	for _, step := range []struct {
		attr ib.QPAttr
		mask ib.QPAttrMask
	}{
		{ib.QPAttr{State: ib.QPInit, Port: 1, Access: ib.AccessRemote}, ib.QPMaskPort | ib.QPMaskPKeyIndex | ib.QPMaskAccess},
		{ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: o.GID}, PathMTU: ib.MTU4096, DestQPN: o.QPN, MaxDestRDAtomic: stagedReads, MinRNRTimer: 12},
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

// newStagedPair makes two connected ends within the process. The group closes them.
func (b *bench) newStagedPair(g *enginetest.Engine, size int) (near, far *stagedEnd, err error) {
	if near, err = b.newStaged("loop", g, size); err != nil {
		return nil, nil, err
	}
	if far, err = b.newStaged("loop", g, size); err != nil {
		return nil, nil, err
	}
	return near, far, errors.Join(near.connect(far.offer()), far.connect(near.offer()))
}

// newStaged makes an end. The group closes it.
func (b *bench) newStaged(link string, g *enginetest.Engine, size int) (*stagedEnd, error) {
	e, err := newStagedEnd(link, g, size)
	if err == nil {
		b.later(e.close)
	}
	return e, err
}

// stagedSpec is what a peer process makes an end of.
type stagedSpec struct {
	Engine string // the engine's name, by which engines of other processes open its memory
	Size   int
}

// newStagedPeer makes two ends in two processes, connected by shared memory. Each process has
// an engine of its own, which opens the memory of the other's. The group closes them.
func (b *bench) newStagedPeer(size int) (g *enginetest.Engine, near *stagedEnd, far *stagedOffer, p *peer, err error) {
	cfg := modelEngine
	cfg.Name = fmt.Sprintf("benchsuite %d", os.Getpid())
	g = enginetest.New(cfg)
	b.later(func() error { g.Close(); return nil })
	if near, err = b.newStaged("local", g, size); err != nil {
		return nil, nil, nil, nil, err
	}
	if p, err = b.newPeer(); err != nil {
		return nil, nil, nil, nil, err
	}
	made, err := p.call(request{Op: opStaged, Staged: &stagedSpec{cfg.Name, size}})
	if err != nil {
		return nil, nil, nil, nil, err
	}
	_, err = p.call(request{Op: opConnectStaged, StagedOffer: near.offer()})
	return g, near, made.Staged, p, errors.Join(err, near.connect(made.Staged))
}

// makeStaged makes the end of a peer process.
func makeStaged(sp *stagedSpec) (*stagedEnd, error) {
	cfg := modelEngine
	cfg.Name = sp.Engine
	g := enginetest.New(cfg) // it ends with the process
	return newStagedEnd("local", g, sp.Size)
}

// request returns a WRITE or READ of size bytes.
func (e *stagedEnd) request(o *stagedOffer, op ib.Opcode, size int) []ib.SendWR {
	return []ib.SendWR{{Op: op, Flags: ib.SendSignaled, SGL: []ib.SGE{{Addr: e.mr.Addr(), Length: uint32(size), LKey: e.mr.LKey()}},
		RemoteAddr: o.Addr, RKey: o.RKey}}
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

// stagedLoop compares WRITEs and READs within the process with the engine by itself.
func (b *bench) stagedLoop(size, depth int, least float64) ([]contender, error) {
	g := enginetest.New(modelEngine)
	near, far, err := b.newStagedPair(g, size)
	if err != nil {
		return nil, err
	}
	return stagedBandwidth(g, near, far.offer(), nil, size, depth, least), nil
}

// stagedLocal compares WRITEs and READs between two processes with the engine by itself.
func (b *bench) stagedLocal(size, depth int, least float64) ([]contender, error) {
	g, near, far, p, err := b.newStagedPeer(size)
	if err != nil {
		return nil, err
	}
	return stagedBandwidth(g, near, far, p, size, depth, least), nil
}

// stagedBandwidth makes the contenders; p is the process that has the other end, nil if it
// is this one.
func stagedBandwidth(g *enginetest.Engine, near *stagedEnd, far *stagedOffer, p *peer, size, depth int, least float64) []contender {
	const alone = "the engine by itself"
	// moving is a contender whose move moves for d and returns how often it did.
	moving := func(rw row, p *peer, move func(start time.Time, d time.Duration) (int, error)) contender {
		return contender{rows: []row{rw}, rates: func(d time.Duration) ([]rate, error) {
			before, err := cpuWith(p)
			if err != nil {
				return nil, err
			}
			start := time.Now()
			n, err := move(start, d)
			took := time.Since(start)
			after, cpuErr := cpuWith(p)
			return []rate{rateOf(float64(n)*float64(size)/1e9, took, after-before)}, errors.Join(err, cpuErr)
		}}
	}
	cs := []contender{moving(row{name: alone, unit: "GB/s"}, nil, func(_ time.Time, d time.Duration) (int, error) {
		return engineAlone(g, size, depth, d)
	})}
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
		wrs := near.request(far, op, size)
		cs = append(cs, moving(row{name: op.String(), unit: "GB/s", against: alone, goal: &goal{"≥", least}}, p, func(start time.Time, d time.Duration) (int, error) {
			return near.pump(wrs, depth, func() bool { return time.Since(start) >= d })
		}))
	}
	return cs
}

// cpuWith returns the CPU time that this process and a peer have used; nil: no peer.
func cpuWith(p *peer) (time.Duration, error) {
	if p == nil {
		return sys.CPUTime(), nil
	}
	r, err := p.call(request{Op: opCPU})
	return sys.CPUTime() + time.Duration(r.CPU), err
}

// engineAlone has the engine copy within its memory for d, and returns how often it did.
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

// stagedLatency measures what other queue pairs notice of an engine's moves: 8-byte WRITEs to
// host memory on the same devices, while another queue pair sends 1 MiB WRITEs to the engine's
// memory. It compares them with 8-byte WRITEs beside as many goroutines as those keep busy,
// which only spin: a processor is slower while others of its core work.
func (b *bench) stagedLatency() ([]contender, error) {
	const size = 1 << 20
	g := enginetest.New(modelEngine)
	near, far, err := b.newStagedPair(g, size)
	if err != nil {
		return nil, err
	}
	x, y := &stagedEnd{dev: near.dev}, &stagedEnd{dev: far.dev}
	for _, e := range []*stagedEnd{x, y} {
		b.later(e.close)
		if err := e.fill(g, 64); err != nil {
			return nil, err
		}
		host, err := e.pd.RegMR(make([]byte, 64), everything)
		if err != nil {
			return nil, err
		}
		e.closers = append(e.closers, host.Close)
		e.mr = host
	}
	if err := errors.Join(x.connect(y.offer()), y.connect(x.offer())); err != nil {
		return nil, err
	}
	short, long := x.request(y.offer(), ib.OpRDMAWrite, 8), near.request(far.offer(), ib.OpRDMAWrite, size)
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
