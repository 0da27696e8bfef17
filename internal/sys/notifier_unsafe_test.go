package sys

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// openTestNotifier opens the notifier, which must be possible wherever the tests of
// a build with cgo run.
func openTestNotifier(t testing.TB) *Notifier {
	t.Helper()
	n, err := OpenNotifier()
	if !haveCgo {
		if !errors.Is(err, unix.ENOTSUP) {
			t.Fatalf("without cgo: %v", err)
		}
		t.Skip("this build has no cgo")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// mapPages maps pages of anonymous memory, in the middle of a larger range without
// rights, so that no neighbour becomes one mapping with it. It is for tests that
// unmap: what is left is unmapped at the end.
func mapPages(t testing.TB, pages uintptr, prot, flags int) uintptr {
	t.Helper()
	return mapFile(t, pages, prot, flags|unix.MAP_ANONYMOUS, -1)
}

func mapFile(t testing.TB, pages uintptr, prot, flags, fd int) uintptr {
	t.Helper()
	n := (pages + 2) * pageSize
	outer, err := unix.MmapPtr(-1, 0, nil, n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	addr := unsafe.Add(outer, pageSize)
	if _, err := unix.MmapPtr(fd, 0, addr, pages*pageSize, prot, flags|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(outer, n) })
	return uintptr(addr)
}

func TestSmoke(t *testing.T) {
	n := openTestNotifier(t)
	a := mapPages(t, 4, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+4*pageSize); err != nil {
		t.Fatal(err)
	}
	if n.Changed() {
		t.Error("changed")
	}
	t.Log(PopulateRange(a, a+4*pageSize, true))
	if err := unix.Munmap(nil); err == nil {
		t.Error("?")
	}
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, a, 2*pageSize, 0); e != 0 {
		t.Fatal(e)
	}
	if !n.Changed() {
		t.Error("not changed")
	}
	buf := make([]MapChange, 4)
	k, lost, more := n.Take(buf)
	t.Log(buf[:k], lost, more, n.Changed())
	k, lost, more = n.Take(buf)
	t.Log(buf[:k], lost, more, n.Changed())
	t.Log(QueryMapping(a))
	t.Log(QueryMapping(a + 2*pageSize))
	t.Log(Slow(a, a+4*pageSize, true))
	t.Log(FindPagingSupport())
}
