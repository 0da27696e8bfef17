package cuda

import (
	"os"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cuda"
)

// IPCHandle is how another process knows memory of [Device.Alloc]. It is a CUipcMemHandle: processes in C and Python
// open it, too.
type IPCHandle [64]byte

// IPCHandle returns the handle by which other processes open the memory: all of its allocation, if the Buffer is
// a part of one.
//
// Errors: EINVAL for memory of [Device.AllocShareable] (see [Buffer.File]), or if the memory is freed.
func (b *Buffer) IPCHandle() (IPCHandle, error) {
	end, err := b.begin("cuda_ipc_handle")
	if err != nil {
		return IPCHandle{}, err
	}
	defer end()
	h, err := b.dev.gpu.IPC(b.addr)
	return IPCHandle(h), err
}

// OpenIPC opens memory of another process. Its Free closes it; the other process must not free it before.
//
// Errors: EINVAL for a handle of this process, or of memory that is gone.
func (d *Device) OpenIPC(h IPCHandle) (*Buffer, error) {
	return d.make("cuda_ipc_open", opened, func(g *cuda.GPU) (uint64, uint64, uint64, error) {
		raw := cuda.IPCHandle(h)
		addr, n, err := g.OpenIPC(&raw)
		return addr, n, n, err
	})
}

// File returns a descriptor of memory of [Device.AllocShareable], which another process imports: pass it over a
// Unix socket. The caller closes it; memory that is imported somewhere stays until it is freed there, too.
//
// Errors: EINVAL or EOPNOTSUPP for other memory; EINVAL if the memory is freed.
func (b *Buffer) File() (*os.File, error) {
	end, err := b.begin("cuda_descriptor")
	if err != nil {
		return nil, err
	}
	defer end()
	fd, err := b.dev.gpu.Descriptor(b.addr)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "cuda"), nil
}

// Size returns the length of the allocation: Len, rounded up by the GPU. Another process needs it to import the memory.
func (b *Buffer) Size() uint64 { return b.size }

// Import opens memory of another process, of whose size bytes ([Buffer.Size]) it has a descriptor. The file may be
// closed once the call has returned.
//
// Errors: EINVAL if it is not such a file, or of another size.
func (d *Device) Import(f *os.File, size uint64) (*Buffer, error) {
	return d.make("cuda_import", imported, func(g *cuda.GPU) (uint64, uint64, uint64, error) {
		raw, err := f.SyscallConn()
		if err != nil {
			return 0, 0, 0, ib.Errorf("cuda_import", syscall.EBADF, "%v", err)
		}
		var addr uint64
		var opening error
		err = raw.Control(func(fd uintptr) { addr, opening = g.Import(int(fd), size) }) //nolint:gosec // a descriptor
		if err != nil {
			return 0, 0, 0, ib.Errorf("cuda_import", syscall.EBADF, "%v", err)
		}
		return addr, size, size, opening
	})
}

// DMABuf exports the memory as a dma-buf of the kernel's, for another device's driver, and returns where in
// it the memory begins. The caller closes the file.
//
// Errors: EOPNOTSUPP if the GPU or the kernel cannot; EINVAL if the memory is freed.
func (b *Buffer) DMABuf() (f *os.File, off uint64, err error) {
	end, err := b.begin("cuda_dmabuf")
	if err != nil {
		return nil, 0, err
	}
	defer end()
	page := uint64(os.Getpagesize()) //nolint:gosec // positive
	off = b.addr % page
	fd, err := b.dev.gpu.DMABuf(b.addr-off, (off+b.n+page-1)/page*page)
	if err != nil {
		return nil, 0, err
	}
	return os.NewFile(uintptr(fd), "dma-buf"), off, nil
}
