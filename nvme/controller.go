package nvme

// A controller executes the commands of one host. A command's way, in the order of this file and those it leads to:
//
//  1. Transfer looks at the command alone, and returns how much data it moves and which way. The transport maps
//     that much of the host's memory, or completes the command with the status.
//  2. Execute checks again, since a namespace may have gone meanwhile, and moves the data: io.go for I/O commands,
//     identify.go, features.go, log.go and events.go for admin commands.
//  3. The completion is returned, or, for an async event request, handed to ControllerConfig.Complete later.
//
// What is true of each opcode stands in adminCommands and ioCommands.

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

// Direction is where the data of a command goes.
type Direction uint8

// Directions.
const (
	NoData   Direction = iota
	ToHost             // as for read and identify
	FromHost           // as for write
)

func (d Direction) String() string {
	switch d {
	case NoData:
		return "no data"
	case ToHost:
		return "to the host"
	case FromHost:
		return "from the host"
	}
	return "invalid direction"
}

// TransportType is what a host reaches a controller by. The numbers are those of discovery log pages.
type TransportType uint8

// Transports.
const (
	TransportPCIe TransportType = 0 // registers and queues in memory
	TransportRDMA TransportType = 1
	TransportFC   TransportType = 2
	TransportTCP  TransportType = 3
	TransportLoop TransportType = 254
)

// ControllerConfig describes a controller: the association of a host with a subsystem.
type ControllerConfig struct {
	CNTLID    uint16 // 0: a free one is chosen
	Transport TransportType
	HostNQN   string // may be empty with PCIe
	HostID    [16]byte

	// KeepAlive is how long the host may be silent; 0: for ever. The transport watches it: see KeepAliveTimeout.
	KeepAlive time.Duration

	IOQueues     int   // how many I/O queues a host can have; 0: 64
	QueueEntries int   // of the longest queue, from 2 to 65536; 0: 128
	MDTS         uint8 // the longest transfer, as a power of two of pages of 4 KiB, from 1 to 12; 0: 8, so 1 MiB
	InCapsule    int   // bytes of data in a command capsule, a multiple of 16; 0: none
	SGLs         int   // descriptors in a capsule (MSDBD); 0: 1

	// Complete is called when an async event request completes that Execute has kept. Calls do not overlap. They come
	// from whichever goroutine causes the event, also from within Execute of an abort command. Complete must not
	// call Close.
	Complete func(Completion)
}

// Controller executes commands of a host. All methods may be called at the same time.
type Controller struct {
	sub *Subsystem
	cfg ControllerConfig

	closed       atomic.Bool
	writeThrough atomic.Bool // the host has switched the volatile write cache off
	counts       smartCounters

	mu       sync.Mutex // guards what follows
	features features
	events   events
	errors   errorLog
	changed  changedList

	notify sync.Mutex // held while cfg.Complete is called; Close takes it to wait for that
}

// NewController makes a controller.
//
// Errors: EINVAL for a configuration that is not possible; EEXIST if the CNTLID is taken; ENOSPC if all are.
func (s *Subsystem) NewController(cfg ControllerConfig) (*Controller, error) {
	const op = "nvme_new_controller"
	setDefault(&cfg.IOQueues, 64)
	setDefault(&cfg.QueueEntries, 128)
	setDefault(&cfg.SGLs, 1)
	if cfg.MDTS == 0 {
		cfg.MDTS = 8
	}
	switch {
	case cfg.CNTLID > maxCNTLID:
		return nil, ib.Errorf(op, syscall.EINVAL, "controller %#x: 1 to %#x are possible", cfg.CNTLID, maxCNTLID)
	case cfg.IOQueues < 1 || cfg.IOQueues > 65535:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d I/O queues: 1 to 65535 are possible", cfg.IOQueues)
	case cfg.QueueEntries < 2 || cfg.QueueEntries > 65536:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d entries of a queue: 2 to 65536 are possible", cfg.QueueEntries)
	case cfg.MDTS > 12:
		return nil, ib.Errorf(op, syscall.EINVAL, "MDTS %d: 1 to 12 are possible", cfg.MDTS)
	case cfg.InCapsule < 0 || cfg.InCapsule%16 != 0 || cfg.InCapsule > 1<<24:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes of data in a capsule: a multiple of 16 is possible", cfg.InCapsule)
	case cfg.SGLs < 1 || cfg.SGLs > 255:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d SGL descriptors: 1 to 255 are possible", cfg.SGLs)
	case cfg.KeepAlive < 0 || cfg.KeepAlive > (1<<32-1)*time.Millisecond:
		return nil, ib.Errorf(op, syscall.EINVAL, "keep-alive timeout of %v", cfg.KeepAlive)
	}
	c := &Controller{sub: s, cfg: cfg}
	c.features.reset(c)

	s.mu.Lock()
	defer s.mu.Unlock()
	id, err := s.chooseIDLocked(op, cfg.CNTLID)
	if err != nil {
		return nil, err
	}
	c.cfg.CNTLID = id
	s.controllers[id] = c
	return c, nil
}

func setDefault(v *int, def int) {
	if *v == 0 {
		*v = def
	}
}

// maxCNTLID is the largest that is not reserved.
const maxCNTLID = 0xffef

// chooseIDLocked returns a free CNTLID. A number that was used is not chosen again before all others, so that a late
// command of an earlier host meets nobody.
func (s *Subsystem) chooseIDLocked(op string, want uint16) (uint16, error) {
	if want != 0 {
		if s.controllers[want] != nil {
			return 0, ib.Errorf(op, syscall.EEXIST, "controller %#x", want)
		}
		return want, nil
	}
	for range maxCNTLID {
		if s.lastID++; s.lastID > maxCNTLID {
			s.lastID = 1
		}
		if s.controllers[s.lastID] == nil {
			return s.lastID, nil
		}
	}
	return 0, ib.Errorf(op, syscall.ENOSPC, "all %d controllers exist", maxCNTLID)
}

// Close ends the association: async event requests that wait are dropped, and when Close has returned, Complete is not
// called any more. Commands executed afterwards end in StatusAbortRequested. Closing again does nothing.
func (c *Controller) Close() {
	if c.closed.Swap(true) {
		return
	}
	c.notify.Lock() // a call of Complete that has begun ends first
	c.mu.Lock()
	c.events = events{}
	c.mu.Unlock()
	c.notify.Unlock()

	s := c.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.controllers, c.cfg.CNTLID)
	s.past.add(c.counts.load())
}

// CNTLID returns the controller's number.
func (c *Controller) CNTLID() uint16 { return c.cfg.CNTLID }

// Subsystem returns the controller's subsystem.
func (c *Controller) Subsystem() *Subsystem { return c.sub }

// MaxTransfer returns the most bytes that a command moves.
func (c *Controller) MaxTransfer() int { return 4096 << c.cfg.MDTS }

// QueueCount returns how many I/O queues the host may use: what it was granted by set features, at most
// ControllerConfig.IOQueues.
func (c *Controller) QueueCount() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.features.queues
}

// KeepAliveTimeout returns how long the host may be silent; 0: for ever. Every command is a sign of life (traffic based
// keep alive), and a host that has nothing else to say sends a keep-alive command. The transport ends the association
// of a host that is silent for longer.
func (c *Controller) KeepAliveTimeout() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(c.features.value[FeatureKeepAlive]) * time.Millisecond
}

func (c *Controller) fabrics() bool { return c.cfg.Transport != TransportPCIe }

// length is how the length of a command's data is found.
type length uint8

const (
	lengthNone     length = iota
	lengthBlocks          // CDW12 of an I/O command
	lengthRanges          // CDW10 of dataset management
	lengthIdentify        // 4096
	lengthLogPage         // CDW10 and CDW11 of get log page
	lengthFeature         // by the feature
)

// commandInfo is what is true of an opcode. The zero value is one that is not supported.
type commandInfo struct {
	name      string
	dir       Direction
	length    length
	effects   uint32 // in the log page of commands supported
	discovery bool   // discovery controllers have it, too
	transport bool   // the transport executes it
}

// Effects of commands (NVMe Base 1.4, 5.14.1.5).
const (
	effectSupported uint32 = 1 << 0
	effectWrites    uint32 = 1 << 1 // logical blocks change
)

var adminCommands = [numOpcodes]commandInfo{
	AdminDeleteSQ:          {name: "delete I/O submission queue", effects: effectSupported, transport: true},
	AdminCreateSQ:          {name: "create I/O submission queue", effects: effectSupported, transport: true},
	AdminDeleteCQ:          {name: "delete I/O completion queue", effects: effectSupported, transport: true},
	AdminCreateCQ:          {name: "create I/O completion queue", effects: effectSupported, transport: true},
	AdminGetLogPage:        {name: "get log page", dir: ToHost, length: lengthLogPage, effects: effectSupported, discovery: true},
	AdminIdentify:          {name: "identify", dir: ToHost, length: lengthIdentify, effects: effectSupported, discovery: true},
	AdminAbort:             {name: "abort", effects: effectSupported},
	AdminSetFeatures:       {name: "set features", dir: FromHost, length: lengthFeature, effects: effectSupported, discovery: true},
	AdminGetFeatures:       {name: "get features", dir: ToHost, length: lengthFeature, effects: effectSupported, discovery: true},
	AdminAsyncEventRequest: {name: "asynchronous event request", effects: effectSupported, discovery: true},
	AdminKeepAlive:         {name: "keep alive", effects: effectSupported, discovery: true},
}

var ioCommands = [numOpcodes]commandInfo{
	IOFlush:             {name: "flush", effects: effectSupported | effectWrites},
	IOWrite:             {name: "write", dir: FromHost, length: lengthBlocks, effects: effectSupported | effectWrites},
	IORead:              {name: "read", dir: ToHost, length: lengthBlocks, effects: effectSupported},
	IOCompare:           {name: "compare", dir: FromHost, length: lengthBlocks, effects: effectSupported},
	IOWriteZeroes:       {name: "write zeroes", effects: effectSupported | effectWrites},
	IODatasetManagement: {name: "dataset management", dir: FromHost, length: lengthRanges, effects: effectSupported | effectWrites},
}

func tableOf(admin bool) *[numOpcodes]commandInfo {
	if admin {
		return &adminCommands
	}
	return &ioCommands
}

// check returns what is true of a command's opcode, if this controller executes it.
func (c *Controller) check(admin bool, cmd *Command) (*commandInfo, Status) {
	info := &tableOf(admin)[cmd.Opcode]
	switch {
	case c.closed.Load():
		return nil, StatusAbortRequested
	case info.effects == 0 || info.transport,
		c.sub.cfg.Discovery && !info.discovery,
		admin && cmd.Opcode == AdminKeepAlive && !c.fabrics():
		return nil, StatusInvalidOpcode | StatusDNR
	case cmd.Flags&FlagFuseMask != 0:
		return nil, StatusInvalidField | StatusDNR
	}
	return info, StatusSuccess
}

// Transfer returns how many bytes a command moves and which way, before its data is mapped. If the status is not
// success, the command completes with it and moves nothing.
func (c *Controller) Transfer(admin bool, cmd *Command) (n int, dir Direction, st Status) {
	info, st := c.check(admin, cmd)
	if st != StatusSuccess {
		c.logError(admin, cmd, st)
		return 0, NoData, st
	}
	switch info.length {
	case lengthNone:
	case lengthBlocks:
		n, st = c.blockBytes(cmd)
	case lengthRanges:
		n = rangeSize * (int(cmd.CDW10&0xff) + 1)
	case lengthIdentify:
		n = identifySize
	case lengthLogPage:
		n, st = c.logPageBytes(cmd)
	case lengthFeature:
		n, st = c.featureBytes(cmd)
	}
	switch {
	case st != StatusSuccess:
		c.logError(admin, cmd, st)
		return 0, NoData, st
	case n == 0:
		return 0, NoData, StatusSuccess
	}
	return n, info.dir, StatusSuccess
}

// statusWaits is what an async event request that waits ends in for now. No completion has it.
const statusWaits Status = 0xffff

// Execute executes a command. data is the command's memory, in pieces; it has at least the bytes that Transfer has
// returned. Whatever is wrong becomes the completion's status. If Execute returns false, there is no completion yet:
// ControllerConfig.Complete gets it. The transport fills in SQHead, SQID and Phase.
func (c *Controller) Execute(admin bool, cmd *Command, data [][]byte) (Completion, bool) {
	var result uint64
	info, st := c.check(admin, cmd)
	switch {
	case st != StatusSuccess:
	case admin:
		own := *cmd // so that the caller's need not be on the heap on the way of reads and writes
		result, st = c.executeAdmin(&own, data)
	default:
		st = c.executeIO(info, cmd, data)
	}
	switch st {
	case StatusSuccess:
	case statusWaits:
		return Completion{}, false
	default:
		c.logError(admin, cmd, st)
	}
	return Completion{Result: result, CID: cmd.CID, Status: st}, true
}

// executeAdmin executes a command that check has passed.
func (c *Controller) executeAdmin(cmd *Command, data [][]byte) (result uint64, st Status) {
	switch cmd.Opcode {
	case AdminIdentify:
		return 0, c.identify(cmd, data)
	case AdminGetLogPage:
		return 0, c.getLogPage(cmd, data)
	case AdminGetFeatures:
		return c.getFeature(cmd, data)
	case AdminSetFeatures:
		return c.setFeature(cmd, data)
	case AdminAsyncEventRequest:
		return c.asyncEventRequest(cmd)
	case AdminAbort:
		return c.abort(cmd)
	case AdminKeepAlive:
		return 0, StatusSuccess
	}
	return 0, StatusInvalidOpcode | StatusDNR
}
