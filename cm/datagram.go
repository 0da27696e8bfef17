package cm

import (
	"context"
	"errors"
	"net/netip"
	"sync"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// QKey is the Q_Key of datagram services, the same for all of them: RDMA_UDP_QKEY.
const QKey = 0x01234567

// Peer is how a datagram service is reached.
type Peer struct {
	AH      verbs.AHAttr // what PD.CreateAH makes an address handle of
	QPN     uint32       // RemoteQPN of requests to it
	QKey    uint32       // RemoteQKey of requests to it
	Private []byte       // what it says, padded with zeros to MaxAnswerPrivate bytes

	LocalAddr, RemoteAddr netip.AddrPort
}

// Resolve asks the datagram service at an address, "host:port", for its queue pair. cfg must name the
// Device that datagrams will be sent from.
//
// Errors: those of [Dial].
func Resolve(ctx context.Context, address string, cfg *Config) (*Peer, error) {
	const op = "resolve"
	c, err := cfg.filled(op, MaxResolvePrivate)
	if err == nil && c.Device == nil {
		err = invalid(op, "Config has no Device")
	}
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, err)
	}
	var peer *Peer
	at, err := each(ctx, address, func(to netip.AddrPort) (err error) {
		peer, err = resolve(ctx, to, &c)
		return err
	})
	if err != nil {
		return nil, opError(op, at, err)
	}
	return peer, nil
}

// resolve asks the service at one address.
func resolve(ctx context.Context, to netip.AddrPort, cfg *Config) (_ *Peer, err error) {
	s, err := reach("resolve", cfg, to.Addr())
	if err != nil {
		return nil, err
	}
	c := newConn(s, cfg, MaxResolvePrivate)
	c.cfg.AckTimeout = 0 // datagrams have no acknowledgements
	c.closers = append(c.closers, s.release)
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.resolve(ctx, cma.PSUDP, verbs.UD, to); err != nil {
		return nil, err
	}
	if err := c.id.Connect(&cma.ConnParam{Private: cfg.Private}); err != nil {
		return nil, err
	}
	e, err := c.wait(ctx, cma.Established)
	if err != nil {
		return nil, err
	}
	return &Peer{AH: e.UD.AH, QPN: e.UD.QPN, QKey: e.UD.QKey, Private: e.UD.Private, LocalAddr: c.local, RemoteAddr: c.remote}, nil
}

// ReadyUD moves a UD queue pair from RESET to RTS, with the Q_Key of datagram services. To have
// receives posted before the first message can come, post them before [Announce].
//
// Errors: those of [verbs.QP.Modify].
func ReadyUD(qp *verbs.QP) error {
	if err := qp.ToInit(&verbs.QPAttr{QKey: QKey}); err != nil {
		return err
	}
	if err := qp.ToRTR(&verbs.QPAttr{}); err != nil {
		return err
	}
	return qp.ToRTS(&verbs.QPAttr{})
}

// Service is a datagram service that peers can resolve.
type Service struct {
	l    *Listener
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// Announce lets peers resolve an address, "host:port" as in [Listen], to a UD queue pair, until Close.
// The queue pair stays the program's; it has the Q_Key of datagram services, as [ReadyUD] gives it. cfg
// must name the Device that the queue pair is of. The ports are not those of Listen.
//
// Errors: those of [Listen]; EINVAL for a queue pair of another type or with another Q_Key.
func Announce(ctx context.Context, address string, qp *verbs.QP, cfg *Config) (*Service, error) {
	const op = "announce"
	c, err := cfg.filled(op, MaxAnswerPrivate)
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, err)
	}
	attr, err := qp.Query()
	switch {
	case err != nil:
	case c.Device == nil:
		err = invalid(op, "Config has no Device")
	case qp.Type() != verbs.UD || attr.QKey != QKey:
		err = invalid(op, "a %v queue pair with Q_Key %#x: it is to be UD, with %#x", qp.Type(), attr.QKey, QKey)
	}
	if err != nil {
		return nil, opError(op, netip.AddrPort{}, err)
	}
	l, at, err := listen(ctx, op, address, cma.PSUDP, verbs.UD, &c)
	if err != nil {
		return nil, opError(op, at, err)
	}
	s := &Service{l: l}
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.wg.Go(func() { s.serve(run, qp.Number()) })
	return s, nil
}

// serve answers peers until the service is closed.
func (s *Service) serve(ctx context.Context, qpn uint32) {
	for {
		r, err := s.l.next(ctx)
		if err != nil {
			return
		}
		private, ok := s.l.cfg.Private, true
		if s.l.cfg.Answer != nil {
			private, ok = s.l.cfg.Answer(r.conn.remote, r.Private())
			ok = ok && len(private) <= MaxAnswerPrivate
		}
		// An answer that fails is one that the peer does not wait for. Close of the id sends nothing
		// after an answer.
		if ok {
			_ = r.conn.id.Accept(&cma.ConnParam{QPN: qpn, Private: private})
		} else {
			_ = r.conn.id.Reject(0, nil)
		}
		_ = r.conn.id.Close() // returns nil
	}
}

// Addr returns the local address.
func (s *Service) Addr() netip.AddrPort { return s.l.Addr() }

// Close ends the service. It waits for a call of Answer that is under way. It is idempotent.
func (s *Service) Close() error {
	s.stop()
	s.wg.Wait()
	return s.l.Close()
}
