package main

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/verbena-rdma/verbena/internal/provider"
)

// listed is a device that programs see.
type listed struct {
	name, iface string
	config      provider.Config
}

func isLoopback(d listed) bool { return d.config.Addrs[0].IsLoopback() }

// listing remembers the devices that the program was told of. Interfaces and addresses come and go, but
// what the program knows by a name stays what it is:
//
//   - an interface keeps the name of its device;
//   - a device that is open keeps its addresses, and stays in the list; further addresses of its
//     interface are a further device;
//   - the loopback interface stays in the list if it was the only one once.
type listing struct {
	mu   sync.Mutex // guards what follows
	seen []*seenDevice
}

// seenDevice is a device that was found at least once.
type seenDevice struct {
	listed
	open int  // how often the program has it open
	told bool // it was in a list that the program got
}

var found listing

// update takes the devices of the host's interfaces as they are now, and returns those of the program.
func (l *listing) update(now []listed) []listed {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []*seenDevice
	for _, s := range l.seen {
		if s.open > 0 {
			all = append(all, s)
		}
	}
	for i := range now {
		d := now[i]
		d.config.Addrs = slices.DeleteFunc(slices.Clone(d.config.Addrs), func(a netip.Addr) bool {
			return slices.ContainsFunc(all, func(s *seenDevice) bool { return slices.Contains(s.config.Addrs, a) })
		})
		if len(d.config.Addrs) == 0 {
			continue
		}
		s := l.closedLocked(d.iface)
		if s == nil {
			d.name = l.freeNameLocked(d.name)
			s = &seenDevice{}
			l.seen = append(l.seen, s)
		} else {
			d.name = s.name
		}
		s.listed = d
		all = append(all, s)
	}
	slices.SortStableFunc(all, func(a, b *seenDevice) int { return slices.Index(l.seen, a) - slices.Index(l.seen, b) })
	out := make([]listed, len(all))
	for i, s := range all {
		out[i] = s.listed
	}
	return out
}

// closedLocked returns the device of an interface that is not open; nil if there is none.
func (l *listing) closedLocked(iface string) *seenDevice {
	for _, s := range l.seen {
		if s.iface == iface && s.open == 0 {
			return s
		}
	}
	return nil
}

// freeNameLocked returns a name that no device has: the given one, if it is free.
func (l *listing) freeNameLocked(name string) string {
	for n := 0; slices.ContainsFunc(l.seen, func(s *seenDevice) bool { return s.name == name }); n++ {
		name = fmt.Sprintf("verbena%d", n)
	}
	return name
}

// withoutLoopback returns a list without the loopback interface, unless the program was told of that, or
// there is no other. The program is told of what is returned.
func (l *listing) withoutLoopback(all []listed) []listed {
	l.mu.Lock()
	defer l.mu.Unlock()
	told := func(d listed) bool {
		return slices.ContainsFunc(l.seen, func(s *seenDevice) bool { return s.name == d.name && s.told })
	}
	others := slices.DeleteFunc(slices.Clone(all), func(d listed) bool { return isLoopback(d) && !told(d) })
	if len(others) > 0 {
		all = others
	}
	for _, s := range l.seen {
		s.told = s.told || slices.ContainsFunc(all, func(d listed) bool { return d.name == s.name })
	}
	return all
}

// opened counts one more user of a device, which has the addresses.
func (l *listing) opened(name string, addrs []netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.seen {
		if s.name == name {
			s.open++
			s.config.Addrs = slices.Clone(addrs) // the list may have changed since the program chose it
		}
	}
}

// closed takes back opened.
func (l *listing) closed(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.seen {
		if s.name == name {
			s.open--
		}
	}
}
