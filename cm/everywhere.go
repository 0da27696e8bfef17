package cm

// Listeners at all addresses of all devices. Each device has a connection manager of its own, so such a
// listener has a part for each of them, all at the same port, and further parts when devices appear.

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// portTries is how often a port is looked for that is free at all devices.
const portTries = 64

// listenAll makes the listener listen at all devices, and at those that appear.
func (l *Listener) listenAll(op string) error {
	anyPort := l.at.Port() == 0
	for try := 1; ; try++ {
		_, err := l.addAll(op, true)
		if err == nil {
			break
		}
		if !anyPort || !isTaken(err) || try == portTries {
			return err
		}
		if err := l.removeAll(); err != nil { // the port that is free at the first device is taken at another
			return err
		}
	}
	l.unfollow = cma.Follow(func() bool {
		left, err := l.addAll(op, false)
		return left || err != nil
	})
	_, _ = l.addAll(op, false) // one may have appeared before Follow; what fails is tried again with the next
	return nil
}

func isTaken(err error) bool {
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL)
}

// addAll makes the listener listen at devices at which it does not. It passes over those that cannot be
// opened, unless the listener has no other, and those at which the port is taken, unless strict is set.
// It reports whether some are left.
func (l *Listener) addAll(op string, strict bool) (left bool, err error) {
	l.adding.Lock()
	defer l.adding.Unlock()
	all, err := verbs.Devices()
	if err != nil {
		return false, err
	}
	if others := slices.DeleteFunc(slices.Clone(all), isLoopback); len(others) > 0 {
		all = others
	}
	var first error
	for i := range all {
		for {
			a, ok := l.missing(all[i].Addrs)
			if !ok {
				break
			}
			opened, err := l.add(op, a)
			if err == nil {
				continue
			}
			if opened && strict || !isTaken(err) && !errors.Is(err, syscall.ENODEV) {
				return false, err
			}
			left = true
			if first == nil {
				first = err
			}
			break
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.parts) == 0 && first == nil {
		first = syscall.ENODEV
	}
	if len(l.parts) == 0 {
		return left, first
	}
	return left, nil
}

func isLoopback(d verbs.DeviceInfo) bool { return d.Addrs[0].IsLoopback() }

// missing returns an address that the listener is to listen at, and does not.
func (l *Listener) missing(addrs []netip.Addr) (netip.Addr, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range addrs {
		if (a.Is4() || l.at.Addr().Is6()) && !l.closed && !slices.ContainsFunc(l.parts, func(p *part) bool { return slices.Contains(p.s.addrs, a) }) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// removeAll ends all parts of a listener that is being made.
func (l *Listener) removeAll() error {
	for n := len(l.parts); n > 0; n-- {
		if err := l.parts[n-1].close(); err != nil {
			return err
		}
		l.parts = l.parts[:n-1]
	}
	l.at = netip.AddrPortFrom(l.at.Addr(), 0)
	return nil
}
