package hmm

import (
	"errors"
	"sync"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/ib"
)

// chunk is how much of a GPU's memory the space takes at a time. It is contiguous there.
const chunk = 2 << 20

// GPUConfig is how a space uses a GPU; nil and the zero value mean the defaults.
type GPUConfig struct {
	// GPU is what the GPU is like, if it is opened here for the first time: see gpu.Open.
	GPU *gpu.Config
	// Limit is how much of the GPU's memory pages may take; 0: all that the CPU reaches.
	Limit uint64
}

// Device is a GPU whose memory pages may move to.
type Device struct {
	space *Space
	id    int
	gpu   *gpu.Device // the space's own, so that the program can close its
	limit uint64

	mu     sync.Mutex // guards what follows, and is held while memory is taken
	chunks []*gpu.Buffer
	taken  uint64
}

// AddGPU makes a GPU a device of the space, until Close. It is opened anew: the program need not have it open. Its memory is
// taken when pages need it, 2 MiB at a time, and kept.
//
// Errors: those of gpu.Open; ENOSPC, if the space has 63 devices.
func (s *Space) AddGPU(name string, cfg *GPUConfig) (*Device, error) {
	const op = "hmm_add_gpu"
	if cfg == nil {
		cfg = new(GPUConfig)
	}
	if s == nil {
		return nil, s.begin(op)
	}
	g, err := gpu.Open(name, cfg.GPU)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var id int
	if s.closed {
		err = ib.Errorf(op, errClosed, "the space is closed")
	} else {
		id, err = s.engine.addDevice()
		err = explain(op, err)
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	d := &Device{space: s, id: id, gpu: g, limit: cfg.Limit}
	if d.limit == 0 || d.limit > g.BAR() {
		d.limit = g.BAR()
	}
	s.devices = append(s.devices, d)
	return d, nil
}

// Name returns the GPU's name.
func (d *Device) Name() string { return d.gpu.Name() }

// close gives the GPU's memory back. The engine is closed.
func (d *Device) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var err error
	for _, b := range d.chunks {
		err = errors.Join(err, b.Free())
	}
	d.chunks = nil
	return errors.Join(err, d.gpu.Close())
}

// room makes sure that there is memory for so many pages, as far as the limit and the GPU allow. It fails if there is none
// at all.
func (d *Device) room(pages uint64) error {
	for {
		free, err := d.space.engine.freeVRAM(d.id)
		if err != nil {
			return explain("hmm_vram", err)
		}
		if free >= pages {
			return nil
		}
		if !d.grow() {
			if free == 0 {
				return ib.Errorf("hmm_vram", errNoVRAM, "no memory of %s is left for pages", d.Name())
			}
			return nil
		}
	}
}

// grow takes more of the GPU's memory, and reports whether it has.
func (d *Device) grow() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := min(uint64(chunk), d.limit-min(d.limit, d.taken)) &^ (page - 1)
	for ; n >= page; n = n / 2 &^ (page - 1) { // what is left may lie in pieces
		b, err := d.gpu.AllocWith(n, gpu.AllocOptions{Contiguous: true, CPU: true})
		if err != nil {
			continue
		}
		fd, off, err := b.File()
		if err == nil {
			err = d.space.engine.addVRAM(d.id, b.Bytes(), fd, off)
		}
		if err != nil {
			_ = b.Free() // there is no more memory, whatever the reason
			return false
		}
		d.chunks = append(d.chunks, b)
		d.taken += n
		return true
	}
	return false
}

// Free returns how many pages fit into the memory that the space has of the GPU, without taking more.
func (d *Device) Free() uint64 {
	if d.space.begin("") != nil {
		return 0
	}
	defer d.space.mu.RUnlock()
	n, _ := d.space.engine.freeVRAM(d.id)
	return n
}
