package sys

// Memory of System V (shmget(2)). The kernel raises no event when it is detached, so
// nothing could tell whoever has registered it. But it can be attached once more, by
// whoever has it attached: what lies there stays, whatever the program does with its own
// attachment.
//
// It is sound: addresses are only compared and handed to the kernel.

import (
	"strings"

	"golang.org/x/sys/unix"
)

// SysV is an attachment of our own to a segment.
type SysV struct {
	base uintptr
	At   uintptr // where the bytes lie that it was asked for
}

// AttachSysV attaches the segment that n bytes at addr lie in once more, with the same
// rights. It reports false if they are no such memory, or do not lie in one piece of it,
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
		v.Detach() // another segment has the number by now
		return SysV{}, false
	}
	return v, true
}

// Detach gives the attachment up.
func (v SysV) Detach() { _, _, _ = unix.Syscall(unix.SYS_SHMDT, v.base, 0, 0) }
