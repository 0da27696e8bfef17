// Command gpustorage loads a file from an NVMe disk into the memory of a GPU and sends it to a peer's GPU, as GPUDirect
// Storage and GPUDirect RDMA do together: the disk writes into the GPU's memory, the RDMA device reads it there, and no byte
// passes through system memory.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/direct"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/p2p"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	fileSize  = 8 << 20
	fileStart = 1 << 20 // where on the disk the file begins
	part      = 1 << 20 // of the file: what the GPU's buffer holds
)

func main() {
	m := newMachine()
	disk := newDisk(m)
	alice, bob := newSide(), newSide()
	check(m.places.Set(alice.dev, m.adapter))
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	here := try(gpu.Open("soft:0", &gpu.Config{Distance: m.places.DistanceFunc(m.card)}))
	there := try(gpu.Open("soft:1", nil))
	target := try(there.Alloc(fileSize))

	load(m, disk, here, target, alice, bob)

	fmt.Printf("checksum on the disk %08x, at the peer's GPU %08x\n", disk.checksum(), checksum(there, target))
	s, moved := disk.direct.Stats(), here.Stats()
	fmt.Printf("the disk has moved %d MiB peer to peer, %d through system memory; evictions: %d\n", s.Bus>>20, (s.System+s.Copied)>>20, moved.Evictions)
	alice.close()
	bob.close()
	disk.close()
	check(here.Close())
	check(there.Close())
}

// load moves the file part by part: while the RDMA device sends one part from one buffer, the disk fills the other one. The
// program queues everything, and waits for the end only.
func load(m *machine, disk *disk, here *gpu.Device, target *gpu.Buffer, alice, bob *side) {
	ctx := context.Background()
	var memory [2]*direct.Memory
	var from [2]*verbs.MR
	for i := range memory {
		buf := try(here.Alloc(part))
		memory[i] = try(disk.direct.AttachRegion(buf, direct.AttachConfig{Owner: &m.card}))
		from[i] = try(alice.pd.RegGPU(buf, 0))
	}
	to := try(bob.pd.RegGPU(target, verbs.AccessLocalWrite|verbs.AccessRemoteWrite))
	fmt.Printf("the disk reaches the GPU: %v\n", memory[0].Path())

	var sent [2]*gpu.NamedFence // when a buffer may be filled again
	for i := range fileSize / part {
		k := i % 2
		t := direct.Transfer{Memory: memory[k], Length: part, Offset: fileStart + int64(i)*part}
		if sent[k] != nil {
			t.Wait = sent[k]
		}
		filled := gpu.NewFence(fmt.Sprintf("part %d is in the GPU's memory", i))
		t.Done, sent[k] = filled, gpu.NewFence(fmt.Sprintf("part %d is sent", i))
		check(disk.direct.Start(ctx, t))
		try(alice.qp.PostSend([]verbs.SendWR{
			{Op: verbs.OpWaitFence, Fence: filled},
			{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{from[k].SGE(0, part)}, RemoteAddr: to.Addr() + uint64(i)*part, RKey: to.RKey()},
			{Op: verbs.OpSignalFence, Fence: sent[k]},
		}))
	}
	for k := range sent {
		check(sent[k].Wait(ctx))
		check(memory[k].Close())
		check(from[k].Close())
	}
	check(to.Close())
}

// machine has a GPU, a disk and an RDMA device behind one switch.
type machine struct {
	*p2p.Topology
	places              *p2p.Places
	card, disk, adapter p2p.Address
}

func newMachine() *machine {
	b := p2p.NewBuilder(p2p.CPU{Vendor: "GenuineIntel", Family: 6, Model: 106})
	ports := b.HostBridge(p2p.ID{Vendor: 0x8086, Device: 0x09a2}).RootPort(nil).Switch(3, nil)
	bar := p2p.BAR{Index: 0, Size: gpu.DefaultVRAM, Is64: true, Prefetchable: true}
	card := ports[0].Endpoint("card0", p2p.ID{Vendor: 0x10de, Device: 0x2335}, p2p.ClassGPU, bar)
	disk := ports[1].Endpoint("nvme0", p2p.ID{Vendor: 0x1b36, Device: 0x0010}, p2p.ClassNVMe)
	adapter := ports[2].Endpoint("verbena0", p2p.ID{Vendor: 0x1b36, Device: 0x0100}, 0x020700)
	m := &machine{Topology: try(b.Build()), card: card.Address(), disk: disk.Address(), adapter: adapter.Address()}
	m.places = p2p.NewPlaces(m.Topology)
	return m
}

// disk is an NVMe controller in software with a file on its disk, and the driver.
type disk struct {
	ram     nvme.Namespace
	model   *pci.Controller
	c       *driver.Controller
	storage *driver.Storage
	direct  *direct.Disk
}

func newDisk(m *machine) *disk {
	ctx, bus := context.Background(), new(pci.Space)
	d := &disk{ram: try(nvme.NewMemory(16<<20, 4096))}
	file := make([]byte, fileSize)
	for i := 0; i < len(file); i += 4 {
		binary.LittleEndian.PutUint32(file[i:], uint32(i))
	}
	try(d.ram.WriteAt(file, fileStart))
	sub := try(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.io.verbena:file"}))
	check(sub.AddNamespace(1, d.ram))
	d.model = try(pci.New(pci.Config{Subsystem: sub, Bus: bus}))
	d.c = try(driver.Open(d.model, driver.NewHostMemory(bus), nil))
	d.storage = try(d.c.Storage(ctx, try(d.c.Namespaces(ctx))[0], driver.StorageConfig{}))
	d.direct = try(direct.New(direct.Config{Storage: d.storage, Bus: bus, Topology: m.Topology, Places: m.places, At: m.disk}))
	return d
}

// checksum has a GPU compute the checksum of the file as it is on the disk.
func (d *disk) checksum() uint32 {
	file := make([]byte, fileSize)
	try(d.ram.ReadAt(file, fileStart))
	dev := try(gpu.Open("soft:2", nil))
	buf := try(dev.Alloc(fileSize))
	try(buf.WriteAt(file, 0))
	sum := checksum(dev, buf)
	check(dev.Close())
	return sum
}

func (d *disk) close() {
	check(d.direct.Close())
	check(d.storage.Close())
	check(d.c.Close())
	d.model.Close()
}

// checksum has a GPU compute the checksum of its memory.
func checksum(dev *gpu.Device, buf *gpu.Buffer) uint32 {
	b, stream, sum := make([]byte, 4), try(dev.NewStream()), try(dev.Alloc(4))
	check(stream.Checksum(sum.All(), buf.All()))
	check(stream.Copy(gpu.Host(b), sum.All()))
	check(stream.Sync(context.Background()))
	return binary.LittleEndian.Uint32(b)
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
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq, Cap: verbs.QPCap{MaxSendWR: 32, MaxSendSGE: 1}}))
	return s
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
