package sys

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A mapped file is as long as was asked for at least, zero, in one piece, and
// another mapping of it is the same memory.
func TestMappedFile(t *testing.T) {
	for _, size := range []int{1, 4096, 4097, hugePage - 1, hugePage, hugePage + 1, 3 * hugePage} {
		fd, b, err := NewMappedFile("test", size)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) < size || len(b) >= size+hugePage || !bytes.Equal(b, make([]byte, len(b))) {
			t.Errorf("%d bytes: %d", size, len(b))
		}
		if err := PopulateMapped(b); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: the kernel is too old
			t.Errorf("%d bytes: populating: %v", size, err)
		}
		if !bytes.Equal(b, make([]byte, len(b))) {
			t.Errorf("%d bytes: not zero after they were made present", size)
		}
		other, err := DupFD(fd)
		if err != nil {
			t.Fatal(err)
		}
		c, err := MapFile(other)
		if err != nil || len(c) != len(b) {
			t.Fatalf("%d bytes: %d, %v", size, len(c), err)
		}
		b[size-1] = 7
		c[0] = 8
		if size > 1 && (c[size-1] != 7 || b[0] != 8) {
			t.Errorf("%d bytes: the mappings differ", size)
		}
		if err := errors.Join(FreeMapped(b), CloseFD(fd)); err != nil {
			t.Error(err)
		}
		c[size-1]++ // it is still there
		if err := errors.Join(FreeMapped(c), CloseFD(other)); err != nil {
			t.Error(err)
		}
	}
	for _, size := range []int{0, -1} {
		if _, _, err := NewMappedFile("test", size); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	for _, size := range []int{maxInt, maxInt - 1, maxInt - hugePage} {
		if _, _, err := NewMappedFile("test", size); err == nil {
			t.Errorf("%d bytes were allocated", size)
		}
	}
}

// Files that could become shorter are refused, and so are those that are no memory files.
func TestMapFileRefuses(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := MapFile(fd); !errors.Is(err, unix.EPERM) {
		t.Errorf("a file without seals: %v", err)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := MapFile(int(f.Fd())); err == nil {
		t.Error("an ordinary file was mapped")
	}
	empty, err := NewMemfd("test", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseFD(empty)
	if _, err := MapFile(empty); !errors.Is(err, unix.EINVAL) {
		t.Errorf("an empty file: %v", err)
	}
	if _, err := MapFile(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("no file: %v", err)
	}
}
