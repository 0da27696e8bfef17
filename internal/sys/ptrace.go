package sys

// Who may read this process's memory, where the kernel's Yama module restricts
// that beyond the user.

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// YamaScope returns kernel.yama.ptrace_scope: 0, processes of one user may read
// each other, also where there is no Yama; 1, only ancestors, and whom the
// process names; 2, only with privilege; 3, nobody.
func YamaScope() int {
	b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil {
		return 0
	}
	scope, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return scope
}

// SetPtracer names the one process that may, with its descendants, read this
// one under scope 1, in place of whom was named before; 0 is nobody.
func SetPtracer(pid int) error { return unix.Prctl(unix.PR_SET_PTRACER, uintptr(pid), 0, 0, 0) }

// ParentAndSession returns the parent and the session of a process.
func ParentAndSession(pid int) (parent, session int, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	return parseStat(stat)
}

// parseStat reads "pid (name) state parent group session …". The name may
// contain anything; what follows it may not contain a parenthesis.
func parseStat(stat []byte) (parent, session int, err error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 4 {
		return 0, 0, fmt.Errorf("stat %q: %w", stat, unix.EINVAL)
	}
	if parent, err = strconv.Atoi(fields[1]); err != nil {
		return 0, 0, err
	}
	session, err = strconv.Atoi(fields[3])
	return parent, session, err
}
