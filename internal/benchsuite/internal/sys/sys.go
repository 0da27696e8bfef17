// Package sys holds the system calls that the benchmarks make themselves: those that they
// measure with, and the TCP that they compare with. They do not use the device's own
// package of system calls, since no other program can.
package sys

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time that this process has used, in user and kernel
// mode, on all its threads.
func CPUTime() time.Duration {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return 0 // cannot fail with these arguments
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// Yield lets another thread run that waits for this CPU, if there is one. The call cannot
// fail on Linux.
func Yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// Subordinate prepares a command so that the kernel kills it when the thread that starts
// it ends: the goroutine that calls Start must be locked to its thread and outlive the
// command. The command gets a process group of its own: an interrupt from the terminal
// then reaches only the parent, with which the command ends.
func Subordinate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// CPUs returns the processors that this process may use.
func CPUs() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	var cpus []int
	for cpu := 0; len(cpus) < set.Count(); cpu++ {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

// Pin keeps all threads of this process on the given processors, and those that
// it will start.
func Pin(cpus ...int) error {
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	// A thread that was not pinned yet may have started another meanwhile, which
	// then is not pinned either: go on until there was nothing to do.
	for done := make(map[int]bool); ; {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		before := len(done)
		for _, t := range tasks {
			tid, err := strconv.Atoi(t.Name())
			if err != nil || done[tid] {
				continue
			}
			if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("sched_setaffinity: %w", err)
			}
			done[tid] = true
		}
		if len(done) == before {
			return nil
		}
	}
}

// Map returns n bytes of memory outside the Go heap, with its pages present.
func Map(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
}

// Unmap unmaps what Map or Reserve returned.
func Unmap(b []byte) error { return unix.Munmap(b) }

// Conn is a TCP connection for a program that never sleeps: its calls do not wait, and
// are raw system calls.
type Conn struct{ fd int }

// Listener waits for one connection.
type Listener struct{ fd int }

var loopback = [4]byte{127, 0, 0, 1}

// Listen listens on a free port of 127.0.0.1.
func Listen() (*Listener, netip.AddrPort, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, netip.AddrPort{}, fmt.Errorf("socket: %w", err)
	}
	l := &Listener{fd}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback}); err != nil {
		l.Close()
		return nil, netip.AddrPort{}, fmt.Errorf("bind: %w", err)
	}
	if err := unix.Listen(fd, 1); err != nil {
		l.Close()
		return nil, netip.AddrPort{}, fmt.Errorf("listen: %w", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		l.Close()
		return nil, netip.AddrPort{}, fmt.Errorf("getsockname: %w", err)
	}
	port := sa.(*unix.SockaddrInet4).Port
	return l, netip.AddrPortFrom(netip.AddrFrom4(loopback), uint16(port)), nil
}

// Accept waits for the connection.
func (l *Listener) Accept() (*Conn, error) {
	fd, _, err := unix.Accept4(l.fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("accept: %w", err)
	}
	return newConn(fd)
}

// Close stops listening.
func (l *Listener) Close() { _ = unix.Close(l.fd) }

// Dial connects to a port of 127.0.0.1.
func Dial(port int) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: loopback, Port: port}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("fcntl: %w", err)
	}
	return newConn(fd)
}

// newConn makes small messages leave at once.
func newConn(fd int) (*Conn, error) {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("TCP_NODELAY: %w", err)
	}
	return &Conn{fd}, nil
}

// Close closes the connection.
func (c *Conn) Close() { _ = unix.Close(c.fd) }

// Reserve returns n bytes of fresh memory whose pages are not present.
func Reserve(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
}

// Discard makes pages absent. Anonymous memory is zero afterwards.
func Discard(b []byte) error { return unix.Madvise(b, unix.MADV_DONTNEED) }

// Lock is mlock(2).
func Lock(b []byte) error { return unix.Mlock(b) }
