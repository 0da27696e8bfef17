package sys

// Making pages present for a fault, and what it means when it fails.

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// PopulateOutcome is how making pages present has ended.
type PopulateOutcome uint8

// The outcomes.
const (
	// Populated: all of the range was present at some time.
	Populated PopulateOutcome = iota + 1
	// NotMapped: nothing is mapped at Upto.
	NotMapped
	// WrongProtection: the mapping at Upto does not allow it; or it is of a kind
	// without pages, as registers of a device are.
	WrongProtection
	// NoPage: the mapping at Upto allows it and has no page to give: it lies behind the
	// end of the file, is a guard page or broken memory, or could not be read from its
	// device.
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

// PopulateResult says how making a range present has ended.
type PopulateResult struct {
	Outcome PopulateOutcome
	// Upto is where the pages end that were made present, from the start of the
	// range on: its end if all were, where it stopped as far as that can be found out
	// afterwards, and the start if it cannot.
	Upto  uintptr
	Errno unix.Errno // what the kernel said, 0 if all went well
}

// How often a populate is repeated that was interrupted, and one that failed for a
// reason which is not there when it is looked for.
const (
	populateTries = 16
	populateLooks = 3
)

// PopulateRange makes all pages of a range present, which is of whole pages, for
// writing if write is set. In hugetlb memory that is the whole of every huge page
// that the range touches, in the others usually exactly the range.
//
// It waits for devices where it must: see Slow.
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

// whyNotPopulated finds out what an errno of populate was about: it may have several
// reasons, and does not say where. The reason may be gone, then it is not known.
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
			return result, true // nobody tells us where
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
	// Everything is mapped, and with the rights. So memory is out, or a mapping is of a
	// kind without pages; or it was another one a moment ago.
	result.Upto = firstAbsent(start, end)
	return result, false
}

// firstAbsent returns where the pages from start on that are present end; start, if
// that cannot be known.
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

// canPopulate reports whether the kernel knows MADV_POPULATE_READ and
// MADV_POPULATE_WRITE: of no pages at all, every advice that exists succeeds.
var canPopulate = sync.OnceValue(func() bool {
	return madvise(0, 0, unix.MADV_POPULATE_READ) == nil && madvise(0, 0, unix.MADV_POPULATE_WRITE) == nil
})
