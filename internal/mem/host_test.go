package mem_test

import (
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

const page = 4096

const anonymous = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS

var global [4 * page]byte

// anon maps anonymous memory for the time of a test.
func anon(t *testing.T, n uint64, prot int) []byte {
	t.Helper()
	b := mmap(t, -1, n, prot, anonymous)
	t.Cleanup(func() { unix.Munmap(b) }) // fails if the test has done it
	return b
}

func TestHostRefuses(t *testing.T) {
	hole := anon(t, 3*page, unix.PROT_READ|unix.PROT_WRITE)
	if err := unix.MunmapPtr(ptr(hole[page:]), page); err != nil {
		t.Fatal(err)
	}
	readOnly := anon(t, 2*page, unix.PROT_READ)
	none := anon(t, page, unix.PROT_NONE)
	fd := memfd(t, page)
	defer unix.Close(fd)
	file := mmap(t, fd, 3*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED) // one page of it exists
	defer unix.Munmap(file)
	object := make([]byte, 100)
	large := make([]byte, 1<<20)
	text := "constants are read-only"

	for _, c := range []struct {
		name   string
		addr   uintptr
		n      uint64
		access ib.Access
		errno  syscall.Errno
		says   string
	}{
		{"no bytes", addrOf(hole), 0, 0, syscall.EINVAL, "no bytes"},
		{"address 0", 0, 10, 0, syscall.EFAULT, "10 bytes at 0x0"},
		{"hole in the middle", addrOf(hole), 3 * page, 0, syscall.EFAULT, "readable"},
		{"hole at the end", addrOf(hole), page + 1, 0, syscall.EFAULT, "readable"},
		{"hole at the start", addrOf(hole) + 2*page - 1, 2, 0, syscall.EFAULT, "readable"},
		{"read-only mapping", addrOf(readOnly), page, ib.AccessLocalWrite, syscall.EFAULT, "writable"},
		{"forbidden mapping", addrOf(none), 1, 0, syscall.EFAULT, "readable"},
		{"behind the end of a file", addrOf(file), page + 1, 0, syscall.EFAULT, "readable"},
		{"behind the end of a file, to write", addrOf(file) + 2*page, 1, ib.AccessLocalWrite, syscall.EFAULT, "writable"},
		{"program text", strAddr(text), uint64(len(text)), ib.AccessLocalWrite, syscall.EFAULT, "writable"},
		{"end of the address space", ^uintptr(0) - 10, 20, 0, syscall.EFAULT, "memory of this process"},
		{"all of the address space", page, ^uint64(0), 0, syscall.EFAULT, "memory of this process"},
		{"half of the address space", addrOf(hole), 1 << 46, 0, syscall.EFAULT, "readable"},
		{"kernel", ^uintptr(0) - 1<<30, page, 0, syscall.EFAULT, "memory of this process"},
		{"Go heap, small object", addrOf(object), 100, 0, syscall.EINVAL, "register a []byte instead"},
		{"Go heap, inside a large object", addrOf(large) + 500_001, 300_000, 0, syscall.EINVAL, "register a []byte instead"},
		{"goroutine stack", stackAddr(), 8, 0, syscall.EINVAL, "register a []byte instead"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, lock := range []ib.LockMode{ib.LockOff, ib.LockAuto, ib.LockStrict} {
				h, err := mem.NewHost(c.addr, c.n, c.access, lock, nil)
				if err == nil {
					h.Close()
				}
				wantErrno(t, err, c.errno, c.says)
			}
		})
	}
	_, err := mem.NewHostBytes(nil, 0, ib.LockAuto)
	wantErrno(t, err, syscall.EINVAL, "no bytes")
	_, err = mem.NewHostBytes(object, 0, ib.LockStrict+1)
	wantErrno(t, err, syscall.EINVAL, "LockMode(3)")
	_, err = mem.NewHostBytes(object, 0, ib.LockStrict)
	wantErrno(t, err, syscall.EPERM, "Go heap")
	runtime.KeepAlive(object)
	runtime.KeepAlive(large)
}

// What is refused above is taken with less rights or fewer bytes.
func TestHostTakes(t *testing.T) {
	readOnly := anon(t, 2*page, unix.PROT_READ)
	fd := memfd(t, page)
	defer unix.Close(fd)
	file := mmap(t, fd, 3*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	defer unix.Munmap(file)
	text := "constants are read-only"
	stack := anon(t, page, unix.PROT_READ|unix.PROT_WRITE)
	for _, c := range []struct {
		name   string
		addr   uintptr
		n      uint64
		access ib.Access
	}{
		{"read-only mapping", addrOf(readOnly) + 1, 2*page - 1, 0},
		{"all of a file", addrOf(file), page, ib.AccessLocalWrite},
		{"program text", strAddr(text), uint64(len(text)), 0},
		{"global variable", addrOf(global[:]), uint64(len(global)), ib.AccessLocalWrite},
		{"one byte", addrOf(stack) + page - 1, 1, ib.AccessLocalWrite},
	} {
		h, err := mem.NewHost(c.addr, c.n, c.access, ib.LockAuto, nil)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !h.Locked() || h.LockNote() != "" || h.NeverFaults() || h.Addr() != c.addr || h.Len() != c.n {
			t.Errorf("%s: locked %v (%s), solid %v", c.name, h.Locked(), h.LockNote(), h.NeverFaults())
		}
		h.Close()
	}
}

// Memory is populated when it is registered, but not that of the Go heap.
func TestHostPopulates(t *testing.T) {
	const n = 64 * page
	b := anon(t, n, unix.PROT_READ|unix.PROT_WRITE)
	h, err := mem.NewHost(addrOf(b), n, ib.AccessLocalWrite, ib.LockOff, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if got := present(t, b); got != n/page {
		t.Errorf("%d of %d pages are present", got, n/page)
	}
	heap := make([]byte, 4<<20)
	inside := heap[page-addrOf(heap)%page:][:2<<20]
	if err := unix.Madvise(inside, unix.MADV_DONTNEED); err != nil { // they read as zero, as they did
		t.Fatal(err)
	}
	h, err = mem.NewHostBytes(heap, ib.AccessLocalWrite, ib.LockAuto)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if h.Locked() || h.LockNote() != "Go heap" || !h.NeverFaults() {
		t.Errorf("locked %v (%s), solid %v", h.Locked(), h.LockNote(), h.NeverFaults())
	}
	if got := present(t, inside); got != 0 {
		t.Errorf("%d pages of the Go heap have become present", got)
	}
	runtime.KeepAlive(heap)
}

// present counts the pages that are in memory.
func present(t *testing.T, b []byte) (n int) {
	t.Helper()
	start := -addrOf(b) % page
	b = b[start:]
	b = b[:len(b)/page*page]
	vec := make([]byte, len(b)/page)
	if err := mincore(b, vec); err != nil {
		t.Fatal(err)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

// lockedKB reads how much of this process is locked.
func lockedKB(t *testing.T) string {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmLck:"); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Fatal("no VmLck")
	return ""
}

// Overlapping regions share pages: a page stays locked until the last one that
// covers it is closed.
func TestHostLockCounts(t *testing.T) {
	b := anon(t, 8*page, unix.PROT_READ|unix.PROT_WRITE)
	if got := lockedKB(t); got != "0 kB" {
		t.Fatalf("%s are locked before the test", got)
	}
	lock := func(off, n uint64) *mem.Host {
		h, err := mem.NewHost(addrOf(b)+uintptr(off), n, ib.AccessLocalWrite, ib.LockStrict, nil)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	want := func(kb string) {
		t.Helper()
		if got := lockedKB(t); got != kb {
			t.Fatalf("%s are locked, should be %s", got, kb)
		}
	}
	x := lock(0, 4*page)
	want("16 kB")
	y := lock(2*page+100, 3*page) // reaches into a sixth page
	want("24 kB")
	z := lock(100, 1)
	want("24 kB")
	x.Close()
	want("20 kB") // pages 0 and 2 to 5
	z.Close()
	want("16 kB")
	x = lock(0, 8*page)
	want("32 kB")
	y.Close()
	want("32 kB")
	// Unmapped and mapped anew under the region: the new pages are locked when
	// they are registered, though a count was there for the old ones.
	if err := unix.MunmapPtr(ptr(b[page:]), page); err != nil {
		t.Fatal(err)
	}
	want("28 kB")
	if _, err := unix.MmapPtr(-1, 0, ptr(b[page:]), page, unix.PROT_READ|unix.PROT_WRITE, anonymous|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	y = lock(page, 10)
	want("32 kB")
	x.Close()
	want("4 kB")
	y.Close()
	want("0 kB")
	off, err := mem.NewHost(addrOf(b), page, 0, ib.LockOff, nil)
	if err != nil || off.Locked() || off.LockNote() != "off" {
		t.Fatalf("with locking off: %v, locked %v (%s)", err, off.Locked(), off.LockNote())
	}
	want("0 kB")
	off.Close()
}

// A program without privilege runs into its limit: with LockAuto the registration goes on
// and notes the limit, with LockStrict it fails.
func TestHostLockLimit(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)
	b := anon(t, 64*page, unix.PROT_READ|unix.PROT_WRITE)
	for _, c := range []struct {
		limit uint64
		errno syscall.Errno
		note  string
	}{
		{64 << 10, syscall.ENOMEM, "RLIMIT_MEMLOCK (64 KiB)"},
		{10_000, syscall.ENOMEM, "RLIMIT_MEMLOCK (10000 bytes)"},
		{0, syscall.EPERM, "RLIMIT_MEMLOCK (0 KiB)"},
	} {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: c.limit, Max: old.Max}); err != nil {
			t.Fatal(err)
		}
		unprivileged(t, func() {
			h, err := mem.NewHost(addrOf(b), 64*page, ib.AccessLocalWrite, ib.LockAuto, nil)
			if err != nil {
				t.Errorf("limit %d: %v", c.limit, err)
				return
			}
			if h.Locked() || h.LockNote() != c.note {
				t.Errorf("limit %d: locked %v (%s)", c.limit, h.Locked(), h.LockNote())
			}
			h.Close()
			_, err = mem.NewHost(addrOf(b), 64*page, ib.AccessLocalWrite, ib.LockStrict, nil)
			wantErrno(t, err, c.errno, c.note)
			if got := lockedKB(t); got != "0 kB" {
				t.Errorf("limit %d: %s are locked after failures", c.limit, got)
			}
		})
	}
}

// unprivileged runs f on a thread that may not exceed the limit, and ends the
// thread.
func unprivileged(t *testing.T, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocks: the thread ends with the goroutine
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		data[0].Effective &^= 1 << unix.CAP_IPC_LOCK
		if err := unix.Capset(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		f()
	}()
	<-done
}
