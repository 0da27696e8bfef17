package fabrics

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/nvme"
)

// The commands that are about queues and registers, and that the transport executes.

func (q *queue) fabrics(s *slot) nvme.Completion {
	switch t := s.cmd.FabricsType(); {
	case t == nvme.FabricsConnect:
		return q.connected(s)
	case q.of == nil:
		return nvme.Completion{Status: nvme.StatusCommandSequence}
	case t == nvme.FabricsPropertyGet && q.qid == 0:
		return q.of.props.get(s.cmd.Property())
	case t == nvme.FabricsPropertySet && q.qid == 0:
		return q.of.setProperty(s.cmd.Property())
	case t == nvme.FabricsDisconnect && q.qid != 0:
		q.leaves = s
		return nvme.Completion{}
	}
	return nvme.Completion{Status: nvme.StatusInvalidOpcode | nvme.StatusDNR}
}

// wrong returns the answer to a Connect with a wrong field.
func wrong(inData bool, offset uint16) nvme.Completion {
	return nvme.Completion{Status: nvme.StatusConnectInvalidParameter | nvme.StatusDNR, Result: nvme.ConnectResult(inData, offset)}
}

// connected makes the queue one of a host's association: of a new one, if it is the first queue.
func (q *queue) connected(s *slot) nvme.Completion {
	p := s.cmd.ConnectParameters()
	switch {
	case q.of != nil:
		return nvme.Completion{Status: nvme.StatusCommandSequence | nvme.StatusDNR}
	case p.RecordFormat != 0:
		return nvme.Completion{Status: nvme.StatusConnectFormat | nvme.StatusDNR}
	case p.QID != q.qid:
		return wrong(false, nvme.ConnectQIDOffset)
	case p.SQSize == 0 || int(p.SQSize) >= q.size:
		return wrong(false, nvme.ConnectSQSizeOffset)
	}
	d, offset, ok := nvme.ParseConnectData((*[nvme.ConnectDataSize]byte)(s.data[0]))
	if !ok {
		return wrong(true, offset)
	}
	sub := q.t.subsystem(d.SubNQN)
	if sub == nil {
		return wrong(true, nvme.ConnectSubNQNOffset)
	}
	q.flow, q.entries = p.Attributes&noFlowControl == 0, int(p.SQSize)+1
	if q.qid == 0 {
		if !q.getMemory() {
			return nvme.Completion{Status: nvme.StatusConnectBusy}
		}
		return q.associate(sub, p, &d)
	}
	a := q.t.association(sub, d.CNTLID)
	switch {
	case a == nil:
		return wrong(true, nvme.ConnectCNTLIDOffset)
	case a.host != d.HostNQN:
		return wrong(true, nvme.ConnectHostNQNOffset)
	case a.id != d.HostID:
		return wrong(true, nvme.ConnectHostIDOffset)
	case !a.props.up.Load() || int(q.qid) > a.ctrl.Load().QueueCount():
		return wrong(false, nvme.ConnectQIDOffset)
	case !q.getMemory():
		return nvme.Completion{Status: nvme.StatusConnectBusy}
	case !a.join(q):
		return wrong(false, nvme.ConnectQIDOffset)
	}
	return nvme.Completion{Result: uint64(a.number)}
}

// getMemory gets the memory that data passes through, once. It reports whether there is some.
func (q *queue) getMemory() bool {
	if q.memory != nil {
		return true // an earlier Connect had it
	}
	var err error
	if q.memory, err = q.t.newSlab(q.size*page+2*q.t.cfg.MaxTransfer, q.qid); err != nil {
		q.t.cfg.Log.Warn("no memory for a queue", "queue", q.qid, "error", err)
	}
	return err == nil
}

// noFlowControl in a Connect's attributes: the host does not want to know how far its queue is taken.
const noFlowControl = 1 << 2

// associate makes a controller for a host.
func (q *queue) associate(sub *nvme.Subsystem, p nvme.Connect, d *nvme.ConnectData) nvme.Completion {
	if d.CNTLID != nvme.CNTLIDDynamic {
		return wrong(true, nvme.ConnectCNTLIDOffset)
	}
	t := q.t
	cfg := nvme.ControllerConfig{Transport: nvme.TransportRDMA, HostNQN: d.HostNQN, HostID: d.HostID,
		KeepAlive: time.Duration(p.KATO) * time.Millisecond, IOQueues: t.cfg.Queues, QueueEntries: t.cfg.QueueSize,
		MDTS: uint8(bits.Len(uint(t.cfg.MaxTransfer/page)) - 1), InCapsule: t.cfg.InCapsule, Complete: q.event} //nolint:gosec // at most 11
	ctrl, err := sub.NewController(cfg)
	if err != nil {
		t.cfg.Log.Info("a host is not served", "host", d.HostNQN, "error", err)
		return nvme.Completion{Status: nvme.StatusConnectInvalidHost | nvme.StatusDNR}
	}
	cfg.CNTLID = ctrl.CNTLID()
	a := &association{t: t, sub: sub, cfg: cfg, number: cfg.CNTLID, host: d.HostNQN, id: d.HostID, queues: make(map[uint16]*queue)}
	a.ctrl.Store(ctrl)
	a.props.cap = nvme.MakeCAP(t.cfg.QueueSize, 15, nvme.CAPContiguous|nvme.CAPNVM)
	a.seen.Store(time.Now().UnixNano())
	if !t.enter(a) || !a.join(q) {
		ctrl.Close()
		return nvme.Completion{Status: nvme.StatusConnectBusy}
	}
	t.cfg.Log.Info("a host is here", "host", a.host, "subsystem", d.SubNQN, "controller", a.number)
	return nvme.Completion{Result: uint64(a.number)}
}

// key is what an association is found by.
type key struct {
	sub    *nvme.Subsystem
	number uint16
}

func (t *Target) subsystem(nqn string) *nvme.Subsystem {
	for _, s := range t.cfg.Subsystems {
		if s.NQN() == nqn {
			return s
		}
	}
	return nil
}

func (t *Target) association(sub *nvme.Subsystem, number uint16) *association {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.hosts[key{sub, number}]
}

// enter notes an association. It reports whether the target is not closed.
func (t *Target) enter(a *association) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.hosts[key{a.sub, a.number}] = a
	return true
}

// properties are the registers of a controller without a PCI function.
type properties struct {
	cap nvme.CAP

	up atomic.Bool // commands are executed: the controller is enabled and ready, and not shut down

	mu        sync.Mutex // guards what follows
	cc        nvme.CC
	csts      nvme.CSTS
	resetting bool // the controller was disabled, and I/O queues are still there
}

func (p *properties) get(of nvme.Property) nvme.Completion {
	p.mu.Lock()
	defer p.mu.Unlock()
	type register struct {
		off  uint32
		wide bool
	}
	v, ok := map[register]uint64{
		{nvme.RegCAP, true}:   uint64(p.cap),
		{nvme.RegVS, false}:   uint64(nvme.Version14),
		{nvme.RegCC, false}:   uint64(p.cc),
		{nvme.RegCSTS, false}: uint64(p.csts),
	}[register{of.Offset, of.Wide}]
	if !ok {
		return nvme.Completion{Status: nvme.StatusInvalidField | nvme.StatusDNR}
	}
	return nvme.Completion{Result: v}
}

// setProperty writes a register. A reset ends the I/O queues, and the controller is not ready when they have gone; a
// shutdown is done when everything that was written is on stable storage.
func (a *association) setProperty(of nvme.Property) nvme.Completion {
	if of.Offset != nvme.RegCC || of.Wide {
		return nvme.Completion{Status: nvme.StatusInvalidField | nvme.StatusDNR}
	}
	switch reset, shutdown := a.props.configure(nvme.CC(of.Value)); { //nolint:gosec // a register of 32 bits
	case reset:
		a.endIO()
		a.finishReset()
	case shutdown:
		flush := nvme.Command{Opcode: nvme.IOFlush, NSID: nvme.NSIDAll}
		a.ctrl.Load().Execute(false, &flush, nil)
		a.props.shutDown()
	}
	return nvme.Completion{}
}

// shutDown ends a shutdown, unless the host has taken it back.
func (p *properties) shutDown() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cc.Shutdown() != 0 {
		p.csts = p.csts&^nvme.CSTSShutdownMask | nvme.CSTSShutdownDone
	}
}

// configure sets CC. It reports whether a reset, or a shutdown, begins with it.
func (p *properties) configure(cc nvme.CC) (reset, shutdown bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.cc
	p.cc = cc
	enable, enabled := cc&nvme.CCEnable != 0, before&nvme.CCEnable != 0
	switch {
	case enable && !enabled && (!usable(cc) || p.resetting): // a host waits until the controller is not ready any more
		p.csts |= nvme.CSTSFatal
	case enable && !enabled:
		p.csts = nvme.CSTSReady
	case !enable && enabled:
		reset, p.resetting = true, true
	}
	switch {
	case reset: // it ends a shutdown, too
		p.csts &^= nvme.CSTSShutdownMask
	case cc.Shutdown() != 0 && before.Shutdown() == 0:
		shutdown = true
		p.csts = p.csts&^nvme.CSTSShutdownMask | nvme.CSTSShuttingDown
	case cc.Shutdown() == 0:
		p.csts &^= nvme.CSTSShutdownMask
	}
	p.up.Store(enable && p.csts&(nvme.CSTSReady|nvme.CSTSFatal|nvme.CSTSShutdownMask) == nvme.CSTSReady)
	return reset, shutdown
}

// usable reports whether a configuration is one that there is: entries of 64 and 16 bytes, pages of 4 KiB, the NVM command
// set, round-robin.
func usable(cc nvme.CC) bool {
	return cc.SQEntry() == 6 && cc.CQEntry() == 4 && cc.PageShift() == 12 && cc.CommandSet() == 0 && cc.Arbitration() == 0
}
