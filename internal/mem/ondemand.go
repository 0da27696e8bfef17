package mem

// Memory on demand: nothing is pinned, nothing need be mapped when it is
// registered, and what is mapped may change at any time. The way of an access:
//
//  1. Run looks at the page table. Pages that are present are offered as they
//     are, without a system call.
//  2. fetch deals with a page fault: it finds the mapping, asks the kernel to report
//     changes there, makes the pages present and enters them in the table; if an
//     invalidation came between, it begins again. Run does not wait for storage:
//     where that may be needed it returns FaultPending, and a caller that may wait
//     calls Await.
//  3. changed, missed and sweep take pages out of the table: the kernel has reported
//     a change, or a report was lost, or the pages were found to be gone. Gone does
//     so when an access has failed.
//
// Memory is accessed at its own address, so a device always reads and writes
// what the CPU would. The page table can therefore be wrong without harm: it
// decides what is counted, and which access waits, not what is accessed.

import (
	"errors"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/goheap"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// OnDemand is a Backing of addresses of this process, whatever is mapped there. It
// is small, because there may be a million of them of which few are accessed.
type OnDemand struct {
	addr   uintptr
	length uint64
	owner  *byte // keeps memory of the Go heap alive, until Close
	device *Paging
	used   atomic.Pointer[pagedIn]
	kind   Kind
	inHeap bool // the addresses are the Go heap's
	inFile bool // all of it was a file that keeps it, when it was registered
}

// pagedIn is what an OnDemand needs from its first access on.
type pagedIn struct {
	pages  pageTable
	begin  sync.Once
	place  *membership
	failed [4]atomic.Uint64 // pages that could not be fetched: page+1, at page%4
	counts pagingCounts

	mu     sync.Mutex // guards closed; held while the region is swept, and for each step of a prefetch
	closed bool
}

// addressSpace is the length of an implicit region: all addresses that the kernel gives a
// process that does not ask for higher ones.
var addressSpace = addressSpaceOf(runtime.GOARCH)

func addressSpaceOf(arch string) uint64 {
	if arch == "arm64" {
		return 1 << 48
	}
	return 1 << 47
}

// NewOnDemandBytes makes a backing of a slice, which it keeps alive.
func NewOnDemandBytes(b []byte, access ib.Access, p *Paging) (*OnDemand, error) {
	m, err := newOnDemand(addrOf(b), uint64(len(b)), access, p)
	if err == nil && goheap.Contains(m.addr) {
		m.inHeap, m.owner = true, &b[0]
	}
	return m, err
}

// NewOnDemand makes a backing of addresses outside the Go heap. What is mapped
// there, now and later, is the caller's business.
//
// The errors are those of reg_mr: EINVAL, for no bytes or for the Go heap;
// EFAULT, for addresses that no process has; EINVAL, if access has
// AccessFlushPersistent and not all of it is now a file, mapped shared, on a file
// system that keeps it.
func NewOnDemand(addr uintptr, length uint64, access ib.Access, p *Paging) (*OnDemand, error) {
	m, err := newOnDemand(addr, length, access, p)
	if err == nil && (goheap.Contains(addr) || goheap.Contains(addr+uintptr(length)-1)) {
		_ = m.Close()
		return nil, heapError(addr, length)
	}
	return m, err
}

// NewImplicit makes a backing of the whole address space.
func NewImplicit(access ib.Access, p *Paging) (*OnDemand, error) {
	if access&ib.AccessFlushPersistent != 0 {
		return nil, ib.Errorf("reg_mr", syscall.EINVAL, "the address space as a whole is not persistent memory")
	}
	m, err := newOnDemand(0, addressSpace, access, p)
	if err == nil {
		m.kind = KindImplicit
	}
	return m, err
}

func newOnDemand(addr uintptr, length uint64, access ib.Access, p *Paging) (*OnDemand, error) {
	const op = "reg_mr"
	if length == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	}
	if length > math.MaxInt || uintptr(length) > math.MaxInt-min(addr, math.MaxInt) {
		return nil, ib.Errorf(op, syscall.EFAULT, "%d bytes at %#x are not addresses of a process", length, addr)
	}
	m := &OnDemand{addr: addr, length: length, kind: KindOnDemand, device: p}
	if access&ib.AccessFlushPersistent != 0 {
		if why := notDurable(addr, length); why != "" {
			return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x are not persistent memory (%s)", length, addr, why)
		}
		m.inFile = true
	}
	p.regions.Add(1)
	p.regionPages.Add(m.countedPages())
	return m, nil
}

// notDurable returns why memory is not persistent, or an empty string if it is.
func notDurable(addr uintptr, length uint64) string {
	if goheap.Contains(addr) {
		return noteHeap
	}
	why, err := sys.Durable(addr, uintptr(length))
	if err != nil {
		why = err.Error()
	}
	return why
}

// countedPages returns the region's size for the statistics: 0 for the whole address space.
func (m *OnDemand) countedPages() uint64 {
	if pages := m.numPages(); pages != addressSpace>>pageShift {
		return pages
	}
	return 0
}

// numPages is how many pages the region lies in.
func (m *OnDemand) numPages() uint64 { return m.pageOf(m.length-1) + 1 }

// Source returns what the backing was made of: a slice of the Go heap, or an
// address.
func (m *OnDemand) Source() ([]byte, uintptr) {
	if m.inHeap {
		return bytesAt(m.addr, int(m.length)), 0
	}
	return nil, m.addr
}

// Kind returns KindOnDemand or KindImplicit.
func (m *OnDemand) Kind() Kind { return m.kind }

// Addr returns the address of the first byte.
func (m *OnDemand) Addr() uintptr { return m.addr }

// Len returns the number of bytes.
func (m *OnDemand) Len() uint64 { return m.length }

// NeverFaults reports whether accesses can never fault: see Host.NeverFaults.
func (m *OnDemand) NeverFaults() bool { return m.inHeap }

// pageOf returns the page that the byte at off lies in.
func (m *OnDemand) pageOf(off uint64) uint64 {
	return (uint64(m.addr)%pageSize + off) >> pageShift
}

// pageAt returns the page of an address.
func (m *OnDemand) pageAt(addr uintptr) uint64 {
	return uint64(addr>>pageShift - m.addr>>pageShift)
}

// Run returns the bytes at off that are present, after fetching them if they are absent
// and that does not wait for storage.
func (m *OnDemand) Run(off, n uint64, acc ib.Access) ([]byte, FaultKind) {
	if off >= m.length || n > m.length-off {
		return nil, FaultBounds
	}
	if !theSpace.applyChangesSoon() {
		return nil, FaultBrief // changes are pending: the table may be out of date
	}
	have := m.have(off, n, acc)
	if have != 0 && theSpace.doubtful.Load() {
		have = m.stillThere(off, have)
	}
	if have == 0 {
		before := theSpace.changes.Load()
		kind := m.fetch(off, n, acc, false)
		have = m.have(off, n, acc)
		switch {
		case kind == FaultNone && have == 0, kind == FaultPending && theSpace.changes.Load() != before:
			return nil, FaultBrief // gone again already
		case kind != FaultNone:
			return nil, kind
		}
	}
	return bytesAt(m.addr+uintptr(off), int(have)), FaultNone
}

// have returns how many of n bytes at off are present for an access.
func (m *OnDemand) have(off, n uint64, acc ib.Access) uint64 {
	u := m.used.Load()
	if u == nil {
		return 0
	}
	first := m.pageOf(off)
	want := m.pageOf(off+n-1) - first + 1
	pages := u.pages.present(first, want, acc&writing != 0)
	if pages == want {
		return n
	}
	if pages == 0 {
		return 0
	}
	return pages<<pageShift - (uint64(m.addr)+off)%pageSize
}

// stillThere returns how many of n bytes at off, whose pages are in the table, are still
// present. An access to a page that was reclaimed waits for storage in the middle of a copy,
// where it must not; so while the kernel reclaims pages, Run asks it before.
func (m *OnDemand) stillThere(off, n uint64) uint64 {
	at := m.addr + uintptr(off)
	start, end := sys.PageAlign(at, uintptr(n))
	upto, err := sys.StillPresent(start, end)
	if err != nil || upto == end {
		return n
	}
	_ = sys.Absent(upto, end, m.vanished)
	return uint64(max(upto, at) - at)
}

// vanished takes pages out of the table that were found to be gone.
func (m *OnDemand) vanished(start, end uintptr) bool {
	if m.takeAway(start, end) {
		theSpace.foundGone()
	}
	return true
}

// fetch makes bytes present, from off on: all of n, or as many as lie before the first that
// it cannot make present. It returns a fault only if there are none. With wait it may wait
// for storage.
func (m *OnDemand) fetch(off, n uint64, acc ib.Access, wait bool) FaultKind {
	u := m.use()
	if u == nil {
		return FaultDead
	}
	start, end := sys.PageAlign(m.addr+uintptr(off), uintptr(n))
	at, pages, kind := start, uint64(0), FaultNone
	for tries := 0; at < end; {
		before := theSpace.changes.Load()
		var upto uintptr
		if upto, kind = m.bringIn(at, end, acc&writing != 0, wait); kind != FaultNone {
			break
		}
		pages += u.pages.set(m.pageAt(at), uint64(upto-at)>>pageShift, acc&writing != 0)
		if !m.disturbed(u, before, at, upto) {
			at = upto
			continue
		}
		if tries++; tries == maxGone {
			kind = FaultPending
			break
		}
	}
	m.countFault(u, pages, acc, kind)
	if at > start {
		return FaultNone
	}
	if wait && kind == FaultUnmapped {
		page := m.pageAt(at)
		u.failed[page%uint64(len(u.failed))].Store(page + 1)
	}
	return kind
}

// hasFailed reports whether an Await has failed to fetch a page. That a page may block is a
// guess, and behind the end of a file a wrong one: the access that comes after the Await must
// not end in FaultPending once more, but in the fault itself. It returns true once for each
// failure.
func (m *OnDemand) hasFailed(at uintptr) bool {
	page, u := m.pageAt(at), m.used.Load()
	return u.failed[page%uint64(len(u.failed))].CompareAndSwap(page+1, 0)
}

// disturbed reports whether mappings of a range have changed since the space's count of
// changes was before. Then pages that were entered in the table since may be gone, and it
// takes them out again. A change that is still pending takes them out when it is applied.
func (m *OnDemand) disturbed(u *pagedIn, before uint64, start, end uintptr) bool {
	theSpace.applyChangesSoon()
	if !theSpace.changedSince(before, start, end) {
		return false
	}
	m.takeAway(start, end)
	m.count(u, func(c *pagingCounts) { c.contentions.Add(1) })
	return true
}

// bringIn makes pages of one mapping present, as many as it can from at on.
func (m *OnDemand) bringIn(at, end uintptr, write, wait bool) (upto uintptr, kind FaultKind) {
	end, swappable, ok := m.cover(at, end, write)
	if !ok {
		return at, FaultUnmapped
	}
	slow, kind := m.speed(at, end, write, wait, swappable)
	if kind != FaultNone {
		return at, kind
	}
	if upto = makePresent(at, end, write, swappable, slow); upto == at {
		return at, FaultUnmapped
	}
	return min(upto, end), FaultNone
}

// cover finds the mapping of an address and asks the kernel to report changes there, up to
// end or the end of the mapping, which it returns. swappable reports whether its pages may
// be swapped out. ok is false if nothing is mapped there, or not for this access; it is true
// where the kernel cannot be asked: makePresent finds out. The Go heap stays mapped, and needs
// no cover.
func (m *OnDemand) cover(at, end uintptr, write bool) (upto uintptr, swappable, ok bool) {
	if m.inHeap {
		return end, sys.Swappable(), true
	}
	where, err := sys.QueryMapping(at)
	switch {
	case errors.Is(err, syscall.ENOENT), err == nil && !where.Allows(write):
		return at, false, false
	case err != nil:
		return end, false, true
	}
	end = min(end, where.End)
	theSpace.cover(m.used.Load().place, at, end, &where)
	return end, where.Swappable(), true
}

// speed reports whether making pages of one mapping present may block, for storage. If it may
// and wait is not set, it returns FaultPending, unless an Await has failed to fetch them. Where
// the kernel cannot be asked, slow is true but there is no FaultPending. With wait the kernel is
// asked only about pages that can be swapped out: others count as slow.
func (m *OnDemand) speed(at, end uintptr, write, wait, swappable bool) (slow bool, kind FaultKind) {
	if wait && !swappable {
		return true, FaultNone
	}
	slow, err := sys.MayBlock(at, end, write)
	if slow && err == nil && !wait && !m.hasFailed(at) {
		return true, FaultPending
	}
	return slow || err != nil, FaultNone
}

// makePresent makes pages of one mapping present: by one system call, or one by one if the
// kernel has no such call or the pages can be swapped out (see populate). It returns the
// address where it has stopped.
func makePresent(at, end uintptr, write, swappable, slow bool) (upto uintptr) {
	if !swappable {
		if upto, can := populate(at, end, write); can {
			return upto
		}
	}
	return touchPages(at, end, write, slow)
}

// populate makes pages present by one system call; can is false if the kernel has none.
//
// The call marks the pages as used twice. If they can be swapped out, and all pages of a
// memory cgroup are so marked when it comes to its limit, Linux (seen: 6.18) finds in time
// none that was not used lately, and kills the process though swap is empty.
func populate(at, end uintptr, write bool) (upto uintptr, can bool) {
	r := sys.PopulateRange(at, end, write)
	return r.Upto, r.Outcome != sys.CannotPopulate
}

// touchPages makes pages present one by one, by faults as the CPU's accesses would. It returns
// the address where it has stopped.
func touchPages(at, end uintptr, write, slow bool) (upto uintptr) {
	for ; at < end; at += uintptr(pageSize) {
		if (slow || !write) && !sys.Touch(at, false) || write && !sys.Touch(at, true) {
			break
		}
	}
	return at
}

// Await fetches bytes, however long it takes.
func (m *OnDemand) Await(off, n uint64, acc ib.Access) FaultKind {
	if off >= m.length || n > m.length-off {
		return FaultNone // the region has another backing by now
	}
	if m.have(off, n, acc) == n {
		return FaultNone // only changes of mappings were pending, or another access has fetched them
	}
	if kind := m.fetch(off, n, acc, true); kind != FaultDead {
		return kind
	}
	m.device.regionsNotFound.Add(1)
	return FaultNone
}

// Gone is called when an access has failed at off. Either the kernel has reported the change
// by now, or it is one that the kernel does not report: of the rights, or of the file.
func (m *OnDemand) Gone(off, n uint64, acc ib.Access) FaultKind {
	theSpace.applyChangesSoon()
	start, end := sys.PageAlign(m.addr+uintptr(off), uintptr(n))
	m.takeAway(m.useless(start, end, acc&writing != 0))
	return m.fetch(off, n, acc, false)
}

// useless returns the part of a range, from its start on, whose pages do not belong in the
// table: up to the next present page if the mapping allows the access, all of it if not.
func (m *OnDemand) useless(start, end uintptr, write bool) (uintptr, uintptr) {
	where, err := sys.QueryMapping(start)
	if err != nil {
		return start, end
	}
	end = min(end, where.End)
	if where.Allows(write) {
		_ = sys.Present(start+uintptr(pageSize), end, func(from, _ uintptr) bool { end = from; return false })
	}
	return start, end
}

// use returns what the backing needs for accesses, and makes it at the first; nil after Close.
func (m *OnDemand) use() *pagedIn {
	u := m.used.Load()
	if u == nil {
		u = new(pagedIn)
		u.pages.init(m.numPages())
		if !m.used.CompareAndSwap(nil, u) {
			u = m.used.Load()
		}
	}
	u.begin.Do(func() {
		start, end := sys.PageAlign(m.addr, uintptr(m.length))
		u.place = theSpace.join(start, end, m, true)
	})
	if u.place == nil || u.place.left.Load() {
		return nil
	}
	return u
}

// changed takes the pages of a changed range out of the table: see member.
func (m *OnDemand) changed(start, end uintptr) { _ = m.takeAway(start, end) }

// missed takes all pages out of the table, since any mapping may have changed: see member.
func (m *OnDemand) missed() { m.changed(sys.PageAlign(m.addr, uintptr(m.length))) }

// takeAway takes the pages of a range out of the table, and reports whether there were any.
func (m *OnDemand) takeAway(start, end uintptr) bool {
	u := m.used.Load()
	return u != nil && m.tookAway(u, u.pages.clear(m.pageAt(start), uint64(end-start)>>pageShift))
}

// tookAway counts an invalidation of so many pages, and reports whether there were any.
func (m *OnDemand) tookAway(u *pagedIn, pages uint64) bool {
	if pages == 0 {
		return false
	}
	m.count(u, func(c *pagingCounts) {
		c.invalidations.Add(1)
		c.invalidationPages.Add(pages)
	})
	return true
}

// sweep takes pages out of the table that are gone though the kernel has reported nothing:
// they were reclaimed, their file was truncated or punched, or the rights of their mapping
// have changed.
func (m *OnDemand) sweep() {
	u := m.used.Load()
	if !u.mu.TryLock() {
		return // a prefetch has the lock, and may be waiting for storage
	}
	defer u.mu.Unlock()
	if u.closed {
		return
	}
	first, _ := sys.PageAlign(m.addr, 1)
	u.pages.runs(func(page, n uint64) bool {
		start := first + uintptr(page)<<pageShift
		end := start + uintptr(n)<<pageShift
		err := sys.Absent(start, end, m.vanished)
		if err == nil && !m.inHeap {
			err = sys.Mappings(start, end, func(where *sys.Mapping) bool {
				m.sweepRights(u, where, max(start, where.Start), min(end, where.End))
				return true
			})
		}
		return err == nil
	})
}

// sweepRights takes out of the table what a mapping does not allow any more.
func (m *OnDemand) sweepRights(u *pagedIn, where *sys.Mapping, start, end uintptr) {
	switch {
	case !where.Read:
		m.takeAway(start, end)
	case !where.Write:
		m.tookAway(u, u.pages.protect(m.pageAt(start), uint64(end-start)>>pageShift))
	}
}

// Durable reports whether Persist makes the bytes persistent: see Host.Durable.
func (m *OnDemand) Durable() bool { return m.inFile }

// Persist writes a range back to the file that is mapped there now, which need not be the one
// of registration time. It returns ENOMEM if what is mapped there is not persistent.
func (m *OnDemand) Persist(off, n uint64) error {
	addr := m.addr + uintptr(off)
	if notDurable(addr, n) != "" {
		return syscall.ENOMEM
	}
	return sys.SyncFile(addr, uintptr(n))
}

// Close forgets everything about the pages. It waits for one step of a prefetch
// that is under way.
func (m *OnDemand) Close() error {
	u := orMake(&m.used)
	u.begin.Do(func() {}) // a later use finds no place, and returns nil
	if u.place != nil {
		theSpace.leave(u.place)
	}
	u.mu.Lock()
	u.closed = true
	u.mu.Unlock()
	m.owner = nil
	m.device.regions.Add(^uint64(0))
	m.device.regionPages.Add(-m.countedPages())
	return nil
}
