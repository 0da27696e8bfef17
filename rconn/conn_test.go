package rconn

import (
	"net"
	"net/netip"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// links are the ways that bytes go: within the process, and by packets.
var links = map[string]verbs.LinkMode{"any": verbs.LinkAny, "packets": verbs.LinkUDP}

func open(t testing.TB, addr string, link verbs.LinkMode) *verbs.Device {
	t.Helper()
	d, err := verbs.Open("", &verbs.Config{Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Link: link})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// The tests that every net.Conn should pass.
func TestNettest(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			here, there := open(t, "127.0.90.1", link), open(t, "127.0.90.2", link)
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				l, err := Listen(t.Context(), "127.0.90.2:0", &Config{Config: cm.Config{Device: there}})
				if err != nil {
					return nil, nil, nil, err
				}
				d := Dialer{Config{Config: cm.Config{Device: here}}}
				if c1, err = d.DialContext(t.Context(), "rdma", l.Addr().String()); err != nil {
					return nil, nil, nil, err
				}
				c2, err = l.Accept()
				return c1, c2, func() { c1.Close(); c2.Close(); l.Close() }, err
			})
		})
	}
}
