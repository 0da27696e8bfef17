package main

// NVMe. The executor alone, over memory; and from a disk through the memory buffer of its controller to a host, by RDMA. That
// controller is software, and its disk is as slow as one is, so that there is something to overlap.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/fabrics"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	nvmeDisk   = 64 << 20
	nvmePiece  = 128 << 10
	nvmeDepth  = 16
	nvmeSpeed  = 1 << 30 // bytes that the disk moves in a second
	nvmeCMB    = 32 << 20
	nvmeName   = "nqn.2026-01.io.verbena:bench"
	nvmeBus    = 0x4000000000
	nvmeTarget = "127.0.83.1:4420"
	nvmeHost   = "127.0.83.2"
)

// slowDisk is a disk in memory with the speed of a real one.
type slowDisk struct {
	nvme.Namespace
	mu   sync.Mutex // guards free
	free time.Time  // when the disk has done what it was asked for
}

// nvmeSlack is how late a request may be and the disk still was busy: a sleep ends up to a millisecond late, which a disk
// with requests waiting makes nothing of.
const nvmeSlack = 5 * time.Millisecond

// spend waits until the disk has moved n bytes more.
func (d *slowDisk) spend(n int) {
	took := time.Duration(n) * time.Second / nvmeSpeed
	d.mu.Lock()
	if now := time.Now(); now.Sub(d.free) > nvmeSlack {
		d.free = now
	}
	d.free = d.free.Add(took)
	until := d.free
	d.mu.Unlock()
	time.Sleep(time.Until(until))
}

func (d *slowDisk) ReadAt(p []byte, off int64) (int, error) {
	d.spend(len(p))
	return d.Namespace.ReadAt(p, off)
}

// noDisk reads nothing: what a host gets from it was in the buffer.
type noDisk struct{ nvme.Namespace }

func (noDisk) ReadAt(p []byte, _ int64) (int, error) { return len(p), nil }

// nvmeRig is a controller with a disk, a target that serves it, and a host.
type nvmeRig struct {
	storage *driver.Storage
	near    []byte // in the controller's memory buffer
	disk    *fabrics.Disk
	none    *fabrics.Disk // noDisk
}

func (b *bench) newNVMe() (*nvmeRig, error) {
	ctx := context.Background()
	memory, err := nvme.NewMemory(nvmeDisk, 4096)
	if err != nil {
		return nil, err
	}
	disks, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nvmeName + ":inner"})
	if err != nil {
		return nil, err
	}
	if err := disks.AddNamespace(1, &slowDisk{Namespace: memory}); err != nil {
		return nil, err
	}
	bus, cmb := new(pci.Space), make([]byte, nvmeCMB)
	model, err := pci.New(pci.Config{Subsystem: disks, Bus: bus, CMB: &pci.CMB{Memory: cmb}})
	if err != nil {
		return nil, err
	}
	b.later(func() error { model.Close(); return nil })
	c, err := driver.Open(model, driver.NewHostMemory(bus), &driver.Config{MapBAR: func(int, uint64, uint64) (driver.Memory, error) {
		return driver.Memory{Bytes: cmb, Addr: nvmeBus}, nil
	}})
	if err != nil {
		return nil, err
	}
	b.later(c.Close)
	list, err := c.Namespaces(ctx)
	if err != nil {
		return nil, err
	}
	r := new(nvmeRig)
	if r.storage, err = c.Storage(ctx, list[0], driver.StorageConfig{Queues: 8, CMB: true}); err != nil {
		return nil, err
	}
	b.later(r.storage.Close)
	var release func()
	if r.near, release, err = r.storage.Alloc(nvmeDepth * nvmePiece); err != nil {
		return nil, err
	}
	b.later(func() error { release(); return nil })
	sub, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nvmeName})
	if err != nil {
		return nil, err
	}
	if err := sub.AddNamespace(1, r.storage); err != nil {
		return nil, err
	}
	if err := sub.AddNamespace(2, noDisk{memory}); err != nil {
		return nil, err
	}
	t, err := fabrics.Listen(ctx, nvmeTarget, fabrics.TargetConfig{Subsystems: []*nvme.Subsystem{sub}, Buffers: r.storage, InCapsule: -1, Workers: nvmeDepth})
	if err != nil {
		return nil, err
	}
	b.later(t.Close)
	dev, err := verbs.Open("", &verbs.Config{Addrs: []netip.Addr{netip.MustParseAddr(nvmeHost)}})
	if err != nil {
		return nil, err
	}
	b.later(dev.Close)
	h, err := fabrics.Dial(ctx, nvmeTarget, fabrics.HostConfig{NQN: nvmeName, Queues: 2, Config: cm.Config{Device: dev}})
	if err != nil {
		return nil, err
	}
	b.later(h.Close)
	if r.disk, err = h.Namespace(ctx, 1); err != nil {
		return nil, err
	}
	r.none, err = h.Namespace(ctx, 2)
	return r, err
}

// together reads pieces by nvmeDepth goroutines for a while, and returns MB/s.
func together(d time.Duration, read func(g int, off int64) error) (float64, error) {
	var all sync.WaitGroup
	var n atomic.Int64
	errs := make([]error, nvmeDepth)
	start := time.Now()
	for g := range nvmeDepth {
		all.Go(func() {
			for i := 0; time.Since(start) < d && errs[g] == nil; i++ {
				off := int64((i*nvmeDepth+g)*nvmePiece) % nvmeDisk
				errs[g] = read(g, off)
				n.Add(nvmePiece)
			}
		})
	}
	all.Wait()
	return float64(n.Load()) / 1e6 / time.Since(start).Seconds(), errors.Join(errs...)
}

// nvmePaths measures the two legs alone, and the whole way.
func (b *bench) nvmePaths() ([]contender, error) {
	r, err := b.newNVMe()
	if err != nil {
		return nil, err
	}
	room := make([][]byte, nvmeDepth)
	for i := range room {
		room[i] = make([]byte, nvmePiece)
	}
	run := func(d time.Duration) ([]float64, error) {
		first, err := together(d, func(g int, off int64) error {
			_, err := r.storage.ReadAt(r.near[g*nvmePiece:(g+1)*nvmePiece], off)
			return err
		})
		if err != nil {
			return nil, err
		}
		second, err := together(d, func(g int, off int64) error {
			_, err := r.none.ReadAt(room[g], off)
			return err
		})
		if err != nil {
			return nil, err
		}
		whole, err := together(d, func(g int, off int64) error {
			_, err := r.disk.ReadAt(room[g], off)
			return err
		})
		return []float64{first, second, whole, whole / min(first, second)}, err
	}
	return []contender{{run: run, rows: []row{
		{name: "disk to the controller's buffer", unit: "MB/s"},
		{name: "buffer to host, by RDMA", unit: "MB/s"},
		{name: "disk to buffer to host", unit: "MB/s"},
		{name: "the whole way, of the slower part", unit: "", goal: &goal{"≥", 0.9}},
	}}}, nil
}

const (
	nvmeBlocks   = 2048 // of 4 KiB: as much as the cache of a core holds, or a little more
	nvmePatterns = 16
)

// nvmeBlockTest is blocks of 4 KiB that are written and read at random, every other time. Each block begins with a stamp, which is
// new with each write, and goes on with a pattern. All of what is read is compared with them.
type nvmeBlockTest struct {
	patterns, expected [nvmePatterns][]byte
	stamps             [nvmeBlocks]uint64 // what was written last
	in                 []byte
	write, read        func(lba uint64, b []byte) error
	next, random       uint64
}

func newNVMeBlockTest(write, read func(lba uint64, b []byte) error) (*nvmeBlockTest, error) {
	t := &nvmeBlockTest{in: make([]byte, 4096), write: write, read: read, random: 88172645463325252}
	for i := range t.patterns {
		t.patterns[i] = make([]byte, 4096)
		for j := range t.patterns[i] {
			t.patterns[i][j] = byte(t.chance(256))
		}
		t.expected[i] = bytes.Clone(t.patterns[i])
	}
	for lba := range uint64(nvmeBlocks) {
		if err := t.writeBlock(lba); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func (t *nvmeBlockTest) chance(n uint64) uint64 {
	t.random ^= t.random << 13
	t.random ^= t.random >> 7
	t.random ^= t.random << 17
	return t.random % n
}

func (t *nvmeBlockTest) writeBlock(lba uint64) error {
	t.next++
	t.stamps[lba] = t.next
	b := t.patterns[t.next%nvmePatterns]
	binary.LittleEndian.PutUint64(b, t.next)
	return t.write(lba, b)
}

func (t *nvmeBlockTest) readBlock(lba uint64) error {
	if err := t.read(lba, t.in); err != nil {
		return err
	}
	stamp := t.stamps[lba]
	if binary.LittleEndian.Uint64(t.in) != stamp || !bytes.Equal(t.in[8:], t.expected[stamp%nvmePatterns][8:]) {
		return fmt.Errorf("block %d has other bytes", lba)
	}
	return nil
}

// run writes and reads for a while, and returns how often in a second.
func (t *nvmeBlockTest) run(d time.Duration) ([]float64, error) {
	n, start := 0, time.Now()
	for time.Since(start) < d {
		for range 64 {
			if err := t.writeBlock(t.chance(nvmeBlocks)); err != nil {
				return nil, err
			}
			if err := t.readBlock(t.chance(nvmeBlocks)); err != nil {
				return nil, err
			}
		}
		n += 128
	}
	return []float64{float64(n) / time.Since(start).Seconds()}, nil
}

// nvmeExecutor measures commands from 64 bytes to a completion, and beside them copies of the same bytes.
func (b *bench) nvmeExecutor() ([]contender, error) {
	memory, err := nvme.NewMemory(nvmeBlocks*4096, 4096)
	if err != nil {
		return nil, err
	}
	sub, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nvmeName})
	if err != nil {
		return nil, err
	}
	if err := sub.AddNamespace(1, memory); err != nil {
		return nil, err
	}
	c, err := sub.NewController(nvme.ControllerConfig{})
	if err != nil {
		return nil, err
	}
	b.later(func() error { c.Close(); return nil })
	data := make([][]byte, 1)
	execute := func(opcode uint8) func(lba uint64, b []byte) error {
		return func(lba uint64, b []byte) error {
			var raw [64]byte
			asked := nvme.Command{Opcode: opcode, NSID: 1}
			asked.SetLBA(lba, 1)
			asked.Put(&raw)
			cmd := nvme.ParseCommand(&raw)
			if n, _, st := c.Transfer(false, &cmd); st != nvme.StatusSuccess || n != len(b) {
				return fmt.Errorf("%d bytes, %v", n, st)
			}
			data[0] = b
			if done, ok := c.Execute(false, &cmd, data); !ok || done.Status != nvme.StatusSuccess {
				return fmt.Errorf("%v", done.Status)
			}
			return nil
		}
	}
	commands, err := newNVMeBlockTest(execute(nvme.IOWrite), execute(nvme.IORead))
	if err != nil {
		return nil, err
	}
	plain := make([]byte, nvmeBlocks*4096)
	copies, err := newNVMeBlockTest(
		func(lba uint64, b []byte) error { copy(plain[lba*4096:], b); return nil },
		func(lba uint64, b []byte) error { copy(b, plain[lba*4096:]); return nil })
	if err != nil {
		return nil, err
	}
	return []contender{
		{run: copies.run, rows: []row{{name: "copy(), with the data compared", unit: "IOPS"}}},
		{run: commands.run, rows: []row{{name: "the executor, with the data compared", unit: "IOPS", goal: &goal{"≥", 1e6}}}},
	}, nil
}
