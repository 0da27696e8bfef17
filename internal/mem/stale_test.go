package mem_test

import (
	"bytes"
	"runtime"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

var who = mem.Actor{PD: 1}

// Memory that is gone gives a fault and never ends the program: whatever made
// it go, on whichever side it is, wherever in the copy it begins.
func TestStale(t *testing.T) {
	const size = 8 * page
	type gone struct {
		name  string
		reads bool // it can still be read
		make  func(t *testing.T) (b []byte, vanish func() error)
	}
	anonymously := func(vanish func(b []byte) error) func(t *testing.T) ([]byte, func() error) {
		return func(t *testing.T) ([]byte, func() error) {
			b := anon(t, size, unix.PROT_READ|unix.PROT_WRITE)
			return b, func() error { return vanish(b) }
		}
	}
	for _, g := range []gone{
		{"unmapped", false, anonymously(func(b []byte) error { return unix.MunmapPtr(ptr(b[4*page:]), page) })},
		{"forbidden", false, anonymously(func(b []byte) error { return unix.Mprotect(b[4*page:5*page], unix.PROT_NONE) })},
		{"read-only", true, anonymously(func(b []byte) error { return unix.Mprotect(b[4*page:5*page], unix.PROT_READ) })},
		{"truncated", false, func(t *testing.T) ([]byte, func() error) {
			fd := memfd(t, size)
			b := mmap(t, fd, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			t.Cleanup(func() { unix.Munmap(b); unix.Close(fd) })
			return b, func() error { return unix.Ftruncate(fd, 4*page) }
		}},
	} {
		t.Run(g.name, func(t *testing.T) {
			table := mem.NewTable(mem.TableConfig{})
			b, vanish := g.make(t)
			h, err := mem.NewHost(addrOf(b), size, ib.AccessLocalWrite, ib.LockOff, nil)
			if err != nil {
				t.Fatal(err)
			}
			r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, IOVA: 0x1000, Length: size, Backing: h})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			good, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: size, Backing: host(t, size)})
			if err != nil {
				t.Fatal(err)
			}
			defer good.Close()
			if err := vanish(); err != nil {
				t.Fatal(err)
			}
			mem.Sweep() // or an access may end in FaultPending until the change is applied
			goodList := &mem.List{Table: table, Actor: who, SGEs: []ib.SGE{{Length: size, LKey: good.Key()}}}
			faults := uint64(0)
			for _, c := range []struct{ off, n uint64 }{
				{4 * page, 8}, {4*page + 1, 3}, {4*page + 5, 1}, {4*page + 4, 4}, {4*page - 1, 2}, {3 * page, 2 * page}, {4*page - 100, 200}, {0, size}, {4*page - 8, 16},
			} {
				for _, last := range []bool{false, true} {
					l := &mem.List{Table: table, Actor: who, Access: ib.AccessLocalWrite, SGEs: []ib.SGE{{Addr: 0x1000 + c.off, Length: uint32(c.n), LKey: r.Key()}}}
					for _, other := range []*mem.List{goodList, {Raw: [][]byte{make([]byte, size)}}} {
						f, side := mem.Copy(l, other, c.n, last)
						if f.Kind != mem.FaultStale || side != mem.Dst || f.Key != r.Key() || f.Addr != 0x1000+c.off || f.Len != c.n {
							t.Fatalf("copy of %d bytes to %d, last %v: %v: %v", c.n, c.off, last, side, f)
						}
						faults++
						f, side = mem.Copy(other, l, c.n, last)
						if g.reads && f.OK() {
							continue
						}
						if f.Kind != mem.FaultStale || side != mem.Src || f.Key != r.Key() {
							t.Fatalf("copy of %d bytes from %d, last %v: %v: %v", c.n, c.off, last, side, f)
						}
						faults++
					}
				}
			}
			for _, op := range []mem.AtomicOp{mem.CmpSwap, mem.FetchAdd} {
				if g.reads && mem.RaceEnabled {
					break // the detector's own code does the store there
				}
				if _, f := mem.Atomic(table, who, r.Key(), 0x1000+4*page, op, 0, 1); f.Kind != mem.FaultStale {
					t.Fatalf("atomic: %v", f)
				}
				faults++
			}
			if got := table.StaleFaults(); got != faults {
				t.Errorf("%d stale faults were counted of %d", got, faults)
			}
			// What is still there still works, and the setting is as it was.
			l := &mem.List{Table: table, Actor: who, Access: ib.AccessLocalWrite, SGEs: []ib.SGE{{Addr: 0x1000, Length: 100, LKey: r.Key()}}}
			if f, _ := mem.Copy(l, &mem.List{Raw: [][]byte{bytes.Repeat([]byte{7}, 100)}}, 100, true); !f.OK() || b[99] != 7 {
				t.Errorf("the rest of the region: %v", f)
			}
			if debug.SetPanicOnFault(false) {
				t.Error("faults are left to panic")
			}
		})
	}
}

// What is mapped anew, or emptied, where pinned memory was is never touched: the
// pages of registration time are gone for good.
func TestStalePinned(t *testing.T) {
	needNotifier(t)
	const n = 8 * page
	for _, test := range []struct {
		name   string
		change func(o *odp)
	}{
		{"mapped anew", func(o *odp) { o.unmap(2*page, page); o.mapAt(2*page, page, readWrite, anonPages, -1) }},
		{"mapped over", func(o *odp) { o.mapAt(2*page, page, readWrite, anonPages, -1) }},
		{"discarded", func(o *odp) { o.call(unix.SYS_MADVISE, 2*page, page, unix.MADV_DONTNEED) }},
		{"mapped over, after more changes than are kept", func(o *odp) {
			manyChanges(t)
			o.mapAt(2*page, page, readWrite, anonPages, -1)
		}},
		{"unmapped, after more changes than are kept, then mapped", func(o *odp) {
			manyChanges(t)
			o.unmap(2*page, page)
			o.mustFail(o.write(2*page, pattern(8, 2)), mem.FaultStale)
			o.mapAt(2*page, page, readWrite, anonPages, -1)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			const access = ib.AccessLocalWrite | ib.AccessRemote
			o := &odp{tb: t, table: mem.NewTable(mem.TableConfig{}), addr: nextODP, size: n}
			nextODP += 4 << 20
			o.mapAt(0, n, readWrite, anonPages, -1)
			defer o.unmap(0, n)
			h, err := mem.NewHost(o.addr, n, access, ib.LockOff, nil)
			if err != nil {
				t.Fatal(err)
			}
			if o.region, err = o.table.Register(mem.RegionConfig{PD: 1, Access: access, IOVA: uint64(o.addr), Length: n, Backing: h}); err != nil {
				t.Fatal(err)
			}
			defer o.region.Close()
			o.mustWrite(0, pattern(n, 1))
			test.change(o)
			for range 2 {
				o.mustFail(o.write(2*page, pattern(8, 2)), mem.FaultStale)
				o.mustFail(o.write(0, pattern(n, 2)), mem.FaultStale)
				_, f := o.read(3*page-8, 16)
				o.mustFail(f, mem.FaultStale)
			}
			o.mustRead(3*page, pattern(n, 1)[3*page:])
			o.mustWrite(0, pattern(2*page, 3))
			o.mustRead(0, pattern(2*page, 3))

			// A new registration gets what is there now.
			h2, err := mem.NewHost(o.addr, n, access, ib.LockOff, nil)
			if err != nil {
				t.Fatal(err)
			}
			again, err := o.table.Register(mem.RegionConfig{PD: 1, Access: access, IOVA: uint64(o.addr), Length: n, Backing: h2})
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			o2 := &odp{tb: t, table: o.table, region: again, addr: o.addr, size: n}
			o2.mustRead(2*page, make([]byte, page))
		})
	}
}

// manyChanges makes changes of other pinned memory, more than the notifier keeps
// until they are taken.
func manyChanges(t *testing.T) {
	t.Helper()
	b := anon(t, page, unix.PROT_READ|unix.PROT_WRITE)
	h, err := mem.NewHost(uintptr(sys.AddrOf(b)), page, ib.AccessLocalWrite, ib.LockOff, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for range 5000 {
		if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
	}
}

// A panic that is not about the memory is raised again.
func TestStaleIsNotEveryPanic(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{})
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: 8, Backing: broken{}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("the panic was lost")
		}
	}()
	mem.Copy(&mem.List{Table: table, Actor: who, SGEs: []ib.SGE{{Length: 8, LKey: r.Key()}}}, &mem.List{Raw: [][]byte{make([]byte, 8)}}, 8, false)
}

// broken is a backing with a bug: it returns neither bytes nor a fault.
type broken struct{}

func (broken) Kind() mem.Kind                                        { return mem.KindPinned }
func (broken) Len() uint64                                           { return 8 }
func (broken) Close() error                                          { return nil }
func (broken) Run(uint64, uint64, ib.Access) ([]byte, mem.FaultKind) { return nil, mem.FaultNone }

// Memory of System V that a program has detached is still the region's, and what is mapped
// there next is not; the segment lasts until the region is closed.
func TestSysVDetached(t *testing.T) {
	testSysVDetached(t)
	// The first segment of all has the number 0.
	t.Run("the first", func(t *testing.T) {
		runtime.LockOSThread() // and the thread ends with the test
		if err := unix.Unshare(unix.CLONE_NEWIPC); err != nil {
			t.Skipf("kernel: %v", err)
		}
		testSysVDetached(t)
	})
}

func testSysVDetached(t *testing.T) {
	const n = 8192
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, n, unix.IPC_CREAT|0o600)
	if err != nil {
		t.Skipf("kernel: %v", err)
	}
	b, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	seen, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err != nil {
		t.Fatal(err)
	}
	table := mem.NewTable(mem.TableConfig{})
	h, err := mem.NewHost(addrOf(b)+100, n-200, ib.AccessLocalWrite, ib.LockOff, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, Length: n - 200, Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	addr := addrOf(b)
	if err := unix.SysvShmDetach(b); err != nil {
		t.Fatal(err)
	}
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0); errno != 0 {
		t.Fatal(errno)
	}
	defer unix.Syscall(unix.SYS_MUNMAP, addr, n, 0)
	msg := bytes.Repeat([]byte{'w'}, n-200)
	l := &mem.List{Table: table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteWrite, SGEs: []ib.SGE{{Length: n - 200, LKey: r.Key()}}}
	if f, side := mem.Copy(l, &mem.List{Raw: [][]byte{msg}}, n-200, true); !f.OK() {
		t.Fatal(side, f)
	}
	if !bytes.Equal(seen[100:n-100], msg) || seen[99] != 0 || seen[n-100] != 0 {
		t.Error("the segment has other bytes")
	}
	next := make([]byte, n)
	if f, side := mem.Copy(&mem.List{Raw: [][]byte{next[:n-200]}}, &mem.List{Table: table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteRead, SGEs: l.SGEs}, n-200, true); !f.OK() || !bytes.Equal(next[:n-200], msg) {
		t.Errorf("READ: %v: %v", side, f)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := unix.SysvShmDetach(seen); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.SysvShmCtl(id, unix.IPC_STAT, new(unix.SysvShmDesc)); err == nil {
		t.Error("the segment is still there: an attachment is left")
	}
}
