package programs

// Programs that connect by IP address: the distribution's librdmacm on the emulated file of the
// connection manager. Each case has an address of its own, so cases run side by side.

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// prober asks, from an address of its own, whether a program listens on a port.
type prober struct{ *cma.Manager }

func newProber(t testing.TB, from netip.Addr) prober {
	t.Helper()
	dev := cma.Device{Name: "prober", Addrs: []netip.Addr{from}, Open: func() (provider.Device, func(), error) {
		d, err := device.Open("", &provider.Config{Addrs: []netip.Addr{from}})
		if err != nil {
			return nil, nil, err
		}
		return d, func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}, nil
	}}
	m := cma.New(cma.Config{Devices: func() ([]cma.Device, error) { return []cma.Device{dev}, nil }})
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return prober{m}
}

// listens reports whether a program listens on the port. The prober asks for an unreliable connection, which no
// program here takes: a connection manager that has a listener refuses it without telling the
// program (28), another says that the service is unknown (8), and where there is no process yet,
// nobody answers.
func (p prober) listens(t testing.TB, ps cma.PortSpace, at netip.AddrPort) bool {
	t.Helper()
	events := make(chan *cma.Event, 8)
	id, err := p.NewID(ps, ib.UC, func(e *cma.Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	defer id.Close()
	wait := func(want cma.EventType, after error) *cma.Event {
		if after != nil {
			t.Fatal(after)
		}
		select {
		case e := <-events:
			if e.Type != want {
				t.Fatalf("asking %v: event %d, status %d; want event %d", at, e.Type, e.Status, want)
			}
			return e
		case <-time.After(200 * time.Millisecond):
			return nil
		}
	}
	wait(cma.AddrResolved, id.ResolveAddr(netip.AddrPort{}, at, time.Second))
	wait(cma.RouteResolved, id.ResolveRoute(time.Second))
	e := wait(cma.Rejected, id.Connect(&cma.ConnParam{QPN: 17}))
	if e != nil && e.Status != 8 && e.Status != 28 {
		t.Fatalf("asking %v: refused for reason %d", at, e.Status)
	}
	return e != nil && e.Status == 28
}

// await waits until the server listens. It fails the test if the server ends before that.
func (p prober) await(t testing.TB, server *process, ps cma.PortSpace, at netip.AddrPort) {
	t.Helper()
	for !p.listens(t, ps, at) {
		select {
		case <-server.done:
			t.Fatalf("%s does not listen on %v: %v\n%s", server.name, at, server.err, server.out.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// meeting is a server and its client. "IP" in the commands stands for the server's address,
// "TMP" for a directory.
type meeting struct {
	name           string // what distinguishes it from others of the same server; may be empty
	pkg            string // the Debian package of the programs
	server, client string
	port           uint16
	udp            bool   // the port is of RDMA_PS_UDP
	psIB           bool   // the port is of RDMA_PS_IB
	stays          bool   // the server serves until it is told to end
	says           string // a regular expression for the client's output
	env            string // a variable of both programs, NAME=VALUE
	race           string // a regular expression for what a program prints that has lost a race; both are run again
	short          bool
}

// run runs a meeting on one address. Both programs must succeed.
func (m *meeting) run(t *testing.T, addr string, client, server side) {
	t.Helper()
	ps := cma.PSTCP
	switch {
	case m.udp:
		ps = cma.PSUDP
	case m.psIB:
		ps = cma.PSIB
	}
	at := netip.AddrPortFrom(netip.MustParseAddr(addr), m.port)
	p := newProber(t, proberAddress(at.Addr()))
	for range 20 {
		if m.try(t, p, ps, at, client, server) {
			return
		}
	}
	t.Errorf("%s: a race was lost each time", client.args)
}

// rpingRace is all that an rping prints that has done its work, and then fails. Up to rdma-core 58
// its main thread destroys the event channel while another thread still gets events from it. If that
// thread has just handled an event, it finds the channel destroyed, and exits with an error. A client that
// has not handled the last event prints its pings (-v) when it exits, all of them: before or after that error.
var rpingRace = rpingRaceAt(10)

// rpingRaceAt is that of a client with so many pings, at most 10.
func rpingRaceAt(pings int) string {
	all := fmt.Sprintf(`(ping data: .*\n){%d}ping data: rdma-ping-%d: .*\n`, pings-1, pings-1)
	return `\A(server DISCONNECT EVENT\.\.\.\nwait for RDMA_READ_ADV state 10\n` + rpingClosed +
		`|client DISCONNECT EVENT\.\.\.\n` + rpingClosed +
		`|(client DISCONNECT EVENT\.\.\.\n)?` + rpingClosed + all +
		`|(client DISCONNECT EVENT\.\.\.\n)?` + all + rpingClosed + `)\z`
}

const rpingClosed = `rdma_get_cm_event: Bad file descriptor\n`

// No other failure of an rping is taken for that race.
func TestRpingRace(t *testing.T) {
	const closed = "rdma_get_cm_event: Bad file descriptor\n"
	for out, want := range map[string]bool{
		"server DISCONNECT EVENT...\nwait for RDMA_READ_ADV state 10\n" + closed: true,
		"client DISCONNECT EVENT...\n" + closed:                                  true,
		closed:                                                                   false,
		"server DISCONNECT EVENT...\n" + closed:                                  false, // it was at work
		"server DISCONNECT EVENT...\nwait for RDMA_WRITE_ADV state 10\n" + closed:                                false,
		"server DISCONNECT EVENT...\nwait for RDMA_READ_ADV state 11\n" + closed:                                 false,
		"server DISCONNECT EVENT...\nwait for RDMA_READ_ADV state 10\nrping server failed: -1\n" + closed:        false,
		"cq completion failed status 12\nserver DISCONNECT EVENT...\nwait for RDMA_READ_ADV state 10\n" + closed: false,
		"data mismatch!\nclient DISCONNECT EVENT...\n" + closed:                                                  false,
		"client DISCONNECT EVENT...\nrdma_get_cm_event: Invalid argument\n":                                      false,
		"client DISCONNECT EVENT...\n": false,
		pingData(10) + closed:          true,
		closed + pingData(10):          true,
		pingData(9) + closed:           false,
		pingData(10):                   false,
	} {
		if got := regexp.MustCompile(rpingRace).MatchString(out); got != want {
			t.Errorf("%q: %t", out, got)
		}
	}
}

// pingData is what rping prints of so many pings.
func pingData(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "ping data: rdma-ping-%d: ABC\n", i)
	}
	return b.String()
}

// lost waits for the end of a program and reports whether it has lost a race.
func (p *process) lost(race string) bool {
	<-p.done
	return race != "" && regexp.MustCompile(race).MatchString(p.out.String())
}

// try runs both programs once. It reports whether neither has lost a race.
func (m *meeting) try(t *testing.T, p prober, ps cma.PortSpace, at netip.AddrPort, client, server side) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, server)
	p.await(t, s, ps, at)
	c := start(ctx, t, client)
	if c.lost(m.race) {
		cancel()
		<-s.done
		return false
	}
	if out := c.finish(t); !regexp.MustCompile(m.says).MatchString(out) {
		t.Errorf("the client says\n%s\nwant %q", out, m.says)
	}
	switch {
	case m.stays:
		s.terminate(t)
	case t.Failed():
		cancel() // the server may wait for ever
		s.finish(t)
	case s.lost(m.race):
		return false
	default:
		s.finish(t)
	}
	return true
}

// terminate ends a server that must still be running.
func (p *process) terminate(t testing.TB) {
	t.Helper()
	select {
	case <-p.done:
		t.Errorf("%s has ended: %v\n%s", p.name, p.err, p.out.String())
		return
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	<-p.done
	if w, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !w.Signaled() || w.Signal() != syscall.SIGTERM {
		t.Errorf("%s, when told to end: %v\n%s", p.name, p.err, p.out.String())
	}
}

// proberAddress returns an address for a prober of the server's family.
func proberAddress(server netip.Addr) netip.Addr {
	if server.Is4() {
		return netip.MustParseAddr(address())
	}
	return server.Next()
}

func meetings() []meeting {
	const rdmacm, perf = "rdmacm-utils", "perftest"
	all := []meeting{
		{pkg: rdmacm, server: "rping -s -C 10 -V -a IP", client: "rping -c -C 10 -v -V -a IP", port: 7174, race: rpingRace, short: true},
		{name: "own QP", pkg: rdmacm, server: "rping -s -q -C 10 -V -a IP", client: "rping -c -q -C 10 -v -V -a IP", port: 7174, race: rpingRace},
		{name: "large", pkg: rdmacm, server: "rping -s -C 10 -V -S 65000 -a IP", client: "rping -c -C 10 -V -S 65000 -a IP", port: 7174, race: rpingRace},
		{pkg: rdmacm, server: "ucmatose -b IP", client: "ucmatose -s IP", port: 7471, says: `test complete\nreturn status 0`, short: true},
		{name: "ten", pkg: rdmacm, server: "ucmatose -b IP -c 10", client: "ucmatose -s IP -c 10", port: 7471, says: `return status 0`, short: true},
		{name: "migrate", pkg: rdmacm, server: "ucmatose -b IP -m -c 3 -a 18 -t 8", client: "ucmatose -s IP -m -c 3 -a 18 -t 8", port: 7471, says: `return status 0`},
		{name: "RDMA_PS_IB", pkg: rdmacm, server: "ucmatose -b IP -P ib", client: "ucmatose -s IP -P ib", port: 7471, psIB: true, says: `return status 0`},
		{pkg: rdmacm, server: "udaddy -b IP", client: "udaddy -s IP", port: 7174, udp: true, says: `return status 0`, short: true},
		{name: "five", pkg: rdmacm, server: "udaddy -b IP -c 5", client: "udaddy -s IP -c 5", port: 7174, udp: true, says: `return status 0`},
		{pkg: rdmacm, server: "rdma_server", client: "rdma_client -s IP", port: 7471, says: `end 0`, short: true},
		{pkg: rdmacm, server: "rdma_xserver -c r", client: "rdma_xclient -s IP -c r", port: 7471, says: `end 0`, short: true},
		{name: "XRC", pkg: rdmacm, server: "rdma_xserver -c x", client: "rdma_xclient -s IP -c x", port: 7471, psIB: true, says: `end 0`, short: true},
		{pkg: rdmacm, server: "cmtime -b IP", client: "cmtime -s IP -c 50", port: 7471, stays: true, says: `(?m)^disconnect .*\d`, short: true},
		{pkg: rdmacm, server: "rstream -S 4096 -C 200", client: "rstream -s IP -S 4096 -C 200", port: 7471, says: `4k_lat|custom`, short: true},
		{name: "verify", pkg: rdmacm, server: "rstream -S 65536 -C 100 -T v", client: "rstream -s IP -S 65536 -C 100 -T v", port: 7471, says: `64k_lat|custom`, short: true},
		{pkg: rdmacm, server: "riostream -S 4096 -C 100", client: "riostream -s IP -S 4096 -C 100", port: 7471, says: `4k_lat|custom`, short: true},
		{name: "all", pkg: rdmacm, server: "rstream", client: "rstream -s IP", port: 7471, says: `1m_bw`},
		{name: "resolve", pkg: rdmacm, server: "rstream -S 4096 -C 200 -T r -b IP", client: "rstream -s IP -S 4096 -C 200 -T r", port: 7471, says: `4k_lat|custom`},
		{name: "keepalive", pkg: rdmacm, server: "rstream -S 4096 -C 200 -k 1", client: "rstream -s IP -S 4096 -C 200 -k 1", port: 7471, says: `4k_lat|custom`},
		{pkg: rdmacm, server: "rcopy", client: "rcopy TMP/from IP:TMP/to", port: 7427, stays: true, short: true},
	}
	// With poll (-T a) rstream takes the server's end for an error if it comes with the last message.
	for _, way := range []string{"b", "n"} { // blocking, nonblocking
		args := " -S 16384 -C 100 -T " + way
		all = append(all, meeting{name: "-T " + way, pkg: rdmacm, server: "rstream" + args, client: "rstream -s IP" + args, port: 7471, says: `16k_lat|custom`},
			meeting{name: "-T " + way, pkg: rdmacm, server: "riostream" + args, client: "riostream -s IP" + args, port: 7471, says: `16k_lat|custom`})
	}
	// What fio's receiver has no buffer for is lost: fio lets nothing be sent again. So there is
	// room for all messages at once.
	for _, verb := range []string{"write", "read", "send"} {
		const job = "fio --name=job --ioengine=rdma --port=17171 --bs=64k --size=1m --iodepth=16"
		all = append(all, meeting{name: verb, pkg: "fio", server: job + " --rw=read", client: job + " --rw=write --hostname=IP --verb=" + verb, port: 17171,
			says: `io=1024KiB`, short: true})
	}
	// Also for datagrams, perftest's sides first talk over a reliable connection. Then the server
	// makes another listener, while the client connects to it: a client that is faster is refused,
	// and crashes when it tries again with the ids that it has destroyed.
	for _, c := range []struct {
		args  string
		short bool
	}{
		{"ib_write_bw", true}, {"ib_read_bw", true}, {"ib_atomic_bw", true}, {"ib_send_lat -c UD", true},
		{"ib_send_bw", false}, {"ib_write_lat", false}, {"ib_read_lat", false}, {"ib_atomic_lat", false},
		{"ib_send_bw -c UD", false}, {"ib_write_bw -q 4", false}, {"ib_send_bw -b", false}, {"ib_send_lat -T 8", false},
	} {
		args := c.args + " -R -F -n 200"
		_, flags, _ := strings.Cut(c.args, " ")
		all = append(all, meeting{name: flags, pkg: perf, server: args, client: args + " IP", port: 18515, says: `#bytes`,
			race: `Event: RDMA_CM_EVENT_(REJECTED; error: 8|UNREACHABLE; error: 1)\.`, short: c.short})
	}
	return all
}

// Two processes on one address.
func TestRDMACM(t *testing.T) {
	for _, m := range meetings() {
		if !m.short && !full {
			continue
		}
		t.Run(strings.TrimSpace(strings.Fields(m.server)[0]+" "+m.name), func(t *testing.T) {
			program(t, strings.Fields(m.server)[0], m.pkg)
			built(t)
			t.Parallel()
			meet(t, &m, address())
		})
	}
}

// meet runs a meeting at an address and checks what has become of it.
func meet(t *testing.T, m *meeting, addr string) {
	t.Helper()
	dir := t.TempDir()
	data := bytes.Repeat([]byte("0123456789abcdef\n"), 30000)
	if err := os.WriteFile(filepath.Join(dir, "from"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	env := append([]string{"VERBENA_ADDR=" + addr}, strings.Fields(m.env)...)
	fill := strings.NewReplacer("IP", addr, "TMP", dir)
	args := func(s string) (all []string) {
		for _, a := range strings.Fields(s) {
			all = append(all, fill.Replace(a))
		}
		return all
	}
	m.run(t, addr, side{args: args(m.client), env: env}, side{args: args(m.server), env: env})
	if !strings.Contains(m.client, "TMP/to") {
		return
	}
	if got, err := os.ReadFile(filepath.Join(dir, "to")); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the copy has %d bytes, %v; want the %d of the file", len(got), err, len(data))
	}
}

// A persistent server serves clients one after another.
func TestRDMACMPersistent(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	addr := address()
	env := []string{"VERBENA_ADDR=" + addr}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, side{args: []string{"rping", "-s", "-P", "-V", "-a", addr}, env: env})
	newProber(t, netip.MustParseAddr(address())).await(t, s, cma.PSTCP, netip.MustParseAddrPort(addr+":7174"))
	for range 3 {
		client := func() *process {
			return start(ctx, t, side{args: []string{"rping", "-c", "-C", "10", "-v", "-V", "-a", addr}, env: env})
		}
		c := client()
		for c.lost(rpingRace) && ctx.Err() == nil {
			c = client()
		}
		c.finish(t)
	}
	s.terminate(t)
}

// The peer of a program that is killed hears of it, though no other process has the address: from
// the watcher of "verbena exec". The program itself knows of no child.
func TestRDMACMKilled(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, killed := range []string{"server", "client"} {
		addr, other := address(), address()
		s := start(ctx, t, side{args: []string{"rping", "-s", "-v", "-S", "64", "-a", addr}, env: []string{"VERBENA_ADDR=" + addr}})
		newProber(t, netip.MustParseAddr(address())).await(t, s, cma.PSTCP, netip.MustParseAddrPort(addr+":7174"))
		c := start(ctx, t, side{args: []string{"rping", "-c", "-v", "-S", "64", "-a", addr}, env: []string{"VERBENA_ADDR=" + other}})
		c.await("rdma-ping-20:")
		dies, hears := s, c
		if killed == "client" {
			dies, hears = c, s
		}
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", dies.cmd.Process.Pid)); err != nil || len(b) > 0 {
			t.Errorf("the program has children %q, %v", b, err)
		}
		if err := dies.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-hears.done
		if ctx.Err() != nil {
			t.Fatalf("the peer does not hear that the %s was killed:\n%s", killed, hears.out.String())
		}
	}
}

// A client whose server does not listen is told so.
func TestRDMACMRefused(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	addr := address()
	env := []string{"VERBENA_ADDR=" + addr}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c := start(ctx, t, side{args: []string{"rping", "-c", "-C", "5", "-a", addr}, env: env})
	<-c.done
	if code := c.cmd.ProcessState.ExitCode(); code <= 0 || !strings.Contains(c.out.String(), "RDMA_CM_EVENT_REJECTED, error 8") {
		t.Errorf("it ends with %d (%v) and says\n%s", code, c.err, c.out.String())
	}
}

// A client that has not enough descriptors is told so, and ends: its request does not count as one that
// was lost on the way. One that has just enough ends as it should: its threads need none to end.
func TestRDMACMFewDescriptors(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	program(t, "prlimit", "util-linux")
	for _, n := range []int{24, 28, 31, 33, 36, 38, 48} { // each lacks them at another step; from 33 on there may be enough, and the last has
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			addr, other := address(), address()
			s := start(ctx, t, side{args: []string{"rping", "-s", "-a", addr}, env: []string{"VERBENA_ADDR=" + addr}})
			newProber(t, netip.MustParseAddr(address())).await(t, s, cma.PSTCP, netip.MustParseAddrPort(addr+":7174"))
			c := start(ctx, t, side{args: []string{"rping", "-c", "-C", "5", "-a", addr}, env: []string{"VERBENA_ADDR=" + other},
				wrap: []string{"prlimit", fmt.Sprintf("--nofile=%d", n)}})
			<-c.done
			if n > 31 && c.err == nil {
				return
			}
			if n == 48 {
				t.Fatalf("with %d descriptors it ends with %v and says\n%s", n, c.err, c.out.String())
			}
			if ctx.Err() != nil || c.err == nil || !regexp.MustCompile(`(?i)RDMA_CM_EVENT_ADDR_ERROR|failed: 24|too many open files`).MatchString(c.out.String()) {
				t.Errorf("with %d descriptors it ends with %v (%v) and says\n%s", n, c.err, ctx.Err(), c.out.String())
			}
		})
	}
}

// qperf's sides first talk by TCP. Up to version 0.4.11 its server tells the client the port before it
// listens there: a client that is faster is refused.
func TestRDMACMQperf(t *testing.T) {
	program(t, "qperf", "qperf")
	addr, tcp := address(), port()
	env := []string{"VERBENA_ADDR=" + addr}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, side{args: []string{"qperf", "-lp", tcp}, env: env})
	waitListening(t, s, tcp)
	tests := []string{"rc_lat", "rc_rdma_write_bw", "rc_rdma_read_lat", "rc_fetch_add_mr"}
	if full {
		tests = append(tests, "rc_bw", "rc_bi_bw", "rc_rdma_write_lat", "rc_rdma_write_poll_lat", "rc_rdma_read_bw", "rc_compare_swap_mr", "ver_rc_fetch_add", "ver_rc_compare_swap")
	}
	for _, test := range tests {
		args := []string{"qperf", "-lp", tcp, "-t", "1", "-cm", "1", addr, test}
		c := start(ctx, t, side{args: args, env: env})
		for <-c.done; strings.Contains(c.out.String(), "unexpected event from RDMA CM: Event rejected") && ctx.Err() == nil; <-c.done {
			c = start(ctx, t, side{args: args, env: env})
		}
		if out := c.finish(t); !strings.Contains(out, " = ") {
			t.Errorf("%s says\n%s", test, out)
		}
	}
	s.terminate(t)
}

// libfabric, between two namespaces: messages over connections, reliable datagrams on top of them,
// and datagrams.
func TestRDMACMLibfabric(t *testing.T) {
	program(t, "fi_pingpong", "libfabric-bin")
	ns := newNetwork(t)
	in := func(i int, args ...string) side {
		return side{args: args, wrap: []string{"ip", "netns", "exec", ns[i]}, env: []string{fmt.Sprintf("VERBENA_ADDR=10.79.0.%d", i+1)}}
	}
	if out := run(t, in(0, "fi_info", "-p", "verbs")); !strings.Contains(out, "FI_EP_MSG") || !strings.Contains(out, "verbs;ofi_rxm") || !strings.Contains(out, "FI_EP_DGRAM") {
		t.Errorf("fi_info says\n%s", out)
	}
	for _, c := range [][2]string{{"verbs", "msg"}, {"verbs;ofi_rxm", "rdm"}, {"verbs", "dgram"}} {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		s := start(ctx, t, in(0, "fi_pingpong", "-p", c[0], "-e", c[1], "-c"))
		var out string
		for out = "failed to connect"; strings.Contains(out, "failed to connect") && ctx.Err() == nil; { // until the server listens
			cl := start(ctx, t, in(1, "fi_pingpong", "-p", c[0], "-e", c[1], "-c", "10.79.0.1"))
			<-cl.done
			if out = cl.out.String(); !strings.Contains(out, "failed to connect") {
				cl.finish(t)
			}
		}
		if !strings.Contains(out, "usec/xfer") {
			t.Errorf("%s %s: the client says\n%s", c[0], c[1], out)
			cancel() // the server may wait for ever
		}
		s.finish(t)
		cancel()
	}
}

// UCX makes its connections by the connection manager.
func TestRDMACMUCX(t *testing.T) {
	const source = "/usr/share/doc/libucx-dev/examples/ucp_client_server.c"
	_, err := os.Stat(source)
	need(t, err == nil, "%s is missing: apt-get install libucx-dev", source)
	exe := filepath.Join(t.TempDir(), "ucp_client_server")
	do(t, program(t, "cc", "gcc"), "-o", exe, source, "-lucp", "-luct", "-lucs")
	m := meeting{server: exe, client: exe + " -a IP", port: 13337, stays: true, says: `ABCDEFGHIJKLMNO`,
		env: "UCX_TLS=rc_verbs,ud_verbs:aux UCX_NET_DEVICES=verbena0:1"}
	meet(t, &m, address())
}

// The members of a multicast group: the receiver gets what the sender sends.
func TestRDMACMMulticast(t *testing.T) {
	program(t, "mckey", "rdmacm-utils")
	line := program(t, "stdbuf", "coreutils")
	addr := address()
	env := []string{"VERBENA_ADDR=" + addr}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// stdbuf makes the program's lines come when it prints them.
	args := []string{line, "-oL", "mckey", "-m", fmt.Sprintf("239.78.%d.1", os.Getpid()&0xff), "-b", addr}
	r := start(ctx, t, side{args: args, env: env})
	r.await("joined dgid")
	start(ctx, t, side{args: append(args, "-s"), env: env}).finish(t)
	if t.Failed() {
		cancel()
	}
	if out := r.finish(t); !strings.Contains(out, "return status 0") {
		t.Errorf("the receiver says\n%s", out)
	}
}

// Between two namespaces, by packets, over IPv4 and IPv6, as root and as an ordinary user.
func TestRDMACMNamespaces(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	ns := newNetwork(t)
	for i := range ns {
		do(t, "ip", "-n", ns[i], "addr", "add", fmt.Sprintf("fd79::%d/64", i+1), "dev", fmt.Sprintf("d%d", i), "nodad")
	}
	lib := installed(t)
	for _, c := range []struct {
		net, server, client string
		user                bool
	}{
		{"10.79.0.", "rping -s -C 10 -V -a IP", "rping -c -C 10 -v -V -a IP", true},
		{"fd79::", "rping -s -C 10 -V -a IP", "rping -c -C 10 -v -V -a IP", false},
		{"10.79.0.", "ucmatose -b IP -c 3", "ucmatose -s IP -c 3", false},
		{"fd79::", "ucmatose -b IP -f ipv6", "ucmatose -s IP -f ipv6", true},
	} {
		t.Run(strings.Fields(c.server)[0]+" "+c.net, func(t *testing.T) {
			in := func(i int, args string) side {
				wrap := []string{"ip", "netns", "exec", ns[i]}
				if c.user {
					wrap = append(wrap, noRights(t)...)
				}
				return side{args: strings.Fields(strings.ReplaceAll(args, "IP", c.net+"1")), wrap: wrap,
					env: []string{"VERBENA_LIB=" + lib, fmt.Sprintf("VERBENA_ADDR=%s%d", c.net, i+1)}}
			}
			meetAnew(t, in(0, c.server), in(1, c.client))
		})
	}
}

// Two processes on one address of IPv6, and of IPv4.
func TestRDMACMOneAddress(t *testing.T) {
	program(t, "rping", "rdmacm-utils")
	ns := newNetwork(t)[0]
	do(t, "ip", "-n", ns, "addr", "add", "fd79::1/64", "dev", "d0", "nodad")
	for _, c := range []struct {
		addr, server, client string
		short                bool
	}{
		{"fd79::1", "rping -s -C 10 -V -a IP", "rping -c -C 10 -v -V -a IP", true},
		{"10.79.0.1", "rping -s -C 10 -V -a IP", "rping -c -C 10 -v -V -a IP", false},
		{"fd79::1", "ucmatose -b IP -f ipv6", "ucmatose -s IP -f ipv6", false},
	} {
		if !c.short && !full {
			continue
		}
		t.Run(strings.Fields(c.server)[0]+" "+c.addr, func(t *testing.T) {
			in := func(args string) side {
				return side{args: strings.Fields(strings.ReplaceAll(args, "IP", c.addr)), wrap: []string{"ip", "netns", "exec", ns}, env: []string{"VERBENA_ADDR=" + c.addr}}
			}
			meetAnew(t, in(c.server), in(c.client))
		})
	}
}

// meetAnew runs a server and its client, who both must succeed. A client that asked before the server listened
// is refused, and one that has lost rping's race ends with an error: both programs are then run
// anew, since the server may have met some of the client's connections already.
func meetAnew(t *testing.T, server, client side) {
	t.Helper()
	for tries := range 20 {
		if meetOnce(t, server, client, time.Duration(tries)*100*time.Millisecond) || t.Failed() {
			return
		}
	}
	t.Error("a race was lost each time")
}

// meetOnce runs a server, and a while later its client. It reports whether neither has lost a race.
func meetOnce(t *testing.T, server, client side, later time.Duration) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, server)
	time.Sleep(later)
	c := start(ctx, t, client)
	if c.lost(refused) {
		cancel()
		<-s.done
		return false
	}
	lost := c.lost(rpingRace)
	if !lost {
		c.finish(t)
	}
	if t.Failed() {
		cancel() // the server may wait for ever
	}
	if s.lost(rpingRace) {
		return false
	}
	s.finish(t)
	return !lost
}

// A librdmacm that cannot be given our connection manager: a message says why, its functions get no devices,
// and everything else works.
func TestRDMACMUnpatchable(t *testing.T) {
	program(t, "ibv_devices", "ibverbs-utils")
	lib := compileWith(t, "unpatchable", "-shared", "-fPIC", "-Wl,-soname,librdmacm.so.1", "-L", built(t)+"/lib", "-libverbs")
	out := run(t, side{args: []string{"env", "LD_PRELOAD=" + lib, "ibv_devices"}, env: []string{"VERBENA_ADDR=" + address()}})
	const why = "libibverbs (Verbena): librdmacm.so.1 cannot be given a connection manager: it does not call write; rdma_* functions fail\n"
	if strings.Count(out, why) != 1 || !strings.Contains(out, "librdmacm gets no list, 0 devices: No such device\n") || !strings.Contains(out, "verbena0") {
		t.Errorf("it says\n%s", out)
	}
}

// refused is what a client prints when nobody listens.
const refused = `RDMA_CM_EVENT_REJECTED, error:? 8`
