// Package sys holds the system calls that the command makes itself. The command uses
// package verbs like any other program, and not the device's own package of system calls.
package sys

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// CPUSeconds returns the CPU time that this process has used, in user and
// kernel mode, on all its threads.
func CPUSeconds() float64 {
	var ru syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &ru) != nil {
		return 0 // cannot fail with these arguments
	}
	return (time.Duration(ru.Utime.Nano()) + time.Duration(ru.Stime.Nano())).Seconds()
}

// Yield lets another thread run that waits for this CPU, if there is one. The call cannot
// fail on Linux.
func Yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }

// Subordinate prepares a command so that the kernel kills it when the thread that starts
// it ends: the goroutine that calls Start must be locked to its thread and outlive the
// command. The command gets a process group of its own: an interrupt from the terminal
// then reaches only the parent, which ends the command in its own way.
func Subordinate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// StdFiles returns standard input and output as files whose reads and writes Close
// interrupts, which needs descriptors that do not block. The two must be pipes that no
// other process uses.
func StdFiles() (in, out *os.File, err error) {
	for _, fd := range []int{syscall.Stdin, syscall.Stdout} {
		if err := syscall.SetNonblock(fd, true); err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	return os.NewFile(uintptr(syscall.Stdin), "stdin"), os.NewFile(uintptr(syscall.Stdout), "stdout"), nil
}

// OwnDirectory returns an error unless a directory is this user's, and only this user can
// write to it.
func OwnDirectory(dir string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(dir, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&syscall.S_IFMT != syscall.S_IFDIR:
		return syscall.ENOTDIR
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to another user (uid %d)", st.Uid)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("others may write to it (mode %#o)", st.Mode&0o777)
	}
	return nil
}

// TryLock locks a file until this process closes it. It fails with EWOULDBLOCK if another
// process has locked it.
func TryLock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			return err
		}
	}
}

// Map returns at least n bytes of fresh memory outside the Go heap, in whole pages.
func Map(n int) ([]byte, error) {
	page := os.Getpagesize()
	return syscall.Mmap(-1, 0, (n+page-1)/page*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
}

// Unmap gives back what Map returned.
func Unmap(b []byte) error { return syscall.Munmap(b) }

// MapShared is Map for memory whose content survives Discard: the next access brings it
// back, as from a file.
func MapShared(n int) ([]byte, error) {
	page := os.Getpagesize()
	return syscall.Mmap(-1, 0, (n+page-1)/page*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_ANON)
}

// Discard takes pages out of this process's page tables, as reclaim does.
func Discard(b []byte) error { return syscall.Madvise(b, syscall.MADV_DONTNEED) }

// Exec replaces the process by another program; it returns only on failure.
func Exec(path string, args, env []string) error { return syscall.Exec(path, args, env) }

// OwnSession prepares a command to run in a session of its own, without a terminal.
func OwnSession(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }

// OwnPidfd returns a descriptor of this process that can be read, as poll(2) says, when the process
// has ended, and does not block.
func OwnPidfd() (*os.File, error) {
	const sysPidfdOpen = 434 // of every architecture
	fd, _, errno := syscall.Syscall(sysPidfdOpen, uintptr(os.Getpid()), syscall.O_NONBLOCK, 0)
	if errno != 0 {
		return nil, fmt.Errorf("pidfd_open: %w", errno)
	}
	return os.NewFile(fd, "pidfd"), nil
}
