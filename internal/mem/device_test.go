package mem_test

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

var (
	_ io.WriterAt = (*mem.DeviceMem)(nil)
	_ io.ReaderAt = (*mem.DeviceMem)(nil)
)

// Device memory of every class passes the suite, and windows on it do.
func TestConformanceOfDeviceMemory(t *testing.T) {
	memtest.Run(t, memtest.Constructor{Name: "plain", New: deviceMemory(mem.DeviceMemConfig{})})
	if mem.RaceEnabled {
		return // the others differ in nothing that races
	}
	memtest.Run(t, memtest.Constructor{Name: "coherent", New: deviceMemory(mem.DeviceMemConfig{Coherent: true})})
	memtest.Run(t, memtest.Constructor{Name: "exported", New: deviceMemory(mem.DeviceMemConfig{Export: true})})
	memtest.Run(t, memtest.Constructor{Name: "type 2/plain", New: deviceMemory(mem.DeviceMemConfig{}), Window: ib.MWType2})
}

// deviceMemory makes device memory in a pool of its own, whose other buffers stay
// as they are.
func deviceMemory(cfg mem.DeviceMemConfig) func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	return func(tb testing.TB, n uint64, _ ib.Access) memtest.Memory {
		pool := mem.NewDevicePool(n + 256)
		around := bytes.Repeat([]byte{0x5a}, 64)
		var guards [2]*mem.DeviceMem
		var m *mem.DeviceMem
		for i := range 3 {
			c := mem.DeviceMemConfig{Length: 64}
			if i == 1 {
				c = cfg
				c.Length, c.LogAlign = n, 3
			}
			b, err := pool.Alloc(c)
			if err != nil {
				tb.Fatal(err)
			}
			if i == 1 {
				m = b
				continue
			}
			guards[i/2] = b
			if _, err := b.WriteAt(around, 0); err != nil {
				tb.Fatal(err)
			}
		}
		backing, err := m.Backing(0, n)
		if err != nil {
			tb.Fatal(err)
		}
		made := memtest.Memory{Backing: backing}
		made.Read = func(off uint64, b []byte) { mustMove(tb, m.ReadAt, off, b) }
		made.Write = func(off uint64, b []byte) { mustMove(tb, m.WriteAt, off, b) }
		if cfg.Coherent {
			if made.Bytes, err = m.Bytes(); err != nil {
				tb.Fatal(err)
			}
		}
		made.Free = func() {
			for _, g := range guards {
				now := make([]byte, 64)
				mustMove(tb, g.ReadAt, 0, now)
				if !bytes.Equal(now, around) {
					tb.Error("the neighbours have changed")
				}
			}
			for _, b := range []*mem.DeviceMem{m, guards[0], guards[1]} {
				if err := b.Free(); err != nil {
					tb.Error(err)
				}
			}
			if err := pool.Close(); err != nil {
				tb.Error(err)
			}
		}
		return made
	}
}

func mustMove(tb testing.TB, move func([]byte, int64) (int, error), off uint64, b []byte) {
	tb.Helper()
	if n, err := move(b, int64(off)); n != len(b) || err != nil {
		tb.Fatalf("%d of %d bytes, %v", n, len(b), err)
	}
}

// A buffer is zero when it is handed out, whatever was in the memory before, and however
// long the buffer is.
func TestDeviceMemoryIsZero(t *testing.T) {
	pool := mem.NewDevicePool(1 << 20)
	defer pool.Close()
	for _, n := range []uint64{1, 64, 4096, 64<<10 + 3, 300_000, 1 << 20} {
		for _, front := range []uint64{0, 7} {
			if front+n > 1<<20 {
				continue
			}
			var made []*mem.DeviceMem
			alloc := func(n uint64) *mem.DeviceMem {
				m, err := pool.Alloc(mem.DeviceMemConfig{Length: n})
				if err != nil {
					t.Fatal(err)
				}
				made = append(made, m)
				return m
			}
			if front > 0 {
				alloc(front)
			}
			for range 2 {
				m := alloc(n)
				got := bytes.Repeat([]byte{1}, int(n))
				mustMove(t, m.ReadAt, 0, got)
				if !bytes.Equal(got, make([]byte, n)) {
					t.Fatalf("a new buffer of %d bytes is not zero", n)
				}
				mustMove(t, m.WriteAt, 0, bytes.Repeat([]byte{0xff}, int(n)))
				if err := m.Free(); err != nil {
					t.Fatal(err)
				}
			}
			for _, m := range made {
				if err := m.Free(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// What is refused, and with which errno.
func TestDeviceMemoryRefuses(t *testing.T) {
	pool := mem.NewDevicePool(4096)
	defer pool.Close()
	alloc := func(cfg mem.DeviceMemConfig) (*mem.DeviceMem, error) { return pool.Alloc(cfg) }
	m, err := alloc(mem.DeviceMemConfig{Length: 1000, LogAlign: 6})
	if err != nil {
		t.Fatal(err)
	}
	_, tooMuch := alloc(mem.DeviceMemConfig{Length: 4096})
	_, none := alloc(mem.DeviceMemConfig{})
	_, wide := alloc(mem.DeviceMemConfig{Length: 1, LogAlign: 63})
	_, sparse := alloc(mem.DeviceMemConfig{Length: 1, LogAlign: 13})
	_, huge := alloc(mem.DeviceMemConfig{Length: 1 << 40, Export: true})
	first, err := m.Backing(0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	second, err := m.Backing(500, 500)
	if err != nil {
		t.Fatal(err)
	}
	_, beyond := m.Backing(500, 501)
	_, before := m.Backing(1<<63, 1)
	nothing, empty := m.Backing(0, 0)
	if empty == nil {
		empty = nothing.Close()
	}
	busy := m.Free()
	first.Close()
	stillBusy := m.Free()
	second.Close()
	b := make([]byte, 8)
	at := func(move func([]byte, int64) (int, error), off int64) error { _, err := move(b, off); return err }
	_, direct := m.Bytes()
	_, _, export := m.Export()
	end, past, negative, far := at(m.WriteAt, 992), at(m.WriteAt, 993), at(m.ReadAt, -1), at(m.ReadAt, 1<<62)
	free := errors.Join(m.Free(), m.Free())
	_, late := m.Backing(0, 1)
	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"no bytes", none, syscall.EINVAL}, {"alignment 2^63", wide, syscall.EINVAL}, {"alignment above the pool", sparse, syscall.ENOMEM},
		{"more than is left", tooMuch, syscall.ENOMEM}, {"more than there is, exported", huge, syscall.ENOMEM},
		{"a region beyond the end", beyond, syscall.EINVAL}, {"a region far away", before, syscall.EINVAL}, {"a region of nothing", empty, nil},
		{"free with two regions", busy, syscall.EBUSY}, {"free with one", stillBusy, syscall.EBUSY},
		{"access to the end", end, nil}, {"access past the end", past, syscall.EFAULT}, {"access far away", far, syscall.EFAULT}, {"a negative offset", negative, syscall.EINVAL},
		{"direct access to plain memory", direct, syscall.EOPNOTSUPP}, {"export of what is not for it", export, syscall.EOPNOTSUPP},
		{"free", free, nil}, {"a region after that", late, syscall.EINVAL}, {"access after that", at(m.ReadAt, 0), syscall.EINVAL},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, should be %v", c.name, c.err, c.want)
		}
	}
}

// An exported buffer is the same memory in every mapping of its file, and the file shows
// nothing else.
func TestDeviceMemoryExport(t *testing.T) {
	pool := mem.NewDevicePool(1 << 20)
	defer pool.Close()
	m, err := pool.Alloc(mem.DeviceMemConfig{Length: 5000, Export: true})
	if err != nil {
		t.Fatal(err)
	}
	f, off, err := m.Export()
	if err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil || off != 0 || info.Size() != 8192 {
		t.Fatalf("%v, %v, offset %d", info, err, off)
	}
	b, err := unix.Mmap(int(f.Fd()), off, 5000, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	mustMove(t, m.WriteAt, 4990, []byte("from here"))
	b[0] = 7
	got := make([]byte, 1)
	mustMove(t, m.ReadAt, 0, got)
	if got[0] != 7 || string(b[4990:4999]) != "from here" {
		t.Errorf("%d, %q", got[0], b[4990:4999])
	}
	if err := f.Truncate(0); err == nil {
		t.Error("the file can be cut short under the device")
	}
	if err := errors.Join(m.Free(), unix.Munmap(b), f.Close()); err != nil {
		t.Error(err)
	}
}

// Buffers come and go in several goroutines, which access and register them.
func TestDeviceMemoryTogether(t *testing.T) {
	pool := mem.NewDevicePool(1 << 20)
	defer pool.Close()
	var wg sync.WaitGroup
	for g := range byte(4) {
		wg.Go(func() {
			for i := range 500 {
				m, err := pool.Alloc(mem.DeviceMemConfig{Length: uint64(1 + i*7), LogAlign: uint(i % 8), Coherent: i%2 == 0})
				if err != nil {
					t.Error(err)
					return
				}
				b := bytes.Repeat([]byte{g}, int(m.Len()))
				mustMove(t, m.WriteAt, 0, b)
				backing, err := m.Backing(0, m.Len())
				if err != nil {
					t.Error(err)
					return
				}
				got := make([]byte, len(b))
				mustMove(t, m.ReadAt, 0, got)
				if !bytes.Equal(got, b) {
					t.Error("somebody else wrote here")
				}
				backing.Close()
				if err := m.Free(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
