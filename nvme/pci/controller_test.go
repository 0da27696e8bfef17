package pci

import (
	"errors"
	"runtime"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/nvme"
)

func TestRegistersAtRest(t *testing.T) {
	m := newMachine(t, Config{QueueEntries: 77, CMB: &CMB{Memory: make([]byte, 1<<20), Offset: 8192}})
	c := nvme.CAP(m.c.Read64(nvme.RegCAP))
	if c.MaxEntries() != 77 || c&nvme.CAPNVM == 0 || c&nvme.CAPContiguous == 0 || c&nvme.CAPCMB == 0 || c.MaxPage() != 16 {
		t.Errorf("CAP is %#x", uint64(c))
	}
	if v := m.c.Read32(nvme.RegVS); v != 0x10400 {
		t.Errorf("VS is %#x", v)
	}
	for _, off := range []uint32{nvme.RegCC, nvme.RegCSTS, nvme.RegAQA, nvme.RegCMBLOC, nvme.RegCMBSZ, 0x40, 0x1000, 0xfffffffc, 2} {
		if v := m.c.Read32(off); v != 0 {
			t.Errorf("register %#x is %#x", off, v)
		}
	}
	m.c.Write32(0x1000, 1) // a doorbell of a controller that is not enabled
	m.c.Write32(nvme.RegCAP, 1)
	m.c.Write64(nvme.RegASQ, 0x123456789abcdfff)
	if v := m.c.Read64(nvme.RegASQ); v != 0x123456789abcd000 {
		t.Errorf("ASQ is %#x", v)
	}
	m.c.Close()
	m.c.Write32(nvme.RegCC, 1)
	if v := m.c.Read64(nvme.RegCAP); v != ^uint64(0) {
		t.Errorf("after Close, CAP is %#x", v)
	}
}

func TestCMBRegisters(t *testing.T) {
	m := newMachine(t, Config{CMB: &CMB{Memory: make([]byte, 1<<20), Offset: 8192, Without: nvme.CMBSZCQ}})
	loc := func() nvme.CMBLOC { return nvme.CMBLOC(m.c.Read32(nvme.RegCMBLOC)) }
	sz := func() nvme.CMBSZ { return nvme.CMBSZ(m.c.Read32(nvme.RegCMBSZ)) }
	m.c.Write64(nvme.RegCMBMSC, nvme.CMBMSCRegisters)
	if sz().Size() != 1<<20 || sz()&0x1f != nvme.CMBSZAll&^nvme.CMBSZCQ || loc().BAR() != 2 || loc().Offset(sz()) != 8192 {
		t.Errorf("CMBSZ %#x, CMBLOC %#x", uint32(sz()), uint32(loc()))
	}
	m.c.Write64(nvme.RegCMBMSC, 0)
	if sz() != 0 || loc() != 0 {
		t.Error("readable without CRE")
	}
	decoded := func(addr uint64) bool {
		_, at := m.c.bytes(addr, 1)
		return at == ownCMB
	}
	base := uint64(0x700000000000)
	m.c.Write64(nvme.RegCMBMSC, base|nvme.CMBMSCEnable)
	if !decoded(base) || !decoded(base+1<<20-1) || decoded(base+1<<20) || decoded(base-1) {
		t.Error("decodes other addresses than it should")
	}
	if b, _ := m.c.bytes(base+1<<20-10, 100); len(b) != 10 {
		t.Errorf("%d bytes at the end", len(b))
	}
	m.c.Write64(nvme.RegCMBMSC, ^uint64(0xfff)|nvme.CMBMSCEnable)
	if m.c.Read32(nvme.RegCMBSTS) != 1 || decoded(^uint64(0xfff)) {
		t.Error("an address where the buffer does not fit is taken")
	}
	m.c.Write64(nvme.RegCMBMSC, ^uint64(1<<20-1)|nvme.CMBMSCEnable)
	if m.c.Read32(nvme.RegCMBSTS) != 0 || !decoded(^uint64(0)) {
		t.Error("the last addresses")
	}
	// In halves, and across a reset of the controller.
	m.c.Write32(nvme.RegCMBMSC, 3)
	m.c.Write32(nvme.RegCMBMSC+4, 0x7000)
	m.enable()
	m.disable()
	if !decoded(base) || m.c.Read64(nvme.RegCMBMSC) != base|3 {
		t.Errorf("CMBMSC is %#x", m.c.Read64(nvme.RegCMBMSC))
	}
	// But not across a reset of the subsystem.
	m.c.Write32(nvme.RegNSSR, 12345)
	m.c.Write32(nvme.RegNSSR, nvme.NSSRMagic)
	m.wait(nvme.CSTSSubsystemReset, nvme.CSTSSubsystemReset)
	if decoded(base) || m.c.Read32(nvme.RegAQA) != 0 {
		t.Error("registers outlive a subsystem reset")
	}
	m.c.Write32(nvme.RegCSTS, uint32(nvme.CSTSSubsystemReset))
	m.wait(nvme.CSTSSubsystemReset, 0)
}

func TestConfigErrors(t *testing.T) {
	sub := must(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.x"}))(t)
	for i, cfg := range []Config{
		{}, {Subsystem: sub}, {Bus: &Space{}},
		{Subsystem: sub, Bus: &Space{}, Vectors: 4000}, {Subsystem: sub, Bus: &Space{}, QueueEntries: 1},
		{Subsystem: sub, Bus: &Space{}, MDTS: 99},
		{Subsystem: sub, Bus: &Space{}, CMB: &CMB{}},
		{Subsystem: sub, Bus: &Space{}, CMB: &CMB{Memory: make([]byte, 5000)}},
		{Subsystem: sub, Bus: &Space{}, CMB: &CMB{Memory: make([]byte, 8192), BAR: 7}},
		{Subsystem: sub, Bus: &Space{}, CMB: &CMB{Memory: make([]byte, 8192), Offset: 100}},
		{Subsystem: sub, Bus: &Space{}, CMB: &CMB{Memory: make([]byte, 8192), Offset: 1 << 40}},
		{Subsystem: sub, Bus: &Space{}, CMB: &CMB{Memory: make([]byte, 8192), Legacy: true, Address: ^uint64(0xfff)}},
	} {
		if _, err := New(cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("configuration %d: %v", i, err)
		}
	}
}

func TestEnableErrors(t *testing.T) {
	good := uint32(nvme.MakeCC(12))
	for what, set := range map[string]func(c *Controller) uint32{
		"queues of one entry":      func(c *Controller) uint32 { c.Write32(nvme.RegAQA, 0); return good },
		"no memory":                func(c *Controller) uint32 { c.Write64(nvme.RegASQ, 0x1000); return good },
		"memory that ends":         func(c *Controller) uint32 { c.Write64(nvme.RegACQ, memBase+memSize-0x1000); return good | 1<<7 },
		"the last page":            func(c *Controller) uint32 { c.Write64(nvme.RegASQ, ^uint64(0xfff)); return good },
		"pages that are too large": func(c *Controller) uint32 { return good | 5<<7 },
		"queue not at a page":      func(c *Controller) uint32 { c.Write64(nvme.RegASQ, asqAddr+0x1000); return good | 1<<7 },
		"another command set":      func(c *Controller) uint32 { return good | 1<<4 },
		"another arbitration":      func(c *Controller) uint32 { return good | 1<<11 },
	} {
		t.Run(what, func(t *testing.T) {
			m := newMachine(t, Config{})
			m.c.Write32(nvme.RegAQA, 0x03ff03ff)
			m.c.Write64(nvme.RegASQ, asqAddr)
			m.c.Write64(nvme.RegACQ, memBase+0x200000)
			m.c.Write32(nvme.RegCC, set(m.c))
			m.wait(nvme.CSTSReady|nvme.CSTSFatal, nvme.CSTSFatal)
			m.disable()
			m.enable() // it can be tried again
		})
	}
}

func TestQueueCommands(t *testing.T) {
	m := newMachine(t, Config{IOQueues: 2, QueueEntries: 8, Vectors: 2, CMB: &CMB{Memory: make([]byte, 8192), Without: nvme.CMBSZSQ, Restrict: nvme.CMBLOCQueueMixed}})
	const cmbAt = memBase + memSize // right behind the memory
	m.c.Write64(nvme.RegCMBMSC, cmbAt|nvme.CMBMSCEnable)
	m.enable()
	with := func(c nvme.Command, change func(*nvme.Command)) nvme.Command { change(&c); return c }
	for _, tt := range []struct {
		what string
		cmd  nvme.Command
		want nvme.Status
	}{
		{"queue 0", createCQ(0, 4, ioCQ), nvme.StatusInvalidQueueID | dnr},
		{"queue 3 of 2", createCQ(3, 4, ioCQ), nvme.StatusInvalidQueueID | dnr},
		{"one entry", createCQ(1, 1, ioCQ), nvme.StatusInvalidQueueSize | dnr},
		{"9 entries of 8", createCQ(1, 9, ioCQ), nvme.StatusInvalidQueueSize | dnr},
		{"not at a page", createCQ(1, 4, ioCQ+16), nvme.StatusPRPOffset | dnr},
		{"nowhere", createCQ(1, 4, 0), nvme.StatusInvalidField | dnr},
		{"at the end of addresses", createCQ(1, 8, ^uint64(0xfff)), nvme.StatusInvalidField | dnr},
		{"not contiguous", with(createCQ(1, 4, ioCQ), func(c *nvme.Command) { c.CDW11 = 2 }), nvme.StatusInvalidField | dnr},
		{"by SGL", with(createCQ(1, 4, ioCQ), func(c *nvme.Command) { c.Flags = nvme.FlagSGL }), nvme.StatusInvalidField | dnr},
		{"vector 2 of 2", with(createCQ(1, 4, ioCQ), func(c *nvme.Command) { c.CDW11 = 3 | 2<<16 }), nvme.StatusInvalidVector | dnr},
		{"in the CMB", with(createCQ(2, 4, cmbAt), func(c *nvme.Command) { c.CDW11 = 1 }), nvme.StatusSuccess},
		{"commands in the CMB", createSQ(2, 4, cmbAt), nvme.StatusInvalidCMBUse | dnr},
		{"a good one", createCQ(1, 4, ioCQ), nvme.StatusSuccess},
		{"again", createCQ(1, 4, ioCQ), nvme.StatusInvalidQueueID | dnr},
		{"no completion queue", with(createSQ(1, 4, ioSQ), func(c *nvme.Command) { c.CDW11 = 1 }), nvme.StatusInvalidQueueID | dnr},
		{"completion queue 3 of 2", with(createSQ(1, 4, ioSQ), func(c *nvme.Command) { c.CDW11 = 1 | 3<<16 }), nvme.StatusInvalidQueueID | dnr},
		{"a good one", createSQ(1, 4, ioSQ), nvme.StatusSuccess},
		{"again", createSQ(1, 4, ioSQ), nvme.StatusInvalidQueueID | dnr},
		{"two for one completion queue", with(createSQ(2, 4, ioSQ+0x1000), func(c *nvme.Command) { c.CDW11 = 1 | 1<<16 }), nvme.StatusSuccess},
		{"delete the completion queue first", nvme.Command{Opcode: nvme.AdminDeleteCQ, CDW10: 1}, nvme.StatusInvalidQueueDeletion},
		{"delete", nvme.Command{Opcode: nvme.AdminDeleteSQ, CDW10: 1}, nvme.StatusSuccess},
		{"delete again", nvme.Command{Opcode: nvme.AdminDeleteSQ, CDW10: 1}, nvme.StatusInvalidQueueID | dnr},
		{"one is left", nvme.Command{Opcode: nvme.AdminDeleteCQ, CDW10: 1}, nvme.StatusInvalidQueueDeletion},
		{"delete the other", nvme.Command{Opcode: nvme.AdminDeleteSQ, CDW10: 2}, nvme.StatusSuccess},
		{"delete the completion queue", nvme.Command{Opcode: nvme.AdminDeleteCQ, CDW10: 1}, nvme.StatusSuccess},
		{"a completion queue that was deleted", createSQ(1, 4, ioSQ), nvme.StatusInvalidCQ | dnr},
		{"delete the admin queues", nvme.Command{Opcode: nvme.AdminDeleteSQ, CDW10: 0}, nvme.StatusInvalidQueueID | dnr},
		{"delete the admin queues", nvme.Command{Opcode: nvme.AdminDeleteCQ, CDW10: 0}, nvme.StatusInvalidQueueID | dnr},
	} {
		t.Run(tt.what, func(t *testing.T) { m.t = t; m.do(0, tt.cmd, tt.want) })
	}
	m.t = t
	m.disable()
	m.c.Write32(nvme.RegCC, uint32(nvme.MakeCC(12)&^0xff0000))
	m.wait(nvme.CSTSReady, nvme.CSTSReady)
	m.queues[0] = struct{ tail, head, size int }{size: 4}
	m.phases[0] = true
	clear(m.at(acqAddr, 64))
	m.do(0, createCQ(1, 4, ioCQ), nvme.StatusInvalidQueueSize|dnr) // CC has no sizes of entries
}

// A queue partly in the CMB is refused if CMBLOC does not allow it.
func TestQueueHalfInCMB(t *testing.T) {
	for _, restrict := range []nvme.CMBLOC{0, nvme.CMBLOCQueueMixed} {
		m := newMachine(t, Config{CMB: &CMB{Memory: make([]byte, 8192), Restrict: restrict}})
		m.c.Write64(nvme.RegCMBMSC, memBase+memSize|nvme.CMBMSCEnable)
		m.enable()
		want := nvme.StatusSuccess
		if restrict != 0 {
			want = nvme.StatusInvalidCMBUse | dnr
		}
		m.do(0, createCQ(1, 512, memBase+memSize-4096), want)
	}
}

// A completion queue that is full holds its commands back until the host takes entries.
func TestFullCompletionQueue(t *testing.T) {
	m := newMachine(t, Config{})
	m.enable()
	m.do(0, createCQ(1, 2, ioCQ), nvme.StatusSuccess)
	m.do(0, createSQ(1, 8, ioSQ), nvme.StatusSuccess)
	m.queues[1] = struct{ tail, head, size int }{size: 8}
	for range 5 {
		m.submit(1, nvme.Command{Opcode: nvme.IOFlush, NSID: 1})
	}
	m.queues[1].size = 2 // for the completion queue
	m.phases[1] = true
	for i := range 5 {
		if done := m.next(1); done.Status != nvme.StatusSuccess || done.CID != m.cid-4+uint16(i) {
			t.Fatalf("%+v", done)
		}
	}
	// And one that nobody takes from is deleted with its queue.
	m.queues[1].size, m.queues[1].tail = 8, 5
	for range 3 {
		m.submit(1, nvme.Command{Opcode: nvme.IOFlush, NSID: 1})
	}
	m.do(0, nvme.Command{Opcode: nvme.AdminDeleteSQ, CDW10: 1}, nvme.StatusSuccess)
	m.do(0, nvme.Command{Opcode: nvme.AdminDeleteCQ, CDW10: 1}, nvme.StatusSuccess)
}

func TestInterrupts(t *testing.T) {
	m := newMachine(t, Config{})
	m.enable()
	m.ioQueue(4)
	until := func(what string, vector, n int) {
		t.Helper()
		for m.raised(vector) < n {
			runtime.Gosched()
		}
		if got := m.raised(vector); got != n {
			t.Errorf("%s: %d interrupts, should be %d", what, got, n)
		}
	}
	until("admin commands", 0, 2)
	m.do(1, nvme.Command{Opcode: nvme.IOFlush, NSID: 1}, nvme.StatusSuccess)
	until("a command", 1, 1)
	m.c.Write32(nvme.RegINTMS, 1<<1)
	if v := m.c.Read32(nvme.RegINTMC); v != 2 {
		t.Errorf("mask %#x", v)
	}
	m.do(1, nvme.Command{Opcode: nvme.IOFlush, NSID: 1}, nvme.StatusSuccess)
	m.do(0, nvme.Command{Opcode: nvme.AdminAbort}, nvme.StatusSuccess)
	until("another vector", 0, 3)
	// One that the host has not taken when it unmasks.
	m.submit(1, nvme.Command{Opcode: nvme.IOFlush, NSID: 1})
	s := m.queues[1]
	for {
		if _, ok := nvme.PollCompletion((*[16]byte)(m.at(ioCQ+16*uint64(s.head), 16)), m.phases[1]); ok {
			break
		}
		runtime.Gosched()
	}
	m.c.Write32(nvme.RegINTMC, 1<<1)
	until("unmasked", 1, 2)
}

// What a host has not taken is lost in a reset; a shutdown ends with a flush.
func TestShutdown(t *testing.T) {
	m := newMachine(t, Config{})
	m.enable()
	m.c.Write32(nvme.RegCC, uint32(nvme.MakeCC(12)|nvme.CCShutdownNormal))
	m.wait(nvme.CSTSShutdownMask|nvme.CSTSReady, nvme.CSTSShutdownDone|nvme.CSTSReady)
	m.disable()
	m.wait(nvme.CSTSShutdownMask, 0)
	m.enable()
	m.wait(nvme.CSTSShutdownMask, 0)
	m.c.Write32(nvme.RegCC, uint32(nvme.CCShutdownAbrupt)) // disabled and shut down at once
	m.wait(nvme.CSTSShutdownMask|nvme.CSTSReady, nvme.CSTSShutdownDone)
}

// The memory of a queue goes: a fatal error, and the controller can be reset.
func TestQueueMemoryGone(t *testing.T) {
	m := newMachine(t, Config{})
	extra := make([]byte, 8192)
	check(t, m.space.Add(0x40000000, extra))
	m.enable()
	m.do(0, createCQ(1, 4, 0x40000000), nvme.StatusSuccess)
	m.do(0, createSQ(1, 4, ioSQ), nvme.StatusSuccess)
	m.queues[1].size = 4
	check(t, m.space.Remove(0x40000000))
	m.submit(1, nvme.Command{Opcode: nvme.IOFlush, NSID: 1})
	m.wait(nvme.CSTSFatal, nvme.CSTSFatal)
	m.disable()
	m.enable()
	m.do(0, nvme.Command{Opcode: nvme.AdminAbort}, nvme.StatusSuccess)
}

// Another controller takes the number while this one is reset.
func TestNumberTaken(t *testing.T) {
	m := newMachine(t, Config{CNTLID: 9})
	m.enable()
	m.c.mu.Lock()
	m.c.ctrl.Close()
	m.c.mu.Unlock()
	thief := must(m.sub.NewController(nvme.ControllerConfig{CNTLID: 9}))(t)
	m.c.Write32(nvme.RegCC, 0)
	m.wait(nvme.CSTSReady, 0)
	m.c.Write32(nvme.RegCC, uint32(nvme.MakeCC(12)))
	m.wait(nvme.CSTSFatal, nvme.CSTSFatal)
	thief.Close()
	m.disable()
	m.enable()
}

// Close stops the queues whatever the owner is about to do: here it often comes while the owner looks for the last time
// whether there is more to do.
func TestCloseStopsQueues(t *testing.T) {
	m := newMachine(t, Config{})
	for range 2000 {
		m.enable()
		m.c.Close()
		m.c.mu.Lock()
		left := len(m.c.sqs)
		m.c.mu.Unlock()
		if left != 0 {
			t.Fatalf("%d submission queues are left after Close", left)
		}
		m.c = must(New(Config{Subsystem: m.sub, Bus: &m.space}))(t)
	}
}

// A tail that would overtake the head is no tail.
func TestTailOvertakes(t *testing.T) {
	s := &submissionQueue{size: 8, kick: make(chan struct{}, 1)}
	for _, step := range []struct {
		head, tail uint32
		want       bool
	}{{0, 5, true}, {0, 4, false}, {0, 7, true}, {0, 0, false}, {1, 0, true}, {1, 1, false}, {5, 4, true}, {5, 5, false}, {5, 8, false}, {4, 3, true}, {4, 2, false}} {
		s.head.Store(step.head)
		if got := s.ring(step.tail); got != step.want {
			t.Errorf("head %d, tail %d: %v", step.head, step.tail, got)
		}
	}
}
