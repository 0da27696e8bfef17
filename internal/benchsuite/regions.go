package main

// What it costs to give access to memory and to take it away again, and what an
// access through a memory window costs, compared with one by the region's own key.

import (
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// mapped returns 1 MiB outside the Go heap: memory that registration pins.
func (b *bench) mapped() ([]byte, error) {
	m, err := sys.Map(1 << 20)
	if err != nil {
		return nil, err
	}
	clear(m)
	b.later(func() error { return sys.Unmap(m) })
	return m, nil
}

// each is a contender that calls do again and again. The figure is how long a call takes,
// the median over short intervals: other work of the machine disturbs only a few of them.
func each(r row, do func() error) contender {
	const turn = 100 * time.Microsecond
	r.unit = "µs"
	return contender{rows: []row{r}, run: func(d time.Duration) ([]float64, error) {
		var took []float64
		for start := time.Now(); len(took) == 0 || time.Since(start) < d; {
			begin, elapsed, n := time.Now(), time.Duration(0), 0
			for ; elapsed < turn; n++ {
				if err := do(); err != nil {
					return nil, err
				}
				elapsed = time.Since(begin)
			}
			took = append(took, elapsed.Seconds()*1e6/float64(n))
		}
		return []float64{median(took)}, nil
	}}
}

// registerAndClose returns a function that registers memory and closes the region.
func registerAndClose(pd *verbs.PD, m []byte) func() error {
	return func() error {
		mr, err := pd.RegMR(m, everything)
		if err != nil {
			return err
		}
		return mr.Close()
	}
}

// window makes a type 2 window that is bound to all of m on the side's first queue pair.
// The group closes it.
func (b *bench) window(s *side, m []byte) (*verbs.MW, *verbs.MR, error) {
	mr, err := s.pd.RegMR(m, verbs.AccessLocalWrite|verbs.AccessMWBind)
	if err != nil {
		return nil, nil, err
	}
	b.later(mr.Close)
	mw, err := s.pd.AllocMW(verbs.MWType2)
	if err != nil {
		return nil, nil, err
	}
	b.later(mw.Close)
	wrs := []verbs.SendWR{{Op: verbs.OpBindMW, Flags: verbs.SendSignaled, Bind: mw.Bind(mr, 0, len(m), verbs.AccessRemote)}}
	return mw, mr, s.postAndWait(wrs)
}

// postAndWait posts a list, of which the last request alone is signaled, and waits
// for it.
func (s *side) postAndWait(wrs []verbs.SendWR) error {
	if _, err := s.qps[0].PostSend(wrs); err != nil {
		return err
	}
	var wait spinner
	for {
		wcs, err := s.poll()
		if err != nil || len(wcs) > 0 {
			return err
		}
		if err := wait.idle(); err != nil {
			return err
		}
	}
}

func (b *bench) windowBind() ([]contender, error) {
	r, err := b.newRig(eight(verbs.LinkLoop, verbs.RC))
	if err != nil {
		return nil, err
	}
	m, err := b.mapped()
	if err != nil {
		return nil, err
	}
	other, err := b.mapped() // for the window: a region on the same pages as m would keep them locked
	if err != nil {
		return nil, err
	}
	s := r.far
	mw, mr, err := b.window(s, other)
	if err != nil {
		return nil, err
	}
	wrs := []verbs.SendWR{{Op: verbs.OpLocalInv}, {Op: verbs.OpBindMW, Flags: verbs.SendSignaled}}
	bind := func() error {
		wrs[0].InvalidateKey = mw.RKey()
		wrs[1].Bind = mw.Bind(mr, 0, len(other), verbs.AccessRemote)
		return s.postAndWait(wrs)
	}
	first, err := s.pd.AllocMW(verbs.MWType1)
	if err != nil {
		return nil, err
	}
	b.later(first.Close)
	var bound [1]verbs.WC
	rebind := func() error {
		if _, err := s.qps[0].BindMW(first, 0, verbs.SendSignaled, first.Bind(mr, 0, len(other), verbs.AccessRemote)); err != nil {
			return err
		}
		for {
			n, err := s.cq.Poll(bound[:])
			if err != nil {
				return err
			}
			if n > 0 {
				return bound[0].Err()
			}
		}
	}
	const pinned = "register and close, pinned memory"
	return []contender{
		each(row{name: pinned}, registerAndClose(s.pd, m)),
		each(row{name: "register and close, the Go heap", against: pinned}, registerAndClose(s.pd, make([]byte, 1<<20))),
		each(row{name: "BIND_MW and LOCAL_INV, type 2", against: pinned, goal: &goal{"≤", 1. / 20}}, bind),
		each(row{name: "bind by the verb, type 1", against: pinned}, rebind),
	}, nil
}

// twoWays makes two rigs of the same kind: in one, WRITEs to the far side use the region's
// key, in the other that of a window.
func (b *bench) twoWays(sp spec) (region, window *rig, err error) {
	if region, err = b.newRig(sp); err != nil {
		return nil, nil, err
	}
	if window, err = b.newRig(sp); err != nil {
		return nil, nil, err
	}
	mw, _, err := b.window(window.far, window.far.rx.bytes)
	if err != nil {
		return nil, nil, err
	}
	window.near.peer.RxKey = mw.RKey()
	return region, window, nil
}

// inTurns alternates between two functions, turn calls of each at a time, so that other
// work of the machine disturbs both. It returns how many nanoseconds a call of each takes,
// the median over all turns; and the median of how much longer the second takes than the
// first. If cpu is not nil, it stores how many nanoseconds of CPU time a call of each takes.
func inTurns(ways [2]func() error, turn int, d time.Duration, cpu *[2]float64) (ns [2]float64, more float64, err error) {
	var took [2][]float64
	var diff []float64
	var used [2]time.Duration
	for start := time.Now(); len(diff) == 0 || time.Since(start) < d; {
		for w, once := range ways {
			if cpu != nil {
				used[w] -= sys.CPUTime()
			}
			begin := time.Now()
			for range turn {
				if err := once(); err != nil {
					return ns, 0, err
				}
			}
			took[w] = append(took[w], float64(time.Since(begin).Nanoseconds())/float64(turn))
			if cpu != nil {
				used[w] += sys.CPUTime()
			}
		}
		n := len(diff)
		diff = append(diff, took[1][n]-took[0][n])
	}
	if cpu != nil {
		for w := range used {
			cpu[w] = float64(used[w].Nanoseconds()) / float64(turn*len(diff))
		}
	}
	return [2]float64{median(took[0]), median(took[1])}, median(diff), nil
}

const (
	byRegion      = "by the region's key"
	throughWindow = "through a window"
)

func (b *bench) windowBandwidth() ([]contender, error) {
	const size = 64 << 10
	region, window, err := b.twoWays(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: 16})
	if err != nil {
		return nil, err
	}
	ways := [2]func() error{region.once(verbs.OpRDMAWrite), window.once(verbs.OpRDMAWrite)}
	return []contender{{
		rows: []row{{name: byRegion, unit: "GB/s"}, {throughWindow, "GB/s", byRegion, &goal{"≥", 0.95}}},
		rates: func(d time.Duration) ([]rate, error) {
			if err := errors.Join(region.far.forget(), window.far.forget()); err != nil {
				return nil, err
			}
			var cpu [2]float64
			ns, _, err := inTurns(ways, 8, d, &cpu)
			if err = errors.Join(err, region.far.arrived(), window.far.arrived()); err != nil {
				return nil, err
			}
			return []rate{{size / ns[0], cpu[0] / size}, {size / ns[1], cpu[1] / size}}, nil
		},
	}}, nil
}

func (b *bench) windowLatency() ([]contender, error) {
	region, window, err := b.twoWays(eight(verbs.LinkLoop, verbs.RC))
	if err != nil {
		return nil, err
	}
	ways := [2]func() error{region.once(verbs.OpRDMAWrite), window.once(verbs.OpRDMAWrite)}
	return []contender{{
		rows: []row{{name: byRegion, unit: "ns"}, {name: throughWindow, unit: "ns", against: byRegion},
			{name: "what the window adds", unit: "ns", goal: &goal{"≤", 50}}},
		run: func(d time.Duration) ([]float64, error) {
			ns, more, err := inTurns(ways, 64, d, nil)
			return []float64{ns[0], ns[1], max(0, more)}, err
		},
	}}, nil
}

func (b *bench) reregistration() ([]contender, error) {
	s, err := newSide(spec{Link: verbs.LinkLoop, Type: verbs.RC, Size: 8, Slots: 1})
	if err != nil {
		return nil, err
	}
	b.later(s.close)
	m, err := b.mapped()
	if err != nil {
		return nil, err
	}
	other, err := b.mapped()
	if err != nil {
		return nil, err
	}
	mr, err := s.pd.RegMR(other, everything)
	if err != nil {
		return nil, err
	}
	b.later(mr.Close)
	rights := [2]verbs.Access{everything, verbs.AccessLocalWrite | verbs.AccessRemoteRead}
	memory := [2]verbs.MRChange{}
	third, err := b.mapped()
	if err != nil {
		return nil, err
	}
	moving, err := s.pd.RegMR(third[:1<<19], everything)
	if err != nil {
		return nil, err
	}
	b.later(moving.Close)
	memory[0].Buf, memory[1].Buf = third[1<<19:], third[:1<<19]
	n, k := 0, 0
	const closing = "close and register"
	return []contender{
		each(row{name: closing}, registerAndClose(s.pd, m)),
		each(row{name: "rereg of the rights", against: closing, goal: &goal{"≤", 1. / 5}}, func() error {
			n++
			return mr.Rereg(verbs.MRChange{Access: &rights[n%2]})
		}),
		each(row{name: "rereg of the memory, 512 KiB", against: closing}, func() error {
			k++
			return moving.Rereg(memory[(k-1)%2])
		}),
	}, nil
}
