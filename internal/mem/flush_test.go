package mem_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

const flushRights = ib.AccessLocalWrite | ib.AccessRemoteWrite | ib.AccessFlush

// mapFile maps a new file of n bytes.
func mapFile(t *testing.T, n int) []byte {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "verbena") // /tmp may be memory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // the mapping keeps it
	if err := f.Truncate(int64(n)); err != nil {
		t.Fatal(err)
	}
	b := mmap(t, int(f.Fd()), uint64(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// dirty returns how many KiB of a mapping have not reached its file, by the kernel's
// account.
func dirty(t *testing.T, b []byte) (kib int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut("\n"+string(text), fmt.Sprintf("\n%08x-", addrOf(b)))
	if !ok {
		t.Fatalf("%#x is not in /proc/self/smaps", addrOf(b))
	}
	for _, name := range []string{"\nShared_Dirty:", "\nPrivate_Dirty:"} {
		_, line, ok := strings.Cut(rest, name)
		if !ok {
			t.Fatalf("no %s", name)
		}
		n := 0
		if _, err := fmt.Sscan(line, &n); err != nil {
			t.Fatal(err)
		}
		kib += n
	}
	return kib
}

func registerFile(t *testing.T, table *mem.Table, b []byte, access ib.Access) *mem.Region {
	t.Helper()
	h, err := mem.NewHost(addrOf(b), uint64(len(b)), access, ib.LockOff, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: access, IOVA: 0x1000, Length: uint64(len(b)), Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// What is made persistent has reached the file, and nothing else has.
func TestPersist(t *testing.T) {
	const size = 8 * page
	table := mem.NewTable(mem.TableConfig{})
	b := mapFile(t, size)
	r := registerFile(t, table, b, flushRights)
	spoil := func() {
		for i := 0; i < size; i += page {
			b[i]++
		}
		if got := dirty(t, b); got != size/1024 {
			t.Fatalf("%d KiB are dirty after all was written", got)
		}
	}
	for _, c := range []struct {
		name  string
		f     mem.FlushRange
		pages int // that reach the file
	}{
		{"whole", mem.FlushRange{Whole: true, Addr: 77}, 8},
		{"range", mem.FlushRange{Addr: 0x1000 + page, Len: 2 * page}, 2},
		{"odd range", mem.FlushRange{Addr: 0x1000 + 2*page - 1, Len: 2}, 2},
		{"one byte", mem.FlushRange{Addr: 0x1000 + size - 1, Len: 1}, 1},
		{"nothing", mem.FlushRange{Addr: 0x1000 + 5}, 0},
	} {
		spoil()
		c.f.Key, c.f.Acc = r.Key(), ib.AccessFlushPersistent
		if f := table.Flush(c.f, who); !f.OK() {
			t.Errorf("%s: %v", c.name, f)
		}
		if got := dirty(t, b); got != size/1024 {
			t.Errorf("%s: the check has written pages: %d KiB are dirty", c.name, got)
		}
		if f := table.Persist(c.f, who); !f.OK() {
			t.Errorf("%s: %v", c.name, f)
		}
		if got := dirty(t, b); got != size/1024-c.pages*page/1024 {
			t.Errorf("%s: %d KiB are dirty, %d pages should have been written", c.name, got, c.pages)
		}
		if f := table.Persist(mem.FlushRange{Key: r.Key(), Whole: true, Acc: ib.AccessFlushPersistent}, who); !f.OK() {
			t.Fatal(f)
		}
		if got := dirty(t, b); got != 0 {
			t.Fatalf("%d KiB are dirty after all was made persistent", got)
		}
	}
}

// A FLUSH is checked as every access is; one of nothing too.
func TestFlushFaults(t *testing.T) {
	const size = 4 * page
	table := mem.NewTable(mem.TableConfig{})
	b := mapFile(t, size)
	r := registerFile(t, table, b, flushRights)
	global := registerFile(t, table, b, ib.AccessFlushGlobal)
	plain := registerFile(t, table, b, ib.AccessLocalWrite|ib.AccessRemote)
	dead := registerFile(t, table, b, flushRights)
	_ = dead.Close()
	at := func(r *mem.Region, off, n uint64, acc ib.Access) mem.FlushRange {
		return mem.FlushRange{Key: r.Key(), Addr: r.IOVA() + off, Len: n, Acc: acc}
	}
	whole := func(r *mem.Region, acc ib.Access) mem.FlushRange {
		return mem.FlushRange{Key: r.Key(), Whole: true, Acc: acc}
	}
	for _, c := range []struct {
		name string
		f    mem.FlushRange
		who  mem.Actor
		want mem.FaultKind
	}{
		{"both", at(r, 0, size, ib.AccessFlush), who, mem.FaultNone},
		{"global", at(global, 0, size, ib.AccessFlushGlobal), who, mem.FaultNone},
		{"end", at(r, size, 0, ib.AccessFlush), who, mem.FaultNone},
		{"too long", at(r, 1, size, ib.AccessFlush), who, mem.FaultBounds},
		{"behind", at(r, size+1, 0, ib.AccessFlush), who, mem.FaultBounds},
		{"before", at(r, ^uint64(0), 0, ib.AccessFlush), who, mem.FaultBounds},
		{"not persistent", at(global, 0, 8, ib.AccessFlushPersistent), who, mem.FaultAccess},
		{"not both", at(global, 0, 8, ib.AccessFlush), who, mem.FaultAccess},
		{"not at all", at(plain, 0, 8, ib.AccessFlushGlobal), who, mem.FaultAccess},
		{"not at all, whole", whole(plain, ib.AccessFlushGlobal), who, mem.FaultAccess},
		{"other domain", whole(r, ib.AccessFlushGlobal), mem.Actor{PD: 2}, mem.FaultDomain},
		{"closed", whole(dead, ib.AccessFlushGlobal), who, mem.FaultKey},
		{"closed, of nothing", at(dead, 0, 0, ib.AccessFlushGlobal), who, mem.FaultKey},
	} {
		if f := table.Flush(c.f, c.who); f.Kind != c.want {
			t.Errorf("%s: %v, should be %v", c.name, f, c.want)
		}
		if c.f.Acc&ib.AccessFlushPersistent == 0 {
			continue
		}
		if f := table.Persist(c.f, c.who); f.Kind != c.want {
			t.Errorf("%s: Persist: %v, should be %v", c.name, f, c.want)
		}
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	if f := table.Persist(whole(r, ib.AccessFlushPersistent), who); f.Kind != mem.FaultStale {
		t.Errorf("unmapped: %v", f)
	}
}

// Memory that would not survive cannot be registered as if it did.
func TestPersistentRefused(t *testing.T) {
	const size = 4 * page
	refused := func(name string, err error) {
		t.Helper()
		if !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b := anon(t, size, unix.PROT_READ|unix.PROT_WRITE)
	_, err := mem.NewHost(addrOf(b), size, ib.AccessFlushPersistent, ib.LockOff, nil)
	refused("anonymous", err)
	_, err = mem.NewHostBytes(make([]byte, size), ib.AccessFlushPersistent, ib.LockOff)
	refused("Go heap", err)
	_, err = mem.NewTable(mem.TableConfig{}).Register(mem.RegionConfig{Access: ib.AccessFlushPersistent, Length: 8, Backing: host(t, size)})
	refused("a backing that was not asked", err)
	h, err := mem.NewHostBytes(make([]byte, size), ib.AccessFlushGlobal, ib.LockOff)
	if err != nil {
		t.Fatalf("global visibility: %v", err)
	}
	_ = h.Close()
}

// placed is memory that remembers what it was asked to bring to storage.
type placed struct {
	*mem.Host
	off, n uint64
}

func (*placed) Durable() bool { return true }

func (p *placed) Persist(off, n uint64) error {
	p.off, p.n = off, n
	return nil
}

// A FLUSH through a window is about the window's part of the memory, and needs a
// right that the region has too.
func TestFlushThroughWindow(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{})
	p := &placed{Host: host(t, 8192)}
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessMWBind | ib.AccessFlush, IOVA: 0x10000, Length: 8192, Backing: p})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	w, err := table.AllocWindow(1, ib.MWType1)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	bind := ib.MWBind{MW: w.Key(), RKey: w.NextKey(), LKey: r.Key(), Addr: 0x10000 + 1000, Length: 500, Access: ib.AccessFlushPersistent}
	if f := table.Bind(&bind, true, who); !f.OK() {
		t.Fatal(f)
	}
	for _, c := range []struct {
		name       string
		f          mem.FlushRange
		kind       mem.FaultKind
		start, len uint64
	}{
		{"a range", mem.FlushRange{Addr: 0x10000 + 1100, Len: 50}, mem.FaultNone, 1100, 50},
		{"all", mem.FlushRange{Whole: true}, mem.FaultNone, 1000, 500},
		{"beyond", mem.FlushRange{Addr: 0x10000 + 1400, Len: 101}, mem.FaultBounds, 0, 0},
	} {
		*p = placed{Host: p.Host}
		c.f.Key, c.f.Acc = w.Key(), ib.AccessFlushPersistent
		if f := table.Persist(c.f, who); f.Kind != c.kind || p.off != c.start || p.n != c.len {
			t.Errorf("%s: %v, %d bytes at %d", c.name, f, p.n, p.off)
		}
	}
	if f := table.Flush(mem.FlushRange{Key: w.Key(), Addr: 0x10000 + 1100, Len: 8, Acc: ib.AccessFlushGlobal}, who); f.Kind != mem.FaultAccess {
		t.Errorf("a right that the window does not grant: %v", f)
	}
	plain, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessMWBind, Length: 100, Backing: host(t, 100)})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	bind = ib.MWBind{MW: w.Key(), RKey: w.NextKey(), LKey: plain.Key(), Length: 100, Access: ib.AccessFlushGlobal}
	if f := table.Bind(&bind, true, who); f.Kind != mem.FaultAccess {
		t.Errorf("a right that the region does not grant: %v", f)
	}
}
