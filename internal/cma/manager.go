// Package cma connects queue pairs by IP address, as rdma_cm of the kernel does: ids that are bound,
// resolved, connected and listened on, and events that say what became of that.
//
// Package cm (internal/cm) is the protocol below, without I/O. A Manager has a core of it for each
// device that it has opened (port), takes MADs from the device's queue pair 1 and sends what the core
// wants sent. Methods of ids, MADs and timers change ids and cores under one lock. What they leave to
// be sent, and the events, are then taken by flush, by one goroutine at a time, which holds no lock.
//
// Files: manager.go (devices, what goes out), follow.go (devices that appear), bind.go (addresses and
// ports), resolve.go, connect.go (the two sides of a connection), qpattr.go (what the queue pair is
// modified with), mcast.go.
package cma

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Manager is the connection manager of this process, for all its devices.
type Manager struct {
	cfg     Config
	base    time.Time
	opening sync.Mutex // held while a device is opened or all are closed; guards unfollow; taken before mu

	unfollow func() // ends the watch for devices that appear; nil: there is none

	mu       sync.Mutex // guards everything below, the cores, and the fields of ids
	flushing bool       // a goroutine is in flush, and will take what others leave
	rounds   uint64     // of flush, that have ended
	round    sync.Cond  // on mu: a round has ended
	ports    []*port    // the devices that are open
	ids      map[*ID]bool
	claims   map[claimKey]*claim
	// listeners are the ids that listen, by service id. A flood of requests must not look at all ids.
	listeners map[uint64][]*ID
	bound     map[boundKey][]*ID // the ids that have claims, by port
	sends     []outgoing
	events    []*Event
	closed    bool
}

// port is an open device with its protocol core.
type port struct {
	m       *Manager
	dev     Device
	mgmt    provider.Management
	core    *cm.Core
	release func()
	timer   *time.Timer
	wakes   cm.Time // when timer fires, at the latest deadline of the core or before; 0: it does not
	listens int     // ids that listen at addresses of the device
}

// outgoing is a MAD that a core wants sent.
type outgoing struct {
	p *port
	s cm.Send
}

// New makes a manager. Nothing is opened before it is needed.
func New(cfg Config) *Manager {
	m := &Manager{cfg: cfg, base: time.Now(), ids: map[*ID]bool{}, claims: map[claimKey]*claim{}, listeners: map[uint64][]*ID{}, bound: map[boundKey][]*ID{}}
	m.round.L = &m.mu
	return m
}

func (m *Manager) now() cm.Time { return time.Since(m.base) }

// devices returns the devices that ids can be bound to.
func (m *Manager) devices(op string) ([]Device, error) {
	all, err := m.cfg.Devices()
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, ib.Errorf(op, syscall.ENODEV, "there is no device")
	}
	return all, nil
}

// open returns the port of a device, and opens it if it is not open.
func (m *Manager) open(op string, d *Device) (*port, error) {
	m.opening.Lock()
	defer m.opening.Unlock()
	m.mu.Lock()
	i, closed := slices.IndexFunc(m.ports, func(p *port) bool { return p.dev.Addrs[0] == d.Addrs[0] }), m.closed
	if i >= 0 {
		defer m.mu.Unlock()
		return m.ports[i], nil
	}
	m.mu.Unlock()
	if closed {
		return nil, errClosed(op)
	}
	dev, release, err := d.Open()
	if err != nil {
		return nil, err
	}
	mgmt := dev.Management()
	if mgmt == nil {
		release()
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "device %s has no queue pair 1", d.Name)
	}
	p := &port{m: m, dev: *d, mgmt: mgmt, release: release}
	p.core = cm.New(cm.Config{GUID: mgmt.GUID(), NewID: mgmt.NewCommID, Rand: rand.Uint64, AckDelay: ackDelay,
		Listener: func(r *cm.Request) cm.Verdict { return m.judgeLocked(p, r) }})
	p.timer = time.AfterFunc(time.Hour, p.tick)
	m.mu.Lock()
	m.ports = append(m.ports, p)
	m.mu.Unlock()
	mgmt.Handle(p.receive)
	return p, nil
}

// ackDelay is the target ACK delay of a device, as rxe has it.
const ackDelay = 15

// receive takes a MAD of the device's queue pair 1.
func (p *port) receive(from, to netip.Addr, mad []byte) {
	p.m.change(func() { p.core.Receive(p.m.now(), from, to, mad) })
}

func (p *port) tick() {
	p.m.change(func() {
		p.wakes = 0
		p.core.Tick(p.m.now())
	})
}

// change calls f under the lock, and carries out what it leaves to be done.
func (m *Manager) change(f func()) {
	m.mu.Lock()
	f()
	m.drainLocked()
	m.mu.Unlock()
	m.flush()
}

// drainLocked takes what the cores have for others, and sets their timers.
func (m *Manager) drainLocked() {
	for _, p := range m.ports {
		for {
			if e, ok := p.core.NextEvent(); ok {
				m.coreEventLocked(p, &e)
				continue
			}
			s, ok := p.core.NextMAD()
			if !ok {
				break
			}
			m.sends = append(m.sends, outgoing{p, s})
		}
		p.setTimerLocked()
	}
}

// setTimerLocked makes the timer fire at the core's deadline, or before. Most deadlines do not come: the
// timer is not set anew for each that goes, or comes later.
func (p *port) setTimerLocked() {
	t, ok := p.core.Deadline()
	t = max(t, 1)
	if !ok || p.m.closed || p.wakes != 0 && p.wakes <= t {
		return
	}
	p.wakes = t
	p.timer.Reset(max(0, t-p.m.now()))
}

// flush sends MADs and delivers events, in order, until there are none. If a goroutine does so already,
// it leaves them to that one. So a sink may call methods of ids, but for Close and SetSink.
func (m *Manager) flush() {
	m.mu.Lock()
	if m.flushing || len(m.sends) == 0 && len(m.events) == 0 {
		m.mu.Unlock()
		return
	}
	m.flushing = true
	for {
		sends, events := m.sends, m.events
		m.sends, m.events = nil, nil
		if len(sends) == 0 && len(events) == 0 {
			m.flushing = false
			m.mu.Unlock()
			return
		}
		m.mu.Unlock()
		for i := range sends {
			s := &sends[i].s
			// What cannot be sent is lost, as on the way: the core repeats it.
			_ = sends[i].p.mgmt.Send(&provider.MAD{From: s.From, To: s.To, TClass: s.TClass, HopLimit: s.HopLimit, FlowLabel: s.FlowLabel, Bytes: s.MAD[:]})
		}
		for _, e := range events {
			m.mu.Lock()
			sink := e.ID.sink
			gone := e.ID.state == stateClosed
			m.mu.Unlock()
			switch {
			case !gone && sink != nil:
				sink(e)
			case e.New != nil: // nobody can take the request
				m.mu.Lock()
				e.New.closeLocked()
				m.drainLocked()
				m.mu.Unlock()
			}
		}
		m.mu.Lock()
		m.rounds++
		m.round.Broadcast()
	}
}

// flushedLocked waits until what there was to be sent and delivered has been, if a goroutine is in flush.
// No call of a sink is under way then that began before. It releases the lock meanwhile.
func (m *Manager) flushedLocked() {
	// What was left in this round is done in the next one.
	for end := m.rounds + 2; m.flushing && m.rounds < end; {
		m.round.Wait()
	}
}

func errClosed(op string) error {
	return ib.Errorf(op, syscall.ENODEV, "the connection manager is closed")
}

// opError returns an *ib.OpError with the errno that the kernel's connection manager has for an error of
// the protocol core.
func opError(op string, err error) error {
	var already *ib.OpError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &already):
		return err
	case errors.Is(err, cm.ErrConnected):
		return ib.Errorf(op, syscall.EISCONN, "the connection is established already")
	case errors.Is(err, cm.ErrNoID):
		return ib.Errorf(op, syscall.ENOMEM, "%v", err)
	}
	return ib.Errorf(op, syscall.EINVAL, "%v", err)
}

// Close destroys all ids and closes the devices. It is idempotent.
func (m *Manager) Close() error {
	m.mu.Lock()
	for id := range m.ids {
		id.closeLocked()
	}
	m.drainLocked()
	m.closed = true
	m.mu.Unlock()
	m.flush()
	m.mu.Lock()
	m.flushedLocked()
	m.mu.Unlock()
	m.opening.Lock()
	unfollow := m.unfollow // closed as it is, the manager makes no other
	m.opening.Unlock()
	if unfollow != nil {
		unfollow() // waits for a call, which needs opening
	}
	m.opening.Lock()
	defer m.opening.Unlock()
	m.mu.Lock()
	ports := m.ports // closed as it is, the manager opens no more
	m.mu.Unlock()
	for _, p := range ports {
		p.timer.Stop()
		p.mgmt.Handle(nil) // waits for a call, which needs mu
		p.release()
	}
	m.mu.Lock()
	m.ports = nil
	m.mu.Unlock()
	return nil
}
