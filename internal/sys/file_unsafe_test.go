package sys

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestDurableIn(t *testing.T) {
	const maps = `00010000-00020000 rw-s 00000000 fe:00 123                                /data/one
00020000-00030000 r--s 00010000 fe:00 123                                /data/a file with spaces
00030000-00040000 rw-p 00000000 fe:00 124                                /data/private
00040000-00050000 rw-p 00000000 00:00 0                                  [heap]
00050000-00060000 rw-s 00000000 00:01 7                                  /memfd:x (deleted)
00060000-00070000 rw-s 00000000 fe:00 125                                /data/gone (deleted)
00070000-00080000 rw-s 00000000 00:19 9                                  /dev/shm/x
00080000-00090000 rw-p 00000000 00:00 0
000a0000-000b0000 rw-s 00000000 fe:00 126                                /data/line\012end
`
	volatile := func(name string) string {
		switch {
		case strings.HasPrefix(name, "/dev/shm"):
			return "in memory"
		case !strings.HasPrefix(name, "/data/") || strings.Contains(name, `\`):
			return "unexpected name " + name
		}
		return ""
	}
	for _, c := range []struct {
		start, end uintptr
		why        string // a part of it
	}{
		{0x10000, 0x20000, ""},
		{0x11000, 0x2f000, ""},
		{0xa0000, 0xb0000, ""},
		{0x10000, 0x31000, "private"},
		{0x40000, 0x41000, "not a mapped file"},
		{0x80000, 0x81000, "not a mapped file"},
		{0x50000, 0x60000, "deleted"},
		{0x60000, 0x61000, "deleted"},
		{0x70000, 0x71000, "in memory"},
		{0x90000, 0x91000, "not all of it is mapped"},
		{0xa0000, 0xc0000, "not all of it is mapped"},
	} {
		why, err := durableIn(strings.NewReader(maps), c.start, c.end, volatile)
		if err != nil || (why == "") != (c.why == "") || !strings.Contains(why, c.why) {
			t.Errorf("%#x to %#x: %q, %v, should be %q", c.start, c.end, why, err, c.why)
		}
	}
	if _, err := durableIn(strings.NewReader("what is this\n"), 0, 1, volatile); err == nil {
		t.Error("nonsense was understood")
	}
}

// diskDir makes a directory that is not in memory, as /tmp may be.
func diskDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "verbena")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// TestDurable asks about mappings of this process.
func TestDurable(t *testing.T) {
	n := int(4 * pageSize)
	mapped := func(fd int, flags int) []byte {
		b, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, flags)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Munmap(b) })
		return b
	}
	file := func(dir string) *os.File {
		f, err := os.Create(filepath.Join(dir, "file"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		if err := f.Truncate(int64(n)); err != nil {
			t.Fatal(err)
		}
		return f
	}
	disk := file(diskDir(t))
	memory, err := os.MkdirTemp("/dev/shm", "verbena")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(memory) })
	shm := file(memory)
	memfd, err := unix.MemfdCreate("x", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(memfd) }()
	if err := unix.Ftruncate(memfd, int64(n)); err != nil {
		t.Fatal(err)
	}
	gone := file(diskDir(t))
	onGone := mapped(int(gone.Fd()), unix.MAP_SHARED)
	if err := os.Remove(gone.Name()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		b    []byte
		good bool
	}{
		{"file", mapped(int(disk.Fd()), unix.MAP_SHARED), true},
		{"private", mapped(int(disk.Fd()), unix.MAP_PRIVATE), false},
		{"anonymous", mapped(-1, unix.MAP_SHARED|unix.MAP_ANONYMOUS), false},
		{"tmpfs", mapped(int(shm.Fd()), unix.MAP_SHARED), false},
		{"memfd", mapped(memfd, unix.MAP_SHARED), false},
		{"deleted", onGone, false},
	} {
		why, err := Durable(uintptr(unsafe.Pointer(&c.b[0])), uintptr(n))
		if err != nil || (why == "") != c.good {
			t.Errorf("%s: %q, %v", c.name, why, err)
		}
	}
}

func TestSyncFile(t *testing.T) {
	f, err := os.Create(filepath.Join(diskDir(t), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	n := int(4 * pageSize)
	if err := f.Truncate(int64(n)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	addr := uintptr(unsafe.Pointer(&b[0]))
	b[5] = 1
	if err := SyncFile(addr+5, 1); err != nil {
		t.Errorf("a mapped file: %v", err)
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	if err := SyncFile(addr, uintptr(n)); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("what is not mapped: %v", err)
	}
}

func TestHoldFile(t *testing.T) {
	open := func(name string) *os.File {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	dir := t.TempDir()
	a, b, other := open(filepath.Join(dir, "x")), open(filepath.Join(dir, "x")), open(filepath.Join(dir, "y"))
	idA, heldA, err := HoldFile(a)
	if err != nil {
		t.Fatal(err)
	}
	idB, heldB, err := HoldFile(b)
	if err != nil {
		t.Fatal(err)
	}
	idOther, heldOther, err := HoldFile(other)
	if err != nil {
		t.Fatal(err)
	}
	if idA != idB || idA == idOther {
		t.Errorf("%v and %v are one file, %v is another", idA, idB, idOther)
	}
	// A file that is held stays the only one with its number.
	_, _ = a.Close(), b.Close()
	if err := os.Remove(filepath.Join(dir, "x")); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		id, held, err := HoldFile(open(filepath.Join(dir, "z"+string(rune('a'+i)))))
		if err != nil {
			t.Fatal(err)
		}
		if id == idA {
			t.Error("a new file has the number of one that is held")
		}
		_ = held.Close()
	}
	for _, h := range []interface{ Close() error }{heldA, heldB, heldOther} {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := HoldFile(a); err == nil {
		t.Error("a closed file is held")
	}
}
