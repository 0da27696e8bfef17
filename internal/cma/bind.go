package cma

// Addresses and ports. A port belongs to an address and a port space, over all processes: each address
// of each device has a claim for it, which the processes of the device know of. In this process, ids
// that may have the same port share the claims.

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/provider"
)

type claimKey struct {
	p     *port
	addr  int
	space PortSpace
	port  uint16
}

// boundKey is a port of a port space.
type boundKey struct {
	space PortSpace
	port  uint16
}

// claim is a port of an address that this process has bound.
type claim struct {
	key   claimKey
	bound provider.BoundPort
	users int
}

// IsAny reports whether an address stands for all addresses. Of the loopback addresses only the first
// does: devices stand on the others.
func IsAny(a netip.Addr) bool {
	return !a.IsValid() || a.IsUnspecified() || a == netip.IPv6Loopback() || a == netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// Bind binds the id to a local address; port 0: any.
func (id *ID) Bind(at netip.AddrPort) error {
	const op = "bind_addr"
	at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	if id.ps == PSIPoIB {
		return ib.Errorf(op, syscall.EINVAL, "RoCE has no IPoIB")
	}
	ports, err := id.m.portsOf(op, at.Addr())
	if err != nil {
		return err
	}
	wild := IsAny(at.Addr())
	if p := at.Port(); p != 0 && p < firstUnprivileged() && os.Geteuid() != 0 {
		return ib.Errorf(op, syscall.EACCES, "port %d needs privileges", p)
	}
	return id.do(op, func() error {
		if wild {
			ports = id.m.ports // one may have appeared meanwhile
		}
		return id.bindLocked(op, at, ports)
	}, stateIdle)
}

// portsOf returns the devices that have an address: all of them if it stands for any.
func (m *Manager) portsOf(op string, a netip.Addr) ([]*port, error) {
	if IsAny(a) {
		ports, _, err := m.openAll(op)
		return ports, err
	}
	if a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
		return nil, ib.Errorf(op, syscall.EINVAL, "%v: a link-local address needs a scope", a)
	}
	if p := m.portAt(a.WithZone("")); p != nil {
		return []*port{p}, nil
	}
	all, err := m.devices(op)
	if err != nil {
		return nil, err
	}
	for i := range all {
		if slices.Contains(all[i].Addrs, a.WithZone("")) {
			p, err := m.open(op, &all[i])
			return []*port{p}, err
		}
	}
	return nil, ib.Errorf(op, syscall.ENODEV, "no device has the address %v", a)
}

// portAt returns the device with an address, if it is open; nil otherwise. To list all devices takes
// far longer.
func (m *Manager) portAt(a netip.Addr) *port {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.ports {
		if slices.Contains(p.dev.Addrs, a) {
			return p
		}
	}
	return nil
}

// firstUnprivileged returns the first port that needs no privileges.
func firstUnprivileged() uint16 {
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start"); err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 16); err == nil {
			return uint16(n)
		}
	}
	return 1024
}

// bindLocked binds the id at addresses of ports.
func (id *ID) bindLocked(op string, at netip.AddrPort, ports []*port) error {
	if at.Port() == 0 {
		for range 4096 {
			p := firstEphemeral + rand.N(uint16(lastEphemeral-firstEphemeral+1))
			err := id.claimLocked(op, netip.AddrPortFrom(at.Addr(), p), ports)
			if err == nil || !errors.Is(err, syscall.EADDRINUSE) && !errors.Is(err, syscall.EADDRNOTAVAIL) {
				return err
			}
		}
		return ib.Errorf(op, syscall.EADDRNOTAVAIL, "no port is free")
	}
	return id.claimLocked(op, at, ports)
}

// Ports that are chosen for programs that do not: as Linux has them by default.
const (
	firstEphemeral = 32768
	lastEphemeral  = 60999
)

// claimLocked claims a port for the id.
func (id *ID) claimLocked(op string, at netip.AddrPort, ports []*port) error {
	if err := id.collisionLocked(op, at); err != nil {
		return err
	}
	wild := IsAny(at.Addr())
	for _, p := range ports {
		for i, a := range p.dev.Addrs {
			if !id.standsFor(at.Addr(), a) {
				continue
			}
			c, err := id.m.claimOneLocked(claimKey{p, i, id.ps, at.Port()}, id.reuse)
			if err != nil {
				id.freePortsLocked()
				if wild && errors.Is(err, syscall.EADDRINUSE) {
					return ib.Errorf(op, syscall.EADDRNOTAVAIL, "port %d of %v is taken", at.Port(), a)
				}
				return err
			}
			id.claims = append(id.claims, c)
		}
	}
	id.src, id.state = at, stateBound
	if len(id.claims) > 0 {
		k := boundKey{id.ps, at.Port()}
		id.m.bound[k] = append(id.m.bound[k], id)
	}
	if !wild {
		id.port = ports[0]
	}
	return nil
}

// standsFor reports whether the address that the id is bound to stands for an address of a device.
func (id *ID) standsFor(at, a netip.Addr) bool {
	return a == at || IsAny(at) && (a.Is4() == !at.Is6() || at.Is6() && !id.afOnly)
}

func (m *Manager) claimOneLocked(k claimKey, reuse bool) (*claim, error) {
	if c := m.claims[k]; c != nil { // collisionLocked allows it
		c.users++
		return c, nil
	}
	b, err := k.p.mgmt.BindPort(uint16(k.space), k.port, []int{k.addr}, reuse)
	if err != nil {
		return nil, err
	}
	c := &claim{key: k, bound: b, users: 1}
	m.claims[k] = c
	return c, nil
}

// freePortsLocked gives the id's ports back.
func (id *ID) freePortsLocked() {
	if id.state == stateListen {
		id.m.removeListenerLocked(id)
	}
	for _, c := range id.claims {
		if id.state == stateListen {
			id.m.listensLocked(c.key.p, -1)
		}
		id.m.freeClaimLocked(c)
	}
	if len(id.claims) > 0 {
		k := boundKey{id.ps, id.src.Port()}
		left := slices.DeleteFunc(id.m.bound[k], func(o *ID) bool { return o == id })
		if id.m.bound[k] = left; len(left) == 0 {
			delete(id.m.bound, k)
		}
	}
	id.claims = nil
}

// freeClaimLocked ends a use of a port.
func (m *Manager) freeClaimLocked(c *claim) {
	if c.users--; c.users == 0 {
		c.bound.Free()
		delete(m.claims, c.key)
	}
}

// listensLocked counts the addresses of a device at which ids listen.
func (m *Manager) listensLocked(p *port, by int) {
	before := p.listens
	p.listens += by
	if (before == 0) != (p.listens == 0) {
		p.mgmt.SetListening(p.listens > 0)
	}
}

// collisionLocked returns an error if another id of this process keeps this one from an address.
func (id *ID) collisionLocked(op string, at netip.AddrPort) error {
	for _, o := range id.m.bound[boundKey{id.ps, at.Port()}] {
		if o == id {
			continue
		}
		if id.reuse && o.reuse && o.state != stateListen {
			continue
		}
		a, b := at.Addr(), o.src.Addr()
		any := IsAny(a) || IsAny(b)
		switch {
		case !any && a != b:
		case any && a.Is4() != b.Is4() && (a.Is6() && id.afOnly || b.Is6() && o.afOnly || !IsAny(a) && a.Is6() || !IsAny(b) && b.Is6()):
			// An IPv4 wildcard does not stand for IPv6 addresses, nor one for IPv6 alone for IPv4.
		case any && a != b:
			return ib.Errorf(op, syscall.EADDRNOTAVAIL, "port %d is taken by %v", at.Port(), o.src)
		default:
			return ib.Errorf(op, syscall.EADDRINUSE, "%v is taken", at)
		}
	}
	return nil
}

// Listen makes the id take requests; ConnectRequest follows for each. Of those that the program has not
// seen there are at most as many as the backlog says. As in the kernel, one more is dropped.
func (id *ID) Listen(backlog int) error { return id.listen(backlog, false) }

// ListenEvicting is Listen, but for requests that find the backlog full: they take the place of others,
// so that a flood of forged requests does not keep out the real ones. Withdrawn follows for a request
// that has lost its place.
func (id *ID) ListenEvicting(backlog int) error { return id.listen(backlog, true) }

func (id *ID) listen(backlog int, evicts bool) error {
	const op = "listen"
	if backlog <= 0 || backlog > maxBacklog {
		backlog = maxBacklog
	}
	id.m.mu.Lock()
	idle := id.state == stateIdle
	id.m.mu.Unlock()
	if idle {
		if err := id.Bind(netip.AddrPortFrom(netip.IPv4Unspecified(), 0)); err != nil {
			return err
		}
	}
	return id.do(op, func() error {
		if id.reuse {
			if err := id.collisionLocked(op, id.src); err != nil {
				return err
			}
		}
		for _, c := range id.claims {
			if err := c.bound.Listen(); err != nil {
				return err
			}
		}
		for _, c := range id.claims {
			id.m.listensLocked(c.key.p, 1)
		}
		id.state, id.backlog, id.evicts = stateListen, &cm.Backlog{Max: backlog}, evicts
		id.m.listeners[id.service()] = append(id.m.listeners[id.service()], id)
		return nil
	}, stateBound)
}

// service returns the service id of a listener.
func (id *ID) service() uint64 { return uint64(id.ps)<<16 | uint64(id.src.Port()) }

func (m *Manager) removeListenerLocked(id *ID) {
	s := id.service()
	left := slices.DeleteFunc(m.listeners[s], func(o *ID) bool { return o == id })
	if m.listeners[s] = left; len(left) == 0 {
		delete(m.listeners, s)
	}
}

// maxBacklog is the longest backlog of a listener, and the default.
const maxBacklog = 1024
