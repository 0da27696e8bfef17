package dmabuf

// Descriptors of buffers. A descriptor is a memory file that stands for the buffer: it can be
// sent to another process and come back, and is recognised by its inode. All descriptors of a
// buffer together hold one reference.

import (
	"errors"
	"os"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// exported are the buffers that have descriptors.
var exported struct {
	mu sync.Mutex // guards by, and the opening and closing of server
	by map[sys.HandleID]*Buffer
}

// find returns the buffer of this process that a descriptor stands for, with a reference; nil if
// there is none.
func find(id sys.HandleID) *Buffer {
	exported.mu.Lock()
	defer exported.mu.Unlock()
	if b := exported.by[id]; b != nil && b.Get() {
		return b
	}
	return nil
}

// FD returns a descriptor of the buffer, which is closed on exec and which the caller closes. It
// has a reference: the buffer lives until the last descriptor of it is closed, in whatever
// process.
//
// The descriptor is not the memory: what a mapping of it shows is not the buffer's. [Buffer.KernelFD]
// returns one that is.
//
// Errors: EINVAL if the buffer is released; EMFILE, ENFILE.
func (b *Buffer) FD() (int, error) {
	const op = "dma_buf_fd"
	b.resv.mustNotHold("FD")
	if !b.Get() {
		return -1, ib.Errorf(op, syscall.EINVAL, "the buffer is released")
	}
	defer b.Put()
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		if b.handle == nil {
			if err := b.newHandleLocked(); err != nil {
				return -1, descriptorError(op, err)
			}
		}
		fd, err := b.handle.FD()
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, os.ErrClosed) || errors.Is(err, syscall.EBADF):
			// All descriptors are closed, or the program has closed the one that the handle
			// keeps. released gives its reference back.
			b.handle = nil
		default:
			return -1, descriptorError(op, err)
		}
	}
}

func descriptorError(op string, err error) error {
	errno := syscall.ENFILE
	_ = errors.As(err, &errno)
	return ib.Errorf(op, errno, "%v", err)
}

// newHandleLocked makes the file of the buffer's descriptors, with a reference.
func (b *Buffer) newHandleLocked() error {
	b.refs.Add(1) // FD holds one, so there is one
	var h *sys.Handle
	made := make(chan struct{}) // released waits for h
	h, err := sys.NewHandle(server.name(), int64(b.cfg.Size), func() {
		<-made
		b.released(h)
	})
	close(made)
	if err != nil {
		b.refs.Add(-1)
		return err
	}
	enter(h.ID(), b)
	b.handle = h
	return nil
}

// enter notes that a descriptor stands for a buffer.
func enter(id sys.HandleID, b *Buffer) {
	exported.mu.Lock()
	defer exported.mu.Unlock()
	if exported.by == nil {
		exported.by = make(map[sys.HandleID]*Buffer)
	}
	if len(exported.by) == 0 {
		server.open()
	}
	exported.by[id] = b
}

// forget notes that a descriptor does not stand for a buffer any more: another file may have its identity.
func forget(id sys.HandleID, b *Buffer) {
	exported.mu.Lock()
	defer exported.mu.Unlock()
	if exported.by[id] == b {
		delete(exported.by, id)
		if len(exported.by) == 0 {
			server.close()
		}
	}
}

// released is called when the last descriptor of a handle is closed.
func (b *Buffer) released(h *sys.Handle) {
	forget(h.ID(), b)
	b.mu.Lock()
	if b.handle == h {
		b.handle = nil
	}
	b.mu.Unlock()
	b.Put()
}

// Get returns the buffer of a descriptor, with a reference ([Buffer.Put]). The descriptor may be
// closed afterwards. It may be one of a buffer of this process, of another process whose
// exporter is [Alloc], or of the kernel: udmabuf, dma-heap, vgem.
//
// Errors: EBADF if the descriptor is not open; EINVAL if it is no dma-buf, or the process of its
// exporter has ended; for buffers of the kernel that cannot be mapped, EOPNOTSUPP; ETIMEDOUT if the
// exporter's process does not answer.
func Get(fd int) (*Buffer, error) {
	const op = "dma_buf_get"
	id, err := sys.HandleIDOf(fd)
	if err != nil {
		return nil, ib.Errorf(op, syscall.EBADF, "descriptor %d is not open", fd)
	}
	if b := find(id); b != nil {
		return b, nil
	}
	if name, ok := processOf(fd); ok {
		return fromProcess(op, fd, name)
	}
	return fromKernel(op, fd)
}
