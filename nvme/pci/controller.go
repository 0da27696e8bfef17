package pci

// The controller's life: New starts the goroutine that owns it (run). Writes of registers leave what is to be done in
// fields and wake that goroutine; it enables, resets and shuts down, one after the other (settle).

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/nvme"
)

// Config describes a controller.
type Config struct {
	Subsystem *nvme.Subsystem // whose namespaces it has; needed
	Bus       Bus             // where queues and data lie; needed

	CNTLID       uint16 // 0: a free one is chosen
	IOQueues     int    // 0: 64
	QueueEntries int    // of the longest queue, from 2 to 65536; 0: 1024
	Vectors      int    // interrupt vectors, from 1 to 2048; 0: one more than IOQueues
	MDTS         uint8  // the longest transfer, as a power of two of pages of 4 KiB; 0: 8, so 1 MiB
	CMB          *CMB   // nil: none

	// Interrupt is called with a vector after a completion was posted to a queue that has interrupts. It is called by
	// goroutines of the controller, several at a time; it must not call Close, nor wait for a command. nil: nobody is
	// told.
	Interrupt func(vector int)
}

// Controller is an NVMe controller. Its registers are what a driver sees of it. All methods may be called at the same
// time.
type Controller struct {
	cfg    Config
	cap    nvme.CAP
	cmb    *cmb // nil: none
	window atomic.Pointer[window]

	commands, cmbBytes, busBytes atomic.Uint64 // see Stats

	kick chan struct{} // holds one token if the owner may have something to do
	done chan struct{} // closed when the owner has ended

	mu        sync.Mutex // guards what follows
	cc        nvme.CC
	csts      nvme.CSTS
	aqa       uint32
	asq, acq  uint64
	cmbmsc    uint64
	cmbsts    uint32
	masked    uint32 // interrupt vectors
	unmasked  uint32 // vectors that have to be looked at since they were unmasked
	enabled   bool   // queues exist, or resetting stops them
	failed    bool   // could not be enabled; CC.EN has to be cleared first
	resetting bool   // no queue can be made
	lost      bool   // the subsystem has given the controller's number to another one
	subsystem bool   // a subsystem reset has begun: the queues are to be stopped
	closed    bool
	ctrl      *nvme.Controller
	sqs       map[uint16]*submissionQueue
	cqs       map[uint16]*completionQueue
	events    []nvme.Completion // of async event requests, for the admin queue to post
}

// maxPageShift is the largest page that the controller takes, as a power of two.
const maxPageShift = 16

// New makes a controller that is not enabled.
//
// Errors: EINVAL for a configuration that is not possible; those of nvme.Subsystem.NewController.
func New(cfg Config) (*Controller, error) {
	const op = "nvme_pci_new"
	if cfg.Subsystem == nil || cfg.Bus == nil {
		return nil, ib.Errorf(op, syscall.EINVAL, "a subsystem and a bus are needed")
	}
	for _, d := range []struct {
		field *int
		value int
	}{{&cfg.IOQueues, 64}, {&cfg.QueueEntries, 1024}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if cfg.Vectors == 0 {
		cfg.Vectors = min(cfg.IOQueues+1, 2048)
	}
	if cfg.Vectors < 1 || cfg.Vectors > 2048 {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d interrupt vectors: 1 to 2048 are possible", cfg.Vectors)
	}
	c := &Controller{cfg: cfg, kick: make(chan struct{}, 1), done: make(chan struct{})}
	bits := nvme.CAPContiguous | nvme.CAPSubsystemReset | nvme.CAPNVM | (maxPageShift-12)<<52
	if cfg.CMB != nil {
		var err error
		if c.cmb, err = newCMB(*cfg.CMB); err != nil {
			return nil, err
		}
		if c.cmb.cfg.Legacy {
			c.window.Store(&window{c.cmb.cfg.Address, c.cmb.cfg.Memory})
		} else {
			bits |= nvme.CAPCMB
		}
	}
	ctrl, err := c.newExecutor()
	if err != nil {
		return nil, err
	}
	c.ctrl = ctrl
	c.cfg.CNTLID = ctrl.CNTLID()
	c.cap = nvme.MakeCAP(cfg.QueueEntries, 20, bits)
	c.resetQueuesLocked()
	go c.run()
	return c, nil
}

// newExecutor makes the executor of the commands from one enabling to the next reset.
func (c *Controller) newExecutor() (*nvme.Controller, error) {
	return c.cfg.Subsystem.NewController(nvme.ControllerConfig{
		CNTLID: c.cfg.CNTLID, Transport: nvme.TransportPCIe, IOQueues: c.cfg.IOQueues,
		QueueEntries: c.cfg.QueueEntries, MDTS: c.cfg.MDTS, Complete: c.keepEvent,
	})
}

// CNTLID returns the controller's number in its subsystem.
func (c *Controller) CNTLID() uint16 { return c.cfg.CNTLID }

// Stats is what a controller has done since New.
type Stats struct {
	Commands uint64 // that were fetched
	CMBBytes uint64 // of data, in the controller's own buffer
	BusBytes uint64 // of data, on the bus: in the host's memory or a peer's
}

// Stats returns what the controller has done. Data counts when it was found, whether or not the command succeeds then.
func (c *Controller) Stats() Stats {
	return Stats{Commands: c.commands.Load(), CMBBytes: c.cmbBytes.Load(), BusBytes: c.busBytes.Load()}
}

// Close stops the controller and waits until it uses no memory any more. Its registers read as all ones then, as those
// of a device that was pulled out. Closing again does nothing.
func (c *Controller) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.wake()
	<-c.done
}

func (c *Controller) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// run owns the controller: it does what the registers say until the controller is closed.
func (c *Controller) run() {
	defer close(c.done)
	for range c.kick {
		for c.settle() {
		}
		c.mu.Lock()
		if c.closed {
			c.stop() // unlocks
			return
		}
		c.mu.Unlock()
	}
}

// settle does one thing that is to be done, if there is one and the controller is not closed.
func (c *Controller) settle() bool {
	c.mu.Lock()
	switch {
	case c.closed:
		c.mu.Unlock()
		return false
	case c.subsystem, c.cc&nvme.CCEnable == 0 && (c.enabled || c.failed):
		c.reset() // unlocks
	case c.cc&nvme.CCEnable != 0 && !c.enabled && !c.failed:
		c.enableLocked()
		c.mu.Unlock()
	case c.cc.Shutdown() != 0 && c.csts&nvme.CSTSShutdownMask == 0:
		c.shutdown() // unlocks
	case c.unmasked != 0:
		c.interruptUnmasked() // unlocks
	default:
		c.mu.Unlock()
		return false
	}
	return true
}

// enableLocked starts the admin queues, or reports why not by CSTS.CFS.
func (c *Controller) enableLocked() {
	sqSize, cqSize := c.aqa&0xfff+1, c.aqa>>16&0xfff+1
	page := uint64(1) << c.cc.PageShift()
	sqAt, sqOK := c.queueMemory(c.asq, page, sqEntry*int(sqSize), nvme.CMBSZSQ)
	_, cqOK := c.queueMemory(c.acq, page, cqEntry*int(cqSize), nvme.CMBSZCQ)
	if c.lost || c.cc.PageShift() > maxPageShift || c.cc.CommandSet() != 0 || c.cc.Arbitration() != 0 ||
		sqSize < 2 || cqSize < 2 || sqOK != nvme.StatusSuccess || cqOK != nvme.StatusSuccess {
		c.failed = true
		c.csts |= nvme.CSTSFatal
		return
	}
	cq := newCQ(0, c.acq, cqSize, 0, true)
	sq := c.newSQ(0, c.asq, sqSize, cq, sqAt, page)
	cq.users = 1
	c.cqs[0], c.sqs[0] = cq, sq
	c.enabled = true
	c.csts = c.csts&^nvme.CSTSShutdownMask | nvme.CSTSReady
	go sq.run(c.ctrl)
}

// queueMemory reports whether a queue can lie at an address, and where that is.
func (c *Controller) queueMemory(base, page uint64, n int, use nvme.CMBSZ) (place, nvme.Status) {
	if base%page != 0 {
		return 0, nvme.StatusPRPOffset | nvme.StatusDNR
	}
	var all place
	for at := base; n > 0; {
		b, where := c.bytes(at, n)
		if len(b) == 0 || len(b) < n && uint64(len(b)) > ^at {
			return 0, nvme.StatusInvalidField | nvme.StatusDNR
		}
		all |= where
		at, n = at+uint64(len(b)), n-len(b)
	}
	if all&ownCMB != 0 && !c.cmb.allows(use) || all == ownCMB|elsewhere && !c.cmb.mayMix(nvme.CMBLOCQueueMixed) {
		return 0, nvme.StatusInvalidCMBUse | nvme.StatusDNR
	}
	return all, nvme.StatusSuccess
}

// stop ends all queues and the executor. The caller has locked mu, which stop unlocks, since a queue's goroutine may
// need it to end.
func (c *Controller) stop() {
	c.resetting = true
	sqs, ctrl := c.sqs, c.ctrl
	c.resetQueuesLocked()
	c.mu.Unlock()
	for _, q := range sqs {
		q.halt()
	}
	for _, q := range sqs {
		<-q.done
	}
	ctrl.Close()
}

func (c *Controller) resetQueuesLocked() {
	c.sqs, c.cqs = map[uint16]*submissionQueue{}, map[uint16]*completionQueue{}
}

// reset is a controller reset, or a subsystem reset. The caller has locked mu, which reset unlocks.
func (c *Controller) reset() {
	c.subsystem = false
	c.stop()
	ctrl, err := c.newExecutor()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resetting, c.enabled, c.failed = false, false, false
	c.events, c.masked, c.unmasked = nil, 0, 0
	c.csts &= nvme.CSTSSubsystemReset
	if c.lost = err != nil; !c.lost {
		c.ctrl = ctrl
	}
}

// shutdown makes everything written persistent. The caller has locked mu, which shutdown unlocks.
func (c *Controller) shutdown() {
	c.csts |= nvme.CSTSShuttingDown
	ctrl := c.ctrl
	c.mu.Unlock()
	flush := nvme.Command{Opcode: nvme.IOFlush, NSID: nvme.NSIDAll}
	ctrl.Execute(false, &flush, nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.csts = c.csts&^nvme.CSTSShutdownMask | nvme.CSTSShutdownDone
}

// fatal reports that the controller cannot go on by itself.
func (c *Controller) fatal() {
	c.mu.Lock()
	c.csts |= nvme.CSTSFatal
	ctrl := c.ctrl
	c.mu.Unlock()
	ctrl.Report(nvme.Event{Type: nvme.EventError, Info: nvme.ErrorPersistent, LogPage: nvme.LogErrors})
}

// raise interrupts the host, unless the vector is masked: then that is made up for when it is unmasked.
func (c *Controller) raise(vector int) {
	if c.cfg.Interrupt == nil {
		return
	}
	c.mu.Lock()
	masked := vector < 32 && c.masked&(1<<vector) != 0
	c.mu.Unlock()
	if !masked {
		c.cfg.Interrupt(vector)
	}
}

// interruptUnmasked interrupts for queues that have entries which the host was not told of. The caller has locked mu,
// which interruptUnmasked unlocks.
func (c *Controller) interruptUnmasked() {
	vectors := c.unmasked
	c.unmasked = 0
	var qs []*completionQueue
	for _, q := range c.cqs {
		if q.interrupt && q.vector < 32 && vectors&(1<<q.vector) != 0 {
			qs = append(qs, q)
		}
	}
	c.mu.Unlock()
	for _, q := range qs {
		if q.waiting() {
			c.raise(q.vector)
		}
	}
}

// keepEvent keeps the completion of an async event request for the admin queue's goroutine, which may wait for room.
func (c *Controller) keepEvent(done nvme.Completion) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if q := c.sqs[0]; q != nil {
		c.events = append(c.events, done)
		q.wake()
	}
}

func (c *Controller) takeEvents() []nvme.Completion {
	c.mu.Lock()
	defer c.mu.Unlock()
	events := c.events
	c.events = nil
	return events
}
