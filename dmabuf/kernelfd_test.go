package dmabuf

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/sys/dmabuftest"
)

const udmabufNode = "/dev/udmabuf"

// What cannot be a dma-buf of the kernel is refused with a reason, and not pinned afterwards.
func TestKernelFDRefused(t *testing.T) {
	ctx := background(t) // the runtime's own descriptors, for timers, count from the first one on
	before := openFDs(t)
	alloc := func(cfg MemoryConfig) *Memory {
		m, err := Alloc(cfg)
		check(t, err)
		return m
	}
	good := alloc(MemoryConfig{Size: 4 * 4096, Segments: 3})
	odd := alloc(MemoryConfig{Size: 5000})
	noPin := alloc(MemoryConfig{Size: 4096, NoPin: true})
	revoked := alloc(MemoryConfig{Size: 4096})
	check(t, revoked.Revoke(ctx))
	released := alloc(MemoryConfig{Size: 4096})
	check(t, released.Close())

	loose, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	check(t, err)
	check(t, unix.Ftruncate(loose, 4*4096))
	shrinks := export(t, nil)
	shrinks.table = func() *Table { return NewFileTable(FileSegment{FD: loose, Bytes: shrinks.bytes}) }
	private := export(t, nil)
	far := export(t, nil)
	far.set("attach", syscall.EBUSY)

	for _, c := range []struct {
		name   string
		b      *Buffer
		errno  error
		reason string
	}{
		{"part of a page", odd.Buffer(), syscall.EOPNOTSUPP, "not whole pages"},
		{"no pins", noPin.Buffer(), syscall.EOPNOTSUPP, "cannot be pinned"},
		{"revoked", revoked.Buffer(), syscall.ENODEV, "revoked"},
		{"released", released.Buffer(), syscall.EINVAL, "released"},
		{"no memory file", private.buffer, syscall.EOPNOTSUPP, "memory files"},
		{"no seal", shrinks.buffer, syscall.EOPNOTSUPP, "sealed"},
		{"refused", far.buffer, syscall.EBUSY, "the exporter"},
	} {
		fd, err := c.b.KernelFD(ctx)
		wantErr(t, c.name, err, c.errno)
		if err == nil || fd != -1 || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: %d, %v; the reason should name %q", c.name, fd, err, c.reason)
		}
	}
	locked(good.Buffer().Reservation(), func() { good.Buffer().Reservation().Add(NewFence(), Kernel) })
	_, err = good.Buffer().KernelFD(ended())
	wantErr(t, "a fence that is not signalled", err, syscall.ETIMEDOUT)
	check(t, good.Close())

	if _, err := os.Stat(udmabufNode); err != nil { // otherwise TestKernelFD finds that it works
		m := alloc(MemoryConfig{Size: 4 * 4096, Segments: 3})
		fd, err := m.Buffer().KernelFD(ctx)
		wantErr(t, "no udmabuf", err, syscall.EOPNOTSUPP)
		if err == nil || fd != -1 || !strings.Contains(err.Error(), udmabufNode) {
			t.Errorf("no udmabuf: %d, %v", fd, err)
		}
		check(t, m.Move(ctx))
		check(t, m.Revoke(ctx))
		check(t, m.Close())
	}
	check(t, odd.Move(ctx))
	for _, m := range []*Memory{odd, noPin, revoked} {
		if n := m.Buffer().refs.Load(); n != 1 {
			t.Errorf("%d references are left", n)
		}
		check(t, m.Close())
	}
	for _, e := range []*exporter{shrinks, private, far} {
		e.end()
	}
	check(t, sys.CloseFD(loose))
	// Those of tests before may be closed meanwhile.
	eventually(t, "no descriptors are left", func() bool { return openFDs(t) <= before })
}

// needUDMABuf skips a test where the kernel makes no dma-bufs of memory files.
func needUDMABuf(t *testing.T) {
	t.Helper()
	fd, cleanup, err := dmabuftest.NewUDMABuf(4096)
	if dmabuftest.Absent(err) {
		t.Skip("kernel:", err)
	}
	check(t, err)
	if fd >= 0 {
		cleanup()
	}
}

// held finds that the memory can neither move nor be taken away, also when the process has looked whether
// the dma-buf has ended.
func held(t *testing.T, m *Memory) {
	t.Helper()
	for range 25 {
		ctx := background(t)
		wantErr(t, "Move", m.Move(ctx), syscall.EBUSY)
		wantErr(t, "Evict", m.Evict(ctx), syscall.EBUSY)
		wantErr(t, "Revoke", m.Revoke(ctx), syscall.EBUSY)
		if t.Failed() {
			t.FailNow()
		}
		time.Sleep(100 * time.Millisecond) // the process looks once a second
	}
}

// free finds that the memory moves soon, and still has its bytes, and that nothing is left of descriptors.
func free(t *testing.T, m *Memory, want []byte) {
	t.Helper()
	eventually(t, "the memory moves", func() bool { return m.Move(background(t)) == nil })
	got := make([]byte, len(want))
	_, err := m.ReadAt(got, 0)
	check(t, err)
	if !bytes.Equal(got, want) {
		t.Error("other bytes after the move")
	}
	eventually(t, "one reference", func() bool { return m.Buffer().refs.Load() == 1 })
	check(t, m.Revoke(background(t)))
}

func fill(r *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// kernelChild is the variable that makes a test the process that has a dma-buf of the kernel.
const kernelChild = "VERBENA_TEST_KERNEL_CHILD"

// TestKernelFDProcess is the process of TestKernelFD. It knows nothing of this package: it maps a dma-buf,
// closes the descriptor, inverts all bytes, and waits until its input ends.
func TestKernelFDProcess(t *testing.T) {
	if os.Getenv(kernelChild) == "" {
		return // it does its work in the child only
	}
	info, err := sys.DMABufInfoOf(3)
	check(t, err)
	b, err := sys.MapDMABuf(3, info.Size, true)
	check(t, err)
	check(t, sys.DMABufSync(3, true, true, false))
	for i := range b {
		b[i] ^= 0xff
	}
	check(t, sys.DMABufSync(3, true, true, true))
	check(t, sys.CloseFD(3))
	_, err = os.Stdout.WriteString("\ninverted\n")
	check(t, err)
	_, err = io.Copy(io.Discard, os.Stdin)
	check(t, err)
	check(t, sys.Unmap(b))
}

// A dma-buf of the kernel has the memory's bytes, here and in another process. The memory stays in place until nobody
// has it.
func TestKernelFD(t *testing.T) {
	needUDMABuf(t)
	r, ctx := random(t), background(t)
	for _, segments := range []int{1, 5} {
		before := openFDs(t)
		const size = 7 * 4096
		m, err := Alloc(MemoryConfig{Size: size, Segments: segments})
		check(t, err)
		data := make([]byte, size)
		fill(r, data)
		_, err = m.WriteAt(data, 0)
		check(t, err)
		check(t, m.Move(ctx))
		fd, err := m.Buffer().KernelFD(ctx)
		check(t, err)
		info, err := sys.DMABufInfoOf(fd)
		if err != nil || info.Size != size || info.Exporter != "udmabuf" {
			t.Errorf("%+v, %v", info, err)
		}
		second, err := m.Buffer().KernelFD(ctx)
		check(t, err)
		for _, fd := range []int{fd, second} {
			b, err := Get(fd)
			check(t, err)
			if b != m.Buffer() {
				t.Error("a descriptor that comes back leads to another buffer")
			}
			b.Put()
		}
		check(t, sys.CloseFD(second))

		child := exec.Command(os.Args[0], "-test.run=^TestKernelFDProcess$", "-test.v")
		child.Env = append(os.Environ(), kernelChild+"=1")
		file, err := sys.DupFile(fd, "dma-buf")
		check(t, err)
		child.ExtraFiles = []*os.File{file}
		in, err := child.StdinPipe()
		check(t, err)
		out, err := child.StdoutPipe()
		check(t, err)
		check(t, child.Start())
		check(t, file.Close())
		check(t, sys.CloseFD(fd))
		lines := bufio.NewScanner(out)
		for lines.Scan() && lines.Text() != "inverted" {
			continue
		}
		for i := range data {
			data[i] ^= 0xff
		}
		got := make([]byte, size)
		_, err = m.ReadAt(got, 0)
		check(t, err)
		if !bytes.Equal(got, data) {
			t.Error("the memory does not have what another process has written to the dma-buf")
		}
		held(t, m)
		check(t, in.Close())
		_, err = io.Copy(io.Discard, out)
		check(t, err)
		check(t, child.Wait())
		free(t, m, data)
		check(t, m.Close())
		eventually(t, "no descriptors are left", func() bool { return openFDs(t) <= before })
	}
}

// A driver of the kernel imports the dma-buf. That holds the memory in place, without any descriptor.
func TestKernelFDOfDriver(t *testing.T) {
	needUDMABuf(t)
	v, err := sys.OpenVGEM()
	if dmabuftest.Absent(err) {
		t.Skip("kernel:", err)
	}
	check(t, err)
	const size = 3 * 4096
	m, err := Alloc(MemoryConfig{Size: size, Segments: 3})
	check(t, err)
	data := make([]byte, size)
	fill(random(t), data)
	_, err = m.WriteAt(data, 0)
	check(t, err)
	fd, err := m.Buffer().KernelFD(background(t))
	check(t, err)
	handle, err := v.Import(fd)
	check(t, err)
	check(t, sys.CloseFD(fd))
	held(t, m)
	// The driver returns the same dma-buf, which is recognised.
	fd, err = v.DMABuf(handle)
	check(t, err)
	b, err := Get(fd)
	check(t, err)
	if b != m.Buffer() {
		t.Error("a descriptor that comes back from a driver leads to another buffer")
	}
	b.Put()
	check(t, sys.CloseFD(fd))
	check(t, v.CloseBuffer(handle))
	free(t, m, data)
	check(t, m.Close())
	check(t, v.Close())
}

// The program's reference goes first: the memory lives as long as the dma-buf.
func TestKernelFDOutlivesClose(t *testing.T) {
	needUDMABuf(t)
	m, err := Alloc(MemoryConfig{Size: 4096})
	check(t, err)
	_, err = m.WriteAt([]byte{1, 2, 3}, 0)
	check(t, err)
	fd, err := m.Buffer().KernelFD(background(t))
	check(t, err)
	check(t, m.Close())
	b, err := Get(fd)
	check(t, err)
	if b != m.Buffer() {
		t.Error("another buffer")
	}
	b.Put()
	seen, err := sys.MapDMABuf(fd, 4096, false)
	check(t, err)
	if !bytes.Equal(seen[:4], []byte{1, 2, 3, 0}) {
		t.Errorf("%v", seen[:4])
	}
	check(t, sys.CloseFD(fd))
	check(t, sys.Unmap(seen))
	eventually(t, "the buffer is released", func() bool { return m.Buffer().refs.Load() == 0 })
}

// A buffer of the kernel's has its own descriptor.
func TestKernelFDOfKernel(t *testing.T) {
	fd, cleanup, err := dmabuftest.NewHeap(8192)
	if dmabuftest.Absent(err) {
		t.Skip("kernel:", err)
	}
	check(t, err)
	b, err := Get(fd)
	check(t, err)
	same, err := b.KernelFD(background(t))
	check(t, err)
	want, err := sys.HandleIDOf(fd)
	check(t, err)
	if id, err := sys.HandleIDOf(same); id != want || err != nil {
		t.Errorf("%v, %v, should be %v", id, err, want)
	}
	check(t, sys.CloseFD(same))
	b.Put()
	cleanup()
}

// Descriptors run out: KernelFD fails, and the memory moves.
func TestKernelFDWithoutDescriptors(t *testing.T) {
	needUDMABuf(t)
	m, err := Alloc(MemoryConfig{Size: 4096})
	check(t, err)
	keep, err := m.Buffer().FD() // so the process serves importers already
	check(t, err)
	defer func() { check(t, sys.CloseFD(keep)) }()
	var limit unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	first, err := sys.DupFD(keep) // the lowest number that is free
	check(t, err)
	check(t, sys.CloseFD(first))
	for more := range 8 {
		few := limit
		few.Cur = uint64(first + more)
		check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
		fd, err := m.Buffer().KernelFD(background(t))
		check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
		if err == nil {
			check(t, sys.CloseFD(fd))
			eventually(t, "the memory moves", func() bool { return m.Move(background(t)) == nil })
			check(t, m.Close())
			return
		}
		wantErr(t, "KernelFD", err, syscall.EMFILE)
		check(t, m.Move(background(t)))
	}
	t.Error("KernelFD fails with eight descriptors")
}
