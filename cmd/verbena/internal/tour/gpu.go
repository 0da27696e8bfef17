package tour

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

// gpuSteps are a tour of memory of software GPUs: each device has one beside it.
var gpuSteps = []step{
	{"RC", "WRITE into VRAM", vramStep},
	{"RC", "evict", vramEvictStep},
	{"RC", "fences", vramFencesStep},
	{"RC", "KV cache", kvCacheStep},
	{"RC", "BAR", barStep},
	{"RC", "no peer", noPeerStep},
	{"RC", "a circle of waits", circleStep},
	{"RC", "free", vramFreeStep},
}

// gpus are two software GPUs, each beside a device, and a connection of the devices.
type gpus struct {
	*lab
	*pair
	near, far *gpu.Device
	stream    *gpu.Stream // of near
	mrs       []*verbs.MR
}

const vramSize = 1 << 20

// withGPUs runs a step with two GPUs.
func withGPUs(l *lab, cfg gpu.Config, f func(g *gpus) (string, error)) (string, error) {
	if cfg.VRAM == 0 {
		cfg.VRAM = vramSize
	}
	return l.withPair(verbs.RC, func(p *pair) (detail string, err error) {
		g := &gpus{lab: l, pair: p}
		if g.near, err = gpu.Open("soft:0", &cfg); err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, g.near.Close()) }()
		if g.far, err = gpu.Open("soft:1", &cfg); err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, g.far.Close()) }()
		if g.stream, err = g.near.NewStream(); err != nil {
			return "", err
		}
		detail, err = f(g)
		for _, mr := range g.mrs {
			err = errors.Join(err, mr.Close())
		}
		return detail, err
	})
}

// reg allocates memory and registers it on the device beside its GPU.
func (g *gpus) reg(n *node, d *gpu.Device, size uint64) (*gpu.Buffer, *verbs.MR, error) {
	b, err := d.Alloc(size)
	if err != nil {
		return nil, nil, err
	}
	mr, err := n.pd.RegGPU(b, bufferRights)
	if err == nil {
		g.mrs = append(g.mrs, mr)
	}
	return b, mr, err
}

// request executes a request of the first device, from or to its host memory.
func (g *gpus) request(op verbs.Opcode, off int, mr *verbs.MR) error {
	if err := post(g.pair.a, verbs.SendWR{Op: op, SGL: []verbs.SGE{g.lab.a.mr.SGE(off, half)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()}); err != nil {
		return err
	}
	wc := verbs.WCRDMAWrite
	if op == verbs.OpRDMARead {
		wc = verbs.WCRDMARead
	}
	_, err := g.expect(g.lab.a.cq, wc)
	return err
}

// written makes a GPU's memory, registers it with the second device, and has the first one write to it.
func (g *gpus) written() (b *gpu.Buffer, mr *verbs.MR, data []byte, err error) {
	if b, mr, err = g.reg(g.lab.b, g.far, half); err != nil {
		return nil, nil, nil, err
	}
	data = bytes.Clone(g.source(g.lab.a, half))
	return b, mr, data, g.request(verbs.OpRDMAWrite, 0, mr)
}

// reads has the memory read by the peer, and compares.
func (g *gpus) reads(mr *verbs.MR, want []byte) error {
	_, off := g.lab.a.sink(half)
	if err := g.request(verbs.OpRDMARead, off, mr); err != nil {
		return err
	}
	return same(g.lab.a.buf[half:], want)
}

func vramStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{}, func(g *gpus) (string, error) {
		b, mr, data, err := g.written()
		if err != nil {
			return "", err
		}
		got := make([]byte, half)
		if _, err := b.ReadAt(got, 0); err != nil {
			return "", err
		}
		if err := errors.Join(same(got, data), g.reads(mr, data)); err != nil {
			return "", err
		}
		p, err := gpu.Lookup(mr.Addr() + 100)
		if err != nil || p.ID != b.ID() || p.Offset != 100 || p.CPU {
			return "", fmt.Errorf("the address belongs to %+v: %w", p, err)
		}
		return fmt.Sprintf("%d KiB at the GPU's own address, where a load of the CPU would fault; read back by the peer", half>>10), nil
	})
}

// vramEvictStep fills the VRAM, so that an object is evicted while its region stays.
func vramEvictStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{}, func(g *gpus) (string, error) {
		b, mr, data, err := g.written()
		if err != nil {
			return "", err
		}
		other, err := g.far.Alloc(vramSize)
		if err != nil {
			return "", err
		}
		if b.Resident() || !other.Resident() {
			return "", errors.New("the object was not evicted")
		}
		if err := g.reads(mr, data); err != nil {
			return "", fmt.Errorf("in system memory: %w", err)
		}
		if err := other.Free(); err != nil {
			return "", err
		}
		if err := b.Prefetch(l.ctx); err != nil || !b.Resident() {
			return "", fmt.Errorf("the object does not come back: %w", err)
		}
		if err := g.reads(mr, data); err != nil {
			return "", err
		}
		st := g.far.Stats()
		return fmt.Sprintf("%d eviction and %d return, %d moves; the peer's READs have the data in both places", st.Evictions, st.Returns, st.Moves), nil
	})
}

// vramFencesStep orders a GPU, the devices and the other GPU without waiting in between.
func vramFencesStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{}, func(g *gpus) (string, error) {
		from, fromMR, err := g.reg(l.a, g.near, half)
		if err != nil {
			return "", err
		}
		to, toMR, err := g.reg(l.b, g.far, half)
		if err != nil {
			return "", err
		}
		consumer, err := g.far.NewStream()
		if err != nil {
			return "", err
		}
		gate, arrived := gpu.NewFence("go"), gpu.NewFence("arrived")
		var made *gpu.Event
		err = errors.Join(g.stream.Wait(gate), g.stream.Fill(from.All(), 0x5a))
		if err == nil {
			made, err = g.stream.Record()
		}
		if err != nil {
			return "", err
		}
		sum := make([]byte, 4)
		result, err := g.far.Alloc(4)
		if err != nil {
			return "", err
		}
		if err := errors.Join(post(g.pair.a,
			verbs.SendWR{Op: verbs.OpWaitFence, Fence: made},
			verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{fromMR.SGE(0, half)}, RemoteAddr: toMR.Addr(), RKey: toMR.RKey()},
			verbs.SendWR{Op: verbs.OpSignalFence, Fence: arrived}),
			consumer.Wait(arrived), consumer.Reduce(result.All(), to.All(), gpu.Uint32), consumer.Copy(gpu.Host(sum), result.All())); err != nil {
			return "", err
		}
		if made.Signaled() || arrived.Signaled() {
			return "", errors.New("the work has not waited")
		}
		gate.Signal(nil)
		if err := consumer.Sync(l.ctx); err != nil {
			return "", err
		}
		for _, op := range []verbs.WCOpcode{verbs.WCWaitFence, verbs.WCRDMAWrite, verbs.WCSignalFence} {
			if _, err := g.expect(l.a.cq, op); err != nil {
				return "", err
			}
		}
		word := uint32(0x5a5a5a5a)
		want := word * (half / 4)
		if got := uint32(sum[0]) | uint32(sum[1])<<8 | uint32(sum[2])<<16 | uint32(sum[3])<<24; got != want {
			return "", fmt.Errorf("the sum is %#x, should be %#x", got, want)
		}
		return "kernel → event → WRITE → fence → kernel on the other GPU: all queued before the first began", nil
	})
}

// kvCacheStep moves many small blocks of one GPU into other places of another one by one WRITE.
func kvCacheStep(l *lab) (string, error) {
	const blocks, size = 64, 512
	return withGPUs(l, gpu.Config{}, func(g *gpus) (detail string, err error) {
		from, fromMR, err := g.reg(l.a, g.near, half)
		if err != nil {
			return "", err
		}
		to, toMR, err := g.reg(l.b, g.far, half)
		if err != nil {
			return "", err
		}
		data := bytes.Clone(l.source(l.a, half))
		if err := errors.Join(g.stream.Copy(from.All(), gpu.Host(data)), g.stream.Sync(l.ctx)); err != nil {
			return "", err
		}
		want := make([]byte, half)
		w := &bench{lab: l, pair: g.pair}
		defer func() {
			for _, k := range w.keys {
				err = errors.Join(err, k.Close())
			}
		}()
		var src, dst []verbs.SGE
		for i, j := range l.rand.Perm(half / size)[:blocks] {
			src = append(src, fromMR.SGE(j*size, size))
			dst = append(dst, toMR.SGE(i*2*size, size))
			copy(want[i*2*size:], data[j*size:][:size])
		}
		here, err := w.key(l.a, blocks, func(k *verbs.MKey) *verbs.MKeyConfig {
			return k.List(verbs.AccessLocalWrite, src...)
		})
		if err != nil {
			return "", err
		}
		there, err := w.key(l.b, blocks, func(k *verbs.MKey) *verbs.MKeyConfig {
			return k.List(opened, dst...)
		})
		if err != nil {
			return "", err
		}
		if _, err := w.write(verbs.SGE{Length: blocks * size, LKey: here.LKey()}, there.RKey()); err != nil {
			return "", err
		}
		got := make([]byte, half)
		if _, err := to.ReadAt(got, 0); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d blocks of %d bytes, scattered in both GPUs, by one WRITE", blocks, size), same(got, want)
	})
}

func barStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{VRAM: 4 << 20, BAR: 1 << 20}, func(g *gpus) (string, error) {
		b, err := g.far.Alloc(2 << 20)
		if err != nil {
			return "", err
		}
		if err := b.Pin(); !errors.Is(err, gpu.ErrBAR) {
			return "", fmt.Errorf("a pin beyond the BAR: %w", err)
		}
		if err := g.far.ResizeBAR(2 << 20); err != nil {
			return "", err
		}
		if err := b.Pin(); err != nil {
			return "", err
		}
		seen, err := b.Map()
		if err != nil || uint64(len(seen)) != b.Len() {
			return "", fmt.Errorf("%d bytes: %w", len(seen), err)
		}
		return "2 MiB cannot be pinned behind a BAR of 1 MiB; resized to 2 MiB it shows them, to the CPU as well", b.Unmap()
	})
}

// noPeerStep has a device without a way to the GPU register its memory.
func noPeerStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{Distance: func(any) int { return -1 }}, func(g *gpus) (string, error) {
		b, mr, data, err := g.written()
		if err != nil {
			return "", err
		}
		if b.Resident() {
			return "", errors.New("the memory lies in VRAM")
		}
		return "a device without a peer-to-peer path forces the object into system memory, and works there", g.reads(mr, data)
	})
}

func circleStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{}, func(g *gpus) (string, error) {
		x, y := gpu.NewFence("x"), gpu.NewFence("y")
		if err := errors.Join(post(g.pair.a, verbs.SendWR{Op: verbs.OpWaitFence, Fence: x}, verbs.SendWR{Op: verbs.OpSignalFence, Fence: y}),
			g.stream.Wait(y)); err != nil {
			return "", err
		}
		err := g.stream.Signal(x)
		if !errors.Is(err, gpu.ErrDeadlock) || !strings.Contains(err.Error(), `waits for "x" before it signals "y"`) {
			return "", fmt.Errorf("a circle is not found: %w", err)
		}
		x.Signal(nil)
		for _, op := range []verbs.WCOpcode{verbs.WCWaitFence, verbs.WCSignalFence} {
			if _, err := g.expect(l.a.cq, op); err != nil {
				return "", err
			}
		}
		return "a stream that waits for a queue pair that waits for the stream: refused, and both are named", g.stream.Sync(l.ctx)
	})
}

func vramFreeStep(l *lab) (string, error) {
	return withGPUs(l, gpu.Config{}, func(g *gpus) (string, error) {
		b, mr, _, err := g.written()
		if err != nil {
			return "", err
		}
		if err := b.Free(); err != nil {
			return "", err
		}
		if err := post(g.pair.a, verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{l.a.mr.SGE(half, 8)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()}); err != nil {
			return "", err
		}
		if err := b.Free(); !errors.Is(err, gpu.ErrFreed) {
			return "", fmt.Errorf("freed twice: %w", err)
		}
		return fmt.Sprintf("a peer that still accesses freed memory gets %q", verbs.WCRemAccessErr), l.expectStatus(l.a.cq, verbs.WCRemAccessErr)
	})
}
