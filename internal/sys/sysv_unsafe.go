package sys

// Memory of System V (shmget(2)). The kernel raises no event when it is detached, so the
// notifier would miss that. But a process that has a segment attached can attach it again:
// the second attachment stays, whatever the program does with its own.
//
// It is sound: addresses are only compared and given to the kernel.

import (
	"strings"

	"golang.org/x/sys/unix"
)

// SysV is a second attachment to a segment.
type SysV struct {
	base uintptr
	At   uintptr // where the bytes that AttachSysV was called for lie in it
}

// AttachSysV attaches the segment that n bytes at addr lie in again, with the same
// rights. It returns false if they are no such memory, or do not lie in one piece of it,
// or the kernel refuses.
func AttachSysV(addr, n uintptr) (SysV, bool) {
	s, err := mapsFile()
	if err != nil || n == 0 {
		return SysV{}, false
	}
	m, err := s.find(addr, false)
	if err != nil || !m.Shared || m.End-addr < n || !strings.HasPrefix(s.name(&m), "/SYSV") {
		return SysV{}, false
	}
	flags := uintptr(0)
	if !m.Write {
		flags = unix.SHM_RDONLY
	}
	base, _, errno := unix.Syscall(unix.SYS_SHMAT, uintptr(m.Inode), 0, flags) // the inode's number is the segment's, which may be 0
	if errno != 0 {
		return SysV{}, false
	}
	v := SysV{base: base, At: base + uintptr(m.Offset) + (addr - m.Start)}
	own, err := s.find(v.At, false)
	if err != nil || own.Inode != m.Inode || own.Major != m.Major || own.Minor != m.Minor || own.End-v.At < n || !strings.HasPrefix(s.name(&own), "/SYSV") {
		v.Detach() // the number is that of another segment by now
		return SysV{}, false
	}
	return v, true
}

// Detach detaches the segment.
func (v SysV) Detach() { _, _, _ = unix.Syscall(unix.SYS_SHMDT, v.base, 0, 0) }
