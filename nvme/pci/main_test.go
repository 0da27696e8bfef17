package pci

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/nvme"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func seeded(t testing.TB) *rand.Rand {
	s := rand.Uint64()
	if v, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64); err == nil {
		s = v
	}
	t.Logf("VERBENA_SEED=%d", s)
	return rand.New(rand.NewPCG(s, 3))
}

const dnr = nvme.StatusDNR

// Where things lie in the memory of a machine: 4 MiB from 1 MiB on.
const (
	memBase = 1 << 20
	memSize = 4 << 20
	asqAddr = memBase
	acqAddr = memBase + 0x1000
	ioSQ    = memBase + 0x10000
	ioCQ    = memBase + 0x20000
	dataAt  = memBase + 0x100000
)

// machine is a controller whose registers and queues the test uses by itself.
type machine struct {
	t     testing.TB
	space Space
	mem   []byte
	sub   *nvme.Subsystem
	ns    nvme.Namespace
	c     *Controller

	mu         sync.Mutex // guards interrupts
	interrupts map[int]int

	queues [3]struct{ tail, head, size int }
	phases [3]bool
	cid    uint16
}

func newMachine(t testing.TB, cfg Config) *machine {
	t.Helper()
	m := &machine{t: t, mem: make([]byte, memSize), interrupts: map[int]int{}}
	check(t, m.space.Add(memBase, m.mem))
	m.sub = must(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.org.verbena:pci"}))(t)
	m.ns = must(nvme.NewMemory(1<<20, 512))(t)
	check(t, m.sub.AddNamespace(1, m.ns))
	cfg.Subsystem, cfg.Bus = m.sub, &m.space
	if cfg.Interrupt == nil {
		cfg.Interrupt = func(v int) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.interrupts[v]++
		}
	}
	m.c = must(New(cfg))(t)
	t.Cleanup(func() {
		m.c.Close()
		m.c.Close()
	})
	return m
}

// wait waits for bits of CSTS.
func (m *machine) wait(mask, want nvme.CSTS) {
	m.t.Helper()
	for end := time.Now().Add(time.Minute); nvme.CSTS(m.c.Read32(nvme.RegCSTS))&mask != want; runtime.Gosched() {
		if time.Now().After(end) {
			m.t.Fatalf("CSTS is %#x, bits %#x should be %#x", m.c.Read32(nvme.RegCSTS), mask, want)
		}
	}
}

// enable enables the controller with admin queues of 4 entries.
func (m *machine) enable() {
	m.t.Helper()
	m.c.Write32(nvme.RegAQA, 3|3<<16)
	m.c.Write64(nvme.RegASQ, asqAddr)
	m.c.Write64(nvme.RegACQ, acqAddr)
	m.c.Write32(nvme.RegCC, uint32(nvme.MakeCC(12)))
	m.wait(nvme.CSTSReady|nvme.CSTSFatal, nvme.CSTSReady)
	m.queues[0] = struct{ tail, head, size int }{size: 4}
	m.phases[0] = true
	clear(m.at(acqAddr, 64))
}

// disable resets the controller.
func (m *machine) disable() {
	m.t.Helper()
	m.c.Write32(nvme.RegCC, 0)
	m.wait(nvme.CSTSReady|nvme.CSTSFatal, 0)
}

func (m *machine) at(addr uint64, n int) []byte { return m.mem[addr-memBase:][:n] }

// submit puts a command into a queue, of 4 entries, and rings.
func (m *machine) submit(q int, cmd nvme.Command) uint16 {
	m.cid++
	cmd.CID = m.cid
	base := uint64(asqAddr)
	if q > 0 {
		base = ioSQ
	}
	s := &m.queues[q]
	cmd.Put((*[64]byte)(m.at(base+64*uint64(s.tail), 64)))
	s.tail = (s.tail + 1) % s.size
	m.c.Write32(nvme.RegDoorbells+8*uint32(q), uint32(s.tail))
	return cmd.CID
}

// next waits for a completion and takes it.
func (m *machine) next(q int) nvme.Completion {
	m.t.Helper()
	base := uint64(acqAddr)
	if q > 0 {
		base = ioCQ
	}
	s := &m.queues[q]
	for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
		done, ok := nvme.PollCompletion((*[16]byte)(m.at(base+16*uint64(s.head), 16)), m.phases[q])
		if ok {
			if s.head++; s.head == s.size {
				s.head, m.phases[q] = 0, !m.phases[q]
			}
			m.c.Write32(nvme.RegDoorbells+8*uint32(q)+4, uint32(s.head))
			return done
		}
		if time.Now().After(end) {
			m.t.Fatal("no completion")
		}
	}
}

func (m *machine) do(q int, cmd nvme.Command, want nvme.Status) nvme.Completion {
	m.t.Helper()
	cid := m.submit(q, cmd)
	done := m.next(q)
	if done.CID != cid || done.Status != want || done.SQID != uint16(q) {
		m.t.Fatalf("%s: %+v, should be command %d, %v", nvme.CommandName(q == 0, cmd.Opcode), done, cid, want)
	}
	return done
}

func createCQ(id, size int, addr uint64) nvme.Command {
	c := nvme.Command{Opcode: nvme.AdminCreateCQ, CDW10: uint32(id) | uint32(size-1)<<16, CDW11: 3 | uint32(id)<<16}
	c.SetPRP(addr, 0)
	return c
}

func createSQ(id, size int, addr uint64) nvme.Command {
	c := nvme.Command{Opcode: nvme.AdminCreateSQ, CDW10: uint32(id) | uint32(size-1)<<16, CDW11: 1 | uint32(id)<<16}
	c.SetPRP(addr, 0)
	return c
}

// ioQueue makes queue 1.
func (m *machine) ioQueue(size int) {
	m.t.Helper()
	m.do(0, createCQ(1, size, ioCQ), nvme.StatusSuccess)
	m.do(0, createSQ(1, size, ioSQ), nvme.StatusSuccess)
	m.queues[1] = struct{ tail, head, size int }{size: size}
	m.phases[1] = true
}

func (m *machine) raised(vector int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.interrupts[vector]
}

func put64(b []byte, v uint64) { binary.LittleEndian.PutUint64(b, v) }
