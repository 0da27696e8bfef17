package mem_test

import (
	"context"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
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
