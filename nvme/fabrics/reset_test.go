package fabrics

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// flushes counts the flushes of a namespace.
type flushes struct {
	nvme.Namespace
	n atomic.Int32
}

func (f *flushes) Flush() error {
	f.n.Add(1)
	return f.Namespace.Flush()
}

// A reset ends the I/O queues and what waits, and the controller is as new; while it is disabled it executes nothing.
// A shutdown flushes, and nothing is executed after it.
func TestReset(t *testing.T) {
	sub := must[*nvme.Subsystem](t)(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nqn}))
	ns := &flushes{Namespace: must[nvme.Namespace](t)(nvme.NewMemory(1<<20, 4096))}
	check(t, sub.AddNamespace(1, ns))
	for _, workers := range []int{0, 2} {
		tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}, Workers: workers}, verbs.LinkAny)
		h := dial(t, tgt, HostConfig{Queues: 2}, verbs.LinkAny)
		ctx := longTime(t)
		d := must[*Disk](t)(h.Namespace(ctx, 1))
		feature := func(opcode uint8, value uint32) nvme.Completion {
			return must[nvme.Completion](t)(h.Admin(ctx, nvme.Command{Opcode: opcode, CDW10: uint32(nvme.FeatureAsyncEvents), CDW11: value}, nil, nvme.NoData))
		}
		status := func() uint64 { return must[uint64](t)(h.property(ctx, nvme.RegCSTS, false)) }
		if feature(nvme.AdminSetFeatures, 0x100); feature(nvme.AdminGetFeatures, 0).Result != 0x100 {
			t.Error("the feature was not set")
		}
		waited := make(chan nvme.Status, 1)
		var wg sync.WaitGroup
		wg.Go(func() {
			c, err := h.Admin(ctx, nvme.Command{Opcode: nvme.AdminAsyncEventRequest}, nil, nvme.NoData)
			if err != nil {
				c.Status = nvme.StatusInternal
			}
			waited <- c.Status
		})
		eventually(t, "the request waits", func() bool {
			first := queueOf(tgt, 0)
			first.mu.Lock()
			defer first.mu.Unlock()
			return len(first.events) == 1
		})

		check(t, h.setCC(ctx, 0))
		eventually(t, "the controller is not ready", func() bool { return status()&uint64(nvme.CSTSReady) == 0 })
		if st := <-waited; st != nvme.StatusAbortRequested {
			t.Errorf("the async event request ends with %v", st)
		}
		wg.Wait()
		eventually(t, "the I/O queues end", func() bool { return queueOf(tgt, 1) == nil && queueOf(tgt, 2) == nil })
		if _, err := d.WriteAt(make([]byte, 4096), 0); err == nil {
			t.Error("a controller that is disabled writes")
		}
		if c := feature(nvme.AdminGetFeatures, 0); c.Status != nvme.StatusCommandSequence {
			t.Errorf("a controller that is disabled answers %v", c.Status)
		}

		check(t, h.setCC(ctx, nvme.MakeCC(12)))
		if status()&uint64(nvme.CSTSReady) == 0 {
			t.Error("not ready again")
		}
		if c := feature(nvme.AdminGetFeatures, 0); c.Status != nvme.StatusSuccess || c.Result == 0x100 {
			t.Errorf("the feature is %#x after the reset, %v", c.Result, c.Status)
		}
		if _, err := d.WriteAt(make([]byte, 4096), 0); err == nil {
			t.Error("an I/O queue from before the reset writes")
		}

		before := ns.n.Load()
		check(t, h.setCC(ctx, nvme.MakeCC(12)|nvme.CCShutdownNormal))
		if st := status(); nvme.CSTS(st)&nvme.CSTSShutdownMask != nvme.CSTSShutdownDone || ns.n.Load() == before { //nolint:gosec // a register
			t.Errorf("shut down: CSTS %#x, %d flushes", st, ns.n.Load()-before)
		}
		if c := feature(nvme.AdminGetFeatures, 0); c.Status != nvme.StatusCommandSequence {
			t.Errorf("a controller that is shut down answers %v", c.Status)
		}
	}
}

// queueOf returns a queue of the only host of a target; nil: there is none.
func queueOf(t *Target, id uint16) *queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	for q := range t.queues {
		if q.qid == id && q.of != nil {
			return q
		}
	}
	return nil
}

// Async event requests with one number: the second is refused, and no slot is used twice.
func TestEventNumbers(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	q, n := h.admin, 0
	post := func(cmd nvme.Command) {
		at := n % 16 * (commandBytes + q.room)
		n++
		cmd.SetSGL(nvme.SGL{Type: nvme.SGLKeyed})
		cmd.Put((*[commandBytes]byte)(q.capsules.Bytes()[at:]))
		commands := tgt.Stats().Commands
		must[int](t)(q.conn.QP().PostSend([]verbs.SendWR{{ID: idReply, Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{q.capsules.SGE(at, commandBytes)}}}))
		eventually(t, "the command comes", func() bool { return tgt.Stats().Commands > commands })
	}
	first := queueOf(tgt, 0)
	waiting := func() int {
		first.mu.Lock()
		defer first.mu.Unlock()
		return len(first.events)
	}
	for range 4 {
		post(nvme.Command{Opcode: nvme.AdminAsyncEventRequest, CID: 7})
	}
	if waiting() != 1 {
		t.Errorf("%d requests wait", waiting())
	}
	post(nvme.Command{Opcode: nvme.AdminAbort, CID: 8, CDW10: 7 << 16})
	eventually(t, "it is aborted", func() bool { return waiting() == 0 })
	check(t, tgt.Close()) // nobody uses the slots any more
	seen := map[*slot]bool{}
	for _, s := range first.unused {
		if seen[s] {
			t.Fatal("a slot is there twice")
		}
		seen[s] = true
	}
}

// The head of a host's queue runs round the length that the host has said.
func TestQueueHead(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}}, verbs.LinkAny)
	good := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	ctx := longTime(t)
	h := &Host{cfg: good.cfg, address: good.address, dev: good.dev, pd: good.pd, transfer: page}
	q := must[*hostQueue](t)(h.newQueue(ctx, 0, 32, 0)) // says 32 to the connection manager
	d := nvme.ConnectData{HostID: h.cfg.HostID, CNTLID: nvme.CNTLIDDynamic, SubNQN: nqn, HostNQN: h.cfg.HostNQN}
	var b [nvme.ConnectDataSize]byte
	d.Put(&b)
	last := must[nvme.Completion](t)(q.do(ctx, nvme.ConnectCommand(nvme.Connect{SQSize: 7}), b[:], nvme.FromHost)).SQHead
	for range 40 {
		head := must[nvme.Completion](t)(q.do(ctx, nvme.Command{Opcode: nvme.AdminKeepAlive}, nil, nvme.NoData)).SQHead
		if head != (last+1)%8 {
			t.Fatalf("the head is %d after %d, in a queue of 8", head, last)
		}
		last = head
	}
	check(t, q.close())
}

// vanishing is memory that goes away, as that of a device does which is removed: a file that is mapped.
type vanishing struct{ file *os.File }

func (v vanishing) Alloc(n int) ([]byte, func(), error) {
	b, err := sys.MapDMABuf(int(v.file.Fd()), uint64(n), true) //nolint:gosec // positive
	return b, func() { _ = sys.Unmap(b) }, err
}

// When the memory of an I/O queue goes away, that queue ends; others, and the target, do not.
func TestVanishingBuffers(t *testing.T) {
	for _, workers := range []int{0, 2} {
		f := must[*os.File](t)(os.Create(filepath.Join(t.TempDir(), "memory")))
		defer func() { _ = f.Close() }()
		check(t, f.Truncate(64<<20))
		sub := disk(t, 1<<20, 4096)
		tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}, Buffers: vanishing{f}, Workers: workers}, verbs.LinkAny)
		h := dial(t, tgt, HostConfig{}, verbs.LinkAny)
		d := must[*Disk](t)(h.Namespace(longTime(t), 1))
		want := bytes.Repeat([]byte{7}, 65536)
		must[int](t)(d.WriteAt(want, 0))
		check(t, f.Truncate(0))
		if _, err := d.ReadAt(make([]byte, 65536), 0); err == nil {
			t.Error("a read through memory that is not there")
		}
		if _, err := h.Namespace(longTime(t), 1); err != nil {
			t.Errorf("the first queue has memory of its own: %v", err)
		}
		check(t, f.Truncate(64<<20))
		other := dial(t, tgt, HostConfig{}, verbs.LinkAny)
		d = must[*Disk](t)(other.Namespace(longTime(t), 1))
		got := make([]byte, 65536)
		must[int](t)(d.ReadAt(got, 0))
		if !bytes.Equal(got, want) {
			t.Error("other bytes")
		}
		must[int](t)(d.WriteAt(want, 65536)) // no lock is held by what has failed
	}
}

// noBuffers gives nothing.
type noBuffers struct{}

func (noBuffers) Alloc(int) ([]byte, func(), error) { return nil, nil, syscall.EACCES }

// Memory that cannot be had is told of.
func TestNoBuffers(t *testing.T) {
	var said lockedBuffer
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}, Buffers: noBuffers{}, Log: slog.New(slog.NewTextHandler(&said, nil))}, verbs.LinkAny)
	dial(t, tgt, HostConfig{Queues: 2}, verbs.LinkAny)
	if n := tgt.Stats().OwnBuffers; n != 2 {
		t.Errorf("%d queues have memory of their own", n)
	}
	if text := said.String(); bytes.Count([]byte(text), []byte(syscall.EACCES.Error())) != 2 {
		t.Errorf("the log says %q", text)
	}
}

// lockedBuffer is a buffer for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
