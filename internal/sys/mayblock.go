package sys

// MayBlock: whether making pages present may block, because it would wait for a device. A
// thread that must not wait asks before it touches the pages.
//
// The page tables show which pages are present (which do not block) and which are swapped
// out (which may). A page without an entry is memory that was never touched, which does not
// block, or a page of a file, which may block unless it is in the page cache. For files
// mincore(2) reports that, with two exceptions:
//
//   - To a process that neither owns the file nor may write it, mincore reports every
//     page as in memory (Linux 5.0), so that no process can watch what others read. Such
//     a page may block here. Whether mincore is honest is found out once for each file.
//   - A page of a file that lives in memory (memfd, /dev/shm) is either a hole, which
//     costs as much as untouched memory, or swapped out, and mincore reports both alike.
//     Such a page may block only if anything at all is in swap.
//
// The answer is a guess about the next moment, not a promise: what is in memory now
// may be reclaimed before it is used. Writing to a page of a file may also wait for
// the file system's journal, which MayBlock does not foresee; nor does it foresee a program
// that handles its own page faults (by a userfaultfd of its own).

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// MayBlock reports whether making the pages of a range present, for writing if write is
// set, may wait for a device. The range is whole pages. A page that is not mapped does
// not block: touching it fails at once. An error means that the kernel cannot be asked.
func MayBlock(start, end uintptr, write bool) (bool, error) {
	// write is part of the question, and does not change the answer: to copy a page, or to make
	// it writable, may wait for the file system's journal at most, which is not foreseen.
	_ = write
	p, err := pagemapFile()
	if err != nil {
		return false, err
	}
	maps, err := mapsFile()
	if err != nil {
		return false, err
	}
	var few [64]uint64 // on the stack: most calls are about few pages
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

// mayBlockEntries is MayBlock for the pages from start on whose page table entries are given.
func mayBlockEntries(maps mapsSource, start uintptr, entries []uint64) (bool, error) {
	first, last := -1, -1 // of the pages that are neither present nor swapped out
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

// mayBlockMapping is MayBlock for pages of one mapping, none of which its entry shows as
// swapped out.
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
		return false, nil // unmapped meanwhile: touching it fails at once
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

// mincoreSaid remembers, by file, whether mincore is honest to this process about it. It
// starts anew when it is full. If a file changes its owner meanwhile, the answers about its
// pages are wrong, which is no more than a wrong guess.
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

// mayWriteFile reports whether the process owns the mapped file or may write it, the
// condition under which mincore is honest. It looks at the mapping, and at the file with the
// mapping's name, if that is the same file; otherwise it returns false.
func mayWriteFile(maps mapsSource, m *Mapping) bool {
	if m.Shared && m.Write {
		return true // the file was opened for writing, most likely by this process
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

// swapKnown is the last answer of the kernel about swap: the time of the question, and the
// answers in the lowest two bits. It is good for swapKnownFor: asking takes as long as all
// the rest of MayBlock.
var swapKnown atomic.Int64

const swapKnownFor = int64(10 * time.Millisecond)

// The answers in swapKnown.
const (
	swapUsed  = 1 << iota // some memory of the machine is in swap
	swapThere             // some could be
)

var processStart = time.Now()

// swapNow returns the answers, at most swapKnownFor old.
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

// Swappable reports whether the machine has swap: then the kernel may make room by swapping
// out the process's own pages, and those of files that live in memory.
func Swappable() bool { return swapNow()&swapThere != 0 }

// Swappable reports whether the mapping may have pages that go to swap.
func (m *Mapping) Swappable() bool {
	return Swappable() && m.PageSize == pageSize && (!m.File || !m.Shared || livesInMemory(m.Major, m.Minor))
}
