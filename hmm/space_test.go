package hmm

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/gpu"
)

// Pages go to VRAM, and come home when the CPU touches them, with their bytes.
func TestMigrate(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 8*mib)
	b := must[[]byte](t)(s.Alloc(3 * mib))
	want := random(len(b), 5)
	copy(b, want)
	clear(b[mib : 2*mib])
	clear(want[mib : 2*mib])
	check(t, s.Discard(b[mib:2*mib])) // pages that the kernel does not have
	pages := uint64(len(b)) / page
	for round := range 3 {
		moves(t, s, b, dev)
		if st := s.Stats(); st.Away != pages || st.OutPages != pages*uint64(round+1) {
			t.Fatalf("after a migration: %+v", st)
		}
		if round == 1 {
			moves(t, s, b, nil)
			if st := s.Stats(); st.Away != 0 {
				t.Fatalf("after a migration home: %+v", st)
			}
		}
		same(t, "bytes that were away", b, want)
		if st := s.Stats(); st.Away != 0 {
			t.Fatalf("after all pages were touched: %+v", st)
		}
		b[round]++
		want[round]++
	}
	if st := s.Stats(); st.CPUFaults != 2*pages || st.HomePages != 3*pages || st.Conflicts != 0 {
		t.Errorf("%+v", st)
	}
	check(t, s.Unmap(b[:mib]))
	if _, err := s.Migrate(b, dev); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("a migration of what is unmapped: %v", err)
	}
	moves(t, s, b[mib:], dev)
	same(t, "what is left", b[mib:], want[mib:])
}

// A write to a page that is away is not lost, whoever wins.
func TestMigrateStorm(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	seed := seed(t)
	b := must[[]byte](t)(s.Alloc(64 * int(page)))
	const writers, rounds = 4, 3000
	var wg sync.WaitGroup
	var stop atomic.Bool
	words := func(w int) []byte { return b[w*8:] }
	for w := range writers {
		wg.Go(func() {
			// Each writer counts in words of its own, in all pages.
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for range rounds {
				words(w)[r.IntN(64)*int(page)]++
			}
		})
	}
	var mover sync.WaitGroup
	mover.Go(func() {
		r := rand.New(rand.NewPCG(seed, 99))
		for s.Stats().OutPages == 0 || !stop.Load() {
			first := r.IntN(64)
			part := b[first*int(page):][:(1+r.IntN(64-first))*int(page)]
			to := dev
			if r.IntN(4) == 0 {
				to = nil
			}
			if _, err := s.Migrate(part, to); err != nil {
				t.Error(err)
				return
			}
			if r.IntN(8) == 0 {
				runtime.GC()
			}
		}
	})
	wg.Wait()
	stop.Store(true)
	mover.Wait()
	for w := range writers {
		want := make([]byte, 64)
		r := rand.New(rand.NewPCG(seed, uint64(w)))
		for range rounds {
			want[r.IntN(64)]++
		}
		for i := range 64 {
			if got := words(w)[i*int(page)]; got != want[i] {
				t.Errorf("writer %d, page %d: %d writes, should be %d", w, i, got, want[i])
			}
		}
	}
	if st := s.Stats(); st.OutPages == 0 || st.Conflicts != 0 {
		t.Errorf("%+v", st)
	}
}

// Goroutines that fault do not keep the collector from running, nor the collector them from going on.
func TestCollector(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(1))
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	b := must[[]byte](t)(s.Alloc(128 * int(page)))
	want := random(len(b), 3)
	copy(b, want)
	var stop atomic.Bool
	var wg, touchers sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			var keep [][]byte
			for !stop.Load() {
				keep = append(keep, make([]byte, 10000))
				if len(keep) > 100 {
					keep = nil
					runtime.GC()
				}
			}
			runtime.KeepAlive(keep)
		})
	}
	for range 100 {
		moves(t, s, b, dev)
		for w := range 4 {
			touchers.Go(func() {
				for i := w * int(page); i < len(b); i += 4 * int(page) {
					if got := b[i]; got != want[i] {
						t.Errorf("byte %d is %#x, should be %#x", i, got, want[i])
					}
				}
			})
		}
		touchers.Wait()
	}
	stop.Store(true)
	wg.Wait()
}

// A GPU without enough memory takes what fits. Its memory comes back.
func TestOutOfVRAM(t *testing.T) {
	s := open(t)
	dev := must[*Device](t)(s.AddGPU("soft:10", &GPUConfig{GPU: &gpu.Config{VRAM: 8 * mib}, Limit: 3*mib + 3*page}))
	b := must[[]byte](t)(s.Alloc(8 * mib))
	want := random(len(b), 9)
	copy(b, want)
	limit := int(3*mib/page + 3)
	for range 3 {
		n, err := s.Migrate(b, dev)
		wantErr(t, "more pages than VRAM", err, syscall.ENOMEM)
		if n != limit {
			t.Errorf("%d pages have moved, should be %d", n, limit)
		}
		same(t, "bytes", b, want)
		if free := dev.Free(); free != uint64(limit) {
			t.Errorf("%d pages are free", free)
		}
	}
	// The GPU's own buffers and pages share the memory.
	tight := must[*Device](t)(s.AddGPU("soft:11", &GPUConfig{GPU: &gpu.Config{VRAM: mib}}))
	g := must[*gpu.Device](t)(gpu.Open("soft:11", nil))
	defer func() { check(t, g.Close()) }()
	buf := must[*gpu.Buffer](t)(g.AllocWith(mib/2, gpu.AllocOptions{CPU: true}))
	n, err := s.Migrate(b[:mib], tight)
	wantErr(t, "a GPU whose memory is in use", err, syscall.ENOMEM)
	if n != int(mib/2/page) {
		t.Errorf("%d pages have moved", n)
	}
	check(t, buf.Free())
	moves(t, s, b[:mib], tight)
	same(t, "bytes", b, want)
}

// A device that fails in the middle of a copy: the page stays where it is, with its bytes, or the CPU gets a SIGBUS until the
// device works again.
func TestDeviceFails(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	b := must[[]byte](t)(s.Alloc(16 * int(page)))
	want := random(len(b), 21)
	copy(b, want)
	check(t, s.engine.failDevice(dev.id, 5))
	n, err := s.Migrate(b, dev)
	wantErr(t, "a device that fails", err, syscall.EIO)
	if n != 5 {
		t.Errorf("%d pages have moved, should be 5", n)
	}
	same(t, "pages that did not go", b[5*page:], want[5*page:])
	if got, ok := try(&b[3*page]); ok {
		t.Errorf("a page that its device does not give back is read: %#x", got)
	}
	_, err = s.Migrate(b, nil)
	wantErr(t, "the way home", err, syscall.EIO)
	m := must[*Mirror](t)(dev.Mirror(b))
	_, err = m.ReadAt(make([]byte, 10), 0)
	wantErr(t, "an access of the device", err, syscall.EIO)
	check(t, m.Close())
	if st := s.Stats(); st.Poisoned == 0 || st.FailedCopies == 0 || st.Away != 5 {
		t.Errorf("%+v", st)
	}
	check(t, s.engine.failDevice(dev.id, -1))
	moves(t, s, b, nil)
	same(t, "all pages, when the device works again", b, want)
	for after := range 20 { // in the middle of the way home, too
		check(t, s.engine.failDevice(dev.id, -1))
		moves(t, s, b, dev)
		check(t, s.engine.failDevice(dev.id, int64(after)))
		n, err := s.Migrate(b, nil)
		if err == nil != (after >= 16) || n != min(after, 16) {
			t.Errorf("after %d copies: %d pages, %v", after, n, err)
		}
		check(t, s.engine.failDevice(dev.id, -1))
		same(t, "bytes", b, want)
	}
}

// try reads a byte, and reports whether it could.
func try(p *byte) (v byte, ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { ok = recover() == nil }()
	return *p, true
}

// What the program does with its mappings while pages are away, with the kernel's own calls.
func TestMappings(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 8*mib)
	p := int(page)
	outside := must[[]byte](t)(unix.Mmap(-1, 0, 64*p, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))
	want := random(len(outside), 2)
	copy(outside, want)
	check(t, s.Adopt(outside))
	wantErr(t, "adopting twice", s.Adopt(outside), syscall.EEXIST)
	wantErr(t, "half a page", s.Adopt(outside[:p/2]), syscall.EINVAL)
	wantErr(t, "the Go heap", s.Adopt(make([]byte, 4*p)), syscall.EINVAL)
	file := must[[]byte](t)(unix.Mmap(-1, 0, p, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON))
	wantErr(t, "shared memory", s.Adopt(file), syscall.EOPNOTSUPP)
	readOnly := must[[]byte](t)(unix.Mmap(-1, 0, p, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON))
	wantErr(t, "memory that is not writable", s.Adopt(readOnly), syscall.EPERM)
	check(t, unix.Munmap(readOnly))
	wantErr(t, "memory that is not mapped", s.Adopt(readOnly), syscall.EFAULT)
	check(t, unix.Munmap(file))

	// Discarded: zeros, in VRAM or not.
	moves(t, s, outside[:32*p], dev)
	check(t, unix.Madvise(outside[16*p:48*p], unix.MADV_DONTNEED))
	clear(want[16*p : 48*p])
	same(t, "after MADV_DONTNEED", outside, want)
	moves(t, s, outside, dev)
	same(t, "after another migration", outside, want)
	// MADV_FREE keeps pages, or does not.
	copy(outside, want)
	check(t, unix.Madvise(outside[:p], unix.MADV_FREE))
	outside[0] = 0x42
	moves(t, s, outside[:p], dev)
	if outside[0] != 0x42 {
		t.Errorf("a store after MADV_FREE is lost")
	}
	copy(outside[:p], want)

	// Protected.
	moves(t, s, outside, dev)
	check(t, unix.Mprotect(outside, unix.PROT_READ))
	same(t, "read-only pages that were away", outside, want)
	_, err := s.Migrate(outside, dev)
	wantErr(t, "migration of read-only memory", err, syscall.EPERM)
	check(t, unix.Mprotect(outside, unix.PROT_READ|unix.PROT_WRITE))
	// Locked.
	check(t, unix.Mlock(outside[:p]))
	_, err = s.Migrate(outside[:p], dev)
	wantErr(t, "migration of locked memory", err, syscall.EPERM)
	check(t, unix.Munlock(outside[:p]))

	// Moved.
	moves(t, s, outside, dev)
	other := remap(t, outside)
	if st := s.Stats(); st.RemappedPages != 64 {
		t.Errorf("after mremap: %+v", st)
	}
	same(t, "after mremap", other, want)
	moves(t, s, other, dev)
	_, err = s.Migrate(outside, dev)
	wantErr(t, "the old address", err, syscall.EFAULT)
	// Unmapped in part.
	away := s.Stats().Away
	unmapPart(t, other[8*p:24*p])
	if st := s.Stats(); st.Away != away-16 {
		t.Errorf("after munmap: %+v", st)
	}
	same(t, "before what was unmapped", other[:8*p], want[:8*p])
	same(t, "behind what was unmapped", other[24*p:], want[24*p:])
	n, err := s.Migrate(other, dev)
	wantErr(t, "a migration across what was unmapped", err, syscall.EFAULT)
	if n != 0 {
		t.Errorf("%d pages", n)
	}
	check(t, s.Release(other[24*p:]))
	_, err = s.Migrate(other[24*p:], dev)
	wantErr(t, "what was released", err, syscall.EFAULT)
	same(t, "what was released", other[24*p:], want[24*p:])
	unmapPart(t, other[:8*p])
	unmapPart(t, other[24*p:])
	if st := s.Stats(); st.Away != 0 {
		t.Errorf("at the end: %+v", st)
	}
}

// Bad arguments are errors.
func TestBadArguments(t *testing.T) {
	s, other := open(t), open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	foreign := addGPU(t, other, "soft:10", 2*mib)
	b := must[[]byte](t)(s.Alloc(1))
	if uint64(len(b)) != page {
		t.Errorf("%d bytes", len(b))
	}
	_, err := s.Migrate(b, foreign)
	wantErr(t, "a device of another space", err, syscall.ENODEV)
	_, err = other.Migrate(b, foreign)
	wantErr(t, "memory of another space", err, syscall.EFAULT)
	_, err = s.Migrate(nil, dev)
	wantErr(t, "no memory", err, syscall.EINVAL)
	_, err = s.Migrate(make([]byte, page), dev)
	wantErr(t, "the Go heap", err, syscall.EFAULT)
	for _, n := range []int{0, -1, 1<<63 - 1} {
		_, err = s.Alloc(n)
		wantErr(t, "Alloc", err, syscall.EINVAL)
	}
	wantErr(t, "other's memory", other.Adopt(b), syscall.EBUSY)
	wantErr(t, "Release of foreign memory", other.Release(b), syscall.EFAULT)
	wantErr(t, "Unmap of a part of a page", s.Unmap(b[:10]), syscall.EINVAL)
	wantErr(t, "advice", s.Advise(b, 0, dev), syscall.EINVAL)
	wantErr(t, "a counter without a device", s.MigrateAfter(b, nil, 3), syscall.EINVAL)
	_, err = dev.Mirror(make([]byte, 10))
	wantErr(t, "a mirror of the Go heap", err, syscall.EFAULT)
	_, err = s.AddGPU("hard:1", nil)
	wantErr(t, "no such GPU", err, syscall.ENODEV)
	check(t, s.Close())
	check(t, s.Close())
	_, err = s.Alloc(10)
	wantErr(t, "a closed space", err, syscall.EINVAL)
	_, err = s.AddGPU("soft:10", nil)
	wantErr(t, "a closed space", err, syscall.EINVAL)
	_, err = (*Space)(nil).Alloc(10)
	wantErr(t, "a nil space", err, syscall.EINVAL)
}

// The limits of a space are errors, and nothing is left over.
func TestLimits(t *testing.T) {
	s := open(t)
	var got [][]byte
	for {
		b, err := s.Alloc(int(page))
		if err != nil {
			wantErr(t, "too many ranges", err, syscall.ENOSPC)
			break
		}
		got = append(got, b)
	}
	if len(got) != 4096 {
		t.Errorf("%d ranges", len(got))
	}
	for _, b := range got {
		check(t, s.Unmap(b))
	}
	b := must[[]byte](t)(s.Alloc(int(page)))
	var mirrors []*Mirror
	for {
		m, err := s.MirrorFor(b, nil)
		if err != nil {
			wantErr(t, "too many mirrors", err, syscall.ENOSPC)
			break
		}
		mirrors = append(mirrors, m)
	}
	if len(mirrors) != 256 {
		t.Errorf("%d mirrors", len(mirrors))
	}
	for _, m := range mirrors {
		check(t, m.Close())
		check(t, m.Close())
	}
	check(t, must[*Mirror](t)(s.MirrorFor(b, nil)).Close())
}

// The program unmaps and moves memory with the kernel's calls while it migrates: whoever wins, bytes that are still mapped are
// right, and the VRAM of the others comes back.
func TestMappingStorm(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	seed := seed(t)
	r := rand.New(rand.NewPCG(seed, 5))
	p := int(page)
	const pages = 48
	for round := range 60 {
		b := must[[]byte](t)(s.Alloc(pages * p))
		want := random(len(b), seed+uint64(round))
		copy(b, want)
		var stop atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			for !stop.Load() {
				_, err := s.Migrate(b, dev)
				if err != nil && !errors.Is(err, syscall.EFAULT) {
					t.Error(err)
				}
				if errors.Is(err, syscall.EFAULT) {
					runtime.Gosched()
				}
			}
		})
		cut := 8 + r.IntN(16)
		for range r.IntN(50) {
			runtime.Gosched()
		}
		other := remap(t, b[:cut*p])
		// Others' memory may come to lie at the old addresses at once: it is theirs.
		strange := must[[]byte](t)(unix.Mmap(-1, 0, cut*p, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))
		for i := range strange {
			strange[i] = 0xee
		}
		check(t, unix.Madvise(b[30*p:32*p], unix.MADV_DONTNEED))
		unmapPart(t, b[40*p:])
		same(t, "what was moved", other, want[:cut*p])
		same(t, "what was left", b[cut*p:30*p], want[cut*p:30*p])
		same(t, "what was left behind", b[32*p:40*p], want[32*p:40*p])
		for i := range strange {
			if strange[i] != 0xee {
				t.Fatalf("byte %d of another mapping is %#x", i, strange[i])
			}
		}
		stop.Store(true)
		wg.Wait()
		for i, v := range b[30*p : 32*p] {
			if v != 0 {
				t.Fatalf("byte %d of what was discarded is %#x", i, v)
			}
		}
		check(t, unix.Munmap(strange))
		check(t, s.Unmap(other))
		check(t, s.Unmap(b[cut*p:40*p]))
		if st := s.Stats(); st.Away != 0 || st.Conflicts != 0 {
			t.Fatalf("round %d: %+v", round, st)
		}
	}
	if free := dev.Free(); free != 2*mib/page {
		t.Errorf("%d pages of VRAM are free", free)
	}
}

// Pages of huge pages leave and come home one by one.
func TestHugePages(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 16*mib)
	b := must[[]byte](t)(unix.Mmap(-1, 0, 8*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a kernel without huge pages refuses
	want := random(len(b), 13)
	copy(b, want)
	check(t, s.Adopt(b))
	part := b[3*mib+5*int(page):][:mib]
	moves(t, s, part, dev)
	same(t, "a part", b, want)
	moves(t, s, b, dev)
	same(t, "all", b, want)
	check(t, s.Release(b))
	same(t, "what was released", b, want)
	check(t, unix.Munmap(b))
}
