package sys

// Mappings from the text of /proc/self/maps, for kernels without PROCMAP_QUERY. The
// lines are in the order of addresses; each is "start-end rights offset major:minor
// inode name".

import (
	"bytes"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// reading guards the positions of the files that textLines reads. The kernel goes on after
// the last mapping that it wrote only for a read from where the last one ended. For a read
// from anywhere else it counts bytes from the beginning of the text, and would skip a line if
// the text before it has become shorter.
var reading sync.Mutex

// textLines calls fn for each line of a file of /proc, until fn returns false. fn must not
// call textLines.
func textLines(fd int, fn func(line []byte) bool) error {
	buf, _ := textBuffers.Get().(*[]byte)
	defer textBuffers.Put(buf)
	b := *buf
	reading.Lock()
	defer reading.Unlock()
	if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
		return err
	}
	for have := 0; ; {
		n, err := unix.Read(fd, b[have:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		rest := b[:have+n]
		for {
			line, after, ok := bytes.Cut(rest, []byte{'\n'})
			if !ok {
				break
			}
			if !fn(line) {
				return nil
			}
			rest = after
		}
		if n == 0 {
			return nil // a last line without an end is not the kernel's
		}
		if have = copy(b, rest); have == len(b) {
			return unix.E2BIG // no path is so long
		}
	}
}

var textBuffers = sync.Pool{New: func() any {
	b := make([]byte, 64<<10)
	return &b
}}

func findInText(fd int, addr uintptr, orNext bool) (found Mapping, err error) {
	err = unix.ENOENT
	readErr := textLines(fd, func(line []byte) bool {
		m, _, ok := parseMapping(line)
		switch {
		case !ok:
			err = unix.EIO
		case m.End <= addr:
			return true
		case m.Start <= addr || orNext:
			found, err = m, nil
		}
		return false
	})
	if readErr != nil {
		return Mapping{}, readErr
	}
	if err == nil {
		found.PageSize = pageSizeOf(&found)
	}
	return found, err
}

func nameInText(fd int, of *Mapping) (name string) {
	_ = textLines(fd, func(line []byte) bool {
		m, n, ok := parseMapping(line)
		if ok && m.Start == of.Start && m.Inode == of.Inode {
			name = string(n)
		}
		return ok && m.Start < of.Start
	})
	return name
}

// parseMapping reads a line. The page size is not in it.
func parseMapping(line []byte) (m Mapping, name []byte, ok bool) {
	from, rest, _ := bytes.Cut(line, []byte{'-'})
	to, rest, _ := bytes.Cut(rest, []byte{' '})
	rights, rest, _ := bytes.Cut(rest, []byte{' '})
	offset, rest, _ := bytes.Cut(rest, []byte{' '})
	major, rest, _ := bytes.Cut(rest, []byte{':'})
	minor, rest, _ := bytes.Cut(rest, []byte{' '})
	inode, rest, _ := bytes.Cut(rest, []byte{' '})
	numbers := [...]struct {
		text []byte
		base int
		n    uint64
	}{{from, 16, 0}, {to, 16, 0}, {offset, 16, 0}, {major, 16, 0}, {minor, 16, 0}, {inode, 10, 0}}
	for i := range numbers {
		n, err := strconv.ParseUint(string(numbers[i].text), numbers[i].base, 64)
		if err != nil {
			return Mapping{}, nil, false
		}
		numbers[i].n = n
	}
	if len(rights) != 4 || numbers[0].n >= numbers[1].n {
		return Mapping{}, nil, false
	}
	return Mapping{
		Start: uintptr(numbers[0].n), End: uintptr(numbers[1].n),
		Read: rights[0] == 'r', Write: rights[1] == 'w', Exec: rights[2] == 'x', Shared: rights[3] == 's',
		File: numbers[5].n != 0, Major: uint32(numbers[3].n), Minor: uint32(numbers[4].n), Inode: numbers[5].n,
		Offset: numbers[2].n, PageSize: pageSize,
	}, bytes.TrimLeft(rest, " "), true
}

// devicePageSizes remembers the size of pages by device number. All files of a file
// system have the same; hugetlb memory has a file system for each size.
var devicePageSizes sync.Map // uint64 → uintptr

func pageSizeOf(m *Mapping) uintptr {
	if !m.File {
		return pageSize
	}
	device := uint64(m.Major)<<32 | uint64(m.Minor)
	if size, ok := devicePageSizes.Load(device); ok {
		return size.(uintptr)
	}
	size := pageSizeInText(m)
	if size == 0 { // it is asked again for the next mapping
		return pageSize
	}
	devicePageSizes.Store(device, size)
	return size
}

// pageSizeInText returns the size of a mapping's pages, or 0 if it cannot be found out. It
// reads /proc/self/smaps, which takes long.
func pageSizeInText(of *Mapping) (size uintptr) {
	fd, err := unix.Open("/proc/self/smaps", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer func() { _ = unix.Close(fd) }()
	inside := false
	_ = textLines(fd, func(line []byte) bool {
		if m, _, ok := parseMapping(line); ok {
			inside = m.Start == of.Start
			return m.Start <= of.Start
		}
		if text, ok := bytes.CutPrefix(line, []byte("KernelPageSize:")); ok && inside {
			text, _ = bytes.CutSuffix(bytes.TrimSpace(text), []byte(" kB"))
			if k, err := strconv.ParseUint(string(text), 10, 32); err == nil && k > 0 {
				size = uintptr(k) << 10
			}
			return false
		}
		return true
	})
	return size
}
