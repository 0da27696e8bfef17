package interop

// Listeners at all addresses, and devices that appear after them: in a network namespace of its own,
// where interfaces and addresses come and go.

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// caseVar makes the test program one of these: "listen", "hold NAME", "dial TIMEOUT ADDRESS".
const caseVar = "VERBENA_INTEROP_APPEAR"

// appearPort is the port of the listener.
const appearPort = "7474"

// playAppear is the main program of a process that a test has started. It ends with its input.
func playAppear(what string) int {
	verb, arg, _ := strings.Cut(what, " ")
	var err error
	switch verb {
	case "listen":
		err = listenEverywhere()
	case "hold":
		var d *verbs.Device
		if d, err = verbs.Open(arg, nil); err == nil {
			fmt.Println("open")
			untilEOF()
			err = d.Close()
		}
	case "dial":
		patience, addr, _ := strings.Cut(arg, " ")
		limit, _ := time.ParseDuration(patience) // 0, and so no time, if it is none
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		var c *cm.Conn
		if c, err = cm.Dial(ctx, net.JoinHostPort(addr, appearPort), nil); err == nil {
			fmt.Println("connected from", c.LocalAddr().Addr(), "to", c.RemoteAddr().Addr())
			err = c.Close()
		}
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func untilEOF() {
	for in := bufio.NewReader(os.Stdin); ; {
		if _, err := in.ReadByte(); err != nil {
			return
		}
	}
}

// listenEverywhere prints the local address of each connection.
func listenEverywhere() error {
	l, err := cm.Listen(context.Background(), ":"+appearPort, nil)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			fmt.Println("accepted at", c.LocalAddr().Addr())
			wg.Go(func() {
				<-c.Done()
				if err := c.Close(); err != nil {
					fmt.Println(err)
				}
			})
		}
	})
	fmt.Println("listening")
	untilEOF()
	err = l.Close()
	wg.Wait()
	return err
}

// guest is a process in a namespace.
type guest struct {
	cmd *exec.Cmd
	end func() error // closes its input, and waits for it

	mu  sync.Mutex // guards out
	out bytes.Buffer
}

func (a *guest) Write(b []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.out.Write(b)
}

func (a *guest) says() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.out.String()
}

// act starts a process in a namespace.
func act(t *testing.T, ns, what string) *guest {
	t.Helper()
	ip, _ := tool("ip")
	a := &guest{cmd: exec.Command(ip, "netns", "exec", ns, os.Args[0])}
	a.cmd.Env = append(os.Environ(), caseVar+"="+what, "GORACE=atexit_sleep_ms=0") // many processes, each of which would sleep for a second
	a.cmd.Stdout, a.cmd.Stderr = a, a
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := a.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a.end = sync.OnceValue(func() error {
		_ = in.Close() // the process may have ended
		return a.cmd.Wait()
	})
	t.Cleanup(func() { _ = a.end() })
	return a
}

// await waits until the process has printed a text n times.
func (a *guest) await(t *testing.T, text string, n int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); strings.Count(a.says(), text) < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it does not say %q %d times, but\n%s", text, n, a.says())
		}
	}
}

// reach dials an address until somebody answers.
func reach(t *testing.T, ns, addr string, l *guest) {
	t.Helper()
	before := strings.Count(l.says(), "accepted at "+addr+"\n")
	// What is sent before the device is there is repeated after some seconds only.
	limit := 250 * time.Millisecond
	for deadline := time.Now().Add(time.Minute); ; limit *= 2 {
		d := act(t, ns, fmt.Sprintf("dial %v %s", limit, addr))
		err := d.end()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("nobody listens at %s: %v, %s\nthe listener says\n%s", addr, err, d.says(), l.says())
		}
	}
	l.await(t, "accepted at "+addr+"\n", before+1)
}

// A listener at all addresses is there before the network. It listens at interfaces and addresses that
// come later, also when another process has opened their device before it, and when an interface has
// gone and come back.
func TestDevicesAppear(t *testing.T) {
	n := newNetwork(t, 1500)
	ip, _ := tool("ip")
	ns, other := n.ns[0], n.ns[1]
	run(t, ip, "-n", ns, "link", "del", "d0") // its other end goes, too
	l := act(t, ns, "listen")
	l.await(t, "listening", 1)

	join := func(from, to, net string) {
		run(t, ip, "-n", ns, "link", "add", from, "type", "veth", "peer", "name", to, "netns", other)
		run(t, ip, "-n", other, "addr", "add", net+"2/24", "dev", to)
		run(t, ip, "-n", other, "link", "set", to, "up")
		run(t, ip, "-n", ns, "link", "set", from, "up")
		waitForCarrier(t, ip, ns, from)
		run(t, ip, "-n", ns, "addr", "add", net+"1/24", "dev", from)
	}
	join("d0", "d1", "10.80.1.")
	reach(t, other, "10.80.1.1", l)
	reach(t, ns, "10.80.1.1", l) // from another process of the same device

	run(t, ip, "-n", ns, "addr", "add", "10.80.1.7/24", "dev", "d0")
	reach(t, other, "10.80.1.7", l)
	run(t, ip, "-n", other, "addr", "add", "fd80::2/64", "dev", "d1", "nodad")
	run(t, ip, "-n", ns, "addr", "add", "fd80::1/64", "dev", "d0") // first it is tentative
	reach(t, other, "fd80::1", l)

	// Another process opens the device while the listener's sleeps.
	if err := l.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	join("e0", "e1", "10.80.2.")
	h := act(t, ns, "hold e0")
	h.await(t, "open\n", 1)
	if err := l.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	reach(t, other, "10.80.2.1", l)
	if err := h.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = h.end() // it was killed
	reach(t, other, "10.80.2.1", l)

	run(t, ip, "-n", ns, "link", "del", "e0")
	join("e0", "e1", "10.80.2.")
	reach(t, other, "10.80.2.1", l)
	reach(t, other, "10.80.1.1", l)

	// Many changes at once, of which two addresses stay.
	for i := range 20 {
		a := fmt.Sprintf("10.80.3.%d/32", 1+i)
		run(t, ip, "-n", ns, "addr", "add", a, "dev", "e0")
		if i%10 != 9 {
			run(t, ip, "-n", ns, "addr", "del", a, "dev", "e0")
		}
	}
	run(t, ip, "-n", other, "route", "add", "10.80.3.0/24", "dev", "e1")
	reach(t, other, "10.80.3.10", l)
	reach(t, other, "10.80.3.20", l)
	if err := l.end(); err != nil {
		t.Errorf("the listener ends with %v, and says\n%s", err, l.says())
	}
}
