package programs

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// patience is how long a program may take: much longer than it needs, since the machine may
// be busy, or an emulated one.
var patience = func() time.Duration {
	if prebuilt != "" {
		return 20 * time.Minute
	}
	return 3 * time.Minute
}()

var lastPort atomic.Uint32

// port returns a TCP port for the programs' own exchange, which nobody has.
func port() string {
	const first, last = 10000, 32000 // above, the kernel gives them to clients
	start := uint32(os.Getpid()) * 37
	for range 1000 {
		p := fmt.Sprint(first + (start+lastPort.Add(1))%(last-first))
		if l, err := net.Listen("tcp", ":"+p); err == nil {
			_ = l.Close()
			return p
		}
	}
	panic("no port is free")
}

// side is one program of a test.
type side struct {
	args []string
	env  []string // variables besides those of the test
	wrap []string // a command that runs it, as ip netns exec or setpriv
}

// process is a running program.
type process struct {
	name string
	cmd  *exec.Cmd
	out  output
	done chan struct{}
	err  error
}

// output is what a program has printed.
type output struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// await waits until a program has printed a text, or has ended.
func (p *process) await(text string) {
	for !strings.Contains(p.out.String(), text) {
		select {
		case <-p.done:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// start runs a program with "verbena exec".
func start(ctx context.Context, t testing.TB, s side) *process {
	t.Helper()
	bin := built(t)
	args := append(append([]string{}, s.wrap...), bin+"/verbena", "exec", "--log", "--")
	args = append(args, s.args...)
	p := &process{name: strings.Join(s.args, " "), done: make(chan struct{})}
	p.cmd = exec.CommandContext(ctx, args[0], args[1:]...)
	p.cmd.Env = append(os.Environ(), s.env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.WaitDelay = 5 * time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("%s: %v", p.name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p
}

// finish waits for a program, which must succeed, and returns its output.
func (p *process) finish(t testing.TB) string {
	t.Helper()
	<-p.done
	if p.err != nil {
		t.Errorf("%s: %v\n%s", p.name, p.err, p.out.String())
	}
	return p.out.String()
}

// run runs one program to its end and returns its output.
func run(t testing.TB, s side) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return start(ctx, t, s).finish(t)
}

// pair runs a server and then a client, which both must succeed, and returns their output.
func pair(t testing.TB, server, client side, tcp string) (fromServer, fromClient string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, server)
	waitListening(t, s, tcp)
	c := start(ctx, t, client)
	fromClient = c.finish(t)
	if t.Failed() {
		cancel() // the server may wait for ever
	}
	return s.finish(t), fromClient
}

// waitListening waits until a server listens on a TCP port, or has ended. It looks
// in the server's own namespace, without connecting: the server takes one client.
func waitListening(t testing.TB, s *process, tcp string) {
	t.Helper()
	var n int
	if _, err := fmt.Sscan(tcp, &n); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf(":%04X ", n)
	for {
		for _, file := range []string{"tcp", "tcp6"} {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", s.cmd.Process.Pid, file)) // it fails if the server has ended
			for _, line := range strings.Split(string(b), "\n") {
				f := strings.Fields(line)
				if len(f) > 3 && f[3] == "0A" && strings.Contains(f[1]+" ", want) {
					return
				}
			}
		}
		select {
		case <-s.done:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// between runs a tool as server and client.
func between(t testing.TB, args []string, env ...string) (fromServer, fromClient string) {
	t.Helper()
	tcp := port()
	all := append(append([]string{}, args...), "-p", tcp)
	return pair(t, side{args: all, env: env}, side{args: append(all, "localhost"), env: env}, tcp)
}
