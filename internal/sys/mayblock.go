package sys

// Whether making pages present would wait for a device: asked before somebody
// faults who must not wait.
//
// Stages: the page tables say what is present (quick) and what is swapped out
// (slow). What they know nothing about is memory that was never touched (quick), or
// a page of a file, which may be in memory (quick) or not. For files mincore(2)
// knows, with two exceptions:
//
//   - It says that everything is in memory to those who neither own the file nor may
//     write it (Linux 5.0), so that nobody can watch what others read. Such a page is
//     slow here. Whether mincore speaks the truth is asked once for each file.
//   - A page of a file that lives in memory (memfd, /dev/shm) is either a hole, which
//     costs as much as untouched memory, or swapped out, and mincore says the same of
//     both. Such a page is slow only if anything at all is in swap.
//
// The answer is a guess about the next moment, not a promise: what is in memory now
// may be reclaimed before it is used. Writing to a page of a file may also wait for
// the file system's journal; that is not foreseen. Nor are the handlers of a program
// that answers its own page faults (a userfaultfd of its own).

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// MayBlock reports whether making the pages of a range present, for writing if write is
// set, would wait for a device. The range is of whole pages. What is not mapped is
// quick: it fails at once. The error says that it cannot be known here.
func MayBlock(start, end uintptr, write bool) (bool, error) {
	_ = write // a copy of a page, or a page that becomes writable, waits for nothing more
	p, err := pagemapFile()
	if err != nil {
		return false, err
	}
	maps, err := mapsFile()
	if err != nil {
		return false, err
	}
	var few [64]uint64 // on the stack: faults are about few pages
	for start < end {
		k, err := p.entries(start, end, few[:])
		if err != nil {
			return false, err
		}
		if k == 0 {
			return false, nil // above the last address of a process
		}
		if slow, err := mayBlockEntries(maps, start, few[:k]); slow || err != nil {
			return slow, err
		}
		start += uintptr(k) * pageSize
	}
	return false, nil
}

// mayBlockEntries judges pages from start on by their entries in the page tables.
func mayBlockEntries(maps mapsSource, start uintptr, entries []uint64) (bool, error) {
	first, last := -1, -1 // the pages that the entries say nothing about
	for i, e := range entries {
		switch {
		case e&(entryPresent|entryGuard) != 0: // a guard page fails at once
		case e&entrySwapped != 0:
			return true, nil
		default:
			if first < 0 {
				first = i
			}
			last = i
		}
	}
	if first < 0 {
		return false, nil
	}
	for at, end := start+uintptr(first)*pageSize, start+uintptr(last+1)*pageSize; at < end; {
		m, err := maps.find(at, true)
		if err == unix.ENOENT {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		at = max(at, m.Start)
		if at >= end {
			return false, nil
		}
		to := min(end, m.End)
		from := (at - start) / pageSize
		if slow, err := mayBlockMapping(maps, &m, at, to, entries[from:(to-start)/pageSize]); slow || err != nil {
			return slow, err
		}
		at = to
	}
	return false, nil
}

// mayBlockMapping judges the pages of one mapping that are neither present nor in swap.
func mayBlockMapping(maps mapsSource, m *Mapping, start, end uintptr, entries []uint64) (bool, error) {
	if !m.File || m.PageSize != pageSize {
		return false, nil // untouched memory; hugetlb pages are never swapped
	}
	if onKernelTmpfs(m.Major, m.Minor) && !swapInUse() {
		return false, nil // a hole, or in memory
	}
	var vec [64]byte
	switch err := mincore(start, end, vec[:len(entries)]); err {
	case nil:
	case unix.ENOMEM, unix.EAGAIN:
		return false, nil // unmapped meanwhile, and who touches it will learn that
	default:
		return false, err
	}
	for i, e := range entries {
		if e&(entryPresent|entryGuard) != 0 || vec[i]&1 != 0 && mincoreTrue(maps, m) {
			continue
		}
		if !livesInMemory(m.Major, m.Minor) || swapInUse() {
			return true, nil
		}
	}
	return false, nil
}

// fileKey names a file as mappings do.
type fileKey struct {
	major, minor uint32
	inode        uint64
}

// mincoreSaid remembers, by file, whether mincore tells us the truth about it. It
// starts anew when it is full. A file that changes its owner meanwhile makes a slow
// page look quick or a quick one slow, no more.
var mincoreSaid struct {
	mu    sync.RWMutex // guards files
	files map[fileKey]bool
}

const mincoreMemory = 4096

func mincoreTrue(maps mapsSource, m *Mapping) bool {
	key := fileKey{m.Major, m.Minor, m.Inode}
	mincoreSaid.mu.RLock()
	truth, known := mincoreSaid.files[key]
	mincoreSaid.mu.RUnlock()
	if known {
		return truth
	}
	truth = mayWriteFile(maps, m)
	mincoreSaid.mu.Lock()
	defer mincoreSaid.mu.Unlock()
	if mincoreSaid.files == nil || len(mincoreSaid.files) >= mincoreMemory {
		mincoreSaid.files = make(map[fileKey]bool)
	}
	mincoreSaid.files[key] = truth
	return truth
}

// mayWriteFile asks what the kernel asks before mincore is honest, as far as it can
// be asked from outside: of the file that is found by the mapping's name, if that is
// the same file, and of the mapping itself.
func mayWriteFile(maps mapsSource, m *Mapping) bool {
	if m.Shared && m.Write {
		return true // it was opened for writing, hence by somebody who might, most likely us
	}
	if unix.Geteuid() == 0 {
		return true
	}
	var st unix.Stat_t
	name := maps.name(m)
	if name == "" || unix.Stat(name, &st) != nil {
		return false
	}
	if st.Ino != m.Inode || unix.Major(st.Dev) != m.Major || unix.Minor(st.Dev) != m.Minor {
		return false
	}
	return int(st.Uid) == unix.Geteuid() || unix.Faccessat(unix.AT_FDCWD, name, unix.W_OK, unix.AT_EACCESS) == nil
}

// swapKnown is what is known about swap: when it was asked, and in the lowest two
// bits the answers. It is good for swapKnownFor: asking takes as long as all the rest.
var swapKnown atomic.Int64

const swapKnownFor = int64(10 * time.Millisecond)

// The answers.
const (
	swapUsed  = 1 << iota // some memory of the machine is in swap
	swapThere             // some could be
)

var processStart = time.Now()

// swapNow returns the answers.
func swapNow() int64 {
	now := int64(time.Since(processStart)) &^ (swapUsed | swapThere)
	if known := swapKnown.Load(); known != 0 && now-known < swapKnownFor {
		return known
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil || info.Totalswap != 0 {
		now |= swapThere
		if err != nil || info.Freeswap != info.Totalswap {
			now |= swapUsed
		}
	}
	swapKnown.Store(now)
	return now
}

// swapInUse reports whether any memory of the machine is in swap.
func swapInUse() bool { return swapNow()&swapUsed != 0 }

// Swappable reports whether the kernel would make room by putting pages into swap
// that are the process's own, or a file's that lives in memory: whether there is any.
func Swappable() bool { return swapNow()&swapThere != 0 }

// Swappable reports whether the mapping may have pages that go to swap.
func (m *Mapping) Swappable() bool {
	return Swappable() && m.PageSize == pageSize && (!m.File || !m.Shared || livesInMemory(m.Major, m.Minor))
}
