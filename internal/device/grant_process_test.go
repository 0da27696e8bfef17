package device

// A peer process that is stopped amid a copy by grant (grant.go): only the call that must
// wait for the process waits.

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

const stoppedChild = "VERBENA_TEST_STOPPED_CHILD"

// peerAddress is what two processes send each other: a queue pair, and memory.
type peerAddress struct {
	Addr   netip.Addr
	QPN    uint32
	Remote uint64
	RKey   uint32
}

// address returns how another process reaches an end.
func (e *end) address() peerAddress {
	return peerAddress{e.dev.addrs[0], e.qp.Number(), e.mr.Addr(), e.mr.RKey()}
}

// childProcess is another process that runs a test of this program.
type childProcess struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.Writer
	lines *bufio.Scanner
}

// runInChild runs the test of the given name in another process, which finds arg, in JSON, in
// the environment variable key. The process is killed when this test ends.
func runInChild(t *testing.T, test, key string, arg any) *childProcess {
	t.Helper()
	c := &childProcess{t: t, cmd: exec.Command(must[string](t)(os.Executable()), "-test.run=^"+test+"$", "-test.v")}
	c.cmd.Env = append(os.Environ(), key+"="+string(must[[]byte](t)(json.Marshal(arg))))
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	must0(t, err)
	out, err := c.cmd.StdoutPipe()
	must0(t, err)
	c.in, c.lines = in, bufio.NewScanner(out)
	must0(t, c.cmd.Start())
	t.Cleanup(c.kill)
	return c
}

// said waits for a line of the process that begins with a word, and returns the rest of it.
func (c *childProcess) said(what string) string {
	c.t.Helper()
	last := ""
	for c.lines.Scan() {
		if rest, ok := strings.CutPrefix(c.lines.Text(), what); ok {
			return rest
		}
		last += c.lines.Text() + "\n"
	}
	c.t.Fatalf("the other process has not said %q, but:\n%s", what, last)
	return ""
}

// connect connects an end with the one that the process has announced, and lets the process
// go on.
func (c *childProcess) connect(e *end) (o peerAddress) {
	c.t.Helper()
	must0(c.t, json.Unmarshal([]byte(c.said("PEER ")), &o))
	e.connectTo(o.Addr, o.QPN, e.psn, e.rd)
	must[int](c.t)(c.in.Write([]byte("\n")))
	return o
}

// announce is the other side of connect, in the process: it connects an end with o.
func (e *end) announce(o peerAddress) *bufio.Scanner {
	e.t.Helper()
	fmt.Printf("PEER %s\n", must[[]byte](e.t)(json.Marshal(e.address())))
	in := bufio.NewScanner(os.Stdin)
	in.Scan() // the test has connected its end
	e.connectTo(o.Addr, o.QPN, e.psn, e.rd)
	return in
}

// kill ends the process.
func (c *childProcess) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait() // it was killed
	}
}

// runStoppedChild is the other process: it writes to the test's memory until a WRITE goes by
// grant, and then stays amid such a WRITE.
func runStoppedChild(t *testing.T, arg string) {
	var o peerAddress
	must0(t, json.Unmarshal([]byte(arg), &o))
	a := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 4096)
	in := a.announce(o)
	wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: o.Remote, RKey: o.RKey}
	eventually(t, "a grant comes into use", func() bool {
		a.post(wr)
		a.ok()
		return a.byGrant() > 0
	})
	stuck, _, last := a.stuckWrite(a, "last bytes")
	last.RemoteAddr, last.RKey = o.Remote, o.RKey
	go a.post(last)
	<-stuck.begun
	fmt.Println("INSIDE")
	in.Scan() // until it is killed
}

// A call that only suspends a region, because its memory moves, does not wait for the peer.
// The call that closes the region waits, and returns when the process has ended. Meanwhile
// posts and polls of the same queue pair go on, and other connections.
func TestGrantOfStoppedProcess(t *testing.T) {
	if arg := os.Getenv(stoppedChild); arg != "" {
		runStoppedChild(t, arg)
		return
	}
	d := openDevice(t, provider.Config{Link: linkLocal})
	b := newEnd(t, d, ib.RC, 4096)
	t.Cleanup(b.close)
	b.shareMemory(4096)
	child := runInChild(t, "TestGrantOfStoppedProcess", stoppedChild, b.address())
	child.connect(b)
	child.said("INSIDE")
	must0(t, child.cmd.Process.Signal(syscall.SIGSTOP))

	d.killed(b.mr.(*MR).region, false) // or this would not return
	if !b.grantsShut() || b.grantsOpen() != 1 {
		t.Errorf("the grant is shut %v, %d grants are left", b.grantsShut(), b.grantsOpen())
	}
	closed := make(chan struct{})
	go func() {
		closeAll(t, b.mr)
		close(closed)
	}()
	eventually(t, "the region is being closed", func() bool { return !b.mr.(*MR).region.Alive() })
	must[ib.QPAttr](t)(b.qp.Query())
	if n, err := b.qp.PostSend([]ib.SendWR{{Op: ib.OpSend}}); n != 1 || err != nil {
		t.Errorf("a post: %d, %v", n, err)
	}
	var wcs [1]ib.WC
	if n, err := b.cq.Poll(wcs[:]); n != 0 || err != nil {
		t.Errorf("a poll: %d, %v", n, err)
	}
	other := openDevice(t, provider.Config{Link: linkLocal})
	other.loopback = false
	c, e := connected(t, other, d, ib.RC, 4096, nil)
	goesOn(t, c, e)
	stillWaits(t, closed)
	child.kill()
	<-closed
}
