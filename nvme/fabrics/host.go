package fabrics

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// HostConfig is how a host connects. The zero value of a field means the default.
type HostConfig struct {
	NQN     string   // the subsystem's name
	HostNQN string   // the host's. Empty: one that is made of HostID
	HostID  [16]byte // zero: a random one

	Queues    int // I/O queues. Zero: 1
	QueueSize int // commands that a queue has under way at most: 2 to 256. Zero: 128

	// KeepAlive is how long the target waits for a sign of the host. The host gives one twice as often, and waits as long
	// for its answer: without one the connections end, and all commands with them. Zero: 5 s; negative: both wait for
	// ever.
	KeepAlive time.Duration

	Config cm.Config // how connections are made: see TargetConfig
}

func (cfg *HostConfig) complete() error {
	if cfg.HostID == [16]byte{} {
		_, _ = rand.Read(cfg.HostID[:]) // never fails
		cfg.HostID[6], cfg.HostID[8] = cfg.HostID[6]&0x0f|0x40, cfg.HostID[8]&0x3f|0x80
	}
	if cfg.HostNQN == "" {
		h := cfg.HostID
		cfg.HostNQN = fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:])
	}
	if cfg.Queues == 0 && cfg.NQN != nvme.DiscoveryNQN { // which has none
		cfg.Queues = 1
	}
	if cfg.QueueSize == 0 {
		cfg.QueueSize = defaultQueueSize
	}
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = 5 * time.Second
	}
	cfg.KeepAlive = max(cfg.KeepAlive, 0)
	switch {
	case cfg.NQN == "" || len(cfg.NQN) > nvme.MaxNQN || len(cfg.HostNQN) > nvme.MaxNQN:
		return errors.New("a name is missing, or too long")
	case cfg.Queues < 0 || cfg.Queues > 1024:
		return fmt.Errorf("%d queues", cfg.Queues)
	case cfg.QueueSize < minQueueSize || cfg.QueueSize > maxQueueSize:
		return fmt.Errorf("queues of %d commands", cfg.QueueSize)
	case cfg.KeepAlive > 0 && cfg.KeepAlive < 100*time.Millisecond || cfg.KeepAlive > 24*time.Hour:
		return fmt.Errorf("a sign every %v", cfg.KeepAlive)
	}
	return nil
}

// Host is a host's connection to a subsystem. Its methods may be called by several goroutines.
type Host struct {
	cfg     HostConfig
	address string
	dev     *verbs.Device
	ownsDev bool
	pd      *verbs.PD

	controller uint16
	transfer   int // bytes of a command at most
	identity   identity

	admin *hostQueue
	io    []*hostQueue
	next  atomic.Uint32

	ctx     context.Context
	cancel  context.CancelFunc
	all     sync.WaitGroup
	closing sync.Once
	closed  error
}

// StatusError is the error of a command that the target has answered with another status than success.
type StatusError struct {
	Command string
	Status  nvme.Status
	Result  uint64
}

// Error says which command, and what the target says.
func (e *StatusError) Error() string { return fmt.Sprintf("nvme: %s: %v", e.Command, e.Status) }

// Dial connects to a subsystem of the target at an address, "host:port". Without a Device in the
// Config it opens the default one.
//
// Errors: EINVAL for a configuration that cannot be; *RefusedError if the target refuses a queue; *StatusError if it refuses
// the host; those of cm.Dial.
func Dial(ctx context.Context, address string, cfg HostConfig) (h *Host, err error) {
	const op = "nvme_dial"
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", op, err, syscall.EINVAL)
	}
	h = &Host{cfg: cfg, address: address, dev: cfg.Config.Device, transfer: page}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			_ = h.Close() // the first error says more
			h = nil
		}
	}()
	if h.dev == nil {
		if h.dev, err = verbs.Open("", nil); err != nil {
			return h, err
		}
		h.ownsDev = true
	}
	if h.pd, err = h.dev.AllocPD(); err != nil {
		return h, err
	}
	if err = h.begin(ctx); err != nil {
		return h, err
	}
	for i := range h.cfg.Queues {
		q, err := h.connect(ctx, uint16(i+1), h.cfg.QueueSize, h.identity.room()) //nolint:gosec // at most 1024
		if err != nil {
			return h, err
		}
		h.io = append(h.io, q)
	}
	if cfg.KeepAlive > 0 {
		h.all.Go(func() { h.keepAlive(cfg.KeepAlive/2, cfg.KeepAlive) })
	}
	return h, nil
}

// connect connects a queue.
func (h *Host) connect(ctx context.Context, qid uint16, size, room int) (*hostQueue, error) {
	q, err := h.newQueue(ctx, qid, size, room)
	if err != nil {
		return nil, err
	}
	data := nvme.ConnectData{HostID: h.cfg.HostID, CNTLID: nvme.CNTLIDDynamic, SubNQN: h.cfg.NQN, HostNQN: h.cfg.HostNQN}
	p := nvme.Connect{QID: qid, SQSize: uint16(size - 1)} //nolint:gosec // at most maxQueueSize
	if qid == 0 {
		p.KATO = uint32(h.cfg.KeepAlive.Milliseconds()) //nolint:gosec // at most a day
	} else {
		data.CNTLID = h.controller
	}
	var b [nvme.ConnectDataSize]byte
	data.Put(&b)
	c, err := q.run(ctx, "connect", nvme.ConnectCommand(p), b[:], nvme.FromHost)
	if err != nil {
		_ = q.close() // the first error says more
		return nil, err
	}
	if qid == 0 {
		h.controller = uint16(c.Result) //nolint:gosec // the low half
	}
	return q, nil
}

// run executes a command that must succeed.
func (q *hostQueue) run(ctx context.Context, name string, cmd nvme.Command, data []byte, dir nvme.Direction) (nvme.Completion, error) {
	c, err := q.do(ctx, cmd, data, dir)
	if err == nil && c.Status != nvme.StatusSuccess {
		err = &StatusError{Command: name, Status: c.Status, Result: c.Result}
	}
	return c, err
}

// begin connects the first queue, and enables the controller.
func (h *Host) begin(ctx context.Context) (err error) {
	if h.admin, err = h.connect(ctx, 0, adminQueueSize, 0); err != nil {
		return err
	}
	v, err := h.property(ctx, nvme.RegCAP, true)
	if err != nil {
		return err
	}
	capabilities := nvme.CAP(v)
	if err := h.setCC(ctx, nvme.MakeCC(12)); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, time.Duration(max(capabilities.Timeout(), 1))*500*time.Millisecond)
	defer cancel()
	for {
		v, err := h.property(limit, nvme.RegCSTS, false)
		if err != nil {
			return err
		}
		if csts := nvme.CSTS(v); csts&nvme.CSTSFatal != 0 { //nolint:gosec // a register of 32 bits
			return fmt.Errorf("nvme: the controller does not take the configuration: %w", syscall.EIO)
		} else if csts&nvme.CSTSReady != 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	h.cfg.QueueSize = min(h.cfg.QueueSize, capabilities.MaxEntries())
	return h.identify(ctx)
}

// identify learns what the controller can do, and asks for queues.
func (h *Host) identify(ctx context.Context) error {
	b := make([]byte, page)
	if _, err := h.admin.run(ctx, "identify", nvme.Command{Opcode: nvme.AdminIdentify, CDW10: identifyController}, b, nvme.ToHost); err != nil {
		return err
	}
	h.identity = parseIdentity(b)
	if h.identity.sgls&sglsKeyed == 0 {
		return fmt.Errorf("nvme: the controller knows no keys: %w", syscall.EOPNOTSUPP)
	}
	h.transfer = 1 << 20
	if m := h.identity.mdts; m != 0 && m < 20 {
		h.transfer = min(h.transfer, page<<m)
	}
	if h.cfg.Queues == 0 {
		return nil
	}
	want := uint32(h.cfg.Queues - 1) //nolint:gosec // at most 1024
	c, err := h.admin.run(ctx, "set features", nvme.Command{Opcode: nvme.AdminSetFeatures, CDW10: featureQueues, CDW11: want | want<<16}, nil, nvme.NoData)
	if err != nil {
		return err
	}
	h.cfg.Queues = min(h.cfg.Queues, int(c.Result&0xffff)+1, int(c.Result>>16&0xffff)+1)
	return nil
}

func (h *Host) property(ctx context.Context, off uint32, wide bool) (uint64, error) {
	c, err := h.admin.run(ctx, "property get", nvme.PropertyCommand(nvme.FabricsPropertyGet, nvme.Property{Offset: off, Wide: wide}), nil, nvme.NoData)
	return c.Result, err
}

func (h *Host) setCC(ctx context.Context, cc nvme.CC) error {
	_, err := h.admin.run(ctx, "property set", nvme.PropertyCommand(nvme.FabricsPropertySet, nvme.Property{Offset: nvme.RegCC, Value: uint64(cc)}), nil, nvme.NoData)
	return err
}

// keepAlive tells the target again and again that the host is there. If the target does not answer within the limit, or
// the first connection has ended, it ends all others: nobody would answer their commands. A target that answers with a bad
// status is there, and is told again.
func (h *Host) keepAlive(every, limit time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-h.ctx.Done():
			return
		case <-tick.C:
		}
		ctx, cancel := context.WithTimeout(h.ctx, limit)
		_, err := h.Admin(ctx, nvme.Command{Opcode: nvme.AdminKeepAlive}, nil, nvme.NoData)
		cancel()
		if h.ctx.Err() != nil {
			return // Close has yet to tell the target, by the first queue
		}
		if err != nil {
			h.end()
			return
		}
	}
}

// end lets the commands of all queues fail, now and later.
func (h *Host) end() {
	h.admin.end()
	for _, q := range h.io {
		q.end()
	}
}

// Close shuts the controller down, and ends the connections. A second call does nothing.
func (h *Host) Close() error {
	h.closing.Do(func() { h.closed = h.close() })
	return h.closed
}

func (h *Host) close() (err error) {
	h.cancel()
	h.all.Wait()
	for _, q := range h.io {
		err = errors.Join(err, q.close())
	}
	if h.admin != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_ = h.setCC(ctx, nvme.MakeCC(12)|nvme.CCShutdownNormal) // the target may be gone
		cancel()
		err = errors.Join(err, h.admin.close())
	}
	if h.pd != nil {
		err = errors.Join(err, h.pd.Close())
	}
	if h.ownsDev {
		err = errors.Join(err, h.dev.Close())
	}
	return err
}

// Discover asks the target at an address which subsystems there are. The names in cfg are not needed.
//
// Errors: those of Dial; *StatusError.
func Discover(ctx context.Context, address string, cfg HostConfig) ([]nvme.DiscoveryEntry, error) {
	cfg.NQN, cfg.Queues = nvme.DiscoveryNQN, 0
	h, err := Dial(ctx, address, cfg)
	if err != nil {
		return nil, err
	}
	entries, err := h.discover(ctx)
	return entries, errors.Join(err, h.Close())
}

// discover reads the log page, in pieces, until it has not changed meanwhile.
func (h *Host) discover(ctx context.Context) ([]nvme.DiscoveryEntry, error) {
	read := func(off, n int) ([]byte, error) {
		b := make([]byte, n)
		cmd := nvme.Command{Opcode: nvme.AdminGetLogPage, CDW10: logDiscovery | uint32(n/4-1)<<16, CDW11: uint32(n/4-1) >> 16, //nolint:gosec // at most a page
			CDW12: uint32(off), CDW13: uint32(uint64(off) >> 32)} //nolint:gosec // the two halves
		_, err := h.admin.run(ctx, "get log page", cmd, b, nvme.ToHost)
		return b, err
	}
	const head, record, most = 1024, 1024, 4096
	for {
		first, err := read(0, head)
		if err != nil {
			return nil, err
		}
		generation, count := le.Uint64(first), le.Uint64(first[8:])
		if count > most {
			return nil, fmt.Errorf("nvme: a log page of %d entries: %w", count, syscall.EINVAL)
		}
		whole := first
		for i := range int(count) {
			b, err := read(head+i*record, record)
			if err != nil {
				return nil, err
			}
			whole = append(whole, b...)
		}
		if first, err = read(0, head); err != nil {
			return nil, err
		}
		if le.Uint64(first) == generation {
			_, entries := nvme.ParseDiscovery(whole)
			return entries, nil
		}
	}
}

// Controller returns the controller's number.
func (h *Host) Controller() uint16 { return h.controller }

// Admin executes an admin command. Data goes to the target, or comes from it.
//
// Errors: EINVAL for more data than the controller takes, or than 136 KiB; ErrEnded; the context's error. How the command has
// ended is in its completion.
func (h *Host) Admin(ctx context.Context, cmd nvme.Command, data []byte, dir nvme.Direction) (nvme.Completion, error) {
	return h.admin.do(ctx, cmd, data, dir)
}

// IO executes an I/O command, on one queue after the other.
//
// Errors: EINVAL without an I/O queue, and for more data than the controller takes, or than 1 MiB; those of Admin.
func (h *Host) IO(ctx context.Context, cmd nvme.Command, data []byte, dir nvme.Direction) (nvme.Completion, error) {
	if len(h.io) == 0 {
		return nvme.Completion{}, fmt.Errorf("nvme: there is no I/O queue: %w", syscall.EINVAL)
	}
	return h.io[int(h.next.Add(1))%len(h.io)].do(ctx, cmd, data, dir)
}

// What identify and set features are asked for.
const (
	identifyNamespace  = 0x00
	identifyController = 0x01
	featureQueues      = 0x07
	logDiscovery       = 0x70
)

// identity is what a host needs to know of a controller.
type identity struct {
	mdts    uint8  // the longest transfer: a power of two of pages; 0: any
	sgls    uint32 // which descriptors it knows
	capsule uint32 // the length of a command with its data, in units of 16 bytes
	offset  uint16 // where the data begins behind the command, in the same units
}

// Bits of sgls.
const (
	sglsKeyed  = 1 << 2  // keyed descriptors
	sglsOffset = 1 << 20 // descriptors of data in the capsule
)

func parseIdentity(b []byte) identity {
	return identity{mdts: b[77], sgls: le.Uint32(b[536:]), capsule: le.Uint32(b[1792:]), offset: le.Uint16(b[1800:])}
}

// room returns how many bytes of data the host puts behind a command: none if the controller does not know the descriptor
// for it, or wants the data elsewhere; and not more than is of use, whatever the controller says.
func (i *identity) room() int {
	const command = commandBytes / 16
	if i.sgls&sglsOffset == 0 || i.offset != 0 || i.capsule < command {
		return 0
	}
	return int(min(i.capsule-command, maxInCapsule/16)) * 16
}
