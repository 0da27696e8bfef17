package driver

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/pci"
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
	return rand.New(rand.NewPCG(s, 2))
}

func longTime(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// host is a host's memory on a bus of the model.
type host struct {
	space pci.Space
	*HostMemory
}

func newHost() *host {
	h := new(host)
	h.HostMemory = NewHostMemory(&h.space)
	return h
}

const (
	testNQN = "nqn.2026-01.org.verbena:pci"
	cmbAddr = 0x4000000000
)

// rig is a model, its bus, and the driver.
type rig struct {
	host  *host
	sub   *nvme.Subsystem
	model *pci.Controller
	cmb   []byte
	c     *Controller
	ns    Namespace
}

// newRig makes a rig. The driver has the model's registers by what wrap makes of them.
func newRig(t testing.TB, dev pci.Config, cfg Config, wrap ...func(nvme.Registers) nvme.Registers) *rig {
	t.Helper()
	r := &rig{host: newHost()}
	r.sub = must(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: testNQN, Serial: "S7"}))(t)
	check(t, r.sub.AddNamespace(1, must(nvme.NewMemory(8<<20, 512))(t)))
	dev.Subsystem, dev.Bus = r.sub, &r.host.space
	if dev.CMB != nil {
		r.cmb = dev.CMB.Memory
		cfg.MapBAR = func(bar int, off, n uint64) (Memory, error) {
			if bar != 2 || off != dev.CMB.Offset || n != uint64(len(r.cmb)) {
				t.Errorf("BAR %d, %d bytes at %#x", bar, n, off)
			}
			return Memory{Bytes: r.cmb, Addr: cmbAddr}, nil
		}
	}
	r.model = must(pci.New(dev))(t)
	t.Cleanup(func() {
		r.model.Close()
		r.model.Close()
	})
	var regs nvme.Registers = r.model
	for _, w := range wrap {
		regs = w(regs)
	}
	r.c = must(Open(regs, r.host, &cfg))(t)
	t.Cleanup(func() {
		check(t, r.c.Close())
		check(t, r.c.Close())
		if r.host.Used() != 0 {
			t.Errorf("%d pieces of memory were not given back", r.host.Used())
		}
	})
	list := must(r.c.Namespaces(longTime(t)))(t)
	if len(list) != 1 {
		t.Fatalf("%+v", list)
	}
	r.ns = list[0]
	return r
}

func (r *rig) queue(t testing.TB, cfg QueueConfig) *Queue {
	t.Helper()
	return must(r.c.NewQueue(longTime(t), cfg))(t)
}

func (r *rig) memory(t testing.TB, n int) Memory {
	t.Helper()
	m := must(r.host.Alloc(n))(t)
	t.Cleanup(m.Free)
	m.Bytes = m.Bytes[:n]
	return m
}

func fill(b []byte, r *rand.Rand) {
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}
