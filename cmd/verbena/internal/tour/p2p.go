package tour

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/fabrics"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/p2p"
)

// peerSteps are a tour of memory that one device gives to others: an NVMe controller with a memory buffer behind the same
// switch as the RDMA device, and another one that is not.
var peerSteps = []step{
	{"--", "verdicts", verdictsStep},
	{"--", "transfer", peerTransferStep},
	{"--", "fallback", fallbackStep},
	{"--", "vanish", vanishStep},
	{"RC", "network to disk", func(l *lab) (string, error) { return diskStep(l, true) }},
	{"RC", "by host memory", func(l *lab) (string, error) { return diskStep(l, false) }},
}

// machine is a topology: an adapter and a disk behind one switch, a disk below another root port.
type machine struct {
	*p2p.Topology
	nic, near, far p2p.Address
}

const bufferBAR = 2

func newMachine() (*machine, error) {
	b := p2p.NewBuilder(p2p.CPU{Vendor: "GenuineIntel", Family: 6, Model: 0x55})
	host := b.HostBridge(p2p.ID{Vendor: 0x8086, Device: 0x29c0})
	ports := host.RootPort(nil).Switch(2, nil)
	registers := p2p.BAR{Index: 0, Size: 16 << 10, Is64: true}
	buffer := p2p.BAR{Index: bufferBAR, Size: 16 << 20, Is64: true, Prefetchable: true}
	nvmeID := p2p.ID{Vendor: 0x1b36, Device: 0x0010}
	nic := ports[0].Endpoint("verbena0", p2p.ID{Vendor: 0x1b36, Device: 0x0100}, 0x020700, registers)
	near := ports[1].Endpoint("nvme0", nvmeID, p2p.ClassNVMe, registers, buffer)
	far := host.RootPort(nil).Endpoint("nvme1", nvmeID, p2p.ClassNVMe, registers, buffer)
	t, err := b.Build()
	if err != nil {
		return nil, err
	}
	return &machine{t, nic.Address(), near.Address(), far.Address()}, nil
}

// provider makes a disk one whose buffer others may use.
func (m *machine) provider(at p2p.Address) (*p2p.Provider, error) {
	p, err := p2p.NewProvider(m.Topology, at)
	if err != nil {
		return nil, err
	}
	if err := p.AddResource(bufferBAR, 0, 0, nil); err != nil {
		return nil, err
	}
	p.Publish(true)
	return p, nil
}

func verdictsStep(*lab) (string, error) {
	m, err := newMachine()
	if err != nil {
		return "", err
	}
	near, far := m.Verdict(m.near, m.nic), m.Verdict(m.far, m.nic)
	if near.Map != p2p.BusAddress || near.Distance != 4 || far.Map != p2p.NotSupported {
		return "", fmt.Errorf("%+v, %+v", near, far)
	}
	return fmt.Sprintf("nvme0: %v; nvme1: %v: %s", near.Map, far.Map, far.Reason), nil
}

// transfer has the adapter write and a disk read.
func (m *machine) transfer(o *p2p.Orchestrator, l *lab, disk p2p.Address) (path p2p.Path, err error) {
	data, got := bytes.Clone(l.source(l.a, half)), make([]byte, half)
	_, path, err = o.Do(p2p.Transfer{From: p2p.NewClient(m.Topology, m.nic, nil), To: p2p.NewClient(m.Topology, disk, nil), Length: half,
		Produce: func(b [][]byte) error { return gather(b, data, true) },
		Consume: func(b [][]byte) error { return gather(b, got, false) }})
	if err == nil {
		err = same(got, data)
	}
	return path, err
}

// gather copies between bytes and their pieces.
func gather(pieces [][]byte, b []byte, into bool) error {
	for _, p := range pieces {
		n := min(len(p), len(b))
		if into {
			copy(p, b[:n])
		} else {
			copy(b, p[:n])
		}
		b = b[n:]
	}
	if len(b) > 0 {
		return fmt.Errorf("%d bytes have no place", len(b))
	}
	return nil
}

// withProvider runs a step with an orchestrator that knows the buffer of nvme0.
func withProvider(fallback bool, f func(m *machine, o *p2p.Orchestrator, p *p2p.Provider) (string, error)) (string, error) {
	m, err := newMachine()
	if err != nil {
		return "", err
	}
	p, err := m.provider(m.near)
	if err != nil {
		return "", err
	}
	defer p.Remove()
	o := p2p.NewOrchestrator(m.Topology, &p2p.OrchestratorConfig{Fallback: fallback})
	if err := o.AddProvider(p); err != nil {
		return "", err
	}
	return f(m, o, p)
}

func peerTransferStep(l *lab) (string, error) {
	return withProvider(false, func(m *machine, o *p2p.Orchestrator, p *p2p.Provider) (string, error) {
		path, err := m.transfer(o, l, m.near)
		if err != nil {
			return "", err
		}
		if s := o.Stats(); path == p2p.PathSystem || s.SystemBytes != 0 || s.BusBytes != 2*half {
			return "", fmt.Errorf("%v, %+v", path, s)
		}
		return fmt.Sprintf("%d KiB from the adapter to the disk through the buffer of %v, none through system memory", half>>10, p.Address()), nil
	})
}

func fallbackStep(l *lab) (string, error) {
	return withProvider(true, func(m *machine, o *p2p.Orchestrator, _ *p2p.Provider) (string, error) {
		path, err := m.transfer(o, l, m.far)
		if err != nil {
			return "", err
		}
		s := o.Stats()
		if path != p2p.PathSystem || s.Fallbacks != 1 || len(s.Refusals) != 1 || s.SystemBytes != 2*half {
			return "", fmt.Errorf("%v, %+v", path, s)
		}
		return fmt.Sprintf("to the disk below the other root port: %d KiB through system memory, counted with the reason", half>>10), nil
	})
}

func vanishStep(l *lab) (string, error) {
	return withProvider(false, func(m *machine, o *p2p.Orchestrator, p *p2p.Provider) (string, error) {
		if _, err := m.transfer(o, l, m.near); err != nil {
			return "", err
		}
		p.Remove()
		if _, err := m.transfer(o, l, m.near); !errors.Is(err, syscall.ENODEV) {
			return "", fmt.Errorf("a transfer after that: %w", err)
		}
		return "the driver of the disk is unbound: the next transfer fails with ENODEV", nil
	})
}

// busMemory is the host's memory on the bus of a controller. It remembers all that was allocated.
type busMemory struct {
	space pci.Space
	*driver.HostMemory

	mu  sync.Mutex // guards all
	all [][]byte
}

// Alloc returns memory that the controller reaches.
func (m *busMemory) Alloc(n int) (driver.Memory, error) {
	got, err := m.HostMemory.Alloc(n)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all = append(m.all, got.Bytes)
	return got, err
}

// contains reports whether some of the memory has these bytes.
func (m *busMemory) contains(b []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range m.all {
		if bytes.Contains(a, b) {
			return true
		}
	}
	return false
}

const (
	diskName = "nqn.2026-01.io.verbena:demo"
	diskPort = 4420
)

// diskStep has the first device, as an NVMe host, write to a disk that the second one serves, and read it. The data
// passes through the memory buffer of the disk's controller, or through memory of the host.
func diskStep(l *lab, peer bool) (string, error) {
	memory, buffer := new(busMemory), make([]byte, 16<<20)
	memory.HostMemory = driver.NewHostMemory(&memory.space)
	data := bytes.Clone(l.source(l.a, half))
	if err := thereAndBack(l, memory, buffer, data, peer); err != nil {
		return "", err
	}
	// Nobody uses the memory any more: what was there last is still there.
	if in, out := bytes.Contains(buffer, data[:64]), memory.contains(data[:64]); in != peer || out == peer {
		return "", fmt.Errorf("the data is in the controller's buffer: %t, in the host's memory: %t", in, out)
	}
	if !peer {
		return fmt.Sprintf("the same %d KiB through memory of the host: they are found there, and not in the controller's buffer", half>>10), nil
	}
	return fmt.Sprintf("NVMe over RDMA, %d KiB there and back through the controller's buffer: none of them is found in memory of the host", half>>10), nil
}

// thereAndBack writes data to the disk by NVMe over RDMA, reads it, and closes everything.
func thereAndBack(l *lab, memory *busMemory, buffer, data []byte, peer bool) (err error) {
	closing := func(f func() error) { err = errors.Join(err, f()) }
	inner, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: diskName + ":inner"})
	if err != nil {
		return err
	}
	ram, err := nvme.NewMemory(1<<20, 4096)
	if err != nil {
		return err
	}
	if err := inner.AddNamespace(1, ram); err != nil {
		return err
	}
	model, err := pci.New(pci.Config{Subsystem: inner, Bus: &memory.space, CMB: &pci.CMB{Memory: buffer}})
	if err != nil {
		return err
	}
	defer model.Close()
	c, err := driver.Open(model, memory, &driver.Config{MapBAR: func(int, uint64, uint64) (driver.Memory, error) {
		return driver.Memory{Bytes: buffer, Addr: 1 << 38}, nil
	}})
	if err != nil {
		return err
	}
	defer closing(c.Close)
	list, err := c.Namespaces(l.ctx)
	if err != nil {
		return err
	}
	storage, err := c.Storage(l.ctx, list[0], driver.StorageConfig{CMB: peer})
	if err != nil {
		return err
	}
	defer closing(storage.Close)
	outer, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: diskName})
	if err != nil {
		return err
	}
	if err := outer.AddNamespace(1, storage); err != nil {
		return err
	}
	at := netip.AddrPortFrom(l.b.dev.Addr(), diskPort).String()
	t, err := fabrics.Listen(l.ctx, at, fabrics.TargetConfig{Subsystems: []*nvme.Subsystem{outer}, Buffers: storage, InCapsule: -1, QueueSize: 16, Workers: 2,
		MaxTransfer: 128 << 10, Config: cm.Config{Device: l.b.dev}})
	if err != nil {
		return err
	}
	defer closing(t.Close)
	h, err := fabrics.Dial(l.ctx, at, fabrics.HostConfig{NQN: diskName, QueueSize: 16, KeepAlive: -1, Config: cm.Config{Device: l.a.dev}})
	if err != nil {
		return err
	}
	defer closing(h.Close)
	d, err := h.Namespace(l.ctx, 1)
	if err != nil {
		return err
	}
	got := make([]byte, len(data))
	if _, err := d.WriteAt(data, 0); err != nil {
		return err
	}
	if _, err := d.ReadAt(got, 0); err != nil {
		return err
	}
	if err := same(got, data); err != nil {
		return err
	}
	if s := storage.Stats(); s.Direct != 2*uint64(len(data)) || s.Copied != 0 {
		return fmt.Errorf("%+v", s)
	}
	return nil
}
