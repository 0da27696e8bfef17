//go:build cgo

package main

import (
	"net/netip"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// What the connection manager's file needs of internal/cma. Tests put something else in its
// place.

type connEngine interface {
	newID(ps cma.PortSpace, t ib.QPType, sink func(*connEvent)) (connID, error)
	close() error
}

// connID is *cma.ID. Two that are equal are the same id.
type connID interface {
	Bind(netip.AddrPort) error
	ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error
	ResolveRoute(timeout time.Duration) error
	Listen(backlog int) error
	Connect(*cma.ConnParam) error
	Accept(*cma.ConnParam) error
	Reject(reason int, private []byte) error
	Disconnect() error
	Notify(ib.EventType) error
	QPAttr(state ib.QPState) (ib.QPAttr, ib.QPAttrMask, error)
	SetOption(o cma.Option, value int) error
	SetPath(*cma.Path) error
	Info() cma.Info
	Seen() bool
	Close() error

	join(group netip.Addr, sendOnly bool) (connJoin, error)
}

// connJoin is *cma.Join.
type connJoin interface{ Leave() error }

// connEvent is cma.Event.
type connEvent struct {
	id, child connID // ConnectRequest: the listener, and the new id
	member    connJoin
	group     netip.Addr // of member
	typ       cma.EventType
	status    int
	conn      cma.ConnParam
	ud        cma.UDParam
}

// engineID makes *cma.ID a connID.
type engineID struct{ *cma.ID }

func (i engineID) join(group netip.Addr, sendOnly bool) (connJoin, error) {
	j, err := i.JoinMulticast(group, sendOnly)
	if err != nil {
		return nil, err
	}
	return j, nil
}

type engine struct{ *cma.Manager }

func (e engine) newID(ps cma.PortSpace, t ib.QPType, sink func(*connEvent)) (connID, error) {
	id, err := e.NewID(ps, t, func(ev *cma.Event) {
		c := &connEvent{id: engineID{ev.ID}, typ: ev.Type, status: ev.Status, conn: ev.Conn, ud: ev.UD}
		if ev.New != nil {
			c.child = engineID{ev.New}
		}
		if ev.Join != nil {
			c.member, c.group = ev.Join, ev.Join.Addr
		}
		sink(c)
	})
	if err != nil {
		return nil, err
	}
	return engineID{id}, nil
}

func (e engine) close() error { return e.Close() }

// newEngine makes the connection manager of this process, with the devices that the program
// sees.
func newEngine() connEngine { return engine{cma.New(cma.Config{Devices: connDevices})} }

func connDevices() ([]cma.Device, error) {
	all, err := list()
	if err != nil {
		return nil, err
	}
	to := make([]cma.Device, len(all))
	for i, d := range all {
		to[i] = cma.Device{Name: d.name, Index: i, Addrs: d.config.Addrs, Open: func() (provider.Device, func(), error) {
			s, err := acquireListed(d)
			if err != nil {
				return nil, nil, err
			}
			return s.dev, sync.OnceFunc(func() {
				_ = s.release() // nobody waits for the outcome
			}), nil
		}}
	}
	return to, nil
}
