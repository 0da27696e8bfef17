package sys

// Making pages present, and finding out why that failed.

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// PopulateOutcome is how PopulateRange has ended.
type PopulateOutcome uint8

// The outcomes.
const (
	// Populated: all of the range was present at some time.
	Populated PopulateOutcome = iota + 1
	// NotMapped: nothing is mapped at Upto.
	NotMapped
	// WrongProtection: the mapping at Upto does not allow the access; or it is of a kind
	// without pages, as registers of a device are.
	WrongProtection
	// NoPage: the mapping at Upto allows the access but has no page there: Upto is behind
	// the end of the file, a guard page or broken memory, or the page could not be read
	// from its device.
	NoPage
	// NoMemory: the machine or the process's memory cgroup has none left.
	NoMemory
	// CannotPopulate: the kernel is older than 5.14, or seccomp forbids it.
	CannotPopulate
)

func (o PopulateOutcome) String() string {
	switch o {
	case Populated:
		return "populated"
	case NotMapped:
		return "not mapped"
	case WrongProtection:
		return "wrong protection"
	case NoPage:
		return "no page"
	case NoMemory:
		return "no memory"
	case CannotPopulate:
		return "cannot populate"
	}
	return fmt.Sprintf("PopulateOutcome(%d)", uint8(o))
}

// PopulateResult is how PopulateRange has ended, and where.
type PopulateResult struct {
	Outcome PopulateOutcome
	// Upto is where the pages that were made present end: the end of the range if all
	// were; otherwise where the kernel stopped, if that can be found out afterwards;
	// otherwise the start of the range.
	Upto  uintptr
	Errno unix.Errno // of the kernel; 0 if all pages were made present
}

const (
	// populateTries is how often PopulateRange tries, also after interruptions.
	populateTries = 16
	// populateLooks is how often it tries after a failure whose reason has gone away
	// before it was found out.
	populateLooks = 3
)

// PopulateRange makes all pages of a range present, for writing if write is set. The
// range is whole pages. In hugetlb memory it makes every huge page present that the range
// touches, in other memory usually exactly the range.
//
// It waits for devices where it must: MayBlock reports that before.
func PopulateRange(start, end uintptr, write bool) PopulateResult {
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	result := PopulateResult{Outcome: NoMemory, Upto: start, Errno: unix.EAGAIN}
	for tries, looks := 0, 0; tries < populateTries && looks < populateLooks; tries++ {
		err := madvise(start, end, advice)
		if err == nil {
			return PopulateResult{Outcome: Populated, Upto: end}
		}
		errno, _ := err.(unix.Errno)
		if errno == unix.EINTR || errno == unix.EAGAIN {
			continue
		}
		looks++
		var known bool
		if result, known = whyNotPopulated(start, end, write, errno); known {
			return result
		}
	}
	return result
}

// whyNotPopulated finds out why madvise failed, and where: the errno may have several
// reasons. known is false if the reason has gone away meanwhile.
func whyNotPopulated(start, end uintptr, write bool, errno unix.Errno) (result PopulateResult, known bool) {
	result = PopulateResult{Upto: start, Errno: errno}
	switch errno {
	case unix.EFAULT, unix.EHWPOISON:
		result.Outcome = NoPage
		result.Upto = firstAbsent(start, end)
		return result, true
	case unix.ENOMEM:
		result.Outcome = NoMemory
	case unix.EINVAL:
		result.Outcome = WrongProtection
		if !canPopulate() {
			result.Outcome = CannotPopulate
			return result, true
		}
	default: // EPERM, ENOSYS: seccomp
		result.Outcome = CannotPopulate
		return result, true
	}
	at := start
	for at < end {
		m, err := NextMapping(at)
		if err != nil && err != unix.ENOENT {
			return result, true // mappings cannot be looked up
		}
		if err == unix.ENOENT || m.Start > at {
			result.Upto = at
			if errno == unix.ENOMEM {
				result.Outcome = NotMapped
			}
			return result, errno == unix.ENOMEM
		}
		if !m.Allows(write) {
			result.Upto = at
			return result, errno == unix.EINVAL
		}
		at = m.End
	}
	// Everything is mapped, and with the rights. So there is no memory, or a mapping is of
	// a kind without pages; or another one was mapped a moment ago.
	result.Upto = firstAbsent(start, end)
	return result, false
}

// firstAbsent returns where the pages that are present from start on end, or start if
// that cannot be found out.
func firstAbsent(start, end uintptr) uintptr {
	at := start
	err := Present(start, end, func(from, to uintptr) bool {
		if from == start {
			at = to
		}
		return false
	})
	if err != nil {
		return start
	}
	return at
}

// canPopulate reports whether the kernel has MADV_POPULATE_READ and
// MADV_POPULATE_WRITE: for an empty range, madvise succeeds with every advice that exists.
var canPopulate = sync.OnceValue(func() bool {
	return madvise(0, 0, unix.MADV_POPULATE_READ) == nil && madvise(0, 0, unix.MADV_POPULATE_WRITE) == nil
})
