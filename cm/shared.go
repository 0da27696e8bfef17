package cm

// Devices, each with its connection manager, shared by all listeners and connections of this process.

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/verbs"
)

// shared is a device that listeners and connections use.
type shared struct {
	dev   *verbs.Device
	own   bool // this package has opened it
	addrs []netip.Addr

	// What follows is guarded by inUse.mu.
	mgr   *cma.Manager
	pd    *verbs.PD // nothing is in it: with it open, the program cannot close the device
	users int
}

var inUse struct {
	mu      sync.Mutex // guards what follows, and the users of what is in the list
	list    []*shared
	members map[membership]bool // of groups
}

// acquire counts one more user of the Config's device. Without one it is the device that has the
// local address; with an invalid local address the first one.
func acquire(op string, c *Config, local netip.Addr) (*shared, error) {
	inUse.mu.Lock()
	defer inUse.mu.Unlock()
	i := slices.IndexFunc(inUse.list, func(s *shared) bool {
		if c.Device != nil {
			return s.dev == c.Device
		}
		return s.own && slices.Contains(s.addrs, local)
	})
	if c.Device != nil && provider.DeviceOf(c.Device) == nil {
		return nil, invalid(op, "the Device was not made by verbs.Open")
	}
	var s *shared
	if i >= 0 {
		s = inUse.list[i]
	} else {
		s = &shared{dev: c.Device}
		if c.Device == nil {
			var err error
			if s.dev, err = openAt(local); err != nil {
				return nil, err
			}
			s.own = true
		}
		for _, g := range s.dev.GIDs() {
			s.addrs = append(s.addrs, g.Addr())
		}
	}
	if s.mgr == nil {
		if err := s.startLocked(); err != nil {
			if s.own && i < 0 {
				err = errors.Join(err, s.dev.Close())
			}
			return nil, err
		}
	}
	if i < 0 {
		inUse.list = append(inUse.list, s)
	}
	s.users++
	return s, nil
}

// managed returns the device as the connection manager sees it. Tests lose messages there.
var managed = func(d provider.Device) provider.Device { return d }

// startLocked makes the connection manager of the device.
func (s *shared) startLocked() (err error) {
	p := managed(provider.DeviceOf(s.dev))
	if s.pd == nil {
		if s.pd, err = s.dev.AllocPD(); err != nil {
			return err
		}
	}
	list := []cma.Device{{Name: s.dev.Name(), Addrs: s.addrs, Open: func() (provider.Device, func(), error) { return p, func() {}, nil }}}
	s.mgr = cma.New(cma.Config{Fixed: true, Devices: func() ([]cma.Device, error) { return list, nil }})
	return nil
}

// release ends a use. The last one closes the connection manager, and the device if it is the
// package's own. On an error the use has not ended: release is called again.
func (s *shared) release() error {
	inUse.mu.Lock()
	defer inUse.mu.Unlock()
	if s.users > 1 {
		s.users--
		return nil
	}
	if s.mgr != nil {
		_ = s.mgr.Close() // returns nil
		s.mgr = nil
	}
	if s.pd != nil {
		if err := s.pd.Close(); err != nil {
			return err
		}
		s.pd = nil
	}
	if s.own {
		if err := s.dev.Close(); err != nil {
			return err
		}
	}
	s.users = 0
	inUse.list = slices.DeleteFunc(inUse.list, func(o *shared) bool { return o == s })
	return nil
}

// openAt opens the device that has an address.
func openAt(a netip.Addr) (*verbs.Device, error) {
	all, err := verbs.Devices()
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		if slices.Contains(d.Addrs, a) {
			return openBeside(&d)
		}
	}
	return verbs.Open(a.String(), nil) // one of the many loopback addresses, or an error
}

// openBeside opens a device, without those of its addresses at which this package uses another one: the
// interface has got addresses since that was opened.
func openBeside(d *verbs.DeviceInfo) (*verbs.Device, error) {
	return verbs.Open(d.Name, &verbs.Config{Addrs: slices.DeleteFunc(slices.Clone(d.Addrs), hasLocked)})
}

// hasLocked reports whether this package uses a device at an address. inUse.mu is held.
func hasLocked(a netip.Addr) bool {
	return slices.ContainsFunc(inUse.list, func(s *shared) bool { return slices.Contains(s.addrs, a) })
}

// firstAddr returns the first address of a version that any device has.
func firstAddr(v4 bool) (netip.Addr, error) {
	all, err := verbs.Devices()
	if err != nil {
		return netip.Addr{}, err
	}
	for _, d := range all {
		if i := slices.IndexFunc(d.Addrs, func(a netip.Addr) bool { return a.Is4() == v4 }); i >= 0 {
			return d.Addrs[i], nil
		}
	}
	return netip.Addr{}, syscall.ENODEV
}

// listenAddr returns an address of the device that a listener at an address needs.
func listenAddr(at netip.Addr) (netip.Addr, error) {
	if !cma.IsAny(at) {
		return at, nil
	}
	a, err := firstAddr(true)
	if errors.Is(err, syscall.ENODEV) && at.Is6() {
		return firstAddr(false)
	}
	return a, err
}

// routeAddr returns an address of the device from which a destination is reached.
func routeAddr(to netip.Addr) (netip.Addr, error) {
	switch {
	case cma.IsAny(to):
		return listenAddr(to)
	case to.Is4() && to.IsLoopback():
		return loopbackAddr(to), nil
	}
	return cma.KernelSource(to)
}

// loopbackAddr returns the address from which one of 127.0.0.0/8 is reached: the address itself if
// this package has a device there, any other loopback device of it, or 127.0.0.1.
func loopbackAddr(to netip.Addr) netip.Addr {
	inUse.mu.Lock()
	defer inUse.mu.Unlock()
	from := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	for _, s := range inUse.list {
		for _, a := range s.addrs {
			switch {
			case !s.own:
			case a == to:
				return a
			case a.Is4() && a.IsLoopback():
				from = a
			}
		}
	}
	return from
}

// source returns the address of the device to connect from, invalid where the routes of the host
// decide.
func (s *shared) source(c *Config, to netip.Addr) netip.AddrPort {
	if c.Local.IsValid() && !cma.IsAny(c.Local.Addr()) || cma.IsAny(to) || slices.Contains(s.addrs, to) {
		return c.Local
	}
	var only netip.Addr
	for _, a := range s.addrs {
		if a.Is4() == to.Is4() {
			if only.IsValid() {
				return c.Local
			}
			only = a
		}
	}
	return netip.AddrPortFrom(only, c.Local.Port())
}
