package sys

// Which mapping an address belongs to: one ioctl on /proc/self/maps (Linux 6.11),
// or else its text (mapping_text.go).

import (
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mapping is a mapping of this process.
type Mapping struct {
	Start, End  uintptr
	Read, Write bool
	Exec        bool
	Shared      bool
	// File reports whether it maps a file, which the fields below describe. Memory of
	// memfd_create and of /dev/shm, shared anonymous memory and hugetlb memory are
	// files too.
	File         bool
	Major, Minor uint32
	Inode        uint64
	Offset       uint64 // where Start is in the file
	// PageSize is the unit in which the kernel maps and takes away its pages: the
	// size of a page, or larger in hugetlb memory. Transparent huge pages do not count.
	PageSize uintptr
}

// Clip returns the part of a range that lies in the mapping, widened to pages of
// the mapping. It is empty, start equal to end, where there is none.
func (m *Mapping) Clip(start, end uintptr) (uintptr, uintptr) {
	start, end = max(start, m.Start), min(end, m.End)
	if start >= end {
		return start, start
	}
	// m.Start and m.End are multiples of the page size, so this stays inside.
	start &^= m.PageSize - 1
	if over := end & (m.PageSize - 1); over != 0 {
		end += m.PageSize - over
	}
	return start, end
}

// Allows reports whether the mapping may be read, and written if write is set.
func (m *Mapping) Allows(write bool) bool { return m.Read && (m.Write || !write) }

// From the kernel's linux/fs.h.
const (
	procmapQuery = 0xc0686611

	queryReadable   = 0x01
	queryWritable   = 0x02
	queryExecutable = 0x04
	queryShared     = 0x08
	queryOrNext     = 0x10
)

// procmapArg is struct procmap_query.
type procmapArg struct {
	size, queryFlags, queryAddr uint64

	start, end, flags, pageSize, offset, inode uint64

	major, minor          uint32
	nameSize, buildIDSize uint32
	nameAddr, buildIDAddr uint64
}

// mapsFile returns /proc/self/maps, kept open, and whether it takes the ioctl. The file
// shows the memory of the process that opened it.
var mapsFile = sync.OnceValues(func() (mapsSource, error) {
	fd, err := openProc("/proc/self/maps")
	if err != nil {
		return mapsSource{fd: -1}, err
	}
	s := mapsSource{fd: fd, query: true}
	_, err = s.find(0, true)
	s.query = err != unix.ENOTTY
	return s, nil
})

// openProc opens a file of /proc. The error wraps ENOTSUP rather than the errno of
// open(2), which callers could take for an answer: ENOENT means that nothing is mapped.
func openProc(name string) (int, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("%s: %v: %w", name, err, unix.ENOTSUP)
	}
	return fd, nil
}

type mapsSource struct {
	fd    int
	query bool // PROCMAP_QUERY works
}

// QueryMapping returns the mapping that contains addr; ENOENT where nothing is
// mapped. It does not allocate where the kernel has PROCMAP_QUERY.
func QueryMapping(addr uintptr) (Mapping, error) {
	s, err := mapsFile()
	if err != nil {
		return Mapping{}, err
	}
	return s.find(addr, false)
}

// NextMapping returns the mapping that contains addr, or the first one above it;
// ENOENT if there is none.
func NextMapping(addr uintptr) (Mapping, error) {
	s, err := mapsFile()
	if err != nil {
		return Mapping{}, err
	}
	return s.find(addr, true)
}

// Mappings visits all mappings of which a part lies in the range, in order, until
// visit returns false. Mappings that change meanwhile may be seen or not.
func Mappings(start, end uintptr, visit func(m *Mapping) bool) error {
	for start < end {
		m, err := NextMapping(start)
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return err
		}
		if m.Start >= end || !visit(&m) {
			return nil
		}
		start = m.End
	}
	return nil
}

// find returns the mapping that contains addr, or with orNext the first one above it.
//
// It is sound: the struct is the one that the request is defined with, its first field
// has its size, and it holds no addresses of buffers.
func (s mapsSource) find(addr uintptr, orNext bool) (Mapping, error) {
	if !s.query {
		return findInText(s.fd, addr, orNext)
	}
	arg := procmapArg{size: uint64(unsafe.Sizeof(procmapArg{})), queryAddr: uint64(addr)}
	if orNext {
		arg.queryFlags = queryOrNext
	}
	if _, _, errno := ioctl(s.fd, procmapQuery, unsafe.Pointer(&arg)); errno != 0 {
		return Mapping{}, errno
	}
	return Mapping{
		Start: uintptr(arg.start), End: uintptr(arg.end),
		Read: arg.flags&queryReadable != 0, Write: arg.flags&queryWritable != 0, Exec: arg.flags&queryExecutable != 0,
		Shared: arg.flags&queryShared != 0,
		File:   arg.inode != 0, Major: arg.major, Minor: arg.minor, Inode: arg.inode, Offset: arg.offset,
		PageSize: uintptr(arg.pageSize),
	}, nil
}

// name returns the path by which the mapped file was opened, "" if it is not known.
//
// It is sound: the buffer comes from a pool, so it is on the heap and stays where
// it is, and the kernel gets its length.
func (s mapsSource) name(m *Mapping) string {
	if !s.query {
		return nameInText(s.fd, m)
	}
	pooled, _ := textBuffers.Get().(*[]byte)
	defer textBuffers.Put(pooled)
	buf := (*pooled)[:unix.PathMax]
	arg := procmapArg{
		size: uint64(unsafe.Sizeof(procmapArg{})), queryAddr: uint64(m.Start),
		nameSize: uint32(len(buf)), nameAddr: uint64(uintptr(unsafe.Pointer(&buf[0]))),
	}
	_, _, errno := ioctl(s.fd, procmapQuery, unsafe.Pointer(&arg))
	runtime.KeepAlive(pooled)
	if errno != 0 || arg.inode != m.Inode || arg.nameSize == 0 || int(arg.nameSize) > len(buf) {
		return ""
	}
	return string(buf[:arg.nameSize-1]) // without the zero at its end
}
