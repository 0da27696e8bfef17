package goheap

import (
	"runtime"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	global   [64]byte
	pointers [8]*int
)

func addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

//go:noinline
func onStack() uintptr {
	var x [64]byte
	return uintptr(unsafe.Pointer(&x))
}

// onOtherStack returns an address on the stack of a goroutine that lives on
// until the test ends, and has grown.
func onOtherStack(t *testing.T) uintptr {
	where, stop := make(chan uintptr), make(chan struct{})
	done := make(chan struct{})
	var grow func(n int)
	grow = func(n int) {
		if n > 0 {
			var x [1 << 10]byte
			grow(n - 1)
			runtime.KeepAlive(&x)
			return
		}
		var x [64]byte
		where <- uintptr(unsafe.Pointer(&x))
		<-stop
		runtime.KeepAlive(&x)
	}
	go func() { grow(100); close(done) }()
	t.Cleanup(func() { close(stop); <-done })
	return <-where
}

func TestContains(t *testing.T) {
	const pages = 1 << 20
	mapped, err := unix.Mmap(-1, 0, pages, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	tiny, small, large := make([]byte, 1), make([]byte, 100), make([]byte, 100<<20)
	withPointers := make([]*int, 1000)
	for _, c := range []struct {
		name string
		addr uintptr
		want bool
	}{
		{"tiny object", addr(tiny), true},
		{"small object", addr(small) + 50, true},
		{"large object", addr(large), true},
		{"inside a large object", addr(large) + 77<<20, true},
		{"end of a large object", addr(large) + 100<<20 - 1, true},
		{"object with pointers", uintptr(unsafe.Pointer(&withPointers[500])), true},
		{"stack", onStack(), true},
		{"another stack", onOtherStack(t), true},
		{"global variable", addr(global[:]), false},
		{"global variable with pointers", uintptr(unsafe.Pointer(&pointers)), false},
		{"string constant", uintptr(unsafe.Pointer(unsafe.StringData("constant"))), false},
		{"mapping", addr(mapped), false},
		{"end of a mapping", addr(mapped) + pages - 1, false},
		{"address 0", 0, false},
		{"address 1", 1, false},
		{"kernel", ^uintptr(0), false},
		{"not canonical", 1 << 60, false},
	} {
		if got := Contains(c.addr); got != c.want {
			t.Errorf("%s at %#x: %v", c.name, c.addr, got)
		}
	}
	runtime.KeepAlive(tiny)
	runtime.KeepAlive(small)
	runtime.KeepAlive(large)
	runtime.KeepAlive(withPointers)
}

// Ranges are looked at page by page: an object in the middle is found.
func TestOverlaps(t *testing.T) {
	large := make([]byte, 1<<20)
	start := addr(large)
	for _, c := range []struct {
		addr, n uintptr
		want    bool
	}{
		{start, 1, true}, {start, 1 << 20, true}, {start + 5, 1<<20 - 10, true},
		{addr(global[:]), 1, false}, {addr(global[:]), 64, false}, {0, 1, false}, {0, 1 << 30, false},
		{start - 64<<20, 65 << 20, true}, {start + 1<<20 - 1, 128 << 20, true},
	} {
		if got := Overlaps(c.addr, c.n); got != c.want {
			t.Errorf("%d bytes at %#x: %v", c.n, c.addr, got)
		}
	}
	runtime.KeepAlive(large)
}
