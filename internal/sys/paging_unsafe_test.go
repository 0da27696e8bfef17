package sys

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

func TestPagingSupport(t *testing.T) {
	s := FindPagingSupport()
	t.Logf("%+v", s)
	want := "userfaultfd"
	if !haveCgo {
		want = "built without cgo"
	}
	if !strings.HasPrefix(s.Notifier, want) {
		t.Errorf("notifier: %q", s.Notifier)
	}
	if s.Scan != "PAGEMAP_SCAN" && s.Scan != "pagemap" || s.Mappings != "PROCMAP_QUERY" && s.Mappings != "maps" {
		t.Errorf("%+v", s)
	}
}

// workout uses all of this package's paging, as far as this process can, and adds what is
// wrong to bad. If seen is set, Present must show the pages of memory.
func workout(bad *problems, seen bool) {
	p := pageSize
	ptr, err := unix.MmapPtr(-1, 0, nil, 8*p, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		bad.addf("mmap: %v", err)
		return
	}
	a := uintptr(ptr)
	madvise(a, a+8*p, unix.MADV_DONTDUMP) // so that no neighbour joins it
	n, err := OpenNotifier()
	if err != nil {
		if haveCgo {
			bad.addf("open: %v", err)
		}
	} else {
		defer n.Close()
		if err := n.Watch(a, a+8*p); err != nil {
			bad.addf("watch: %v", err)
		}
	}
	if r := PopulateRange(a, a+4*p, true); r.Outcome != Populated && canPopulate() {
		bad.addf("populate: %+v", r)
	}
	*(*byte)(ptr) = 1
	if seen {
		if m, err := QueryMapping(a); err != nil || m.Start > a || m.End < a+8*p || !m.Write || m.PageSize != p {
			bad.addf("mapping: %+v, %v", m, err)
		}
		if slow, err := MayBlock(a, a+8*p, true); slow || err != nil {
			bad.addf("slow: %v, %v", slow, err)
		}
		if at := firstAbsent(a, a+8*p); at == a {
			bad.addf("the first page is not present")
		}
	}
	if err := unix.MunmapPtr(ptr, 8*p); err != nil {
		bad.addf("munmap: %v", err)
	}
	if n != nil {
		var buf [4]MapChange
		if k, lost, more := n.Take(buf[:], true); k != 1 || buf[0] != (MapChange{Unmapped, a, a + 8*p, 0}) || lost || more {
			bad.addf("%v, %v, %v", buf[:k], lost, more)
		}
	}
}

// unprivilegedChild runs as the user nobody: everything works.
func unprivilegedChild() error {
	var bad problems
	if os.Getuid() == 0 {
		bad.addf("this is root")
	}
	workout(&bad, true)
	s := FindPagingSupport()
	if haveCgo && s.Notifier != "userfaultfd" {
		bad.addf("%+v", s)
	}
	return bad.err()
}

// TestPagingUnprivileged: no part of this needs privilege.
func TestPagingUnprivileged(t *testing.T) {
	if os.Getuid() != 0 {
		runChild(t, "unprivileged", 0) // nobody special already
		return
	}
	runChild(t, "unprivileged", 65534)
}

// seccompChild is in a container whose profile forbids userfaultfd.
func seccompChild(errno syscall.Errno) error {
	if err := modetest.Forbid(modetest.Rule{Number: unix.SYS_USERFAULTFD, Arg: -1, Value: 0, Errno: errno}); err != nil {
		return err
	}
	var bad problems
	n, err := OpenNotifier()
	switch {
	case !haveCgo:
		if !errors.Is(err, unix.ENOTSUP) {
			bad.addf("without cgo: %v", err)
		}
	case n != nil || !errors.Is(err, errno) || !strings.Contains(err.Error(), "seccomp"):
		bad.addf("%v", err)
	}
	s := FindPagingSupport()
	if haveCgo && !strings.Contains(s.Notifier, "seccomp") || s.Fetch != "MADV_POPULATE" {
		bad.addf("%+v", s)
	}
	return bad.err()
}

func TestPagingSeccomp(t *testing.T) {
	runChild(t, "seccomp-EPERM", 0)
	runChild(t, "seccomp-ENOSYS", 0)
}

// oldKernelChild is on a kernel that lacks the newer calls, as far as seccomp can
// pretend that: everything that has another way still works.
func oldKernelChild() error {
	if err := modetest.Forbid(
		modetest.Rule{Number: unix.SYS_IOCTL, Arg: 1, Value: procmapQuery, Errno: unix.ENOTTY},
		modetest.Rule{Number: unix.SYS_IOCTL, Arg: 1, Value: pagemapScan, Errno: unix.ENOTTY},
		modetest.Rule{Number: unix.SYS_IOCTL, Arg: 1, Value: uffdioAPI, Errno: unix.EINVAL},
		modetest.Rule{Number: unix.SYS_MADVISE, Arg: 2, Value: unix.MADV_POPULATE_READ, Errno: unix.EINVAL},
		modetest.Rule{Number: unix.SYS_MADVISE, Arg: 2, Value: unix.MADV_POPULATE_WRITE, Errno: unix.EINVAL},
	); err != nil {
		return err
	}
	var bad problems
	if _, err := OpenNotifier(); haveCgo && (!errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "too old")) {
		bad.addf("%v", err)
	}
	s := FindPagingSupport()
	if s.Scan != "pagemap" || s.Mappings != "maps" || s.Fetch != "touch" {
		bad.addf("%+v", s)
	}
	b := make([]byte, 1)
	a, end := PageAlign(uintptr(unsafe.Pointer(&b[0])), 1)
	if r := PopulateRange(a, end, true); r.Outcome != CannotPopulate || r.Upto != a {
		bad.addf("%+v", r)
	}
	if m, err := QueryMapping(a); err != nil || !m.Allows(true) || m.PageSize != pageSize {
		bad.addf("%+v, %v", m, err)
	}
	if slow, err := MayBlock(a, end, true); slow || err != nil {
		bad.addf("%v, %v", slow, err)
	}
	if at := firstAbsent(a, end); at != end {
		bad.addf("a page that was touched is absent")
	}
	return bad.err()
}

func TestPagingOldKernel(t *testing.T) { runChild(t, "old-kernel", 0) }

// noProcChild is in a place without /proc: the notifier works, and the others say
// why they do not.
func noProcChild() error {
	if err := unix.Chroot(os.Getenv("VERBENA_TEST_ROOT")); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	var bad problems
	workout(&bad, false)
	if _, err := QueryMapping(0); !errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOENT) {
		bad.addf("mapping: %v", err)
	}
	if err := Present(0, pageSize, func(_, _ uintptr) bool { return true }); !errors.Is(err, unix.ENOTSUP) {
		bad.addf("present: %v", err)
	}
	if _, err := MayBlock(0, pageSize, true); !errors.Is(err, unix.ENOTSUP) {
		bad.addf("slow: %v", err)
	}
	if r := PopulateRange(0, pageSize, true); r.Outcome != NoMemory && r.Outcome != NotMapped || r.Upto != 0 {
		bad.addf("populate: %+v", r)
	}
	s := FindPagingSupport()
	if !strings.Contains(s.Scan, "/proc") || !strings.Contains(s.Mappings, "/proc") || s.Fetch != "MADV_POPULATE" {
		bad.addf("%+v", s)
	}
	return bad.err()
}

func TestPagingNoProc(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can change its root directory")
	}
	runChild(t, "no-proc", 0, "VERBENA_TEST_ROOT="+t.TempDir())
}
