//go:build cgo

package forktest

/*
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

// ft_fork forks with the C library's fork, which calls the handlers of
// pthread_atfork. The child reads a word, counts which of the two descriptors are open,
// writes both numbers to out, and waits until in is closed on the other side.
static pid_t ft_fork(const uint64_t *word, int a, int b, int out, int in, int unused)
{
	pid_t pid = fork();
	if (pid != 0)
		return pid;
	close(unused);
	uint64_t told[2] = {*word, 0};
	told[1] += fcntl(a, F_GETFD) >= 0;
	told[1] += fcntl(b, F_GETFD) >= 0;
	if (write(out, told, sizeof told) != sizeof told)
		_exit(1);
	char c;
	while (read(in, &c, 1) > 0)
		;
	_exit(0);
}
*/
import "C"

import (
	"encoding/binary"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Child is the child of a fork, which waits for End.
type Child struct {
	Word uint64 // what it found at the address
	Open int    // how many of the two descriptors were open in it

	pid int
	end *os.File
}

// Fork makes a child that looks at word and at two descriptors. It is safe and sound
// for words that outlive the call: the child reads it at once, in its own copy.
func Fork(word *uint64, a, b int) (*Child, error) {
	report, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = report.Close() }()
	in, end, err := os.Pipe()
	if err != nil {
		_ = out.Close()
		return nil, err
	}
	pid, err := C.ft_fork((*C.uint64_t)(unsafe.Pointer(word)), C.int(a), C.int(b), C.int(out.Fd()), C.int(in.Fd()), C.int(end.Fd()))
	_ = out.Close()
	_ = in.Close()
	if pid < 0 {
		_ = end.Close()
		return nil, err
	}
	c := &Child{pid: int(pid), end: end}
	var told [16]byte
	if _, err := report.Read(told[:]); err != nil {
		_ = c.End()
		return nil, err
	}
	c.Word = binary.NativeEndian.Uint64(told[:])
	c.Open = int(binary.NativeEndian.Uint64(told[8:]))
	return c, nil
}

// End lets the child go and waits for it.
func (c *Child) End() error {
	_ = c.end.Close()
	_, err := unix.Wait4(c.pid, nil, 0, nil)
	return err
}
