// Package sys holds every system call that the command makes itself; it is a
// user of package verbs like any other program and has no access to Verbena's
// own package of system calls.
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

// Yield lets another thread run that waits for this CPU, if there is one. What
// the call returns does not matter; it cannot fail on Linux.
func Yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }

// Subordinate prepares a command so that the kernel kills it when the thread
// that starts it ends: whoever calls Start must be locked to its thread and
// stay. The command gets a process group of its own, for an interrupt from the
// terminal is meant for its parent, which ends it in its own way.
func Subordinate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// StdFiles returns standard input and output as files whose reads and writes
// Close interrupts. Only files made from descriptors that do not block have
// that. The two must be pipes of this process's own.
func StdFiles() (in, out *os.File, err error) {
	for _, fd := range []int{syscall.Stdin, syscall.Stdout} {
		if err := syscall.SetNonblock(fd, true); err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	return os.NewFile(uintptr(syscall.Stdin), "stdin"), os.NewFile(uintptr(syscall.Stdout), "stdout"), nil
}

// Exec makes the process another program; it returns only if it cannot.
func Exec(path string, args, env []string) error { return syscall.Exec(path, args, env) }
