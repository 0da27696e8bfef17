package sys

// Descriptors of fences: of work that ends some time.
//
// One of our own is an end of a socket pair. The process that has the fence keeps the other end. It
// sends the fence's status there, once, and closes it. So the descriptor is readable from then
// on, in whatever process it is, and whoever has it reads the status without taking it away
// (MSG_PEEK). If the process ends first, the descriptor is readable, too, and there is no status.
//
// The descriptor has a name, by which it is told from other sockets.
//
// A fence may also be a sync file of the kernel, and an eventfd, which is readable once it was
// written to.

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// FenceFD is a kind of descriptor that stands for a fence.
type FenceFD int

const (
	FenceOwn      FenceFD = iota + 1 // made by NewFencePair, in whatever process
	FenceSyncFile                    // a sync file of the kernel
	FenceEvent                       // an eventfd
)

// fencePrefix begins the name of a descriptor of our own.
const fencePrefix = "verbena-fence:"

// fenceMagic begins the status of a fence; its errno follows.
const fenceMagic = 0x434e4656

// maxErrno is the largest number of an error.
const maxErrno = 4095

// ErrFenceLost is the status of a fence whose process has ended before it was signalled.
var ErrFenceLost = fmt.Errorf("the process of the fence has ended before it was signalled: %w", unix.EOWNERDEAD)

// NewFencePair makes a descriptor of a fence, given, and the end that the process keeps. Both are
// closed on exec. The name must be another one for each pair that is open on this machine: EADDRINUSE.
func NewFencePair(name string) (kept, given int, err error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("socketpair: %w", err)
	}
	if err := unix.Bind(p[1], &unix.SockaddrUnix{Name: "@" + fencePrefix + name}); err != nil {
		_, _ = unix.Close(p[0]), unix.Close(p[1]) // the first error says more
		return -1, -1, fmt.Errorf("bind: %w", err)
	}
	return p[0], p[1], nil
}

// SignalFence sends the status of a fence through the end that NewFencePair has kept, and closes
// it. errno 0 is success.
func SignalFence(kept int, errno unix.Errno) {
	var b [8]byte
	binary.LittleEndian.PutUint32(b[:4], fenceMagic)
	binary.LittleEndian.PutUint32(b[4:], uint32(errno))
	for {
		// There is room: nothing else was sent. If nobody has the descriptor any more, nobody waits.
		if err := unix.Sendto(kept, b[:], unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil); err != unix.EINTR {
			break
		}
	}
	_ = unix.Close(kept) // it is open: it cannot fail
}

// FenceFDOf returns what kind of fence a descriptor stands for, and the name of one of our own. The
// error is EBADF if the descriptor is not open, and EINVAL if it stands for no fence.
func FenceFDOf(fd int) (kind FenceFD, name string, err error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return 0, "", fmt.Errorf("descriptor %d: %w", fd, err)
	}
	what, err := readFDLink(fd)
	if err != nil {
		return 0, "", err
	}
	switch {
	case what == "anon_inode:sync_file":
		return FenceSyncFile, "", nil
	case what == "anon_inode:[eventfd]":
		return FenceEvent, "", nil
	case strings.HasPrefix(what, "socket:"):
		addr, err := unix.Getsockname(fd)
		if u, ok := addr.(*unix.SockaddrUnix); err == nil && ok && strings.HasPrefix(u.Name, "@"+fencePrefix) {
			return FenceOwn, u.Name[1+len(fencePrefix):], nil
		}
	}
	return 0, "", fmt.Errorf("%q stands for no fence: %w", what, unix.EINVAL)
}

// FenceStatus returns the status of a fence: whether it was signalled, and then the errno of
// its failure, or nil. It changes nothing: others may ask for it, too.
func FenceStatus(fd int, kind FenceFD) (signaled bool, failure error) {
	switch kind {
	case FenceOwn:
		return ownFenceStatus(fd)
	case FenceSyncFile:
		if !readable(fd) {
			return false, nil
		}
		status, err := syncFileStatus(fd)
		switch {
		case err != nil:
			return true, err
		case status < 0:
			return true, fenceErrno(uint32(-status))
		}
		return true, nil
	}
	return readable(fd), nil
}

func ownFenceStatus(fd int) (signaled bool, failure error) {
	var b [9]byte
	for {
		n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return false, nil
		case err != nil:
			return true, fmt.Errorf("reading a fence: %w", err)
		case n == 0:
			return true, ErrFenceLost
		case n != 8 || binary.LittleEndian.Uint32(b[:4]) != fenceMagic:
			return true, fmt.Errorf("a fence with %d bytes that are no status: %w", n, unix.EPROTO)
		}
		return true, fenceErrno(binary.LittleEndian.Uint32(b[4:]))
	}
}

// fenceErrno returns the error of a status; nil for 0.
func fenceErrno(n uint32) error {
	switch {
	case n == 0:
		return nil
	case n > maxErrno:
		return unix.EPROTO
	}
	return unix.Errno(n)
}

// WriteEvent signals an eventfd that is not wrapped in an Event.
func WriteEvent(fd int) error {
	one := [8]byte{}
	binary.NativeEndian.PutUint64(one[:], 1)
	for {
		_, err := unix.Write(fd, one[:])
		switch err {
		case nil, unix.EAGAIN: // if the counter is full, the event is signalled already
			return nil
		case unix.EINTR:
		default:
			return fmt.Errorf("writing to an eventfd: %w", err)
		}
	}
}
