package device

// Memory of an engine whose bytes go to another process without passing through the host
// (mem.Sharing, link/opened.go).

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// openedPair connects two ends by rings, with memory of one engine that both open.
func openedPair(t *testing.T, size int, cfg enginetest.Config) (a, b *end, g *enginetest.Engine) {
	t.Helper()
	g = newEngine(t, "named", cfg)
	a, b = connected(t, openWay(t, "named"), openWay(t, "named"), ib.RC, size, func(e *end) {
		e.timeout = 0 // none: packets are sent again only if the peer asks for it
		e.onEngine(g)
	})
	a.getOpened(b)
	b.getOpened(a)
	return a, b, g
}

// getOpened writes to the peer until that has opened the memory.
func (e *end) getOpened(o *end) {
	e.t.Helper()
	before := namedTrains(o.dev)
	eventually(e.t, "the peer has opened the memory", func() bool {
		e.post(e.write(o, 0, 64))
		e.ok()
		return namedTrains(o.dev) > before
	})
}

// A flag behind data is seen when the data is there, and nothing is sent twice, while the
// sender's process registers and closes other memory all the time.
func TestNamedOrder(t *testing.T) {
	const size = 600 << 10 // three trains
	a, b, _ := openedPair(t, size+8, slowEngine)
	stop, stopped := make(chan struct{}), make(chan struct{})
	defer func() {
		close(stop)
		<-stopped
	}()
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			mr, err := a.pd.RegMR(make([]byte, 8192), allRemote)
			if err != nil {
				t.Error(err)
				return
			}
			if err := mr.Close(); err != nil {
				t.Error(err)
			}
		}
	}()
	sent := a.counted()[qp.CntRetransmits]
	for round := byte(1); int(round) <= lastingOps(20, 250); round++ {
		paint(a.buf[:size], round)
		paint(a.buf[size:], round)
		a.post(a.write(b, 0, size))
		a.post(a.write(b, size, 8))
		eventually(t, "the flag comes", func() bool { return byte(b.word(size)) == round })
		for i, v := range b.buf[:size] {
			if v != round {
				t.Fatalf("round %d: byte %d is %d when the flag is there", round, i, v)
			}
		}
		a.ok()
		a.ok()
	}
	if n := a.counted()[qp.CntRetransmits] - sent; n != 0 {
		t.Errorf("%d packets were sent again", n)
	}
}

// A call that closes the memory of a request waits until the peer's engine does not access it
// any more.
func TestNamedClose(t *testing.T) {
	a, b, g := openedPair(t, 64<<10, enginetest.Config{})
	paint(a.buf, 7)
	g.Hold()
	begun := g.Begun()
	a.post(a.write(b, 0, 64<<10))
	waitBegun(t, g, begun+1)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		closeAll(t, a.mr)
	}()
	stillWaits(t, closed) // the peer reads it
	g.Release()
	<-closed
	a.ok()
	if b.buf[64<<10-1] != 7 {
		t.Error("it was not written")
	}
	eventually(t, "the peer closes it", func() bool { return g.Opened() <= 1 }) // the other end's
}

// A message of pieces goes by name where those are long, and is loaded where they are not: a
// peer could not take as many moves.
func TestNamedPieces(t *testing.T) {
	const pieces, apart = 4, 100 << 10
	a, b, _ := openedPair(t, pieces*apart, enginetest.Config{})
	for i, c := range []struct{ size, named int }{{16 << 10, 0}, {64 << 10, pieces}} {
		paint(a.buf, 0)
		wr := a.write(b, 0, 0)
		wr.SGL = nil
		for p := range pieces {
			paint(a.buf[p*apart:][:c.size], byte(10*i+p+1))
			wr.SGL = append(wr.SGL, a.sge(p*apart, c.size)...)
		}
		before := namedTrains(b.dev)
		a.post(wr)
		a.ok()
		if n := int(namedTrains(b.dev) - before); n != c.named {
			t.Errorf("pieces of %d bytes: %d trains by name, want %d", c.size, n, c.named)
		}
		for at, v := range b.buf[:pieces*c.size] {
			if v != byte(10*i+at/c.size+1) {
				t.Fatalf("pieces of %d bytes: byte %d is %d", c.size, at, v)
			}
		}
	}
}

// Requests that wait in order behind one of another kind take no room for bytes that stay where
// they are: more of them wait than could be copied, and none is refused.
func TestNamedInOrder(t *testing.T) {
	const size, n = 1 << 20, 8
	a, b, g := openedPair(t, size, enginetest.Config{})
	buf := make([]byte, size)
	host := must[provider.MR](t)(b.pd.RegMR(buf, allRemote))
	t.Cleanup(func() { closeAll(t, host) })
	paint(a.buf, 7)
	before := a.counted()[qp.CntRetransmits]
	g.Hold()
	a.post(a.write(b, 0, 64))
	for range n {
		a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, size), RemoteAddr: host.Addr(), RKey: host.RKey()})
	}
	eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxBytes] >= n*size+64 })
	g.Release()
	for range n + 1 {
		a.ok()
	}
	if c := b.counted(); c[qp.CntRNRNaksSent] != 0 || a.counted()[qp.CntRetransmits] != before {
		t.Errorf("%d RNR NAKs, %d packets sent again", c[qp.CntRNRNaksSent], a.counted()[qp.CntRetransmits]-before)
	}
	if buf[0] != 7 || buf[size-1] != 7 {
		t.Error("it has not arrived")
	}
}

// What a queue pair has given up does not count, though the peer's engine was at it.
func TestNamedReset(t *testing.T) {
	const size = 64 << 10
	a, b, g := openedPair(t, size, enginetest.Config{})
	b.recv(ib.RecvWR{ID: 5, SGL: b.sge(0, size)})
	g.Hold()
	a.post(ib.SendWR{ID: 1, Op: ib.OpSend, Flags: ib.SendSignaled, SGL: a.sge(0, size)})
	eventually(t, "the peer has it", func() bool { return b.counted()[qp.CntRxBytes] >= size })
	a.modify(ib.QPAttr{State: ib.QPReset}, ib.QPMaskState)
	paint(a.buf, 0xEE)
	g.Release()
	b.noCompletion("what was given up")
}

// Memory that is registered anew is opened anew.
func TestNamedAgain(t *testing.T) {
	const size = 64 << 10
	a, b, g := openedPair(t, size, enginetest.Config{})
	for round := range byte(5) {
		closeAll(t, a.mr)
		m := g.Alloc(size)
		a.buf = m.Bytes
		a.mr = must[provider.MR](t)(a.pd.(*PD).RegBacking(m, 0x7000_0000, allRemote))
		t.Cleanup(func() { closeAll(t, a.qp, a.mr); m.Free() })
		a.getOpened(b)
		paint(a.buf, round)
		a.post(a.write(b, 0, size))
		a.ok()
		if b.buf[0] != round || b.buf[size-1] != round {
			t.Fatalf("round %d: %d, %d", round, b.buf[0], b.buf[size-1])
		}
	}
	eventually(t, "what was closed is closed", func() bool { return g.Opened() <= 2 })
}

const namedChild = "VERBENA_TEST_NAMED_CHILD"

const namedSize = 256 << 10

// namedPeer is what the test sends the other process.
type namedPeer struct {
	peerAddress
	Engine string
	Kill   bool // the other process only waits until it is killed
}

// Two processes whose engines know the same memory: bytes go both ways by name, and a process
// that is killed keeps no call of the other waiting.
func TestNamedProcesses(t *testing.T) {
	if arg := os.Getenv(namedChild); arg != "" {
		runNamedChild(t, arg)
		return
	}
	for _, kill := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed %v", kill), func(t *testing.T) {
			d := openDevice(t, provider.Config{Link: linkLocal})
			g := newEngine(t, "named", enginetest.Config{})
			b := newEnd(t, d, ib.RC, namedSize)
			t.Cleanup(b.close)
			b.onEngine(g)
			child := runInChild(t, "TestNamedProcesses", namedChild, namedPeer{b.address(), g.Name(), kill})
			o := child.connect(b)
			if !kill {
				child.said("DONE")
				if namedTrains(d) == 0 {
					t.Error("no WRITE was named")
				}
				return
			}
			child.said("READY")
			wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: b.sge(0, namedSize), RemoteAddr: o.Remote, RKey: o.RKey}
			for range 20 {
				b.post(wr)
				b.ok()
			}
			b.post(wr)
			b.post(wr)
			child.kill()
			closeAll(t, b.qp, b.mr, b.pd) // does not wait for a process that has ended
		})
	}
}

// runNamedChild is the other process: it writes, and reads what it has written.
func runNamedChild(t *testing.T, arg string) {
	var o namedPeer
	must0(t, json.Unmarshal([]byte(arg), &o))
	d := openDevice(t, provider.Config{Link: linkLocal})
	g := enginetest.New(enginetest.Config{Name: o.Engine})
	defer g.Close()
	a := newEnd(t, d, ib.RC, 2*namedSize)
	a.onEngine(g)
	in := a.announce(o.peerAddress)
	if o.Kill {
		fmt.Println("READY")
		in.Scan() // until it is killed
		return
	}
	wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, namedSize), RemoteAddr: o.Remote, RKey: o.RKey}
	back := wr
	back.Op, back.SGL = ib.OpRDMARead, a.sge(namedSize, namedSize)
	for i := 0; i < 20 || namedTrains(d) == 0; i++ {
		if i == 10_000 {
			t.Fatal("no READ was named")
		}
		paint(a.buf[:namedSize], byte(i))
		a.post(wr)
		a.ok()
		a.post(back)
		a.ok()
		for k, v := range a.buf[namedSize:] {
			if v != byte(i) {
				t.Fatalf("round %d: byte %d is %d", i, k, v)
			}
		}
	}
	fmt.Println("DONE")
}
