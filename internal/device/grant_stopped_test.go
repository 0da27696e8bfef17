package device

// A peer process that is stopped amid a copy by grant (grant.go): only the call that must
// wait for it waits.

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

const stoppedChild = "VERBENA_TEST_STOPPED_CHILD"

// stoppedPeer is what the two processes send each other.
type stoppedPeer struct {
	Addr   netip.Addr
	QPN    uint32
	Remote uint64
	RKey   uint32
}

// runStoppedChild is the other process: it writes to the test's memory until a WRITE goes by
// grant, and then stays amid such a WRITE.
func runStoppedChild(t *testing.T, arg string) {
	var o stoppedPeer
	must0(t, json.Unmarshal([]byte(arg), &o))
	a := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 4096)
	say := must[[]byte](t)(json.Marshal(stoppedPeer{Addr: a.dev.addrs[0], QPN: a.qp.Number()}))
	fmt.Printf("PEER %s\n", say)
	in := bufio.NewScanner(os.Stdin)
	in.Scan() // the test has connected
	a.connectTo(o.Addr, o.QPN, a.psn, a.rd)
	wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: o.Remote, RKey: o.RKey}
	eventually(t, "a grant comes into use", func() bool {
		a.post(wr)
		a.ok()
		return a.byGrant() > 0
	})
	stuck, r, late := a.stuckWrite(a, "late word")
	late.RemoteAddr, late.RKey = o.Remote, o.RKey
	go a.post(late)
	<-stuck.begun
	fmt.Println("INSIDE")
	in.Scan() // until it is killed
	_ = r
}

// withStoppedPeer makes an end whose peer is another process, which is stopped amid a copy by
// grant to the end's memory. kill ends that process.
func withStoppedPeer(t *testing.T) (b *end, kill func()) {
	t.Helper()
	d := openDevice(t, provider.Config{Link: linkLocal})
	b = newEnd(t, d, ib.RC, 4096)
	t.Cleanup(b.close)
	b.shareMemory(4096)
	exe := must[string](t)(os.Executable())
	cmd := exec.Command(exe, "-test.run=^TestGrantStopped$", "-test.v")
	arg := must[[]byte](t)(json.Marshal(stoppedPeer{d.addrs[0], b.qp.Number(), b.mr.Addr(), b.mr.RKey()}))
	cmd.Env = append(os.Environ(), stoppedChild+"="+string(arg))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must0(t, err)
	out, err := cmd.StdoutPipe()
	must0(t, err)
	must0(t, cmd.Start())
	kill = func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
		}
	}
	t.Cleanup(kill)
	lines := bufio.NewScanner(out)
	said := func(what string) string {
		for lines.Scan() {
			if rest, ok := strings.CutPrefix(lines.Text(), what); ok {
				return rest
			}
		}
		t.Fatalf("the other process has not said %s", what)
		return ""
	}
	var o stoppedPeer
	must0(t, json.Unmarshal([]byte(said("PEER ")), &o))
	b.connectTo(o.Addr, o.QPN, b.psn, b.rd)
	_, err = in.Write([]byte("\n"))
	must0(t, err)
	said("INSIDE")
	must0(t, cmd.Process.Signal(syscall.SIGSTOP))
	return b, kill
}

// grantsShut reports whether all grants that an end has given are taken away.
func (e *end) grantsShut() bool {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, g := range q.grants {
		if g.Open() {
			return false
		}
	}
	return true
}

func TestGrantStopped(t *testing.T) {
	if arg := os.Getenv(stoppedChild); arg != "" {
		runStoppedChild(t, arg)
		return
	}
	for name, call := range map[string]func(t *testing.T, b *end){
		"region": func(t *testing.T, b *end) { closeAll(t, b.mr) },
		"rereg": func(t *testing.T, b *end) {
			access := allRemote
			must0(t, b.mr.Rereg(provider.MRChange{Access: &access, KeepKeys: true}))
		},
		"modify": func(_ *testing.T, b *end) {
			b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemote}, ib.QPMaskAccess)
		},
		"close": func(t *testing.T, b *end) { closeAll(t, b.qp) },
	} {
		t.Run(name, func(t *testing.T) {
			b, kill := withStoppedPeer(t)
			done := make(chan struct{})
			go func() { call(t, b); close(done) }()
			eventually(t, "the grant is taken away", b.grantsShut)

			// The same queue pair goes on.
			must[ib.QPAttr](t)(b.qp.Query())
			if n, err := b.qp.PostSend([]ib.SendWR{{Op: ib.OpSend}}); n != 1 || err != nil {
				t.Errorf("a post: %d, %v", n, err)
			}
			var wcs [1]ib.WC
			if n, err := b.cq.Poll(wcs[:]); n != 0 || err != nil {
				t.Errorf("a poll: %d, %v", n, err)
			}
			// And others.
			x := openDevice(t, provider.Config{Link: linkLocal})
			x.loopback = false
			c, d := connected(t, x, b.dev, ib.RC, 4096, nil)
			for range 20 {
				c.post(c.write(d, 0, 64))
				c.ok()
			}
			select {
			case <-done:
				t.Error("the call has not waited")
			default:
			}
			start := time.Now()
			kill()
			select {
			case <-done:
				t.Logf("it returned %v after the end of the peer", time.Since(start))
			case <-time.After(10 * time.Second):
				t.Fatal("the call still waits, though the peer has ended")
			}
		})
	}
}

// A call that only suspends a region, as its memory moves, does not wait for the peer; the
// call that closes it afterwards does.
func TestGrantStoppedSuspended(t *testing.T) {
	b, kill := withStoppedPeer(t)
	region := b.mr.(*MR).region
	b.dev.killed(region, false) // or this would not return
	if !b.grantsShut() || b.grantsOpen() != 1 {
		t.Errorf("the grant is shut %v, %d grants are left", b.grantsShut(), b.grantsOpen())
	}
	done := make(chan struct{})
	go func() { closeAll(t, b.mr); close(done) }()
	select {
	case <-done:
		t.Error("Close has not waited for a peer that is inside")
	case <-time.After(50 * time.Millisecond):
	}
	kill()
	<-done
}
