package sys

// A shelf keeps files open for several processes: descriptors that lie in the queue of a unix
// socket (SCM_RIGHTS), both ends of which all of these processes have. A file on the shelf is
// open until the last of them has ended, whoever has opened it.

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// Shelf is a shelf. One process at a time may call Take.
type Shelf struct{ in, out int }

// NewShelf makes an empty shelf. Its name, that of an abstract socket, is for the child of a
// fork: it finds by the name what it has to close (clib/front/backend.c).
func NewShelf(name string) (*Shelf, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	if err := unix.Bind(ends[1], &unix.SockaddrUnix{Name: name}); err != nil {
		closeFDs(ends[:])
		return nil, fmt.Errorf("the name of a shelf: %w", err)
	}
	for _, fd := range ends {
		_ = option{unix.SOL_SOCKET, unix.SO_SNDBUF, 1 << 20}.set(fd) // room for more, where that is allowed
	}
	return &Shelf{ends[0], ends[1]}, nil
}

// OpenShelf takes over the two descriptors of a shelf that another process has passed on.
func OpenShelf(in, out int) *Shelf { return &Shelf{in, out} }

// FDs returns the descriptors of the shelf, to be passed on.
func (s *Shelf) FDs() (in, out int) { return s.in, s.out }

// Put lays a file on the shelf. The descriptor stays the caller's. It fails with ETOOMANYREFS if the
// user has more descriptors under way than the hard limit of this process allows.
func (s *Shelf) Put(fd int) error {
	return passing(func() error {
		for {
			err := unix.Sendmsg(s.in, []byte{0}, unix.UnixRights(fd), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if err != unix.EINTR {
				return err
			}
		}
	})
}

// passing calls f, which sends descriptors. The kernel refuses that to a process without privileges
// if its user has more descriptors under way than the soft limit of the process (ETOOMANYREFS). Then
// passing raises that limit to the hard one, calls f again, and sets the limit back.
func passing(f func() error) error {
	err := f()
	if !errors.Is(err, unix.ETOOMANYREFS) {
		return err
	}
	raising.Lock()
	defer raising.Unlock()
	var old, now unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &old) != nil || old.Cur >= old.Max {
		return err
	}
	raised := unix.Rlimit{Cur: old.Max, Max: old.Max}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &raised) != nil {
		return err
	}
	err = f()
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &now) == nil && now == raised { // else the program has changed it meanwhile
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &old) // the limit becomes lower: it cannot fail
	}
	return err
}

var raising sync.Mutex // guards the limit on descriptors while it is raised

// PassLimit returns how many descriptors the user of this process may have under way, unless the
// process has privileges: the hard limit on descriptors.
func PassLimit() uint64 {
	var limit unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) // it cannot fail
	return limit.Max
}

// Take returns a descriptor of the file with an inode, -1 if it is not on the shelf. The file
// stays on the shelf as well: nothing that Take does could let it be closed, if the process
// ended in the middle of it. The file may lie there twice then.
func (s *Shelf) Take(inode uint64) (int, error) {
	files, err := unix.IoctlGetInt(s.out, unix.TIOCINQ) // one byte comes with each
	if err != nil {
		return -1, fmt.Errorf("how many files lie on a shelf: %w", err)
	}
	for range files { // once round
		fd, is, err := s.next(unix.MSG_PEEK)
		if err != nil || fd < 0 || is == inode {
			return fd, err
		}
		err = s.rotate(fd, is)
		_ = unix.Close(fd) // it was open: it cannot fail
		if err != nil {
			return -1, err
		}
	}
	return -1, nil
}

// rotate moves the file at the head of the shelf, of which the caller has a descriptor, to the
// end. It lays the file there first.
func (s *Shelf) rotate(fd int, inode uint64) error {
	if err := s.Put(fd); err != nil {
		return err
	}
	old, is, err := s.next(0)
	if err != nil || old < 0 {
		return err
	}
	if is != inode { // another process takes from the shelf at the same time, against the rule
		err = s.Put(old)
	}
	_ = unix.Close(old) // it was open: it cannot fail
	return err
}

// Drop takes the file with an inode off the shelf, if it is there. A file that no process has
// open is closed then.
func (s *Shelf) Drop(inode uint64) {
	if fd, err := s.Take(inode); err == nil && fd >= 0 { // it is at the head now
		_ = unix.Close(fd) // it was open: it cannot fail
		if old, is, err := s.next(0); err == nil && old >= 0 {
			if is != inode {
				_ = s.Put(old) // another process takes from the shelf at the same time, against the rule
			}
			_ = unix.Close(old) // it was open: it cannot fail
		}
	}
}

// next receives the file at the head of the shelf; fd is -1 if the shelf is empty.
func (s *Shelf) next(flags int) (fd int, inode uint64, err error) {
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	for {
		_, n, got, _, err := unix.Recvmsg(s.out, b, oob, flags|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return -1, 0, nil
		case err != nil:
			return -1, 0, err
		}
		fds, err := passedFDs(oob[:n])
		if err == nil && (got&unix.MSG_CTRUNC != 0 || len(fds) != 1) {
			err = fmt.Errorf("a descriptor cannot be received: %w", unix.EMFILE)
		}
		if err == nil {
			inode, err = Inode(fds[0])
		}
		if err != nil {
			closeFDs(fds)
			return -1, 0, err
		}
		return fds[0], inode, nil
	}
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // it was open: it cannot fail
	}
}

// Close closes this process's ends of the shelf.
func (s *Shelf) Close() error {
	closeFDs([]int{s.in, s.out})
	return nil
}
