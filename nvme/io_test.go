package nvme

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
)

// both runs a test over memory and over a file.
func both(t *testing.T, size int64, blockSize int, test func(t *testing.T, ns Namespace)) {
	t.Run("memory", func(t *testing.T) { test(t, must(NewMemory(size, blockSize))(t)) })
	for name, cfg := range map[string]FileConfig{"file": {BlockSize: blockSize}, "direct": {BlockSize: blockSize, Direct: true}} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "disk")
			check(t, os.WriteFile(path, nil, 0o600))
			check(t, os.Truncate(path, size+100)) // what is no whole block is not used
			f, err := OpenFile(path, cfg)
			if cfg.Direct && errors.Is(err, syscall.EINVAL) {
				t.Skip("kernel: this file system has no O_DIRECT, or none by such blocks: ", err)
			}
			check(t, err)
			defer func() {
				check(t, f.Close())
				check(t, f.Close())
			}()
			if f.Size() != size {
				t.Fatalf("%d bytes, should be %d", f.Size(), size)
			}
			test(t, f)
		})
	}
}

// A file with Direct moves data that begins where the disk can take it, and copies other data. What another reader of the
// file sees is the same.
func TestDirect(t *testing.T) {
	const size = 3 << 20 // more than one lock guards
	both(t, size, 4096, func(t *testing.T, ns Namespace) {
		f, ok := ns.(*File)
		if !ok || !f.cfg.Direct {
			return
		}
		rnd := seeded(t)
		room := alignedBytes(size + 4096)
		for i, off := range []int{0, 1} {
			before := f.Stats()
			fill(room, rnd)
			must(f.WriteAt(room[off:][:size], 0))(t)
			got := must(os.ReadFile(f.f.Name()))(t)
			if !bytes.Equal(got[:size], room[off:][:size]) {
				t.Error("the file has other bytes")
			}
			clear(room)
			must(f.ReadAt(room[off:][:size], 0))(t)
			if !bytes.Equal(got[:size], room[off:][:size]) {
				t.Error("other bytes were read")
			}
			st := f.Stats()
			moved := []uint64{st.Direct - before.Direct, st.Copied - before.Copied}
			if want := []uint64{2 * size * uint64(1-i), 2 * size * uint64(i)}; !slices.Equal(moved, want) {
				t.Errorf("at offset %d: %v bytes by the disk and copied, should be %v", off, moved, want)
			}
		}
	})
	if _, err := OpenFile(filepath.Join(t.TempDir(), "none"), FileConfig{BlockSize: 4096, Direct: true}); !errors.Is(err, syscall.ENOENT) {
		t.Error(err)
	}
}

func TestReadWrite(t *testing.T) {
	for _, blockSize := range []int{512, 4096} {
		both(t, 4<<20, blockSize, func(t *testing.T, ns Namespace) {
			r := newRig(t, ns, ControllerConfig{})
			rnd := seeded(t)
			blocks := 300 << 10 / blockSize // more than a chunk
			out := fill(make([]byte, blocks*blockSize), rnd)
			r.want(false, ioCmd(IOWrite, 3, blocks), out, StatusSuccess)
			in := make([]byte, len(out))
			r.want(false, ioCmd(IORead, 3, blocks), in, StatusSuccess)
			if !bytes.Equal(in, out) {
				t.Error("other bytes were read than written")
			}
			r.want(false, ioCmd(IORead, 0, 3), in, StatusSuccess)
			if !bytes.Equal(in[:3*blockSize], make([]byte, 3*blockSize)) {
				t.Error("blocks before were written")
			}
			r.want(false, ioCmd(IOCompare, 3, blocks), out, StatusSuccess)
			out[len(out)-1]++
			r.want(false, ioCmd(IOCompare, 3, blocks), out, StatusCompareFailure)
			r.want(false, Command{Opcode: IOFlush, NSID: 1}, nil, StatusSuccess)
			r.want(false, Command{Opcode: IOFlush, NSID: NSIDAll}, nil, StatusSuccess)
		})
	}
}

func TestZeroesAndDeallocate(t *testing.T) {
	both(t, 4<<20, 512, func(t *testing.T, ns Namespace) {
		r := newRig(t, ns, ControllerConfig{})
		ones := bytes.Repeat([]byte{1}, 1<<20)
		image := bytes.Repeat([]byte{1}, 4<<20)
		for lba := uint64(0); lba < 8192; lba += 2048 {
			r.want(false, ioCmd(IOWrite, lba, 2048), ones, StatusSuccess)
		}
		zero := func(lba, n int) { clear(image[512*lba : 512*(lba+n)]) }
		same := func(what string) {
			t.Helper()
			got := make([]byte, len(image))
			if _, err := ns.ReadAt(got, 0); err != nil || !bytes.Equal(got, image) {
				t.Fatalf("after %s: %v, or other bytes", what, err)
			}
		}
		r.want(false, ioCmd(IOWriteZeroes, 5, 3), nil, StatusSuccess)
		zero(5, 3)
		same("write zeroes")
		c := ioCmd(IOWriteZeroes, 100, 4096)
		c.CDW12 |= CDW12Deallocate | CDW12FUA
		r.want(false, c, nil, StatusSuccess)
		zero(100, 4096)
		same("write zeroes with deallocate")

		ranges := func(list ...[2]uint64) (Command, []byte) {
			b := make([]byte, 16*len(list))
			for i, l := range list {
				PutRange((*[16]byte)(b[16*i:]), l[0], uint32(l[1]))
			}
			return Command{Opcode: IODatasetManagement, NSID: 1, CDW10: uint32(len(list) - 1), CDW11: CDW11Deallocate}, b
		}
		c, b := ranges([2]uint64{5000, 2}, [2]uint64{8191, 1}, [2]uint64{8192, 0}, [2]uint64{5010, 1024})
		r.want(false, c, b, StatusSuccess)
		zero(5000, 2)
		zero(8191, 1)
		zero(5010, 1024)
		same("deallocate")
		c, b = ranges([2]uint64{0, 1}, [2]uint64{8191, 2})
		r.want(false, c, b, StatusLBAOutOfRange|dnr)
		same("a deallocate of which one range is wrong")
		c, b = ranges([2]uint64{0, 1}, [2]uint64{math.MaxUint64, math.MaxUint32})
		r.want(false, c, b, StatusLBAOutOfRange|dnr)
		c, b = ranges([2]uint64{1, 1})
		c.CDW11 = 1 // a hint
		r.want(false, c, b, StatusSuccess)
		same("a hint")
	})
}

func TestIOErrors(t *testing.T) {
	ns := must(NewMemory(1<<20, 512))(t)
	r := newRig(t, ns, ControllerConfig{MDTS: 1})
	buf := make([]byte, 1<<20)
	with := func(c Command, change func(*Command)) Command { change(&c); return c }
	for _, tt := range []struct {
		what string
		cmd  Command
		want Status
	}{
		{"the last block", ioCmd(IORead, 2047, 1), StatusSuccess},
		{"behind the end", ioCmd(IORead, 2048, 1), StatusLBAOutOfRange | dnr},
		{"over the end", ioCmd(IORead, 2047, 2), StatusLBAOutOfRange | dnr},
		{"a sum that wraps", ioCmd(IOWrite, math.MaxUint64, 2), StatusLBAOutOfRange | dnr},
		{"a product that wraps", ioCmd(IORead, 1<<55, 1), StatusLBAOutOfRange | dnr},
		{"write zeroes that wrap", ioCmd(IOWriteZeroes, math.MaxUint64-1, 65536), StatusLBAOutOfRange | dnr},
		{"compare behind the end", ioCmd(IOCompare, 2048, 1), StatusLBAOutOfRange | dnr},
		{"MDTS", ioCmd(IORead, 0, 16), StatusSuccess},
		{"more than MDTS", ioCmd(IORead, 0, 17), StatusInvalidField | dnr},
		{"write zeroes of more than MDTS", ioCmd(IOWriteZeroes, 0, 2048), StatusSuccess},
		{"namespace 0", with(ioCmd(IORead, 0, 1), func(c *Command) { c.NSID = 0 }), StatusInvalidNamespace | dnr},
		{"a namespace that is not active", with(ioCmd(IORead, 0, 1), func(c *Command) { c.NSID = 2 }), StatusInvalidField | dnr},
		{"a namespace that cannot be", with(ioCmd(IORead, 0, 1), func(c *Command) { c.NSID = 1025 }), StatusInvalidNamespace | dnr},
		{"all namespaces", with(ioCmd(IOWrite, 0, 1), func(c *Command) { c.NSID = NSIDAll }), StatusInvalidField | dnr},
		{"fused", with(ioCmd(IORead, 0, 1), func(c *Command) { c.Flags = 1 }), StatusInvalidField | dnr},
		{"an opcode that there is not", ioCmd(0x7e, 0, 1), StatusInvalidOpcode | dnr},
		{"fabrics", ioCmd(OpcodeFabrics, 0, 1), StatusInvalidOpcode | dnr},
		{"flush of no namespace", Command{Opcode: IOFlush, NSID: 5}, StatusInvalidField | dnr},
	} {
		t.Run(tt.what, func(t *testing.T) {
			r.t = t
			r.want(false, tt.cmd, buf, tt.want)
			// Execute does not rely on Transfer having been asked.
			cmd := tt.cmd
			if done, _ := r.c.Execute(false, &cmd, [][]byte{buf}); done.Status != tt.want {
				t.Errorf("Execute alone: %v, should be %v", done.Status, tt.want)
			}
		})
	}
	r.t = t
	cmd := ioCmd(IOWrite, 0, 2)
	for _, data := range [][][]byte{nil, {buf[:1023]}, {buf[:512], nil, buf[:511]}} {
		if done, _ := r.c.Execute(false, &cmd, data); done.Status != StatusDataSGLLength|dnr {
			t.Errorf("too little data: %v", done.Status)
		}
	}
}

func TestReadOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	check(t, os.WriteFile(path, bytes.Repeat([]byte{7}, 8192), 0o400))
	f := must(OpenFile(path, FileConfig{BlockSize: 512, ReadOnly: true}))(t)
	defer f.Close()
	r := newRig(t, f, ControllerConfig{})
	buf := make([]byte, 512)
	r.want(false, ioCmd(IORead, 0, 1), buf, StatusSuccess)
	if buf[0] != 7 {
		t.Error("other bytes")
	}
	r.want(false, ioCmd(IOWrite, 0, 1), buf, StatusWriteProtected|dnr)
	r.want(false, ioCmd(IOWriteZeroes, 0, 1), nil, StatusWriteProtected|dnr)
	r.want(false, Command{Opcode: IODatasetManagement, NSID: 1, CDW11: CDW11Deallocate}, buf, StatusWriteProtected|dnr)
	r.want(false, Command{Opcode: IOFlush, NSID: 1}, nil, StatusSuccess)
	if b := r.identify(CNSNamespace, 1, 0); b[99] != 1 {
		t.Error("identify does not say that it is read-only")
	}
}

// broken is storage that fails, and counts flushes.
type broken struct {
	Namespace
	read, write, flush error
	flushes            int
}

func (b *broken) ReadAt(p []byte, off int64) (int, error) {
	if b.read != nil {
		return 0, b.read
	}
	return b.Namespace.ReadAt(p, off)
}

func (b *broken) WriteAt(p []byte, off int64) (int, error) {
	if b.write != nil {
		return 0, b.write
	}
	return b.Namespace.WriteAt(p, off)
}

func (b *broken) Flush() error { b.flushes++; return b.flush }

func TestStorageFails(t *testing.T) {
	b := &broken{Namespace: must(NewMemory(1<<20, 512))(t)}
	r := newRig(t, b, ControllerConfig{})
	buf := make([]byte, 4096)
	b.read, b.write = io.ErrUnexpectedEOF, fmt.Errorf("worn out: %w", syscall.EIO)
	r.want(false, ioCmd(IORead, 0, 8), buf, StatusUnrecoveredRead)
	r.want(false, ioCmd(IOCompare, 0, 8), buf, StatusUnrecoveredRead)
	r.want(false, ioCmd(IOWrite, 0, 8), buf, StatusWriteFault)
	r.want(false, ioCmd(IOWriteZeroes, 0, 8), nil, StatusWriteFault)
	b.write = syscall.ENOSPC
	r.want(false, ioCmd(IOWrite, 0, 8), buf, StatusCapacityExceeded)
	b.read, b.write = nil, nil
	b.flush = syscall.EIO
	r.want(false, Command{Opcode: IOFlush, NSID: 1}, nil, StatusWriteFault)
	r.want(false, Command{Opcode: IOFlush, NSID: NSIDAll}, nil, StatusWriteFault)
	b.flush = nil
	b.read, b.write = fmt.Errorf("a disk behind it: %w", StatusUnrecoveredRead|StatusDNR), StatusWriteFault
	r.want(false, ioCmd(IORead, 0, 8), buf, StatusUnrecoveredRead)
	r.want(false, ioCmd(IOWrite, 0, 8), buf, StatusWriteFault)
	// What is not the medium's fault is neither counted as that nor for ever.
	for _, err := range []error{errors.New("no completion in time"), os.ErrClosed, syscall.ENODEV, syscall.ECONNRESET, StatusInvalidField | StatusDNR} {
		b.read, b.write, b.flush = err, err, err
		r.want(false, ioCmd(IORead, 0, 8), buf, StatusInternal)
		r.want(false, ioCmd(IOCompare, 0, 8), buf, StatusInternal)
		r.want(false, ioCmd(IOWrite, 0, 8), buf, StatusInternal)
		r.want(false, Command{Opcode: IOFlush, NSID: 1}, nil, StatusInternal)
	}
	smart := r.logPage(LogSMART, 512)
	if n := le.Uint64(smart[160:]); n != 8 {
		t.Errorf("%d media errors, should be 8", n)
	}
}

// A write is on stable storage before its completion if the host says so, or has switched the cache off.
func TestFUA(t *testing.T) {
	b := &broken{Namespace: must(NewMemory(1<<20, 512))(t)}
	r := newRig(t, b, ControllerConfig{})
	buf := make([]byte, 512)
	flushes := func(what string, cmd Command, want int) {
		t.Helper()
		b.flushes = 0
		r.want(false, cmd, buf, StatusSuccess)
		if b.flushes != want {
			t.Errorf("%s: %d flushes, should be %d", what, b.flushes, want)
		}
	}
	fua := ioCmd(IOWrite, 0, 1)
	fua.CDW12 |= CDW12FUA
	flushes("write", ioCmd(IOWrite, 0, 1), 0)
	flushes("write with FUA", fua, 1)
	r.want(true, setFeature(FeatureVolatileWriteCache, 0), nil, StatusSuccess)
	flushes("write without a cache", ioCmd(IOWrite, 0, 1), 1)
	flushes("write zeroes without a cache", ioCmd(IOWriteZeroes, 0, 1), 1)
	r.want(true, setFeature(FeatureVolatileWriteCache, 1), nil, StatusSuccess)
	flushes("write", ioCmd(IOWrite, 0, 1), 0)
}

func TestGeometry(t *testing.T) {
	for _, g := range []struct {
		size  int64
		block int
	}{{0, 512}, {-512, 512}, {100, 512}, {1000, 512}, {1 << 20, 0}, {1 << 20, 256}, {1 << 20, 1000}, {1 << 30, 1 << 17}, {1 << 20, -512}} {
		if _, err := NewMemory(g.size, g.block); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%d bytes in blocks of %d: %v", g.size, g.block, err)
		}
	}
	if _, err := NewMemory(1<<43, 512); !errors.Is(err, syscall.ENOMEM) {
		t.Error(err)
	}
	if _, err := OpenFile(filepath.Join(t.TempDir(), "none"), FileConfig{BlockSize: 512}); !errors.Is(err, syscall.ENOENT) {
		t.Error(err)
	}
	// Storage of which little is written takes little memory.
	huge := must(NewMemory(1<<40, 4096))(t)
	buf := bytes.Repeat([]byte{3}, 4096)
	if _, err := huge.WriteAt(buf, 1<<40-4096); err != nil {
		t.Error(err)
	}
	if _, err := huge.WriteAt(buf, 1<<40-4095); err == nil {
		t.Error("a write over the end")
	}
	if _, err := huge.ReadAt(buf, -1); err == nil {
		t.Error("a read before the beginning")
	}
	if huge.Discard(math.MaxInt64, math.MaxInt64) == nil {
		t.Error("a discard that wraps")
	}
}

// A block is whole: beside writers of blocks of one value each, no reader sees a block of two values.
func TestBlocksAreWhole(t *testing.T) {
	both(t, 1<<20, 4096, func(t *testing.T, ns Namespace) {
		r := newRig(t, ns, ControllerConfig{})
		const rounds = 300
		var wg sync.WaitGroup
		for w := range 2 {
			wg.Go(func() {
				buf := make([]byte, 8192)
				for i := range rounds {
					for j := range buf {
						buf[j] = byte(i + w)
					}
					cmd := ioCmd(IOWrite, 0, 2)
					r.c.Execute(false, &cmd, [][]byte{buf[:100], buf[100:]})
				}
			})
		}
		wg.Go(func() {
			buf := make([]byte, 8192)
			for range rounds {
				cmd := ioCmd(IORead, 0, 2)
				r.c.Execute(false, &cmd, [][]byte{buf[:4000], buf[4000:]})
				for b := range 2 {
					if block := buf[4096*b:][:4096]; !bytes.Equal(block[1:], block[:4095]) {
						t.Error("a block of two writes")
						return
					}
				}
			}
		})
		wg.Wait()
	})
}

// A file system without holes gets zeros.
func TestDiscardWithoutHoles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	content := bytes.Repeat([]byte{9}, 3<<20)
	check(t, os.WriteFile(path, content, 0o600))
	f := must(OpenFile(path, FileConfig{BlockSize: 512}))(t)
	defer f.Close()
	tries := 0
	f.hole = func(int64, int64) error { tries++; return syscall.EOPNOTSUPP }
	check(t, f.Discard(1024, 2<<20))
	clear(content[1024 : 1024+2<<20])
	got := make([]byte, len(content))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) || tries == 0 {
		t.Errorf("%v, or other bytes; %d tries", err, tries)
	}
	f.hole = func(int64, int64) error { return syscall.EIO }
	if err := f.Discard(0, 512); !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	for _, bad := range [][2]int64{{-512, 512}, {0, 4 << 20}, {math.MaxInt64, 512}} {
		if f.Discard(bad[0], bad[1]) == nil {
			t.Errorf("%d bytes at %d", bad[1], bad[0])
		}
		if _, err := f.ReadAt(make([]byte, 512), bad[0]); bad[0] != 0 && err == nil {
			t.Errorf("a read at %d", bad[0])
		}
	}
	check(t, os.Truncate(path, 512)) // another program shortens the file
	if _, err := f.ReadAt(make([]byte, 1024), 0); err == nil {
		t.Error("bytes that the file does not have")
	}
}
