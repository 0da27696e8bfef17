package cuda

import (
	"fmt"
	"io"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cuda"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// origin is how memory was come by, and so how it is given back.
type origin int

const (
	allocated origin = iota
	created
	adopted
	opened
	imported
)

// give are the ways to give memory back.
var give = [...]func(g *cuda.GPU, b *Buffer) error{
	allocated: func(g *cuda.GPU, b *Buffer) error { return g.Free(b.addr) },
	created:   func(g *cuda.GPU, b *Buffer) error { return g.Unmap(b.addr, b.size) },
	adopted: func(g *cuda.GPU, b *Buffer) error {
		g.Leave(b.addr, b.n)
		return nil
	},
	opened:   func(g *cuda.GPU, b *Buffer) error { return g.CloseIPC(b.addr) },
	imported: func(g *cuda.GPU, b *Buffer) error { return g.Unmap(b.addr, b.size) },
}

// Buffer is memory of a GPU. The CPU cannot address it.
//
// All methods may be called by several goroutines.
type Buffer struct {
	id      uint64 // the order in which two of them are locked
	dev     *Device
	addr, n uint64
	size    uint64 // n, rounded up by the GPU
	origin  origin

	mu    sync.RWMutex // guards freed; calls that need the memory hold it for reading
	freed bool
}

// Addr returns the GPU's address of the first byte, which kernels use. It stays valid for as long as the Buffer is not
// freed, and nothing has another address in this process.
func (b *Buffer) Addr() uint64 { return b.addr }

// Len returns the number of bytes.
func (b *Buffer) Len() uint64 { return b.n }

// Device returns the GPU.
func (b *Buffer) Device() *Device { return b.dev }

// begin keeps the memory until the function that it returns is called.
func (b *Buffer) begin(op string) (end func(), err error) {
	b.mu.RLock()
	if b.freed {
		b.mu.RUnlock()
		return nil, ib.Errorf(op, syscall.EINVAL, "the memory is freed")
	}
	return b.mu.RUnlock, nil
}

// Free ends all accesses of the device to the memory, and gives it back; see the package's documentation for
// memory that was adopted. Regions on it stay until they are closed, and requests that use them fail. A second call does
// nothing.
func (b *Buffer) Free() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.freed {
		return nil
	}
	b.freed = true
	b.dev.mu.Lock()
	delete(b.dev.buffers, b)
	b.dev.mu.Unlock()
	return give[b.origin](b.dev.gpu, b)
}

// part checks that n bytes at off are inside the memory.
func (b *Buffer) part(op string, off int64, n int) error {
	if off < 0 || uint64(off) > b.n || uint64(n) > b.n-uint64(off) {
		return ib.Errorf(op, syscall.EFAULT, "%d bytes at %d are not inside %d", n, off, b.n)
	}
	return nil
}

// WriteAt copies bytes to the GPU, and returns when they are there. It waits for no other work on the GPU.
//
// Errors: EFAULT for bytes beyond the end, of which none are written; EINVAL if the memory is freed.
func (b *Buffer) WriteAt(p []byte, off int64) (int, error) {
	const op = "cuda_write"
	end, err := b.begin(op)
	if err != nil {
		return 0, err
	}
	defer end()
	if err := b.part(op, off, len(p)); err != nil {
		return 0, err
	}
	if err := b.dev.gpu.Write(b.addr+uint64(off), p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// ReadAt copies bytes from the GPU. It waits for no other work on the GPU.
//
// Errors: io.EOF if the memory ends before; EFAULT for a place outside of it; EINVAL if the memory is freed.
func (b *Buffer) ReadAt(p []byte, off int64) (int, error) {
	const op = "cuda_read"
	end, err := b.begin(op)
	if err != nil {
		return 0, err
	}
	defer end()
	if err := b.part(op, off, 0); err != nil {
		return 0, err
	}
	n := int(min(uint64(len(p)), b.n-uint64(off))) //nolint:gosec // at most len(p)
	if err := b.dev.gpu.Read(p[:n], b.addr+uint64(off)); err != nil {
		return 0, err
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Copy copies the first bytes of from, as many as both have, to the beginning of b. No byte leaves the GPU if both are
// memory of one.
func (b *Buffer) Copy(from *Buffer) (uint64, error) {
	const op = "cuda_copy"
	if from == nil {
		return 0, ib.Errorf(op, syscall.EINVAL, "no memory to copy from")
	}
	both := []*Buffer{b, from}
	if from.id < b.id {
		both[0], both[1] = from, b
	}
	for i, one := range both {
		if i == 1 && both[0] == one {
			break
		}
		end, err := one.begin(op)
		if err != nil {
			return 0, err
		}
		defer end()
	}
	n := min(b.n, from.n)
	return n, b.dev.gpu.Copy(b.addr, from.addr, n)
}

// RegisterIn registers the memory. Package verbs calls it (PD.RegGPU).
func (b *Buffer) RegisterIn(pd provider.PD, access ib.Access) (provider.MR, error) {
	end, err := b.begin("reg_gpu")
	if err != nil {
		return nil, err
	}
	defer end()
	return b.dev.gpu.Register(pd, b.addr, b.n, access)
}

// String says what the memory is.
func (b *Buffer) String() string {
	return fmt.Sprintf("%d bytes at %#x of %s", b.n, b.addr, b.dev.Name())
}
