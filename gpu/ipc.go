package gpu

// Memory of other processes. A handle is a number that one process passes to another by whatever means. It names the
// process, by a socket, and the memory. The process that opens it connects there, and is sent a descriptor of
// the memory's dma-buf. The rest is package dmabuf's.
//
//	IPCHandle ─► 32 bytes ─► OpenIPC ── id ──────────────►  the memory's process
//	                         Import  ◄── errno, where, fd ──
//
// The process listens as long as it has memory with handles. A handle ends with its memory, and with its process.

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// IPCHandle names memory for other processes of the same user.
type IPCHandle [32]byte

const (
	ipcMagic  = "vGPU"
	ipcPrefix = "verbena/gpu:" // a child of fork closes sockets with names of verbena/ (clib/front/backend.c)
	maxIPC    = 64             // processes that are served at once
)

// ipcPatience is how long one process waits for the other.
const ipcPatience = 10 * time.Second

// ipcServer is what other processes connect to.
type ipcServer struct {
	mu       sync.Mutex // guards what follows
	token    [16]byte
	pid      int // whose token it is: a child that was forked has none
	handles  map[uint64]shared
	listener *net.UnixListener // nil: there are no handles
	slots    chan struct{}     // has a place for each process that is served
}

// shared is memory that has a handle.
type shared struct {
	obj    *object
	off, n uint64
}

var ipc ipcServer

// IPCHandle returns a handle of the memory. It is good until the memory is freed.
//
// Errors: [ErrFreed], [ErrClosed]; EOPNOTSUPP for imported memory; EMFILE, ENFILE.
func (b *Buffer) IPCHandle() (IPCHandle, error) {
	const op = "gpu_ipc_handle"
	if err := b.ok(op); err != nil {
		return IPCHandle{}, err
	}
	if b.obj.imported != nil {
		return IPCHandle{}, ib.Errorf(op, syscall.EOPNOTSUPP, "imported memory has the handles of its owner")
	}
	if !b.obj.get() {
		return IPCHandle{}, fail(op, ErrFreed, "object %d", b.obj.id)
	}
	defer b.obj.put()
	return ipc.add(op, shared{b.obj, b.off, b.n})
}

func (s *ipcServer) add(op string, m shared) (h IPCHandle, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		if s.pid != os.Getpid() {
			_, _ = rand.Read(s.token[:]) // it never fails
			s.pid = os.Getpid()
			s.handles, s.slots = make(map[uint64]shared), make(chan struct{}, maxIPC)
		}
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: ipcName(s.token[:]), Net: "unixpacket"})
		if err != nil {
			errno := syscall.ENFILE
			_ = errors.As(err, &errno)
			return h, ib.Errorf(op, errno, "%v", err)
		}
		s.listener = l
		go s.accept(l)
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // it never fails
	s.handles[binary.LittleEndian.Uint64(id[:])] = m
	m.obj.handles.Add(1)
	copy(h[:], ipcMagic)
	binary.LittleEndian.PutUint32(h[4:], uint32(s.pid))
	copy(h[8:], s.token[:])
	copy(h[24:], id[:])
	return h, nil
}

func ipcName(token []byte) string { return "@" + ipcPrefix + hex.EncodeToString(token) }

// forget ends the handles of an object that is freed. With the last handle the process ends to listen.
func (s *ipcServer) forget(o *object) {
	if o.handles.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, m := range s.handles {
		if m.obj == o {
			delete(s.handles, id)
		}
	}
	if len(s.handles) == 0 && s.listener != nil {
		_ = s.listener.Close() // it ends accept
		s.listener = nil
	}
}

func (s *ipcServer) accept(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // descriptors have run out, perhaps for a moment
			continue
		}
		s.slots <- struct{}{} // those behind it wait to be accepted: a process that is refused would take this one for dead
		go func() {
			defer func() { <-s.slots }()
			s.serve(c)
		}()
	}
}

// serve answers one process.
func (s *ipcServer) serve(c *net.UnixConn) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(ipcPatience)) // a connection that is open takes one
	who, err := sys.PeerCred(c)
	if err != nil || who.UID != os.Geteuid() {
		slog.Warn("verbena: a process of another user asks for GPU memory", "uid", who.UID, "error", err)
		return
	}
	b := make([]byte, 8)
	n, fds, err := sys.RecvFDs(c, b)
	for _, fd := range fds { // none is expected
		_ = sys.CloseFD(fd)
	}
	if err != nil || n != 8 {
		return
	}
	answer := make([]byte, 24)
	fd, m, err := s.open(binary.LittleEndian.Uint64(b))
	if err != nil {
		errno := syscall.EINVAL
		_ = errors.As(err, &errno)
		binary.LittleEndian.PutUint64(answer, uint64(errno))
		_ = sys.SendFDs(c, answer) // the process may have gone
		return
	}
	binary.LittleEndian.PutUint64(answer[8:], m.off)
	binary.LittleEndian.PutUint64(answer[16:], m.n)
	_ = sys.SendFDs(c, answer, fd)
	_ = sys.CloseFD(fd)
}

// open returns a descriptor of the memory of a handle.
func (s *ipcServer) open(id uint64) (fd int, m shared, err error) {
	const op = "gpu_ipc_open"
	m, err = s.find(id)
	if err != nil {
		return -1, m, err
	}
	defer m.obj.put()
	buf, err := m.obj.dmaBuf(op)
	if err != nil {
		return -1, m, err
	}
	defer buf.Put()
	fd, err = buf.FD()
	return fd, m, err
}

// find returns the memory of a handle, with a reference.
func (s *ipcServer) find(id uint64) (shared, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.handles[id]
	if !ok || !m.obj.get() {
		return shared{}, fail("gpu_ipc_open", ErrHandle, "")
	}
	return m, nil
}

// OpenIPC opens a handle of another process, or of this one. The Buffer is imported memory; the other process sees
// what is written to it, and its Buffer lies in system memory meanwhile. When the other process frees it, or
// ends, operations on it fail with ENODEV.
//
// Errors: [ErrHandle] if it is no handle, or its memory is freed; [ErrDead] if its process has ended; ETIMEDOUT if that
// does not answer; [ErrClosed].
func (d *Device) OpenIPC(h IPCHandle) (*Buffer, error) {
	const op = "gpu_ipc_open"
	if err := d.ok(op); err != nil {
		return nil, err
	}
	if string(h[:4]) != ipcMagic {
		return nil, fail(op, ErrHandle, "")
	}
	id := binary.LittleEndian.Uint64(h[24:])
	ipc.mu.Lock()
	own := ipc.pid == os.Getpid() && string(ipc.token[:]) == string(h[8:24])
	ipc.mu.Unlock()
	if own {
		m, err := ipc.find(id)
		if err != nil {
			return nil, err
		}
		if m.obj.card == d.card {
			return d.newBuffer(op, m.obj, m.off, m.n)
		}
		defer m.obj.put()
		buf, err := m.obj.dmaBuf(op)
		if err != nil {
			return nil, err
		}
		defer buf.Put()
		return d.importPart(buf, m.off, m.n)
	}
	fd, off, n, err := askFor(op, h[8:24], id)
	if err != nil {
		return nil, err
	}
	buf, err := dmabuf.Get(fd)
	_ = sys.CloseFD(fd)
	if err != nil {
		return nil, err
	}
	defer buf.Put()
	return d.importPart(buf, off, n)
}

// importPart imports a part of a dma-buf.
func (d *Device) importPart(buf *dmabuf.Buffer, off, n uint64) (*Buffer, error) {
	whole, err := d.Import(buf)
	if err != nil {
		return nil, err
	}
	defer func() { _ = whole.Free() }() // the part has a reference of its own
	return whole.Sub(off, n)
}

// askFor asks a process for the memory of a handle.
func askFor(op string, token []byte, id uint64) (fd int, off, n uint64, err error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: ipcName(token), Net: "unixpacket"})
	if errno := syscall.ECONNREFUSED; errors.As(err, &errno) && errno != syscall.ECONNREFUSED {
		return -1, 0, 0, ib.Errorf(op, errno, "the process of the memory is not asked: %v", err)
	}
	if err != nil {
		return -1, 0, 0, fail(op, ErrDead, "%v", err)
	}
	defer func() { _ = c.Close() }()
	if who, err := sys.PeerCred(c); err != nil || who.UID != os.Geteuid() {
		return -1, 0, 0, fail(op, ErrHandle, "the process is another user's")
	}
	_ = c.SetDeadline(time.Now().Add(ipcPatience)) // a connection that is open takes one
	if err := sys.SendFDs(c, binary.LittleEndian.AppendUint64(nil, id)); err != nil {
		return -1, 0, 0, fail(op, ErrDead, "%v", err)
	}
	b := make([]byte, 24)
	got, fds, err := sys.RecvFDs(c, b)
	if err == nil && got == 24 && len(fds) == 1 && binary.LittleEndian.Uint64(b) == 0 {
		return fds[0], binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:]), nil
	}
	for _, fd := range fds {
		_ = sys.CloseFD(fd)
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return -1, 0, 0, ib.Errorf(op, syscall.ETIMEDOUT, "the process of the memory does not answer")
	case err != nil || got != 24:
		return -1, 0, 0, fail(op, ErrDead, "%v", err)
	}
	return -1, 0, 0, fail(op, ErrHandle, "%v", syscall.Errno(binary.LittleEndian.Uint64(b)))
}
