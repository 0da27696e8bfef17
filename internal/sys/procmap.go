package sys

// What is mapped where in this process.

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Populate makes all pages of a range present, for writing if write is set. The
// error is madvise's errno: ENOMEM, nothing is mapped there or there is no memory;
// EFAULT, a page is behind the end of a file; EINVAL, the protection forbids it, the
// mapping is of a special kind, or the kernel is older than 5.14.
func Populate(addr, n uintptr, write bool) error {
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	start, end := PageAlign(addr, n)
	for {
		err := madvise(start, end, advice)
		if err != unix.EINTR && err != unix.EAGAIN {
			return err
		}
	}
}

// Mapped reports whether all of a range is mapped readable, and writable if
// write is set. It reads the list of mappings, which takes a while.
func Mapped(addr, n uintptr, write bool) (bool, error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	start, end := PageAlign(addr, n)
	return mappedIn(f, start, end, write)
}

// mappedIn is Mapped on the text of /proc/self/maps.
func mappedIn(maps io.Reader, start, end uintptr, write bool) (bool, error) {
	return walkMaps(maps, start, end, func(rights, _ string) bool {
		return strings.HasPrefix(rights, "r") && (!write || strings.HasPrefix(rights, "rw"))
	})
}

// walkMaps calls good for each mapping of a range, with its rights (as "rw-p") and its
// name, until good returns false. It reports whether all of the range is mapped and good.
//
// The text of /proc/self/maps is lines in the order of addresses, of "start-end
// rights offset device inode name".
func walkMaps(maps io.Reader, start, end uintptr, good func(rights, name string) bool) (bool, error) {
	lines := bufio.NewScanner(maps)
	for start < end && lines.Scan() {
		from, rest, _ := strings.Cut(lines.Text(), "-")
		to, rest, _ := strings.Cut(rest, " ")
		lo, err := strconv.ParseUint(from, 16, 64)
		if err != nil {
			return false, err
		}
		hi, err := strconv.ParseUint(to, 16, 64)
		if err != nil {
			return false, err
		}
		if uintptr(hi) <= start {
			continue
		}
		rights, rest, _ := strings.Cut(rest, " ")
		for range 3 { // offset, device, inode
			_, rest, _ = strings.Cut(rest, " ")
		}
		if uintptr(lo) > start || !good(rights, strings.TrimLeft(rest, " ")) {
			return false, nil
		}
		start = uintptr(hi)
	}
	return start >= end, lines.Err()
}
