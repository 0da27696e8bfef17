// Command kvspill keeps a KV cache that is larger than the memory of a GPU: blocks that are not needed are spilled to an NVMe
// disk, and come back when they are. Another host's GPU takes blocks over that are on the disk, and gives new ones to it. The
// disk and the RDMA devices read and write the GPUs' memory themselves.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"runtime"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/direct"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	blockSize = 64 << 10
	slots     = 32 // of the cache in the GPU's memory
	blocks    = 96 // of all requests: the others are on the disk
	staging   = 4  // slots for blocks that are only passing through
	taken     = 24 // blocks that the other host takes over
)

var ctx = context.Background()

func main() {
	bus := new(pci.Space)
	disk := newDisk(bus)
	alice, bob := newSide(), newSide()
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	here := newCache("soft:0", slots+staging, alice.pd)
	there := newCache("soft:1", taken, bob.pd)
	mem := try(disk.direct.AttachRegion(here.memory, direct.AttachConfig{}))

	cache := &spilling{disk: disk.direct, memory: mem, gpu: here}
	want := cache.fill()
	fmt.Printf("%d blocks are made: %d lie in the GPU's memory, %d were spilled\n", blocks, cache.resident(), cache.spilled)

	// A request goes on whose blocks were spilled first.
	good := 0
	for b := range 16 {
		if here.checksum(cache.need(b)) == want[b] {
			good++
		}
	}
	fmt.Printf("%d of 16 old blocks have come back, for which %d others were spilled\n", good, cache.evicted)

	// The other host takes over a request, and has changed its blocks when it gives them back.
	for i := range taken {
		cache.send(alice, 32+i, there, i)
	}
	good = 0
	for i := range taken {
		if there.checksum(i) == want[32+i] {
			good++
		}
		check(there.stream.Fill(there.slot(i), byte(200+i)))
		want[32+i] = there.checksum(i)
	}
	fmt.Printf("%d of %d blocks went from the disk to the other host's GPU\n", good, taken)
	for i := range taken {
		cache.receive(alice, 32+i, there, i)
	}
	good = 0
	for b := range blocks {
		if here.checksum(cache.need(b)) == want[b] {
			good++
		}
	}
	fmt.Printf("%d of %d blocks are as they should be\n", good, blocks)
	s := disk.direct.Stats()
	fmt.Printf("the disk has moved %d blocks, all in the GPU's memory: %t\n", s.Transfers, s.Bus == s.Transfers*blockSize)

	disk.close()
	here.close()
	there.close()
	alice.close()
	bob.close()
}

// spilling is a cache whose blocks lie in a slot of the GPU's memory or on the disk. Block b has a place of its own there.
type spilling struct {
	disk   *direct.Disk
	memory *direct.Memory
	gpu    *cache

	slotOf           [blocks]int // plus one; 0: it is on the disk
	blockIn          [slots]int  // plus one; 0: the slot is free
	next             int         // the slot that was filled longest ago
	spilled, evicted int
	passing          int // the next slot of staging
}

// fill makes all blocks, each with bytes of its own, and returns their checksums.
func (s *spilling) fill() (sums [blocks]uint32) {
	for b := range blocks {
		slot := s.take()
		s.slotOf[b], s.blockIn[slot] = slot+1, b+1
		check(s.gpu.stream.Fill(s.gpu.slot(slot), byte(b+1)))
		sums[b] = s.gpu.checksum(slot)
	}
	s.spilled, s.evicted = s.evicted, 0
	return sums
}

// take returns a slot that is free. If there is none, the block that came first is spilled.
func (s *spilling) take() int {
	slot := s.next
	s.next = (s.next + 1) % slots
	if b := s.blockIn[slot] - 1; b >= 0 {
		check(s.disk.Write(ctx, s.memory, uint64(slot)*blockSize, blockSize, int64(b)*blockSize))
		s.slotOf[b], s.blockIn[slot] = 0, 0
		s.evicted++
	}
	return slot
}

// need returns the slot of a block, which comes from the disk if it was spilled.
func (s *spilling) need(b int) int {
	if s.slotOf[b] == 0 {
		slot := s.take()
		check(s.disk.Read(ctx, s.memory, uint64(slot)*blockSize, blockSize, int64(b)*blockSize))
		s.slotOf[b], s.blockIn[slot] = slot+1, b+1
	}
	return s.slotOf[b] - 1
}

// send moves a block from the disk to another host's GPU: through a slot that belongs to no block, so that nothing is
// spilled for it.
func (s *spilling) send(a *side, b int, to *cache, slot int) {
	from := s.slotOf[b] - 1
	if from < 0 {
		from = s.pass()
		check(s.disk.Read(ctx, s.memory, uint64(from)*blockSize, blockSize, int64(b)*blockSize))
	}
	a.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{s.gpu.mr.SGE(from*blockSize, blockSize)},
		RemoteAddr: to.mr.Addr() + uint64(slot)*blockSize, RKey: to.mr.RKey()})
}

// receive moves a block from another host's GPU to the disk.
func (s *spilling) receive(a *side, b int, from *cache, slot int) {
	at := s.pass()
	a.do(verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{s.gpu.mr.SGE(at*blockSize, blockSize)},
		RemoteAddr: from.mr.Addr() + uint64(slot)*blockSize, RKey: from.mr.RKey()})
	check(s.disk.Write(ctx, s.memory, uint64(at)*blockSize, blockSize, int64(b)*blockSize))
	if old := s.slotOf[b] - 1; old >= 0 { // what lies in the cache is not true any more
		s.slotOf[b], s.blockIn[old] = 0, 0
	}
}

func (s *spilling) pass() int {
	s.passing = (s.passing + 1) % staging
	return slots + s.passing
}

// resident returns how many blocks lie in the GPU's memory.
func (s *spilling) resident() (n int) {
	for _, slot := range s.slotOf {
		if slot > 0 {
			n++
		}
	}
	return n
}

// cache is slots in the memory of a GPU, registered as a whole.
type cache struct {
	dev         *gpu.Device
	stream      *gpu.Stream
	memory, sum *gpu.Buffer
	mr          *verbs.MR
}

func newCache(name string, n int, pd *verbs.PD) *cache {
	dev := try(gpu.Open(name, nil))
	c := &cache{dev: dev, stream: try(dev.NewStream()), memory: try(dev.Alloc(uint64(n) * blockSize)), sum: try(dev.Alloc(4))}
	c.mr = try(pd.RegGPU(c.memory, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteRead))
	return c
}

func (c *cache) slot(i int) gpu.Mem { return c.memory.At(uint64(i)*blockSize, blockSize) }

// checksum has the GPU compute the checksum of a slot.
func (c *cache) checksum(i int) uint32 {
	b := make([]byte, 4)
	check(c.stream.Checksum(c.sum.All(), c.slot(i)))
	check(c.stream.Copy(gpu.Host(b), c.sum.All()))
	check(c.stream.Sync(ctx))
	return binary.LittleEndian.Uint32(b)
}

func (c *cache) close() {
	check(c.mr.Close())
	check(c.dev.Close())
}

// disk is an NVMe controller in software, and its driver.
type disk struct {
	model   *pci.Controller
	c       *driver.Controller
	storage *driver.Storage
	direct  *direct.Disk
}

func newDisk(bus *pci.Space) *disk {
	sub := try(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.io.verbena:spill"}))
	check(sub.AddNamespace(1, try(nvme.NewMemory(blocks*blockSize, 4096))))
	d := &disk{model: try(pci.New(pci.Config{Subsystem: sub, Bus: bus}))}
	d.c = try(driver.Open(d.model, driver.NewHostMemory(bus), nil))
	d.storage = try(d.c.Storage(ctx, try(d.c.Namespaces(ctx))[0], driver.StorageConfig{}))
	d.direct = try(direct.New(direct.Config{Storage: d.storage, Bus: bus}))
	return d
}

func (d *disk) close() {
	check(d.direct.Close())
	check(d.storage.Close())
	check(d.c.Close())
	d.model.Close()
}

// side is a queue pair and what it needs.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
}

func newSide() *side {
	s := &side{dev: try(verbs.Open("", nil))}
	s.pd, s.cq = try(s.dev.AllocPD()), try(s.dev.CreateCQ(16, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq, Cap: verbs.QPCap{MaxSendWR: 16, MaxSendSGE: 1}}))
	return s
}

// do executes a request, and waits for it.
func (s *side) do(wr verbs.SendWR) {
	wr.Flags |= verbs.SendSignaled
	try(s.qp.PostSend([]verbs.SendWR{wr}))
	wcs := make([]verbs.WC, 1)
	for try(s.cq.Poll(wcs)) == 0 {
		runtime.Gosched()
	}
	check(wcs[0].Err())
}

func (s *side) close() {
	check(s.qp.Close())
	check(s.cq.Close())
	check(s.pd.Close())
	check(s.dev.Close())
}

// try returns v, or ends the program if err is not nil.
func try[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
