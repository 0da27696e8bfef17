package sys

// Pipes between user buffers and pinned pages. A registered buffer can only be read to
// and written from a file; a pipe is the file that copies least:
//
//   - Into the pages: vmsplice(2) puts references to the user buffer's pages into the
//     pipe, and reading the pipe into the registered buffer copies. One copy.
//   - Out of the pages: writing the registered buffer to the pipe copies into pages of
//     the pipe, and read(2) copies out of them. Two copies, the second from warm cache.
//
// A pipe is empty when it is put back. One that cannot be emptied is closed, which drops
// its references to pages.
//
// Why this is sound: each call gets the address and the length of one slice, converted
// in the call, which keeps it alive. What vmsplice leaves in the pipe are the kernel's
// references to pages, not Go pointers. The slice is stored in the pinPipe, which is on
// the heap, until the pipe is put back: so its bytes are never on a stack, which could
// move and be used for something else, and the collector neither moves nor frees them.

import (
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	pipeWish = 256 << 10 // bytes; the kernel may grant less
	// pipeOut is how many bytes go out of the pages at once: few enough that the second
	// copy finds them in the cache.
	pipeOut = 128 << 10
	// pipeSmall is the length up to which write(2), which copies, is as fast as
	// vmsplice(2).
	pipeSmall = 1024
)

// pinPipe is a pipe whose ends do not block.
type pinPipe struct {
	r, w, size int
	source     unix.Iovec // what vmsplice(2) has put into it
}

// pinPipes keeps pipes for the next access: as many as can be of use at once.
type pinPipes struct {
	mu   sync.Mutex // guards idle
	idle []*pinPipe
}

// get returns an empty pipe.
func (s *pinPipes) get() (*pinPipe, error) {
	s.mu.Lock()
	if n := len(s.idle); n > 0 {
		p := s.idle[n-1]
		s.idle = s.idle[:n-1]
		s.mu.Unlock()
		return p, nil
	}
	s.mu.Unlock()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	p := &pinPipe{r: fds[0], w: fds[1]}
	// A user who has too many pipes gets small ones; accesses then take more calls.
	_, _ = unix.FcntlInt(uintptr(p.w), unix.F_SETPIPE_SZ, pipeWish)
	size, err := unix.FcntlInt(uintptr(p.w), unix.F_GETPIPE_SZ, 0)
	if err == nil && size < int(pageSize) {
		err = unix.ENOMEM
	}
	if err != nil {
		p.close()
		return nil, err
	}
	p.size = size
	return p, nil
}

// put keeps a pipe for the next get, if it is empty; otherwise put closes it.
func (s *pinPipes) put(p *pinPipe, empty bool) {
	p.source.Base = nil
	if empty {
		s.mu.Lock()
		if len(s.idle) < 2*runtime.GOMAXPROCS(0) {
			s.idle = append(s.idle, p)
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
	}
	p.close()
}

func (p *pinPipe) close() {
	_ = unix.Close(p.w) // a pipe has nothing to write back
	_ = unix.Close(p.r)
}

// fill puts the first bytes of b, which is not empty, into the pipe, which is. It returns
// how many. EFAULT means that b's first byte is not mapped, or may not be read.
func (p *pinPipe) fill(b []byte) (int, unix.Errno) {
	if len(b) > pipeSmall {
		if n := p.refer(b); n > 0 {
			return n, 0
		}
		// Some memory can be read but not be referred to: that of devices, and of
		// memfd_secret(2).
	}
	return p.write(b)
}

// refer puts references to the pages of the first bytes of b into the pipe, and returns
// how many bytes these are; 0 if the memory cannot be referred to.
func (p *pinPipe) refer(b []byte) int {
	p.source.Base = unsafe.SliceData(b)
	p.source.SetLen(min(len(b), p.size))
	for {
		n, _, errno := unix.Syscall6(unix.SYS_VMSPLICE, uintptr(p.w), uintptr(unsafe.Pointer(&p.source)), 1, unix.SPLICE_F_NONBLOCK, 0, 0)
		switch errno {
		case 0:
			return int(n)
		case unix.EINTR:
		default:
			return 0
		}
	}
}

func (p *pinPipe) write(b []byte) (int, unix.Errno) {
	for {
		n, _, errno := unix.Syscall(unix.SYS_WRITE, uintptr(p.w), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// empty reads len(b) bytes out of the pipe, which has as many. EFAULT means that a part of
// b is not mapped, or may not be written: then the pipe is not empty.
func (p *pinPipe) empty(b []byte) unix.Errno {
	for len(b) > 0 {
		n, _, errno := unix.Syscall(unix.SYS_READ, uintptr(p.r), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			if n == 0 || n > uintptr(len(b)) {
				return unix.EIO // the writing end is open: this cannot be
			}
			b = b[n:]
		case unix.EINTR:
		default:
			return errno
		}
	}
	return 0
}
