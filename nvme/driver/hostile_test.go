package driver

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/pci"
)

// fixed is registers that do not do what they should.
type fixed struct {
	cap  nvme.CAP
	csts uint32
}

func (f *fixed) Read64(off uint32) uint64 {
	if off == nvme.RegCAP {
		return uint64(f.cap)
	}
	return 0
}

func (f *fixed) Read32(off uint32) uint32 {
	if off == nvme.RegCSTS {
		return f.csts
	}
	return 0
}

func (f *fixed) Write32(uint32, uint32) {}
func (f *fixed) Write64(uint32, uint64) {}

func TestRegistersThatLie(t *testing.T) {
	good := nvme.MakeCAP(64, 1, nvme.CAPNVM)
	for _, tt := range []struct {
		what string
		regs fixed
		cfg  Config
		want error
	}{
		{"pulled out", fixed{cap: ^nvme.CAP(0)}, Config{}, ErrGone},
		{"pulled out later", fixed{cap: good, csts: ^uint32(0)}, Config{}, ErrGone},
		{"never ready", fixed{cap: good}, Config{}, ErrTimeout},
		{"always ready", fixed{cap: good, csts: 1}, Config{}, ErrTimeout},
		{"fatal", fixed{cap: good, csts: 2}, Config{}, ErrFatal},
		{"no NVM command set", fixed{cap: nvme.MakeCAP(64, 1, 0)}, Config{}, syscall.EOPNOTSUPP},
		{"large pages", fixed{cap: good | 1<<48}, Config{}, syscall.EOPNOTSUPP},
		{"admin queues of one entry", fixed{cap: good}, Config{AdminEntries: 1}, syscall.EINVAL},
		{"too many queues", fixed{cap: good}, Config{IOQueues: 65535}, syscall.EINVAL},
	} {
		t.Run(tt.what, func(t *testing.T) {
			h := newHost()
			if _, err := Open(&tt.regs, h, &tt.cfg); !errors.Is(err, tt.want) {
				t.Errorf("%v, should be %v", err, tt.want)
			}
			if h.Used() != 0 {
				t.Errorf("%d pieces of memory were not given back", h.Used())
			}
		})
	}
}

// short is memory that is not what was asked for.
type short struct{ m Memory }

func (s short) Alloc(int) (Memory, error) { return s.m, nil }

func TestMemoryThatLies(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	for _, m := range []Memory{{}, {Bytes: make([]byte, 10), Addr: 4096}, {Bytes: make([]byte, 8192), Addr: 100}} {
		if _, err := Open(r.model, short{m}, nil); !errors.Is(err, syscall.EINVAL) {
			t.Error(err)
		}
	}
	check(t, r.c.Reset()) // the others have taken the controller away
	check(t, r.queue(t, QueueConfig{}).Flush(longTime(t), r.ns))
}

// A completion of a command that there is not ends everything until a reset.
func TestCompletionsThatLie(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	ctx := longTime(t)
	for _, cid := range []uint16{0, 5, 62, 63, 0xffff} {
		q := r.queue(t, QueueConfig{})
		q.ring.mu.Lock()
		lie := nvme.Completion{CID: cid, Phase: true}
		lie.Publish((*[16]byte)(q.ring.cq.Bytes))
		q.ring.mu.Unlock()
		m := r.memory(t, 512)
		if err := q.Read(ctx, r.ns, 0, m); !errors.Is(err, ErrBroken) {
			t.Errorf("CID %d: %v", cid, err)
		}
		if err := q.Flush(ctx, r.ns); !errors.Is(err, ErrBroken) {
			t.Errorf("CID %d: %v", cid, err)
		}
		check(t, r.c.Reset())
	}
}

// A command without a completion ends after Config.Timeout, and a reset gives its memory back.
func TestNoCompletion(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{Timeout: 50 * time.Millisecond})
	stuck := &gate{Namespace: must(nvme.NewMemory(1<<20, 512))(t), open: make(chan struct{})}
	check(t, r.sub.AddNamespace(2, stuck))
	ctx, q := longTime(t), r.queue(t, QueueConfig{})
	if err := q.Flush(ctx, Namespace{ID: 2, BlockSize: 512}); !errors.Is(err, ErrTimeout) {
		t.Error(err)
	}
	close(stuck.open)
	check(t, r.c.Reset())
	if err := q.Flush(ctx, r.ns); !errors.Is(err, ErrReset) {
		t.Error(err)
	}
	check(t, r.queue(t, QueueConfig{}).Flush(ctx, Namespace{ID: 2}))
}

// gate is storage whose flushes wait until it is open.
type gate struct {
	nvme.Namespace
	open  chan struct{}
	first sync.Once
	began chan struct{} // closed by the first flush; nil: not
}

func (g *gate) Flush() error {
	if g.began != nil {
		g.first.Do(func() { close(g.began) })
	}
	<-g.open
	return nil
}

// What a namespace says of its format may be anything.
func TestFormatsThatLie(t *testing.T) {
	for shift, ok := range map[byte]bool{0: false, 8: false, 9: true, 12: true, 21: false, 255: false} {
		b := make([]byte, 4096)
		b[0], b[26], b[128+4*15+2] = 1, 0xff, shift
		ns, got := parseNamespace(3, b)
		if got != ok || ok && ns.BlockSize != 1<<shift {
			t.Errorf("2^%d: %+v, %v", shift, ns, got)
		}
	}
}

// stubborn is registers of a controller that cannot be disabled while it ignores CC, and that reports a fatal error
// until it is disabled.
type stubborn struct {
	nvme.Registers
	ignores atomic.Bool
	ignored atomic.Int32 // writes of CC
	fatal   atomic.Bool
}

// wrap is for newRig.
func (s *stubborn) wrap(regs nvme.Registers) nvme.Registers {
	s.Registers = regs
	return s
}

func (s *stubborn) Write32(off, v uint32) {
	switch {
	case off == nvme.RegCC && s.ignores.Load():
		s.ignored.Add(1)
		return
	case off == nvme.RegCC && nvme.CC(v)&nvme.CCEnable == 0:
		s.fatal.Store(false)
	}
	s.Registers.Write32(off, v)
}

func (s *stubborn) Read32(off uint32) uint32 {
	v := s.Registers.Read32(off)
	if off == nvme.RegCSTS && s.fatal.Load() {
		v |= uint32(nvme.CSTSFatal)
	}
	return v
}

// Read64 returns the shortest CAP.TO, so that a test does not wait for long.
func (s *stubborn) Read64(off uint32) uint64 {
	v := s.Registers.Read64(off)
	if off == nvme.RegCAP {
		v = v&^(0xff<<24) | 1<<24
	}
	return v
}

// A controller that does not stop may use all memory that it has, so none is given back before it does.
func TestDoesNotStop(t *testing.T) {
	regs := new(stubborn)
	r := newRig(t, pci.Config{}, Config{}, regs.wrap)
	stuck := &gate{Namespace: must(nvme.NewMemory(1<<20, 512))(t), open: make(chan struct{})}
	check(t, r.sub.AddNamespace(2, stuck))
	ctx, q := longTime(t), r.queue(t, QueueConfig{})
	req := must(q.Submit(ctx, nvme.Command{Opcode: nvme.IOFlush, NSID: 2}, Memory{}, 0))(t)
	before := r.host.Used()
	fails := func(what string, do func() error) {
		t.Helper()
		regs.ignores.Store(true)
		defer regs.ignores.Store(false)
		if err := do(); !errors.Is(err, ErrTimeout) {
			t.Errorf("%s: %v", what, err)
		}
		if n := r.host.Used(); n != before {
			t.Errorf("%s: of %d pieces of memory %d are left", what, before, n)
		}
	}
	fails("reset", r.c.Reset)
	close(stuck.open)
	if _, err := req.Wait(ctx); err != nil {
		t.Errorf("a command that was under way: %v", err)
	}
	if err := q.Flush(ctx, r.ns); !errors.Is(err, ErrReset) {
		t.Errorf("a new command: %v", err)
	}
	check(t, r.c.Reset())
	check(t, r.queue(t, QueueConfig{}).Flush(ctx, r.ns))
	fails("close", r.c.Close)
	fails("close again", r.c.Close)
	if err := r.c.Reset(); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	// Nothing is in the way any more when the rig closes it.
}

// Closing a queue whose command hangs takes too long. Closing it again goes on where that ended.
func TestQueueCloseAgain(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{Timeout: 500 * time.Millisecond})
	stuck := &gate{Namespace: must(nvme.NewMemory(1<<20, 512))(t), open: make(chan struct{}), began: make(chan struct{})}
	check(t, r.sub.AddNamespace(2, stuck))
	ctx, before := longTime(t), r.host.Used()
	q := r.queue(t, QueueConfig{})
	req := must(q.Submit(ctx, nvme.Command{Opcode: nvme.IOFlush, NSID: 2}, Memory{}, 0))(t)
	<-stuck.began
	if err := q.Close(); !errors.Is(err, ErrTimeout) {
		t.Errorf("a queue with a command that hangs: %v", err)
	}
	if err := q.Flush(ctx, r.ns); !errors.Is(err, ErrClosed) {
		t.Errorf("a new command: %v", err)
	}
	close(stuck.open)
	check(t, q.Close())
	check(t, q.Close())
	if _, err := req.Wait(ctx); err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, nvme.StatusSQDeleted) {
		t.Error(err)
	}
	if n := r.host.Used(); n != before {
		t.Errorf("%d pieces of memory, %d before", n, before)
	}
	check(t, r.queue(t, QueueConfig{}).Flush(ctx, r.ns)) // its number is free again
}

// endless is registers of a controller whose lists of namespaces have no end. It writes a list itself when the driver
// asks for one, and has the model execute another command instead.
type endless struct {
	nvme.Registers
	c     *Controller // nil: lists are the model's
	lists int         // that were asked for
	then  func()      // called for each list
}

func (e *endless) wrap(regs nvme.Registers) nvme.Registers {
	e.Registers = regs
	return e
}

func (e *endless) Write32(off, v uint32) {
	if e.c != nil && off == e.c.ring.sqBell {
		entry := (*[sqEntry]byte)(e.c.ring.sq.Bytes[sqEntry*((int(v)+e.c.ring.entries-1)%e.c.ring.entries):])
		if cmd := nvme.ParseCommand(entry); cmd.Opcode == nvme.AdminIdentify && uint8(cmd.CDW10) == nvme.CNSActiveNamespaces {
			e.lists++
			for i := range uint32(pageSize / 4) {
				binary.LittleEndian.PutUint32(e.c.scratch.Bytes[4*i:], cmd.NSID+1+i)
			}
			other := nvme.Command{Opcode: nvme.AdminGetFeatures, CDW10: uint32(nvme.FeatureQueues), CID: cmd.CID}
			other.Put(entry)
			e.then()
		}
	}
	e.Registers.Write32(off, v)
}

func TestNamespacesWithoutEnd(t *testing.T) {
	regs := new(endless)
	r := newRig(t, pci.Config{}, Config{}, regs.wrap)
	regs.c, regs.then = r.c, func() {}
	if _, err := r.c.Namespaces(longTime(t)); !errors.Is(err, syscall.EPROTO) {
		t.Error(err)
	}
	if n := maxNamespaces / (pageSize / 4); regs.lists > n+1 {
		t.Errorf("%d lists were read; %d have all namespaces that are possible", regs.lists, n)
	}
	ctx, cancel := context.WithCancel(longTime(t))
	regs.lists = 0
	regs.then = func() {
		if regs.lists == 3 {
			cancel()
		}
	}
	if _, err := r.c.Namespaces(ctx); !errors.Is(err, context.Canceled) || regs.lists != 3 {
		t.Errorf("%d lists, %v", regs.lists, err)
	}
	regs.c = nil
	if list := must(r.c.Namespaces(longTime(t)))(t); len(list) != 1 {
		t.Errorf("%d namespaces", len(list))
	}
}
