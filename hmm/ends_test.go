package hmm

import (
	"encoding/binary"
	"errors"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

// Close while pages are queued to leave: memory that was adopted has its bytes afterwards.
func TestCloseWhileQueued(t *testing.T) {
	p := int(page)
	b := must[[]byte](t)(unix.Mmap(-1, 0, 256*p, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))
	for round := range 20 {
		s := open(t)
		dev := addGPU(t, s, "soft:10", 4*mib)
		check(t, s.Adopt(b))
		want := random(len(b), uint64(round))
		copy(b, want)
		m := must[*Mirror](t)(dev.Mirror(b))
		check(t, s.Advise(b[:128*p], PreferDevice, dev))
		_, err := m.ReadAt(make([]byte, 128*p), 0) // each page is on its way to the device
		check(t, err)
		for i := 128; i < 256; i += 4 {
			check(t, s.Prefetch(b[i*p:][:4*p], dev))
		}
		check(t, s.Close())
		same(t, "what was adopted", b, want)
	}
	check(t, unix.Munmap(b))
}

// What the program may not do with a page, a device may not either, wherever the page is. Nothing is changed then.
func TestProtected(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 2*mib)
	p := int(page)
	b := must[[]byte](t)(s.Alloc(6 * p))
	m := must[*Mirror](t)(dev.Mirror(b))
	for what, away := range map[string]func(part []byte) (int, error){
		"home":      func(part []byte) (int, error) { return s.Migrate(part, nil) },
		"private":   func(part []byte) (int, error) { return s.Migrate(part, dev) },
		"coherent":  func(part []byte) (int, error) { return s.MigrateCoherent(part, dev) },
		"exclusive": s.Exclusive,
	} {
		t.Run(what, func(t *testing.T) {
			alice, bob := peers(t, nil)
			region := must[*gpuRegion](t)(newGPURegion(t, alice, bob, s, b))
			want := random(len(b), 3)
			copy(b, want)
			must[int](t)(away(b))
			check(t, unix.Mprotect(b[2*p:4*p], unix.PROT_READ)) // by the kernel's call
			if got := b[2*p]; got != want[2*p] {
				t.Errorf("a byte that is read: %#x", got)
			}
			must[int](t)(away(b[:2*p]))
			_, err := m.WriteAt(make([]byte, 4*p), int64(p))
			wantErr(t, "a write that ends in read-only memory", err, syscall.EPERM)
			clear(want[p : 2*p])
			_, err = m.Add(uint64(2*p), 1)
			wantErr(t, "an atomic on read-only memory", err, syscall.EPERM)
			region.wantWrite(4*p, 100, verbs.WCSuccess)
			region.wantWrite(2*p, 100, verbs.WCRemAccessErr)
			clear(want[4*p : 4*p+100])
			got := make([]byte, len(b))
			_, err = m.ReadAt(got, 0)
			check(t, err)
			same(t, "what the device reads", got, want)
			check(t, unix.Mprotect(b[2*p:4*p], unix.PROT_NONE))
			_, err = m.ReadAt(got[:10], int64(3*p))
			wantErr(t, "a read of memory without rights", err, syscall.EFAULT)
			check(t, unix.Mprotect(b[2*p:4*p], unix.PROT_READ))
			must[int](t)(s.Migrate(b, nil))
			if _, err := s.Migrate(b, dev); err != nil { // coherent pages come home with the protection that they had
				wantErr(t, "pages that cannot leave", err, syscall.EPERM)
			}
			_, err = m.WriteAt(make([]byte, 10), int64(2*p))
			wantErr(t, "a write when all has come home", err, syscall.EPERM)
			check(t, unix.Mprotect(b[2*p:4*p], unix.PROT_READ|unix.PROT_WRITE))
			same(t, "at the end", b, want)
			region.close()
		})
	}
	check(t, m.Close())
}

// Memory is unmapped and allocated by several at a time, and comes to lie at the same addresses: each has the bytes of its own.
func TestUnmapStorm(t *testing.T) {
	s := open(t)
	dev := addGPU(t, s, "soft:10", 8*mib)
	p := int(page)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for round := range 150 {
				b, err := s.Alloc(8 * p)
				if err != nil {
					t.Error(err)
					return
				}
				for i := range 8 {
					binary.LittleEndian.PutUint64(b[i*p:], uint64(w<<32|round<<8|i))
				}
				if n, err := s.Migrate(b[:6*p], dev); err != nil || n != 6 {
					t.Errorf("%d pages have moved: %v", n, err)
				}
				if round%3 == 0 {
					if n, err := s.MigrateCoherent(b[:3*p], dev); err != nil || n != 3 {
						t.Errorf("%d pages are coherent: %v", n, err)
					}
				}
				for i := range 8 {
					if got := binary.LittleEndian.Uint64(b[i*p:]); got != uint64(w<<32|round<<8|i) {
						t.Errorf("page %d: %#x, should be %#x", i, got, w<<32|round<<8|i)
					}
				}
				if err := s.Unmap(b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if st := s.Stats(); st.Away != 0 || st.Conflicts != 0 || st.OrphanedPages != 0 {
		t.Errorf("%+v", st)
	}
	check(t, s.Drain())
	all := must[[]byte](t)(s.Alloc(8 * mib))
	clear(all)
	moves(t, s, all, dev) // all of the VRAM has come back
}

// The program moves or replaces a coherent mapping by itself, which the kernel does not report: the page is lost to the space,
// its memory goes to nobody else, and what the program has mapped there stays.
func TestCoherentGone(t *testing.T) {
	s := open(t)
	dev := must[*Device](t)(s.AddGPU("soft:10", &GPUConfig{GPU: &gpu.Config{VRAM: mib}}))
	p := int(page)
	b := must[[]byte](t)(s.Alloc(4 * p))
	want := random(len(b), 6)
	copy(b, want)
	must[int](t)(s.MigrateCoherent(b, dev))
	moved := remap(t, b[p:2*p])
	file := must[int](t)(unix.MemfdCreate("another", unix.MFD_CLOEXEC))
	check(t, unix.Ftruncate(file, int64(p)))
	mapOver(t, b[2*p:3*p], file)
	b[2*p] = 77
	n, err := s.Migrate(b, nil)
	wantErr(t, "pages whose mappings have gone", err, syscall.EFAULT)
	if st := s.Stats(); n != 2 || st.OrphanedPages != 2 || st.Away != 0 {
		t.Errorf("%d pages have come home: %+v", n, st)
	}
	same(t, "the first page", b[:p], want[:p])
	same(t, "the last page", b[3*p:], want[3*p:])
	if b[2*p] != 77 {
		t.Error("another mapping of the program is gone")
	}
	other := must[[]byte](t)(s.Alloc(mib))
	fill(other, 9)
	if n, err := s.Migrate(other, dev); !errors.Is(err, syscall.ENOMEM) || n != mib/p-2 {
		t.Errorf("%d pages have moved: %v", n, err)
	}
	same(t, "the mapping that was moved", moved, want[p:2*p])
	unmapPart(t, moved)
	check(t, unix.Close(file))
}
