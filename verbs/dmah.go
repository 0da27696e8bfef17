package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// DMAH is a DMA handle: a hint how the memory of a region is used, which an adapter passes on to the
// processor's caches (TLP processing hints of PCI Express). See ibv_alloc_dmah(3).
//
// A software device has no bus between itself and memory. It checks the hint as an adapter does, keeps
// it ([MR.DMAH]), and copies as without.
type DMAH struct {
	p provider.DMAH
}

// AllocDMAH makes a DMA handle.
//
// Errors: EINVAL for an unknown kind of memory, or a processor that the machine cannot have; EPERM for
// a processor on which the calling thread may not run; EINVAL for a processing hint above 3; ENOMEM if
// there are too many handles; ENODEV if the device is closed; EINVAL for a nil device.
func (d *Device) AllocDMAH(cfg DMAHConfig) (*DMAH, error) {
	if !d.ok() {
		return nil, invalid("alloc_dmah", "nil device")
	}
	p, err := d.p.AllocDMAH(cfg)
	if err != nil {
		return nil, err
	}
	return &DMAH{p}, nil
}

// Config returns the hint.
func (h *DMAH) Config() DMAHConfig { return h.p.Config() }

// RegMR registers a slice as [PD.RegMR] does, with the hint.
//
// Errors: EINVAL if the handle is nil, closed or of another device; EOPNOTSUPP for AccessOnDemand; then
// those of [PD.RegMR].
func (h *DMAH) RegMR(pd *PD, buf []byte, access Access) (*MR, error) {
	return h.register(pd, access, func() (*MR, error) { return pd.RegMR(buf, access) })
}

// RegDMABufMR registers a part of a dma-buf as [PD.RegDMABufMR] does, with the hint.
//
// Errors: those of [DMAH.RegMR], and of [PD.RegDMABufMR].
func (h *DMAH) RegDMABufMR(pd *PD, d DMABuf, access Access) (*MR, error) {
	return h.register(pd, access, func() (*MR, error) { return pd.RegDMABufMR(d, access) })
}

func (h *DMAH) register(pd *PD, access Access, reg func() (*MR, error)) (*MR, error) {
	if h == nil || h.p == nil {
		return nil, invalid("reg_mr", "nil DMA handle")
	}
	if !pd.ok() {
		return nil, invalid("reg_mr", "nil protection domain")
	}
	var mr *MR
	_, err := h.p.Register(pd.p, access, func() (provider.MR, error) {
		var err error
		if mr, err = reg(); err != nil {
			return nil, err
		}
		return mr.p, nil
	})
	if err != nil {
		return nil, err
	}
	return mr, nil
}

// DMAH returns the hint that the region was registered with, and whether there is one.
func (mr *MR) DMAH() (cfg DMAHConfig, ok bool) {
	if mr == nil || mr.p == nil {
		return DMAHConfig{}, false
	}
	h := mr.p.DMAH()
	if h == nil {
		return DMAHConfig{}, false
	}
	return h.Config(), true
}

// Close frees the handle. It fails with EBUSY while regions that were registered with it are open.
// Closing again does nothing.
func (h *DMAH) Close() error {
	if h == nil || h.p == nil {
		return nil
	}
	return h.p.Close()
}
