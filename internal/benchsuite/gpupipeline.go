package main

// Pipelines of software GPUs with the costs of a real one.

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	pipeSlow  = 32 // the profile's bandwidths are divided by this: no host copies as fast as a GPU does
	pipeSlots = 4  // of 1 MiB, in each stage
	pipeBatch = 64 // copies that are queued before the last one is waited for
)

// slowed returns the profile with bandwidths that a host can keep up with.
func slowed(c gpu.Costs) gpu.Costs {
	for _, way := range []*gpu.Cost{&c.ToDevice, &c.FromDevice, &c.Within, &c.BAR} {
		way.Bandwidth /= pipeSlow
	}
	return c
}

// pipeEnd is a GPU at one end of a pipeline.
type pipeEnd struct {
	stream *gpu.Stream
	vram   *gpu.Buffer
}

func (b *bench) newPipeEnd(name string) (e pipeEnd, err error) {
	d, err := gpu.Open(name, &gpu.Config{VRAM: 2 * pipeSlots * copySize, Costs: slowed(gpu.H200)})
	if err != nil {
		return e, err
	}
	b.later(d.Close)
	if e.stream, err = d.NewStream(); err != nil {
		return e, err
	}
	e.vram, err = d.Alloc(pipeSlots * copySize)
	return e, err
}

// slot returns slot i of the end's memory.
func (e pipeEnd) slot(i int) gpu.Mem { return e.vram.At(uint64(i)*copySize, copySize) }

// pipeline is a way from the memory of one GPU through the host's to that of another: copied out, written by RDMA,
// copied in. Fences put it in order.
type pipeline struct {
	*rig
	from, to pipeEnd
	consumed [pipeSlots]*gpu.Event // when the slot may be filled again
}

// batch queues pipeBatch copies, and waits for the last.
func (p *pipeline) batch() error {
	for i := range pipeBatch {
		k := i % pipeSlots
		if err := p.queue(k, i == pipeBatch-1); err != nil {
			return err
		}
	}
	if err := p.to.stream.Sync(context.Background()); err != nil {
		return err
	}
	for {
		if wcs, err := p.near.poll(); err != nil || len(wcs) > 0 {
			return err
		}
	}
}

// queue queues one copy.
func (p *pipeline) queue(slot int, signaled bool) error {
	off := slot * copySize
	if e := p.consumed[slot]; e != nil {
		if err := p.from.stream.Wait(e); err != nil {
			return err
		}
	}
	if err := p.from.stream.Copy(gpu.Host(p.near.tx.bytes[off:][:copySize]), p.from.slot(slot)); err != nil {
		return err
	}
	out, err := p.from.stream.Record()
	if err != nil {
		return err
	}
	arrived := gpu.NewFence("a copy has arrived")
	wrs := []verbs.SendWR{
		{Op: verbs.OpWaitFence, Fence: out},
		{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{p.near.tx.sge(off, copySize)}, RemoteAddr: p.near.peer.Rx + uint64(off), RKey: p.near.peer.RxKey},
		{Op: verbs.OpSignalFence, Fence: arrived},
	}
	if signaled {
		wrs[2].Flags = verbs.SendSignaled
	}
	if _, err := p.near.qps[0].PostSend(wrs); err != nil {
		return err
	}
	if err := p.to.stream.Wait(arrived); err != nil {
		return err
	}
	if err := p.to.stream.Copy(p.to.slot(slot), gpu.Host(p.far.rx.bytes[off:][:copySize])); err != nil {
		return err
	}
	p.consumed[slot], err = p.to.stream.Record()
	return err
}

// check compares what has arrived with what was sent.
func (p *pipeline) check() error {
	sent, got := make([]byte, pipeSlots*copySize), make([]byte, pipeSlots*copySize)
	if _, err := p.from.vram.ReadAt(sent, 0); err != nil {
		return err
	}
	if _, err := p.to.vram.ReadAt(got, 0); err != nil {
		return err
	}
	if !bytes.Equal(sent, got) {
		return errors.New("the second GPU does not have what the first one has sent")
	}
	return nil
}

// gpuPipeline compares a pipeline from GPU to GPU with the copies of one GPU alone.
func (b *bench) gpuPipeline() ([]contender, error) {
	r, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: copySize, Slots: pipeSlots, Sends: 3 * pipeBatch, Mapped: true})
	if err != nil {
		return nil, err
	}
	p := &pipeline{rig: r}
	if p.from, err = b.newPipeEnd("soft:0"); err != nil {
		return nil, err
	}
	if p.to, err = b.newPipeEnd("soft:1"); err != nil {
		return nil, err
	}
	if _, err := p.from.vram.WriteAt(r.near.tx.bytes[:pipeSlots*copySize], 0); err != nil {
		return nil, err
	}
	host := make([]byte, pipeSlots*copySize)
	const alone = "from VRAM, alone"
	whole := timed(row{"from VRAM, WRITE, to VRAM", "GB/s", alone, &goal{"≥", 0.85}}, pipeBatch*copySize, p.batch)
	rates := whole.rates
	whole.rates = func(d time.Duration) ([]rate, error) {
		got, err := rates(d)
		return got, errors.Join(err, p.check())
	}
	return []contender{
		timed(row{name: alone, unit: "GB/s"}, pipeBatch*copySize, func() error {
			for i := range pipeBatch {
				k := i % pipeSlots
				if err := p.from.stream.Copy(gpu.Host(host[k*copySize:][:copySize]), p.from.slot(k)); err != nil {
					return err
				}
			}
			return p.from.stream.Sync(context.Background())
		}),
		whole,
	}, nil
}
