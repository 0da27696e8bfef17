package sys

// Memory that is a mapped file: telling it from other memory, and writing it
// back to its storage.

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// SyncFile writes what was changed in the pages of a range back to the files
// that they are mapped from, and waits until the storage has it (msync with
// MS_SYNC), which may take long. The error is an errno: ENOMEM if not all of
// the range is mapped, EIO and others if the storage failed. For memory that is not a
// file's it does nothing.
func SyncFile(addr, n uintptr) error {
	start, end := PageAlign(addr, n)
	for {
		if err := msync(start, end); err != unix.EINTR {
			return err
		}
	}
}

// Durable reports whether SyncFile makes the bytes of a range persistent: whether all
// of it is files, mapped shared, on file systems that keep what is written to them.
// Then why is ""; otherwise why says what is in the way.
func Durable(addr, n uintptr) (why string, err error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	start, end := PageAlign(addr, n)
	return durableIn(f, start, end, volatileFile)
}

// durableIn is Durable on the text of /proc/self/maps. volatile returns why the file
// with a name does not keep what is written to it, or "".
func durableIn(maps io.Reader, start, end uintptr, volatile func(name string) string) (why string, err error) {
	whole, err := walkMaps(maps, start, end, func(rights, name string) bool {
		switch {
		case !strings.HasPrefix(name, "/"):
			why = "not a mapped file"
		case !strings.HasSuffix(rights, "s"):
			why = "mapped private: changes never reach the file"
		case strings.HasSuffix(name, " (deleted)"):
			why = "the file is deleted"
		default:
			why = volatile(strings.ReplaceAll(name, `\012`, "\n")) // as the kernel writes a line's end
		}
		return why == ""
	})
	if err == nil && why == "" && !whole {
		why = "not all of it is mapped"
	}
	return why, err
}

// volatileFile returns why a file does not survive the loss of power, or "".
func volatileFile(name string) string {
	var fs unix.Statfs_t
	if err := unix.Statfs(name, &fs); err != nil {
		return fmt.Sprintf("%s: %v", name, err)
	}
	switch uint32(fs.Type) {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.HUGETLBFS_MAGIC:
		return "a file in memory"
	}
	return ""
}

// FileID identifies a file, whatever its names.
type FileID struct{ dev, inode uint64 }

// Words returns the ID as numbers, for other processes.
func (f FileID) Words() [2]uint64 { return [2]uint64{f.dev, f.inode} }

// FileIDOf is the inverse of Words.
func FileIDOf(w [2]uint64) FileID { return FileID{w[0], w[1]} }

// HoldFile returns the ID of an open file, and a descriptor of its own for the file.
// Until that is closed, no other file gets the same ID.
func HoldFile(f *os.File) (FileID, io.Closer, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return FileID{}, nil, err
	}
	fd, errno := -1, error(nil)
	if err := conn.Control(func(own uintptr) { fd, errno = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return FileID{}, nil, err
	}
	if errno != nil {
		return FileID{}, nil, errno
	}
	held := heldFile(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = held.Close() // the first error says more
		return FileID{}, nil, err
	}
	return FileID{st.Dev, st.Ino}, held, nil
}

// heldFile is a descriptor that is only kept open.
type heldFile int

func (h heldFile) Close() error { return unix.Close(int(h)) }
