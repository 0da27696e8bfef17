package main

// Many on-demand regions: measured in a process of its own, so that no other memory is
// counted, and garbage collection disturbs no other measurement.

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// plot is a stretch of addresses that is registered in equal pieces, each a
// region of its own, and a side that writes to them.
type plot struct {
	near, far *side
	all       []byte
	piece     int
	mrs       []*verbs.MR
	wrs       []verbs.SendWR
}

// newPlot makes a plot without regions. It owns all from now on.
func newPlot(all []byte, piece int) (_ *plot, err error) {
	p := &plot{all: all, piece: piece}
	defer func() {
		if err != nil {
			_ = p.close() // the first error says more
		}
	}()
	sp := spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: 8, Slots: 1, Sends: 1, Mapped: true}
	if p.near, err = newSide(sp); err != nil {
		return nil, err
	}
	if p.far, err = newSide(sp); err != nil {
		return nil, err
	}
	if err := errors.Join(p.near.connect(p.far.offer()), p.far.connect(p.near.offer())); err != nil {
		return nil, err
	}
	p.wrs = p.near.list(verbs.OpRDMAWrite, 0, 1)
	return p, nil
}

func (p *plot) close() error {
	errs := []error{p.closeRegions()}
	for _, s := range []*side{p.near, p.far} {
		if s != nil {
			errs = append(errs, s.close())
		}
	}
	return errors.Join(append(errs, sys.Unmap(p.all))...)
}

// grow registers pieces until there are n.
func (p *plot) grow(n int) error {
	for i := len(p.mrs); i < n; i++ {
		mr, err := p.far.pd.RegMR(p.all[i*p.piece:(i+1)*p.piece], onDemandAccess)
		if err != nil {
			return fmt.Errorf("region %d: %w", i, err)
		}
		p.mrs = append(p.mrs, mr)
	}
	return nil
}

func (p *plot) closeRegions() error {
	var errs []error
	for _, mr := range p.mrs {
		if err := mr.Close(); err != nil {
			errs = append(errs, err)
		}
	}
	p.mrs = nil
	return errors.Join(errs...)
}

// write writes 8 bytes into a region and waits.
func (p *plot) write(mr *verbs.MR) error {
	p.wrs[0].RemoteAddr, p.wrs[0].RKey = mr.Addr(), mr.RKey()
	return p.near.postAndWait(p.wrs)
}

// visit writes to regions again and again, and returns the median time of a write
// in nanoseconds. The first write to each region is not counted.
func (p *plot) visit(mrs []*verbs.MR, d time.Duration) (float64, error) {
	for _, mr := range mrs {
		if err := p.write(mr); err != nil {
			return 0, err
		}
	}
	keep := newSampler(maxSamples)
	for end := time.Now().Add(d); ; {
		for _, mr := range mrs {
			began := time.Now()
			if err := p.write(mr); err != nil {
				return 0, err
			}
			if !keep.add(time.Since(began)) {
				return keep.quantiles(0.5)[0], nil
			}
		}
		if time.Now().After(end) {
			return keep.quantiles(0.5)[0], nil
		}
	}
}

// choose returns k regions of those that there are, at random.
func (p *plot) choose(k int) []*verbs.MR {
	random := rand.New(rand.NewPCG(5, 6))
	list := make([]*verbs.MR, min(k, len(p.mrs)))
	for i, j := range random.Perm(len(p.mrs))[:len(list)] {
		list[i] = p.mrs[j]
	}
	return list
}

// mostTouched is how many regions are written to at random: each takes a page of
// memory from then on.
const mostTouched = 100_000

// measureRegions returns
//
//  1. how long a write to one of fewRegions takes while there are no others;
//  2. how long it takes when there are n;
//  3. how long a write to any of n takes;
//  4. by how many bytes a region that is never accessed makes the process grow, without
//     the pointer in this program's slice;
//  5. how long it takes to register a region.
func measureRegions(n int, d time.Duration) (values []float64, err error) {
	page := os.Getpagesize()
	all, err := sys.Reserve(max(n, fewRegions) * page)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	p, err := newPlot(all, page)
	if err != nil {
		return nil, errors.Join(err, sys.Unmap(all))
	}
	defer func() { err = errors.Join(err, p.close()) }()
	p.mrs = make([]*verbs.MR, 0, max(n, fewRegions)) // now, so that the slice does not grow meanwhile
	if err := p.grow(fewRegions); err != nil {
		return nil, err
	}
	first := p.choose(fewRegions)
	few, err := p.visit(first, d)
	if err != nil {
		return nil, err
	}
	before, err := residentBytes()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := p.grow(n); err != nil {
		return nil, err
	}
	took := time.Since(began)
	after, err := residentBytes()
	if err != nil {
		return nil, err
	}
	grown := max(1, len(p.mrs)-fewRegions)
	each := float64(after-before)/float64(grown) - 8
	many, err := p.visit(first, d)
	if err != nil {
		return nil, err
	}
	anywhere, err := p.visit(p.choose(mostTouched), d)
	if err != nil {
		return nil, err
	}
	return []float64{few, many, anywhere, each, float64(took) / 1e3 / float64(grown)}, nil
}

// measureClosing returns how many seconds it takes, and how many of CPU time, to
// close n regions of 2 MiB whose pages are all present. All regions have the same 2 MiB of
// memory, mapped n times: the page tables of the kernel and of the device are as large as
// for n times the memory, which the machine need not have.
func measureClosing(n int) (values []float64, err error) {
	const piece = 2 << 20
	all, err := sys.Fold(piece, n)
	if err != nil {
		return nil, err
	}
	p, err := newPlot(all, piece)
	if err != nil {
		return nil, errors.Join(err, sys.Unmap(all))
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.grow(n); err != nil {
		return nil, err
	}
	for i, mr := range p.mrs {
		if err := p.far.pd.AdviseMR(verbs.AdvisePrefetchWrite, verbs.AdviseFlush, mr.SGE(0, piece)); err != nil {
			return nil, err
		}
		if s := mr.PagingStats(); s.PrefetchPages != uint64(piece/os.Getpagesize()) {
			return nil, fmt.Errorf("region %d: %d pages were prefetched", i, s.PrefetchPages)
		}
	}
	began, used := time.Now(), sys.CPUTime()
	err = p.closeRegions()
	return []float64{time.Since(began).Seconds(), (sys.CPUTime() - used).Seconds()}, err
}
