package dmabuftest

import (
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// need skips the test if the kernel does not have a kind of dma-buf.
func need(t *testing.T, err error) {
	t.Helper()
	if Absent(err) {
		t.Skip("kernel:", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func openFDs(t *testing.T) int {
	t.Helper()
	if err := sys.StartPoller(0); err != nil { // its descriptors count from the first time on
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// ready reports whether a descriptor is readable, or writable.
func ready(t *testing.T, fd int, what int16) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd), Events: what}}
	for {
		_, err := unix.Poll(fds, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return fds[0].Revents&what != 0
	}
}

func TestKinds(t *testing.T) {
	const size = 5 * 4096
	for _, k := range Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			before := openFDs(t)
			fd, cleanup, err := k.New(size)
			need(t, err)
			info, err := sys.DMABufInfoOf(fd)
			if want := (sys.DMABufInfo{Size: size, Exporter: k.Exporter}); info != want || err != nil {
				t.Errorf("%+v, %v; should be %+v", info, err, want)
			}
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("flags %#x, %v", flags, err)
			}
			if end, err := unix.Seek(fd, 0, unix.SEEK_END); end != size || err != nil {
				t.Errorf("end at %d, %v", end, err)
			}
			testAccess(t, fd, size)
			testIdle(t, fd)
			cleanup()
			if _, err := sys.DMABufInfoOf(fd); !errors.Is(err, unix.EBADF) {
				t.Errorf("after cleanup: %v", err)
			}
			if after := openFDs(t); after != before {
				t.Errorf("%d descriptors before, %d after", before, after)
			}
		})
	}
}

// testAccess maps a buffer twice, and finds in one mapping what it writes to the other.
func testAccess(t *testing.T, fd int, size uint64) {
	t.Helper()
	a, err := sys.MapDMABuf(fd, size, true)
	if err != nil {
		t.Fatal(err)
	}
	b, err := sys.MapDMABuf(fd, size, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range a {
		if a[i] != 0 {
			t.Fatalf("byte %d is %d at first", i, a[i])
		}
	}
	for _, end := range []bool{false, true} {
		if err := sys.DMABufSync(fd, false, true, end); err != nil {
			t.Error(err)
		}
		for i := range a {
			a[i] = byte(i*7 + i>>8)
		}
	}
	for _, end := range []bool{false, true} {
		if err := sys.DMABufSync(fd, true, true, end); err != nil {
			t.Error(err)
		}
		for i := range b {
			if b[i] != byte(i*7+i>>8) {
				t.Fatalf("byte %d is %d", i, b[i])
			}
		}
	}
	if err := sys.DMABufSync(fd, false, false, true); !errors.Is(err, unix.EINVAL) {
		t.Errorf("no direction: %v", err)
	}
	for _, m := range [][]byte{a, b} {
		if err := sys.Unmap(m); err != nil {
			t.Error(err)
		}
	}
}

// testIdle looks for fences where there are none.
func testIdle(t *testing.T, fd int) {
	t.Helper()
	if !ready(t, fd, unix.POLLIN) || !ready(t, fd, unix.POLLOUT) {
		t.Error("an idle buffer has fences")
	}
	for _, write := range []bool{false, true} {
		file, err := sys.DMABufExportSyncFile(fd, write)
		if err != nil {
			t.Fatal(err)
		}
		if !ready(t, file, unix.POLLIN) {
			t.Error("the sync file of an idle buffer is not signalled")
		}
		if flags, err := unix.FcntlInt(uintptr(file), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags %#x, %v", flags, err)
		}
		if err := sys.DMABufImportSyncFile(fd, file, write); err != nil {
			t.Error(err)
		}
		if err := sys.DMABufImportSyncFile(fd, fd, write); !errors.Is(err, unix.EINVAL) {
			t.Errorf("a dma-buf as a sync file: %v", err)
		}
		sys.CloseFD(file)
	}
}

// The pages of the memory file are those of the buffer.
func TestUDMABufSharesPages(t *testing.T) {
	const size = 4 * 4096
	fd, memfd, err := NewUDMABufOf(size)
	need(t, err)
	defer sys.CloseFD(fd)
	defer sys.CloseFD(memfd)
	// A part of it is a buffer of its own.
	part, err := sys.NewUDMABuf(sys.UDMABufPart{FD: memfd, Offset: 4096, Size: 2 * 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer sys.CloseFD(part)
	if info, err := sys.DMABufInfoOf(part); info.Size != 2*4096 || err != nil {
		t.Errorf("%+v, %v", info, err)
	}
	file, err := sys.MapMemfd(memfd, size)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := sys.MapDMABuf(fd, size, true)
	if err != nil {
		t.Fatal(err)
	}
	middle, err := sys.MapDMABuf(part, 2*4096, true)
	if err != nil {
		t.Fatal(err)
	}
	whole[4096+17] = 1
	file[2*4096+5] = 2
	middle[100] = 3
	for _, c := range []struct {
		name string
		b    []byte
	}{{"file", file[4096:]}, {"buffer", whole[4096:]}, {"part", middle}} {
		if c.b[17] != 1 || c.b[4096+5] != 2 || c.b[100] != 3 {
			t.Errorf("%s: %d, %d, %d", c.name, c.b[17], c.b[4096+5], c.b[100])
		}
	}
	for _, m := range [][]byte{file, whole, middle} {
		sys.Unmap(m)
	}
	for _, c := range []struct{ off, size uint64 }{
		{0, 0}, {1, 4096}, {0, 4095}, {0, size + 4096}, {size, 4096}, {1<<64 - 4096, 8192},
	} {
		if fd, err := sys.NewUDMABuf(sys.UDMABufPart{FD: memfd, Offset: c.off, Size: c.size}); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes at %d: %d, %v", c.size, c.off, fd, err)
		}
	}
	if fd, err := sys.NewUDMABuf(sys.UDMABufPart{FD: -1, Size: 4096}); !errors.Is(err, unix.EBADFD) {
		t.Errorf("no file: %d, %v", fd, err)
	}
}

// A buffer in a heap has whole pages.
func TestHeapRoundsUp(t *testing.T) {
	fd, cleanup, err := NewHeap(5000)
	need(t, err)
	defer cleanup()
	if info, err := sys.DMABufInfoOf(fd); info.Size != 8192 || err != nil {
		t.Errorf("%+v, %v", info, err)
	}
	if fd, err := sys.NewHeapDMABuf("system", 0); !errors.Is(err, unix.EINVAL) {
		t.Errorf("no bytes: %d, %v", fd, err)
	}
}

// fence is a fence, and whether the test has signalled it.
type fence struct {
	signal    func() error
	signalled atomic.Bool
}

func (f *fence) end(t *testing.T) {
	t.Helper()
	f.signalled.Store(true)
	if err := f.signal(); err != nil {
		t.Error(err)
	}
}

func newFence(t *testing.T, b *VGEMBuffer, write bool) *fence {
	t.Helper()
	signal, err := b.Fence(write)
	if err != nil {
		t.Fatal(err)
	}
	return &fence{signal: signal}
}

// expectWait finds that SYNC waits for a fence.
func expectWait(t *testing.T, fd int, f *fence, write bool) {
	t.Helper()
	begun, done := make(chan struct{}), make(chan error)
	go func() {
		close(begun)
		err := sys.DMABufSync(fd, !write, write, false)
		if err == nil && !f.signalled.Load() {
			err = errors.New("SYNC has not waited")
		}
		done <- err
	}()
	<-begun
	select {
	case err := <-done:
		t.Fatal(err)
	default:
	}
	f.end(t)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := sys.DMABufSync(fd, !write, write, true); err != nil {
		t.Error(err)
	}
}

func TestVGEMFences(t *testing.T) {
	b, err := NewVGEMBuffer(4096)
	need(t, err)
	defer b.Close()

	// A writer's fence keeps all others off.
	f := newFence(t, b, true)
	if _, err := b.Fence(false); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a second fence: %v", err)
	}
	if ready(t, b.FD, unix.POLLIN) || ready(t, b.FD, unix.POLLOUT) {
		t.Error("ready in spite of a writer")
	}
	expectWait(t, b.FD, f, false)
	if err := f.signal(); !errors.Is(err, unix.ENOENT) {
		t.Errorf("signalled twice: %v", err)
	}
	if !ready(t, b.FD, unix.POLLIN) || !ready(t, b.FD, unix.POLLOUT) {
		t.Error("not ready after the fence")
	}

	// A reader's fence keeps only writers off.
	f = newFence(t, b, false)
	if !ready(t, b.FD, unix.POLLIN) || ready(t, b.FD, unix.POLLOUT) {
		t.Error("a reader keeps writers off, and them alone")
	}
	for _, end := range []bool{false, true} {
		if err := sys.DMABufSync(b.FD, true, false, end); err != nil {
			t.Error(err)
		}
	}
	expectWait(t, b.FD, f, true)
}

// Sync files carry fences from buffer to buffer.
func TestSyncFiles(t *testing.T) {
	b, err := NewVGEMBuffer(4096)
	need(t, err)
	defer b.Close()
	other, cleanup, err := NewHeap(4096)
	need(t, err)
	defer cleanup()
	for _, write := range []bool{false, true} {
		f := newFence(t, b, true)
		file, err := sys.DMABufExportSyncFile(b.FD, false)
		if err != nil {
			t.Fatal(err)
		}
		if ready(t, file, unix.POLLIN) {
			t.Error("signalled before the fence")
		}
		if err := sys.DMABufImportSyncFile(other, file, write); err != nil {
			t.Fatal(err)
		}
		if ready(t, other, unix.POLLIN) == write || ready(t, other, unix.POLLOUT) {
			t.Errorf("write %v: the other buffer has no such fence", write)
		}
		expectWait(t, other, f, true)
		if !ready(t, file, unix.POLLIN) {
			t.Error("not signalled after the fence")
		}
		sys.CloseFD(file)
	}
	// A reader does not wait for readers: its sync file has no fence.
	f := newFence(t, b, false)
	for _, write := range []bool{false, true} {
		file, err := sys.DMABufExportSyncFile(b.FD, write)
		if err != nil {
			t.Fatal(err)
		}
		if ready(t, file, unix.POLLIN) == write {
			t.Errorf("write %v: signalled %v", write, !write)
		}
		sys.CloseFD(file)
	}
	f.end(t)
}

// The fences of a device that is closed end.
func TestVGEMClosed(t *testing.T) {
	b, err := NewVGEMBuffer(2 * 4096)
	need(t, err)
	newFence(t, b, true)
	dup, err := sys.DupFD(b.FD)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.CloseFD(dup)
	if ready(t, dup, unix.POLLIN) {
		t.Error("ready in spite of a writer")
	}
	b.Close()
	if err := sys.DMABufSync(dup, true, false, false); err != nil {
		t.Error(err)
	}
	if info, err := sys.DMABufInfoOf(dup); info.Size != 2*4096 || err != nil {
		t.Errorf("%+v, %v", info, err)
	}
	for _, size := range []uint64{0, 4095, 1 << 32, 1 << 63} {
		if b, err := NewVGEMBuffer(size); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes: %+v, %v", size, b, err)
		}
	}
}

// Where a kind is absent, the error says so.
func TestAbsent(t *testing.T) {
	for _, c := range []struct {
		path string
		new  func(uint64) (int, func(), error)
	}{{"/dev/udmabuf", NewUDMABuf}, {"/dev/dma_heap/system", NewHeap}, {"/dev/dri/card*", NewVGEM}} {
		nodes, err := filepath.Glob(c.path)
		if err != nil {
			t.Fatal(err)
		}
		if len(nodes) > 0 {
			continue // TestKinds tests it
		}
		if fd, _, err := c.new(4096); fd != -1 || !Absent(err) {
			t.Errorf("%s is not there: %d, %v", c.path, fd, err)
		}
	}
}
