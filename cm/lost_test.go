package cm

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	proto "github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/verbs"
)

// deafDevice is a device that loses messages of the connection manager that it is to send.
type deafDevice struct {
	provider.Device
	loses proto.Attr
}

func (d deafDevice) Management() provider.Management {
	return lossy{d.Device.Management(), d.loses}
}

type lossy struct {
	provider.Management
	loses proto.Attr
}

func (l lossy) Send(m *provider.MAD) error {
	if attr, _, _, _ := proto.Classify(m.Bytes); attr == l.loses {
		return nil
	}
	return l.Management.Send(m)
}

// rawDialer is a connection of the active side, made of its parts.
type rawDialer struct {
	t      *testing.T
	id     *cma.ID
	events chan *cma.Event
	qp     *verbs.QP
	cq     *verbs.CQ
}

func (r *rawDialer) next(want cma.EventType) *cma.Event {
	r.t.Helper()
	select {
	case e := <-r.events:
		if e.Type != want {
			r.t.Fatalf("event %v, status %d; want %v", e.Type, e.Status, want)
		}
		return e
	case <-within(r.t).Done():
		r.t.Fatalf("no event %v", want)
		return nil
	}
}

// dialWithout connects, but loses all messages of one type that the active side sends.
func dialWithout(t *testing.T, dev *verbs.Device, to netip.AddrPort, typ verbs.QPType, loses proto.Attr) *rawDialer {
	t.Helper()
	addrs := []netip.Addr{dev.Addr()}
	m := cma.New(cma.Config{Devices: func() ([]cma.Device, error) {
		return []cma.Device{{Name: dev.Name(), Addrs: addrs, Open: func() (provider.Device, func(), error) {
			return deafDevice{provider.DeviceOf(dev), loses}, func() {}, nil
		}}}, nil
	}})
	t.Cleanup(func() { closeAll(t, m) })
	r := &rawDialer{t: t, events: make(chan *cma.Event, 16)}
	var err error
	r.id, err = m.NewID(cma.PSTCP, typ, func(e *cma.Event) { r.events <- e })
	check(t, err)
	check(t, r.id.ResolveAddr(netip.AddrPortFrom(dev.Addr(), 0), to, time.Second))
	r.next(cma.AddrResolved)
	check(t, r.id.ResolveRoute(time.Second))
	r.next(cma.RouteResolved)
	pd, err := dev.AllocPD()
	check(t, err)
	r.cq, err = dev.CreateCQ(16, nil)
	check(t, err)
	r.qp, err = pd.CreateQP(&verbs.QPConfig{Type: typ, SendCQ: r.cq, RecvCQ: r.cq, Cap: defaultCap})
	check(t, err)
	t.Cleanup(func() { closeAll(t, r.qp, r.cq, pd) })
	r.modify(verbs.QPInit)
	check(t, r.id.Connect(&cma.ConnParam{QPN: r.qp.Number(), RetryCount: 7, RNRRetry: 7}))
	r.next(cma.ConnectResponse)
	r.modify(verbs.QPRTR)
	r.modify(verbs.QPRTS)
	check(t, r.id.Accept(nil))
	return r
}

func (r *rawDialer) modify(to verbs.QPState) {
	r.t.Helper()
	a, mask, err := r.id.QPAttr(to)
	check(r.t, err)
	check(r.t, r.qp.Modify(&a, mask))
}

// If the RTU is lost, for ever, the first message establishes the connection.
func TestLostRTU(t *testing.T) {
	for _, typ := range []verbs.QPType{verbs.RC, verbs.UC} {
		for _, link := range []verbs.LinkMode{verbs.LinkLoop, verbs.LinkUDP, verbs.LinkLocal} {
			t.Run(fmt.Sprint(typ, " ", link), func(t *testing.T) {
				server, client := device(t, link), device(t, link)
				buf := make([]byte, 16)
				l := listenOn(t, anyPort(server), &Config{Type: typ, Device: server, Setup: receives(buf)})
				var b *Conn
				var err error
				var wg sync.WaitGroup
				wg.Go(func() { b, err = l.Accept(within(t)) })
				a := dialWithout(t, client, l.Addr(), typ, proto.AttrRTU)
				waitFor(t, l, "no connection waits for the RTU", func() bool { return len(l.offers.waiting) == 1 })
				_, postErr := a.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte("hello")}})
				check(t, postErr)
				wg.Wait()
				check(t, err)
				wc := poll(t, b.RecvCQ())
				check(t, wc.Err())
				if string(buf[:wc.ByteLen]) != "hello" {
					t.Errorf("%q has come", buf)
				}
				check(t, a.id.Close())
				select {
				case <-b.Done():
				case <-within(t).Done():
					t.Error("the end is not heard of")
				}
				closeAll(t, b)
			})
		}
	}
}

// A peer that does not know of the end of a connection refuses a queue pair that has the number of an
// earlier one. Dial makes another one then.
func TestDialStale(t *testing.T) {
	server, client := device(t, verbs.LinkLoop), device(t, verbs.LinkLoop)
	l := listenOn(t, anyPort(server), &Config{Device: server})
	var b *Conn
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { b, err = l.Accept(within(t)) })
	a := dialWithout(t, client, l.Addr(), verbs.RC, proto.AttrDREQ)
	wg.Wait()
	check(t, err)
	check(t, a.id.Close()) // which the peer does not hear of
	check(t, a.qp.Close())

	stale := a.qp.Number()
	wg.Go(func() {
		c, err := l.Accept(within(t))
		if err == nil {
			closeAll(t, c)
		}
	})
	for range 5000 { // until the number comes back
		var tried []uint32
		c, err := Dial(within(t), l.Addr().String(), &Config{Device: client, Setup: func(c *Conn) error {
			if tried = append(tried, c.QP().Number()); c.QP().Number() != stale && len(tried) == 1 {
				return errStop
			}
			return nil
		}})
		if errors.Is(err, errStop) {
			continue
		}
		check(t, err)
		if len(tried) != 2 || tried[0] != stale || tried[1] == stale {
			t.Errorf("queue pairs %#x were tried, the stale one being %#x", tried, stale)
		}
		closeAll(t, c)
		break
	}
	wg.Wait()
	select {
	case <-b.Done():
	case <-within(t).Done():
		t.Error("the peer does not hear of the end of the stale connection")
	}
	closeAll(t, b)
}

var errStop = errors.New("not this one")
