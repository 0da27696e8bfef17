package main

// Indirect keys and device memory, compared with what programs do without them.

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// grid is a side's memory in elements with gaps: as a program has a column of a
// matrix, or a face of a grid.
type grid struct {
	*side
	bytes   []byte
	mr      *verbs.MR
	packed  []byte // room for the elements, one behind the other
	pmr     *verbs.MR
	element int
	key     *verbs.MKey
}

const gridElements = 1024

// newGrid makes a grid of elements with gaps of the same length, and a key that consists
// of the elements.
func (b *bench) newGrid(s *side, element int) (*grid, error) {
	f := &grid{side: s, element: element, bytes: make([]byte, 2*element*gridElements), packed: make([]byte, element*gridElements)}
	fill(f.bytes)
	var err error
	if f.mr, err = s.pd.RegMR(f.bytes, everything); err != nil {
		return nil, err
	}
	b.later(f.mr.Close)
	if f.pmr, err = s.pd.RegMR(f.packed, everything); err != nil {
		return nil, err
	}
	b.later(f.pmr.Close)
	if f.key, err = s.pd.CreateMKey(1); err != nil {
		return nil, err
	}
	b.later(f.key.Close)
	c := f.key.Interleaved(everything, gridElements, f.mr.Stride(0, element, element))
	return f, s.postAndWait([]verbs.SendWR{{Op: verbs.OpConfigureMKey, Flags: verbs.SendSignaled, Configure: c}})
}

func (f *grid) pack() {
	for i := range gridElements {
		copy(f.packed[i*f.element:][:f.element], f.bytes[2*i*f.element:])
	}
}

func (f *grid) unpack() {
	for i := range gridElements {
		copy(f.bytes[2*i*f.element:][:f.element], f.packed[i*f.element:])
	}
}

// grids makes a rig and a grid on either side of it.
func (b *bench) grids(link verbs.LinkMode, element int) (from, to *grid, err error) {
	r, err := b.newRig(spec{Link: link, Type: verbs.RC, QPs: 1, Size: 64, Slots: 1, Sends: gridElements})
	if err != nil {
		return nil, nil, err
	}
	from, err1 := b.newGrid(r.near, element)
	to, err2 := b.newGrid(r.far, element)
	return from, to, errors.Join(err1, err2)
}

// one returns one WRITE of all elements, by the indirect keys of both grids.
func (f *grid) one(to *grid) []verbs.SendWR {
	return []verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, RKey: to.key.RKey(),
		SGL: []verbs.SGE{{Length: uint32(gridElements * f.element), LKey: f.key.LKey()}}}}
}

// many returns a WRITE for each element.
func (f *grid) many(to *grid) []verbs.SendWR {
	wrs := make([]verbs.SendWR, gridElements)
	for i := range wrs {
		wrs[i] = verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{f.mr.SGE(2*i*f.element, f.element)},
			RemoteAddr: to.mr.Addr() + uint64(2*i*f.element), RKey: to.mr.RKey()}
	}
	wrs[gridElements-1].Flags = verbs.SendSignaled
	return wrs
}

// packedOne returns one WRITE of the packed elements.
func (f *grid) packedOne(to *grid) []verbs.SendWR {
	return []verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{f.pmr.SGE(0, len(f.packed))},
		RemoteAddr: to.pmr.Addr(), RKey: to.pmr.RKey()}}
}

// check compares what has arrived.
func (f *grid) check(to *grid) error {
	for i := range gridElements {
		at := 2 * i * f.element
		if string(to.bytes[at:at+f.element]) != string(f.bytes[at:at+f.element]) {
			return fmt.Errorf("element %d has not arrived", i)
		}
	}
	return nil
}

// umrWrite compares one WRITE of scattered elements with a WRITE for each, and with
// packing them first and unpacking them there. The ratios are of times; the goals are how
// many times faster one WRITE is.
func (b *bench) umrWrite(link verbs.LinkMode, element int, againstMany, againstPacked *goal) ([]contender, error) {
	from, to, err := b.grids(link, element)
	if err != nil {
		return nil, err
	}
	one, many, packed := from.one(to), from.many(to), from.packedOne(to)
	checked := func(do func() error) func() error {
		return func() error {
			if err := do(); err != nil {
				return err
			}
			i := gridElements - 1 // the rest is checked once
			if from.bytes[2*i*element] != to.bytes[2*i*element] {
				return errors.New("the last element has not arrived")
			}
			return nil
		}
	}
	by := checked(func() error { return from.postAndWait(one) })
	clear(to.bytes)
	if err := errors.Join(by(), from.check(to)); err != nil {
		return nil, err
	}
	const umr = "one WRITE, by indirect keys"
	var cs []contender
	cs = append(cs, each(row{name: umr}, by))
	if againstMany != nil {
		cs = append(cs, each(row{name: fmt.Sprintf("%d WRITEs", gridElements), against: umr, goal: againstMany},
			checked(func() error { return from.postAndWait(many) })))
	}
	return append(cs, each(row{name: "pack, one WRITE, unpack", against: umr, goal: againstPacked}, checked(func() error {
		from.pack()
		if err := from.postAndWait(packed); err != nil {
			return err
		}
		to.unpack()
		return nil
	}))), nil
}

// umrConfigure measures configuring a key of 16 pieces, from post to completion. The keys
// are invalidated between two measurements.
func (b *bench) umrConfigure() ([]contender, error) {
	const keys = 16
	r, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: 1 << 20, Slots: 1, Sends: keys})
	if err != nil {
		return nil, err
	}
	s := r.near
	other, err := s.pd.RegMR(make([]byte, 1<<20), everything)
	if err != nil {
		return nil, err
	}
	b.later(other.Close)
	var cs []contender
	for _, c := range []struct {
		name    string
		regions []*verbs.MR
		goal    *goal
	}{{"16 pieces of one region", []*verbs.MR{s.rx.mr}, &goal{"<", 1}}, {"16 pieces of two regions in turn", []*verbs.MR{s.rx.mr, other}, nil}} {
		var free []verbs.SendWR
		var configure [keys][]verbs.SendWR
		for k := range keys {
			key, err := s.pd.CreateMKey(16)
			if err != nil {
				return nil, err
			}
			b.later(key.Close)
			cfg := key.List(everything)
			for i := range 16 {
				cfg.List = append(cfg.List, c.regions[i%len(c.regions)].SGE(i*4096, 64))
			}
			free = append(free, verbs.SendWR{Op: verbs.OpLocalInv, InvalidateKey: key.LKey()})
			configure[k] = []verbs.SendWR{{Op: verbs.OpConfigureMKey, Flags: verbs.SendSignaled, Configure: cfg}}
		}
		free[keys-1].Flags = verbs.SendSignaled
		cs = append(cs, contender{rows: []row{{name: c.name, unit: "µs", goal: c.goal}}, run: func(d time.Duration) ([]float64, error) {
			var took []float64
			for start := time.Now(); len(took) == 0 || time.Since(start) < d; {
				if err := s.postAndWait(free); err != nil {
					return nil, err
				}
				begin := time.Now()
				for k := range configure {
					if err := s.postAndWait(configure[k]); err != nil {
						return nil, err
					}
				}
				took = append(took, time.Since(begin).Seconds()*1e6/keys)
			}
			return []float64{median(took)}, nil
		}})
	}
	return cs, nil
}

// deviceMemory compares WRITEs and atomics into device memory with those into pinned
// memory.
func (b *bench) deviceMemory() ([]contender, error) {
	sp := eight(verbs.LinkLoop, verbs.RC)
	sp.Mapped = true
	r, err := b.newRig(sp)
	if err != nil {
		return nil, err
	}
	dm, err := r.far.dev.AllocDM(64, 6)
	if err != nil {
		return nil, err
	}
	b.later(dm.Close)
	mr, err := r.far.pd.RegDMMR(dm, 0, 64, everything|verbs.AccessZeroBased)
	if err != nil {
		return nil, err
	}
	b.later(mr.Close)
	var cs []contender
	for _, op := range []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpAtomicFetchAdd} {
		host := fmt.Sprintf("%v, pinned host memory", op)
		for _, c := range []struct {
			r    row
			addr uint64
			rkey uint32
		}{
			{row{name: host}, r.near.peer.Rx, r.near.peer.RxKey},
			{row{name: fmt.Sprintf("%v, device memory", op), against: host, goal: &goal{"≤", 1.05}}, 0, mr.RKey()},
		} {
			wrs := []verbs.SendWR{{Op: op, Flags: verbs.SendSignaled, SGL: []verbs.SGE{r.near.tx.sge(0, 8)}, RemoteAddr: c.addr, RKey: c.rkey, CompareAdd: 1}}
			cs = append(cs, each(c.r, func() error { return r.near.postAndWait(wrs) }))
		}
	}
	return append(cs, each(row{name: "alloc and free, 64 bytes"}, func() error {
		m, err := r.far.dev.AllocDM(64, 6)
		if err != nil {
			return err
		}
		return m.Close()
	})), nil
}
