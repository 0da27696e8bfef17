package direct

import (
	"context"
	"errors"
	"math"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/p2p"
)

func TestReadAndWriteVRAM(t *testing.T) {
	m := newMachine(t, intel)
	r, ctx := newRig(t, Config{Topology: m.Topology, Places: m.places, At: m.near}), longTime(t)
	disk := r.pattern(t, seeded(t))
	card := newGPU(t, m)
	buf := must(card.Alloc(300 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{Owner: &m.gpu}))(t)
	if mem.Path() != p2p.PathBus || mem.Len() != 300<<10 || !strings.Contains(mem.Reason(), "common upstream port") {
		t.Errorf("%v, %d bytes: %s", mem.Path(), mem.Len(), mem.Reason())
	}
	before := r.model.Stats()
	check(t, r.Read(ctx, mem, 4, 200<<10, 512)) // four commands, data that does not begin at a page
	sameGPU(t, buf, 4, disk[512:][:200<<10])
	check(t, r.Write(ctx, mem, 4, 200<<10, 1<<20))
	got := make([]byte, 200<<10)
	must(r.ram.ReadAt(got, 1<<20))(t)
	if string(got) != string(disk[512:][:200<<10]) {
		t.Error("what was written differs")
	}
	s := r.Stats()
	if want := (Stats{Transfers: 2, Bus: 400 << 10, Mappings: 1}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	if now := r.model.Stats(); now.BusBytes-before.BusBytes != 400<<10 || now.Commands-before.Commands != 8 {
		t.Errorf("the controller has counted %+v, before that %+v", now, before)
	}
	if !buf.Resident() {
		t.Error("the buffer has left the VRAM")
	}
}

// The far disk has no way to the GPU.
func TestNoWay(t *testing.T) {
	m := newMachine(t, intel)
	card, ctx := newGPU(t, m), longTime(t)
	buf := must(card.Alloc(256 << 10))(t)
	r := newRig(t, Config{Topology: m.Topology, Places: m.places, At: m.far})
	if _, err := r.AttachRegion(buf, AttachConfig{Owner: &m.gpu}); !errors.Is(err, syscall.EREMOTEIO) || !strings.Contains(err.Error(), "not on the kernel's list") {
		t.Errorf("%v", err)
	}
	r = newRig(t, Config{Topology: m.Topology, Places: m.places, At: m.far, Fallback: true})
	disk := r.pattern(t, seeded(t))
	mem := must(r.AttachRegion(buf, AttachConfig{Owner: &m.gpu}))(t)
	check(t, r.Read(ctx, mem, 0, 256<<10, 1024))
	sameGPU(t, buf, 0, disk[1024:][:256<<10])
	check(t, r.Write(ctx, mem, 0, 256<<10, 2<<20))
	got := make([]byte, 256<<10)
	must(r.ram.ReadAt(got, 2<<20))(t)
	if string(got) != string(disk[1024:][:256<<10]) {
		t.Error("what was written differs")
	}
	if s, want := r.Stats(), (Stats{Transfers: 2, Copied: 512 << 10}); s != want || mem.Path() != p2p.PathSystem || !buf.Resident() {
		t.Errorf("%+v, want %+v; %v, resident: %t", s, want, mem.Path(), buf.Resident())
	}
	// A dma-buf alone has nobody who copies it.
	b, off, err := buf.DMABuf()
	check(t, err)
	defer b.Put()
	if _, err := r.Attach(b, off, 4096, AttachConfig{Owner: &m.gpu}); !errors.Is(err, syscall.EREMOTEIO) {
		t.Errorf("%v", err)
	}
}

func TestThroughHostBridge(t *testing.T) {
	m := newMachine(t, p2p.CPU{Vendor: "AuthenticAMD", Family: 0x17, Model: 1})
	r := newRig(t, Config{Topology: m.Topology, Places: m.places, At: m.far})
	disk, card := r.pattern(t, seeded(t)), newGPU(t, m)
	buf := must(card.Alloc(4096))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{Owner: &m.gpu}))(t)
	check(t, r.Read(longTime(t), mem, 0, 4096, 0))
	sameGPU(t, buf, 0, disk[:4096])
	if s, want := r.Stats(), (Stats{Transfers: 1, HostBridge: 4096, Mappings: 1}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
}

// A buffer of system memory in several segments, of which a range in the middle is attached.
func TestSystemMemory(t *testing.T) {
	r := newRig(t, Config{})
	disk := r.pattern(t, seeded(t))
	memory := must(dmabuf.Alloc(dmabuf.MemoryConfig{Size: 5 * 4096, Segments: 5}))(t)
	defer func() { check(t, memory.Close()) }()
	mem := must(r.Attach(memory.Buffer(), 512, 4*4096, AttachConfig{}))(t)
	check(t, r.Read(longTime(t), mem, 512, 3*4096, 4096))
	got := make([]byte, 3*4096)
	must(memory.ReadAt(got, 1024))(t)
	if string(got) != string(disk[4096:][:3*4096]) {
		t.Error("the data differs")
	}
	if s, want := r.Stats(), (Stats{Transfers: 1, System: 3 * 4096, Mappings: 1}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	check(t, mem.Close())
}

func TestRefusals(t *testing.T) {
	ctx := longTime(t)
	r, other := newRig(t, Config{}), newRig(t, Config{})
	card := newGPU(t, nil)
	buf := must(card.Alloc(1 << 20))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{}))(t)
	foreign := must(other.AttachRegion(buf, AttachConfig{}))(t)
	commands := r.model.Stats().Commands
	fence := dmabuf.NewFence()
	for _, c := range []struct {
		name  string
		t     Transfer
		errno syscall.Errno
	}{
		{"no memory", Transfer{Length: 512}, syscall.EINVAL},
		{"memory of another disk", Transfer{Memory: foreign, Length: 512}, syscall.EINVAL},
		{"no bytes", Transfer{Memory: mem}, syscall.EINVAL},
		{"outside the memory", Transfer{Memory: mem, At: 1<<20 - 512, Length: 1024}, syscall.EINVAL},
		{"an offset that wraps", Transfer{Memory: mem, At: math.MaxUint64 - 511, Length: 512}, syscall.EINVAL},
		{"a length that wraps", Transfer{Memory: mem, At: 512, Length: math.MaxUint64 - 511}, syscall.EINVAL},
		{"beyond the disk", Transfer{Memory: mem, Length: 1024, Offset: diskSize - 512}, syscall.EINVAL},
		{"far beyond the disk", Transfer{Memory: mem, Length: 512, Offset: math.MaxInt64 - 511}, syscall.EINVAL},
		{"before the disk", Transfer{Memory: mem, Length: 512, Offset: -512}, syscall.EINVAL},
		{"a part of a block", Transfer{Memory: mem, Length: 100}, syscall.EINVAL},
		{"not at a block", Transfer{Memory: mem, Length: 512, Offset: 100}, syscall.EINVAL},
		{"memory at an odd address", Transfer{Memory: mem, At: 2, Length: 512}, syscall.EINVAL},
		{"a timeout that cannot be", Transfer{Memory: mem, Length: 512, Timeout: -1}, syscall.EINVAL},
	} {
		c.t.Done = fence
		if err := r.Do(ctx, c.t); !errors.Is(err, c.errno) {
			t.Errorf("%s: %v", c.name, err)
		}
		if err := r.Start(ctx, c.t); !errors.Is(err, c.errno) {
			t.Errorf("%s, started: %v", c.name, err)
		}
	}
	if err := r.Start(ctx, Transfer{Memory: mem, Length: 512}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("without a fence: %v", err)
	}
	if fence.Signaled() || r.model.Stats().Commands != commands || r.Stats().Transfers != 0 {
		t.Error("a transfer that was refused has done something")
	}
	for _, c := range []struct{ off, n uint64 }{{0, 0}, {1<<20 - 1, 2}, {math.MaxUint64, 2}, {1, math.MaxUint64}} {
		b, _, err := buf.DMABuf()
		check(t, err)
		if _, err := r.Attach(b, c.off, c.n, AttachConfig{}); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%d bytes at %d: %v", c.n, c.off, err)
		}
		b.Put()
	}
	if _, err := r.Attach(nil, 0, 1, AttachConfig{}); !errors.Is(err, syscall.EINVAL) {
		t.Error(err)
	}
	if _, err := r.AttachRegion(nil, AttachConfig{}); !errors.Is(err, syscall.EINVAL) {
		t.Error(err)
	}
	for _, cfg := range []Config{{}, {Storage: r.storage}, {Storage: r.storage, Bus: r.space, Fallback: true},
		{Storage: r.storage, Bus: r.space, Window: 1}, {Storage: r.storage, Bus: r.space, Window: math.MaxUint64 &^ 4095}} {
		if _, err := New(cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

// An exporter whose segments are no whole pages, one that refuses, and one whose fence never comes.
func TestOddExporters(t *testing.T) {
	r := newRig(t, Config{})
	memory := make([]byte, 8192)
	var table *dmabuf.Table
	var refuse error
	b := must(dmabuf.Export(dmabuf.Config{Size: 8192, Exporter: "odd", Ops: dmabuf.Ops{
		Map:     func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) { return table, refuse },
		Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
		Release: func(*dmabuf.Buffer) {},
	}}))(t)
	defer b.Put()
	table = dmabuf.NewTable(memory[:100], memory[100:])
	if _, err := r.Attach(b, 0, 8192, AttachConfig{}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("segments of 100 bytes: %v", err)
	}
	refuse = syscall.EBUSY
	if _, err := r.Attach(b, 0, 8192, AttachConfig{}); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("an exporter that refuses: %v", err)
	}
	table, refuse = dmabuf.NewTable(memory), nil
	mem := must(r.Attach(b, 0, 8192, AttachConfig{}))(t)
	never := dmabuf.NewFence()
	b.Reservation().Lock()
	b.InvalidateMappings()
	b.Reservation().Add(never, dmabuf.Kernel)
	b.Reservation().Unlock()
	ctx, cancel := context.WithCancel(longTime(t))
	result := make(chan error, 1)
	go func() { result <- r.Read(ctx, mem, 0, 512, 0) }()
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled while a Kernel fence is pending: %v", err)
	}
	never.Signal(nil)
	check(t, r.Read(longTime(t), mem, 0, 512, 0))
	if s := r.Stats(); s.Faults != 1 || s.Invalidations != 1 || s.Mappings != 2 {
		t.Errorf("%+v", s)
	}
}

// The buffer is evicted between two commands, which the second one notices, and while one is under way, which the
// eviction waits for.
func TestEvictedDuringRead(t *testing.T) {
	m := newMachine(t, intel)
	r, ctx := newRig(t, Config{Topology: m.Topology, Places: m.places, At: m.near}), longTime(t)
	disk, card := r.pattern(t, seeded(t)), newGPU(t, m)
	buf := must(card.Alloc(256 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{Owner: &m.gpu}))(t)
	filler := must(card.Alloc(1 << 20))(t) // takes all of the VRAM, and so evicts the buffer
	if buf.Resident() || r.Stats().Invalidations != 1 {
		t.Fatalf("resident: %t, %+v", buf.Resident(), r.Stats())
	}
	check(t, filler.Pin()) // so that it stays
	check(t, r.Read(ctx, mem, 0, 64<<10, 0))
	if s := r.Stats(); s.System != 64<<10 || s.Bus != 0 || s.Faults != 1 || buf.Resident() {
		t.Fatalf("%+v, resident: %t", s, buf.Resident())
	}
	check(t, filler.Unpin())
	check(t, filler.Free())

	// There is room again. The first command of the next read brings the buffer back; the eviction comes while the
	// second is under way, and waits for it.
	evicted := make(chan error, 1)
	r.ns.set(func(_ bool, off int64) error {
		if off == 4096+64<<10 { // the second command
			if !buf.Resident() {
				t.Error("the first command has not brought the buffer back")
			}
			go func() { evicted <- buf.Evict(ctx) }()
			for r.Stats().Invalidations < 3 { // the eviction has told the disk
				time.Sleep(10 * time.Microsecond)
			}
			select {
			case err := <-evicted:
				t.Errorf("evicted while a command is under way: %v", err)
			default:
			}
		}
		return nil
	})
	check(t, buf.Prefetch(ctx)) // which is a move: the second invalidation
	check(t, r.Read(ctx, mem, 0, 256<<10, 4096))
	check(t, <-evicted)
	r.ns.set(nil)
	sameGPU(t, buf, 0, disk[4096:][:256<<10])
	if s := r.Stats(); s.Bus < 128<<10 || s.Bus+s.System != 320<<10 || s.Faults < 3 {
		t.Errorf("%+v", s)
	}
	if s := card.Stats(); s.Evictions < 2 || s.Returns < 1 {
		t.Errorf("%+v", s)
	}
}

func TestPinned(t *testing.T) {
	r, ctx := newRig(t, Config{}), longTime(t)
	disk, card := r.pattern(t, seeded(t)), newGPU(t, nil)
	buf := must(card.Alloc(512 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{Pin: true}))(t)
	if err := buf.Evict(ctx); !errors.Is(err, gpu.ErrPinned) {
		t.Errorf("evicting what is pinned: %v", err)
	}
	must(card.Alloc(1 << 20))(t) // finds no VRAM
	check(t, r.Read(ctx, mem, 0, 512<<10, 0))
	sameGPU(t, buf, 0, disk[:512<<10])
	if s, want := r.Stats(), (Stats{Transfers: 1, Bus: 512 << 10, Mappings: 1}); s != want || !buf.Resident() {
		t.Errorf("%+v, want %+v; resident: %t", s, want, buf.Resident())
	}
	check(t, mem.Close())
	check(t, buf.Evict(ctx))

	// What does not fit the VRAM cannot be pinned.
	big := must(card.AllocWith(2<<20, gpu.AllocOptions{Placement: gpu.InHost}))(t)
	mem = must(r.AttachRegion(big, AttachConfig{Pin: true}))(t)
	check(t, r.Read(ctx, mem, 0, 2<<20, 0))
	if s := r.Stats(); s.System != 2<<20 {
		t.Errorf("%+v", s)
	}
}

// The memory is freed while a command is under way: that command ends, and the next one fails.
func TestRevokedDuringRead(t *testing.T) {
	for _, pin := range []bool{false, true} {
		r, ctx := newRig(t, Config{}), longTime(t)
		card := newGPU(t, nil)
		buf := must(card.Alloc(256 << 10))(t)
		mem := must(r.AttachRegion(buf, AttachConfig{Pin: pin}))(t)
		before := r.model.Stats().Commands
		r.ns.set(func(_ bool, off int64) error {
			if off == 64<<10 { // the second command
				check(t, buf.Free())
			}
			return nil
		})
		done := dmabuf.NewFence()
		if err := r.Do(ctx, Transfer{Memory: mem, Length: 256 << 10, Done: done}); !errors.Is(err, syscall.ENODEV) || !errors.Is(done.Err(), syscall.ENODEV) {
			t.Errorf("pinned %t: %v; the fence: %v", pin, err, done.Err())
		}
		if n := r.model.Stats().Commands - before; n != 2 {
			t.Errorf("pinned %t: %d commands", pin, n)
		}
		if err := r.Read(ctx, mem, 0, 512, 0); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("pinned %t, later: %v", pin, err)
		}
		if _, err := r.AttachRegion(buf, AttachConfig{}); !errors.Is(err, gpu.ErrFreed) {
			t.Errorf("attaching what is freed: %v", err)
		}
		check(t, mem.Close())
		check(t, mem.Close())
		if s := card.Stats(); s.VRAMFree != s.VRAM {
			t.Errorf("pinned %t: %+v", pin, s)
		}
	}
}

func TestControllerError(t *testing.T) {
	r, ctx := newRig(t, Config{}), longTime(t)
	card := newGPU(t, nil)
	buf := must(card.Alloc(256 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{}))(t)
	r.ns.set(func(_ bool, off int64) error {
		if off >= 64<<10 {
			return errors.New("a scratch")
		}
		return nil
	})
	var status nvme.Status
	done := dmabuf.NewFence()
	if err := r.Do(ctx, Transfer{Memory: mem, Length: 256 << 10, Done: done}); !errors.As(err, &status) {
		t.Errorf("%v", err)
	}
	if done.Err() == nil {
		t.Error("the fence has no error")
	}
	if s, want := r.Stats(), (Stats{Bus: 64 << 10, Mappings: 1}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	r.ns.set(nil)
	check(t, r.Read(ctx, mem, 0, 256<<10, 0))

	r.gone = true // it is pulled out
	r.model.Close()
	if err := r.Read(ctx, mem, 0, 512, 0); !errors.Is(err, driver.ErrGone) {
		t.Errorf("a read of a controller that is gone: %v", err)
	}
	check(t, buf.Evict(ctx)) // nothing holds the memory
}

// A context that ends lets no further command begin; the one under way is waited for.
func TestCancelled(t *testing.T) {
	r := newRig(t, Config{})
	card := newGPU(t, nil)
	buf := must(card.Alloc(256 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{}))(t)
	ctx, cancel := context.WithCancel(longTime(t))
	before := r.model.Stats().Commands
	r.ns.set(func(bool, int64) error {
		cancel()
		return nil
	})
	if err := r.Read(ctx, mem, 0, 256<<10, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if s := r.Stats(); s.Bus != 64<<10 || s.Transfers != 0 {
		t.Errorf("%+v", s)
	}
	if err := r.Read(ctx, mem, 0, 512, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
	if n := r.model.Stats().Commands - before; n != 1 {
		t.Errorf("%d commands", n)
	}
}

func TestFences(t *testing.T) {
	r, ctx := newRig(t, Config{}), longTime(t)
	disk, card := r.pattern(t, seeded(t)), newGPU(t, nil)
	buf := must(card.Alloc(128 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{}))(t)
	stream := must(card.NewStream())(t)

	// A stream fills the memory, the disk writes it, reads other data into it, and the stream copies that.
	filled, written, read := gpu.NewFence("filled"), gpu.NewFence("written"), gpu.NewFence("read")
	got := make([]byte, 128<<10)
	check(t, stream.Wait(read))
	check(t, stream.Copy(gpu.Host(got), buf.All()))
	other := must(card.NewStream())(t)
	check(t, r.Start(ctx, Transfer{Memory: mem, Length: 128 << 10, Offset: 0, Wait: written, Done: read}))
	check(t, r.Start(ctx, Transfer{Memory: mem, Write: true, Length: 128 << 10, Offset: 1 << 20, Wait: filled, Done: written}))
	if read.Signaled() || written.Signaled() {
		t.Fatal("a transfer has not waited")
	}
	check(t, other.Fill(buf.All(), 7))
	check(t, other.Signal(filled))
	check(t, stream.Sync(ctx))
	if string(got) != string(disk[:128<<10]) {
		t.Error("the stream has copied something else")
	}
	must(r.ram.ReadAt(got, 1<<20))(t)
	for i, b := range got {
		if b != 7 {
			t.Fatalf("byte %d on the disk is %d", i, b)
		}
	}

	// A fence with an error, one that comes too late, and one that would wait for itself.
	bad := dmabuf.NewFence()
	bad.Signal(syscall.EIO)
	if err := r.Do(ctx, Transfer{Memory: mem, Length: 512, Wait: bad}); !errors.Is(err, syscall.EIO) {
		t.Errorf("a fence with an error: %v", err)
	}
	if err := r.Do(ctx, Transfer{Memory: mem, Length: 512, Wait: dmabuf.NewFence(), Timeout: time.Millisecond}); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("a fence that does not come: %v", err)
	}
	circle := gpu.NewFence("circle")
	if err := r.Do(ctx, Transfer{Memory: mem, Length: 512, Wait: circle, Done: circle}); !errors.Is(err, gpu.ErrDeadlock) {
		t.Errorf("a transfer that waits for itself: %v", err)
	}
}

// Close ends transfers that wait, and waits for a command under way.
func TestClose(t *testing.T) {
	r, ctx := newRig(t, Config{}), longTime(t)
	card := newGPU(t, nil)
	buf := must(card.Alloc(256 << 10))(t)
	mem := must(r.AttachRegion(buf, AttachConfig{}))(t)
	waits := dmabuf.NewFence()
	check(t, r.Start(ctx, Transfer{Memory: mem, Length: 512, Wait: dmabuf.NewFence(), Done: waits}))
	begun, closed := make(chan struct{}), make(chan struct{})
	before := r.model.Stats().Commands
	r.ns.set(func(_ bool, off int64) error {
		if off == 0 {
			close(begun)
			<-mem.closing
			select {
			case <-closed:
				t.Error("closed while a command is under way")
			default:
			}
		}
		return nil
	})
	moves := dmabuf.NewFence()
	check(t, r.Start(ctx, Transfer{Memory: mem, Length: 256 << 10, Done: moves}))
	<-begun
	check(t, r.Disk.Close())
	close(closed)
	for _, f := range []*dmabuf.Fence{waits, moves} {
		if !f.Signaled() || !errors.Is(f.Err(), syscall.ESHUTDOWN) {
			t.Errorf("signalled: %t, %v", f.Signaled(), f.Err())
		}
	}
	if n := r.model.Stats().Commands - before; n != 1 {
		t.Errorf("%d commands", n)
	}
	if err := r.Read(ctx, mem, 0, 512, 0); !errors.Is(err, syscall.ESHUTDOWN) {
		t.Errorf("%v", err)
	}
	if err := r.Start(ctx, Transfer{Memory: mem, Length: 512, Done: dmabuf.NewFence()}); !errors.Is(err, syscall.ESHUTDOWN) {
		t.Errorf("%v", err)
	}
	if _, err := r.AttachRegion(buf, AttachConfig{}); !errors.Is(err, syscall.ESHUTDOWN) {
		t.Errorf("%v", err)
	}
}
