package mem_test

import (
	"context"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/sys/dmabuftest"
)

// Regions of dma-bufs pass the suite: of one segment and of several, from the beginning of the
// buffer and from its middle, pinned and not.
func TestConformanceOfDMABufs(t *testing.T) {
	dmabuf.CheckLocks(true)
	defer dmabuf.CheckLocks(false)
	memtest.Run(t, memtest.Constructor{Name: "one segment", New: dmabufMemory(1, 0, false)})
	memtest.Run(t, memtest.Constructor{Name: "five segments", New: dmabufMemory(5, 0, false)})
	memtest.Run(t, memtest.Constructor{Name: "offset", New: dmabufMemory(3, 4096+24, false)})
	memtest.Run(t, memtest.Constructor{Name: "pinned", New: dmabufMemory(2, 0, true)})
}

// Indirect keys and windows on them pass it, too.
func TestConformanceOnDMABufs(t *testing.T) {
	for _, shape := range []memtest.Shape{memtest.List, memtest.Nested} {
		memtest.Run(t, memtest.Constructor{Name: "five segments", New: dmabufMemory(5, 0, false), Shape: shape})
	}
}

// Regions of the kernel's own dma-bufs pass it, of each kind that needs no hardware; interop/rxe has a machine
// with all of them. Indirect keys on them pass it, too.
func TestConformanceOfKernelDMABufs(t *testing.T) {
	for _, kind := range dmabuftest.Kinds() {
		t.Run(kind.Name, func(t *testing.T) {
			_, cleanup, err := kind.New(4096)
			if dmabuftest.Absent(err) {
				t.Skip("kernel:", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			cleanup()
			for _, shape := range []memtest.Shape{0, memtest.List} {
				memtest.Run(t, memtest.Constructor{Name: kind.Name, New: kernelMemory(kind), Shape: shape})
			}
		})
	}
}

// kernelMemory makes dma-bufs of the kernel, whose descriptors are closed at once.
func kernelMemory(kind dmabuftest.Kind) func(testing.TB, uint64, ib.Access) memtest.Memory {
	return func(tb testing.TB, n uint64, _ ib.Access) memtest.Memory {
		size := (max(n, 1) + 4095) &^ 4095
		fd, cleanup, err := kind.New(size)
		if err != nil {
			tb.Fatal(err)
		}
		defer cleanup()
		seen, err := sys.MapDMABuf(fd, size, true)
		if err != nil {
			tb.Fatal(err)
		}
		buffer, err := dmabuf.Get(fd)
		if err != nil {
			tb.Fatal(err)
		}
		defer buffer.Put()
		b, err := importer.Import(buffer, importer.Config{Length: max(n, 1)})
		if err != nil {
			tb.Fatal(err)
		}
		return memtest.Memory{Backing: b, Bytes: seen[:n], Free: func() {
			if err := sys.Unmap(seen); err != nil {
				tb.Error(err)
			}
		}}
	}
}

// dmabufMemory makes buffers of so many segments whose region begins at an offset.
func dmabufMemory(segments int, off uint64, pinned bool) func(testing.TB, uint64, ib.Access) memtest.Memory {
	return func(tb testing.TB, n uint64, _ ib.Access) memtest.Memory {
		size := max(n+off, uint64(segments)*4096)
		m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: size, Segments: segments})
		if err != nil {
			tb.Fatal(err)
		}
		b, err := importer.Import(m.Buffer(), importer.Config{Offset: off, Length: max(n, 1), Pinned: pinned})
		if err != nil {
			tb.Fatal(err)
		}
		access := func(do func([]byte, int64) (int, error)) func(uint64, []byte) {
			return func(at uint64, b []byte) {
				if _, err := do(b, int64(off+at)); err != nil {
					tb.Error(err)
				}
			}
		}
		memory := memtest.Memory{Backing: b, Read: access(m.ReadAt), Write: access(m.WriteAt), Free: func() {
			if err := m.Close(); err != nil {
				tb.Error(err)
			}
		}}
		if !pinned {
			memory.Move = func(byte) {
				if err := m.Move(context.Background()); err != nil {
					tb.Error(err)
				}
			}
		}
		return memory
	}
}
