package cma_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

func addr(n int) netip.Addr { return netip.AddrFrom4([4]byte{127, 78, 1, byte(n)}) }

// manager makes a manager with a device for each address.
func manager(t *testing.T, link string, addrs ...netip.Addr) *cma.Manager {
	t.Helper()
	var list []cma.Device
	for i, a := range addrs {
		list = append(list, cma.Device{Name: fmt.Sprint("dev", i), Index: i, Addrs: []netip.Addr{a}, Open: func() (provider.Device, func(), error) {
			d, err := device.Open("", &provider.Config{Addrs: []netip.Addr{a}, Link: link})
			if err != nil {
				return nil, nil, err
			}
			return d, func() {
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}, nil
		}})
	}
	m := cma.New(cma.Config{Devices: func() ([]cma.Device, error) { return list, nil }})
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// id is an id whose events are in a channel.
type id struct {
	*cma.ID
	t      *testing.T
	events chan *cma.Event
}

func newID(t *testing.T, m *cma.Manager, ps cma.PortSpace, qt ib.QPType) *id {
	t.Helper()
	n := &id{t: t, events: make(chan *cma.Event, 100)}
	var err error
	if n.ID, err = m.NewID(ps, qt, n.sink); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *id) sink(e *cma.Event) { n.events <- e }

// next waits for an event of a type.
func (n *id) next(want cma.EventType) *cma.Event {
	n.t.Helper()
	select {
	case e := <-n.events:
		if e.Type != want {
			n.t.Fatalf("event %d, status %d; want %d", e.Type, e.Status, want)
		}
		return e
	case <-time.After(20 * time.Second):
		n.t.Fatalf("no event %d", want)
	}
	return nil
}

// resolve resolves the way to a port.
func (n *id) resolve(to netip.AddrPort) {
	n.t.Helper()
	if err := n.ResolveAddr(netip.AddrPort{}, to, time.Second); err != nil {
		n.t.Fatal(err)
	}
	n.next(cma.AddrResolved)
	if err := n.ResolveRoute(time.Second); err != nil {
		n.t.Fatal(err)
	}
	n.next(cma.RouteResolved)
}

// take gives the id of a request a channel of its own.
func take(t *testing.T, e *cma.Event) *id {
	n := &id{ID: e.New, t: t, events: make(chan *cma.Event, 100)}
	n.SetSink(n.sink)
	n.Seen()
	return n
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Connections are made and ended, over each link, to the same device and to another one, and each
// side sees what the other one has said.
func TestConnect(t *testing.T) {
	for _, link := range []string{"", "udp", "local", "loop"} {
		for _, to := range []int{1, 2} {
			t.Run(fmt.Sprintf("%q,%d", link, to), func(t *testing.T) {
				m := manager(t, link, addr(1), addr(2))
				at := netip.AddrPortFrom(addr(to), 7174)
				l := newID(t, m, cma.PSTCP, ib.RC)
				check(t, l.Bind(at))
				check(t, l.Listen(5))
				a := newID(t, m, cma.PSTCP, ib.RC)
				check(t, a.Bind(netip.AddrPortFrom(addr(1), 0)))
				a.resolve(at)
				check(t, a.Connect(&cma.ConnParam{QPN: 17, Private: []byte("hello"), ResponderResources: 3, InitiatorDepth: 5, RetryCount: 10, RNRRetry: 6}))
				e := l.next(cma.ConnectRequest)
				if e.Conn.QPN != 17 || e.Conn.ResponderResources != 5 || e.Conn.InitiatorDepth != 3 || e.Conn.RetryCount != 7 || e.Conn.RNRRetry != 6 ||
					len(e.Conn.Private) != 56 || !bytes.HasPrefix(e.Conn.Private, []byte("hello\x00")) {
					t.Errorf("request %+v", e.Conn)
				}
				p := take(t, e)
				if in := p.Info(); in.Src != at || in.Dst != a.Info().Src || in.Dst.Addr() != addr(1) {
					t.Errorf("the request is from %v to %v", in.Dst, in.Src)
				}
				check(t, p.Accept(&cma.ConnParam{QPN: 18, Private: []byte("welcome"), ResponderResources: 4, InitiatorDepth: 2, RNRRetry: 5}))
				e = a.next(cma.ConnectResponse)
				if e.Conn.QPN != 18 || e.Conn.ResponderResources != 2 || e.Conn.InitiatorDepth != 4 || e.Conn.RNRRetry != 5 ||
					len(e.Conn.Private) != 196 || !bytes.HasPrefix(e.Conn.Private, []byte("welcome\x00")) {
					t.Errorf("response %+v", e.Conn)
				}
				active, passive := attrs(t, a), attrs(t, p)
				if active.DestQPN != 18 || passive.DestQPN != 17 || active.RQPSN != passive.SQPSN || active.SQPSN != passive.RQPSN ||
					active.MaxRDAtomic != 4 || active.MaxDestRDAtomic != 2 || passive.MaxRDAtomic != 2 || passive.MaxDestRDAtomic != 4 ||
					active.RetryCnt != 7 || active.RNRRetry != 5 || passive.RNRRetry != 6 || active.PathMTU != passive.PathMTU ||
					active.AV.DGID.Addr() != at.Addr() || passive.AV.DGID.Addr() != addr(1) || active.Timeout == 0 || passive.Timeout == 0 {
					t.Errorf("active %+v\npassive %+v", active, passive)
				}
				check(t, a.Accept(nil))
				p.next(cma.Established)
				check(t, a.Disconnect())
				p.next(cma.Disconnected)
				check(t, p.Disconnect())
				a.next(cma.Disconnected)
				a.next(cma.TimewaitExit)
				p.next(cma.TimewaitExit)
				for _, id := range []interface{ Disconnect() error }{a, p} {
					if err := id.Disconnect(); !errors.Is(err, syscall.ENOTCONN) {
						t.Errorf("a connection that has ended is ended again: %v", err)
					}
				}
				check(t, a.Close())
				check(t, p.Close())
				check(t, l.Close())
			})
		}
	}
}

// A peer that offers more READs and atomics than the device can have gets as many as it can.
func TestConnectOffersTooMuch(t *testing.T) {
	m := manager(t, "", addr(1), addr(2))
	at := netip.AddrPortFrom(addr(2), 7174)
	l := newID(t, m, cma.PSTCP, ib.RC)
	check(t, l.Bind(at))
	check(t, l.Listen(5))
	a := newID(t, m, cma.PSTCP, ib.RC)
	a.resolve(at)
	check(t, a.Connect(&cma.ConnParam{QPN: 19, ResponderResources: 128, InitiatorDepth: 128}))
	p := take(t, l.next(cma.ConnectRequest))
	check(t, p.Accept(&cma.ConnParam{QPN: 20, ResponderResources: 128, InitiatorDepth: 128}))
	if e := a.next(cma.ConnectResponse); e.Conn.ResponderResources != 128 || e.Conn.InitiatorDepth != 128 {
		t.Errorf("response %+v", e.Conn)
	}
	for _, n := range []*id{a, p} {
		if q := attrs(t, n); q.MaxRDAtomic != 16 || q.MaxDestRDAtomic != 16 {
			t.Errorf("%d and %d", q.MaxRDAtomic, q.MaxDestRDAtomic)
		}
	}
	check(t, a.Close())
	check(t, p.Close())
	check(t, l.Close())
}

// attrs returns what the queue pair of an id is modified with, all states together.
func attrs(t *testing.T, n *id) (a ib.QPAttr) {
	t.Helper()
	if _, _, err := n.QPAttr(ib.QPInit); err != nil {
		t.Fatal(err)
	}
	rtr, _, err := n.QPAttr(ib.QPRTR)
	check(t, err)
	rts, _, err := n.QPAttr(ib.QPRTS)
	check(t, err)
	a = rtr
	a.SQPSN, a.RetryCnt, a.RNRRetry, a.Timeout, a.MaxRDAtomic = rts.SQPSN, rts.RetryCnt, rts.RNRRetry, rts.Timeout, rts.MaxRDAtomic
	return a
}

// What ends otherwise: nobody listens, the listener refuses, the peer goes away.
func TestRefused(t *testing.T) {
	m := manager(t, "", addr(3))
	at := netip.AddrPortFrom(addr(3), 99)
	connect := func() *id {
		a := newID(t, m, cma.PSTCP, ib.RC)
		a.resolve(at)
		check(t, a.Connect(&cma.ConnParam{QPN: 17}))
		return a
	}
	if e := connect().next(cma.Rejected); e.Status != 8 {
		t.Errorf("nobody listens: reason %d", e.Status)
	}
	l := newID(t, m, cma.PSTCP, ib.RC)
	check(t, l.Bind(at))
	check(t, l.Listen(1))
	a := connect()
	p := take(t, l.next(cma.ConnectRequest))
	check(t, p.Reject(0, []byte("no")))
	if e := a.next(cma.Rejected); e.Status != 28 || len(e.Conn.Private) != 148 || !bytes.HasPrefix(e.Conn.Private, []byte("no\x00")) {
		t.Errorf("refused: %+v", e)
	}
	a = connect()
	p = take(t, l.next(cma.ConnectRequest))
	check(t, p.Close())
	if e := a.next(cma.Rejected); e.Status != 28 {
		t.Errorf("the request is destroyed: reason %d", e.Status)
	}
	a = connect()
	p = take(t, l.next(cma.ConnectRequest))
	check(t, a.Close())
	if e := p.next(cma.Rejected); e.Status != 4 {
		t.Errorf("the peer has given up: reason %d", e.Status)
	}
	a = connect()
	p = take(t, l.next(cma.ConnectRequest))
	check(t, p.Accept(&cma.ConnParam{QPN: 18}))
	a.next(cma.ConnectResponse)
	check(t, a.Accept(nil))
	p.next(cma.Established)
	check(t, a.Close())
	p.next(cma.Disconnected)
}

// Datagram ids resolve a service.
func TestDatagrams(t *testing.T) {
	m := manager(t, "", addr(4), addr(5))
	l := newID(t, m, cma.PSUDP, ib.UD)
	check(t, l.Bind(netip.AddrPortFrom(netip.IPv4Unspecified(), 7175)))
	check(t, l.Listen(0))
	a := newID(t, m, cma.PSUDP, ib.UD)
	check(t, a.Bind(netip.AddrPortFrom(addr(4), 0)))
	a.resolve(netip.AddrPortFrom(addr(5), 7175))
	check(t, a.Connect(&cma.ConnParam{Private: []byte("who")}))
	e := l.next(cma.ConnectRequest)
	if len(e.UD.Private) != 180 || !bytes.HasPrefix(e.UD.Private, []byte("who\x00")) {
		t.Errorf("request %+v", e.UD)
	}
	check(t, take(t, e).Accept(&cma.ConnParam{QPN: 77, Private: []byte("me")}))
	e = a.next(cma.Established)
	if e.UD.QPN != 77 || e.UD.QKey != 0x01234567 || e.UD.AH.DGID.Addr() != addr(5) || len(e.UD.Private) != 136 || !bytes.HasPrefix(e.UD.Private, []byte("me\x00")) {
		t.Errorf("answer %+v", e.UD)
	}
}

// Ports are refused as the kernel does.
func TestPorts(t *testing.T) {
	m := manager(t, "", addr(6), addr(7))
	any4 := netip.IPv4Unspecified()
	for _, c := range []struct {
		first, second netip.Addr
		reuse         bool
		want          error
	}{
		{addr(6), addr(6), false, syscall.EADDRINUSE},
		{addr(6), addr(7), false, nil},
		{addr(6), any4, false, syscall.EADDRNOTAVAIL},
		{any4, addr(6), false, syscall.EADDRNOTAVAIL},
		{any4, any4, false, syscall.EADDRINUSE},
		{addr(6), addr(6), true, nil},
		{netip.MustParseAddr("127.0.0.1"), any4, true, nil},
	} {
		t.Run(fmt.Sprint(c.first, c.second, c.reuse), func(t *testing.T) {
			a, b := newID(t, m, cma.PSTCP, ib.RC), newID(t, m, cma.PSTCP, ib.RC)
			defer func() { _ = a.Close(); _ = b.Close() }()
			if c.reuse {
				check(t, a.SetOption(cma.OptionReuseAddr, 1))
				check(t, b.SetOption(cma.OptionReuseAddr, 1))
			}
			check(t, a.Bind(netip.AddrPortFrom(c.first, 4242)))
			if err := b.Bind(netip.AddrPortFrom(c.second, 4242)); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if c.reuse {
				check(t, a.Listen(0))
				if err := b.Listen(0); err == nil {
					t.Error("two ids listen on one port")
				}
			}
		})
	}
	if err := newID(t, m, cma.PSTCP, ib.RC).Bind(netip.MustParseAddrPort("192.0.2.1:1000")); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("an address that no device has: %v", err)
	}
	a := newID(t, m, cma.PSUDP, ib.UD)
	check(t, a.Listen(0))
	if p := a.Info().Src; p.Port() < 32768 || !p.Addr().IsUnspecified() {
		t.Errorf("bound to %v", p)
	}
}
