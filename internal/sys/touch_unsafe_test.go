package sys

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A page that is touched is there; what cannot be read is told.
func TestTouch(t *testing.T) {
	page := os.Getpagesize()
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err == nil {
		err = file.Truncate(int64(page))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	none := func(b []byte) error { return unix.Mprotect(b, unix.PROT_NONE) }
	for _, c := range []struct {
		name       string
		file       int
		protection int
		off        int
		then       func(b []byte) error
		read       bool
	}{
		{"anonymous", -1, unix.PROT_READ | unix.PROT_WRITE, 0, nil, true},
		{"read only", -1, unix.PROT_READ, 0, nil, true},
		{"not accessible", -1, unix.PROT_READ | unix.PROT_WRITE, 0, none, false},
		{"file", int(file.Fd()), unix.PROT_READ | unix.PROT_WRITE, 0, nil, true},
		{"behind the end of the file", int(file.Fd()), unix.PROT_READ | unix.PROT_WRITE, page, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			flags := unix.MAP_SHARED
			if c.file < 0 {
				flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
			}
			b, err := unix.Mmap(c.file, 0, 2*page, c.protection, flags)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Munmap(b)
			if c.then != nil {
				if err := c.then(b); err != nil {
					t.Fatal(err)
				}
			}
			at := uintptr(unsafe.Pointer(&b[c.off]))
			if Touch(at) != c.read {
				t.Errorf("it is there: %v", !c.read)
			}
			if !c.read {
				return
			}
			resident := make([]byte, 1)
			if err := mincore(at&^uintptr(page-1), at+1, resident); err != nil {
				t.Fatal(err)
			}
			if resident[0]&1 == 0 || b[c.off] != 0 {
				t.Errorf("resident: %v, the word begins with %d", resident, b[c.off])
			}
		})
	}
	if Touch(uintptr(page)) {
		t.Error("nothing is mapped there")
	}
}
