package mem

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
)

// Memory that has become stale since an access found its bytes is not accessed: the bracket
// looks once more. What is still there is.
func TestBracketLooksOnceMore(t *testing.T) {
	b, err := unix.Mmap(-1, 0, int(2*pageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	h, err := NewHost(addrOf(b), 2*pageSize, ib.AccessLocalWrite, ib.LockOff, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = h.Close() }()
	if theSpace.notifier.Load() == nil {
		t.Skip("kernel: changes of mappings are not reported")
	}
	enters := func(off uint64) bool {
		theSpace.applyChanges()
		in, ok := bracket(8, mapped{h, off}, mapped{})
		if ok {
			in.Leave(h.shard)
		}
		return ok
	}
	if !enters(0) || !enters(pageSize) {
		t.Fatal("memory that is there")
	}
	if err := unix.Madvise(b[:pageSize], unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	if enters(0) {
		t.Error("memory that was discarded")
	}
	if !enters(pageSize) {
		t.Error("memory beside it")
	}
}
