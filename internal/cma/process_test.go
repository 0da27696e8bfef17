package cma_test

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// childEnv makes the test binary another process with a device, at the address that it holds. With a
// port behind it, the process accepts connections there; with "silent" behind that, it takes requests
// and does not answer. With "dial" and an address, it asks for a connection.
const childEnv = "VERBENA_CMA_TEST_CHILD"

func TestMain(m *testing.M) {
	if at := os.Getenv(childEnv); at != "" {
		if err := child(at); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func child(at string) error {
	a, port, _ := strings.Cut(at, " ")
	port, silent := strings.CutSuffix(port, " silent")
	to, dials := strings.CutPrefix(port, "dial ")
	addrs := []netip.Addr{netip.MustParseAddr(a)}
	dev, err := device.Open("", &provider.Config{Addrs: addrs})
	if err != nil {
		return err
	}
	m := cma.New(cma.Config{Devices: func() ([]cma.Device, error) {
		return []cma.Device{{Name: "dev", Addrs: addrs, Open: func() (provider.Device, func(), error) { return dev, func() {}, nil }}}, nil
	}})
	if dials {
		events := make(chan *cma.Event, 10)
		c, err := m.NewID(cma.PSTCP, ib.RC, func(e *cma.Event) { events <- e })
		if err == nil {
			err = c.ResolveAddr(netip.AddrPort{}, netip.MustParseAddrPort(to), time.Second)
		}
		if err == nil {
			<-events
			err = c.ResolveRoute(time.Second)
		}
		if err == nil {
			<-events
			err = c.Connect(&cma.ConnParam{QPN: 77})
		}
		if err != nil {
			return err
		}
	} else if port != "" {
		events := make(chan *cma.Event, 1000)
		l, err := m.NewID(cma.PSTCP, ib.RC, func(e *cma.Event) { events <- e })
		if err == nil {
			err = l.Bind(netip.MustParseAddrPort(a + ":" + port))
		}
		if err == nil {
			err = l.Listen(0)
		}
		if err != nil {
			return err
		}
		go func() {
			for e := range events {
				switch e.Type {
				case cma.ConnectRequest:
					e.New.Seen()
					if silent {
						fmt.Println("asked")
						continue
					}
					_ = e.New.Accept(&cma.ConnParam{QPN: qpns.Add(1)})
				case cma.Established:
					fmt.Println("established")
				case cma.Disconnected:
					_ = e.ID.Disconnect()
				}
			}
		}()
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return nil
}

// start starts another process.
func start(t *testing.T, at string) *os.Process {
	t.Helper()
	p, _ := startTalking(t, at)
	return p
}

// startTalking starts another process, and returns what it says after "ready".
func startTalking(t *testing.T, at string) (*os.Process, *bufio.Scanner) {
	t.Helper()
	exe, err := os.Executable()
	check(t, err)
	c := exec.Command(exe)
	c.Env = append(os.Environ(), childEnv+"="+at)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := c.StdinPipe()
	check(t, err)
	out, err := c.StdoutPipe()
	check(t, err)
	check(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = in.Close(); _ = c.Wait() })
	s := bufio.NewScanner(out)
	if !s.Scan() || s.Text() != "ready" {
		t.Fatalf("the process says %q", s.Text())
	}
	return c.Process, s
}

// qpns counts numbers of queue pairs: two connections with one number, of one side, would be stale.
var qpns atomic.Uint32

// dial connects to a port.
func dial(t *testing.T, m *cma.Manager, to netip.AddrPort) *id {
	t.Helper()
	a := newID(t, m, cma.PSTCP, ib.RC)
	a.resolve(to)
	check(t, a.Connect(&cma.ConnParam{QPN: qpns.Add(1)}))
	a.next(cma.ConnectResponse)
	check(t, a.Accept(nil))
	return a
}

// A listener is found whichever processes share its address, and whichever of them are stopped.
func TestProcesses(t *testing.T) {
	for _, from := range []int{10, 11} { // the listener's address, and another one
		t.Run(fmt.Sprint(from), func(t *testing.T) {
			at := netip.AddrPortFrom(addr(10), 7176)
			first := start(t, addr(10).String())
			start(t, fmt.Sprint(addr(10), " 7176"))
			start(t, fmt.Sprint(addr(10), " 7177"))
			last := start(t, addr(10).String())
			m := manager(t, "", addr(from))
			for round := range 20 {
				for _, p := range []*os.Process{first, last} {
					if round == 10 {
						check(t, p.Signal(syscall.SIGSTOP))
					}
				}
				check(t, dial(t, m, at).Close())
			}
			a := newID(t, m, cma.PSTCP, ib.RC)
			a.resolve(netip.AddrPortFrom(addr(10), 7178))
			check(t, a.Connect(&cma.ConnParam{QPN: 17}))
			if e := a.next(cma.Rejected); e.Status != 8 {
				t.Errorf("nobody listens: reason %d", e.Status)
			}
			for _, p := range []*os.Process{first, last} {
				check(t, p.Signal(syscall.SIGCONT))
			}
		})
	}
}

// When a process dies, its peers hear of it from the others on its address.
func TestDeath(t *testing.T) {
	at := netip.AddrPortFrom(addr(12), 7176)
	start(t, addr(12).String())
	server, said := startTalking(t, fmt.Sprint(addr(12), " 7176"))
	m := manager(t, "", addr(13))
	var all []*id
	for range 300 { // more than a chunk of records
		all = append(all, dial(t, m, at))
		if !said.Scan() || said.Text() != "established" {
			t.Fatalf("the process says %q", said.Text())
		}
	}
	check(t, server.Kill())
	begin := time.Now()
	for _, a := range all {
		if e := a.next(cma.Disconnected); e.Status != 0 {
			t.Errorf("status %d", e.Status)
		}
		check(t, a.Close())
	}
	t.Logf("300 connections: all have heard after %v", time.Since(begin))
	a := newID(t, m, cma.PSTCP, ib.RC)
	a.resolve(at)
	check(t, a.Connect(&cma.ConnParam{QPN: 17}))
	if e := a.next(cma.Rejected); e.Status != 8 {
		t.Errorf("a dead process listens: reason %d", e.Status)
	}
}

// The peers of connections in the making hear of a process's death, too: by the message that the kernel
// sends when it destroys an id.
func TestDeathInTheMaking(t *testing.T) {
	start(t, addr(14).String()) // says the last words
	m := manager(t, "", addr(15))

	t.Run("REQ received", func(t *testing.T) {
		p, said := startTalking(t, fmt.Sprint(addr(14), " 7176 silent"))
		a := newID(t, m, cma.PSTCP, ib.RC)
		a.resolve(netip.AddrPortFrom(addr(14), 7176))
		check(t, a.Connect(&cma.ConnParam{QPN: qpns.Add(1)}))
		if !said.Scan() || said.Text() != "asked" {
			t.Fatalf("the process says %q", said.Text())
		}
		check(t, p.Kill())
		if e := a.next(cma.Rejected); e.Status != 28 {
			t.Errorf("reason %d", e.Status)
		}
	})

	t.Run("REP sent", func(t *testing.T) {
		p := start(t, fmt.Sprint(addr(14), " 7177"))
		a := newID(t, m, cma.PSTCP, ib.RC)
		a.resolve(netip.AddrPortFrom(addr(14), 7177))
		check(t, a.Connect(&cma.ConnParam{QPN: qpns.Add(1)}))
		a.next(cma.ConnectResponse)
		check(t, p.Kill())
		if e := a.next(cma.Rejected); e.Status != 28 {
			t.Errorf("reason %d", e.Status)
		}
	})

	t.Run("REQ sent", func(t *testing.T) {
		l := newID(t, m, cma.PSTCP, ib.RC)
		check(t, l.Bind(netip.AddrPortFrom(addr(15), 7178)))
		check(t, l.Listen(0))
		p := start(t, fmt.Sprint(addr(14), " dial ", addr(15), ":7178"))
		b := take(t, l.next(cma.ConnectRequest))
		check(t, p.Kill())
		if e := b.next(cma.Rejected); e.Status != 4 {
			t.Errorf("reason %d", e.Status)
		}
	})
}
