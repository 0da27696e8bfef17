package main

// On-demand memory: what registering it costs, how fast it is once its pages are
// present, and what page faults cost.

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

const onDemandAccess = everything | verbs.AccessOnDemand

// domain opens a device and makes a protection domain. The group closes both.
func (b *bench) domain() (*verbs.PD, error) {
	dev, err := verbs.Open("", &verbs.Config{Link: verbs.LinkLoop})
	if err != nil {
		return nil, err
	}
	b.later(dev.Close)
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, err
	}
	b.later(pd.Close)
	return pd, nil
}

// register compares registering large on-demand regions with locking as much memory.
func (b *bench) register() ([]contender, error) {
	pd, err := b.domain()
	if err != nil {
		return nil, err
	}
	const huge = 64 << 30
	all, err := sys.Reserve(huge)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	b.later(func() error { return sys.Unmap(all) })
	registering := func(rw row, n int) contender {
		keep := newSampler(1 << 16)
		return contender{rows: []row{rw}, run: func(d time.Duration) ([]float64, error) {
			keep.reset()
			for end := time.Now().Add(d / 10); ; {
				began := time.Now()
				mr, err := pd.RegMR(all[:n], onDemandAccess)
				took := time.Since(began)
				if err != nil {
					return nil, err
				}
				if err := mr.Close(); err != nil {
					return nil, err
				}
				if !keep.add(took) || time.Now().After(end) {
					return []float64{keep.quantiles(0.5)[0] / 1e3}, nil
				}
			}
		}}
	}
	one := "registering " + sizeName(b.region)
	cs := []contender{
		registering(row{name: "registering 64 GiB", unit: "µs", goal: &goal{"<", 100}}, huge),
		registering(row{name: one, unit: "µs"}, b.region),
	}
	locking := contender{rows: []row{{"locking " + sizeName(b.region) + " of fresh memory", "µs", one, &goal{"≥", 1000}}}}
	if err := lockFresh(4096, new(time.Duration)); err != nil {
		locking.notRun = fmt.Sprintf("mlock: %v", err)
	}
	locking.run = func(time.Duration) ([]float64, error) {
		var took time.Duration
		err := lockFresh(b.region, &took)
		return []float64{float64(took) / 1e3}, err
	}
	return append(cs, locking), nil
}

// lockFresh locks fresh memory, and stores how long that took.
func lockFresh(n int, took *time.Duration) error {
	fresh, err := sys.Reserve(n)
	if err != nil {
		return err
	}
	began := time.Now()
	err = sys.Lock(fresh)
	*took = time.Since(began)
	return errors.Join(err, sys.Unmap(fresh)) // which unlocks
}

func sizeName(n int) string {
	if n >= 1<<30 {
		return fmt.Sprintf("%d GiB", n>>30)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

// steadyState measures WRITEs into pages that are present. All buffers are mapped memory,
// and differ only in how they are registered.
func (b *bench) steadyState(newRig func(spec) (*rig, error), link verbs.LinkMode, depth int) ([]contender, error) {
	sp := spec{Link: link, Type: verbs.RC, QPs: 1, Size: 64 << 10, Slots: 1, Sends: depth, Mapped: true}
	list, under := 1, depth
	if link == verbs.LinkLoop {
		sp.Slots, list, under = depth, depth, 1
	}
	const ref = "pinned"
	var cs []contender
	for _, c := range []struct {
		name       string
		from, into memory
		goal       *goal
	}{
		{ref, "", "", nil},
		{"on demand", "", onDemand, &goal{"≥", 0.9}},
		{"implicit", "", implicit, &goal{"≥", 0.8}},
		{"on demand, from on demand", onDemand, onDemand, nil},
		{"implicit, from implicit", implicit, implicit, nil},
	} {
		sp.From, sp.Into = c.from, c.into
		r, err := newRig(sp)
		if err != nil {
			return nil, err
		}
		rw := row{name: c.name, unit: "GB/s"}
		if c.name != ref {
			rw.against, rw.goal = ref, c.goal
		}
		cs = append(cs, r.bandwidth(rw, verbs.OpRDMAWrite, list, under, inTurn, modePassive))
	}
	return cs, nil
}

// field is memory of a far side that a near one writes to, block by block.
type field struct {
	r      *rig
	target buffer
	wrs    []verbs.SendWR // one list
}

// newField makes a rig with memory of its own at the far side.
func (b *bench) newField(kind memory, bytes, block, list int) (*field, error) {
	r, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: block, Slots: 1, Sends: list, Mapped: true})
	if err != nil {
		return nil, err
	}
	f := &field{r: r}
	if f.target.bytes, err = sys.Reserve(bytes); err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	f.target.mapped = true
	b.later(f.target.close)
	if err := f.target.register(r.far.pd, kind); err != nil {
		return nil, err
	}
	f.wrs = r.near.list(verbs.OpRDMAWrite, 0, list)
	for i := range f.wrs {
		f.wrs[i].RKey = f.target.mr.RKey()
	}
	return f, nil
}

// write writes the list's blocks from off on, stride bytes apart, and waits.
func (f *field) write(off, stride int) error {
	for i := range f.wrs {
		f.wrs[i].RemoteAddr = f.target.addr + uint64(off+i*stride)
	}
	return f.r.near.postAndWait(f.wrs)
}

// faults measures an access to a page that is absent, and to one that is present.
func (b *bench) faults() ([]contender, error) {
	const pages, page = 4096, 4096
	f, err := b.newField(onDemand, pages*page, 8, 1)
	if err != nil {
		return nil, err
	}
	// pass times an access to each page, again and again for d.
	pass := func(d time.Duration, keep *sampler, absent bool) error {
		for end := time.Now().Add(d); ; {
			if absent {
				if err := sys.Discard(f.target.bytes); err != nil {
					return err
				}
			}
			before := f.target.mr.PagingStats()
			for i := range pages {
				began := time.Now()
				if err := f.write(i*page, 0); err != nil {
					return err
				}
				if !keep.add(time.Since(began)) {
					return nil
				}
			}
			if faults := f.target.mr.PagingStats().PageFaults - before.PageFaults; absent && faults < pages {
				return fmt.Errorf("%d faults for %d absent pages", faults, pages)
			}
			if time.Now().After(end) {
				return nil
			}
		}
	}
	return []contender{
		b.quantiles("absent anonymous page", "µs", 1e3, "", &goal{"<", 10}, func(d time.Duration, keep *sampler) error { return pass(d, keep, true) }),
		b.quantiles("page present", "µs", 1e3, "", nil, func(d time.Duration, keep *sampler) error { return pass(d, keep, false) }),
	}, nil
}

// firstPass measures the bandwidth of the first pass over an on-demand region, prefetched
// and not, compared with pinned memory.
func (b *bench) firstPass() ([]contender, error) {
	const block, list = 64 << 10, 16
	pinned, err := b.newField("", b.region, block, list)
	if err != nil {
		return nil, err
	}
	paged, err := b.newField(onDemand, b.region, block, list)
	if err != nil {
		return nil, err
	}
	pass := func(f *field, prepare func() error) func(time.Duration) ([]rate, error) {
		return func(time.Duration) ([]rate, error) {
			if err := prepare(); err != nil {
				return nil, err
			}
			began, cpu := time.Now(), sys.CPUTime()
			for off := 0; off < b.region; off += list * block {
				if err := f.write(off, block); err != nil {
					return nil, err
				}
			}
			took, cpu := time.Since(began), sys.CPUTime()-cpu
			for off := 0; off < b.region; off += block {
				if !bytes.Equal(f.target.bytes[off:off+block], f.r.near.tx.bytes[:block]) {
					return nil, fmt.Errorf("the data at %d did not arrive", off)
				}
			}
			return []rate{rateOf(float64(b.region)/1e9, took, cpu)}, nil
		}
	}
	const ref = "pinned"
	absent := func() error { return sys.Discard(paged.target.bytes) }
	prefetched := func() error {
		if err := absent(); err != nil {
			return err
		}
		return paged.r.far.pd.AdviseMR(verbs.AdvisePrefetchWrite, verbs.AdviseFlush, paged.target.sge(0, b.region))
	}
	return []contender{
		{rows: []row{{name: ref, unit: "GB/s"}}, rates: pass(pinned, func() error { clear(pinned.target.bytes); return nil })},
		{rows: []row{{"on demand, prefetched", "GB/s", ref, &goal{"≥", 0.9}}}, rates: pass(paged, prefetched)},
		{rows: []row{{"on demand, not prefetched", "GB/s", ref, nil}}, rates: pass(paged, absent)},
	}, nil
}

// fewRegions is the number of regions that many regions are compared with.
const fewRegions = 1000

func (b *bench) manyRegions() ([]contender, error) {
	few, many := fmt.Sprintf("%d regions", fewRegions), fmt.Sprintf("%d regions", b.regions)
	const what = "8-byte WRITE to the first 1000 of "
	return []contender{b.inPeer(request{Op: opRegions, Regions: b.regions, For: b.duration},
		row{name: what + few, unit: "ns"},
		row{what + many, "ns", what + few, &goal{"≤", 1.25}},
		row{fmt.Sprintf("8-byte WRITE to any of %d regions", b.regions), "ns", what + few, nil},
		row{name: "memory of each of " + many, unit: "bytes", goal: &goal{"<", 300}},
		row{name: "registering each of " + many, unit: "µs"},
	)}, nil
}

func (b *bench) closeRegions() ([]contender, error) {
	return []contender{b.inPeer(request{Op: opClose, Regions: b.populated},
		row{name: fmt.Sprintf("%d regions of 2 MiB", b.populated), unit: "s", goal: &goal{"<", 1}},
		row{name: "the same, CPU time", unit: "s"})}, nil
}
