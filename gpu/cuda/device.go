package cuda

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cuda"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// ErrNone means that there is no CUDA here: no driver, or no GPU that it knows. The error says which.
var ErrNone = cuda.ErrNone

// Count returns how many GPUs there are. CUDA_VISIBLE_DEVICES chooses them.
//
// Errors: ErrNone.
func Count() (int, error) { return cuda.Count() }

// Device is a GPU. The program uses its primary context, as PyTorch and the CUDA runtime do.
//
// All methods may be called by several goroutines.
type Device struct {
	gpu *cuda.GPU

	life   sync.RWMutex // guards closed; calls that need the GPU hold it for reading
	closed bool

	mu      sync.Mutex // guards buffers
	buffers map[*Buffer]bool
}

// Open opens a GPU by its number.
//
// Errors: ErrNone; ENODEV if there are not so many.
func Open(ordinal int) (*Device, error) {
	g, err := cuda.OpenGPU(ordinal)
	if err != nil {
		return nil, err
	}
	return &Device{gpu: g, buffers: make(map[*Buffer]bool)}, nil
}

// Name returns the GPU's name, such as "NVIDIA H200".
func (d *Device) Name() string { return d.gpu.Name }

// UUID returns the number that tells the GPU from all others.
func (d *Device) UUID() [16]byte { return d.gpu.UUID }

// Close frees what the program has not freed, and ends the use of the GPU. A second call does nothing.
func (d *Device) Close() error {
	d.life.Lock()
	if d.closed {
		d.life.Unlock()
		return nil
	}
	d.closed = true
	d.life.Unlock()
	d.mu.Lock()
	left := d.buffers
	d.buffers = nil
	d.mu.Unlock()
	var first error
	for b := range left {
		if err := b.Free(); err != nil && first == nil {
			first = err
		}
	}
	d.gpu.Close()
	return first
}

// begin keeps the device open until the function that it returns is called.
func (d *Device) begin(op string) (end func(), err error) {
	d.life.RLock()
	if d.closed {
		d.life.RUnlock()
		return nil, ib.Errorf(op, syscall.ENODEV, "the GPU is closed")
	}
	return d.life.RUnlock, nil
}

// Memory returns how much memory the GPU has, and how much of it is free.
func (d *Device) Memory() (free, total uint64, err error) {
	end, err := d.begin("cuda_memory")
	if err != nil {
		return 0, 0, err
	}
	defer end()
	return d.gpu.Memory()
}

// buffers counts the Buffers that were made.
var buffers atomic.Uint64

// make makes a Buffer of memory that the driver returns.
func (d *Device) make(op string, o origin, get func(g *cuda.GPU) (addr, n, size uint64, err error)) (*Buffer, error) {
	end, err := d.begin(op)
	if err != nil {
		return nil, err
	}
	defer end()
	addr, n, size, err := get(d.gpu)
	if err != nil {
		return nil, err
	}
	b := &Buffer{id: buffers.Add(1), dev: d, addr: addr, n: n, size: size, origin: o}
	d.mu.Lock()
	d.buffers[b] = true
	d.mu.Unlock()
	return b, nil
}

// Alloc allocates memory, as cuMemAlloc does. Its bytes are undefined.
//
// Errors: EINVAL for no bytes; ENOMEM.
func (d *Device) Alloc(n uint64) (*Buffer, error) {
	return d.make("cuda_alloc", allocated, func(g *cuda.GPU) (uint64, uint64, uint64, error) {
		addr, err := g.Alloc(n)
		return addr, n, n, err
	})
}

// AllocShareable allocates memory that other processes can open by a descriptor, as cuMemCreate and cuMemMap do.
// The GPU rounds its length up, to 2 MiB on most; [Buffer.Len] is what was asked for.
//
// Errors: EINVAL for no bytes; ENOMEM; EOPNOTSUPP if the GPU has no such memory.
func (d *Device) AllocShareable(n uint64) (*Buffer, error) {
	return d.make("cuda_create", created, func(g *cuda.GPU) (uint64, uint64, uint64, error) {
		addr, size, err := g.Create(n)
		return addr, n, size, err
	})
}

// Adopt makes a Buffer of memory that something else in this process has allocated, or of a part of it. Its Free
// frees nothing, but ends what the device does with it. Managed memory is not a GPU's: register it by its
// address.
//
// Errors: EFAULT if not all of it is memory of this GPU; EINVAL for no bytes.
func (d *Device) Adopt(addr, n uint64) (*Buffer, error) {
	const op = "cuda_adopt"
	return d.make(op, adopted, func(g *cuda.GPU) (uint64, uint64, uint64, error) { return addr, n, n, g.Holds(op, addr, n) })
}

// RegisterAt registers memory by its address. Package verbs calls it (PD.RegMRAttr).
func (d *Device) RegisterAt(pd provider.PD, addr, n uint64, access ib.Access) (provider.MR, error) {
	const op = "reg_mr_attr"
	end, err := d.begin(op)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := d.gpu.Holds(op, addr, n); err != nil {
		return nil, err
	}
	return d.gpu.Register(pd, addr, n, access)
}
