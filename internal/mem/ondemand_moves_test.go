package mem_test

// What happens to on-demand memory when the mappings under it change.

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

const odpAccess = ib.AccessLocalWrite | ib.AccessRemote | ib.AccessOnDemand

// odp is an on-demand region over reserved addresses, where a test maps what it
// likes.
type odp struct {
	tb      testing.TB
	table   *mem.Table
	region  *mem.Region
	backing *mem.OnDemand
	addr    uintptr
	size    uint64
}

// nextODP is where the next test has its addresses: far from where the kernel or
// the Go runtime would put anything, so that what a test unmaps stays free.
var nextODP = uintptr(0x4000_0000_0000)

// newODP takes n addresses, where nothing is mapped, and registers them.
func newODP(tb testing.TB, n uint64) *odp {
	tb.Helper()
	o := &odp{tb: tb, table: mem.NewTable(mem.TableConfig{}), addr: nextODP, size: n}
	nextODP += uintptr(n+4<<20) &^ (2<<20 - 1)
	var err error
	if o.backing, err = mem.NewOnDemand(o.addr, n, odpAccess, o.table.Paging()); err != nil {
		tb.Fatal(err)
	}
	if o.region, err = o.table.Register(mem.RegionConfig{PD: 1, Access: odpAccess, IOVA: uint64(o.addr), Length: n, Backing: o.backing}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := o.region.Close(); err != nil {
			tb.Error(err)
		}
		o.unmap(0, n)
	})
	return o
}

func (o *odp) mapAt(off, n uint64, prot, flags, fd int) {
	o.tb.Helper()
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, o.addr+uintptr(off), uintptr(n), uintptr(prot), uintptr(flags|unix.MAP_FIXED), uintptr(fd), 0)
	if errno != 0 {
		o.tb.Fatal(errno)
	}
}

const (
	readWrite = unix.PROT_READ | unix.PROT_WRITE
	anonPages = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE
)

func (o *odp) unmap(off, n uint64) {
	o.tb.Helper()
	o.call(unix.SYS_MUNMAP, off, n, 0)
}

func (o *odp) call(number uintptr, off, n uint64, arg int) {
	o.tb.Helper()
	if _, _, errno := unix.Syscall(number, o.addr+uintptr(off), uintptr(n), uintptr(arg)); errno != 0 {
		o.tb.Fatal(errno)
	}
}

// write and read access the memory as a peer's WRITE and READ would.
func (o *odp) write(off uint64, data []byte) mem.Fault {
	dst := mem.List{Table: o.table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteWrite,
		SGEs: []ib.SGE{{Addr: uint64(o.addr) + off, Length: uint32(len(data)), LKey: o.region.Key()}}}
	return patiently(func() mem.Fault {
		f, _ := mem.Copy(&dst, &mem.List{Raw: [][]byte{data}}, uint64(len(data)), true)
		return f
	})
}

// patiently tries an access again when what it waits for is there, as queue
// pairs do.
func patiently(try func() mem.Fault) mem.Fault {
	f := try()
	for i := 0; f.Kind == mem.FaultPending && i < 100; i++ {
		if f = f.Await(); f.OK() {
			f = try()
		}
	}
	return f
}

func (o *odp) read(off, n uint64) ([]byte, mem.Fault) {
	b := make([]byte, n)
	src := mem.List{Table: o.table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteRead,
		SGEs: []ib.SGE{{Addr: uint64(o.addr) + off, Length: uint32(n), LKey: o.region.Key()}}}
	return b, patiently(func() mem.Fault {
		f, _ := mem.Copy(&mem.List{Raw: [][]byte{b}}, &src, n, false)
		return f
	})
}

func (o *odp) mustWrite(off uint64, data []byte) {
	o.tb.Helper()
	if f := o.write(off, data); !f.OK() {
		o.tb.Fatal(f)
	}
}

func (o *odp) mustRead(off uint64, want []byte) {
	o.tb.Helper()
	got, f := o.read(off, uint64(len(want)))
	if !f.OK() {
		o.tb.Fatal(f)
	}
	if !bytes.Equal(got, want) {
		o.tb.Fatalf("read %x, want %x", got[:min(16, len(got))], want[:min(16, len(want))])
	}
}

func (o *odp) mustFail(f mem.Fault, want mem.FaultKind) {
	o.tb.Helper()
	if f.Kind != want {
		o.tb.Fatalf("fault %v, want %v", f, want)
	}
}

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) + seed
	}
	return b
}

// stats compares the region's counters with what is wanted; the device's must be
// the same.
func (o *odp) stats(want ib.PagingStats) {
	o.tb.Helper()
	got := o.backing.Stats()
	if got != want {
		o.tb.Fatalf("counters\n%+v, want\n%+v", got, want)
	}
	dev := o.table.Paging().Stats()
	dev.MRs, dev.MRPages = 0, 0
	if dev != want {
		o.tb.Fatalf("the device's counters\n%+v, want\n%+v", dev, want)
	}
}

func needNotifier(t *testing.T) {
	t.Helper()
	if s := mem.PagingMeans(); s.Notifier != "userfaultfd" {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no notifier: %s", s.Notifier)
		}
		t.Skipf("no notifier: %s", s.Notifier)
	}
}

// Faults happen once, and the counters are exact for all changes that the kernel
// reports.
func TestOnDemandCounts(t *testing.T) {
	needNotifier(t)
	o := newODP(t, 64*page)
	data := pattern(4*page, 1)

	_, f := o.read(0, 8)
	o.mustFail(f, mem.FaultUnmapped)
	want := ib.PagingStats{PageFaults: 1, RemoteFaults: 1, FailedResolutions: 1}
	o.stats(want)

	o.mapAt(0, 64*page, readWrite, anonPages, -1)
	o.mustWrite(page/2, data) // touches five pages
	want.PageFaults, want.RemoteFaults, want.PageFaultPages = 2, 2, 5
	o.stats(want)
	for range 10 {
		o.mustWrite(page/2, data)
		o.mustRead(page/2, data)
	}
	o.stats(want) // no more faults

	o.call(unix.SYS_MADVISE, page, page, unix.MADV_DONTNEED)
	want.Invalidations, want.InvalidationPages = 1, 1
	o.stats(want)
	o.mustRead(page, make([]byte, page))
	want.PageFaults, want.RemoteFaults, want.PageFaultPages = 3, 3, 6
	o.stats(want)
	o.mustWrite(page, data[:8]) // was brought in for reading
	want.PageFaults, want.RemoteFaults, want.PageFaultPages = 4, 4, 7
	o.stats(want)

	o.unmap(0, 2*page)
	want.Invalidations, want.InvalidationPages = 2, 3
	o.stats(want)
	o.unmap(32*page, page) // nothing of it was present
	o.stats(want)
	o.mustFail(o.write(0, data[:8]), mem.FaultUnmapped)
}

// After every sort of change the device sees what the CPU would see.
func TestOnDemandSeesWhatTheCPUSees(t *testing.T) {
	const n = 16 * page
	old, other := pattern(n, 3), pattern(n, 5)
	file := func(t *testing.T, b []byte) int {
		name := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	zero := make([]byte, n)
	tests := []struct {
		name   string
		change func(t *testing.T, o *odp, fd int)
		want   []byte        // what is read then; nil: it fails
		write  mem.FaultKind // what writing gives
	}{
		{"nothing", func(*testing.T, *odp, int) {}, old, mem.FaultNone},
		{"munmap", func(_ *testing.T, o *odp, _ int) { o.unmap(0, n) }, nil, mem.FaultUnmapped},
		{"mmap anew", func(_ *testing.T, o *odp, _ int) { o.unmap(0, n); o.mapAt(0, n, readWrite, anonPages, -1) }, zero, mem.FaultNone},
		{"mmap over it", func(_ *testing.T, o *odp, _ int) { o.mapAt(0, n, readWrite, anonPages, -1) }, zero, mem.FaultNone},
		{"another file", func(t *testing.T, o *odp, _ int) { o.mapAt(0, n, readWrite, unix.MAP_SHARED, file(t, other)) }, other, mem.FaultNone},
		{"a file for reading", func(t *testing.T, o *odp, _ int) {
			o.mapAt(0, n, unix.PROT_READ, unix.MAP_SHARED, file(t, other))
		}, other, mem.FaultUnmapped},
		{"DONTNEED", func(_ *testing.T, o *odp, _ int) { o.call(unix.SYS_MADVISE, 0, n, unix.MADV_DONTNEED) }, old, mem.FaultNone}, // it is a file's
		{"read-only", func(_ *testing.T, o *odp, _ int) { o.call(unix.SYS_MPROTECT, 0, n, unix.PROT_READ) }, old, mem.FaultUnmapped},
		{"forbidden", func(_ *testing.T, o *odp, _ int) { o.call(unix.SYS_MPROTECT, 0, n, unix.PROT_NONE) }, nil, mem.FaultUnmapped},
		{"truncated", func(t *testing.T, _ *odp, fd int) {
			if err := unix.Ftruncate(fd, 0); err != nil {
				t.Fatal(err)
			}
		}, nil, mem.FaultUnmapped},
		{"punched", func(t *testing.T, _ *odp, fd int) {
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, n); err != nil {
				t.Fatal(err)
			}
		}, zero, mem.FaultNone},
		{"written", func(t *testing.T, _ *odp, fd int) {
			if _, err := unix.Pwrite(fd, other, 0); err != nil {
				t.Fatal(err)
			}
		}, other, mem.FaultNone},
		{"moved away", func(t *testing.T, o *odp, _ int) {
			to := mmap(t, -1, n, readWrite, anonPages)
			t.Cleanup(func() { _ = unix.Munmap(to) })
			if _, _, e := unix.Syscall6(unix.SYS_MREMAP, o.addr, n, n, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, addrOf(to), 0); e != 0 {
				t.Fatal(e)
			}
		}, nil, mem.FaultUnmapped},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			fd := file(t, old)
			o := newODP(t, n)
			o.mapAt(0, n, readWrite, unix.MAP_SHARED, fd)
			o.mustRead(0, old)
			o.mustWrite(0, old)
			test.change(t, o, fd)
			if test.want == nil {
				_, f := o.read(0, n)
				o.mustFail(f, mem.FaultUnmapped)
			} else {
				o.mustRead(0, test.want)
			}
			o.mustFail(o.write(0, other), test.write)
			if test.write == mem.FaultNone {
				o.mustRead(0, other)
			}
		})
	}
}

// A sweep finds changes that the kernel does not report, and counts them once.
func TestOnDemandSweep(t *testing.T) {
	const n = 16 * page
	fd := memfd(t, n)
	defer unix.Close(fd)
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, unix.MAP_SHARED, fd)
	o.mustWrite(0, pattern(n, 1))
	if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4*page, 4*page); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		mem.Sweep()
		s := o.backing.Stats()
		if s.Invalidations != 1 || s.InvalidationPages != 4 {
			t.Fatalf("%+v: want one invalidation of 4 pages", s)
		}
	}
	if got := o.backing.Present(); got != 12 {
		t.Fatalf("%d pages are present, want 12", got)
	}
	o.call(unix.SYS_MPROTECT, 0, 4*page, unix.PROT_READ)
	o.call(unix.SYS_MPROTECT, 8*page, 2*page, unix.PROT_NONE)
	for range 2 {
		mem.Sweep()
		s := o.backing.Stats()
		if s.Invalidations != 3 || s.InvalidationPages != 10 {
			t.Fatalf("%+v: want two more invalidations of 6 pages", s)
		}
	}
	if got := o.backing.Present(); got != 10 {
		t.Fatalf("%d pages are present, want 10", got)
	}
}

// A region may be far larger than memory, and registering it takes no time that
// depends on its size.
func TestOnDemandHuge(t *testing.T) {
	const n = 1 << 44
	table := mem.NewTable(mem.TableConfig{})
	b := mmap(t, -1, n, readWrite, anonPages)
	defer func() { _ = unix.Munmap(b) }()
	m, err := mem.NewOnDemand(addrOf(b), n, odpAccess, table.Paging())
	if err != nil {
		t.Fatal(err)
	}
	o := &odp{tb: t, table: table, backing: m, addr: addrOf(b), size: n}
	if o.region, err = table.Register(mem.RegionConfig{PD: 1, Access: odpAccess, IOVA: uint64(o.addr), Length: n, Backing: m}); err != nil {
		t.Fatal(err)
	}
	for _, off := range []uint64{0, 1 << 30, 1<<30 - 8, 1 << 40, n - 64} {
		data := pattern(64, byte(off>>30))
		o.mustWrite(off, data)
		if !bytes.Equal(b[off:off+64], data) {
			t.Fatalf("at %#x: not what was written", off)
		}
		o.mustRead(off, data)
	}
	if s := table.Paging().Stats(); s.MRs != 1 || s.MRPages != n/page {
		t.Fatalf("%+v", s)
	}
	if err := o.region.Close(); err != nil {
		t.Fatal(err)
	}
	if s := table.Paging().Stats(); s.MRs != 0 || s.MRPages != 0 {
		t.Fatalf("after Close: %+v", s)
	}
}

// While mappings come and go, accesses either work or fault, and nothing else
// happens; afterwards everything works.
func TestOnDemandStorm(t *testing.T) {
	const n = 64 * page
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, anonPages, -1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		stop := time.Now().Add(300 * time.Millisecond)
		for i := uint64(0); time.Now().Before(stop); i++ {
			off := i * 5 % 60 * page
			switch i % 5 {
			case 0:
				o.unmap(off, 4*page)
			case 1:
				o.mapAt(off, 4*page, readWrite, anonPages, -1)
			case 2:
				unix.Syscall(unix.SYS_MPROTECT, o.addr+uintptr(off), 4*page, unix.PROT_READ)
			case 3:
				unix.Syscall(unix.SYS_MADVISE, o.addr+uintptr(off), 4*page, unix.MADV_DONTNEED)
			case 4:
				o.mapAt(0, n, readWrite, anonPages, -1)
			}
		}
	}()
	data, ok, faults := pattern(3*page, 9), 0, map[mem.FaultKind]int{}
	for i := uint64(0); ; i++ {
		var f mem.Fault
		if off := i * 7 % 61 * page; i%2 == 0 {
			f = o.write(off, data)
		} else {
			_, f = o.read(off, 3*page)
		}
		switch f.Kind {
		case mem.FaultNone:
			ok++
		case mem.FaultUnmapped, mem.FaultPending:
			faults[f.Kind]++
			_ = f.Await()
		default:
			t.Fatal(f)
		}
		select {
		case <-done:
			o.mapAt(0, n, readWrite, anonPages, -1)
			o.mustWrite(0, pattern(n, 2))
			o.mustRead(0, pattern(n, 2))
			t.Logf("%d accesses worked, faults %v, %+v", ok, faults, o.backing.Stats())
			if ok == 0 {
				t.Fatal("none worked")
			}
			return
		default:
		}
	}
}

// prefetch is a call that prefetches a part of the region.
func (o *odp) prefetch(off, n uint64, write, noFault bool) mem.FaultKind {
	f := mem.Prefetch{Parts: []mem.Part{{Region: o.region, Key: o.region.Key(), Off: off, N: n}}, Write: write, NoFault: noFault}
	_, kind := f.Do(true)
	return kind
}

func TestPrefetch(t *testing.T) {
	const n = 64 * page
	for _, test := range []struct {
		name           string
		write, noFault bool
		touch          uint64 // pages that are in memory before
		want           uint64 // pages brought in
		faults         uint64 // of a write to all of it afterwards
	}{
		{"read", false, false, 0, 64, 1},
		{"write", true, false, 0, 64, 0},
		{"no fault", false, true, 10, 10, 1},
		{"no fault, nothing there", false, true, 0, 0, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			o := newODP(t, n)
			o.mapAt(0, n, readWrite, anonPages, -1)
			for p := range test.touch {
				memoryAt(o.addr+uintptr(p*page), page)[0] = 1
			}
			if kind := o.prefetch(0, n, test.write, test.noFault); kind != mem.FaultNone {
				t.Fatal(kind)
			}
			s := o.backing.Stats()
			if s.Prefetches != 1 || s.PrefetchPages != test.want || s.PageFaults != 0 {
				t.Fatalf("%+v, want %d pages", s, test.want)
			}
			o.mustWrite(0, pattern(n, 4))
			if s := o.backing.Stats(); s.PageFaults != test.faults {
				t.Fatalf("%d page faults after it, want %d", s.PageFaults, test.faults)
			}
		})
	}
	t.Run("not mapped", func(t *testing.T) {
		o := newODP(t, n)
		o.mapAt(0, 8*page, readWrite, anonPages, -1)
		if kind := o.prefetch(0, n, false, false); kind != mem.FaultUnmapped {
			t.Fatal(kind)
		}
		if s := o.backing.Stats(); s.Prefetches != 0 || s.PrefetchPages != 8 {
			t.Fatalf("%+v", s)
		}
	})
}

func BenchmarkOnDemand(b *testing.B) {
	for _, size := range []int{64, page, 16 * page} {
		for _, kind := range []string{"pinned", "on-demand", "in doubt", "implicit"} {
			b.Run(fmt.Sprintf("%s/%d", kind, size), func(b *testing.B) {
				buf := mmap(b, -1, 1<<20, readWrite, anonPages)
				defer func() { _ = unix.Munmap(buf) }()
				table := mem.NewTable(mem.TableConfig{})
				access := odpAccess
				cfg := mem.RegionConfig{PD: 1, IOVA: uint64(addrOf(buf)), Length: 1 << 20}
				var err error
				switch kind {
				case "pinned":
					access &^= ib.AccessOnDemand
					cfg.Backing, err = mem.NewHost(addrOf(buf), 1<<20, access, ib.LockOff, nil)
				case "on-demand", "in doubt":
					cfg.Backing, err = mem.NewOnDemand(addrOf(buf), 1<<20, access, table.Paging())
				case "implicit":
					cfg.Backing, err = mem.NewImplicit(access, table.Paging())
					cfg.IOVA, cfg.Length = 0, 1<<47
				}
				if err != nil {
					b.Fatal(err)
				}
				cfg.Access = access
				r, err := table.Register(cfg)
				if err != nil {
					b.Fatal(err)
				}
				defer r.Close()
				src := make([]byte, size)
				dst := mem.List{Table: table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteWrite,
					SGEs: []ib.SGE{{Addr: uint64(addrOf(buf)) + 64, Length: uint32(size), LKey: r.Key()}}}
				from := mem.List{Raw: [][]byte{src}}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				if kind == "in doubt" {
					mem.Doubt()
				} else {
					mem.NoDoubt()
				}
				defer mem.NoDoubt()
				for b.Loop() {
					if f, _ := mem.Copy(&dst, &from, uint64(size), true); !f.OK() {
						b.Fatal(f)
					}
				}
			})
		}
	}
}

// BenchmarkOnDemandFault is the cost of one absent page.
func BenchmarkOnDemandFault(b *testing.B) {
	o := newODP(b, 1<<30)
	o.mapAt(0, 1<<30, readWrite, anonPages, -1)
	data := make([]byte, 8)
	off := uint64(0)
	for b.Loop() {
		if f := o.write(off, data); !f.OK() {
			b.Fatal(f)
		}
		if off += page; off == o.size {
			b.StopTimer()
			o.mapAt(0, 1<<30, readWrite, anonPages, -1)
			off = 0
			b.StartTimer()
		}
	}
}
