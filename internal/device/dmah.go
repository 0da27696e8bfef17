package device

// DMA handles: hints for an adapter, which tells them to the PCI Express bus. A software device has
// no bus. It checks a hint and keeps it with the regions that are registered with it, so that
// programs find the mistakes that an adapter would find.

import (
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// maxDMAHs is how many handles a device has.
const maxDMAHs = 1 << 16

// maxPH is the highest processing hint: it has two bits (PCI Express 6.2, TLP Processing Hints).
const maxPH = 3

// DMAH is a DMA handle.
type DMAH struct {
	dev *Device
	cfg ib.DMAHConfig

	mu     sync.Mutex // guards what follows
	uses   int        // regions that are registered with it, or are being registered
	closed bool
}

// AllocDMAH makes a DMA handle. The errors come in the kernel's order.
func (d *Device) AllocDMAH(cfg ib.DMAHConfig) (provider.DMAH, error) {
	const op = "alloc_dmah"
	if s := cfg.Steering; s != nil {
		if s.MemType > ib.TPHPersistent {
			return nil, ib.Errorf(op, syscall.EINVAL, "%v", s.MemType)
		}
		if s.CPU < 0 || s.CPU >= sys.PossibleCPUs() {
			return nil, ib.Errorf(op, syscall.EINVAL, "there is no processor %d", s.CPU)
		}
		if !sys.MayRunOn(s.CPU) {
			return nil, ib.Errorf(op, syscall.EPERM, "the caller may not run on processor %d", s.CPU)
		}
		own := *s
		cfg.Steering = &own
	}
	if cfg.PH > maxPH {
		return nil, ib.Errorf(op, syscall.EINVAL, "processing hint %d; the highest is %d", cfg.PH, maxPH)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.countLocked(op, &d.counts.dmahs, maxDMAHs); err != nil {
		return nil, err
	}
	return &DMAH{dev: d, cfg: cfg}, nil
}

// Config returns the hint.
func (h *DMAH) Config() ib.DMAHConfig {
	cfg := h.cfg
	if cfg.Steering != nil {
		own := *cfg.Steering
		cfg.Steering = &own
	}
	return cfg
}

// Register has reg register a region of pd, which keeps the handle in use until it is closed.
func (h *DMAH) Register(pd provider.PD, access ib.Access, reg func() (provider.MR, error)) (provider.MR, error) {
	const op = "reg_mr"
	p, ok := pd.(*PD)
	switch {
	case !ok || p.dev != h.dev:
		return nil, ib.Errorf(op, syscall.EINVAL, "the DMA handle belongs to another device")
	case access&ib.AccessOnDemand != 0:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "a region on demand has no DMA handle")
	case !h.use(1):
		return nil, ib.Errorf(op, syscall.EINVAL, "the DMA handle is closed")
	}
	r, err := reg()
	if err != nil {
		h.use(-1)
		return nil, err
	}
	mr := r.(*MR)
	mr.mu.Lock()
	mr.dmah = h
	mr.mu.Unlock()
	return mr, nil
}

// use changes the number of regions. It reports whether the handle is open.
func (h *DMAH) use(by int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	h.uses += by
	return true
}

// DMAH returns the handle that the region was registered with, or nil.
func (m *MR) DMAH() provider.DMAH {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dmah == nil {
		return nil
	}
	return m.dmah
}

// Close frees the handle, unless regions were registered with it and are open.
func (h *DMAH) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	if h.uses > 0 {
		return ib.Errorf("dealloc_dmah", syscall.EBUSY, "%d regions are registered with it", h.uses)
	}
	h.closed = true
	h.dev.mu.Lock()
	h.dev.counts.dmahs--
	h.dev.mu.Unlock()
	return nil
}
