package cma

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// ResolveAddr finds the device from which the destination is reached; src may be zero.
// AddrResolved or AddrError follows.
func (id *ID) ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error {
	const op = "resolve_addr"
	dst = netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port())
	src = netip.AddrPortFrom(src.Addr().Unmap(), src.Port())
	switch {
	case !dst.Addr().IsValid() || src.Addr().IsValid() && src.Addr().Is4() != dst.Addr().Is4():
		return ib.Errorf(op, syscall.EINVAL, "from %v to %v", src, dst)
	case id.ps == PSIPoIB:
		return ib.Errorf(op, syscall.EINVAL, "RoCE has no IPoIB")
	}
	if src.Addr().IsValid() && id.isIdle() && !IsAny(src.Addr()) {
		if err := id.Bind(src); err != nil {
			return err
		}
	}
	id.m.mu.Lock()
	if id.state != stateIdle && !IsAny(id.src.Addr()) {
		src = id.src
	}
	id.m.mu.Unlock()
	from, to, err := id.m.route(op, src.Addr(), dst.Addr())
	var p *port
	if err == nil {
		var ports []*port
		if ports, err = id.m.portsOf(op, from); err == nil {
			p = ports[0]
			// Without a socket the request for a connection would count as lost, and be given up after more than
			// a minute. Here, not in Connect, the program has nothing that it would have to end yet.
			err = p.mgmt.Reach(from, to)
		}
	}
	return id.do(op, func() error {
		if err != nil {
			errno := syscall.EIO
			errors.As(err, &errno)
			id.dst = dst
			id.emitLocked(Event{Type: AddrError, Status: -int(errno)})
			return nil
		}
		if id.state == stateIdle {
			if err := id.bindLocked(op, netip.AddrPortFrom(from, src.Port()), []*port{p}); err != nil {
				return err
			}
		}
		id.src, id.dst = netip.AddrPortFrom(from, id.src.Port()), netip.AddrPortFrom(to, dst.Port())
		id.port, id.state = p, stateAddrResolved
		id.emitLocked(Event{Type: AddrResolved})
		return nil
	}, stateIdle, stateBound)
}

func (id *ID) isIdle() bool {
	id.m.mu.Lock()
	defer id.m.mu.Unlock()
	return id.state == stateIdle
}

// route returns the address of a device from which a destination is reached, and the destination: an
// address of a device if dst stands for any.
//
// The kernel's choice is taken if a device has that address. Otherwise a device on another address of
// the same interface is: an adapter has all of them. Between devices of this host on 127.0.0.0/8, which
// no interface has, the first device of that kind is taken.
func (m *Manager) route(op string, src, dst netip.Addr) (from, to netip.Addr, err error) {
	switch own := func(a netip.Addr) bool { return m.portAt(a) != nil }; {
	case IsAny(dst):
	case src.IsValid() && !IsAny(src) && own(src):
		return src, dst, nil
	case !src.IsValid() && own(dst):
		return dst, dst, nil
	case !dst.IsLoopback():
		// The kernel's choice for an address of this host is that address: if it is another one, dst is
		// not that of a device here. To list all devices takes ten times as long.
		if from, err := KernelSource(dst); err == nil && from != dst && own(from) {
			return from, dst, nil
		}
	}
	all, err := m.devices(op)
	if err != nil {
		return from, to, err
	}
	has := func(a netip.Addr) bool {
		return slices.ContainsFunc(all, func(d Device) bool { return slices.Contains(d.Addrs, a) })
	}
	first := func(ok func(netip.Addr) bool) (netip.Addr, bool) {
		for _, d := range all {
			if i := slices.IndexFunc(d.Addrs, ok); i >= 0 {
				return d.Addrs[i], true
			}
		}
		return netip.Addr{}, false
	}
	to = dst
	if IsAny(dst) && !has(dst) {
		if to, _ = first(func(a netip.Addr) bool { return a.Is4() == dst.Is4() }); !to.IsValid() {
			return from, to, ib.Errorf(op, syscall.ENODEV, "no device has an address of the version of %v", dst)
		}
	}
	switch {
	case src.IsValid() && !IsAny(src):
		return src, to, nil
	case has(to):
		return to, to, nil
	}
	if from, err = KernelSource(to); err != nil {
		return from, to, err
	}
	if has(from) {
		return from, to, nil
	}
	beside := addressesBeside(from)
	if from, ok := first(func(a netip.Addr) bool {
		return a.Is4() == to.Is4() && (a.IsLoopback() && to.IsLoopback() || slices.Contains(beside, a) && a.IsLinkLocalUnicast() == to.IsLinkLocalUnicast())
	}); ok {
		return from, to, nil
	}
	return from, to, ib.Errorf(op, syscall.ENODEV, "%v is reached from %v, which no device has", to, from)
}

// KernelSource returns the address from which the kernel would send to a destination.
func KernelSource(to netip.Addr) (netip.Addr, error) {
	from, err := sys.SourceTo(netip.AddrPortFrom(to.Unmap(), 4791))
	return from.Unmap(), err
}

// addressesBeside returns the addresses of the interface that has an address.
func addressesBeside(a netip.Addr) []netip.Addr {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil
	}
	for i := range interfaces {
		list, err := interfaces[i].Addrs()
		if err != nil {
			continue
		}
		var all []netip.Addr
		for _, n := range list {
			if p, err := netip.ParsePrefix(n.String()); err == nil {
				all = append(all, p.Addr().Unmap())
			}
		}
		if slices.Contains(all, a.WithZone("")) {
			return all
		}
	}
	return nil
}

// ResolveRoute finds the path. RouteResolved follows.
func (id *ID) ResolveRoute(timeout time.Duration) error {
	const op = "resolve_route"
	if timeout <= 0 {
		return ib.Errorf(op, syscall.EINVAL, "a timeout of %v", timeout)
	}
	return id.do(op, func() error {
		id.path = &Path{SGID: ib.GIDFromAddr(id.src.Addr()), DGID: ib.GIDFromAddr(id.dst.Addr()),
			FlowLabel: (uint32(id.src.Port())*31 + uint32(id.dst.Port())) & 0xfffff, HopLimit: 64, TrafficClass: id.tos,
			PKey: 0xffff, MTU: id.port.mgmt.MTU(), LifeTime: lifeTime}
		if id.ackTimeout > 0 {
			id.path.LifeTime = id.ackTimeout - 1
		}
		id.routeResolvedLocked()
		return nil
	}, stateAddrResolved)
}

// lifeTime is the packet life time on RoCE.
const lifeTime = 16

func (id *ID) routeResolvedLocked() {
	id.state = stateRouteResolved
	id.emitLocked(Event{Type: RouteResolved})
}

// SetPath sets the path, instead of ResolveRoute. RouteResolved follows.
func (id *ID) SetPath(p *Path) error {
	const op = "set_option"
	return id.do(op, func() error {
		if p.SGID.Addr() != id.src.Addr() || p.DGID.Addr() != id.dst.Addr() || p.FlowLabel >= 1<<20 || p.MTU.Bytes() == 0 {
			return ib.Errorf(op, syscall.EINVAL, "the path is not one from %v to %v", id.src.Addr(), id.dst.Addr())
		}
		path := *p
		id.path = &path
		id.routeResolvedLocked()
		return nil
	}, stateAddrResolved)
}
