package dmabuf

// What programs do with a descriptor of a buffer by ioctl(2) and poll(2), and not by importing it:
// the preloaded library of "verbena exec" (clib/files/dmabuf.c) asks the process of the buffer for
// it, also if that is its own. It connects as an importer does and sends one message, CONTROL, with
// the descriptor; the answer is an errno, and a descriptor of fences that it waits for itself.

import (
	"bytes"
	"context"
	"net"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// The ioctls of dma-bufs, by their numbers (linux/dma-buf.h).
const (
	ioctlSync           = 0
	ioctlSetName        = 1
	ioctlExportSyncFile = 2
	ioctlImportSyncFile = 3
)

// The flags of their structs.
const (
	syncRead  = 1
	syncWrite = 2
	syncEnd   = 4
)

// controlArgs is how many words a CONTROL has: version, ioctl, flags, and four of a name.
const controlArgs = 7

// wish is what another process, or the preloaded library in this one, asks for.
type wish struct {
	request uint64
	flags   uint64
	name    []byte // of ioctlSetName: ended by a zero
	fences  []int  // descriptors that came behind the buffer's own
}

// answer does what is wished, and answers. err is why there is no buffer.
func (w *wish) answer(c *net.UnixConn, b *Buffer, err error) {
	defer closeAll(w.fences)
	fd := -1
	if err == nil {
		fd, err = w.do(b)
		b.Put()
	}
	msg := encode(msgControlled, errnoOf(err))
	if fd < 0 {
		_ = sys.SendFDs(c, msg) // it may have gone
		return
	}
	_ = sys.SendFDs(c, msg, fd)
	_ = sys.CloseFD(fd) // the other process has its own
}

// do does what is wished with a buffer of this process. It returns the descriptor of the fences that are
// asked for, or to be waited for; -1: none.
func (w *wish) do(b *Buffer) (fence int, err error) {
	const op = "dma_buf_ioctl"
	ctx, cancel := context.WithTimeout(context.Background(), remotePatience/2)
	defer cancel()
	reads, writes := w.flags&syncRead != 0, w.flags&syncWrite != 0
	if len(w.fences) != 0 && w.request != ioctlImportSyncFile {
		return -1, ib.Errorf(op, syscall.EPROTO, "a fence that nobody has asked for")
	}
	switch w.request {
	case ioctlSync:
		if w.flags&^(syncRead|syncWrite|syncEnd) != 0 || !reads && !writes {
			return -1, ib.Errorf(op, syscall.EINVAL, "DMA_BUF_IOCTL_SYNC with the flags %#x", w.flags)
		}
		dir := Bidirectional
		switch {
		case !writes:
			dir = FromDevice
		case !reads:
			dir = ToDevice
		}
		if w.flags&syncEnd != 0 {
			return -1, b.EndCPUAccess(dir)
		}
		if err := b.beginCPUAccess(ctx, dir); err != nil {
			return -1, err
		}
		return b.resv.ExportFence(UsageFor(writes))
	case ioctlSetName:
		name, _, found := bytes.Cut(w.name, []byte{0})
		if !found {
			return -1, ib.Errorf(op, syscall.EINVAL, "a name of more than %d bytes", maxName)
		}
		return -1, b.SetName(string(name))
	case ioctlExportSyncFile:
		if w.flags&^(syncRead|syncWrite) != 0 || w.flags == 0 {
			return -1, ib.Errorf(op, syscall.EINVAL, "DMA_BUF_IOCTL_EXPORT_SYNC_FILE with the flags %#x", w.flags)
		}
		return b.ExportFence(ctx, UsageFor(writes))
	case ioctlImportSyncFile:
		if w.flags&^(syncRead|syncWrite) != 0 || w.flags == 0 || len(w.fences) != 1 {
			return -1, ib.Errorf(op, syscall.EINVAL, "DMA_BUF_IOCTL_IMPORT_SYNC_FILE with the flags %#x and %d fences", w.flags, len(w.fences))
		}
		usage := Read
		if writes {
			usage = Write
		}
		return -1, b.ImportFence(ctx, w.fences[0], usage)
	}
	return -1, ib.Errorf(op, syscall.ENOTTY, "ioctl %d", w.request)
}
