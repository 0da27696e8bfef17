package device

// Grants to dma-bufs (importer/share.go): they are taken away before the buffer moves, and nobody who
// moves it waits for a peer process that is stopped amid a copy.

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// holds wants the memory to hold some bytes at its start.
func (m *moving) holds(what, want string) {
	m.e.t.Helper()
	got := make([]byte, len(want))
	must[int](m.e.t)(m.dma.ReadAt(got, 4096))
	if string(got) != want {
		m.e.t.Errorf("%s: the buffer holds %q, not %q", what, got, want)
	}
}

// Peers write and read dma-bufs by grant, dynamic and pinned. After a move they use the ring until
// they have another grant. Nothing is written to the old place; a revoked buffer is out of reach.
func TestGrantDMABuf(t *testing.T) {
	for _, pinned := range []bool{false, true} {
		t.Run(fmt.Sprintf("pinned %v", pinned), func(t *testing.T) {
			a, b := byRings(t, ib.RC, 1<<20)
			b.dev.cfg.PinDMABuf = pinned
			m := b.makeDMABuf(1<<20, 1)
			rounds := 5
			if pinned {
				rounds = 1
			}
			for i := range rounds {
				a.warm(b)
				before := a.byGrant()
				text := fmt.Sprintf("message %d", i)
				copy(a.buf, text)
				a.post(a.write(b, 0, len(text)))
				a.ok()
				m.holds("a WRITE by grant", text)
				wr := a.write(b, 0, len(text))
				wr.Op = ib.OpRDMARead
				clear(a.buf[:len(text)])
				a.post(wr)
				a.ok()
				if got := string(a.buf[:len(text)]); got != text {
					t.Errorf("a READ by grant returns %q, not %q", got, text)
				}
				if n := a.byGrant() - before; n != 2 {
					t.Errorf("%d of 2 requests by grant", n)
				}
				if pinned {
					if err := m.dma.Move(t.Context()); err == nil {
						t.Error("a pinned buffer has moved")
					}
					continue
				}
				must0(t, m.dma.Move(t.Context()))
				if n := grantsOf(b.dev); n > 0 && !b.grantsShut() {
					t.Error("the grant is still open")
				}
				m.holds("after a move", text)
				copy(a.buf, strings.ToUpper(text))
				a.post(a.write(b, 0, len(text)))
				a.ok()
				m.holds("a WRITE after a move", strings.ToUpper(text))
			}
			a.warm(b)
			must0(t, m.dma.Revoke(t.Context()))
			a.post(a.write(b, 0, 8))
			a.status(ib.WCRemAccessErr)
		})
	}
}

// A peer that may only read a region does not get the segment of one that may write: the segments
// of a place are two.
func TestGrantDMABufRights(t *testing.T) {
	a, b := byRings(t, ib.RC, 4096)
	m := b.makeDMABuf(4096, 1)
	a.warm(b)
	r := b.mr.(*MR).region
	placed := r.Backing().(mem.Placed)
	bytes, kind := r.Backing().Run(0, 4096, ib.AccessRemoteRead)
	if kind != mem.FaultNone {
		t.Fatal(kind)
	}
	write, off := placed.Segment(bytes, true)
	read, _ := placed.Segment(bytes, false)
	if write == 0 || read == 0 || read == write || off != 4096 {
		t.Errorf("segments %d and %d, at %d", write, read, off)
	}
	mem.SegmentFile(read, func(_ int, writable bool) {
		if writable {
			t.Error("the segment for readers is writable")
		}
	})
	must0(t, m.dma.Move(t.Context()))
	if mem.SegmentFile(read, func(int, bool) {}) || mem.SegmentFile(write, func(int, bool) {}) {
		t.Error("a segment is left when the buffer has moved")
	}
}

// A region is being closed, which waits for a peer amid a copy. The buffer moves all the same.
func TestGrantDMABufMovesDuringClose(t *testing.T) {
	a, b := byRings(t, ib.RC, 4096)
	m := b.makeDMABuf(4096, 1)
	a.warm(b)
	stuck, r, wr := a.stuckWrite(b, "last word")
	t.Cleanup(func() { closeAll(t, r) })
	posted, closed := make(chan struct{}), make(chan struct{})
	go func() {
		a.post(wr)
		close(posted)
	}()
	<-stuck.begun
	must0(t, m.dma.Move(t.Context()))
	go func() {
		closeAll(t, b.mr)
		close(closed)
	}()
	eventually(t, "the region is being closed", func() bool { return !b.mr.(*MR).region.Alive() })
	must0(t, m.dma.Move(t.Context()))
	stillWaits(t, closed)
	close(stuck.end)
	<-posted
	<-closed
	a.status(ib.WCRemAccessErr) // it comes again, by the ring
	m.holds("the region is closed", string(make([]byte, 9)))
}

const dmabufChild = "VERBENA_TEST_DMABUF_CHILD"

// runDMABufChild is the other process. It stays amid a WRITE by grant until it reads a line. Then
// the WRITE completes.
func runDMABufChild(t *testing.T, arg string) {
	var o peerAddress
	must0(t, json.Unmarshal([]byte(arg), &o))
	a := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 1<<20)
	in := a.announce(o)
	wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: o.Remote, RKey: o.RKey}
	eventually(t, "a grant comes into use", func() bool {
		a.post(wr)
		a.ok()
		return a.byGrant() > 0
	})
	stuck, r, last := a.stuckWrite(a, "last bytes")
	defer closeAll(t, r)
	last.RemoteAddr, last.RKey = o.Remote, o.RKey
	posted := make(chan struct{})
	go func() {
		a.post(last)
		close(posted)
	}()
	<-stuck.begun
	fmt.Println("INSIDE")
	in.Scan()
	close(stuck.end)
	<-posted
	a.ok()
	fmt.Println("WRITTEN")
	in.Scan() // until it is killed
}

// A peer process is stopped amid a WRITE by grant: the buffer moves, is evicted and comes back. When
// the process goes on, its WRITE arrives at the buffer's place. If it is killed instead, what it
// had begun is lost, and the region can be closed.
func TestGrantDMABufOfStoppedProcess(t *testing.T) {
	if arg := os.Getenv(dmabufChild); arg != "" {
		runDMABufChild(t, arg)
		return
	}
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed %v", killed), func(t *testing.T) {
			b := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 4096)
			t.Cleanup(b.close)
			m := b.makeDMABuf(4096, 1)
			child := runInChild(t, "TestGrantDMABufOfStoppedProcess", dmabufChild, b.address())
			child.connect(b)
			child.said("INSIDE")
			must0(t, child.cmd.Process.Signal(syscall.SIGSTOP))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for range 3 {
				must[int](t)(m.dma.WriteAt([]byte("of the CPU"), 4096))
				must0(t, m.dma.Move(ctx))
				m.holds("after a move", "of the CPU")
			}
			must0(t, m.dma.Evict(ctx))
			if killed {
				child.kill()
				m.holds("after the peer's end", "of the CPU")
				closeAll(t, b.mr) // waits until the end is noticed
				return
			}
			must0(t, child.cmd.Process.Signal(syscall.SIGCONT))
			must[int](t)(child.in.Write([]byte("\n")))
			child.said("WRITTEN")
			m.holds("the peer goes on", "last bytes")
		})
	}
}

// isStopped waits until all threads of the process are stopped.
func (c *childProcess) isStopped() {
	c.t.Helper()
	eventually(c.t, "all threads are stopped", func() bool {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.cmd.Process.Pid))
		for _, task := range tasks {
			if b, err := os.ReadFile(task); err != nil || !strings.Contains(string(b), ") T ") {
				return false
			}
		}
		return len(tasks) > 0
	})
}

const dmabufStormChild = "VERBENA_TEST_DMABUF_STORM_CHILD"

const stormSize = 64 << 10

// runDMABufStormChild is the other process. It writes messages to the first half of the memory, whose
// bytes are all the same, and reads them back, until it is killed.
func runDMABufStormChild(t *testing.T, arg string) {
	var o peerAddress
	must0(t, json.Unmarshal([]byte(arg), &o))
	a := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 2*stormSize)
	a.announce(o)
	wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, stormSize), RemoteAddr: o.Remote, RKey: o.RKey}
	rd := ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(stormSize, stormSize), RemoteAddr: o.Remote, RKey: o.RKey}
	said := time.Now()
	for i := 1; ; i++ {
		letter := byte(1 + i%200)
		for j := range stormSize {
			a.buf[j] = letter
		}
		a.post(wr)
		a.ok()
		a.post(rd)
		a.ok()
		if !bytes.Equal(a.buf[:stormSize], a.buf[stormSize:]) {
			fmt.Printf("WRONG message %d: poison at %d\n", i, bytes.IndexByte(a.buf[stormSize:], movingPoison))
			return
		}
		if time.Since(said) > time.Millisecond { // the test reads slower than messages go
			fmt.Printf("DONE %d %d\n", i, a.byGrant())
			said = time.Now()
		}
	}
}

// A peer process writes and reads a dma-buf that moves all the time, mostly by grant; it is stopped
// and goes on at any moment, and is killed in the end. It never reads anything but what it has
// written. A message that is there is there as a whole: what the last byte says holds for all.
func TestGrantDMABufStorm(t *testing.T) {
	if arg := os.Getenv(dmabufStormChild); arg != "" {
		runDMABufStormChild(t, arg)
		return
	}
	b := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 4096)
	t.Cleanup(b.close)
	m := b.makeDMABuf(stormSize, 1)
	child := runInChild(t, "TestGrantDMABufStorm", dmabufStormChild, b.address())
	child.connect(b)
	var done, byGrant atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for child.lines.Scan() {
			line := child.lines.Text()
			var n, g int64
			if _, err := fmt.Sscanf(line, "DONE %d %d", &n, &g); err == nil {
				done.Store(n)
				byGrant.Store(g)
			}
			if strings.HasPrefix(line, "WRONG") {
				t.Error(line)
				return
			}
		}
	}()
	got, again := make([]byte, stormSize), make([]byte, stormSize)
	enough := int64(lastingOps(40, 1000))
	grants := int64(0) // moves since which the peer has used another grant
	for i := int64(0); grants < enough && !t.Failed(); i++ {
		before := byGrant.Load()
		stopped := i%4 == 3 // at any moment
		if stopped {
			must0(t, child.cmd.Process.Signal(syscall.SIGSTOP))
			child.isStopped()
		}
		must0(t, m.dma.Move(t.Context()))
		must[int](t)(m.dma.ReadAt(got, 4096))
		for stopped { // this process may still execute what had come by the ring
			must[int](t)(m.dma.ReadAt(again, 4096))
			if bytes.Equal(got, again) {
				last := got[stormSize-1]
				next := 1 + last%200 // the message behind it may have begun
				if n := bytes.Count(got, got[stormSize-1:]) + bytes.Count(got, []byte{next}); n != stormSize {
					t.Errorf("move %d: the last byte is %d, but %d bytes are neither of that message nor of the next", i, last, stormSize-n)
				}
				break
			}
			got, again = again, got
		}
		if bytes.IndexByte(got, movingPoison) >= 0 {
			t.Errorf("move %d: poison", i)
		}
		must0(t, child.cmd.Process.Signal(syscall.SIGCONT))
		was := done.Load()
		eventually(t, "the peer goes on", func() bool { return done.Load() > was || t.Failed() })
		if i%8 == 7 { // else the grants of memory that moves too often become rare
			eventually(t, "the peer has a grant", func() bool { return byGrant.Load() > before+grantWorth || t.Failed() })
		}
		if byGrant.Load() > before {
			grants++
		}
	}
	t.Logf("%d messages, %d requests by grant, %d moves", done.Load(), byGrant.Load(), m.dma.Moves())
	child.kill()
	<-ended
	must0(t, m.dma.Move(t.Context()))
}

// A dma-buf whose exporter may use the memory again gets no grant, nor one of several segments.
func TestGrantDMABufNone(t *testing.T) {
	memory := make([]byte, 8192)
	buffer := must[*dmabuf.Buffer](t)(dmabuf.Export(dmabuf.Config{Size: 8192, Ops: dmabuf.Ops{
		Map:     func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) { return dmabuf.NewTable(memory), nil },
		Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
		Release: func(*dmabuf.Buffer) {},
	}}))
	for _, what := range []string{"an exporter of one's own", "segments"} {
		t.Run(what, func(t *testing.T) {
			a, b := byRings(t, ib.RC, 4096)
			if what == "segments" {
				b.makeDMABuf(8192, 3)
			} else {
				b.registerBuffer(buffer)
			}
			for range 200 {
				a.post(a.write(b, 0, 8))
				a.ok()
			}
			if n := a.byGrant(); n != 0 || grantsOf(b.dev) != 0 {
				t.Errorf("%d requests by grant, %d grants", n, grantsOf(b.dev))
			}
		})
	}
	buffer.Put()
}

// registerBuffer gives an end a dma-buf as its memory.
func (e *end) registerBuffer(b *dmabuf.Buffer) {
	e.t.Helper()
	closeAll(e.t, e.mr)
	e.mr = must[provider.MR](e.t)(importer.Register(e.pd, importer.Range{Buffer: b, Length: b.Size()}, allRemote))
	e.t.Cleanup(func() { closeAll(e.t, e.qp, e.mr) })
}
