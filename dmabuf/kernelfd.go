package dmabuf

// Buffers of this process as dma-bufs of the kernel, for whoever knows nothing of this package: udmabuf
// makes them of the pages of memory files. The kernel cannot be told that the memory moves, so it is a
// static importer until nobody has the dma-buf any more.

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// kernelImporter is the device that the kernel's dma-bufs of a buffer are attached as.
type kernelImporter struct{}

// String names the importer.
func (kernelImporter) String() string { return "udmabuf" }

// KernelFD returns a descriptor of a dma-buf of the kernel (udmabuf) that has the buffer's bytes: other
// drivers import it, and the CPU maps it (mmap(2), DMA_BUF_IOCTL_SYNC), in whatever process. It is closed
// on exec, and the caller closes it. Each call makes another dma-buf. [Get] of this process recognises each of
// them, and returns the buffer. The kernel has no fences of the buffer, and the buffer none of the kernel's.
//
// For as long as the dma-buf lives, the memory is mapped as by a static importer ([Buffer.Attach]): it
// stays in place, and cannot be revoked. The dma-buf lives until its last descriptor is closed and its last
// mapping removed, in whatever process, and no driver uses it any more. The process looks for that once a second.
//
// Of a buffer that is a dma-buf of the kernel already, KernelFD returns another descriptor.
//
// Errors: EOPNOTSUPP if there is no /dev/udmabuf that this process may open, or the memory does not lie in
// whole pages of memory files that are sealed against shrinking, or is another process's, or cannot be pinned; EINVAL if
// the buffer is released, or the kernel refuses it: udmabuf takes up to 1,024 segments and 64 MiB, unless its
// parameters say otherwise; ENODEV if the memory is revoked; ETIMEDOUT if the context ends before the
// reservation is locked and the Kernel fences are signalled; EMFILE, ENFILE, ENOMEM; what the exporter returns.
func (b *Buffer) KernelFD(ctx context.Context) (int, error) {
	const op = "dmabuf_kernel_fd"
	a, err := b.Attach(kernelImporter{}) // with a reference
	if err != nil {
		return -1, named(op, err)
	}
	switch p := b.cfg.Priv.(type) {
	case *kernelBuffer:
		defer a.Detach()
		fd, err := sys.DupFD(p.fd)
		if err != nil {
			return -1, descriptorError(op, err)
		}
		return fd, nil
	case *remoteBuffer: // its exporter may revoke it, whoever has pinned it here
		a.Detach()
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the memory is another process's: its exporter can make the descriptor")
	}
	t, made, err := a.mapForKernel(ctx, op)
	if err != nil {
		a.Detach()
		return -1, err
	}
	var h *sys.Handle
	h, err = sys.NewDMABufHandle(made, func() {
		forget(h.ID(), b)
		a.endKernel(t)
	})
	if err != nil {
		a.endKernel(t)
		return -1, descriptorError(op, err)
	}
	enter(h.ID(), b)
	fd, err := h.FD() // from now on it may be released
	if err != nil {
		_ = h.Close() // it returns no error
		forget(h.ID(), b)
		a.endKernel(t)
		return -1, descriptorError(op, err)
	}
	return fd, nil
}

// mapForKernel pins and maps the buffer, and makes a dma-buf of where it is.
func (a *Attachment) mapForKernel(ctx context.Context, op string) (*Table, int, error) {
	r := a.buffer.resv
	if err := r.LockContext(ctx); err != nil {
		return nil, -1, ib.Errorf(op, syscall.ETIMEDOUT, "the reservation lock: %v", err)
	}
	defer r.Unlock()
	t, err := a.Map(ctx, Bidirectional)
	if err != nil {
		return nil, -1, err
	}
	fd, err := t.files.udmabuf(op, a.buffer.cfg.Size)
	if err != nil {
		a.Unmap(t, Bidirectional)
		return nil, -1, err
	}
	return t, fd, nil
}

// endKernel is called when nobody has the dma-buf of the kernel any more.
func (a *Attachment) endKernel(t *Table) {
	r := a.buffer.resv
	r.Lock()
	a.Unmap(t, Bidirectional)
	r.Unlock()
	a.Detach()
}

// udmabuf makes a dma-buf of the kernel of the first bytes of a table's segments.
func (f *files) udmabuf(op string, size uint64) (int, error) {
	switch {
	case f == nil:
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the memory does not lie in memory files")
	case !f.sealed():
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the memory is not in memory files that are sealed against shrinking")
	}
	page := uint64(os.Getpagesize())
	var parts []sys.UDMABufPart
	for _, s := range f.segments {
		p := sys.UDMABufPart{FD: f.fds[s.file], Offset: uint64(s.off), Size: min(uint64(s.n), size)} // the table may have more bytes
		if p.Offset%page != 0 || p.Size%page != 0 {
			return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "%d bytes at %d of a memory file are not whole pages of %d", p.Size, p.Offset, page)
		}
		if size -= p.Size; p.Size > 0 {
			parts = append(parts, p)
		}
	}
	f.show()
	fd, err := sys.NewUDMABuf(parts...)
	switch {
	case err == nil:
		return fd, nil
	case slices.ContainsFunc(noUDMABuf, func(errno error) bool { return errors.Is(err, errno) }):
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "no udmabuf for this process: %v", err)
	}
	return -1, descriptorError(op, err)
}

// noUDMABuf are the errors of open(2) where the kernel has no udmabuf, or this user may not use it.
var noUDMABuf = []error{syscall.ENOENT, syscall.ENODEV, syscall.ENXIO, syscall.EACCES, syscall.EPERM}
