package gpu

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/sys/dmabuftest"
)

// TestKernelFD: a dma-buf of the kernel holds a GPU's memory in system memory, also when that is freed, until
// nobody has the dma-buf.
func TestKernelFD(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	b := alloc(t, d, mib)
	data := random(mib, 5)
	_, err := b.WriteAt(data, 0)
	check(t, err)
	buf, _, err := b.DMABuf()
	check(t, err)
	fd, err := buf.KernelFD(longTime(t))
	buf.Put()
	if _, cleanup, absent := dmabuftest.NewUDMABuf(4096); dmabuftest.Absent(absent) {
		wantErr(t, "KernelFD without udmabuf", err, syscall.EOPNOTSUPP)
		check(t, b.Prefetch(longTime(t)))
		holds(t, "afterwards", b, data)
		check(t, b.Free())
		t.Skip("kernel:", absent)
	} else if absent == nil {
		cleanup()
	}
	check(t, err)
	seen, err := sys.MapDMABuf(fd, mib, true)
	check(t, err)
	check(t, sys.CloseFD(fd))
	if b.Resident() || !bytes.Equal(seen, data) {
		t.Error("the dma-buf does not show the memory in system memory")
	}
	copy(seen[4096:], "written by the CPU")
	copy(data[4096:], "written by the CPU")
	holds(t, "what the CPU has written", b, data)
	for range 25 {
		wantErr(t, "Prefetch", b.Prefetch(longTime(t)), ErrPinned)
		time.Sleep(100 * time.Millisecond) // the process looks once a second
	}
	check(t, b.Free())
	other := alloc(t, d, mib) // which gets other memory
	_, err = other.WriteAt(random(mib, 6), 0)
	check(t, err)
	if !bytes.Equal(seen, data) {
		t.Error("memory is gone that a dma-buf shows")
	}
	check(t, other.Free())
	check(t, sys.Unmap(seen))
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		s := d.Stats()
		if s.Objects == 0 && s.VRAMFree == s.VRAM && s.HostFree == s.Host {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("memory is left: %+v", s)
		}
	}
}
