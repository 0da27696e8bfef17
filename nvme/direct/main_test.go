package direct

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/p2p"
)

func TestMain(m *testing.M) {
	dmabuf.CheckLocks(true)
	goleak.VerifyTestMain(m)
}

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
	return rand.New(rand.NewPCG(s, 2))
}

func longTime(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// fill fills b, a multiple of 8 bytes.
func fill(b []byte, r *rand.Rand) {
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, r.Uint64())
	}
}

// slow is a disk in memory whose reads and writes call a function first, which may wait or fail.
type slow struct {
	nvme.Namespace
	mu     sync.Mutex // guards before
	before func(write bool, off int64) error
}

func (s *slow) set(before func(write bool, off int64) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = before
}

func (s *slow) call(write bool, off int64) error {
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(write, off)
}

func (s *slow) ReadAt(p []byte, off int64) (int, error) {
	if err := s.call(false, off); err != nil {
		return 0, err
	}
	return s.Namespace.ReadAt(p, off)
}

func (s *slow) WriteAt(p []byte, off int64) (int, error) {
	if err := s.call(true, off); err != nil {
		return 0, err
	}
	return s.Namespace.WriteAt(p, off)
}

const (
	diskSize  = 4 << 20
	blockSize = 512
)

// machine is a GPU and a disk behind one switch, and a disk below another root port, which does not reach the GPU.
type machine struct {
	*p2p.Topology
	places         *p2p.Places
	gpu, near, far p2p.Address
}

// newMachine makes a machine. With AMD's CPU the far disk reaches the GPU, through the host bridge.
func newMachine(t testing.TB, cpu p2p.CPU) *machine {
	t.Helper()
	b := p2p.NewBuilder(cpu)
	host := b.HostBridge(p2p.ID{Vendor: 0x8086, Device: 0x29c0})
	ports := host.RootPort(nil).Switch(2, nil)
	id := p2p.ID{Vendor: 0x1b36, Device: 0x0010}
	card := ports[0].Endpoint("card0", p2p.ID{Vendor: 0x10de, Device: 0x2335}, p2p.ClassGPU, p2p.BAR{Index: 0, Size: 16 << 20, Is64: true})
	near := ports[1].Endpoint("nvme0", id, p2p.ClassNVMe)
	far := host.RootPort(nil).Endpoint("nvme1", id, p2p.ClassNVMe)
	m := &machine{Topology: must(b.Build())(t), gpu: card.Address(), near: near.Address(), far: far.Address()}
	m.places = p2p.NewPlaces(m.Topology)
	return m
}

var intel = p2p.CPU{Vendor: "GenuineIntel", Family: 6, Model: 0x55}

// rig is a disk with its controller and driver.
type rig struct {
	*Disk
	space   *pci.Space
	host    *driver.HostMemory
	model   *pci.Controller
	storage *driver.Storage
	ns      *slow
	ram     nvme.Namespace
	gone    bool // the controller was pulled out, which closing reports
}

// newRig makes a rig. What is zero in cfg and is needed is filled in.
func newRig(t testing.TB, cfg Config) *rig {
	t.Helper()
	r := &rig{space: new(pci.Space), ram: must(nvme.NewMemory(diskSize, blockSize))(t)}
	r.host = driver.NewHostMemory(r.space)
	r.ns = &slow{Namespace: r.ram}
	sub := must(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.org.verbena:direct"}))(t)
	check(t, sub.AddNamespace(1, r.ns))
	r.model = must(pci.New(pci.Config{Subsystem: sub, Bus: r.space, MDTS: 4}))(t) // 64 KiB a command
	t.Cleanup(r.model.Close)
	c := must(driver.Open(r.model, r.host, &driver.Config{Timeout: 20 * time.Second}))(t)
	t.Cleanup(func() {
		check(t, c.Close())
		if r.host.Used() != 0 {
			t.Errorf("%d pieces of system memory were not given back", r.host.Used())
		}
	})
	ctx := longTime(t)
	r.storage = must(c.Storage(ctx, must(c.Namespaces(ctx))(t)[0], driver.StorageConfig{Queues: 2}))(t)
	t.Cleanup(func() {
		if err := r.storage.Close(); !r.gone || !errors.Is(err, driver.ErrGone) {
			check(t, err)
		}
	})
	cfg.Storage, cfg.Bus, cfg.DMA = r.storage, r.space, r.host
	r.Disk = must(New(cfg))(t)
	t.Cleanup(func() {
		check(t, r.Disk.Close())
		check(t, r.Disk.Close())
		if r.space.Bytes(defaultWindow, 1) != nil || r.window.Available() != windowSize || len(r.memories) != 0 {
			t.Error("memory of others is still shown to the controller")
		}
	})
	return r
}

// gpuConfig is a GPU with room for 1 MiB in VRAM.
func gpuConfig(m *machine) *gpu.Config {
	cfg := &gpu.Config{VRAM: 1 << 20, Host: 16 << 20}
	if m != nil {
		cfg.Distance = m.places.DistanceFunc(m.gpu)
	}
	return cfg
}

var gpuNumber struct {
	sync.Mutex // guards next
	next       int
}

// newGPU opens a GPU that no other test has.
func newGPU(t testing.TB, m *machine) *gpu.Device {
	t.Helper()
	gpuNumber.Lock()
	name := fmt.Sprintf("soft:%d", gpuNumber.next%64)
	gpuNumber.next++
	gpuNumber.Unlock()
	d := must(gpu.Open(name, gpuConfig(m)))(t)
	t.Cleanup(func() { check(t, d.Close()) })
	return d
}

// pattern fills the disk, and returns what is there.
func (r *rig) pattern(t testing.TB, rnd *rand.Rand) []byte {
	t.Helper()
	b := make([]byte, diskSize)
	fill(b, rnd)
	must(r.ram.WriteAt(b, 0))(t)
	return b
}

func sameGPU(t testing.TB, b *gpu.Buffer, at int64, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	must(b.ReadAt(got, at))(t)
	if !bytes.Equal(got, want) {
		t.Errorf("the memory of the GPU at %d differs", at)
	}
}
