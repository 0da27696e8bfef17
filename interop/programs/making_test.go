package programs

// Connections in the making between a program on the drop-in library and a connection manager of the
// test, which leaves out or delays what it likes.

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// partner is a connection manager of the test, on a device of its own.
type partner struct {
	t   testing.TB
	dev *device.Device
	mgr *cma.Manager

	mu   sync.Mutex // guards what follows
	keep cm.Attr    // messages that are not sent
	kept []provider.MAD
}

func newPartner(t testing.TB) *partner {
	t.Helper()
	addr := netip.MustParseAddr(address())
	dev, err := device.Open("", &provider.Config{Addrs: []netip.Addr{addr}})
	if err != nil {
		t.Fatal(err)
	}
	p := &partner{t: t, dev: dev}
	list := []cma.Device{{Name: "partner", Addrs: []netip.Addr{addr}, Open: func() (provider.Device, func(), error) {
		return keepingDevice{dev, p}, func() {}, nil
	}}}
	p.mgr = cma.New(cma.Config{Fixed: true, Devices: func() ([]cma.Device, error) { return list, nil }})
	t.Cleanup(func() {
		p.check(p.mgr.Close())
		p.check(dev.Close())
	})
	return p
}

func (p *partner) check(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// addr is the partner's address.
func (p *partner) addr() netip.Addr { return p.dev.Management().Addrs()[0] }

// keepingDevice is a device whose messages to other connection managers the test may keep.
type keepingDevice struct {
	provider.Device
	p *partner
}

func (d keepingDevice) Management() provider.Management {
	return keepingManagement{d.Device.Management(), d.p}
}

type keepingManagement struct {
	provider.Management
	p *partner
}

func (m keepingManagement) Send(d *provider.MAD) error {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	if attr, _, _, _ := cm.Classify(d.Bytes); attr == m.p.keep {
		k := *d
		k.Bytes = append([]byte(nil), d.Bytes...)
		m.p.kept = append(m.p.kept, k)
		return nil
	}
	return m.Management.Send(d)
}

// release sends the messages that were kept, each of them twice.
func (p *partner) release() {
	p.t.Helper()
	p.mu.Lock()
	kept := p.kept
	p.keep, p.kept = 0, nil
	p.mu.Unlock()
	if len(kept) == 0 {
		p.t.Fatal("there is nothing to send")
	}
	for _, d := range append(kept, kept...) {
		p.check(p.dev.Management().Send(&d))
	}
}

// end is an id of the partner, with its events.
type end struct {
	p      *partner
	id     *cma.ID
	events chan *cma.Event
}

func (p *partner) newEnd() *end {
	p.t.Helper()
	e := &end{p: p, events: make(chan *cma.Event, 64)}
	var err error
	e.id, err = p.mgr.NewID(cma.PSTCP, ib.RC, func(ev *cma.Event) { e.events <- ev })
	p.check(err)
	p.t.Cleanup(func() { p.check(e.id.Close()) })
	return e
}

// want waits for an event.
func (e *end) want(typ cma.EventType, status int) *cma.Event {
	e.p.t.Helper()
	select {
	case ev := <-e.events:
		if ev.Type != typ || ev.Status != status {
			e.p.t.Fatalf("event %d, status %d; want %d, status %d", ev.Type, ev.Status, typ, status)
		}
		return ev
	case <-time.After(patience):
		e.p.t.Fatalf("no event %d", typ)
		return nil
	}
}

// resolve finds the way to an address.
func (e *end) resolve(to netip.AddrPort) {
	e.p.t.Helper()
	e.p.check(e.id.ResolveAddr(netip.AddrPort{}, to, time.Second))
	e.want(cma.AddrResolved, 0)
	e.p.check(e.id.ResolveRoute(time.Second))
	e.want(cma.RouteResolved, 0)
}

// connect asks a program for a connection, until it listens.
func (p *partner) connect(to netip.AddrPort, q *cma.ConnParam) *end {
	p.t.Helper()
	e := p.newEnd()
	e.resolve(to)
	p.check(e.id.Connect(q))
	return e
}

// A program is killed while its connection is being made, and no other process has its address. Its peer
// hears of that at once, from the watcher of "verbena exec", by the message that the kernel would send:
// it neither waits for a minute nor keeps what it has.
func TestRDMACMKilledInTheMaking(t *testing.T) {
	exe := compileWith(t, "making", "-L", built(t)+"/lib", "-lrdmacm", "-libverbs")
	const timeout, consumer = 4, 28 // reasons of a rejection
	kill := func(c *process) {
		t.Helper()
		if err := c.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-c.done
	}
	t.Run("who asks", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		p := newPartner(t)
		l := p.newEnd()
		p.check(l.id.Bind(netip.AddrPortFrom(p.addr(), 7470)))
		p.check(l.id.Listen(4))
		c := start(ctx, t, side{args: []string{exe, "ask", p.addr().String(), "7470"}, env: []string{"VERBENA_ADDR=" + address()}})
		l.want(cma.ConnectRequest, 0).New.Seen()
		kill(c)
		l.want(cma.Rejected, timeout)
	})
	for _, at := range []string{"request", "accept"} {
		t.Run("who was asked, "+at, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			p := newPartner(t)
			to := netip.AddrPortFrom(netip.MustParseAddr(address()), 7470)
			c := start(ctx, t, side{args: []string{exe, at, to.Addr().String(), "7470"}, env: []string{"VERBENA_ADDR=" + to.Addr().String()}})
			c.await("listening\n")
			e := p.connect(to, &cma.ConnParam{QPN: 77, RetryCount: 7, RNRRetry: 7})
			if at == "accept" {
				e.want(cma.ConnectResponse, 0) // and confirms nothing
			} else {
				c.await("CONNECT_REQUEST 0\n")
			}
			kill(c)
			e.want(cma.Rejected, consumer)
		})
	}
}

// makeQP makes a queue pair of the partner, in INIT.
func (e *end) makeQP() (provider.QP, provider.CQ) {
	p := e.p
	p.t.Helper()
	pd, err := p.dev.AllocPD()
	p.check(err)
	cq, err := p.dev.CreateCQ(16, nil)
	p.check(err)
	qp, err := pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: cq, RecvCQ: cq, Cap: ib.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64}})
	p.check(err)
	p.t.Cleanup(func() {
		p.check(qp.Close())
		p.check(cq.Close())
		p.check(pd.Close())
	})
	e.modify(qp, ib.QPInit)
	return qp, cq
}

func (e *end) modify(qp provider.QP, to ib.QPState) {
	e.p.t.Helper()
	a, mask, err := e.id.QPAttr(to)
	e.p.check(err)
	e.p.check(qp.Modify(&a, mask))
}

// The last message of a peer that connects is lost, or comes late and twice. The first data establishes the
// connection, and the program gets the events of librdmacm in their order, each once.
func TestRDMACMLostRTU(t *testing.T) {
	exe := compileWith(t, "making", "-L", built(t)+"/lib", "-lrdmacm", "-libverbs")
	const begin = "listening\nRDMA_CM_EVENT_CONNECT_REQUEST 0\naccepted\n"
	const established = "RDMA_CM_EVENT_ESTABLISHED 0\nreceived hello\n"
	for _, c := range []struct {
		name       string
		data, late bool
		says       string
	}{
		{"lost", true, false, begin + established},
		{"late", true, true, begin + established},
		{"lost, and no data", false, false, begin},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			p := newPartner(t)
			p.keep = cm.AttrRTU
			to := netip.AddrPortFrom(netip.MustParseAddr(address()), 7470)
			prog := start(ctx, t, side{args: []string{exe, "accept", to.Addr().String(), "7470"}, env: []string{"VERBENA_ADDR=" + to.Addr().String()}})
			prog.await("listening\n")
			e := p.newEnd()
			e.resolve(to)
			qp, cq := e.makeQP()
			p.check(e.id.Connect(&cma.ConnParam{QPN: qp.Number(), RetryCount: 7, RNRRetry: 7}))
			e.want(cma.ConnectResponse, 0)
			e.modify(qp, ib.QPRTR)
			e.modify(qp, ib.QPRTS)
			p.check(e.id.Accept(nil))
			prog.await("accepted\n")
			if out := prog.out.String(); out != begin {
				t.Errorf("before the first data it says\n%s", out)
			}
			if c.data {
				_, err := qp.PostSend([]ib.SendWR{{Op: ib.OpSend, Flags: ib.SendSignaled, Inline: []byte("hello")}})
				p.check(err)
				prog.await("received hello\n")
				var wc [1]ib.WC
				for n := 0; n == 0; {
					n, err = cq.Poll(wc[:])
					p.check(err)
				}
				p.check(wc[0].Err())
			}
			if c.late {
				p.release()
			}
			p.check(e.id.Disconnect())
			e.want(cma.Disconnected, 0)
			// rdma_notify of what is established fails, and the library says why.
			if out := regexp.MustCompile(`(?m)^verbena: notify: .*\n`).ReplaceAllString(prog.finish(t), ""); out != c.says+"RDMA_CM_EVENT_DISCONNECTED 0\nok\n" {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// Options of a vendor (ECE) are passed on, as the kernel does it: what they mean is the programs' affair.
func TestRDMACMECE(t *testing.T) {
	exe := compileWith(t, "ece", "-L", built(t)+"/lib", "-lrdmacm", "-libverbs")
	const vendor, foreign = 0x15b3, 0x2c9
	for _, c := range []struct {
		name       string
		asks       bool // the program
		own, peers cma.ECE
		want       cma.ECE // what the peer gets
		says       string
	}{
		{name: "offered", asks: true, own: cma.ECE{Vendor: vendor, Options: 9}, peers: cma.ECE{Vendor: vendor, Options: 3},
			want: cma.ECE{Vendor: vendor, Options: 9}, says: "RDMA_CM_EVENT_CONNECT_RESPONSE 0\nthe peer has 0x15b3 0x3\n"},
		{name: "offered, answered with nothing", asks: true, own: cma.ECE{Vendor: vendor, Options: 9},
			want: cma.ECE{Vendor: vendor, Options: 9}, says: "RDMA_CM_EVENT_CONNECT_RESPONSE 0\nthe peer has 0 0\n"},
		{name: "another vendor's answer", asks: true, own: cma.ECE{Vendor: vendor, Options: 9}, peers: cma.ECE{Vendor: foreign, Options: 3},
			want: cma.ECE{Vendor: vendor, Options: 9}, says: "RDMA_CM_EVENT_CONNECT_ERROR -22\n"},
		// librdmacm answers with the vendor that has asked.
		{name: "answered", own: cma.ECE{Vendor: vendor, Options: 5}, peers: cma.ECE{Vendor: vendor, Options: 0xffffffff},
			want: cma.ECE{Vendor: vendor, Options: 5}, says: "the peer has 0x15b3 0xffffffff\n"},
		{name: "not answered", peers: cma.ECE{Vendor: foreign, Options: 7},
			want: cma.ECE{Vendor: foreign}, says: "the peer has 0x2c9 0x7\n"},
		{name: "none", says: "the peer has 0 0\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			p := newPartner(t)
			own := address()
			begin := func(what string, at netip.AddrPort) *process {
				return start(ctx, t, side{args: []string{exe, what, at.Addr().String(), fmt.Sprint(at.Port()), fmt.Sprint(c.own.Vendor), fmt.Sprint(c.own.Options)},
					env: []string{"VERBENA_ADDR=" + own}})
			}
			param := &cma.ConnParam{RetryCount: 7, RNRRetry: 7, ECE: c.peers}
			var prog *process
			var e *end
			var got cma.ECE
			if c.asks {
				at := netip.AddrPortFrom(p.addr(), 7470)
				l := p.newEnd()
				p.check(l.id.Bind(at))
				p.check(l.id.Listen(1))
				prog = begin("ask", at)
				ev := l.want(cma.ConnectRequest, 0)
				e, got = &end{p, ev.New, l.events}, ev.Conn.ECE
				t.Cleanup(func() { p.check(e.id.Close()) })
			} else {
				at := netip.AddrPortFrom(netip.MustParseAddr(own), 7470)
				prog = begin("accept", at)
				prog.await("listening\n")
				e = p.newEnd()
				e.resolve(at)
			}
			qp, _ := e.makeQP()
			param.QPN = qp.Number()
			if c.asks {
				e.modify(qp, ib.QPRTR)
				e.modify(qp, ib.QPRTS)
				p.check(e.id.Accept(param))
			} else {
				p.check(e.id.Connect(param))
				got = e.want(cma.ConnectResponse, 0).Conn.ECE
				e.modify(qp, ib.QPRTR)
				e.modify(qp, ib.QPRTS)
				p.check(e.id.Accept(nil))
			}
			if got != c.want {
				t.Errorf("the peer gets %#x", got)
			}
			if !strings.Contains(c.says, "ERROR") {
				if c.asks {
					e.want(cma.Established, 0)
				} else {
					prog.await("RDMA_CM_EVENT_ESTABLISHED 0\n")
				}
				p.check(e.id.Disconnect())
				e.want(cma.Disconnected, 0)
			}
			if out := prog.finish(t); !strings.Contains(out, c.says) || strings.Contains(c.says, "ERROR") == strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}
