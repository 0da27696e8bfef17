package dmabuf

// The fences of a buffer, as descriptors: what DMA_BUF_IOCTL_EXPORT_SYNC_FILE, IMPORT_SYNC_FILE and
// poll(2) are for the kernel's dma-bufs. For those, the kernel is asked; for a buffer of another
// process, that process.

import (
	"context"
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// fencesElsewhere is implemented by what stands behind a buffer whose fences are not, or not only, in
// its reservation here.
type fencesElsewhere interface {
	exportFence(ctx context.Context, usage Usage) (int, error)
	importFence(ctx context.Context, fd int, usage Usage) error
	waitFences(ctx context.Context, usage Usage) error
}

// ExportFence returns a descriptor of the fences of a class and those before it that are pending
// now: [Write] is what a reader of the buffer waits for, [Read] what a writer does, as with
// DMA_BUF_IOCTL_EXPORT_SYNC_FILE. The descriptor is readable once all are signalled, and at once
// if there are none. [FenceFromFD] makes a fence of it, which a work request can wait for. The
// caller closes it.
//
// Of a dma-buf of the kernel it is a sync file, and only Write and Read can be asked for.
//
// Errors: EINVAL for a class that there is not; EOPNOTSUPP for a class that the kernel does not show;
// ENOTTY if the kernel is older than 6.0; ENODEV or ETIMEDOUT if the process of the buffer has
// ended, or does not answer; EMFILE, ENFILE.
func (b *Buffer) ExportFence(ctx context.Context, usage Usage) (int, error) {
	const op = "dma_buf_export_sync_file"
	b.resv.mustNotHold("ExportFence")
	if usage >= numUsages {
		return -1, ib.Errorf(op, syscall.EINVAL, "%v", usage)
	}
	other, ok := b.cfg.Priv.(fencesElsewhere)
	if !ok {
		return b.resv.ExportFence(usage)
	}
	fd, err := other.exportFence(ctx, usage)
	if err != nil {
		return -1, named(op, err)
	}
	own := b.resv.Fences(usage)
	if len(own) == 0 {
		return fd, nil
	}
	defer func() { _ = sys.CloseFD(fd) }() // it is our own
	f, err := FenceFromFD(fd)
	if err != nil {
		return -1, err
	}
	return MergeFences(append(own, f)...).FD()
}

// ImportFence adds the fence of a descriptor ([FenceFromFD]) to a class of the buffer's fences, as
// DMA_BUF_IOCTL_IMPORT_SYNC_FILE does: Write for work that writes the buffer, Read for work that
// reads it. The descriptor stays the caller's.
//
// To a dma-buf of the kernel only sync files of the kernel can be added, and only as Write and Read.
//
// Errors: EBADF, EINVAL of the descriptor; EINVAL for a class that there is not; those of ExportFence.
func (b *Buffer) ImportFence(ctx context.Context, fd int, usage Usage) error {
	const op = "dma_buf_import_sync_file"
	b.resv.mustNotHold("ImportFence")
	if usage >= numUsages {
		return ib.Errorf(op, syscall.EINVAL, "%v", usage)
	}
	if other, ok := b.cfg.Priv.(fencesElsewhere); ok {
		if err := other.importFence(ctx, fd, usage); err != nil {
			return named(op, err)
		}
		return nil
	}
	return b.resv.ImportFence(ctx, fd, usage)
}

// WaitFences waits for the fences of a class and those before it that are pending now. That work has
// failed is no error. Of a dma-buf of the kernel it waits as poll(2) does.
//
// Errors: ETIMEDOUT if the context ends first; those of ExportFence.
func (b *Buffer) WaitFences(ctx context.Context, usage Usage) error {
	b.resv.mustNotHold("WaitFences")
	return b.waitFences(ctx, "dma_buf_poll", usage)
}

// waitFences is WaitFences for an operation.
func (b *Buffer) waitFences(ctx context.Context, op string, usage Usage) error {
	if usage >= numUsages {
		return ib.Errorf(op, syscall.EINVAL, "%v", usage)
	}
	if other, ok := b.cfg.Priv.(fencesElsewhere); ok {
		if err := other.waitFences(ctx, usage); err != nil {
			return named(op, err)
		}
	}
	if err := b.resv.Wait(ctx, usage); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's fences: %v", err)
	}
	return nil
}

// waitFor waits for a fence; ETIMEDOUT if the context ends first.
func waitFor(ctx context.Context, f *Fence) error {
	select {
	case <-f.Done():
	case <-ctx.Done():
		if !f.Signaled() {
			return fmt.Errorf("the buffer's fences: %w: %w", ctx.Err(), syscall.ETIMEDOUT)
		}
	}
	return nil
}

// --- of the kernel's dma-bufs ---

// kernelUsage reports whether the fences of a class are those that a writer waits for. The kernel
// shows two sets: what a reader waits for, and what a writer does.
func kernelUsage(usage Usage) (write bool, err error) {
	if usage != Write && usage != Read {
		return false, fmt.Errorf("the kernel does not show %v fences: %w", usage, syscall.EOPNOTSUPP)
	}
	return usage == Read, nil
}

func (k *kernelBuffer) exportFence(_ context.Context, usage Usage) (int, error) {
	write, err := kernelUsage(usage)
	if err != nil {
		return -1, err
	}
	return sys.DMABufExportSyncFile(k.fd, write)
}

func (k *kernelBuffer) importFence(_ context.Context, fd int, usage Usage) error {
	reads, err := kernelUsage(usage)
	if err != nil {
		return err
	}
	kind, _, err := sys.FenceFDOf(fd)
	if err != nil {
		return err
	}
	if kind != sys.FenceSyncFile {
		return fmt.Errorf("the kernel takes no fences but its own sync files: %w", syscall.EINVAL)
	}
	return sys.DMABufImportSyncFile(k.fd, fd, !reads)
}

// waitFences watches the dma-buf itself, which is readable when no writer's fence is pending, and
// writable when none is.
func (k *kernelBuffer) waitFences(ctx context.Context, usage Usage) error {
	write, err := kernelUsage(usage)
	if err != nil {
		return err
	}
	if sys.DMABufReady(k.fd, write) {
		return nil
	}
	fd, err := sys.DupFD(k.fd) // each wait has a number of its own in the watch
	if err != nil {
		return err
	}
	w := &watchedFence{fence: NewFence(), fd: fd, kind: watchReadable}
	if write {
		w.kind = watchWritable
	}
	w.status = func() (bool, error) { return sys.DMABufReady(fd, write), nil }
	if w.id, err = sys.HandleIDOf(fd); err == nil {
		err = fences.add(w)
	}
	if err != nil {
		_ = sys.CloseFD(fd) // the first error says more
		return err
	}
	w.follow(func(error) { w.close() })
	defer w.fence.Signal(ctx.Err()) // it gives the descriptor up
	return waitFor(ctx, w.fence)
}
