package fabrics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// TargetConfig is what a target serves, and how. The zero value of a field means the default.
type TargetConfig struct {
	// Subsystems are what is served, at least one. The target adds one for discovery, which tells hosts of them.
	Subsystems []*nvme.Subsystem

	// QueueSize is how many commands of a host's queue are under way at most: 2 to 256. Zero: 128.
	QueueSize int

	// Queues is how many I/O queues a host may have. Zero: 64.
	Queues int

	// Connections is how many queues of all hosts there are at a time. Zero: 1024.
	Connections int

	// ConnectTimeout is how long a connection may be there without a Connect command. Zero: 10 s.
	ConnectTimeout time.Duration

	// InCapsule is how many bytes of a write a capsule may carry: up to 16 KiB, in multiples of 16. Zero: 4096;
	// negative: none.
	InCapsule int

	// MaxTransfer is how many bytes a command may move: a power of two from 8 KiB to 8 MiB. Zero: 1 MiB.
	MaxTransfer int

	// Buffers is where data passes through. Nil: memory that the target allocates.
	Buffers Buffers

	// Workers is how many commands of a queue are executed at a time. Zero: one, by the goroutine that takes them: best
	// for namespaces in memory, where no command waits.
	Workers int

	// Config is how connections are made: Device, if the target is not to open one. Queue pairs, completion queues and
	// private data are the target's own.
	Config cm.Config

	// Log is told of hosts that come and go, and of those that do not keep to the rules. Nil: nobody is.
	Log *slog.Logger
}

// Buffers is memory for data. A target takes some for each I/O queue. It may go away while it is used, as memory of a device
// that is removed does: then the queue ends.
type Buffers interface {
	// Alloc returns n bytes, or fewer if there are not so many. They are free again when release is called.
	Alloc(n int) (b []byte, release func(), err error)
}

// Stats is what a target has done.
type Stats struct {
	Connections, Refused uint64 // of queues
	Commands             uint64
	InCapsule            uint64 // bytes that came with commands
	Read, Written        uint64 // bytes that READs and WRITEs have moved
	Waited               uint64 // commands that waited for memory
	OwnBuffers           uint64 // I/O queues whose memory is not that of Buffers, since that gave none
	Expired              uint64 // hosts that have not said for too long that they are there, and connections without a Connect command
}

// Target serves subsystems to hosts.
type Target struct {
	cfg      TargetConfig
	listener *cm.Listener
	dev      *verbs.Device
	ownsDev  bool
	pd       *verbs.PD

	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup // the goroutines

	mu     sync.Mutex // guards what follows, and the queues of associations
	closed bool
	hosts  map[key]*association
	queues map[*queue]bool

	stats struct {
		connections, refused, commands, inCapsule, read, written, waited, ownBuffers, expired atomic.Uint64
	}
}

func (cfg *TargetConfig) complete() error {
	set := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	set(&cfg.QueueSize, defaultQueueSize)
	set(&cfg.Queues, 64)
	set(&cfg.Connections, 1024)
	set(&cfg.InCapsule, defaultInCapsule)
	set(&cfg.MaxTransfer, defaultTransfer)
	cfg.InCapsule = max(cfg.InCapsule, 0)
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 10 * time.Second
	}
	switch {
	case len(cfg.Subsystems) == 0:
		return errors.New("no subsystem")
	case cfg.QueueSize < minQueueSize || cfg.QueueSize > maxQueueSize:
		return fmt.Errorf("queues of %d commands", cfg.QueueSize)
	case cfg.Queues < 1 || cfg.Queues > 1024:
		return fmt.Errorf("%d queues", cfg.Queues)
	case cfg.InCapsule > maxInCapsule || cfg.InCapsule%16 != 0:
		return fmt.Errorf("%d bytes in a capsule", cfg.InCapsule)
	case cfg.MaxTransfer < 2*page || cfg.MaxTransfer > 8<<20 || cfg.MaxTransfer&(cfg.MaxTransfer-1) != 0:
		return fmt.Errorf("commands of %d bytes", cfg.MaxTransfer)
	case cfg.Workers < 0 || cfg.Connections < 0 || cfg.ConnectTimeout < 0:
		return fmt.Errorf("%d workers, %d connections, %v to connect", cfg.Workers, cfg.Connections, cfg.ConnectTimeout)
	case cfg.Config.PD != nil || cfg.Config.SendCQ != nil || cfg.Config.RecvCQ != nil || cfg.Config.SRQ != nil:
		return errors.New("queues and domains are the target's own")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Listen starts a target at an address, "host:port"; NVMe over RDMA has port 4420. The host must be an address of this
// machine, or there must be a Device in the Config.
//
// Errors: EINVAL for a configuration that cannot be; those of cm.Listen.
func Listen(ctx context.Context, address string, cfg TargetConfig) (*Target, error) {
	const op = "nvmet_listen"
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", op, err, syscall.EINVAL)
	}
	t := &Target{cfg: cfg, dev: cfg.Config.Device, hosts: make(map[key]*association), queues: make(map[*queue]bool)}
	if t.dev == nil {
		at, err := netip.ParseAddrPort(address)
		if err != nil {
			return nil, fmt.Errorf("%s: %w: %w", op, err, syscall.EINVAL)
		}
		if t.dev, err = verbs.Open("", &verbs.Config{Addrs: []netip.Addr{at.Addr()}}); err != nil {
			return nil, err
		}
		t.ownsDev = true
	}
	var err error
	if t.pd, err = t.dev.AllocPD(); err != nil {
		return nil, errors.Join(err, t.giveBack())
	}
	conf := cfg.Config
	conf.Device = t.dev
	if t.listener, err = cm.Listen(ctx, address, &conf); err != nil {
		return nil, errors.Join(err, t.giveBack())
	}
	if err := t.addDiscovery(); err != nil {
		return nil, errors.Join(err, t.listener.Close(), t.giveBack())
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.all.Go(t.accept)
	t.all.Go(t.watch)
	return t, nil
}

// addDiscovery adds a subsystem that tells hosts of the others.
func (t *Target) addDiscovery() error {
	at := t.listener.Addr()
	family := nvme.AddressIPv4
	if at.Addr().Is6() {
		family = nvme.AddressIPv6
	}
	var entries []nvme.DiscoveryEntry
	for _, s := range t.cfg.Subsystems {
		entries = append(entries, nvme.DiscoveryEntry{Transport: nvme.TransportRDMA, Family: family, PortID: 1,
			Address: at.Addr().String(), Service: strconv.Itoa(int(at.Port())), NQN: s.NQN()})
	}
	d, err := nvme.NewSubsystem(nvme.SubsystemConfig{Discovery: true})
	if err != nil {
		return err
	}
	t.cfg.Subsystems = append(slices.Clone(t.cfg.Subsystems), d)
	return d.SetDiscovery(entries)
}

func (t *Target) giveBack() error {
	var err error
	if t.pd != nil {
		err = t.pd.Close()
	}
	if t.ownsDev {
		err = errors.Join(err, t.dev.Close())
	}
	return err
}

// Addr returns where the target listens.
func (t *Target) Addr() netip.AddrPort { return t.listener.Addr() }

// Stats returns what the target has done.
func (t *Target) Stats() Stats {
	s := &t.stats
	return Stats{Connections: s.connections.Load(), Refused: s.refused.Load(), Commands: s.commands.Load(), InCapsule: s.inCapsule.Load(),
		Read: s.read.Load(), Written: s.written.Load(), Waited: s.waited.Load(), OwnBuffers: s.ownBuffers.Load(), Expired: s.expired.Load()}
}

// Queue is a queue that a host has connected.
type Queue struct {
	Subsystem  string // its name
	Host       string // the same
	Controller uint16
	ID         uint16 // 0: for admin commands

	conn *cm.Conn
}

// Queues returns the queues of all hosts, sorted.
func (t *Target) Queues() []Queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Queue
	for _, a := range t.hosts {
		for _, q := range a.queues {
			all = append(all, Queue{Subsystem: a.sub.NQN(), Host: a.host, Controller: a.number, ID: q.qid, conn: q.conn})
		}
	}
	slices.SortFunc(all, func(a, b Queue) int {
		return cmp.Or(cmp.Compare(a.Subsystem, b.Subsystem), cmp.Compare(a.Controller, b.Controller), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// Fail moves the queue's queue pair to the error state, as a failure does: commands that are not answered yet never are, and
// the connection ends. A host connects again then. It is for tests of hosts.
//
// Errors: those of QP.Modify, if the queue has ended.
func (q *Queue) Fail() error {
	return q.conn.QP().Modify(&verbs.QPAttr{State: verbs.QPErr}, verbs.QPMaskState)
}

// Close ends all connections, and the target. A second call does nothing.
func (t *Target) Close() error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil
	}
	t.closed = true
	t.mu.Unlock()
	err := t.listener.Close()
	t.cancel()
	t.all.Wait()
	return errors.Join(err, t.giveBack())
}

// accept takes connections until the target is closed.
func (t *Target) accept() {
	for {
		r, err := t.listener.Next(t.ctx)
		if err != nil {
			return // the listener is closed
		}
		t.all.Go(func() { t.meet(r) })
	}
}

// meet answers a host's request, and serves the queue until it ends.
func (t *Target) meet(r *cm.Request) {
	q, why := t.newQueue(r)
	if why != 0 {
		t.stats.refused.Add(1)
		t.cfg.Log.Info("refused", "host", r.RemoteAddr(), "why", why)
		_ = r.Reject(cm.ReasonProgram, refused(why)) // the host may be gone
		return
	}
	if err := q.connect(r); err != nil {
		t.stats.refused.Add(1)
		t.cfg.Log.Info("not connected", "host", r.RemoteAddr(), "error", err)
		q.end()
		return
	}
	t.stats.connections.Add(1)
	q.serve()
	q.end()
}

// newQueue checks what a host asks for.
func (t *Target) newQueue(r *cm.Request) (*queue, Refusal) {
	want, ok := parseRequest(r.Private())
	size := int(want.sendSize) + 1
	switch {
	case !ok:
		return nil, RefusedLength
	case want.format != 0:
		return nil, RefusedFormat
	case int(want.qid) > t.cfg.Queues:
		return nil, RefusedQueue
	case size < minQueueSize || want.qid == 0 && size > adminQueueSize || size > maxQueueSize:
		return nil, RefusedSendSize
	case int(want.recvSize) < minQueueSize:
		return nil, RefusedRecvSize
	}
	q := &queue{t: t, qid: want.qid, size: min(size, max(t.cfg.QueueSize, adminQueueSize)), since: time.Now()}
	q.ctx, q.cancel = context.WithCancel(t.ctx)
	if !t.addQueue(q) {
		q.cancel()
		return nil, RefusedResources
	}
	if err := q.allocate(); err != nil {
		t.cfg.Log.Warn("no queue", "error", err)
		q.end()
		return nil, RefusedResources
	}
	return q, 0
}

// addQueue notes a queue. It reports whether there are not too many.
func (t *Target) addQueue(q *queue) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queues) >= t.cfg.Connections {
		return false
	}
	t.queues[q] = true
	return true
}

func (t *Target) removeQueue(q *queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.queues, q)
}

// watch ends associations whose host has not said for too long that it is there, and connections that are part of none.
func (t *Target) watch() {
	tick := time.NewTicker(min(500*time.Millisecond, t.cfg.ConnectTimeout))
	defer tick.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case now := <-tick.C:
			t.mu.Lock()
			for _, a := range t.hosts {
				if a.expired(now) {
					t.stats.expired.Add(1)
					t.cfg.Log.Warn("a host is gone", "host", a.host, "controller", a.number)
					a.dropLocked()
				}
			}
			for q := range t.queues {
				if q.of == nil && now.Sub(q.since) > t.cfg.ConnectTimeout {
					t.stats.expired.Add(1)
					q.cancel()
				}
			}
			t.mu.Unlock()
		}
	}
}

// association is a host's controller, and its queues.
type association struct {
	t      *Target
	sub    *nvme.Subsystem
	ctrl   atomic.Pointer[nvme.Controller] // from one reset to the next
	cfg    nvme.ControllerConfig
	number uint16
	host   string // its name
	id     [16]byte
	seen   atomic.Int64 // when a command came last, in nanoseconds

	props properties

	queues map[uint16]*queue // guarded by the target's mu
	ended  bool              // the same
}

// expired reports whether the host has been silent for twice as long as it may.
func (a *association) expired(now time.Time) bool {
	keep := a.ctrl.Load().KeepAliveTimeout()
	return keep > 0 && now.Sub(time.Unix(0, a.seen.Load())) > 2*keep
}

// dropLocked ends all queues of an association. The target's mu is held.
func (a *association) dropLocked() {
	if a.ended {
		return
	}
	a.ended = true
	delete(a.t.hosts, key{a.sub, a.number})
	for _, q := range a.queues {
		q.cancel()
	}
}

// join makes a queue one of the association.
func (a *association) join(q *queue) bool {
	a.t.mu.Lock()
	defer a.t.mu.Unlock()
	if a.ended || a.queues[q.qid] != nil {
		return false
	}
	a.queues[q.qid] = q
	q.of = a
	return true
}

// leave ends a queue's membership; with the first queue the association ends.
func (a *association) leave(q *queue) {
	a.t.mu.Lock()
	delete(a.queues, q.qid)
	if q.qid == 0 {
		a.dropLocked()
	}
	a.t.mu.Unlock()
	a.finishReset()
}

// endIO ends the I/O queues.
func (a *association) endIO() {
	a.t.mu.Lock()
	defer a.t.mu.Unlock()
	for id, q := range a.queues {
		if id != 0 {
			q.cancel()
		}
	}
}

// finishReset ends a reset when the last I/O queue has gone: the controller is as new then, and not ready.
func (a *association) finishReset() {
	p := &a.props
	p.mu.Lock()
	defer p.mu.Unlock()
	first := a.only()
	if !p.resetting || first == nil {
		return
	}
	p.resetting = false
	a.ctrl.Load().Close()
	first.dropEvents()
	ctrl, err := a.sub.NewController(a.cfg)
	if err != nil { // its number was free, so that cannot be
		a.t.cfg.Log.Error("a controller is not there after its reset", "controller", a.number, "error", err)
		p.csts |= nvme.CSTSFatal
		return
	}
	a.ctrl.Store(ctrl)
	p.csts &^= nvme.CSTSReady | nvme.CSTSFatal
}

// close closes the controller. A reset that has not ended does not end any more.
func (a *association) close() {
	a.props.mu.Lock()
	defer a.props.mu.Unlock()
	a.props.resetting = false
	a.ctrl.Load().Close()
}

// only returns the first queue if it is the only one.
func (a *association) only() *queue {
	a.t.mu.Lock()
	defer a.t.mu.Unlock()
	if len(a.queues) > 1 {
		return nil
	}
	return a.queues[0]
}
