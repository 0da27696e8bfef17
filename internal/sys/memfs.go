package sys

// Which file systems keep their files in memory.

import (
	"bytes"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// livesInMemory reports whether files of this device exist in memory alone, and are never
// read from storage: memfd and shared anonymous memory, which are on a tmpfs of the
// kernel's own; and mounted tmpfs, ramfs and hugetlbfs. It returns false for a device
// that is not known.
func livesInMemory(major, minor uint32) bool {
	if onKernelTmpfs(major, minor) {
		return true
	}
	mounts, err := mountsFile()
	if err != nil {
		return false
	}
	return mounts.inMemory(uint64(major)<<32 | uint64(minor))
}

// onKernelTmpfs reports whether the device is the kernel's own tmpfs.
func onKernelTmpfs(major, minor uint32) bool {
	device, ok := kernelTmpfs()
	return ok && device == uint64(major)<<32|uint64(minor)
}

// kernelTmpfs returns the device of the kernel's own tmpfs, which is in no list of
// mounts and never goes away.
var kernelTmpfs = sync.OnceValues(func() (device uint64, ok bool) {
	fd, err := unix.MemfdCreate("verbena-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return 0, false
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0, false
	}
	return uint64(unix.Major(st.Dev))<<32 | uint64(unix.Minor(st.Dev)), true
})

// mountTable is /proc/self/mountinfo and what was read from it. The kernel reuses the
// numbers of devices for other file systems, so the file is read again when poll(2)
// reports that something was mounted or unmounted.
type mountTable struct {
	fd      int
	devices atomic.Pointer[map[uint64]bool] // those that are in memory
	mu      sync.Mutex                      // guards the reading, one at a time
}

var mountsFile = sync.OnceValues(func() (*mountTable, error) {
	fd, err := openProc("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return &mountTable{fd: fd}, nil
})

func (t *mountTable) inMemory(device uint64) bool {
	devices := t.devices.Load()
	if devices == nil || t.changed() {
		devices = t.read()
	}
	return (*devices)[device]
}

// changed reports whether mounts have changed. The kernel reports each change once.
func (t *mountTable) changed() bool {
	fds := [1]unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLPRI}}
	n, err := unix.Poll(fds[:], 0)
	return n != 0 || err != nil
}

// read makes the list anew. The next poll reports a change that happens meanwhile.
func (t *mountTable) read() *map[uint64]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	devices := make(map[uint64]bool)
	err := textLines(t.fd, func(line []byte) bool {
		if device, kind, ok := parseMount(line); ok {
			switch string(kind) {
			case "tmpfs", "devtmpfs", "ramfs", "hugetlbfs", "rootfs":
				devices[device] = true
			}
		}
		return true
	})
	if err != nil {
		clear(devices)
	}
	t.devices.Store(&devices)
	return &devices
}

// parseMount reads a line of mountinfo: "id parent major:minor root point options
// [tag ...] - type source options".
func parseMount(line []byte) (device uint64, kind []byte, ok bool) {
	fields, rest, ok := bytes.Cut(line, []byte(" - "))
	if !ok {
		return 0, nil, false
	}
	kind, _, _ = bytes.Cut(rest, []byte{' '})
	_, rest, _ = bytes.Cut(fields, []byte{' '})
	_, rest, _ = bytes.Cut(rest, []byte{' '})
	numbers, _, _ := bytes.Cut(rest, []byte{' '})
	majorText, minorText, _ := bytes.Cut(numbers, []byte{':'})
	major, err1 := strconv.ParseUint(string(majorText), 10, 32)
	minor, err2 := strconv.ParseUint(string(minorText), 10, 32)
	return major<<32 | minor, kind, err1 == nil && err2 == nil
}
