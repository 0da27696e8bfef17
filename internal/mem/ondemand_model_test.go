package mem_test

// One on-demand region against a model of what is mapped under it. Random
// mappings, changes of mappings and files, accesses of the CPU and of the device
// and prefetches follow each other, and after each:
//
//   - what the device reads is what the CPU reads, it writes what the CPU would,
//     and it fails where the CPU would fault, and only there;
//   - every counter is as in the model: each change is counted once, whether the kernel
//     has reported it or the device has found it. (Not where the kernel reports nothing.)
//
// The model has the mappings page by page, the bytes, and the device's page
// table. It asks the kernel only where one mapping ends and another begins, and
// which pages a sweep will find absent; and it learns from the device what an access
// has found.

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

const modelPages = 24

// modelPage is a page of the region.
type modelPage struct {
	mapped bool
	prot   int
	file   int    // the page of the file that it shows, or -1: anonymous
	bytes  []byte // anonymous: its bytes; nil: zeros

	read, write bool // the device has it
}

type odpModel struct {
	*odp
	t     *rapid.T
	sweep func()
	base  uint64 // where in the region the first page is
	pages [modelPages]modelPage

	fd   int
	file [modelPages][]byte // bytes of the file's pages
	size int                // pages that the file has

	want  ib.PagingStats
	found int // pages that an access has found gone, which the kernel had not reported
}

// may reports whether the CPU may access a page.
func (m *odpModel) may(p int, write bool) bool {
	g := &m.pages[p]
	need := unix.PROT_READ
	if write {
		need |= unix.PROT_WRITE
	}
	return g.mapped && g.prot&need == need && (g.file < 0 || g.file < m.size)
}

// content returns the bytes of a page that may be read.
func (m *odpModel) content(p int) []byte {
	b := &m.pages[p].bytes
	if f := m.pages[p].file; f >= 0 {
		b = &m.file[f]
	}
	if *b == nil {
		*b = make([]byte, page)
	}
	return *b
}

// span draws a range of pages.
func (m *odpModel) span() (p, n int) {
	p = rapid.IntRange(0, modelPages-1).Draw(m.t, "page")
	return p, rapid.IntRange(1, min(8, modelPages-p)).Draw(m.t, "pages")
}

// invalidated takes pages from the device, as one event.
func (m *odpModel) invalidated(p, n int) {
	k := uint64(0)
	for i := p; i < p+n; i++ {
		if m.pages[i].read {
			k++
		}
		m.pages[i].read, m.pages[i].write = false, false
	}
	if k > 0 {
		m.want.Invalidations++
		m.want.InvalidationPages += k
	}
}

// mappings visits the parts of a range of pages that the kernel has as mappings.
func (m *odpModel) mappings(p, n int, visit func(p, n int)) {
	from, to := m.at(p), m.at(p+n)
	if err := sys.Mappings(from, to, func(w *sys.Mapping) bool {
		lo, hi := max(from, w.Start), min(to, w.End)
		visit(int(lo-m.addr)/page, int(hi-lo)/page)
		return true
	}); err != nil {
		m.t.Fatal(err)
	}
}

func (m *odpModel) at(p int) uintptr { return m.addr + uintptr(p*page) }

func (m *odpModel) syscall(number uintptr, p, n int, args ...uintptr) {
	args = append([]uintptr{m.at(p), uintptr(n * page)}, append(args, 0, 0, 0, 0)...)
	if _, _, errno := unix.Syscall6(number, args[0], args[1], args[2], args[3], args[4], args[5]); errno != 0 {
		m.t.Fatal(errno)
	}
}

// The changes of mappings.

func (m *odpModel) mapAnon() {
	p, n := m.span()
	prot := rapid.SampledFrom([]int{readWrite, readWrite, unix.PROT_READ, unix.PROT_NONE}).Draw(m.t, "prot")
	m.syscall(unix.SYS_MMAP, p, n, uintptr(prot), anonPages|unix.MAP_FIXED, ^uintptr(0))
	m.invalidated(p, n)
	for i := p; i < p+n; i++ {
		m.pages[i] = modelPage{mapped: true, prot: prot, file: -1}
	}
}

func (m *odpModel) mapFile() {
	p, n := m.span()
	prot := rapid.SampledFrom([]int{readWrite, unix.PROT_READ}).Draw(m.t, "prot")
	from := rapid.IntRange(0, modelPages-n).Draw(m.t, "from")
	m.syscall(unix.SYS_MMAP, p, n, uintptr(prot), unix.MAP_SHARED|unix.MAP_FIXED, uintptr(m.fd), uintptr(from*page))
	m.invalidated(p, n)
	for i := range n {
		m.pages[p+i] = modelPage{mapped: true, prot: prot, file: from + i}
	}
}

func (m *odpModel) unmapSome() {
	p, n := m.span()
	m.syscall(unix.SYS_MUNMAP, p, n)
	m.invalidated(p, n)
	for i := p; i < p+n; i++ {
		m.pages[i] = modelPage{}
	}
}

func (m *odpModel) protect() {
	p, n := m.span()
	for i := p; i < p+n; i++ {
		if !m.pages[i].mapped {
			return
		}
	}
	prot := rapid.SampledFrom([]int{readWrite, unix.PROT_READ, unix.PROT_NONE}).Draw(m.t, "prot")
	m.syscall(unix.SYS_MPROTECT, p, n, uintptr(prot))
	for i := p; i < p+n; i++ {
		m.pages[i].prot = prot
	}
}

func (m *odpModel) discard() {
	p, n := m.span()
	for i := p; i < p+n; i++ {
		if !m.pages[i].mapped {
			return
		}
	}
	m.mappings(p, n, m.invalidated) // the kernel reports each
	m.syscall(unix.SYS_MADVISE, p, n, unix.MADV_DONTNEED)
	for i := p; i < p+n; i++ {
		m.pages[i].bytes = nil
	}
}

// move moves pages of one mapping to another place in the region.
func (m *odpModel) move() {
	p, n := m.span()
	to := rapid.IntRange(0, modelPages-n).Draw(m.t, "to")
	if to < p+n && p < to+n {
		return
	}
	one := 0
	m.mappings(p, n, func(_, k int) { one = k })
	if one != n {
		return
	}
	m.syscall(unix.SYS_MREMAP, p, n, uintptr(n*page), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, m.at(to))
	m.invalidated(to, n)
	m.invalidated(p, n)
	for i := range n {
		m.pages[to+i], m.pages[p+i] = m.pages[p+i], modelPage{}
	}
}

// truncate cuts the file, or makes it long again.
func (m *odpModel) truncate() {
	m.size = rapid.IntRange(0, modelPages).Draw(m.t, "size")
	if err := unix.Ftruncate(m.fd, int64(m.size*page)); err != nil {
		m.t.Fatal(err)
	}
	clear(m.file[m.size:])
}

func (m *odpModel) punch() {
	p, n := m.span()
	if err := unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(p*page), int64(n*page)); err != nil {
		m.t.Fatal(err)
	}
	clear(m.file[p : p+n])
}

// The accesses.

func (m *odpModel) cpuWrites() {
	p, n := m.span()
	seed := rapid.Byte().Draw(m.t, "seed")
	for i := p; i < p+n; i++ {
		if m.may(i, true) {
			b := pattern(page, seed+byte(i))
			copy(memoryAt(m.at(i), page), b)
			copy(m.content(i), b)
		}
	}
}

// bytesRange draws a range of bytes.
func (m *odpModel) bytesRange() (off, n int) {
	off = rapid.IntRange(0, modelPages*page-1).Draw(m.t, "offset")
	return off, rapid.IntRange(1, min(6*page, modelPages*page-off)).Draw(m.t, "bytes")
}

func (m *odpModel) deviceReads() {
	off, n := m.bytesRange()
	bad := m.foresee(off, n, false)
	got, f := m.read(uint64(off), uint64(n))
	if bad >= 0 {
		m.unmappedAt(f, "read", off, n, bad)
		return
	}
	if !f.OK() {
		m.t.Fatalf("reading %d bytes at %d: %v", n, off, f)
	}
	var want []byte
	for i := off / page; i*page < off+n; i++ {
		want = append(want, m.content(i)...)
	}
	want = want[off%page:][:n]
	if !bytes.Equal(got, want) {
		m.t.Fatalf("the device read something else than the model, %d bytes at %d", n, off)
	}
	if !bytes.Equal(got, memoryAt(m.addr+uintptr(off), uint64(n))) {
		m.t.Fatalf("the device read something else than the CPU, %d bytes at %d", n, off)
	}
}

func (m *odpModel) deviceWrites() {
	off, n := m.bytesRange()
	bad := m.foresee(off, n, true)
	data := pattern(n, rapid.Byte().Draw(m.t, "seed"))
	f := m.write(uint64(off), data)
	upto := off + n
	if bad >= 0 {
		m.unmappedAt(f, "write", off, n, bad)
		upto = bad * page // some of what lies before is written, perhaps
	} else if !f.OK() {
		m.t.Fatalf("writing %d bytes at %d: %v", n, off, f)
	}
	for i := off / page; i*page < upto; i++ {
		lo, hi := max(off, i*page), min(upto, (i+1)*page)
		b := m.content(i)[lo-i*page : hi-i*page]
		if bad < 0 {
			copy(b, data[lo-off:])
		} else {
			copy(b, memoryAt(m.addr+uintptr(lo), uint64(hi-lo)))
		}
	}
	m.same()
}

func (m *odpModel) deviceAdds() {
	if mem.RaceEnabled {
		return // the detector's own code faults where it may not
	}
	word := rapid.IntRange(0, modelPages*page/8-1).Draw(m.t, "word")
	bad := m.foresee(word*8, 8, true)
	_, f := mem.Atomic(m.table, mem.Actor{PD: 1}, m.region.Key(), uint64(m.addr)+uint64(word*8), mem.FetchAdd, 0, 0)
	if bad >= 0 {
		m.unmappedAt(f, "atomic", word*8, 8, bad)
	} else if !f.OK() {
		m.t.Fatal(f)
	}
}

func (m *odpModel) unmappedAt(f mem.Fault, what string, off, n, bad int) {
	if f.Kind != mem.FaultUnmapped {
		m.t.Fatalf("%s of %d bytes at %d: %v, but page %d cannot be accessed", what, n, off, f, bad)
	}
}

// foresee applies to the model what an access of the device does to its page table and to
// the counters, and returns the page that it fails at, or -1.
func (m *odpModel) foresee(off, n int, write bool) (bad int) {
	has := func(p int) bool { return m.pages[p].read && (m.pages[p].write || !write) }
	end := (off+n-1)/page + 1
	for p := off / page; p < end; {
		if has(p) && m.may(p, write) {
			p++
			continue
		}
		if has(p) {
			// It is in the table, and the kernel has not reported that it is gone: so
			// it is found now. Which pages are found with it depends on where the copy
			// begins, which may be at its end.
			m.found = end - off/page
			for q := p; q < end; q++ {
				if !m.may(q, write) {
					return q
				}
			}
		}
		if !m.fault(p, end, write) {
			return p
		}
	}
	return -1
}

// fault brings pages in until one that cannot be had.
func (m *odpModel) fault(p, end int, write bool) bool {
	m.want.PageFaults++
	m.want.RemoteFaults++
	q := p
	for ; q < end && m.may(q, write); q++ {
		m.want.PageFaultPages += m.note(q, write)
	}
	if q == p {
		m.want.FailedResolutions++
	}
	return q > p
}

// note puts a page into the table and returns 1 if that is news.
func (m *odpModel) note(p int, write bool) (news uint64) {
	g := &m.pages[p]
	if !g.read || write && !g.write {
		news = 1
	}
	g.read, g.write = true, g.write || write
	return news
}

func (m *odpModel) present(p, n int, visit func(p, n int) bool) {
	if err := sys.Present(m.at(p), m.at(p+n), func(lo, hi uintptr) bool {
		return visit(int(lo-m.addr)/page, int(hi-lo)/page)
	}); err != nil {
		m.t.Fatal(err)
	}
}

// prefetch brings pages in ahead; noFault takes what is in memory.
func (m *odpModel) prefetch() {
	p, n := m.span()
	write := rapid.Bool().Draw(m.t, "write")
	noFault := !write && rapid.Bool().Draw(m.t, "no fault")
	want := mem.FaultNone
	if noFault {
		m.present(p, n, func(p, n int) bool {
			for i := p; i < p+n; i++ {
				if m.pages[i].prot&unix.PROT_READ != 0 {
					m.want.PrefetchPages += m.note(i, false)
				}
			}
			return true
		})
	} else {
		for i := p; i < p+n && want == mem.FaultNone; i++ {
			if !m.may(i, write) {
				want = mem.FaultUnmapped
				continue
			}
			m.want.PrefetchPages += m.note(i, write)
		}
	}
	if want == mem.FaultNone {
		m.want.Prefetches++
	}
	if got := m.odp.prefetch(m.base+uint64(p*page), uint64(n*page), write, noFault); got != want {
		m.t.Fatalf("prefetch of %d pages at %d, write %v, no fault %v: %v, want %v", n, p, write, noFault, got, want)
	}
}

// sweepNow has the device look for changes that the kernel has not reported.
func (m *odpModel) sweepNow() {
	for p := 0; p < modelPages; {
		n := 0
		for p+n < modelPages && m.pages[p+n].read {
			n++
		}
		if n == 0 {
			p++
			continue
		}
		at := p
		m.present(p, n, func(from, k int) bool {
			m.invalidated(at, from-at)
			at = from + k
			return true
		})
		m.invalidated(at, p+n-at)
		m.mappings(p, n, m.sweepRights)
		p += n
	}
	m.sweep()
	mem.NoDoubt() // the model has no idea of it
}

func (m *odpModel) sweepRights(p, n int) {
	switch prot := m.pages[p].prot; {
	case prot&unix.PROT_READ == 0:
		m.invalidated(p, n)
	case prot&unix.PROT_WRITE == 0:
		k := uint64(0)
		for i := p; i < p+n; i++ {
			if m.pages[i].write {
				k++
			}
			m.pages[i].write = false
		}
		if k > 0 {
			m.want.Invalidations++
			m.want.InvalidationPages += k
		}
	}
}

// same compares all that can be read with the model.
func (m *odpModel) same() {
	for p := range modelPages {
		if m.may(p, false) && !bytes.Equal(memoryAt(m.at(p), page), m.content(p)) {
			m.t.Fatalf("page %d is not what it should be", p)
		}
	}
}

// check compares the counters and the page table's size.
func (m *odpModel) check() {
	if mem.PagingMeans().Notifier != "userfaultfd" {
		return
	}
	if m.found > 0 {
		m.resync()
	}
	if got := m.backing.Stats(); got != m.want {
		m.t.Fatalf("counters\n%+v, want\n%+v", got, m.want)
	}
	dev := m.table.Paging().Stats()
	dev.MRs, dev.MRPages = 0, 0
	if dev != m.want {
		m.t.Fatalf("the device's counters\n%+v, want\n%+v", dev, m.want)
	}
	have := uint64(0)
	for i := range m.pages {
		if m.pages[i].read {
			have++
		}
	}
	if got := m.backing.Present(); got != have {
		m.t.Fatalf("%d pages are present, want %d", got, have)
	}
}

// resync learns from the device what an access has found, within limits.
func (m *odpModel) resync() {
	got := m.backing.Stats()
	k := got.InvalidationPages - m.want.InvalidationPages
	if k == 0 || k > uint64(m.found) || got.Invalidations-m.want.Invalidations > k || got.FailedResolutions != m.want.FailedResolutions+1 {
		m.t.Fatalf("an access met pages that were gone, %d at most: counters\n%+v, before\n%+v", m.found, got, m.want)
	}
	m.want, m.found = got, 0
	for p := range m.pages {
		g := &m.pages[p]
		read, write := m.backing.HasPage(m.base + uint64(p*page))
		if read && !g.mapped {
			m.t.Fatalf("the device has page %d, which is not mapped", p)
		}
		g.read, g.write = read, write
	}
}

func TestOnDemandModel(t *testing.T) {
	for _, implicit := range []bool{false, true} {
		t.Run(map[bool]string{false: "explicit", true: "implicit"}[implicit], func(t *testing.T) {
			at := nextODP
			nextODP += 4 << 20
			rapid.Check(t, func(rt *rapid.T) {
				mem.WithoutSweeper(func(sweep func()) { mem.NoDoubt(); runODPModel(t, rt, at, implicit, sweep) })
			})
		})
	}
}

func runODPModel(t *testing.T, rt *rapid.T, at uintptr, implicit bool, sweep func()) {
	m := &odpModel{
		odp: &odp{tb: t, table: mem.NewTable(mem.TableConfig{}), addr: at, size: modelPages * page},
		t:   rt, sweep: sweep, fd: memfd(t, modelPages*page), size: modelPages,
	}
	defer unix.Close(m.fd)
	length, iova := m.odp.size, uint64(at)
	var err error
	if implicit {
		m.backing, err = mem.NewImplicit(odpAccess, m.table.Paging())
		length, iova = m.backing.Len(), 0
	} else {
		m.backing, err = mem.NewOnDemand(at, length, odpAccess, m.table.Paging())
	}
	if err != nil {
		rt.Fatal(err)
	}
	if m.region, err = m.table.Register(mem.RegionConfig{PD: 1, Access: odpAccess, IOVA: iova, Length: length, Backing: m.backing}); err != nil {
		rt.Fatal(err)
	}
	defer func() {
		if err := m.region.Close(); err != nil {
			t.Error(err)
		}
		m.unmap(0, m.odp.size)
	}()
	m.base = uint64(at) - uint64(m.backing.Addr())
	steps := []func(){
		m.mapAnon, m.mapFile, m.unmapSome, m.protect, m.discard, m.move, m.truncate, m.punch, m.cpuWrites,
		m.deviceReads, m.deviceWrites, m.deviceAdds, m.deviceReads, m.deviceWrites, m.prefetch, m.sweepNow,
	}
	for range rapid.IntRange(1, 60).Draw(rt, "steps") {
		steps[rapid.IntRange(0, len(steps)-1).Draw(rt, "step")]()
		m.check()
	}
	m.same()
}
