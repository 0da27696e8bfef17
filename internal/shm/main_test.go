package shm

// The test binary is also the child process: started again with a mode in its environment, it
// dials the test and runs that mode (child_test.go).

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/internal/sys"
)

const (
	envMode = "VERBENA_SHM_CHILD"
	envAddr = "VERBENA_SHM_ADDR"
	envArg  = "VERBENA_SHM_ARG"
)

func TestMain(m *testing.M) {
	if mode := os.Getenv(envMode); mode != "" {
		childMain(mode, os.Getenv(envAddr), os.Getenv(envArg))
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// patience is how long a test waits for what should happen at once: the machine
// may be busy.
const patience = 30 * time.Second

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

var listeners atomic.Int64

// listen opens a socket with a name of its own.
func listen(t testing.TB) *net.UnixListener {
	t.Helper()
	name := fmt.Sprintf("@verbena-shm-test-%d-%d", os.Getpid(), listeners.Add(1))
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func dial(addr string) (*net.UnixConn, error) {
	return net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: addr, Net: "unixpacket"})
}

// connPair returns two ends of a connection.
func connPair(t testing.TB) (dialled, accepted *net.UnixConn) {
	t.Helper()
	l := listen(t)
	dialled, err := dial(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err = l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialled.Close(); accepted.Close() })
	return dialled, accepted
}

func newInbox(t testing.TB, cfg *Config) *Inbox {
	t.Helper()
	in, err := NewInbox(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(in.Close)
	return in
}

// joinPair connects two inboxes of this process.
func joinPair(t testing.TB, a, b *Inbox) (ab, ba *Channel) {
	t.Helper()
	ca, cb := connPair(t)
	type result struct {
		c   *Channel
		err error
	}
	got := make(chan result)
	ctx := testContext(t)
	go func() {
		c, err := b.Accept(ctx, cb, "accepted")
		got <- result{c, err}
	}()
	ab, err := a.Dial(ctx, ca, "dialled")
	r := <-got
	if err != nil || r.err != nil {
		t.Fatalf("dial: %v; accept: %v", err, r.err)
	}
	return ab, r.c
}

// child is another process, running a mode of this binary.
type child struct {
	cmd *exec.Cmd
	l   *net.UnixListener
}

// startOther starts a process of another user, which will dial. The test needs privilege for
// that.
func startOther(t testing.TB, l *net.UnixListener) *child {
	t.Helper()
	return startAs(t, l, "close", 0, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
}

// startChild starts a process that will dial.
func startChild(t testing.TB, l *net.UnixListener, mode string, arg any) *child {
	t.Helper()
	return startAs(t, l, mode, arg, nil)
}

func startAs(t testing.TB, l *net.UnixListener, mode string, arg any, attr *syscall.SysProcAttr) *child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe") // another user may not see the binary's directory
	cmd.Dir, cmd.SysProcAttr = "/", attr
	cmd.Env = append(os.Environ(), envMode+"="+mode, envAddr+"="+l.Addr().String(), fmt.Sprintf("%s=%v", envArg, arg))
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	k := &child{cmd: cmd, l: l}
	t.Cleanup(k.kill)
	return k
}

// accept makes the channel with a child.
func (k *child) accept(t testing.TB, in *Inbox) (*Channel, error) {
	t.Helper()
	k.l.SetDeadline(time.Now().Add(patience))
	conn, err := k.l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	return in.Accept(testContext(t), conn, k)
}

// kill ends the process and waits for it. It is idempotent.
func (k *child) kill() {
	if k.cmd.ProcessState == nil {
		k.cmd.Process.Kill()
		k.cmd.Wait()
	}
}

// wait waits for a process that ends by itself, and fails the test if it fails.
func (k *child) wait(t testing.TB) {
	t.Helper()
	if err := k.cmd.Wait(); err != nil {
		t.Errorf("the other process: %v", err)
	}
}

// recorder is a sink that calls those of its functions that are set.
type recorder struct {
	record func(c *Channel, typ byte, p []byte)
	full   func() bool
	room   func(c *Channel)
	gone   func(c *Channel, err error)
}

func (r *recorder) Record(c *Channel, typ byte, p []byte) {
	if r.record != nil {
		r.record(c, typ, p)
	}
}

func (r *recorder) Full(*Channel) bool { return r.full != nil && r.full() }

func (r *recorder) Room(c *Channel) {
	if r.room != nil {
		r.room(c)
	}
}

func (r *recorder) Gone(c *Channel, err error) {
	if r.gone != nil {
		r.gone(c, err)
	}
}

// wait blocks until there may be something to poll, d has passed (negative: for ever),
// or the event is signalled. One goroutine at a time calls it for an inbox.
func wait(in *Inbox, d time.Duration) {
	p, err := sys.NewPoller(nil, in.Event())
	if err != nil {
		panic(err)
	}
	defer func() { _ = p.Close() }() // a poller holds nothing that could be lost
	if in.Announce() {
		p.Wait(d)
		in.Awake()
	}
}

// awaitDown waits until a channel is down.
func awaitDown(t testing.TB, c *Channel) {
	t.Helper()
	for end := time.Now().Add(patience); c.Err() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the end of the channel is not noticed within %v", patience)
		}
	}
}

// pollUntil polls, and sleeps when there is nothing, until done.
func pollUntil(t testing.TB, in *Inbox, s Sink, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); {
		if in.Poll(s, 128) == 0 && !done() {
			wait(in, time.Second)
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// held counts the descriptors of this process, and its mappings of our segments.
type held struct{ fds, maps int }

func holding(t testing.TB) (h held) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return held{len(fds), strings.Count(string(maps), "memfd:verbena-")}
}
