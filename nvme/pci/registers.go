package pci

// Registers (NVMe Base 1.4, 3.1). Writes change fields and wake the goroutines that act on them.

import "github.com/verbena-rdma/verbena/nvme"

var _ nvme.Registers = (*Controller)(nil)

// Read32 reads 4 bytes of the registers, at a multiple of 4. What is not there reads as 0.
func (c *Controller) Read32(off uint32) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ^uint32(0)
	}
	loc, sz := c.cmbRegistersLocked()
	switch off {
	case nvme.RegCAP:
		return uint32(c.cap)
	case nvme.RegCAP + 4:
		return uint32(c.cap >> 32)
	case nvme.RegVS:
		return nvme.Version14
	case nvme.RegINTMS, nvme.RegINTMC:
		return c.masked
	case nvme.RegCC:
		return uint32(c.cc)
	case nvme.RegCSTS:
		return uint32(c.csts)
	case nvme.RegAQA:
		return c.aqa
	case nvme.RegASQ:
		return uint32(c.asq)
	case nvme.RegASQ + 4:
		return uint32(c.asq >> 32)
	case nvme.RegACQ:
		return uint32(c.acq)
	case nvme.RegACQ + 4:
		return uint32(c.acq >> 32)
	case nvme.RegCMBLOC:
		return uint32(loc)
	case nvme.RegCMBSZ:
		return uint32(sz)
	case nvme.RegCMBMSC:
		return uint32(c.cmbmsc)
	case nvme.RegCMBMSC + 4:
		return uint32(c.cmbmsc >> 32)
	case nvme.RegCMBSTS:
		return c.cmbsts
	}
	return 0
}

// Read64 reads 8 bytes of the registers.
func (c *Controller) Read64(off uint32) uint64 {
	return uint64(c.Read32(off)) | uint64(c.Read32(off+4))<<32
}

// Write32 writes 4 bytes of the registers, at a multiple of 4. What cannot be written stays.
func (c *Controller) Write32(off uint32, v uint32) {
	if off >= nvme.RegDoorbells {
		c.doorbell(off, v)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.writeLocked(off, v)
	}
}

// Write64 writes 8 bytes of the registers: those of 8 bytes at once.
func (c *Controller) Write64(off uint32, v uint64) {
	if off == nvme.RegCMBMSC {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.closed {
			c.writeCMBMSCLocked(v)
		}
		return
	}
	c.Write32(off, uint32(v))
	c.Write32(off+4, uint32(v>>32))
}

// low and high replace a half of a register of 8 bytes.
func low(old uint64, v uint32) uint64  { return old&^0xffffffff | uint64(v) }
func high(old uint64, v uint32) uint64 { return old&0xffffffff | uint64(v)<<32 }

func (c *Controller) writeLocked(off uint32, v uint32) {
	switch off {
	case nvme.RegINTMS:
		c.masked |= v
	case nvme.RegINTMC:
		c.unmasked |= c.masked & v
		c.masked &^= v
		c.wake()
	case nvme.RegCC:
		c.cc = nvme.CC(v & 0x00fffff1)
		c.wake()
	case nvme.RegCSTS:
		c.csts &^= nvme.CSTS(v) & nvme.CSTSSubsystemReset // written 1 to be cleared
	case nvme.RegNSSR:
		if v == nvme.NSSRMagic { // registers first: what the driver writes from now on is not undone
			c.subsystem = true
			c.cc, c.aqa, c.asq, c.acq = 0, 0, 0, 0
			c.writeCMBMSCLocked(0)
			c.csts |= nvme.CSTSSubsystemReset
			c.wake()
		}
	case nvme.RegAQA:
		c.aqa = v & 0x0fff0fff
	case nvme.RegASQ:
		c.asq = low(c.asq, v&^0xfff)
	case nvme.RegASQ + 4:
		c.asq = high(c.asq, v)
	case nvme.RegACQ:
		c.acq = low(c.acq, v&^0xfff)
	case nvme.RegACQ + 4:
		c.acq = high(c.acq, v)
	case nvme.RegCMBMSC:
		c.writeCMBMSCLocked(low(c.cmbmsc, v))
	case nvme.RegCMBMSC + 4:
		c.writeCMBMSCLocked(high(c.cmbmsc, v))
	}
}

// doorbell is a write of a submission queue's tail or of a completion queue's head. What is wrong with it becomes an
// async event (NVMe Base 1.4, 5.2).
func (c *Controller) doorbell(off, v uint32) {
	n := (off - nvme.RegDoorbells) / 4
	id, completion := n/2, n%2 == 1
	c.mu.Lock()
	if c.closed || c.csts&nvme.CSTSReady == 0 {
		c.mu.Unlock()
		return
	}
	ctrl := c.ctrl
	var sq *submissionQueue
	var cq *completionQueue
	switch {
	case off%4 != 0 || id > 0xffff:
	case completion:
		cq = c.cqs[uint16(id)]
	default:
		sq = c.sqs[uint16(id)]
	}
	ok := true
	if sq != nil {
		ok = sq.ring(v) // under mu, so that two writers do not interleave
	}
	c.mu.Unlock()
	if cq != nil {
		ok = cq.take(v)
	}
	switch {
	case sq == nil && cq == nil:
		ctrl.Report(nvme.Event{Type: nvme.EventError, Info: nvme.ErrorInvalidDoorbell, LogPage: nvme.LogErrors})
	case !ok:
		ctrl.Report(nvme.Event{Type: nvme.EventError, Info: nvme.ErrorInvalidDoorbellValue, LogPage: nvme.LogErrors})
	}
}
