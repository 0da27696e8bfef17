package mem

// Memory of the host that the library has allocated: for regions (alloc.go), and as device memory
// (device.go). An engine may lock its pages, and then reads and writes it in place.
//
// The address of a slice is only compared with others here; nothing makes a pointer of a number
// again, so this is sound.

import (
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Own is a range of such memory.
type Own struct {
	base uintptr
	size uint64

	mu     sync.RWMutex // guards pinned: who takes pages away holds it meanwhile
	pinned bool
}

// owns are all of them. The list never changes: it is replaced, under mu.
var owns struct {
	list atomic.Pointer[[]*Own]

	mu       sync.Mutex // guards watchers, and changes of list
	watchers map[*func(*Own)]bool
}

func allOwns() []*Own {
	if l := owns.list.Load(); l != nil {
		return *l
	}
	return nil
}

func addOwn(b []byte) *Own {
	o := &Own{base: uintptr(unsafe.Pointer(unsafe.SliceData(b))), size: uint64(len(b))}
	owns.mu.Lock()
	defer owns.mu.Unlock()
	list := append(slices.Clone(allOwns()), o)
	owns.list.Store(&list)
	return o
}

// close ends the range: engines unlock its pages. The caller unmaps it after that.
func (o *Own) close() {
	owns.mu.Lock()
	list := slices.DeleteFunc(slices.Clone(allOwns()), func(x *Own) bool { return x == o })
	owns.list.Store(&list)
	tell := make([]func(*Own), 0, len(owns.watchers))
	for w := range owns.watchers {
		tell = append(tell, *w)
	}
	owns.mu.Unlock()
	for _, f := range tell {
		f(o)
	}
}

// WatchOwn has f called with every range that is closed, until stop is called.
func WatchOwn(f func(*Own)) (stop func()) {
	owns.mu.Lock()
	defer owns.mu.Unlock()
	if owns.watchers == nil {
		owns.watchers = make(map[*func(*Own)]bool)
	}
	owns.watchers[&f] = true
	return func() {
		owns.mu.Lock()
		defer owns.mu.Unlock()
		delete(owns.watchers, &f)
	}
}

// OwnAt returns the range that b lies in; nil if there is none.
func OwnAt(b []byte) *Own {
	at, n := uintptr(unsafe.Pointer(unsafe.SliceData(b))), uint64(len(b))
	for _, o := range allOwns() {
		if off := uint64(at - o.base); off <= o.size && n <= o.size-off {
			return o
		}
	}
	return nil
}

// Range returns where the range lies.
func (o *Own) Range() (addr, n uint64) { return uint64(o.base), o.size }

// Pin keeps the pages of the range where they are from now on: an engine is about to lock them.
func (o *Own) Pin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pinned = true
}

// unlessPinned calls f, which takes pages of the range away, unless they are pinned. It reports
// whether it did.
func (o *Own) unlessPinned(f func() bool) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return !o.pinned && f()
}
