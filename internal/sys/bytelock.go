package sys

// Locks of single bytes of a memory file that several processes have open. A process shows by
// such a lock that it lives.
//
// The lock belongs to an open file of its own (F_OFD_SETLK), and the only thing that refers to
// this open file is a mapping. So the kernel takes the lock away when the process's memory goes:
// when its last thread has ended, or it calls execve(2). It does not matter whether the main
// thread has ended before. A child of fork(2) does not get the mapping (MADV_DONTFORK), and a
// program that closes descriptors does not meet one of these.

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// ByteLock is a lock of one byte of a file.
type ByteLock struct{ mapping []byte }

// LockByte locks a byte of a memory file, until Unlock or until this process has ended. It returns
// nil if the byte is locked already. The descriptor stays the caller's. A child of a fork that
// another thread makes during the call may keep the byte locked until it ends or calls execve(2).
func LockByte(fd int, at int64) (*ByteLock, error) {
	if locked, err := ByteLocked(fd, at); locked || err != nil { // many processes may try in turn
		return nil, err
	}
	own, err := reopen(fd, unix.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("opening a memory file again: %w", err)
	}
	defer func() { _ = unix.Close(own) }()
	err = unix.FcntlFlock(uintptr(own), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
	if err == unix.EAGAIN || err == unix.EACCES {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("locking a byte: %w", err)
	}
	m, err := unix.Mmap(own, 0, int(pageSize), unix.PROT_NONE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of a lock: %w", err)
	}
	if err := unix.Madvise(m, unix.MADV_DONTFORK); err != nil {
		_ = unix.Munmap(m) // the first error says more
		return nil, fmt.Errorf("MADV_DONTFORK on a lock: %w", err)
	}
	return &ByteLock{m}, nil
}

// Unlock gives the lock up.
func (l *ByteLock) Unlock() {
	_ = unix.Munmap(l.mapping) // it was mapped: it cannot fail
}

// ByteLocked reports whether a byte is locked, by this process or another one.
func ByteLocked(fd int, at int64) (bool, error) {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1}
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &l); err != nil {
		return false, fmt.Errorf("looking for a lock: %w", err)
	}
	return l.Type != unix.F_UNLCK, nil
}
