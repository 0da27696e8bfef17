package programs

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// A server that listens at all addresses is there before the network. It serves clients at interfaces and
// addresses that come later.
func TestRDMACMAppear(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	ns := newNetwork(t)
	do(t, "ip", "-n", ns[0], "link", "del", "d0") // its other end goes, too
	in := func(i int, args string) side {
		return side{args: strings.Fields(args), wrap: []string{"ip", "netns", "exec", ns[i]}}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, in(0, "rping -s -P -V"))
	reach := func(from int, addr string) {
		t.Helper()
		// A client that asks before the server listens there is refused, or waits for more than a
		// minute: then it is ended, and another one asks.
		for seconds := 1; ; seconds++ {
			c := start(ctx, t, in(from, fmt.Sprintf("timeout %d rping -c -C 3 -v -V -a %s", seconds, addr)))
			<-c.done
			out := c.out.String()
			switch {
			case c.err == nil && strings.Contains(out, "ping data: rdma-ping-2"), c.lost(rpingRaceAt(3)):
				return
			case ctx.Err() != nil:
				t.Fatalf("%s: %v\n%s\nthe server says\n%s", addr, c.err, out, s.out.String())
			}
		}
	}
	join := func(n int) {
		from, to := fmt.Sprintf("e%d", n), fmt.Sprintf("f%d", n)
		do(t, "ip", "-n", ns[0], "link", "add", from, "type", "veth", "peer", "name", to, "netns", ns[1])
		do(t, "ip", "-n", ns[1], "addr", "add", fmt.Sprintf("10.79.%d.2/24", n), "dev", to)
		do(t, "ip", "-n", ns[1], "link", "set", to, "up")
		do(t, "ip", "-n", ns[0], "link", "set", from, "up")
		do(t, "ip", "-n", ns[0], "addr", "add", fmt.Sprintf("10.79.%d.1/24", n), "dev", from)
	}
	// The server's only device is that of the loopback interface.
	reach(0, "127.0.0.1")
	join(1)
	reach(1, "10.79.1.1")
	join(2)
	reach(1, "10.79.2.1")
	do(t, "ip", "-n", ns[0], "addr", "add", "10.79.1.7/24", "dev", "e1")
	reach(1, "10.79.1.7")
	reach(1, "10.79.1.1")
	s.terminate(t)
}
