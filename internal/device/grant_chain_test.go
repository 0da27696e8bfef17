package device

// Grants to a dma-buf whose exporter is another process than that of the region. The test has the
// exporter and the peer; the region's process is in between, and is stopped and killed.
//
//	test: peer ── WRITE by grant ──▶ place ◀── Alloc, Move: test
//	                                   ▲
//	           grant ── region's process ── imports the buffer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

const chainChild = "VERBENA_TEST_CHAIN_CHILD"

// chainArg is what the region's process is told.
type chainArg struct {
	Peer peerAddress
	FD   string // where it finds the buffer's descriptor
}

// runChainChild is the region's process. It does nothing but what its device does.
func runChainChild(t *testing.T, arg string) {
	var o chainArg
	must0(t, json.Unmarshal([]byte(arg), &o))
	f := must[*os.File](t)(os.OpenFile(o.FD, os.O_RDWR, 0))
	b := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 4096)
	buffer := must[*dmabuf.Buffer](t)(dmabuf.Get(int(f.Fd())))
	must0(t, f.Close())
	b.registerBuffer(buffer)
	in := b.announce(o.Peer)
	in.Scan() // until it is killed
}

// chain is the test's part.
type chain struct {
	t     *testing.T
	a     *end // the peer
	dma   *dmabuf.Memory
	child *childProcess
	o     peerAddress // of the region
}

func newChain(t *testing.T, test string, size int) *chain {
	t.Helper()
	c := &chain{t: t, a: newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, size)}
	t.Cleanup(c.a.close)
	c.dma = must[*dmabuf.Memory](t)(dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(size)}))
	fd := must[int](t)(c.dma.Buffer().FD())
	f := os.NewFile(uintptr(fd), "dma-buf")
	t.Cleanup(func() { closeAll(t, f, c.dma) })
	c.child = runInChild(t, test, chainChild, chainArg{c.a.address(), fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)})
	c.o = c.child.connect(c.a)
	return c
}

func (c *chain) write(n int) ib.SendWR {
	return ib.SendWR{Op: ib.OpRDMAWrite, SGL: c.a.sge(0, n), RemoteAddr: c.o.Remote, RKey: c.o.RKey}
}

// warm writes until a grant is in use.
func (c *chain) warm() {
	c.t.Helper()
	before := c.a.byGrant()
	eventually(c.t, "a grant comes into use", func() bool {
		c.a.post(c.write(8))
		c.a.ok()
		return c.a.byGrant() > before
	})
}

func (c *chain) holds(what, want string) {
	c.t.Helper()
	got := make([]byte, len(want))
	must[int](c.t)(c.dma.ReadAt(got, 0))
	if string(got) != want {
		c.t.Errorf("%s: the buffer holds %q, not %q", what, got, want)
	}
}

// The peer is amid a WRITE by grant when the buffer moves. The exporter hears from the region's process
// that the peer may still write, and goes on; the WRITE arrives at the new place. If the region's process is
// stopped, the move waits for its context. If that process is killed, nobody can take the grant away: the
// move goes on, and the bytes of the WRITE are lost with the region. The peer's requests soon fail.
func TestGrantDMABufOfOtherProcess(t *testing.T) {
	if arg := os.Getenv(chainChild); arg != "" {
		runChainChild(t, arg)
		return
	}
	for _, what := range []string{"alive", "stopped", "killed"} {
		t.Run(what, func(t *testing.T) {
			c := newChain(t, "TestGrantDMABufOfOtherProcess", 4096)
			c.warm()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			stuck, r, last := c.a.stuckWrite(c.a, "last bytes")
			t.Cleanup(func() { closeAll(t, r) })
			last.RemoteAddr, last.RKey = c.o.Remote, c.o.RKey
			posted := make(chan struct{})
			go func() {
				c.a.post(last)
				close(posted)
			}()
			<-stuck.begun
			must[int](t)(c.dma.WriteAt([]byte("of the CPU"), 0))
			switch what {
			case "stopped":
				must0(t, c.child.cmd.Process.Signal(syscall.SIGSTOP))
				c.child.isStopped()
				brief, end := context.WithTimeout(t.Context(), 20*time.Millisecond)
				if err := c.dma.Move(brief); !errors.Is(err, syscall.ETIMEDOUT) {
					t.Errorf("a move: %v", err)
				}
				end()
				must0(t, c.child.cmd.Process.Signal(syscall.SIGCONT))
			case "killed":
				c.child.kill()
			}
			for range 3 {
				must0(t, c.dma.Move(ctx))
				c.holds("after a move", "of the CPU")
			}
			close(stuck.end)
			<-posted
			if what == "killed" {
				wc := c.a.wait() // it succeeds if the end was not noticed yet: the region had the bytes
				for ; wc.Status == ib.WCSuccess; wc = c.a.wait() {
					c.a.post(c.write(8))
				}
				if wc.Status != ib.WCRetryExcErr {
					t.Errorf("a WRITE to a process that was killed: %v", wc.Status)
				}
				c.holds("after the end of the region's process", "of the CPU")
				return
			}
			c.a.ok()
			c.holds("the peer goes on", "last bytes")
		})
	}
}

// The peer writes all the time, and the buffer moves, while the region's process is stopped and goes on,
// and is killed in the end. A WRITE that has completed is in the buffer, and no poison ever is.
func TestGrantDMABufOfOtherProcessStorm(t *testing.T) {
	if arg := os.Getenv(chainChild); arg != "" {
		runChainChild(t, arg)
		return
	}
	const size = 64 << 10
	c := newChain(t, "TestGrantDMABufOfOtherProcessStorm", size)
	c.warm()
	var stop atomic.Bool
	var completed atomic.Int64 // messages
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for i := int64(1); !stop.Load() && !t.Failed(); i++ {
			for j := range c.a.buf {
				c.a.buf[j] = byte(1 + i%200)
			}
			c.a.post(c.write(size))
			c.a.ok()
			completed.Store(i)
		}
	}()
	got := make([]byte, size)
	moved, delayed := 0, 0
	for i := 0; i < lastingOps(60, 1500) && !t.Failed(); i++ {
		patience := time.Minute
		if i%4 == 3 {
			must0(t, c.child.cmd.Process.Signal(syscall.SIGSTOP))
			c.child.isStopped()
			patience = 5 * time.Millisecond
		}
		was := completed.Load()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		switch err := c.dma.Move(ctx); {
		case err == nil:
			moved++
		case i%4 == 3 && errors.Is(err, syscall.ETIMEDOUT):
			delayed++
		default:
			t.Errorf("move %d: %v", i, err)
		}
		cancel()
		must[int](t)(c.dma.ReadAt(got, 0))
		if bytes.IndexByte(got, movingPoison) >= 0 {
			t.Errorf("move %d: poison", i)
		}
		now := completed.Load()
		if was == now { // at most the next message has begun
			last, next := byte(1+was%200), byte(1+(was+1)%200)
			if n := bytes.Count(got, []byte{last}) + bytes.Count(got, []byte{next}); was > 0 && n != size {
				t.Errorf("move %d: %d bytes are of neither message %d nor the next", i, size-n, was)
			}
		}
		must0(t, c.child.cmd.Process.Signal(syscall.SIGCONT))
		eventually(t, "the peer goes on", func() bool { return completed.Load() > now || t.Failed() })
		if i%6 == 5 { // else the grants of memory that moves too often become rare
			before := c.a.byGrant()
			eventually(t, "the peer has a grant", func() bool { return c.a.byGrant() > before+grantWorth || t.Failed() })
		}
	}
	stop.Store(true)
	<-ended
	must[int](t)(c.dma.ReadAt(got, 0))
	if !bytes.Equal(got, c.a.buf[:size]) {
		t.Error("the last message is not in the buffer")
	}
	t.Logf("%d messages, %d requests by grant, %d moves, %d that a stopped process has delayed", completed.Load(), c.a.byGrant(), moved, delayed)
	c.child.kill()
	must0(t, c.dma.Move(t.Context()))
}
