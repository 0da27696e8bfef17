package fabrics

import (
	"bytes"
	"sync"
	"testing"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/pci"
	"github.com/verbena-rdma/verbena/verbs"
)

// busMemory is the host's memory on the bus of a controller in software. It remembers all that was allocated.
type busMemory struct {
	space pci.Space
	*driver.HostMemory

	mu  sync.Mutex // guards all
	all [][]byte
}

func (m *busMemory) Alloc(n int) (driver.Memory, error) {
	got, err := m.HostMemory.Alloc(n)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all = append(m.all, got.Bytes)
	return got, err
}

// offload is a target whose disk is a controller's, and whose data passes through the memory buffer of that controller, or
// through memory of the host.
type offload struct {
	cmb     []byte
	memory  busMemory
	model   *pci.Controller
	driver  *driver.Controller
	storage *driver.Storage
	target  *Target
}

func newOffload(t testing.TB, size int64, inCMB bool) *offload {
	t.Helper()
	const cmbAddr = 0x4000000000
	o := &offload{cmb: make([]byte, 16<<20)}
	o.memory.HostMemory = driver.NewHostMemory(&o.memory.space)
	disks := disk(t, size, 4096)
	o.model = must[*pci.Controller](t)(pci.New(pci.Config{Subsystem: disks, Bus: &o.memory.space, CMB: &pci.CMB{Memory: o.cmb}}))
	t.Cleanup(o.model.Close)
	o.driver = must[*driver.Controller](t)(driver.Open(o.model, &o.memory, &driver.Config{
		MapBAR: func(int, uint64, uint64) (driver.Memory, error) {
			return driver.Memory{Bytes: o.cmb, Addr: cmbAddr}, nil
		}}))
	t.Cleanup(func() { check(t, o.driver.Close()) })
	list := must[[]driver.Namespace](t)(o.driver.Namespaces(longTime(t)))
	o.storage = must[*driver.Storage](t)(o.driver.Storage(longTime(t), list[0], driver.StorageConfig{Queues: 2, CMB: inCMB}))
	t.Cleanup(func() { check(t, o.storage.Close()) })
	sub := must[*nvme.Subsystem](t)(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nqn + ":offload"}))
	check(t, sub.AddNamespace(1, o.storage))
	o.target = serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}, Buffers: o.storage, InCapsule: -1, Workers: 4, QueueSize: 32}, verbs.LinkAny)
	return o
}

// contains reports whether the host's memory on the bus has some bytes.
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

// Data goes from the network into the memory buffer of a controller and from there to the disk, and back: none of it lies in
// memory of the host on the way. Without that buffer it does.
func TestOffload(t *testing.T) {
	for _, inCMB := range []bool{true, false} {
		o := newOffload(t, 8<<20, inCMB)
		h := dial(t, o.target, HostConfig{NQN: nqn + ":offload", Queues: 2}, verbs.LinkAny)
		d := must[*Disk](t)(h.Namespace(longTime(t), 1))
		r := seeded(t)
		want, got := make([]byte, 3<<20), make([]byte, 3<<20)
		fill(r, want)
		must[int](t)(d.WriteAt(want, 1<<20))
		must[int](t)(d.ReadAt(got, 1<<20))
		if !bytes.Equal(got, want) {
			t.Error("other bytes")
		}
		if st := o.storage.Stats(); st.Direct != 2*uint64(len(want)) || st.Copied != 0 {
			t.Errorf("%+v, of %d bytes there and back", st, len(want))
		}
		if s := o.target.Stats(); s.OwnBuffers != 0 || s.InCapsule != 0 {
			t.Errorf("%+v", s)
		}
		// Seen where the bytes lie, not what was counted: the last read is still in the buffers.
		last := want[len(want)-4096:][:64]
		if in, out := bytes.Contains(o.cmb, last), o.memory.contains(last); in != inCMB || out == inCMB {
			t.Errorf("in the controller's buffer %t, should be %t; in the host's memory %t", in, inCMB, out)
		}
	}
}
