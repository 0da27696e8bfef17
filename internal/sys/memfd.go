package sys

// Memory that processes share: a memfd, sealed so that no process can make it shorter
// while others have it mapped.

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// memfdSeals keep a mapping valid for as long as it exists: the file neither shrinks
// (accesses behind its end would fault) nor grows, and no process can remove the seals.
const memfdSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// NewMemfd makes a memory file of size bytes, zero and sealed, and returns its
// descriptor. The name is for people: /proc/PID/maps shows it.
func NewMemfd(name string, size int) (int, error) {
	fd, err := createMemfd(name)
	if err != nil {
		return -1, err
	}
	if err := sizeMemfd(fd, size); err != nil {
		_ = unix.Close(fd) // the first error says more
		return -1, err
	}
	return fd, nil
}

// createMemfd makes an empty memory file that can be sealed.
func createMemfd(name string) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // the kernel is older than 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	return fd, nil
}

func sizeMemfd(fd, size int) error {
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return fmt.Errorf("ftruncate to %d bytes: %w", size, err)
	}
	// The kernel allocates pages when they are touched, and kills a process that
	// touches a page which it cannot allocate. That happens where the kernel does not
	// overcommit memory, so there all pages are allocated now.
	if mode, _ := os.ReadFile("/proc/sys/vm/overcommit_memory"); len(mode) > 0 && mode[0] == '2' {
		if err := unix.Fallocate(fd, 0, 0, int64(size)); err != nil {
			return fmt.Errorf("fallocate of %d bytes: %w", size, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, memfdSeals); err != nil {
		return fmt.Errorf("sealing: %w", err)
	}
	return nil
}

// MapMemfd maps a memory file of exactly size bytes, shared, for reading and
// writing. The descriptor may come from another process: the file is refused unless
// accesses to the mapping never fault. The descriptor may be closed afterwards.
func MapMemfd(fd, size int) ([]byte, error) {
	if size <= 0 {
		return nil, fmt.Errorf("mapping %d bytes: %w", size, unix.EINVAL)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("not a memory file: %w", err)
	}
	if seals&memfdSeals != memfdSeals {
		return nil, fmt.Errorf("seals are %#x, must include %#x: %w", seals, memfdSeals, unix.EPERM)
	}
	// The size is asked for after the seals: now it cannot change any more.
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	if st.Size != int64(size) {
		return nil, fmt.Errorf("memory file of %d bytes, must be %d: %w", st.Size, size, unix.EINVAL)
	}
	// The machine may run out of huge pages; an access is then a bus error.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("fstatfs: %w", err)
	}
	if int64(fs.Type) != unix.TMPFS_MAGIC { //nolint:unconvert // its type depends on the architecture
		return nil, fmt.Errorf("memory file on a file system of type %#x: %w", fs.Type, unix.EINVAL)
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	return b, nil
}

// MapMemfdWhole maps all of a memory file, shared, for reading, and for writing if write
// is set. The descriptor comes from another process: the file is refused unless it is
// sealed against becoming shorter.
func MapMemfdWhole(fd int, write bool) ([]byte, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("not a memory file: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("seals are %#x, must include %#x: %w", seals, unix.F_SEAL_SHRINK, unix.EPERM)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	if st.Size <= 0 || st.Size > maxMapping {
		return nil, fmt.Errorf("memory file of %d bytes: %w", st.Size, unix.EINVAL)
	}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	b, err := unix.Mmap(fd, 0, int(st.Size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", st.Size, err)
	}
	return b, nil
}

// maxMapping is more than any process can map.
const maxMapping = 1 << 47

// ReopenRead returns another descriptor of a file, which can only be read from.
func ReopenRead(fd int) (int, error) { return reopen(fd, unix.O_RDONLY) }

// reopen opens the file of a descriptor once more: the new descriptor shares neither position nor
// locks with the one given.
func reopen(fd, flags int) (own int, err error) {
	for _, dir := range procFDs {
		own, err = unix.Open(fmt.Sprintf("%s/%d", dir, fd), flags|unix.O_CLOEXEC, 0)
		if err != unix.ENOENT {
			break
		}
	}
	return own, err
}

// procFDs are the directories with this process's descriptors, in the order to look there. The
// first one is empty when the main thread has ended. The second one is there always, but makes
// the parent wait long for the end of a process that has used it: 0.1 s, measured with a hundred
// of them.
var procFDs = [...]string{"/proc/self/fd", "/proc/thread-self/fd"}

// Unmap unmaps memory. No goroutine may touch it any more.
func Unmap(b []byte) error { return unix.Munmap(b) }

// CloseFD closes a descriptor that is not wrapped in anything.
func CloseFD(fd int) error { return unix.Close(fd) }
