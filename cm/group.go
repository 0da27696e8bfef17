package cm

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// Group is a membership in a multicast group. All methods are safe for concurrent use.
type Group struct {
	c    *Conn // has the id, and the device
	qp   *verbs.QP
	join *cma.Join
	addr netip.Addr
	peer Peer

	mu   sync.Mutex // guards done; held by Close
	done bool
}

// membership is a queue pair in a group.
type membership struct {
	qp   *verbs.QP
	addr netip.Addr
}

// Join makes a UD queue pair a member of a multicast group, until Close. It then receives what anybody
// sends to the group, also what other queue pairs of this host send, and itself. The queue pair stays
// the program's; it has the Q_Key of datagram services, as [ReadyUD] gives it. [Group.Peer] is what is
// needed to send to the group.
//
// The group is an IPv4 address, as "239.1.2.3": RoCE v2 has groups of IPv6 in no kernel's connection
// manager. Its GID is that of the address, and the host joins by IGMP, on the interface that has Local
// in cfg, or the device's first address. cfg must name the Device that the queue pair is of.
//
// Errors, in a *net.OpError: EINVAL for what is not a group's address, for a queue pair of another type
// or with another Q_Key, and for a Config that cannot be; EOPNOTSUPP for a group of IPv6; EADDRINUSE if
// the queue pair is a member already; ENODEV if the device does not have the local address; the
// context's error; those of [verbs.QP.AttachMcast].
func Join(ctx context.Context, group string, qp *verbs.QP, cfg *Config) (*Group, error) {
	const op = "join"
	attr, err := qp.Query()
	if err == nil && (qp.Type() != verbs.UD || attr.QKey != QKey) {
		err = invalid(op, "a %v queue pair with Q_Key %#x: it is to be UD, with %#x", qp.Type(), attr.QKey, QKey)
	}
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, err)
	}
	return join(ctx, op, group, qp, cfg)
}

// JoinSendOnly is Join for a program that sends to a group and receives nothing from it: no queue pair
// is a member, and the host does not join.
//
// Errors: those of [Join].
func JoinSendOnly(ctx context.Context, group string, cfg *Config) (*Group, error) {
	return join(ctx, "join", group, nil, cfg)
}

func join(ctx context.Context, op, group string, qp *verbs.QP, cfg *Config) (*Group, error) {
	a, err := netip.ParseAddr(group)
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, invalid(op, "%v", err))
	}
	g := &Group{qp: qp, addr: a.Unmap()}
	at := netip.AddrPortFrom(g.addr, 0)
	c, err := cfg.filled(op, 0)
	switch {
	case err != nil:
	case c.Device == nil:
		err = invalid(op, "Config has no Device")
	default:
		err = ctx.Err()
	}
	if err != nil {
		return nil, opError(op, at, err)
	}
	s, err := acquire(op, &c, netip.Addr{})
	if err != nil {
		return nil, opError(op, at, err)
	}
	g.c = newConn(s, &c, 0)
	g.c.cfg.AckTimeout = 0 // datagrams have no acknowledgements
	g.c.closers = append(g.c.closers, s.release)
	if err := g.enter(ctx, op); err != nil {
		return nil, opError(op, at, errors.Join(err, g.Close()))
	}
	return g, nil
}

// enter joins the group.
func (g *Group) enter(ctx context.Context, op string) (err error) {
	c := g.c
	if c.id, err = c.s.mgr.NewID(cma.PSUDP, verbs.UD, c.sink); err != nil {
		return err
	}
	if err := c.cfg.options(c.id); err != nil {
		return err
	}
	local := c.cfg.Local
	if cma.IsAny(local.Addr()) && !slices.Contains(c.s.addrs, local.Addr()) {
		local = netip.AddrPortFrom(c.s.groupAddr(), local.Port())
	}
	if err := c.id.Bind(local); err != nil {
		return err
	}
	if g.join, err = c.id.JoinMulticast(g.addr, g.qp == nil); err != nil {
		g.join = nil
		return err
	}
	e, err := c.wait(ctx, cma.MulticastJoin)
	if err != nil {
		return err
	}
	g.peer = Peer{AH: e.UD.AH, QPN: e.UD.QPN, QKey: e.UD.QKey, LocalAddr: c.id.Info().Src, RemoteAddr: netip.AddrPortFrom(g.addr, 0)}
	if g.qp == nil {
		return nil
	}
	return g.attach(op)
}

// groupAddr returns the address from which the device sends to groups.
func (s *shared) groupAddr() netip.Addr {
	if i := slices.IndexFunc(s.addrs, netip.Addr.Is4); i >= 0 {
		return s.addrs[i]
	}
	return s.addrs[0]
}

// attach makes the queue pair a member, unless it is one by another Group, whose Close would end both.
func (g *Group) attach(op string) error {
	m := membership{g.qp, g.addr}
	inUse.mu.Lock()
	taken := inUse.members[m]
	if !taken {
		if inUse.members == nil {
			inUse.members = map[membership]bool{}
		}
		inUse.members[m] = true
	}
	inUse.mu.Unlock()
	if taken {
		g.qp = nil // its membership is not this one's
		return ib.Errorf(op, syscall.EADDRINUSE, "the queue pair is a member of %v already", g.addr)
	}
	return g.qp.AttachMcast(g.peer.AH.DGID)
}

// Addr returns the group's address.
func (g *Group) Addr() netip.Addr { return g.addr }

// Peer returns what is needed to send to the group: PD.CreateAH makes an address handle of AH.
func (g *Group) Peer() Peer { return g.peer }

// Close leaves the group. It is idempotent.
func (g *Group) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.done {
		return nil
	}
	if g.qp != nil {
		// Fails if the queue pair has not become a member, or is closed and so is none any more.
		_ = g.qp.DetachMcast(verbs.GIDFromAddr(g.addr))
		inUse.mu.Lock()
		delete(inUse.members, membership{g.qp, g.addr})
		inUse.mu.Unlock()
		g.qp = nil
	}
	if g.join != nil {
		_ = g.join.Leave() // returns nil
	}
	if err := g.c.Close(); err != nil {
		return err
	}
	g.done = true
	return nil
}
