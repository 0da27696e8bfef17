package sys

import (
	"errors"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestMappedIn(t *testing.T) {
	const maps = `00010000-00020000 r-xp 00000000 fe:00 123 /bin/program
00020000-00030000 r--p 00000000 00:00 0
00030000-00040000 rw-p 00000000 00:00 0 [heap]
00040000-00050000 ---p 00000000 00:00 0
00060000-00070000 rw-s 00000000 00:00 0
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
`
	for _, c := range []struct {
		start, end  uintptr
		read, write bool
	}{
		{0x10000, 0x20000, true, false},
		{0x30000, 0x40000, true, true},
		{0x31000, 0x32000, true, true},
		{0x10000, 0x40000, true, false},
		{0x2f000, 0x31000, true, false},
		{0x30000, 0x41000, false, false},
		{0x40000, 0x41000, false, false},
		{0x50000, 0x51000, false, false},
		{0x5f000, 0x61000, false, false},
		{0x60000, 0x71000, false, false},
		{0x6f000, 0x70000, true, true},
		{0x80000, 0x81000, false, false},
		{0, 0x1000, false, false},
		{0xffffffffff600000, 0xffffffffff601000, false, false},
	} {
		for write, want := range map[bool]bool{false: c.read, true: c.write} {
			got, err := mappedIn(strings.NewReader(maps), c.start, c.end, write)
			if err != nil || got != want {
				t.Errorf("%#x to %#x, write %v: %v, %v", c.start, c.end, write, got, err)
			}
		}
	}
	if _, err := mappedIn(strings.NewReader("what is this\n"), 0, 1, false); err == nil {
		t.Error("nonsense was understood")
	}
}

func TestPopulate(t *testing.T) {
	n := 8 * pageSize
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	addr := uintptr(unsafe.Pointer(&b[0]))
	for _, c := range []struct {
		name   string
		write  bool
		err    error
		mapped bool
	}{
		{"read", false, nil, true},
		{"write to a read-only mapping", true, unix.EINVAL, false},
	} {
		if err := Populate(addr+10, n-20, c.write); !errors.Is(err, c.err) {
			t.Errorf("%s: %v", c.name, err)
		}
		if mapped, err := Mapped(addr+10, n-20, c.write); mapped != c.mapped || err != nil {
			t.Errorf("%s: mapped %v, %v", c.name, mapped, err)
		}
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	if err := Populate(addr, n, false); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("unmapped: %v", err)
	}
}
