package cma

// Devices that appear while the process runs: a network interface has come up, or has got an
// address. An id that is bound to all addresses is bound to those of such a device, too.

import (
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

const (
	// settleTime is the pause before the devices are listed anew: a change of a network often
	// consists of several.
	settleTime = 20 * time.Millisecond
	// againTime is the pause before a device is tried again that could not be opened, and mostTime
	// that after many attempts. Where the kernel does not report changes, the devices are listed so
	// often.
	againTime = time.Second
	mostTime  = 32 * time.Second
)

// Follow calls f when network interfaces or addresses of the host have changed, and, while f reports
// that something is left to be done, again after a while. The calls are made by one goroutine. stop
// ends them, and waits for one that is under way. It is idempotent.
func Follow(f func() (left bool)) (stop func()) {
	changes, err := sys.WatchNet()
	changed, ended := make(chan struct{}, 1), make(chan struct{})
	var wg sync.WaitGroup
	if err == nil {
		wg.Go(func() {
			defer close(changed)
			for changes.Wait() == nil {
				select {
				case changed <- struct{}{}:
				default:
				}
			}
		})
	} else {
		close(changed)
	}
	wg.Go(func() { follow(f, changed, ended) })
	return sync.OnceFunc(func() {
		close(ended)
		if changes != nil {
			_ = changes.Close() // returns nil
		}
		wg.Wait()
	})
}

// follow calls f after each value of changed, until ended is closed. If changed is closed, nobody
// reports changes: then it calls f all the time.
func follow(f func() bool, changed <-chan struct{}, ended <-chan struct{}) {
	pause := againTime
	for left := false; ; {
		var again <-chan time.Time
		if left || changed == nil {
			again = time.After(pause)
		}
		select {
		case <-ended:
			return
		case _, reported := <-changed:
			if !reported {
				changed = nil
				continue
			}
			select {
			case <-ended:
				return
			case <-time.After(settleTime):
			}
			pause = againTime
		case <-again:
			if changed != nil {
				pause = min(2*pause, mostTime)
			}
		}
		left = f()
	}
}

// passes reports whether a device that cannot be opened is left out, by an id that is bound to all
// addresses: another program has it, or its interface or address has just gone or is not ready yet.
func passes(err error) bool {
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.ENODEV)
}

// openAll opens all devices. missing reports whether some of them are left out.
func (m *Manager) openAll(op string) (ports []*port, missing bool, err error) {
	m.follow()
	all, err := m.devices(op)
	if err != nil {
		return nil, false, err
	}
	var first error
	for i := range all {
		p, err := m.open(op, &all[i])
		switch {
		case err == nil:
			ports = append(ports, p)
		case !passes(err):
			return nil, false, err
		case first == nil:
			first = err
		}
	}
	if len(ports) == 0 {
		return nil, false, first
	}
	return ports, first != nil, nil
}

// follow makes the manager take devices that appear.
func (m *Manager) follow() {
	if m.cfg.Fixed {
		return
	}
	m.opening.Lock()
	defer m.opening.Unlock()
	m.mu.Lock()
	closed := m.closed
	m.mu.Unlock()
	if m.unfollow == nil && !closed {
		m.unfollow = Follow(m.appeared)
	}
}

// appeared opens the devices that have appeared, if there are ids that are bound to all addresses. It
// reports whether it has to be called again.
func (m *Manager) appeared() (left bool) {
	const op = "listen"
	m.mu.Lock()
	wanted := false
	for id := range m.ids {
		wanted = wanted || id.isWild()
	}
	m.mu.Unlock()
	if !wanted {
		return false
	}
	_, left, err := m.openAll(op)
	if err != nil {
		left = true
	}
	m.change(func() {
		for id := range m.ids {
			if id.isWild() {
				left = id.extendLocked() || left
			}
		}
	})
	return left
}

// isWild reports whether the id is bound to all addresses. Manager.mu is held.
func (id *ID) isWild() bool {
	return (id.state == stateBound || id.state == stateListen) && id.port == nil && IsAny(id.src.Addr())
}

// extendLocked claims the id's port at addresses of devices that were not there when it was bound. It
// reports whether the port is taken somewhere.
func (id *ID) extendLocked() (left bool) {
	m := id.m
	for _, p := range m.ports {
		for i, a := range p.dev.Addrs {
			k := claimKey{p, i, id.ps, id.src.Port()}
			if !id.standsFor(id.src.Addr(), a) || slices.ContainsFunc(id.claims, func(c *claim) bool { return c.key == k }) {
				continue
			}
			if o := m.claims[k]; o != nil && !id.reuse {
				left = true
				continue
			}
			c, err := m.claimOneLocked(k, id.reuse)
			if err != nil {
				left = true
				continue
			}
			if id.state == stateListen {
				if c.bound.Listen() != nil {
					m.freeClaimLocked(c)
					left = true
					continue
				}
				m.listensLocked(p, 1)
			}
			id.claims = append(id.claims, c)
		}
	}
	return left
}
