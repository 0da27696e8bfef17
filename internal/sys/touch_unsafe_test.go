package sys

import (
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A page that is touched is present; Touch reports a page that cannot be read.
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
		write      bool
	}{
		{"anonymous", -1, unix.PROT_READ | unix.PROT_WRITE, 0, nil, true, true},
		{"read only", -1, unix.PROT_READ, 0, nil, true, false},
		{"not accessible", -1, unix.PROT_READ | unix.PROT_WRITE, 0, none, false, false},
		{"file", int(file.Fd()), unix.PROT_READ | unix.PROT_WRITE, 0, nil, true, true},
		{"behind the end of the file", int(file.Fd()), unix.PROT_READ | unix.PROT_WRITE, page, nil, false, false},
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
			if Touch(at, true) != c.write {
				t.Errorf("it can be written: %v", !c.write)
			}
			if Touch(at, false) != c.read {
				t.Errorf("it can be read: %v", !c.read)
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
	for _, write := range []bool{false, true} {
		if Touch(uintptr(page), write) {
			t.Error("nothing is mapped there")
		}
	}
}

// A page that was touched for writing is written without another page fault.
func TestTouchSparesFault(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	faults := func() int64 {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
			t.Fatal(err)
		}
		return u.Minflt + u.Majflt
	}
	const n = 64
	a := mapPages(t, n, readWrite, unix.MAP_PRIVATE)
	b := bytesAt(a, a+n*pageSize)
	store := func() (taken int64) {
		before := faults()
		for i := range uintptr(n) {
			b[i*pageSize] = 1
		}
		return faults() - before
	}
	for i := range uintptr(n) {
		if !Touch(a+i*pageSize, true) {
			t.Fatal("not there")
		}
	}
	if k := store(); k > n/8 { // the thread's own may be among them
		t.Errorf("%d page faults on %d pages", k, n)
	}
}

// Touching changes no word, whatever its value, also while another thread changes it.
func TestTouchKeeps(t *testing.T) {
	a := mapPages(t, 1, readWrite, unix.MAP_PRIVATE)
	word := (*atomic.Uint32)(unsafe.Pointer(&bytesAt(a, a+4)[0]))
	for _, value := range []uint32{0, 1, 1<<32 - 2048, 1<<32 - 1} {
		word.Store(value)
		for _, write := range []bool{false, true} {
			if !Touch(a, write) || word.Load() != value {
				t.Errorf("%#x has become %#x", value, word.Load())
			}
		}
	}
	word.Store(0)
	const adds = 100_000
	var done sync.WaitGroup
	done.Go(func() {
		for range adds {
			word.Add(1)
		}
	})
	for word.Load() < adds && Touch(a, true) {
	}
	done.Wait()
	if got := word.Load(); got != adds {
		t.Errorf("%d of %d additions", got, adds)
	}
}
