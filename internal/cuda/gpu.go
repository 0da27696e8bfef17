package cuda

// What a Go program does with a GPU itself: it allocates memory, copies bytes, and shares memory with other
// processes. Package gpu/cuda is made of this.

import (
	"fmt"
	"runtime"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// GPU is a GPU that the program uses. Its primary context stays until it is closed. A thread of its own calls the
// driver.
type GPU struct {
	drv    *Driver
	dev    int32
	ctx    uintptr
	stream uintptr
	thread *thread

	Name string
	UUID [16]byte
}

// start loads the driver, and returns how many GPUs it knows. The caller closes it.
func start() (d *Driver, n int, err error) {
	if d, err = Open(true); err != nil {
		return nil, 0, err
	}
	var f function
	var r Result
	var count int32
	d.asks.do(func() {
		f = fnInit
		if r = d.init(); r == success {
			f = fnDeviceGetCount
			count, r = d.deviceCount()
		}
	})
	switch {
	case r == noDevice || r == success && count == 0:
		err = fmt.Errorf("%w: the driver knows no GPU: %w", ErrNone, syscall.ENODEV)
	case r != success:
		err = fmt.Errorf("%w: %w", ErrNone, d.check("cuda_init", f, r))
	}
	if err != nil {
		d.Close()
		return nil, 0, err
	}
	return d, int(count), nil
}

// Count returns how many GPUs there are.
//
// Errors: ErrNone.
func Count() (int, error) {
	d, n, err := start()
	if err != nil {
		return 0, err
	}
	d.Close()
	return n, nil
}

// OpenGPU opens a GPU by its number.
//
// Errors: ErrNone; ENODEV if there are not so many.
func OpenGPU(ordinal int) (*GPU, error) {
	const op = "cuda_open"
	d, n, err := start()
	if err != nil {
		return nil, err
	}
	g := &GPU{drv: d, thread: newThread(d)}
	if ordinal < 0 || ordinal >= n {
		d.Close()
		return nil, ib.Errorf(op, syscall.ENODEV, "GPU %d of %d", ordinal, n)
	}
	g.thread.start()
	var f function
	var r Result
	g.thread.do(func() { f, r = g.setUp(int32(ordinal)) }) //nolint:gosec // it is less than n
	if r != success {
		g.thread.end()
		err := d.check(op, f, r)
		d.Close()
		return nil, err
	}
	return g, nil
}

// setUp returns what has failed, and how.
func (g *GPU) setUp(ordinal int32) (f function, r Result) {
	d := g.drv
	f = fnDeviceGet
	if g.dev, r = d.device(ordinal); r != success {
		return f, r
	}
	f = fnDeviceGetName
	if g.Name, r = d.deviceName(g.dev); r != success {
		return f, r
	}
	f = fnDeviceGetUuid
	if g.UUID, r = d.uuid(g.dev); r != success {
		return f, r
	}
	f = fnPrimaryCtxRetain
	if g.ctx, r = d.retainPrimary(g.dev); r != success {
		return f, r
	}
	f = fnStreamCreate
	if r = d.setCurrent(g.ctx); r == success {
		g.stream, r = d.newStream()
		d.setCurrent(0)
	}
	if r != success {
		d.releasePrimary(g.dev)
	}
	return f, r
}

// Close ends the use of the GPU. What was allocated stays until the program's last use of the GPU ends.
func (g *GPU) Close() {
	g.thread.in(g.ctx, func() Result { return g.drv.destroyStream(g.stream) })
	g.thread.do(func() { g.drv.releasePrimary(g.dev) })
	g.thread.end()
	g.drv.Close()
}

// in calls the driver with the context current.
func (g *GPU) in(op string, f function, call func() Result) error {
	return g.drv.check(op, f, g.thread.in(g.ctx, call))
}

// Memory returns how much memory there is, and how much of it is free.
func (g *GPU) Memory() (free, total uint64, err error) {
	err = g.in("cuda_memory", fnMemGetInfo, func() (r Result) {
		free, total, r = g.drv.memoryInfo()
		return r
	})
	return free, total, err
}

// Alloc allocates memory.
func (g *GPU) Alloc(n uint64) (addr uint64, err error) {
	err = g.in("cuda_alloc", fnMemAlloc, func() (r Result) {
		addr, r = g.drv.alloc(n)
		return r
	})
	return addr, err
}

// Free frees memory. The device leaves it first.
func (g *GPU) Free(addr uint64) error {
	g.drv.Leave(GoneAllocation, addr, 0)
	return g.in("cuda_free", fnMemFree, func() Result { return g.drv.free(addr) })
}

// Create allocates memory that other processes can open by a descriptor. It is at least so long: its
// length, which it returns, is a multiple of what the GPU can map.
func (g *GPU) Create(n uint64) (addr, size uint64, err error) {
	const op = "cuda_create"
	d, prop := g.drv, shareable(g.dev)
	f := fnGetAllocationGranularity
	r := g.thread.in(g.ctx, func() Result {
		unit, r := d.granularity(prop)
		if r != success {
			return r
		}
		if unit == 0 || n == 0 || n > ^uint64(0)-unit {
			return invalidValue
		}
		size = (n + unit - 1) / unit * unit
		f = fnMemCreate
		h, r := d.create(size, prop)
		if r != success {
			return r
		}
		f = fnMap
		addr, r = d.mapAllocation(h, size, g.dev)
		return r
	})
	return addr, size, d.check(op, f, r)
}

// Import opens memory of another process, of which it has a descriptor. size is that of the allocation.
func (g *GPU) Import(fd int, size uint64) (addr uint64, err error) {
	err = g.in("cuda_import", fnImportFromShareableHandle, func() (r Result) {
		addr, r = g.drv.mapDescriptor(fd, size, g.dev)
		return r
	})
	return addr, err
}

// Unmap ends the use of memory that was created or imported. The device leaves it first.
func (g *GPU) Unmap(addr, size uint64) error {
	g.drv.Leave(GoneRange, addr, size)
	return g.in("cuda_unmap", fnUnmap, func() Result { return g.drv.unmapAllocation(addr, size) })
}

// Leave makes the device leave memory that its owner is about to free: all regions that share a byte with it.
func (g *GPU) Leave(addr, n uint64) {
	g.drv.revoke(func(m *Memory) bool { return m.card.ctx == g.ctx && m.addr < addr+n && addr < m.addr+m.n })
}

// Descriptor returns a descriptor of memory that was created, which another process imports.
func (g *GPU) Descriptor(addr uint64) (fd int, err error) {
	err = g.in("cuda_descriptor", fnExportToShareableHandle, func() Result {
		n, r := g.drv.descriptorOf(addr)
		fd = int(n)
		return r
	})
	if err != nil {
		return -1, err
	}
	return ofOurOwn(fd)
}

// ofOurOwn makes a descriptor of the driver's one that programs which are started do not inherit.
func ofOurOwn(fd int) (int, error) {
	own, err := sys.DupFD(fd)
	_ = sys.CloseFD(fd) // it was open: it cannot fail
	return own, err
}

// DMABuf makes a dma-buf of memory, whose address and length are multiples of the host's pages.
func (g *GPU) DMABuf(addr, n uint64) (fd int, err error) {
	err = g.in("cuda_dmabuf", fnGetHandleForAddressRange, func() Result {
		got, r := g.drv.exportRange(addr, n)
		fd = int(got)
		return r
	})
	if err != nil {
		return -1, err
	}
	return ofOurOwn(fd)
}

// IPC returns the handle by which other processes open memory that was allocated.
func (g *GPU) IPC(addr uint64) (h IPCHandle, err error) {
	err = g.in("cuda_ipc_handle", fnIpcGetMemHandle, func() (r Result) {
		h, r = g.drv.ipcOf(addr)
		return r
	})
	return h, err
}

// OpenIPC opens an allocation of another process.
func (g *GPU) OpenIPC(h *IPCHandle) (addr, n uint64, err error) {
	err = g.in("cuda_ipc_open", fnIpcOpenMemHandle, func() (r Result) {
		if addr, r = g.drv.openIPC(h); r != success {
			return r
		}
		p, r := g.drv.lookup(addr)
		if n = p.start + p.size - addr; r != success {
			g.drv.closeIPC(addr)
		}
		return r
	})
	return addr, n, err
}

// CloseIPC ends the use of an allocation of another process. The device leaves it first.
func (g *GPU) CloseIPC(addr uint64) error {
	g.drv.Leave(GoneAllocation, addr, 0)
	return g.in("cuda_ipc_close", fnIpcCloseMemHandle, func() Result { return g.drv.closeIPC(addr) })
}

// Holds checks that all of a range is memory of this GPU.
//
// Errors: EFAULT if it is not.
func (g *GPU) Holds(op string, addr, n uint64) error {
	if n == 0 || addr+n < addr {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x", n, addr)
	}
	m := &Memory{addr: addr, n: n}
	first, ok := g.drv.ask(addr)
	if !ok || !first.isDevice() {
		return notOneGPU(op, m, addr)
	}
	if first.device != g.dev {
		return ib.Errorf(op, syscall.EFAULT, "the memory at %#x is GPU %d's", addr, first.device)
	}
	return g.drv.walkIn(op, g.ctx, m, &first)
}

// Write copies bytes to the GPU, Read copies them back, and Copy copies on the GPU. They return when the bytes are
// there. None of them waits for other work on the GPU.
func (g *GPU) Write(to uint64, from []byte) error {
	err := g.copies("cuda_write", fnHtoDAsync, len(from) > 0, func() Result { return g.drv.copyIn(to, from, g.stream) })
	runtime.KeepAlive(from)
	return err
}

// Read is the other direction: see Write.
func (g *GPU) Read(to []byte, from uint64) error {
	err := g.copies("cuda_read", fnDtoHAsync, len(to) > 0, func() Result { return g.drv.copyOut(to, from, g.stream) })
	runtime.KeepAlive(to)
	return err
}

// Copy copies on the GPU: see Write.
func (g *GPU) Copy(to, from, n uint64) error {
	return g.copies("cuda_copy", fnDtoDAsync, n > 0, func() Result { return g.drv.copyWithin(to, from, n, g.stream) })
}

func (g *GPU) copies(op string, f function, any bool, begin func() Result) error {
	if !any {
		return nil
	}
	return g.in(op, f, func() Result {
		if r := begin(); r != success {
			return r
		}
		return g.drv.synchronize(g.stream)
	})
}

// Register registers memory of the GPU; its address in requests is its own.
func (g *GPU) Register(pd provider.PD, addr, n uint64, access ib.Access) (provider.MR, error) {
	return g.drv.Register(pd, addr, n, addr, access, g.ctx)
}
