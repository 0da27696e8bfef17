package pci

// The controller memory buffer (NVMe Base 1.4, 4.7): memory of the controller that hosts and peers reach through a BAR,
// for queues, lists and data. The controller itself reaches it by the addresses that CMBMSC sets.

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/nvme"
)

// CMB describes a controller memory buffer.
type CMB struct {
	// Memory is the buffer, a multiple of 4 KiB. It is also what lies in the BAR.
	Memory []byte

	BAR    int    // which BAR has it: 2 to 5; 0: 2
	Offset uint64 // where in the BAR it begins: a multiple of the unit in which CMBSZ counts

	// Without are uses that the controller does not allow; 0: all are allowed.
	Without nvme.CMBSZ

	// Restrict are combinations that the controller does not allow; 0: all are allowed.
	Restrict nvme.CMBLOC

	// Legacy makes a buffer of NVMe before 1.4, without CMBMSC: the controller decodes Address from the start.
	Legacy  bool
	Address uint64
}

// cmb is a controller's buffer.
type cmb struct {
	cfg CMB
	sz  nvme.CMBSZ
	loc nvme.CMBLOC
}

const allLocations = nvme.CMBLOCQueueMixed | nvme.CMBLOCQueuePages | nvme.CMBLOCListsMixed | nvme.CMBLOCIndependent |
	nvme.CMBLOCDataMixed | nvme.CMBLOCDwordData

func newCMB(cfg CMB) (*cmb, error) {
	const op = "nvme_pci_new"
	if cfg.BAR == 0 {
		cfg.BAR = 2
	}
	sz, ok := nvme.MakeCMBSZ(uint64(len(cfg.Memory)), nvme.CMBSZAll&^cfg.Without)
	if !ok {
		return nil, ib.Errorf(op, syscall.EINVAL, "a CMB of %d bytes", len(cfg.Memory))
	}
	if cfg.BAR < 2 || cfg.BAR > 5 {
		return nil, ib.Errorf(op, syscall.EINVAL, "a CMB in BAR %d", cfg.BAR)
	}
	units := cfg.Offset / sz.Unit()
	if cfg.Offset%sz.Unit() != 0 || units >= 1<<20 {
		return nil, ib.Errorf(op, syscall.EINVAL, "a CMB at offset %#x: its unit is %#x", cfg.Offset, sz.Unit())
	}
	loc := nvme.CMBLOC(cfg.BAR) | nvme.CMBLOC(units)<<12 | allLocations&^cfg.Restrict
	m := &cmb{cfg: cfg, sz: sz, loc: loc}
	if cfg.Legacy && !m.fits(cfg.Address) {
		return nil, ib.Errorf(op, syscall.EINVAL, "a CMB of %d bytes at %#x", len(cfg.Memory), cfg.Address)
	}
	return m, nil
}

// fits reports whether the buffer can lie at an address.
func (m *cmb) fits(addr uint64) bool { return addr%4096 == 0 && uint64(len(m.cfg.Memory)-1) <= ^addr }

// window is the addresses at which a controller finds its own CMB.
type window struct {
	base uint64
	mem  []byte
}

// find returns the bytes at an address, if it is in the window. A nil window has none.
func (w *window) find(addr uint64, n int) []byte {
	if w == nil || addr < w.base || addr-w.base >= uint64(len(w.mem)) {
		return nil
	}
	return part(w.mem, addr-w.base, n)
}

// writeCMBMSCLocked sets the register: whether the others can be read, and where the buffer is decoded.
func (c *Controller) writeCMBMSCLocked(v uint64) {
	if c.cmb == nil || c.cmb.cfg.Legacy {
		return
	}
	c.cmbmsc = v &^ 0xffc
	c.cmbsts = 0
	c.window.Store(nil)
	if v&nvme.CMBMSCEnable == 0 {
		return
	}
	base := v &^ 0xfff
	if !c.cmb.fits(base) {
		c.cmbsts = nvme.CMBSTSInvalid
		return
	}
	c.window.Store(&window{base, c.cmb.cfg.Memory})
}

// cmbRegistersLocked returns CMBLOC and CMBSZ as they read now.
func (c *Controller) cmbRegistersLocked() (nvme.CMBLOC, nvme.CMBSZ) {
	if c.cmb == nil || !c.cmb.cfg.Legacy && c.cmbmsc&nvme.CMBMSCRegisters == 0 {
		return 0, 0
	}
	return c.cmb.loc, c.cmb.sz
}

// allows reports whether a use is allowed; a controller without a buffer decodes none, so nothing asks.
func (m *cmb) allows(use nvme.CMBSZ) bool { return m != nil && m.sz&use == use }

// mayMix reports whether a combination is allowed.
func (m *cmb) mayMix(what nvme.CMBLOC) bool { return m == nil || m.loc&what != 0 }
