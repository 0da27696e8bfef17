package modetest

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Rule forbids a system call, or those calls of it that have a value in an argument.
type Rule struct {
	Number int
	Arg    int    // the argument that is compared; -1: none, all calls are forbidden
	Value  uint32 // of the argument's lower half
	Errno  syscall.Errno
}

// Forbid makes system calls fail from now on, in all threads of the process and for
// good. It is sound to hand the filter over as an address: the variables that it is
// made of are alive until the call returns, and the kernel copies it.
func Forbid(rules ...Rule) error {
	var code []unix.SockFilter
	load := func(offset uint32) {
		code = append(code, unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset})
	}
	equal := func(value uint32, skip uint8) {
		code = append(code, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: skip})
	}
	for _, r := range rules {
		load(0)
		if r.Arg < 0 {
			equal(uint32(r.Number), 1)
		} else {
			equal(uint32(r.Number), 3)
			load(16 + 8*uint32(r.Arg)) // the lower half, on a little-endian machine
			equal(r.Value, 1)
		}
		code = append(code, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(r.Errno)})
	}
	code = append(code, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		return errno
	}
	return nil
}
