package mem_test

import (
	"context"
	"os"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// Regions of GPU memory pass the suite: of all of an object and of a part, in VRAM and in system memory, pinned and
// not.
func TestConformanceOfGPUs(t *testing.T) {
	dmabuf.CheckLocks(true)
	defer dmabuf.CheckLocks(false)
	memtest.Run(t, memtest.Constructor{Name: "VRAM", New: gpuMemory(t, gpu.InVRAM, 0, false)})
	if os.Getenv("VERBENA_FULL") == "" {
		t.Skip("full: parts, system memory, pinned memory and indirect keys")
	}
	memtest.Run(t, memtest.Constructor{Name: "part", New: gpuMemory(t, gpu.InVRAM, 4096+24, false)})
	memtest.Run(t, memtest.Constructor{Name: "system memory", New: gpuMemory(t, gpu.InHost, 0, false)})
	memtest.Run(t, memtest.Constructor{Name: "pinned", New: gpuMemory(t, gpu.InVRAM, 0, true)})
	memtest.Run(t, memtest.Constructor{Name: "VRAM", New: gpuMemory(t, gpu.InVRAM, 0, false), Shape: memtest.List})
}

// gpuMemory makes buffers whose region begins at an offset.
func gpuMemory(t *testing.T, where gpu.Placement, off uint64, pinned bool) func(testing.TB, uint64, ib.Access) memtest.Memory {
	d, err := gpu.Open("soft:9", &gpu.Config{VRAM: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return func(tb testing.TB, n uint64, _ ib.Access) memtest.Memory {
		m, err := d.AllocWith(max(n, 1)+off, gpu.AllocOptions{Placement: where})
		if err != nil {
			tb.Fatal(err)
		}
		buf, _, err := m.DMABuf()
		if err != nil {
			tb.Fatal(err)
		}
		b, err := importer.Import(buf, importer.Config{Offset: off, Length: max(n, 1), Pinned: pinned})
		if err != nil {
			tb.Fatal(err)
		}
		buf.Put()
		access := func(do func([]byte, int64) (int, error)) func(uint64, []byte) {
			return func(at uint64, b []byte) {
				if _, err := do(b, int64(off+at)); err != nil {
					tb.Error(err)
				}
			}
		}
		memory := memtest.Memory{Backing: b, Read: access(m.ReadAt), Write: access(m.WriteAt), Free: func() {
			if err := m.Free(); err != nil {
				tb.Error(err)
			}
		}}
		if !pinned && where == gpu.InVRAM {
			memory.Move = func(byte) {
				move := m.Evict
				if !m.Resident() {
					move = m.Prefetch
				}
				if err := move(context.Background()); err != nil {
					tb.Error(err)
				}
			}
		}
		return memory
	}
}
