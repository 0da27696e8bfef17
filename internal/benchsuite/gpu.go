package main

// Memory of software GPUs: WRITEs into it, copies of its engine, and what it costs if there is too little of it.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

// makeVRAM makes a buffer in the memory of a software GPU.
func (b *buffer) makeVRAM(pd *verbs.PD, n int) (err error) {
	if b.gpu, err = gpu.Open("soft:0", nil); err != nil {
		return err
	}
	if b.vram, err = b.gpu.Alloc(uint64(n)); err != nil {
		return err
	}
	b.bytes, b.addr = make([]byte, n), b.vram.Addr()
	b.mr, err = pd.RegGPU(b.vram, everything)
	return err
}

// gpuWrite compares WRITEs into VRAM with WRITEs into mapped memory.
func (b *bench) gpuWrite(newRig func(spec) (*rig, error), link verbs.LinkMode, depth int) ([]contender, error) {
	sp := spec{Link: link, Type: verbs.RC, QPs: 1, Size: 64 << 10, Slots: 1, Sends: depth, Mapped: true}
	list, under := 1, depth
	if link == verbs.LinkLoop {
		sp.Slots, list, under = depth, depth, 1
	}
	const plain = "into host memory"
	var cs []contender
	for _, c := range []struct {
		name string
		kind memory
	}{{plain, ""}, {"into VRAM", inVRAM}} {
		sp.Into = c.kind
		r, err := newRig(sp)
		if err != nil {
			return nil, err
		}
		rw := row{name: c.name, unit: "GB/s"}
		if c.kind != "" {
			rw.against, rw.goal = plain, &goal{"≥", 0.9}
		}
		cs = append(cs, r.bandwidth(rw, verbs.OpRDMAWrite, list, under, inTurn, modePassive))
	}
	return cs, nil
}

// timed is a contender that moves so many bytes each time that move is called.
func timed(rw row, bytes int, move func() error) contender {
	return contender{rows: []row{rw}, rates: func(d time.Duration) ([]rate, error) {
		before, err := cpuWith(nil)
		if err != nil {
			return nil, err
		}
		start, n := time.Now(), 0
		for ; time.Since(start) < d; n++ {
			if err := move(); err != nil {
				return nil, err
			}
		}
		took := time.Since(start)
		after, err := cpuWith(nil)
		return []rate{rateOf(float64(n)*float64(bytes)/1e9, took, after-before)}, err
	}}
}

const (
	copySize  = 1 << 20 // of one copy
	copyDepth = 16      // copies that are queued before they are waited for
)

// gpuCopy compares the copy engine with copy.
func (b *bench) gpuCopy() ([]contender, error) {
	d, err := gpu.Open("soft:0", &gpu.Config{VRAM: 3 * copyDepth * copySize})
	if err != nil {
		return nil, err
	}
	b.later(d.Close)
	s, err := d.NewStream()
	if err != nil {
		return nil, err
	}
	var bufs [2]*gpu.Buffer
	for i := range bufs {
		if bufs[i], err = d.Alloc(copyDepth * copySize); err != nil {
			return nil, err
		}
	}
	from, to := make([]byte, copyDepth*copySize), make([]byte, copyDepth*copySize)
	fill(from)
	const plain = "copy()"
	each := func(do func(off uint64) error) func() error {
		return func() error {
			for i := range uint64(copyDepth) {
				if err := do(i * copySize); err != nil {
					return err
				}
			}
			return s.Sync(context.Background())
		}
	}
	good := &goal{"≥", 0.9}
	return []contender{
		timed(row{name: plain, unit: "GB/s"}, copyDepth*copySize, func() error { copy(to, from); return nil }),
		timed(row{"to VRAM", "GB/s", plain, good}, copyDepth*copySize, each(func(off uint64) error {
			return s.Copy(bufs[0].At(off, copySize), gpu.Host(from[off:][:copySize]))
		})),
		timed(row{"from VRAM", "GB/s", plain, good}, copyDepth*copySize, each(func(off uint64) error {
			return s.Copy(gpu.Host(to[off:][:copySize]), bufs[0].At(off, copySize))
		})),
		timed(row{"within VRAM", "GB/s", plain, good}, copyDepth*copySize, each(func(off uint64) error {
			return s.Copy(bufs[1].At(off, copySize), bufs[0].At(off, copySize))
		})),
	}, nil
}

// gpuEvict compares a GPU whose memory is half of what a program uses with one that has room for all. The program
// works on a quarter of its objects at a time, four times each, and then on the next quarter.
func (b *bench) gpuEvict() ([]contender, error) {
	const (
		objects = 32
		size    = 1 << 20
		times   = 4
	)
	const resident = "all objects resident"
	from := make([]byte, size)
	fill(from)
	var cs []contender
	for i, name := range []string{resident, "twice as many as fit"} {
		d, err := gpu.Open(fmt.Sprintf("soft:%d", i), &gpu.Config{VRAM: objects * size / uint64(i+1)})
		if err != nil {
			return nil, err
		}
		b.later(d.Close)
		s, err := d.NewStream()
		if err != nil {
			return nil, err
		}
		var bufs []*gpu.Buffer
		for range objects {
			buf, err := d.Alloc(size)
			if err != nil {
				return nil, err
			}
			bufs = append(bufs, buf)
		}
		quarter := 0
		phase := func() error {
			for range times {
				for k := range objects / 4 {
					if err := s.Copy(bufs[quarter*objects/4+k].All(), gpu.Host(from)); err != nil {
						return err
					}
				}
			}
			quarter = (quarter + 1) % 4
			return s.Sync(context.Background())
		}
		rw := row{name: name, unit: "GB/s"}
		var perSecond float64
		if i > 0 {
			rw.against, rw.goal = resident, &goal{"≥", 0.3}
		}
		c := timed(rw, times*objects/4*size, phase)
		rates := c.rates
		c.rates = func(t time.Duration) ([]rate, error) {
			before, start := d.Stats(), time.Now()
			got, err := rates(t)
			after := d.Stats()
			perSecond = float64(after.Evictions-before.Evictions) / time.Since(start).Seconds()
			if err == nil && i > 0 && after.Evictions == before.Evictions {
				err = errors.New("nothing was evicted")
			}
			return got, err
		}
		cs = append(cs, c)
		if i > 0 {
			cs = append(cs, contender{rows: []row{{name: "evictions of the row above", unit: "1/s"}}, run: func(time.Duration) ([]float64, error) {
				return []float64{perSecond}, nil
			}})
		}
	}
	return cs, nil
}
