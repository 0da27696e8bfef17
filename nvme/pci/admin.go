package pci

// Admin commands about queues (NVMe Base 1.4, 5.3 to 5.6). The admin queue's goroutine executes them.

import "github.com/verbena-rdma/verbena/nvme"

// queueCommand executes a command that is about queues; it returns false for others.
func (c *Controller) queueCommand(ctrl *nvme.Controller, cmd *nvme.Command) (nvme.Completion, bool) {
	var st nvme.Status
	switch cmd.Opcode {
	case nvme.AdminCreateCQ:
		st = c.createCQ(ctrl, cmd)
	case nvme.AdminCreateSQ:
		st = c.createSQ(ctrl, cmd)
	case nvme.AdminDeleteCQ:
		st = c.deleteCQ(cmd)
	case nvme.AdminDeleteSQ:
		st = c.deleteSQ(cmd)
	case nvme.AdminSetFeatures:
		// How many queues there are is settled before the first is made (NVMe Base 1.4, 5.21.1.7).
		if uint8(cmd.CDW10) != nvme.FeatureQueues || !c.hasIOQueues() {
			return nvme.Completion{}, false
		}
		st = nvme.StatusCommandSequence | nvme.StatusDNR
	default:
		return nvme.Completion{}, false
	}
	return nvme.Completion{CID: cmd.CID, Status: st}, true
}

func (c *Controller) hasIOQueues() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.cqs) > 1
}

// newQueue is what create commands have in common.
type newQueue struct {
	id   uint16
	size uint32
	base uint64
	page uint64
	at   place
}

// parseNew checks a create command. entry is the size of entries that CC must have as a power of two.
func (c *Controller) parseNew(ctrl *nvme.Controller, cmd *nvme.Command, bytes int, use nvme.CMBSZ) (newQueue, nvme.Status) {
	c.mu.Lock()
	cc := c.cc
	c.mu.Unlock()
	q := newQueue{id: uint16(cmd.CDW10), size: cmd.CDW10>>16 + 1, page: 1 << cc.PageShift()}
	q.base, _ = cmd.PRP()
	shift := cc.SQEntry()
	if use == nvme.CMBSZCQ {
		shift = cc.CQEntry()
	}
	switch {
	case q.id == 0 || int(q.id) > ctrl.QueueCount():
		return q, nvme.StatusInvalidQueueID | nvme.StatusDNR
	case q.size < 2 || int(q.size) > c.cfg.QueueEntries || 1<<shift != bytes:
		return q, nvme.StatusInvalidQueueSize | nvme.StatusDNR
	case cmd.Flags&(nvme.FlagPSDTMask|nvme.FlagFuseMask) != 0,
		cmd.CDW11&1 == 0: // not contiguous, which CAP.CQR rules out
		return q, nvme.StatusInvalidField | nvme.StatusDNR
	}
	var st nvme.Status
	q.at, st = c.queueMemory(q.base, q.page, bytes*int(q.size), use)
	return q, st
}

func (c *Controller) createCQ(ctrl *nvme.Controller, cmd *nvme.Command) nvme.Status {
	q, st := c.parseNew(ctrl, cmd, cqEntry, nvme.CMBSZCQ)
	if st != nvme.StatusSuccess {
		return st
	}
	interrupt, vector := cmd.CDW11&2 != 0, int(cmd.CDW11>>16)
	if interrupt && vector >= c.cfg.Vectors {
		return nvme.StatusInvalidVector | nvme.StatusDNR
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.resetting:
		return nvme.StatusAbortRequested
	case c.cqs[q.id] != nil:
		return nvme.StatusInvalidQueueID | nvme.StatusDNR
	}
	c.cqs[q.id] = newCQ(q.id, q.base, q.size, vector, interrupt)
	return nvme.StatusSuccess
}

func (c *Controller) createSQ(ctrl *nvme.Controller, cmd *nvme.Command) nvme.Status {
	q, st := c.parseNew(ctrl, cmd, sqEntry, nvme.CMBSZSQ)
	if st != nvme.StatusSuccess {
		return st
	}
	cqid := uint16(cmd.CDW11 >> 16)
	if cqid == 0 || int(cqid) > c.cfg.IOQueues {
		return nvme.StatusInvalidQueueID | nvme.StatusDNR
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	cq := c.cqs[cqid]
	switch {
	case c.resetting:
		return nvme.StatusAbortRequested
	case c.sqs[q.id] != nil:
		return nvme.StatusInvalidQueueID | nvme.StatusDNR
	case cq == nil:
		return nvme.StatusInvalidCQ | nvme.StatusDNR
	}
	cq.users++
	sq := c.newSQ(q.id, q.base, q.size, cq, q.at, q.page)
	c.sqs[q.id] = sq
	go sq.run(ctrl)
	return nvme.StatusSuccess
}

func (c *Controller) deleteCQ(cmd *nvme.Command) nvme.Status {
	id := uint16(cmd.CDW10)
	c.mu.Lock()
	defer c.mu.Unlock()
	cq := c.cqs[id]
	switch {
	case id == 0 || cq == nil:
		return nvme.StatusInvalidQueueID | nvme.StatusDNR
	case cq.users > 0:
		return nvme.StatusInvalidQueueDeletion // without DNR: it can be deleted later
	}
	delete(c.cqs, id)
	return nvme.StatusSuccess
}

// deleteSQ stops a queue. Commands that were not fetched are not executed, and get no completion.
func (c *Controller) deleteSQ(cmd *nvme.Command) nvme.Status {
	id := uint16(cmd.CDW10)
	c.mu.Lock()
	sq := c.sqs[id]
	if id == 0 || sq == nil {
		c.mu.Unlock()
		return nvme.StatusInvalidQueueID | nvme.StatusDNR
	}
	delete(c.sqs, id)
	c.mu.Unlock()
	sq.halt()
	<-sq.done
	c.mu.Lock()
	sq.cq.users--
	c.mu.Unlock()
	return nvme.StatusSuccess
}
