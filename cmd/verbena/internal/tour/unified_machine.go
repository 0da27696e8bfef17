package tour

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/direct"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/p2p"
	"github.com/verbena-rdma/verbena/verbs"
)

// unified is a machine: a GPU, a disk and an adapter behind one switch, and another disk and adapter below root ports of
// their own, which do not reach the GPU's memory. Both disks have the same data. The remote host is a device elsewhere.
type unified struct {
	ctx    context.Context
	lab    *lab // its ways to wait
	t      *p2p.Topology
	places *p2p.Places
	at     unifiedPlaces

	card     *gpu.Device
	near     *drive // behind the switch
	far      *drive
	adapter  *node
	adapter1 *node // below another root port
	remote   *node // the end of its buffer has the message
	sums     []uint32
}

// unifiedPlaces says where the devices are.
type unifiedPlaces struct{ gpu, nvme0, nvme1, nic0, nic1 p2p.Address }

// drive is an NVMe controller in software, and its driver.
type drive struct {
	space   *pci.Space
	host    *driver.HostMemory
	model   *pci.Controller
	c       *driver.Controller
	storage *driver.Storage
}

func newUnified(ctx context.Context) (m *unified, err error) {
	m = &unified{ctx: ctx, lab: &lab{ctx: ctx, patience: time.Minute}}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	if err = m.build(); err != nil {
		return m, err
	}
	data := make([]byte, fileSize)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(data) // it does not fail
	for off := 0; off < fileSize; off += roundSize {
		m.sums = append(m.sums, checksum(data[off:][:roundSize]))
	}
	if m.card, err = gpu.Open("soft:0", &gpu.Config{VRAM: unifiedRAM, Host: 4 * unifiedRAM, Distance: m.places.DistanceFunc(m.at.gpu)}); err != nil {
		return m, err
	}
	for _, d := range []**drive{&m.near, &m.far} {
		if *d, err = newDrive(ctx, data); err != nil {
			return m, err
		}
	}
	for _, n := range []struct {
		to   **node
		size int
		at   *p2p.Address // nil: elsewhere
	}{{&m.adapter, 4096, &m.at.nic0}, {&m.adapter1, roundSize, &m.at.nic1}, {&m.remote, roundSize + 4096, nil}} {
		*n.to = &node{buf: make([]byte, n.size)}
		if err = (*n.to).open(&verbs.Config{Link: verbs.LinkLoop}); err != nil {
			return m, err
		}
		if n.at != nil {
			if err = m.places.Set((*n.to).dev, *n.at); err != nil {
				return m, err
			}
		}
	}
	return m, nil
}

// build makes the topology. Nobody forwards peer-to-peer traffic above the switch.
func (m *unified) build() (err error) {
	b := p2p.NewBuilder(p2p.CPU{Vendor: "GenuineIntel", Family: 6, Model: 0x55})
	host := b.HostBridge(p2p.ID{Vendor: 0x8086, Device: 0x29c0})
	ports := host.RootPort(nil).Switch(3, nil)
	registers := p2p.BAR{Index: 0, Size: 16 << 10, Is64: true}
	disk, adapter := p2p.ID{Vendor: 0x1b36, Device: 0x0010}, p2p.ID{Vendor: 0x1b36, Device: 0x0100}
	card := ports[0].Endpoint("gpu0", p2p.ID{Vendor: 0x1002, Device: 0x740f}, p2p.ClassGPU, p2p.BAR{Index: 0, Size: unifiedRAM, Is64: true, Prefetchable: true})
	nvme0 := ports[1].Endpoint("nvme0", disk, p2p.ClassNVMe, registers)
	nic0 := ports[2].Endpoint("verbena0", adapter, 0x020700, registers)
	nvme1 := host.RootPort(nil).Endpoint("nvme1", disk, p2p.ClassNVMe, registers)
	nic1 := host.RootPort(nil).Endpoint("verbena1", adapter, 0x020700, registers)
	if m.t, err = b.Build(); err != nil {
		return err
	}
	m.at = unifiedPlaces{card.Address(), nvme0.Address(), nvme1.Address(), nic0.Address(), nic1.Address()}
	m.places = p2p.NewPlaces(m.t)
	return nil
}

// close closes everything. A machine that could not be made needs it, too.
func (m *unified) close() error {
	var errs []error
	for _, n := range []*node{m.adapter, m.adapter1, m.remote} {
		if n != nil {
			errs = append(errs, n.close())
		}
	}
	for _, d := range []*drive{m.near, m.far} {
		if d != nil {
			errs = append(errs, d.close())
		}
	}
	if m.card != nil {
		errs = append(errs, m.card.Close())
	}
	return errors.Join(errs...)
}

// newDrive makes a disk with data on it.
func newDrive(ctx context.Context, data []byte) (d *drive, err error) {
	d = &drive{space: new(pci.Space)}
	d.host = driver.NewHostMemory(d.space)
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	sub, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: diskName})
	if err != nil {
		return d, err
	}
	ram, err := nvme.NewMemory(int64(len(data)), 4096)
	if err != nil {
		return d, err
	}
	if _, err = ram.WriteAt(data, 0); err != nil {
		return d, err
	}
	if err = sub.AddNamespace(1, ram); err != nil {
		return d, err
	}
	if d.model, err = pci.New(pci.Config{Subsystem: sub, Bus: d.space, MDTS: 5}); err != nil { // 128 KiB a command
		return d, err
	}
	if d.c, err = driver.Open(d.model, d.host, nil); err != nil {
		return d, err
	}
	list, err := d.c.Namespaces(ctx)
	if err != nil {
		return d, err
	}
	d.storage, err = d.c.Storage(ctx, list[0], driver.StorageConfig{})
	return d, err
}

func (d *drive) close() error {
	var errs []error
	if d.storage != nil {
		errs = append(errs, d.storage.Close())
	}
	if d.c != nil {
		errs = append(errs, d.c.Close())
	}
	if d.model != nil {
		d.model.Close()
	}
	return errors.Join(errs...)
}

// way is what a leg uses.
type way struct {
	m         *unified
	leg       leg
	disk      *direct.Disk
	memory    *direct.Memory // the GPU's, for the disk
	buffer    *gpu.Buffer
	sum       *gpu.Buffer // the GPU's checksum of it
	stream    *gpu.Stream
	adapter   *node
	mr        *verbs.MR     // the GPU's memory, or bounce
	bounce    []byte        // system memory that the remote host reads
	near, far *verbs.QP     // the adapter's and the remote host's
	reads     atomic.Uint64 // READs so far
	job       *job
}

func (m *unified) newWay(g leg) (w *way, err error) {
	w = &way{m: m, leg: g}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.buffer, err = m.card.Alloc(roundSize); err != nil {
		return w, err
	}
	if w.sum, err = m.card.AllocWith(sumSize, gpu.AllocOptions{CPU: true}); err != nil {
		return w, err
	}
	if w.stream, err = m.card.NewStream(); err != nil {
		return w, err
	}
	d, at := m.near, m.at.nvme0
	w.adapter = m.adapter
	if g.system {
		d, at, w.adapter = m.far, m.at.nvme1, m.adapter1
		if err = w.buffer.Pin(); err != nil {
			return w, err
		}
	}
	if w.disk, err = direct.New(direct.Config{Storage: d.storage, Bus: d.space, DMA: d.host, Topology: m.t, Places: m.places, At: at, Fallback: g.system}); err != nil {
		return w, err
	}
	if w.memory, err = w.disk.AttachRegion(w.buffer, direct.AttachConfig{Owner: &m.at.gpu, Pin: g.pin}); err != nil {
		return w, err
	}
	if g.system {
		w.bounce = w.adapter.buf
		w.mr, err = w.adapter.pd.RegMR(w.bounce, verbs.AccessRemoteRead)
	} else {
		w.mr, err = w.adapter.pd.RegGPU(w.buffer, verbs.AccessRemoteRead)
	}
	if err != nil {
		return w, err
	}
	if w.near, err = w.adapter.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: w.adapter.cq, RecvCQ: w.adapter.cq, Cap: caps}); err != nil {
		return w, err
	}
	if w.far, err = m.remote.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: m.remote.cq, RecvCQ: m.remote.cq, Cap: caps}); err != nil {
		return w, err
	}
	if err = w.near.Connect(w.far.Endpoint(), nil); err != nil {
		return w, err
	}
	return w, w.far.Connect(w.near.Endpoint(), nil)
}

func (w *way) close() error {
	var errs []error
	for _, qp := range []*verbs.QP{w.near, w.far} {
		if qp != nil {
			errs = append(errs, qp.Close())
		}
	}
	if w.mr != nil {
		errs = append(errs, w.mr.Close())
	}
	if w.disk != nil {
		errs = append(errs, w.disk.Close())
	}
	if w.stream != nil {
		errs = append(errs, w.stream.Close())
	}
	for _, b := range []*gpu.Buffer{w.buffer, w.sum} {
		if b != nil {
			errs = append(errs, b.Free())
		}
	}
	return errors.Join(errs...)
}

// counted returns how many bytes READs have moved, as the remote host's device counts them, and how often the adapter
// found a buffer moved.
func (m *unified) counted(w *way) (fetched, faults uint64) {
	for _, c := range m.remote.dev.Counters() {
		if c.Name == "copied_bytes_dmabuf_to_pinned" || w.leg.system && c.Name == "copied_bytes_pinned_to_pinned" {
			fetched += c.Value
		}
	}
	for _, c := range w.adapter.dev.Counters() {
		if c.Name == "dmabuf_faults" {
			faults = c.Value
		}
	}
	return fetched, faults
}
