package mem

// Memory on demand: nothing is pinned, nothing need be mapped when it is
// registered, and what is mapped may change at any time. The way of an access:
//
//  1. Run looks at the page table. Pages that are present are offered as they
//     are, without a system call.
//  2. fetch deals with a page fault: it finds the mapping, has the kernel tell
//     about changes there, makes the pages present and notes them in the table,
//     unless an invalidation came between; then it begins again. Run itself does
//     only what is quick. What would wait for a device is a FaultPending, and
//     somebody who may wait calls Await.
//  3. changed, missed and sweep take pages out of the table: the kernel told, or
//     might have, or they were found to be gone. Gone does so when an access has
//     failed for it.
//
// Memory is accessed at its own address, so a device always reads and writes
// what the CPU would. The page table can therefore be wrong without harm: it
// decides what is counted, and who waits, not what is accessed.

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
	inHeap bool // it is the Go heap's
	inFile bool
}

// pagedIn is what only a region needs that has been accessed.
type pagedIn struct {
	pages  pageTable
	begin  sync.Once
	place  *membership
	failed [4]atomic.Uint64 // pages that could not be fetched, plus one, each where its number says
	counts pagingCounts

	mu     sync.Mutex // guards closed; held while the region is swept, and for each step of a prefetch
	closed bool
}

// addressSpace is the length of an implicit region: all that the kernel gives a
// process that does not ask for more.
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

// notDurable says why memory does not survive, if so.
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

// countedPages is the region's size as statistics have it.
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

// NeverFaults reports whether accesses can never fault: see Host.Solid.
func (m *OnDemand) NeverFaults() bool { return m.inHeap }

// pageOf returns the page that the byte at off lies in.
func (m *OnDemand) pageOf(off uint64) uint64 {
	return (uint64(m.addr)%pageSize + off) >> pageShift
}

// pageAt returns the page of an address.
func (m *OnDemand) pageAt(addr uintptr) uint64 {
	return uint64(addr>>pageShift - m.addr>>pageShift)
}

// Run returns the bytes at off that are present, after fetching the first of
// them if that is quick.
func (m *OnDemand) Run(off, n uint64, acc ib.Access) ([]byte, FaultKind) {
	if off >= m.length || n > m.length-off {
		return nil, FaultBounds
	}
	if !theSpace.applyChangesSoon() {
		return nil, faultChanging // what has changed is not known yet, and the table out of date
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
			return nil, faultChanging // gone again already
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

// stillThere returns how many of n bytes at off are there that the table has. Who
// accesses a page that was reclaimed waits for it where nobody must wait, in the middle
// of a copy; so while the kernel reclaims, it is asked before.
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

// fetch makes bytes present, from off on: all of n, or as many as lie before the
// first that cannot be had; none of them is a fault. With wait it may take long.
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

// hasFailed reports whether somebody has waited for a page, in vain. Whether a
// page is slow is a guess, and behind the end of a file a wrong one: who tries again
// after that wait must not be told to wait once more, but what is wrong. It is true
// once.
func (m *OnDemand) hasFailed(at uintptr) bool {
	page, u := m.pageAt(at), m.used.Load()
	return u.failed[page%uint64(len(u.failed))].CompareAndSwap(page+1, 0)
}

// disturbed reports whether mappings of a range have changed since the space had
// seen before changes. Then pages of it that were noted since may be gone, and are
// taken away again. What has changed and is not known yet takes them away when it is.
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

// cover finds the mapping of an address and has the kernel tell about changes there, up to
// end or the end of the mapping, which it returns. swappable reports whether its pages may
// be swapped out. ok is false if nothing is mapped there, or not for this access; where
// the kernel cannot be asked, making the pages present finds out. The Go heap stays mapped.
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

// speed reports whether pages of one mapping may have to be read from storage. If they
// have to, and the caller must not wait, it returns FaultPending, unless somebody has
// waited for them in vain. Where the kernel cannot be asked they count as slow, but nobody
// is made to wait. Who waits asks only about pages that can be swapped out.
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

// makePresent makes pages of one mapping present: at one stroke, or one by one where the
// kernel cannot, or they can be swapped out (see populate). It returns where it has stopped.
func makePresent(at, end uintptr, write, swappable, slow bool) (upto uintptr) {
	if !swappable {
		if upto, can := populate(at, end, write); can {
			return upto
		}
	}
	return touchPages(at, end, write, slow)
}

// populate makes pages present at one stroke, where the kernel can do that.
//
// But it marks them as used twice. If they can be swapped out, and all of a memory
// cgroup's are so marked when it comes to its limit, Linux (seen: 6.18) finds none in
// time that has not been used lately, and kills the process though swap is empty.
func populate(at, end uintptr, write bool) (upto uintptr, can bool) {
	r := sys.PopulateRange(at, end, write)
	return r.Upto, r.Outcome != sys.CannotPopulate
}

// touchPages makes pages present one by one, as the CPU would.
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
		return FaultNone // another region by now
	}
	if m.have(off, n, acc) == n {
		return FaultNone // only the changes of mappings were to be waited for, or another access has fetched them
	}
	if kind := m.fetch(off, n, acc, true); kind != FaultDead {
		return kind
	}
	m.device.regionsNotFound.Add(1)
	return FaultNone
}

// Gone is told that an access has failed at off. Either the kernel has told why,
// by now, or it does not tell that: the rights or the file have changed.
func (m *OnDemand) Gone(off, n uint64, acc ib.Access) FaultKind {
	theSpace.applyChangesSoon()
	start, end := sys.PageAlign(m.addr+uintptr(off), uintptr(n))
	m.takeAway(m.useless(start, end, acc&writing != 0))
	return m.fetch(off, n, acc, false)
}

// useless returns how much of a range cannot be accessed as it should, though
// its first page is in the table.
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

// use returns what an accessed region has, or nil after Close.
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

// changed is told that mappings have changed.
func (m *OnDemand) changed(start, end uintptr) { _ = m.takeAway(start, end) }

// missed is told that any mapping may have changed.
func (m *OnDemand) missed() { m.changed(sys.PageAlign(m.addr, uintptr(m.length))) }

// takeAway takes pages out of the table, if there are any.
func (m *OnDemand) takeAway(start, end uintptr) bool {
	u := m.used.Load()
	return u != nil && m.tookAway(u, u.pages.clear(m.pageAt(start), uint64(end-start)>>pageShift))
}

// tookAway counts an invalidation, if it was one.
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

// sweep takes the pages away that are present no more, and of which nobody has
// told: they were reclaimed, their file was cut short or punched, or the rights
// of their mapping are others now.
func (m *OnDemand) sweep() {
	u := m.used.Load()
	if !u.mu.TryLock() {
		return // a prefetch, which may have to wait for storage: the others' turn
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

// sweepRights takes away what a mapping does not allow any more.
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

// Persist writes a range back to the file that is mapped there, which need not
// be the one of registration time, if it is one.
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
	u.begin.Do(func() {}) // who comes later finds no place
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
