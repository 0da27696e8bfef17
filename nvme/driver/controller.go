package driver

// Bringing a controller up (NVMe Base 1.4, 7.6.1): disable it, give it admin queues, enable it, ask what it is, agree on
// the number of I/O queues.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/nvme"
)

// Config is what Open is told besides. nil means all defaults.
type Config struct {
	AdminEntries int           // of the admin queues; 0: 32
	IOQueues     int           // that the controller is asked for; 0: 16
	Timeout      time.Duration // how long a command may take; 0: 30 s

	// SGL makes I/O queues use SGLs if the controller has them; else they use PRPs.
	SGL bool

	// MapBAR maps a part of a BAR, or as much of it as there is: Addr is the address by which the controller is to
	// know it. nil: the controller memory buffer is not used.
	MapBAR func(bar int, off, n uint64) (Memory, error)
}

// Info is what a controller says of itself.
type Info struct {
	Version                 uint32
	Serial, Model, Firmware string
	NQN                     string
	CNTLID                  uint16
	MaxTransfer             int    // bytes; 0: no limit
	SGLS                    uint32 // what it can do with SGLs
	IOQueues                int    // that it has granted
	MaxEntries              int    // of a queue
	CMBSize                 int    // 0: no buffer, or Config.MapBAR is nil
	CMB                     nvme.CMBSZ
	CMBLocation             nvme.CMBLOC
}

// Controller is a controller that is in use.
type Controller struct {
	regs    nvme.Registers
	dma     DMA
	cfg     Config
	cap     nvme.CAP
	page    int
	scratch Memory // for identify data and log pages; guarded by admin
	buffer  *cmb   // nil: none
	ring    *ring  // of the admin queues

	admin  sync.Mutex // held by whoever uses scratch, makes queues, resets or closes; guards what follows
	info   Info
	queues map[uint16]*Queue // that the controller may know of
	closed bool              // nothing new begins
	ended  bool              // and all memory was given back

	eventMu sync.Mutex // guards event; nobody waits while holding it
	event   *Request   // an async event request under way; nil: none
}

// Open brings a controller up.
//
// Errors: EINVAL for a configuration that is not possible; EOPNOTSUPP for a controller without the NVM command set, or
// with pages that are larger than the driver's; ErrGone, ErrFatal, ErrTimeout; the statuses of commands; those of dma.
// The memory of a controller that failed and then does not stop is never given back.
func Open(regs nvme.Registers, dma DMA, cfg *Config) (*Controller, error) {
	const op = "nvme_open"
	c := &Controller{regs: regs, dma: dma, queues: map[uint16]*Queue{}}
	if cfg != nil {
		c.cfg = *cfg
	}
	if c.cfg.AdminEntries == 0 {
		c.cfg.AdminEntries = 32
	}
	if c.cfg.IOQueues == 0 {
		c.cfg.IOQueues = 16
	}
	if c.cfg.Timeout == 0 {
		c.cfg.Timeout = 30 * time.Second
	}
	c.cap = nvme.CAP(regs.Read64(nvme.RegCAP))
	switch {
	case c.cap == ^nvme.CAP(0):
		return nil, fmt.Errorf("%s: %w", op, ErrGone)
	case c.cfg.AdminEntries < 2 || c.cfg.AdminEntries > 4096:
		return nil, ib.Errorf(op, syscall.EINVAL, "admin queues of %d entries: 2 to 4096 are possible", c.cfg.AdminEntries)
	case c.cfg.IOQueues < 1 || c.cfg.IOQueues > 65534:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d I/O queues: 1 to 65534 are possible", c.cfg.IOQueues)
	case c.cap&nvme.CAPNVM == 0:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the controller has no NVM command set")
	case c.cap.MinPage() > 12:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the controller wants pages of %d bytes", 1<<c.cap.MinPage())
	}
	c.page = pageSize
	if err := c.open(); err != nil {
		if off := c.disable(); stopped(off) {
			c.release()
		}
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return c, nil
}

func (c *Controller) open() error {
	if err := c.disable(); err != nil {
		return err
	}
	if err := c.findCMB(); err != nil {
		return err
	}
	var err error
	if c.scratch, err = c.alloc(c.dma, pageSize); err != nil {
		return err
	}
	c.ring, err = c.newRing(0, c.cfg.AdminEntries, c.dma, c.dma, c.dma)
	if err != nil {
		return err
	}
	c.ring.maxBytes = pageSize
	return c.start()
}

// alloc allocates memory and does not believe that it is what was asked for.
func (c *Controller) alloc(from DMA, n int) (Memory, error) {
	m, err := from.Alloc(n)
	if err != nil {
		return Memory{}, err
	}
	if m.Addr%pageSize != 0 || len(m.Bytes) < n {
		m.Free()
		return Memory{}, ib.Errorf("nvme_alloc", syscall.EINVAL, "%d bytes at %#x, of %d", len(m.Bytes), m.Addr, n)
	}
	return m, nil
}

// newRing makes the memory of a pair of queues.
func (c *Controller) newRing(id uint16, entries int, sq, cq, lists DMA) (*ring, error) {
	stride := c.cap.Stride()
	r := &ring{regs: c.regs, id: id, entries: entries, page: c.page, timeout: c.cfg.Timeout,
		sqBell: nvme.RegDoorbells + 2*uint32(id)*stride, cqBell: nvme.RegDoorbells + (2*uint32(id)+1)*stride}
	var err error
	for _, m := range []struct {
		to   *Memory
		from DMA
		n    int
	}{{&r.sq, sq, sqEntry * entries}, {&r.cq, cq, cqEntry * entries}, {&r.lists, lists, (entries - 1) * c.page}} {
		if *m.to, err = c.alloc(m.from, m.n); err != nil {
			r.release()
			return nil, err
		}
	}
	r.listOf = func(slot int) Memory { return r.lists.Slice(slot*c.page, c.page) }
	r.maxBytes = c.maxTransfer()
	r.reset()
	return r, nil
}

// maxTransfer returns the most bytes of one command: what the controller takes, and what one page of PRPs describes.
func (c *Controller) maxTransfer() int {
	most := c.page / 8 * c.page
	if c.info.MaxTransfer > 0 {
		most = min(most, c.info.MaxTransfer)
	}
	return most
}

// start enables the controller and asks what it is.
func (c *Controller) start() error {
	c.ring.mu.Lock()
	c.ring.reset()
	c.ring.mu.Unlock()
	if err := c.decodeCMB(); err != nil {
		return err
	}
	size := uint32(c.ring.entries - 1)
	c.regs.Write32(nvme.RegAQA, size|size<<16)
	c.regs.Write64(nvme.RegASQ, c.ring.sq.Addr)
	c.regs.Write64(nvme.RegACQ, c.ring.cq.Addr)
	c.regs.Write32(nvme.RegCC, uint32(nvme.MakeCC(12)))
	if err := c.waitStatus(nvme.CSTSReady, nvme.CSTSReady); err != nil {
		return err
	}
	if err := c.identifyController(); err != nil {
		return err
	}
	want := uint32(c.cfg.IOQueues - 1)
	cpl, err := c.do(context.Background(), nvme.Command{Opcode: nvme.AdminSetFeatures, CDW10: uint32(nvme.FeatureQueues), CDW11: want | want<<16}, Memory{}, 0)
	if err != nil {
		return err
	}
	granted := min(int(cpl.Result&0xffff), int(cpl.Result>>16&0xffff)) + 1
	c.info.IOQueues = min(granted, c.cfg.IOQueues)
	return nil
}

// stopped reports whether the controller uses no memory any more, by the error of disable.
func stopped(err error) bool { return err == nil || errors.Is(err, ErrGone) }

// disable resets the controller and waits until it uses no memory any more.
func (c *Controller) disable() error {
	cc := nvme.CC(c.regs.Read32(nvme.RegCC))
	if cc&nvme.CCEnable != 0 {
		if err := alive(c.regs); err == nil {
			// A controller that is about to become ready may not be disabled before it is.
			if err := c.waitStatus(nvme.CSTSReady, nvme.CSTSReady); errors.Is(err, ErrGone) {
				return err
			}
		}
		c.regs.Write32(nvme.RegCC, uint32(cc&^(nvme.CCEnable|nvme.CCShutdownMask)))
	}
	return c.waitStatus(nvme.CSTSReady, 0)
}

// waitStatus waits until bits of CSTS have a value, for as long as CAP.TO says.
func (c *Controller) waitStatus(mask, want nvme.CSTS) error {
	limit := time.Now().Add(time.Duration(max(1, c.cap.Timeout())) * 500 * time.Millisecond)
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		v := nvme.CSTS(c.regs.Read32(nvme.RegCSTS))
		switch {
		case v == ^nvme.CSTS(0):
			return ErrGone
		case v&mask == want:
			return nil
		case v&nvme.CSTSFatal != 0 && want != 0:
			return ErrFatal
		case time.Now().After(limit):
			return fmt.Errorf("CSTS is %#x: %w", uint32(v), ErrTimeout)
		}
		time.Sleep(pause)
	}
}

// findCMB maps the controller memory buffer.
func (c *Controller) findCMB() error {
	if c.cfg.MapBAR == nil {
		return nil
	}
	if c.cap&nvme.CAPCMB != 0 {
		c.regs.Write64(nvme.RegCMBMSC, nvme.CMBMSCRegisters)
	}
	sz := nvme.CMBSZ(c.regs.Read32(nvme.RegCMBSZ))
	loc := nvme.CMBLOC(c.regs.Read32(nvme.RegCMBLOC))
	if sz.Size() == 0 {
		return nil
	}
	mem, err := c.cfg.MapBAR(loc.BAR(), loc.Offset(sz), sz.Size())
	if err != nil {
		return fmt.Errorf("the controller memory buffer: %w", err)
	}
	if len(mem.Bytes) < pageSize || mem.Addr%pageSize != 0 {
		mem.Free()
		return ib.Errorf("nvme_map_cmb", syscall.EINVAL, "%d bytes at %#x", len(mem.Bytes), mem.Addr)
	}
	if uint64(len(mem.Bytes)) > sz.Size() {
		mem.Bytes = mem.Bytes[:sz.Size()]
	}
	c.buffer = newCMB(mem)
	c.info.CMB, c.info.CMBLocation, c.info.CMBSize = sz, loc, len(mem.Bytes)
	return nil
}

// decodeCMB tells the controller by which address it is to know its buffer. A controller reset leaves that alone, but
// other resets do not.
func (c *Controller) decodeCMB() error {
	if c.buffer == nil || c.cap&nvme.CAPCMB == 0 {
		return nil
	}
	addr := c.buffer.mem.Addr
	// The half with the bits comes last: a controller may look at the address when it sees them.
	c.regs.Write32(nvme.RegCMBMSC+4, uint32(addr>>32))
	c.regs.Write32(nvme.RegCMBMSC, uint32(addr|nvme.CMBMSCEnable|nvme.CMBMSCRegisters))
	if c.regs.Read32(nvme.RegCMBSTS)&nvme.CMBSTSInvalid != 0 {
		return ib.Errorf("nvme_map_cmb", syscall.EINVAL, "the controller refuses the address %#x", addr)
	}
	return nil
}

// CMB allocates memory in the controller memory buffer. It returns nil if there is none.
func (c *Controller) CMB() DMA {
	if c.buffer == nil {
		return nil
	}
	return c.buffer
}

// Info returns what the controller says of itself.
func (c *Controller) Info() Info {
	c.admin.Lock()
	defer c.admin.Unlock()
	return c.info
}

// Admin executes an admin command, with n bytes of data.
func (c *Controller) Admin(ctx context.Context, cmd nvme.Command, data Memory, n int) (nvme.Completion, error) {
	return c.do(ctx, cmd, data, n)
}

func (c *Controller) do(ctx context.Context, cmd nvme.Command, data Memory, n int) (nvme.Completion, error) {
	req, err := c.ring.submit(ctx, true, cmd, data, n, nil)
	if err != nil {
		return nvme.Completion{}, err
	}
	return req.Wait(ctx)
}

// identifyInto executes an identify command; the data is in scratch then. The caller holds admin, or nobody else has
// the controller yet. A command that is given up still writes to scratch, so its context must not end.
func (c *Controller) identifyInto(cns uint8, nsid uint32) ([]byte, error) {
	cmd := nvme.Command{Opcode: nvme.AdminIdentify, NSID: nsid, CDW10: uint32(cns)}
	if _, err := c.do(context.Background(), cmd, c.scratch, pageSize); err != nil {
		if errors.Is(err, ErrTimeout) {
			c.ring.kill(err) // it may still be written, so nobody else may use scratch before a reset
		}
		return nil, fmt.Errorf("identify %#02x of namespace %d: %w", cns, nsid, err)
	}
	return c.scratch.Bytes[:pageSize], nil
}

func (c *Controller) identifyController() error {
	b, err := c.identifyInto(nvme.CNSController, 0)
	if err != nil {
		return err
	}
	i := &c.info
	i.Version = c.regs.Read32(nvme.RegVS)
	i.Serial, i.Model, i.Firmware = ascii(b[4:24]), ascii(b[24:64]), ascii(b[64:72])
	i.NQN = ascii(b[768:1024])
	i.CNTLID = binary.LittleEndian.Uint16(b[78:])
	i.SGLS = binary.LittleEndian.Uint32(b[536:])
	i.MaxEntries = c.cap.MaxEntries()
	i.MaxTransfer = 0
	if mdts := b[77]; mdts > 0 && mdts < 20 {
		i.MaxTransfer = 1 << (uint(mdts) + c.cap.MinPage())
	}
	return nil
}

// ascii returns text without what fills it up.
func ascii(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(bytes.TrimSpace(b))
}

// Namespace is what the controller says of a namespace.
type Namespace struct {
	ID        uint32
	Blocks    uint64
	BlockSize int
	Metadata  int // bytes beside each block
	ReadOnly  bool
}

// maxNamespaces bounds the lists that a controller may have a program read, and keep.
const maxNamespaces = 1 << 16

// Namespaces returns the namespaces of the controller, by number.
//
// Errors: EPROTO for lists that cannot be, or of more than 65536 namespaces; statuses of commands; the context's, which
// is looked at between commands.
func (c *Controller) Namespaces(ctx context.Context) ([]Namespace, error) {
	c.admin.Lock()
	defer c.admin.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	ids, err := c.namespaceIDs(ctx)
	if err != nil {
		return nil, err
	}
	var list []Namespace
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		b, err := c.identifyInto(nvme.CNSNamespace, id)
		if err != nil {
			return nil, err
		}
		ns, ok := parseNamespace(id, b)
		if !ok {
			return nil, ib.Errorf("nvme_namespaces", syscall.EPROTO, "namespace %d: a format that cannot be", id)
		}
		if ns.Blocks > 0 { // else it has gone since the list was made
			list = append(list, ns)
		}
	}
	return list, nil
}

// namespaceIDs returns the numbers of the namespaces. The caller holds admin.
func (c *Controller) namespaceIDs(ctx context.Context) ([]uint32, error) {
	const op, most = "nvme_namespaces", pageSize / 4
	var ids []uint32
	for above := uint32(0); ; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		b, err := c.identifyInto(nvme.CNSActiveNamespaces, above)
		if err != nil {
			return nil, err
		}
		n := 0
		for ; n < most; n++ {
			id := binary.LittleEndian.Uint32(b[4*n:])
			if id == 0 {
				break
			}
			if id <= above { // a list that does not rise would never end
				return nil, ib.Errorf(op, syscall.EPROTO, "namespace %d behind %d", id, above)
			}
			ids, above = append(ids, id), id
		}
		if len(ids) > maxNamespaces {
			return nil, ib.Errorf(op, syscall.EPROTO, "more than %d namespaces", maxNamespaces)
		}
		if n < most {
			return ids, nil
		}
	}
}

func parseNamespace(id uint32, b []byte) (Namespace, bool) {
	format := b[128+4*int(b[26]&0xf):]
	shift := format[2]
	ns := Namespace{ID: id, Blocks: binary.LittleEndian.Uint64(b), ReadOnly: b[99]&1 != 0,
		Metadata: int(binary.LittleEndian.Uint16(format))}
	if ns.Blocks == 0 {
		return ns, true
	}
	if shift < 9 || shift > 20 {
		return ns, false
	}
	ns.BlockSize = 1 << shift
	return ns, true
}

// NextEvent waits for an async event. If the context ends, the request stays, and the next call waits for it. Each event
// is returned once; if several calls wait, by one of them. An error is returned by all of them.
func (c *Controller) NextEvent(ctx context.Context) (nvme.Event, error) {
	for {
		req, err := c.eventRequest(ctx)
		if err != nil {
			return nvme.Event{}, err
		}
		cpl, err := req.wait(ctx, forever)
		if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return nvme.Event{}, err
		}
		c.eventMu.Lock()
		mine := c.event == req
		if mine {
			c.event = nil
		}
		c.eventMu.Unlock()
		if mine || err != nil {
			return nvme.ParseEvent(cpl.Result), err
		}
	}
}

// eventRequest returns the async event request under way, or a new one as soon as there is a slot.
func (c *Controller) eventRequest(ctx context.Context) (*Request, error) {
	w := waiter{limit: forever}
	for {
		req, err := c.tryEventRequest()
		if req != nil || err != nil {
			return req, err
		}
		if err := w.pause(ctx, c.ring); err != nil {
			return nil, fmt.Errorf("%s: %w", nvme.CommandName(true, nvme.AdminAsyncEventRequest), err)
		}
	}
}

// tryEventRequest is eventRequest without waiting: it returns nil if there is no slot.
func (c *Controller) tryEventRequest() (*Request, error) {
	c.eventMu.Lock()
	defer c.eventMu.Unlock()
	if c.event != nil {
		return c.event, nil
	}
	cmd := nvme.Command{Opcode: nvme.AdminAsyncEventRequest}
	req := &Request{ring: c.ring, name: nvme.CommandName(true, cmd.Opcode)}
	placed, err := c.ring.trySubmit(req, &cmd, 0, 0, nil)
	if !placed || err != nil {
		return nil, err
	}
	c.event = req
	return req, nil
}

// Reset resets the controller and brings it up again, without I/O queues. Commands that were under way return ErrReset;
// their memory is not used any more when Reset returns.
//
// Errors: ErrTimeout if the controller does not stop: it may still use all memory that it has, so queues and commands
// under way stay as they are, new commands return ErrReset, and Reset may be called again. If it stops and does not come
// up again, the error says why, and commands that were under way return ErrReset all the same. ErrGone if it is gone,
// which these commands return, too.
func (c *Controller) Reset() error {
	c.admin.Lock()
	defer c.admin.Unlock()
	return c.reset()
}

// resetFor resets the controller because a queue does not work any more. It does nothing if the queue has ended since,
// by a reset or otherwise: then the controller uses nothing of its commands any more.
func (c *Controller) resetFor(q *Queue) error {
	c.admin.Lock()
	defer c.admin.Unlock()
	switch {
	case c.queues[q.ring.id] != q:
		return nil
	case c.closed: // and it did not stop: it may do so now
		return c.stop(ErrClosed)
	}
	return c.reset()
}

// reset is Reset for callers that hold admin.
func (c *Controller) reset() error {
	if c.closed {
		return ErrClosed
	}
	if err := c.stop(ErrReset); err != nil {
		return fmt.Errorf("nvme_reset: %w", err)
	}
	if err := c.start(); err != nil {
		c.ring.kill(err)
		return fmt.Errorf("nvme_reset: %w", err)
	}
	return nil
}

// stop disables the controller. If it has stopped or is gone, the queues end, and their memory is given back.
func (c *Controller) stop(why error) error {
	c.endQueues(why)
	err := c.disable()
	switch {
	case err == nil:
		c.dropQueues(why)
	case stopped(err):
		c.dropQueues(err)
	}
	return err
}

// endQueues has all queues refuse new commands.
func (c *Controller) endQueues(why error) {
	c.ring.refuse(why)
	c.ring.mute()
	for _, q := range c.queues {
		q.ring.refuse(why)
		q.ring.mute()
	}
}

// dropQueues ends commands that are under way, when the controller uses no memory any more.
func (c *Controller) dropQueues(why error) {
	c.ring.kill(why)
	for id, q := range c.queues {
		q.ring.kill(why)
		q.ring.release()
		delete(c.queues, id)
	}
}

// Close deletes the queues, shuts the controller down and disables it. Closing again does nothing.
//
// Errors: ErrTimeout if the controller does not stop: it may still use all memory that it has, so none is given back,
// and Close may be called again. An error of the shutdown alone is returned once, and the controller is closed.
func (c *Controller) Close() error {
	c.admin.Lock()
	defer c.admin.Unlock()
	if c.ended {
		return nil
	}
	c.closed = true
	for _, q := range c.queues {
		q.ring.refuse(ErrClosed)
		_ = q.delete() // what follows ends it in any case
	}
	c.endQueues(ErrClosed)
	err := c.shutdown()
	if off := c.stop(ErrClosed); !stopped(off) {
		return fmt.Errorf("nvme_close: the controller does not stop: %w", off)
	}
	c.release()
	c.ended = true
	if err != nil && !errors.Is(err, ErrGone) { // else there is nothing left to be closed
		return fmt.Errorf("nvme_close: %w", err)
	}
	return nil
}

// shutdown has the controller write what it caches.
func (c *Controller) shutdown() error {
	cc := nvme.CC(c.regs.Read32(nvme.RegCC))
	c.regs.Write32(nvme.RegCC, uint32(cc&^nvme.CCShutdownMask|nvme.CCShutdownNormal))
	return c.waitStatus(nvme.CSTSShutdownMask, nvme.CSTSShutdownDone)
}

// release gives all memory back.
func (c *Controller) release() {
	if c.ring != nil {
		c.ring.release()
	}
	c.scratch.Free()
	if c.buffer != nil {
		if c.cap&nvme.CAPCMB != 0 {
			c.regs.Write64(nvme.RegCMBMSC, 0)
		}
		c.buffer.mem.Free()
	}
}
