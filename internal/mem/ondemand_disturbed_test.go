package mem

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
)

// A fetch finds that mappings have changed since it began, and takes the pages out of the table
// again that it has entered since.
func TestOnDemandDisturbedFetch(t *testing.T) {
	b, err := unix.Mmap(-1, 0, int(2*pageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	m, err := NewOnDemand(addrOf(b), 2*pageSize, ib.AccessLocalWrite, new(Paging))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	if kind := m.fetch(0, 2*pageSize, ib.AccessLocalWrite, true); kind != FaultNone {
		t.Fatal(kind)
	}
	if theSpace.notifier.Load() == nil {
		t.Skip("kernel: changes of mappings are not reported")
	}
	u, page, end := m.used.Load(), addrOf(b), addrOf(b)+uintptr(2*pageSize)
	before := theSpace.changes.Load()
	if m.disturbed(u, before, page, end) {
		t.Fatal("nothing has changed")
	}
	if err := unix.Madvise(b[:pageSize], unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	theSpace.applyChanges()
	u.pages.set(0, 1, true) // as a fetch does that has begun before the change
	if m.disturbed(u, before, page+uintptr(pageSize), end) {
		t.Error("the page beside it has not changed")
	}
	if m.have(0, 1, 0) != 1 {
		t.Error("the page is not in the table")
	}
	if !m.disturbed(u, before, page, page+uintptr(pageSize)) {
		t.Error("the fetch counts as good")
	}
	if m.have(0, 1, 0) != 0 || m.have(pageSize, 1, 0) != 1 {
		t.Error("the table has not the page beside it alone")
	}
}
