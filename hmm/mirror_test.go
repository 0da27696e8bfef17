package hmm

import (
	"context"
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/gpu"
)

// A mirror reads and writes pages wherever they are, and does not move those that it reaches.
func TestMirrorAccess(t *testing.T) {
	s := open(t)
	one, two := addGPU(t, s, "soft:10", 2*mib), addGPU(t, s, "soft:11", 2*mib)
	p := int(page)
	b := must[[]byte](t)(s.Alloc(8 * p))
	want := random(len(b), 31)
	m := must[*Mirror](t)(one.Mirror(b[100:]))
	if _, err := m.WriteAt(want[100:], 0); err != nil { // pages that nobody has touched
		t.Fatal(err)
	}
	copy(b[:100], want)
	moves(t, s, b[:2*p], one)
	moves(t, s, b[2*p:4*p], two)
	n := must[int](t)(s.Exclusive(b[4*p : 5*p]))
	if n != 1 {
		t.Fatalf("%d exclusive pages", n)
	}
	got := make([]byte, len(b)-100)
	_, err := m.ReadAt(got, 0)
	check(t, err)
	same(t, "what the device reads", got, want[100:])
	// Pages of the other GPU have come home, the others are where they were.
	entries, seq, err := m.Snapshot(0, m.Len())
	check(t, err)
	for i, e := range entries {
		where := -1
		if i < 2 {
			where = 0
		}
		if e&Valid == 0 || e&Write == 0 || e.Device() != where || e&Private != 0 != (i < 2) || e&Exclusive != 0 != (i == 4) {
			t.Errorf("page %d: %v", i, e)
		}
	}
	if !m.Current(seq) {
		t.Error("the snapshot is out of date though nothing has changed")
	}
	copy(want[p-50:], random(200, 7))
	_, err = m.WriteAt(want[p-50:][:200], int64(p-150))
	check(t, err)
	if st := s.Stats(); st.Away != 3 {
		t.Errorf("%+v", st)
	}
	same(t, "what the CPU reads", b, want)
	if m.Current(seq) {
		t.Error("pages have come home, and the sequence number is the same")
	}
	_, err = m.ReadAt(got, 1)
	wantErr(t, "a read past the end", err, syscall.EFAULT)
	_, err = m.ReadAt(got[:1], -1)
	wantErr(t, "a negative offset", err, syscall.EFAULT)
	check(t, m.Close())
	_, err = m.ReadAt(got, 0)
	wantErr(t, "a closed mirror", err, syscall.EINVAL)
}

// Snapshot and Fault return what the kernel's HMM does, and the sequence number changes before a page does.
func TestFault(t *testing.T) {
	s := open(t)
	one, two := addGPU(t, s, "soft:10", 2*mib), addGPU(t, s, "soft:11", 2*mib)
	p := int(page)
	b := must[[]byte](t)(s.Alloc(8 * p))
	m := must[*Mirror](t)(one.Mirror(b))
	look := func(i int) Entry {
		t.Helper()
		e, _, err := m.Snapshot(uint64(i*p), page)
		check(t, err)
		return e[0]
	}
	if e := look(0); e != 0 {
		t.Errorf("an absent page: %v", e)
	}
	e, _, err := m.Fault(0, page, false)
	check(t, err)
	if e[0] != Valid|Zero {
		t.Errorf("a page that was read: %v", e[0])
	}
	e, _, err = m.Fault(0, page, true)
	check(t, err)
	if e[0] != Valid|Write {
		t.Errorf("a page that was written: %v", e[0])
	}
	_, seq, err := m.Fault(0, m.Len(), true)
	check(t, err)
	if !m.Current(seq) {
		t.Error("out of date at once")
	}
	for what, change := range map[string]func(){
		"a migration":     func() { moves(t, s, b[p:2*p], one) },
		"a touch":         func() { moves(t, s, b[p:2*p], one); _, seq, _ = m.Snapshot(0, 1); b[p]++ },
		"MADV_DONTNEED":   func() { check(t, unix.Madvise(b[3*p:4*p], unix.MADV_DONTNEED)) },
		"exclusive pages": func() { must[int](t)(s.Exclusive(b[4*p : 5*p])) },
		"coherent pages":  func() { must[int](t)(s.MigrateCoherent(b[5*p:6*p], one)) },
	} {
		_, seq, err = m.Snapshot(0, m.Len())
		check(t, err)
		change()
		if m.Current(seq) {
			t.Errorf("after %s the sequence number is the same", what)
		}
	}
	moves(t, s, b[:p], one)
	moves(t, s, b[2*p:3*p], two)
	if e := look(0); e != Valid|Write|Private|1<<8 || e.Device() != 0 {
		t.Errorf("a page in the GPU's own memory: %v", e)
	}
	if e := look(2); e != Private|2<<8 || e.Device() != 1 {
		t.Errorf("a page in the other GPU's memory: %v", e)
	}
	if e := look(4); e != Valid|Write|Exclusive {
		t.Errorf("an exclusive page: %v", e)
	}
	if e := look(5); e != Valid|Write|Coherent|1<<8 {
		t.Errorf("a coherent page: %v", e)
	}
	all, seq, err := m.Fault(0, m.Len(), true)
	check(t, err)
	for i, e := range all {
		if e&(Valid|Write) != Valid|Write {
			t.Errorf("page %d after a fault: %v", i, e)
		}
	}
	if all[0].Device() != 0 || all[2].Device() != -1 || !m.Current(seq) {
		t.Errorf("%v", all)
	}
	check(t, s.Protect(b[6*p:7*p], true, false))
	_, _, err = m.Fault(6*page, page, false)
	check(t, err)
	_, _, err = m.Fault(6*page, page, true)
	wantErr(t, "a write to what is read-only", err, syscall.EPERM)
	_, err = m.WriteAt([]byte{1}, 6*int64(page))
	wantErr(t, "a store to what is read-only", err, syscall.EPERM)
	check(t, s.Protect(b[6*p:7*p], false, false))
	if e := look(6); e != Error {
		t.Errorf("a page without any right: %v", e)
	}
	_, _, err = m.Fault(6*page, page, false)
	wantErr(t, "a read without the right", err, syscall.EFAULT)
	check(t, s.Protect(b[6*p:7*p], true, true))
	check(t, s.Unmap(b[7*p:]))
	if e := look(7); e != Error {
		t.Errorf("an unmapped page: %v", e)
	}
	_, _, err = m.Fault(7*page, page, false)
	wantErr(t, "an unmapped page", err, syscall.EFAULT)
	_, err = m.ReadAt(make([]byte, 10), 7*int64(page))
	wantErr(t, "a load from an unmapped page", err, syscall.EFAULT)
	_, err = m.Add(7*page, 1)
	wantErr(t, "an atomic on an unmapped page", err, syscall.EFAULT)
	check(t, m.Close())
}

// Coherent pages are read and written by both without a fault, and come home without losing a store.
func TestCoherent(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 4*mib)
	p := int(page)
	b := must[[]byte](t)(s.Alloc(2 * mib))
	want := random(len(b), 77)
	copy(b, want)
	n := must[int](t)(s.MigrateCoherent(b, dev))
	if n != len(b)/p {
		t.Errorf("%d pages", n)
	}
	faults := s.Stats().CPUFaults
	same(t, "coherent pages", b, want)
	b[5] = 9
	m := must[*Mirror](t)(dev.Mirror(b))
	got := make([]byte, 10)
	_, err := m.ReadAt(got, 0)
	check(t, err)
	if got[5] != 9 {
		t.Error("the device does not see a store of the CPU")
	}
	want[5] = 9
	_, err = m.WriteAt([]byte{1, 2, 3}, int64(p))
	check(t, err)
	copy(want[p:], []byte{1, 2, 3})
	same(t, "after a store of the device", b, want)
	if st := s.Stats(); st.CPUFaults != faults || st.Away != uint64(len(b)/p) || st.CoherentPages != st.Away {
		t.Errorf("%+v", st)
	}
	// Stores while the pages come home, and go again.
	var stop atomic.Bool
	var wg sync.WaitGroup
	var count uint64
	word := b[3*p:]
	wg.Go(func() {
		for count == 0 || !stop.Load() {
			count++
			binary.LittleEndian.PutUint64(word, count)
			if got := binary.LittleEndian.Uint64(word); got != count {
				t.Errorf("a store of %d is lost: %d", count, got)
				return
			}
		}
	})
	for range 50 {
		must[int](t)(s.Migrate(b[:64*p], nil))
		must[int](t)(s.Migrate(b[:64*p], dev))
		must[int](t)(s.MigrateCoherent(b[:64*p], dev))
	}
	stop.Store(true)
	wg.Wait()
	binary.LittleEndian.PutUint64(want[3*p:], count)
	check(t, s.Discard(b[8*p:9*p]))
	clear(want[8*p : 9*p])
	same(t, "at the end", b, want)
	check(t, s.Unmap(b[:mib]))
	moves(t, s, b[mib:], nil)
	same(t, "what is left", b[mib:], want[mib:])
	if st := s.Stats(); st.Away != 0 || st.Conflicts != 0 {
		t.Errorf("%+v", st)
	}
	check(t, m.Close())
}

// Atomics of devices and of the CPU count together, wherever the page is.
func TestAtomics(t *testing.T) {
	s := open(t)
	one, two := addGPU(t, s, "soft:10", 2*mib), addGPU(t, s, "soft:11", 2*mib)
	b := must[[]byte](t)(s.Alloc(int(page)))
	const each = 300
	var wg sync.WaitGroup
	for _, d := range []*Device{one, two} {
		m := must[*Mirror](t)(d.Mirror(b))
		wg.Go(func() {
			for range each {
				if _, err := m.Add(8, 1); err != nil {
					t.Error(err)
				}
			}
			check(t, m.Close())
		})
	}
	wg.Go(func() {
		p := counter(b[8:])
		for range each {
			atomic.AddUint64(p, 1)
		}
	})
	for i := range 50 {
		must[int](t)(s.Migrate(b, []*Device{one, two, nil}[i%3]))
	}
	wg.Wait()
	if got := binary.LittleEndian.Uint64(b[8:]); got != 3*each {
		t.Errorf("%d, should be %d", got, 3*each)
	}
	m := must[*Mirror](t)(one.Mirror(b))
	if old := must[uint64](t)(m.Swap(8, 5)); old != 3*each {
		t.Errorf("Swap returns %d", old)
	}
	if old := must[uint64](t)(m.CompareAndSwap(8, 4, 6)); old != 5 {
		t.Errorf("CompareAndSwap returns %d", old)
	}
	if old := must[uint64](t)(m.CompareAndSwap(8, 5, 6)); old != 5 || b[8] != 6 {
		t.Errorf("CompareAndSwap returns %d, the word is %d", old, b[8])
	}
	_, err := m.Add(4, 1)
	wantErr(t, "an address that is no multiple of 8", err, syscall.EINVAL)
	_, err = m.Add(page-4, 1)
	wantErr(t, "past the end", err, syscall.EFAULT)
	check(t, m.Close())
}

// Access counters, advice and prefetches move pages.
func TestPolicies(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	p := int(page)
	b := must[[]byte](t)(s.Alloc(8 * p))
	want := random(len(b), 4)
	copy(b, want)
	m := must[*Mirror](t)(dev.Mirror(b))
	read := func(i int) {
		t.Helper()
		_, err := m.ReadAt(make([]byte, 4), int64(i*p))
		check(t, err)
	}
	where := func(i int) int {
		t.Helper()
		check(t, s.Drain())
		e, _, err := m.Snapshot(uint64(i*p), 1)
		check(t, err)
		return e[0].Device()
	}
	check(t, s.MigrateAfter(b[:2*p], dev, 3))
	for i := range 2 {
		read(0)
		if where(0) != -1 {
			t.Errorf("the page has moved after %d accesses", i+1)
		}
	}
	read(0)
	if where(0) != 0 || where(1) != -1 {
		t.Errorf("after three accesses: %d, %d", where(0), where(1))
	}
	check(t, s.Advise(b[2*p:3*p], PreferDevice, dev))
	read(2)
	if where(2) != 0 {
		t.Error("advice: the page has not moved at the first access")
	}
	check(t, s.Advise(b[2*p:3*p], PreferHome, nil))
	moves(t, s, b[2*p:3*p], nil)
	read(2)
	if where(2) != -1 {
		t.Error("advice: the page has moved")
	}
	check(t, s.Prefetch(b[4*p:], dev))
	if where(5) != 0 {
		t.Error("a prefetch has not moved the page")
	}
	if st := s.Stats(); st.CountedPages != 2 || st.CountedMissed != 0 {
		t.Errorf("%+v", st)
	}
	same(t, "bytes", b, want)
	check(t, m.Close())
}

// Operations of streams work on memory of a space, in VRAM or at home, and a fault that cannot be resolved is their error.
func TestStreams(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	b := must[[]byte](t)(s.Alloc(4 * int(page)))
	g := must[*gpu.Device](t)(gpu.Open("soft:10", nil))
	defer func() { check(t, g.Close()) }()
	stream := must[*gpu.Stream](t)(g.NewStream())
	m := must[*Mirror](t)(dev.Mirror(b))
	want := random(len(b), 12)
	moves(t, s, b[:2*page], dev)
	check(t, stream.Copy(gpu.InUnified(m, 0, m.Len()), gpu.Host(want)))
	check(t, stream.Sync(context.Background()))
	if st := s.Stats(); st.Away != 2 || st.CPUFaults != 0 {
		t.Errorf("%+v", st)
	}
	same(t, "what the GPU has copied", b, want)
	moves(t, s, b, dev)
	check(t, stream.Add(gpu.InUnified(m, 0, 4096), gpu.InUnified(m, 0, 4096), gpu.InUnified(m, 0, 4096), gpu.Uint32))
	check(t, stream.Sync(context.Background()))
	if st := s.Stats(); st.Away != 4 {
		t.Errorf("%+v", st)
	}
	for i := 0; i < 4096; i += 4 {
		if got, sum := binary.LittleEndian.Uint32(b[i:]), 2*binary.LittleEndian.Uint32(want[i:]); got != sum {
			t.Fatalf("number %d: %d, should be %d", i/4, got, sum)
		}
	}
	wantErr(t, "past the end", stream.Fill(gpu.InUnified(m, 1, m.Len()), 3), gpu.ErrRange)
	check(t, s.Unmap(b[page:2*page]))
	check(t, stream.Fill(gpu.InUnified(m, 0, m.Len()), 3))
	wantErr(t, "unmapped memory", stream.Sync(context.Background()), syscall.EFAULT)
	check(t, m.Close())
	runtime.KeepAlive(b)
}
