package peermem

// From an address to a buffer:
//
//  1. Find asks the clients whose memory it is.
//  2. export makes a buffer of what one of them claims.
//  3. The importer pins and maps it: getPages, then dmaMap, which looks at the client's table and
//     cuts the region out of it.
//  4. The importer unmaps and unpins, at the end or when the client invalidates.
//  5. release, when the last reference to the buffer is gone.

import (
	"math"
	"math/bits"
	"os"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// use is memory that a client has claimed.
type use struct {
	of      *Registered
	private any
	addr    uintptr
	size    uint64
	force   bool
	core    uint64
	buffer  *dmabuf.Buffer

	// What follows is guarded by the buffer's reservation lock.
	attached bool
	held     bool   // GetPages has succeeded, and PutPages was not called
	mapped   bool   // DMAMap has succeeded, and DMAUnmap was not called
	freed    bool   // the client has invalidated the memory
	pages    uint64 // that are mapped
}

// Find asks the clients for the memory at an address. It returns a buffer of what one of them has
// claimed, with one reference, the caller's; nil if it is nobody's. writes reports whether devices
// are to write to it.
//
// The buffer has room for one importer, which pins it before it maps it. An importer of a client
// that invalidates must be revocable, and is refused with EOPNOTSUPP if it is not.
//
// Errors: EINVAL if the range is empty or wraps around.
func Find(addr uintptr, size uint64, writes bool) (*dmabuf.Buffer, error) {
	if size == 0 || size > math.MaxInt || uint64(addr) > math.MaxUint64-size {
		return nil, ib.Errorf("reg_mr", syscall.EINVAL, "%d bytes at %#x", size, addr)
	}
	for _, r := range Clients() {
		if !r.enter() {
			continue
		}
		private, mine := r.client.Acquire(addr, size)
		if !mine {
			r.leave()
			continue
		}
		u := &use{of: r, private: private, addr: addr, size: size, force: !writes, core: cores.Add(1)}
		return u.export()
	}
	return nil, nil
}

func (u *use) export() (*dmabuf.Buffer, error) {
	b, err := dmabuf.Export(dmabuf.Config{Size: u.size, Exporter: u.of.client.Name, Priv: u, Ops: dmabuf.Ops{
		Attach:  u.attach,
		Detach:  func(*dmabuf.Attachment) {},
		Pin:     func(*dmabuf.Attachment) error { return u.getPages() },
		Unpin:   func(*dmabuf.Attachment) { u.putPages() },
		Map:     func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) { return u.dmaMap() },
		Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) { u.dmaUnmap() },
		Release: func(*dmabuf.Buffer) { u.release() },
	}})
	if err != nil {
		u.release()
		return nil, err
	}
	u.buffer = b
	u.of.mu.Lock()
	u.of.uses[u.core] = u
	u.of.mu.Unlock()
	return b, nil
}

const opAttach = "reg_mr"

// attach accepts one importer, once: the client's operations are called once for each Acquire.
func (u *use) attach(a *dmabuf.Attachment) error {
	if u.of.client.Invalidates && !a.Revocable() {
		return ib.Errorf(opAttach, syscall.EOPNOTSUPP, "the importer cannot bear that the client %s invalidates its memory", u.of.client.Name)
	}
	r := u.buffer.Reservation()
	r.Lock()
	defer r.Unlock()
	if u.attached {
		return ib.Errorf(opAttach, syscall.EBUSY, "memory of the client %s has one importer", u.of.client.Name)
	}
	u.attached = true
	return nil
}

func (u *use) errFreed() error {
	return ib.Errorf(opAttach, syscall.ENODEV, "the client %s has invalidated the memory", u.of.client.Name)
}

func (u *use) getPages() error {
	if u.freed {
		return u.errFreed()
	}
	if err := u.of.client.GetPages(u.private, u.addr, u.size, true, u.force, u.core); err != nil {
		return u.named("get_pages", err)
	}
	u.held = true
	return nil
}

func (u *use) putPages() {
	if u.held && !(u.freed && u.of.client.UnmapsItself) {
		u.of.client.PutPages(u.private)
	}
	u.held = false
}

func (u *use) dmaMap() (*dmabuf.Table, error) {
	c := &u.of.client
	switch {
	case u.freed:
		return nil, u.errFreed()
	case !u.held:
		return nil, ib.Errorf(opAttach, syscall.EOPNOTSUPP, "memory of the client %s must be pinned", c.Name)
	case u.mapped:
		return nil, ib.Errorf(opAttach, syscall.EBUSY, "memory of the client %s is mapped once", c.Name)
	}
	segments, err := c.DMAMap(u.private)
	if err != nil {
		return nil, u.named("dma_map", err)
	}
	page := uint64(os.Getpagesize())
	if c.PageSize != nil {
		page = c.PageSize(u.private)
	}
	pages, err := check(segments, page, u.addr, u.size)
	if err != nil {
		c.DMAUnmap(u.private)
		return nil, u.named("dma_map", err)
	}
	u.mapped, u.pages = true, pages
	u.of.allocMRs.Add(1)
	u.of.regPages.Add(pages)
	u.of.regBytes.Add(u.size)
	return dmabuf.NewTable(cut(segments, uint64(u.addr)%page, u.size)...), nil
}

func (u *use) dmaUnmap() {
	if !u.mapped {
		return
	}
	u.mapped = false
	if !u.freed || !u.of.client.UnmapsItself {
		u.of.client.DMAUnmap(u.private)
	}
	u.of.deallocMRs.Add(1)
	u.of.deregPages.Add(u.pages)
	u.of.deregBytes.Add(u.size)
}

func (u *use) release() {
	u.of.mu.Lock()
	delete(u.of.uses, u.core)
	u.of.mu.Unlock()
	if release := u.of.client.Release; release != nil {
		release(u.private)
	}
	u.of.leave()
}

// check looks at a table that a client has returned, and returns how many pages the region has.
// What is wrong with it is EINVAL: a page size that is none, segments that are not of whole pages
// or overlap, and too few bytes.
func check(segments [][]byte, page uint64, addr uintptr, size uint64) (pages uint64, err error) {
	bad := func(format string, args ...any) (uint64, error) {
		return 0, ib.Errorf("dma_map", syscall.EINVAL, format, args...)
	}
	if bits.OnesCount64(page) != 1 || page < uint64(os.Getpagesize()) {
		return bad("pages of %d bytes", page)
	}
	first, last := uint64(addr)/page, (uint64(addr)+size-1)/page // size is not 0, and the sum does not wrap
	pages = last - first + 1
	high, want := bits.Mul64(pages, page)
	if high != 0 {
		return bad("pages of %d bytes", page)
	}
	have := uint64(0)
	for _, s := range segments {
		n := uint64(len(s))
		if n == 0 || n%page != 0 {
			return bad("a segment of %d bytes, with pages of %d", n, page)
		}
		if have += n; have < n {
			return bad("the segments have too many bytes")
		}
	}
	if have < want {
		return bad("the table has %d bytes, and the pages of the region %d", have, want)
	}
	if overlap(segments) {
		return bad("segments overlap")
	}
	return pages, nil
}

// cut returns n bytes of a table, without those before skip. The table has as many.
func cut(segments [][]byte, skip, n uint64) (part [][]byte) {
	for _, s := range segments {
		if skip >= uint64(len(s)) {
			skip -= uint64(len(s))
			continue
		}
		s = s[skip:]
		skip = 0
		s = s[:min(n, uint64(len(s)))]
		part = append(part, s)
		if n -= uint64(len(s)); n == 0 {
			break
		}
	}
	return part
}
