package sys

// Which processes may read this process's memory, where the kernel's Yama module
// restricts that further than to the same user.

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// YamaScope returns kernel.yama.ptrace_scope, which is who may read a process: 0, all
// processes of the same user (also where there is no Yama); 1, only its ancestors and
// the process that it names; 2, only privileged processes; 3, none.
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

// SetPtracer names the process that may, with its descendants, read this one under
// scope 1. It replaces the one named before; 0 names none.
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
