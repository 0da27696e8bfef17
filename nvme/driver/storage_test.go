package driver

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/pci"
)

// A Storage has the bytes that were written to it, wherever they came from, and counts what the controller has moved itself.
func TestStorage(t *testing.T) {
	for _, c := range []struct {
		name string
		cmb  bool
	}{{"host memory", false}, {"controller memory buffer", true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 4<<20)}}, Config{})
			s := must(r.c.Storage(longTime(t), r.ns, StorageConfig{Queues: 3, CMB: c.cmb}))(t)
			defer func() { check(t, s.Close()) }()
			if s.Size() != 8<<20 || s.BlockSize() != 512 || s.ReadOnly() {
				t.Fatalf("%d bytes in blocks of %d", s.Size(), s.BlockSize())
			}
			near, release, err := s.Alloc(1 << 20)
			check(t, err)
			defer release()
			rnd := seeded(t)
			var all sync.WaitGroup
			for g := range 4 {
				seed := rnd.Uint64()
				all.Go(func() {
					part := 2 << 20
					base, model := int64(g*part), make([]byte, part)
					mine := near[g<<18 : (g+1)<<18]
					far := make([]byte, 1<<20)
					state := seed
					next := func(n int) int { // a generator of its own
						state = state*6364136223846793005 + 1442695040888963407
						return int(state >> 33 % uint64(n))
					}
					for i := range 80 {
						b := mine
						if next(2) == 0 {
							b = far
						}
						n := (1 + next(len(b)/512)) * 512
						off := next((part-n)/512+1) * 512
						start := next((len(b)-n)/4+1) * 4
						b = b[start : start+n]
						switch next(4) {
						case 0:
							clear(model[off : off+n])
							if err := s.Discard(base+int64(off), int64(n)); err != nil {
								t.Error(err)
								return
							}
						case 1, 2:
							for j := range b {
								b[j] = byte(i*7 + j*13 + g)
							}
							copy(model[off:], b)
							if _, err := s.WriteAt(b, base+int64(off)); err != nil {
								t.Error(err)
								return
							}
						default:
							if _, err := s.ReadAt(b, base+int64(off)); err != nil || !bytes.Equal(b, model[off:off+n]) {
								t.Errorf("%d bytes at %d: %v, or other bytes", n, off, err)
								return
							}
						}
					}
				})
			}
			all.Wait()
			check(t, s.Flush())
			if st := s.Stats(); st.Direct == 0 || st.Copied == 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

func TestStorageRefuses(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	if _, err := r.c.Storage(longTime(t), r.ns, StorageConfig{CMB: true}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("no buffer: %v", err)
	}
	odd := r.ns
	odd.Metadata = 8
	if _, err := r.c.Storage(longTime(t), odd, StorageConfig{}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("metadata: %v", err)
	}
	s := must(r.c.Storage(longTime(t), r.ns, StorageConfig{}))(t)
	defer func() { check(t, s.Close()) }()
	b := make([]byte, 1024)
	for _, off := range []int64{-512, 1, 8 << 20, 8<<20 - 512, 1 << 62} {
		if _, err := s.ReadAt(b, off); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("reading at %d: %v", off, err)
		}
		if err := s.Discard(off, 1024); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("discarding at %d: %v", off, err)
		}
	}
	if _, err := s.WriteAt(b[:100], 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("100 bytes: %v", err)
	}
}

// late is storage with a read that has its data late: from is what it waits for.
type late struct {
	nvme.Namespace
	fails atomic.Bool
	from  atomic.Pointer[chan struct{}]
}

// hold has the next read wait until the function that it returns is called.
func (l *late) hold() (release func()) {
	from := make(chan struct{})
	l.from.Store(&from)
	return sync.OnceFunc(func() { close(from) })
}

func (l *late) ReadAt(p []byte, off int64) (int, error) {
	if l.fails.Load() {
		return 0, io.ErrUnexpectedEOF
	}
	from := l.from.Swap(nil)
	if from == nil {
		return l.Namespace.ReadAt(p, off)
	}
	<-*from
	for i := range p {
		p[i] = 0xaa
	}
	return len(p), nil
}

// lateStorage makes a Storage of a late namespace.
func lateStorage(t *testing.T, r *rig, cfg StorageConfig) (*late, *Storage) {
	t.Helper()
	disk := &late{Namespace: must(nvme.NewMemory(1<<20, 512))(t)}
	check(t, r.sub.AddNamespace(2, disk))
	s := must(r.c.Storage(longTime(t), Namespace{ID: 2, Blocks: 2048, BlockSize: 512}, cfg))(t)
	t.Cleanup(func() { check(t, s.Close()) })
	return disk, s
}

// still fails the test if a call returns before something else has happened.
func still(t *testing.T, call <-chan error, happened func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !happened(); time.Sleep(time.Millisecond) {
		select {
		case err := <-call:
			t.Fatalf("the call returned while the controller had its memory: %v", err)
		default:
		}
		if time.Now().After(limit) {
			t.Fatal("it did not happen")
		}
	}
}

// A call whose command is given up returns after a reset, when the controller does not use its memory any more. The
// calls after it work.
func TestStorageGivesUp(t *testing.T) {
	for _, tt := range []struct {
		what        string
		cmb, direct bool
		want        error
	}{
		{"no completion, controller memory buffer", true, true, ErrTimeout},
		{"no completion, host memory", false, true, ErrTimeout},
		{"no completion, copied", false, false, ErrTimeout},
		{"fatal error", true, true, ErrFatal},
	} {
		t.Run(tt.what, func(t *testing.T) {
			regs, cfg := new(stubborn), Config{}
			if tt.want == ErrTimeout {
				cfg.Timeout = 500 * time.Millisecond
			}
			r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20)}}, cfg, regs.wrap)
			disk, s := lateStorage(t, r, StorageConfig{Queues: 2, CMB: tt.cmb})
			b, release, err := s.Alloc(4096)
			check(t, err)
			defer release()
			p := b
			if !tt.direct {
				p = make([]byte, 4096)
			}
			let := disk.hold()
			defer let()
			call := make(chan error, 1)
			go func() {
				_, err := s.ReadAt(p, 0)
				call <- err
			}()
			still(t, call, func() bool { return disk.from.Load() == nil })
			regs.fatal.Store(tt.want == ErrFatal)
			still(t, call, func() bool { return nvme.CC(r.model.Read32(nvme.RegCC))&nvme.CCEnable == 0 })
			let()
			if err := <-call; !errors.Is(err, tt.want) {
				t.Errorf("%v, should be %v", err, tt.want)
			}
			want := bytes.Repeat([]byte{0x11}, 4096)
			for range 4 { // each queue, twice
				copy(b, want)
				if _, err := s.WriteAt(b, 4096); err != nil {
					t.Fatal(err)
				}
				clear(b)
				if _, err := s.ReadAt(b, 4096); err != nil || !bytes.Equal(b, want) {
					t.Fatalf("%v, or other bytes", err)
				}
			}
		})
	}
}

// A call waits as long as the controller does not stop, and returns what the command completes with at last.
func TestStorageDoesNotStop(t *testing.T) {
	regs := new(stubborn)
	r := newRig(t, pci.Config{}, Config{Timeout: 500 * time.Millisecond}, regs.wrap)
	disk, s := lateStorage(t, r, StorageConfig{})
	let := disk.hold()
	defer let()
	regs.ignores.Store(true)
	defer regs.ignores.Store(false)
	call, p := make(chan error, 1), make([]byte, 512)
	go func() {
		_, err := s.ReadAt(p, 0)
		call <- err
	}()
	still(t, call, func() bool { return regs.ignored.Load() >= 2 })
	let()
	if err := <-call; err != nil || p[0] != 0xaa {
		t.Errorf("%#x, %v", p[0], err)
	}
	if err := s.Flush(); !errors.Is(err, ErrTimeout) {
		t.Errorf("a call beside a controller that does not stop: %v", err)
	}
	regs.ignores.Store(false)
	check(t, s.Flush())
}

// A Storage makes new queues when the program has reset the controller.
func TestStorageReset(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	_, s := lateStorage(t, r, StorageConfig{Queues: 3})
	for range 3 {
		check(t, r.c.Reset())
		for range 4 {
			check(t, s.Flush())
		}
	}
}

// Close beside calls ends them, and calls after it return ErrClosed.
func TestStorageClosed(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	before := r.host.Used()
	_, s := lateStorage(t, r, StorageConfig{Queues: 2})
	var all, begun sync.WaitGroup
	for range 4 {
		begun.Add(1)
		all.Go(func() {
			_, err := s.ReadAt(make([]byte, 4096), 0)
			begun.Done()
			for err == nil {
				_, err = s.ReadAt(make([]byte, 4096), 0)
			}
			if !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
	}
	begun.Wait()
	check(t, s.Close())
	all.Wait()
	check(t, s.Close())
	_, read := s.ReadAt(make([]byte, 4096), 0)
	_, write := s.WriteAt(make([]byte, 4096), 0)
	for what, err := range map[string]error{"read": read, "write": write, "flush": s.Flush(), "discard": s.Discard(0, 4096)} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if n := r.host.Used(); n != before {
		t.Errorf("%d pieces of memory, %d before", n, before)
	}
}

// A command that has failed has completed, so its memory is used again.
func TestStorageFailures(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	disk, s := lateStorage(t, r, StorageConfig{})
	disk.fails.Store(true)
	var first int
	for i := range 20 {
		if _, err := s.ReadAt(make([]byte, 4096), 0); !errors.Is(err, nvme.StatusUnrecoveredRead) {
			t.Fatal(err)
		}
		if i == 0 {
			first = r.host.Used()
		}
	}
	if n := r.host.Used(); n != first {
		t.Errorf("%d pieces of memory, %d after the first failure", n, first)
	}
}

// Calls say for ever that the controller is gone.
func TestStorageGone(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	_, s := lateStorage(t, r, StorageConfig{Queues: 2})
	r.model.Close()
	for range 5 {
		if err := s.Flush(); !errors.Is(err, ErrGone) {
			t.Error(err)
		}
	}
}

// deaf is registers of a controller that does not see commands of its admin queue for a while.
type deaf struct {
	nvme.Registers
	on atomic.Bool
}

func (d *deaf) wrap(regs nvme.Registers) nvme.Registers {
	d.Registers = regs
	return d
}

func (d *deaf) Write32(off, v uint32) {
	switch {
	case off == nvme.RegDoorbells && d.on.Load():
		return
	case off == nvme.RegCC && nvme.CC(v)&nvme.CCEnable == 0:
		d.on.Store(false) // a reset helps
	}
	d.Registers.Write32(off, v)
}

// A queue that cannot be made in time leads to a reset, too, which gives the memory of the queue back.
func TestStorageNewQueueGivesUp(t *testing.T) {
	regs := new(deaf)
	r := newRig(t, pci.Config{}, Config{Timeout: 500 * time.Millisecond}, regs.wrap)
	_, s := lateStorage(t, r, StorageConfig{})
	before := r.host.Used()
	check(t, r.c.Reset())
	regs.on.Store(true)
	if err := s.Flush(); !errors.Is(err, ErrTimeout) {
		t.Error(err)
	}
	check(t, s.Flush())
	if n := r.host.Used(); n != before {
		t.Errorf("%d pieces of memory, %d before", n, before)
	}
	// An admin queue that has ended is not asked, so nothing is kept.
	r.c.ring.kill(ErrTimeout)
	for range 3 {
		if _, err := r.c.NewQueue(longTime(t), QueueConfig{}); !errors.Is(err, ErrTimeout) {
			t.Error(err)
		}
	}
	if n := r.host.Used(); n != before {
		t.Errorf("%d pieces of memory, %d before", n, before)
	}
	check(t, r.c.Reset())
}

// Move moves data at an address of the bus that the Storage has not allocated.
func TestStorageMove(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	s := must(r.c.Storage(longTime(t), r.ns, StorageConfig{}))(t)
	defer func() { check(t, s.Close()) }()
	const at = 1 << 50
	peer, want := make([]byte, s.Piece()+4096), make([]byte, s.Piece())
	check(t, r.host.space.Add(at, peer))
	fill(peer, seeded(t))
	copy(want, peer[4:])
	check(t, s.Move(at+4, s.Piece(), 1024, true))
	clear(peer)
	check(t, s.Move(at, s.Piece(), 1024, false))
	if !bytes.Equal(peer[:s.Piece()], want) {
		t.Error("the data differs")
	}
	if st := s.Stats(); st.Direct != 2*uint64(s.Piece()) || st.Copied != 0 {
		t.Errorf("%+v", st)
	}
	for _, c := range []struct {
		name string
		at   uint64
		n    int
		off  int64
	}{
		{"more than a piece", at, s.Piece() + 512, 0}, {"a part of a block", at, 100, 0}, {"beyond the disk", at, 1024, s.Size() - 512},
		{"at an odd address", at + 2, 512, 0}, {"less than nothing", at, -512, 0}, {"nothing", at, 0, 0},
	} {
		if err := s.Move(c.at, c.n, c.off, false); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	var status nvme.Status
	for _, nowhere := range []uint64{1 << 51, ^uint64(0) - 255} {
		if err := s.Move(nowhere, 512, 0, false); !errors.As(err, &status) {
			t.Errorf("at %#x, where nothing is: %v", nowhere, err)
		}
	}
	check(t, r.host.space.Remove(at))
}
