package cm

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// resolveTimeout is what the resolution of addresses and routes is given. On RoCE v2 the host knows
// both, and neither takes time.
const resolveTimeout = 2 * time.Second

// Dial connects to a listener. The address is "host:port"; 127.0.0.1, ::1 and no host stand for the
// local device. If the host has several addresses, they are tried in order. A nil cfg means defaults.
//
// A peer that does not know of the end of an earlier connection refuses a queue pair with the same
// number ([ReasonStale]). Dial then tries others, three times at most.
//
// Without a context that ends earlier, a peer that does not answer is given up after more than a
// minute.
//
// Errors, in a *net.OpError: a [*RejectError] if the peer refuses or nobody listens there (errors.Is:
// [ErrRefused], ECONNREFUSED); ETIMEDOUT if it does not answer; the context's error; ENODEV if no
// device reaches the address; EMFILE and ENFILE if there is no descriptor left; EINVAL for a Config
// that cannot be; those of [verbs.Open] and [verbs.PD.CreateQP]; what Setup returns.
func Dial(ctx context.Context, address string, cfg *Config) (*Conn, error) {
	const op = "dial"
	c, err := cfg.filled(op, MaxDialPrivate)
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, err)
	}
	var conn *Conn
	at, err := each(ctx, address, func(to netip.AddrPort) (err error) {
		for range staleTries {
			if conn, err = dial(ctx, to, &c); !isStale(err) {
				break
			}
		}
		return err
	})
	if err != nil {
		return nil, opError(op, at, err)
	}
	return conn, nil
}

// staleTries is how often a connection is tried whose queue pair the peer takes for one that it is
// connected to: an earlier one had the number, and the peer does not know of its end. The next one has
// another number.
const staleTries = 4

func isStale(err error) bool {
	var r *RejectError
	return errors.As(err, &r) && r.Reason == ReasonStale
}

// each calls f for each of the addresses that an address stands for until it succeeds. It returns the
// first error, and its address.
func each(ctx context.Context, address string, f func(netip.AddrPort) error) (at netip.AddrPort, err error) {
	if err := ctx.Err(); err != nil {
		return at, err
	}
	all, err := lookup(ctx, address)
	if err != nil {
		return at, err
	}
	var first error
	for _, to := range all {
		if err = f(to); err == nil {
			return to, nil
		}
		if first == nil {
			at, first = to, err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return at, first
}

// reach returns the device from which an address is reached, and counts one more user of it.
func reach(op string, c *Config, to netip.Addr) (*shared, error) {
	from := c.Local.Addr()
	if c.Device == nil && cma.IsAny(from) {
		var err error
		if from, err = routeAddr(to); err != nil {
			return nil, err
		}
	}
	return acquire(op, c, from)
}

// resolve binds the connection's id, and finds the way to the peer.
func (c *Conn) resolve(ctx context.Context, space cma.PortSpace, t verbs.QPType, to netip.AddrPort) (err error) {
	if to.Addr() == netip.IPv6Unspecified() && !slices.ContainsFunc(c.s.addrs, netip.Addr.Is6) {
		to = netip.AddrPortFrom(netip.IPv4Unspecified(), to.Port())
	}
	if c.id, err = c.s.mgr.NewID(space, t, c.sink); err != nil {
		return err
	}
	if err := c.cfg.options(c.id); err != nil {
		return err
	}
	if err := c.id.ResolveAddr(c.s.source(&c.cfg, to.Addr()), to, resolveTimeout); err != nil {
		return err
	}
	if _, err := c.wait(ctx, cma.AddrResolved); err != nil {
		return err
	}
	if err := c.id.ResolveRoute(resolveTimeout); err != nil {
		return err
	}
	if _, err := c.wait(ctx, cma.RouteResolved); err != nil {
		return err
	}
	in := c.id.Info()
	c.local, c.remote = in.Src, in.Dst
	return nil
}

// dial connects to one address.
func dial(ctx context.Context, to netip.AddrPort, cfg *Config) (*Conn, error) {
	s, err := reach("dial", cfg, to.Addr())
	if err != nil {
		return nil, err
	}
	c := newConn(s, cfg, MaxDialPrivate)
	c.closers = append(c.closers, s.release)
	if err := c.connect(ctx, to); err != nil {
		return nil, c.abort(err)
	}
	return c, nil
}

// connect makes the connection, as the side that asks for it.
func (c *Conn) connect(ctx context.Context, to netip.AddrPort) error {
	if err := c.resolve(ctx, cma.PSTCP, c.cfg.Type, to); err != nil {
		return err
	}
	if err := c.makeQP(); err != nil {
		return err
	}
	attr := c.s.dev.Attr()
	own := c.cfg.params(&attr)
	own.QPN = c.qp.Number()
	if err := c.id.Connect(&own); err != nil {
		return err
	}
	e, err := c.wait(ctx, cma.ConnectResponse)
	if err != nil {
		return err
	}
	c.private = e.Conn.Private
	if err := c.ready(&own); err != nil {
		return errors.Join(err, c.id.Reject(0, nil))
	}
	if err := c.id.Accept(nil); err != nil {
		return err
	}
	c.established()
	return nil
}
