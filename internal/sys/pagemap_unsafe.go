package sys

// Which pages are present: by the PAGEMAP_SCAN ioctl on /proc/self/pagemap (Linux
// 6.7), which skips empty ranges and returns runs of pages; or else by reading the
// file, eight bytes for a page.

import (
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/fs.h and its documentation of pagemap.
const (
	pagemapScan = 0xc0606610

	pageIsWatched = 1 << 0 // PAGE_IS_WPALLOWED
	pageIsPresent = 1 << 3

	entryPresent = 1 << 63
	entrySwapped = 1 << 62
	entryGuard   = 1 << 58 // Linux 6.15; entrySwapped is set, too
)

// pageRegion is struct page_region: a run of pages of the same categories.
type pageRegion struct{ start, end, _ uint64 }

// scanArg is struct pm_scan_arg.
type scanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages uint64

	inverted, mask, anyOf, returned uint64
}

// pagemapFile returns /proc/self/pagemap, kept open, and whether it takes the ioctl.
// It fails without /proc, and in a program that has changed its user.
var pagemapFile = sync.OnceValues(func() (pagemapSource, error) {
	fd, err := openProc("/proc/self/pagemap")
	if err != nil {
		return pagemapSource{fd: -1}, err
	}
	p := pagemapSource{fd: fd, scan: true, category: pageIsPresent}
	err = p.present(0, pageSize, func(_, _ uintptr) bool { return true })
	p.scan = err == nil
	return p, nil
})

type pagemapSource struct {
	fd       int
	scan     bool   // PAGEMAP_SCAN works
	category uint64 // of the pages that it is to find
}

// Present visits the runs of pages in a range that are present, in order, until
// visit returns false. Pages that it does not visit are absent, or not mapped. The range
// is whole pages. Present means that the page tables have the page: reading it does not
// fault, unless the mapping forbids it; writing may. A mapping that mprotect(2) has taken
// the rights from keeps its pages, and they are present: see Mappings for the rights.
func Present(start, end uintptr, visit func(start, end uintptr) bool) error {
	p, err := pagemapFile()
	if err != nil {
		return err
	}
	if start >= end {
		return nil
	}
	return p.present(start, end, visit)
}

// Absent visits the runs of pages in a range that are not present, whether
// something is mapped there or not, like Present.
func Absent(start, end uintptr, visit func(start, end uintptr) bool) error {
	return without(Present, start, end, visit)
}

// StillPresent returns where the pages that are present from start on end. It
// allocates nothing, and is for few pages.
func StillPresent(start, end uintptr) (upto uintptr, err error) {
	p, err := pagemapFile()
	if err != nil {
		return start, err
	}
	var few [64]uint64
	for start < end {
		k, err := p.entries(start, end, few[:])
		if err != nil {
			return start, err
		}
		for _, e := range few[:k] {
			if e&entryPresent == 0 {
				return start, nil
			}
			start += pageSize
		}
		if k == 0 {
			break
		}
	}
	return start, nil
}

// Unwatched visits the parts of a range that no notifier watches, whether something is
// mapped there or not, like Absent. The error is ENOTSUP if the kernel lacks PAGEMAP_SCAN.
func Unwatched(start, end uintptr, visit func(start, end uintptr) bool) error {
	p, err := pagemapFile()
	if err != nil {
		return err
	}
	if !p.scan {
		return unix.ENOTSUP
	}
	p.category = pageIsWatched
	return without(p.present, start, end, visit)
}

// without visits the parts of a range that those does not visit.
func without(those func(start, end uintptr, visit func(start, end uintptr) bool) error,
	start, end uintptr, visit func(start, end uintptr) bool,
) error {
	stopped := false
	at := start
	err := those(start, end, func(from, to uintptr) bool {
		stopped = from > at && !visit(at, from)
		at = to
		return !stopped
	})
	if err == nil && !stopped && at < end {
		visit(at, end)
	}
	return err
}

func (p pagemapSource) present(start, end uintptr, visit func(start, end uintptr) bool) error {
	var run runs
	var err error
	if p.scan {
		err = p.presentByScan(start, end, &run, visit)
	} else {
		err = p.presentByReading(start, end, &run, visit)
	}
	if err == nil {
		run.flush(visit)
	}
	return err
}

// runs joins adjacent runs of pages before they are visited.
type runs struct {
	start, end uintptr
	stopped    bool
}

func (r *runs) add(start, end uintptr, visit func(start, end uintptr) bool) bool {
	if start == r.end && r.start < r.end {
		r.end = end
		return true
	}
	if r.flush(visit); r.stopped {
		return false
	}
	r.start, r.end = start, end
	return true
}

func (r *runs) flush(visit func(start, end uintptr) bool) {
	if r.start < r.end && !r.stopped {
		r.stopped = !visit(r.start, r.end)
	}
	r.start, r.end = 0, 0
}

// scanBuffer is what the ioctl fills: 6 KiB.
type scanBuffer [256]pageRegion

var scanBuffers = sync.Pool{New: func() any { return new(scanBuffer) }}

func (p pagemapSource) presentByScan(start, end uintptr, run *runs, visit func(start, end uintptr) bool) error {
	buf, _ := scanBuffers.Get().(*scanBuffer)
	defer scanBuffers.Put(buf)
	for start < end {
		k, walked, errno := p.scanInto(buf, start, end)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EFAULT: // the range reaches beyond the addresses of a process
			limit := p.scanLimit(buf, start, end)
			if limit >= end {
				return unix.EFAULT // something else is wrong
			}
			end = limit
			continue
		case errno != 0:
			return errno
		case walked <= start:
			return unix.EIO // the kernel has made no progress
		}
		for _, r := range buf[:k] {
			if !run.add(uintptr(r.start), uintptr(r.end), visit) {
				return nil
			}
		}
		start = walked
	}
	return nil
}

// scanLimit returns where scanning from start on must end: it searches for the first
// page that the kernel refuses.
func (p pagemapSource) scanLimit(buf *scanBuffer, start, end uintptr) uintptr {
	good, bad := uintptr(0), (end-start)/pageSize // pages from start on; bad is the first one refused
	for good < bad {
		mid := good + (bad-good)/2
		at := start + mid*pageSize
		if _, _, errno := p.scanInto(buf, at, at+pageSize); errno == unix.EFAULT {
			bad = mid
		} else {
			good = mid + 1
		}
	}
	return start + good*pageSize
}

// scanInto scans a range. It returns how many runs it has found, and where it stopped.
//
// It is sound: the kernel writes at most vecLen regions to vec, which is the
// buffer's length, and the buffer is on the heap and kept alive until after the call.
func (p pagemapSource) scanInto(buf *scanBuffer, start, end uintptr) (k int, walked uintptr, errno unix.Errno) {
	arg := scanArg{
		size: uint64(unsafe.Sizeof(scanArg{})), start: uint64(start), end: uint64(end),
		vec: uint64(uintptr(unsafe.Pointer(buf))), vecLen: uint64(len(buf)),
		mask: p.category, returned: p.category,
	}
	n, _, errno := ioctl(p.fd, pagemapScan, unsafe.Pointer(&arg))
	runtime.KeepAlive(buf)
	if errno != 0 || n > uintptr(len(buf)) {
		return 0, 0, errno
	}
	return int(n), uintptr(arg.walkEnd), 0
}

// entryBuffer holds the entries of 16 MiB of pages of 4 KiB.
type entryBuffer [4096]uint64

var entryBuffers = sync.Pool{New: func() any { return new(entryBuffer) }}

func (p pagemapSource) presentByReading(start, end uintptr, run *runs, visit func(start, end uintptr) bool) error {
	buf, _ := entryBuffers.Get().(*entryBuffer)
	defer entryBuffers.Put(buf)
	for start < end {
		k, err := p.entries(start, end, buf[:])
		if err != nil {
			return err
		}
		if k == 0 {
			return nil // above the last address of a process
		}
		for i, entry := range buf[:k] {
			if entry&entryPresent == 0 {
				continue
			}
			page := start + uintptr(i)*pageSize
			if !run.add(page, page+pageSize, visit) {
				return nil
			}
		}
		start += uintptr(k) * pageSize
	}
	return nil
}

// entries reads the pagemap entries of pages from start on: as many as the range has and
// into has room for. It is sound: the length is that of the slice.
func (p pagemapSource) entries(start, end uintptr, into []uint64) (int, error) {
	k := min((end-start)/pageSize, uintptr(len(into)))
	for {
		n, _, errno := unix.Syscall6(unix.SYS_PREAD64, uintptr(p.fd), uintptr(unsafe.Pointer(unsafe.SliceData(into))), k*8,
			start/pageSize*8, 0, 0)
		switch errno {
		case 0:
			return int(n / 8), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
