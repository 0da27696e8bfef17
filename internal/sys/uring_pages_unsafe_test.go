package sys

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Which pages stay pinned when the program changes what is mapped at their addresses. The
// unsafe code maps over mappings of the test's own.

// beforeHole returns n bytes of which the first ones are mapped, and no more.
func beforeHole(tb testing.TB, mapped, n int) []byte {
	tb.Helper()
	page := int(pageSize)
	whole := (mapped+page-1)/page*page + (n+page-1)/page*page + page
	b := anonymous(tb, whole)
	end := (mapped + page - 1) / page * page
	if err := unix.Mprotect(b[end:], unix.PROT_NONE); err != nil {
		tb.Fatal(err)
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&b[end-mapped])), n)
}

// pinnedKiB returns how much this process has pinned.
func pinnedKiB(tb testing.TB) (kib int) {
	tb.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		tb.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(status), "VmPin:")
	if _, err := fmt.Sscan(rest, &kib); !ok || err != nil {
		tb.Fatal("the kernel does not say how much is pinned")
	}
	return kib
}

func openFiles(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(entries)
}

// addressRange is a range of addresses that a test maps as it likes.
type addressRange struct {
	addr unsafe.Pointer
	n    int
	lost bool // it was unmapped, and other memory may be mapped there
}

func newRange(tb testing.TB, n int) *addressRange {
	tb.Helper()
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		tb.Fatal(err)
	}
	r := &addressRange{addr: p, n: n}
	tb.Cleanup(func() {
		if !r.lost {
			unix.MunmapPtr(p, uintptr(n))
		}
	})
	return r
}

func (r *addressRange) bytes() []byte { return unsafe.Slice((*byte)(r.addr), r.n) }

// mapAnew maps fresh pages over it.
func (r *addressRange) mapAnew() error {
	_, err := unix.MmapPtr(-1, 0, r.addr, uintptr(r.n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
	return err
}

// canary is a byte that the test never writes to pinned pages.
const canary = 0xa5

// pageChanges are what a program may do to a range, after which it has other pages.
var pageChanges = []struct {
	name   string
	change func(r *addressRange) error
}{
	{"MAP_FIXED", (*addressRange).mapAnew},
	{"munmap", func(r *addressRange) error {
		if err := unix.MunmapPtr(r.addr, uintptr(r.n)); err != nil {
			return err
		}
		// The runtime may have been given the addresses meanwhile: they are its own then.
		_, err := unix.MmapPtr(-1, 0, r.addr, uintptr(r.n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE)
		r.lost = err == unix.EEXIST
		if r.lost {
			err = nil
		}
		return err
	}},
	{"mremap", func(r *addressRange) error {
		elsewhere, _, e := unix.Syscall6(unix.SYS_MREMAP, uintptr(r.addr), uintptr(r.n), uintptr(r.n), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP, 0, 0)
		if e != 0 {
			return e
		}
		return errnoOrNil(unix.Syscall(unix.SYS_MUNMAP, elsewhere, uintptr(r.n), 0))
	}},
	{"MADV_DONTNEED", func(r *addressRange) error { return unix.Madvise(r.bytes(), unix.MADV_DONTNEED) }},
}

// After a change the pinned pages are read and written as before, by several goroutines,
// and not a byte of the new ones is seen or changed.
func TestPinnedPagesStay(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		for _, c := range pageChanges {
			t.Run(c.name, func(t *testing.T) {
				rng := pinSeed(t)
				const size, workers = 256 << 10, 4
				canaries := bytes.Repeat([]byte{canary}, size)
				r := newRange(t, size)
				for i := range r.bytes() {
					r.bytes()[i] = byte(i % 100)
				}
				model := bytes.Clone(r.bytes())
				p := mustPinIn(t, table, r.bytes())
				var stop atomic.Bool
				var wg sync.WaitGroup
				for w := range workers {
					seed := rng.Uint64()
					// Each goroutine has a part of its own, and a model of it.
					part, off := model[w*size/workers:][:size/workers], w*size/workers
					wg.Go(func() {
						if err := p.exercise(part, off, seed, &stop); err != nil {
							t.Error(err)
						}
					})
				}
				for range 12 {
					if err := c.change(r); err != nil {
						t.Error(err)
						break
					}
					if r.lost {
						break
					}
					b := r.bytes()
					copy(b, canaries)
					for range rng.IntN(20) {
						runtime.Gosched()
					}
					if n := bytes.Count(b, []byte{canary}); n != size {
						t.Errorf("%d bytes of the new pages changed", size-n)
						break
					}
				}
				stop.Store(true)
				wg.Wait()
				if !r.lost && bytes.Count(r.bytes(), []byte{canary}) != size {
					t.Error("bytes of the new pages changed")
				}
				got := make([]byte, size)
				if err := p.ReadAt(got, 0); err != nil || !bytes.Equal(got, model) {
					t.Errorf("the old pages: %v, or they differ", err)
				}
			})
		}
	})
}

// exercise reads and writes a part of the pages that nobody else uses.
func (p *PinnedPages) exercise(model []byte, at int, seed uint64, stop *atomic.Bool) error {
	buf, values := make([]byte, len(model)), make([]byte, 2*len(model))
	for i := range values {
		values[i] = byte(i % 100)
	}
	for !stop.Load() {
		seed = seed*6364136223846793005 + 1442695040888963407
		off := int(seed >> 40 % uint64(len(model)))
		n := min(1+int(seed>>20%(64<<10)), len(model)-off)
		b := buf[:n]
		if seed>>60%2 == 0 {
			copy(b, values[seed>>33%uint64(len(model)):])
			if err := p.WriteAt(b, uint64(at+off)); err != nil {
				return err
			}
			copy(model[off:], b)
			continue
		}
		if err := p.ReadAt(b, uint64(at+off)); err != nil {
			return err
		}
		if !bytes.Equal(b, model[off:][:n]) {
			return fmt.Errorf("%d bytes at %d differ, %d of them are the new pages'", n, at+off, bytes.Count(b, []byte{canary}))
		}
	}
	return nil
}

// Thousands of pins come and go, and leave nothing behind. All of them work at once.
func TestPinThousands(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		const count = 3000
		page := int(pageSize)
		needMemlock(t, 16<<20)
		memory := anonymous(t, count*page)
		rng := pinSeed(t)
		pinned, files := pinnedKiB(t), openFiles(t)
		for range 2 {
			var all [count]*PinnedPages
			for i := range all {
				var err error
				if all[i], err = table.pin(uintptr(AddrOf(memory[i*page:])), uintptr(page), true); err != nil {
					t.Fatal(err)
				}
			}
			if got := pinnedKiB(t) - pinned; got != count*page/1024 {
				t.Errorf("%d KiB are pinned", got)
			}
			if n := openFiles(t) - files; n > 8*(count/pinBankSlots+2)+20 {
				t.Errorf("%d descriptors are open", n)
			}
			for i, p := range all {
				if err := p.WriteAt([]byte{byte(i), byte(i >> 8)}, uint64(i%page)&^1); err != nil {
					t.Fatal(err)
				}
			}
			for i := range all {
				if at := i*page + i%page&^1; memory[at] != byte(i) || memory[at+1] != byte(i>>8) {
					t.Fatalf("region %d was not written", i)
				}
			}
			for _, i := range rng.Perm(count) {
				if err := all[i].Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := pinnedKiB(t); got != pinned {
			t.Errorf("%d KiB are pinned, before %d", got, pinned)
		}
		if len(table.banks) != 1 {
			t.Errorf("%d banks are left", len(table.banks))
		}
		if n := openFiles(t) - files; n > pinMaxRings+20 {
			t.Errorf("%d descriptors are left", n)
		}
	})
}

// A long registration is let go of as a whole, and counts once, though several rings
// have it.
func TestPinCountsOnce(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		const size = 4 << 20
		memory := anonymous(t, size)
		before := pinnedKiB(t)
		p, err := table.pin(uintptr(AddrOf(memory)), size, true)
		if err != nil {
			t.Fatal(err)
		}
		// Buffers that end within a page pin it twice.
		got, most := pinnedKiB(t)-before, size>>10+(p.slots-1)*int(pageSize)/1024
		if got < size>>10 || got > most {
			t.Errorf("%d KiB are pinned, should be %d to %d", got, size>>10, most)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if after := pinnedKiB(t); after != before {
			t.Errorf("%d KiB are pinned after the end, before %d", after, before)
		}
	})
}

// While a registration waits for a page, for as long as it likes, others are made, used
// and closed.
func TestPinStallsNobody(t *testing.T) {
	needPins(t)
	table, err := pins()
	if err != nil {
		t.Fatal(err)
	}
	if !table.clones {
		t.Skip("kernel: buffers cannot be cloned")
	}
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		t.Skipf("kernel: userfaultfd: %v", errno)
	}
	defer unix.Close(int(fd))
	if err := handshake(int(fd), 0); err != nil {
		t.Fatal(err)
	}
	const size = 4 << 20
	slow := newRange(t, size)
	const missing = 1
	arg := uffdioRegisterArg{start: uint64(uintptr(slow.addr)), length: size, mode: missing}
	if err := errnoOrNil(ioctl(int(fd), uffdioRegister, unsafe.Pointer(&arg))); err != nil {
		t.Fatal(err)
	}
	other := mustPin(t, anonymous(t, size))
	done := make(chan *PinnedPages)
	go func() {
		p, err := PinPages(uintptr(slow.addr), size, true)
		if err != nil {
			t.Error(err)
		}
		done <- p
	}()
	var event [32]byte // that a page is wanted: the registration waits
	for {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err == nil {
			break
		}
	}
	if _, err := unix.Read(int(fd), event[:]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	for range 100 {
		p, err := PinPages(uintptr(AddrOf(b)), 100, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.WriteAt([]byte("x"), 5); err != nil || b[5] != 'x' {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		if err := other.WriteAt(b, 7); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-done:
		t.Fatal("the registration did not wait")
	default:
	}
	// UFFDIO_ZEROPAGE gives it all of the pages.
	zero := struct {
		start, length, mode uint64
		done                int64
	}{start: uint64(uintptr(slow.addr)), length: size}
	if err := errnoOrNil(ioctl(int(fd), 0xc020aa04, unsafe.Pointer(&zero))); err != nil {
		t.Fatal(err)
	}
	if p := <-done; p != nil {
		p.Close()
	}
}

// The word that is written last is seen last, and whole: a reader that spins on it finds
// the rest of the message.
func TestPinnedOrder(t *testing.T) {
	needPins(t)
	const size, rounds = 4096, 3000
	memory := anonymous(t, size)
	p := mustPin(t, memory)
	last := (*uint64)(unsafe.Pointer(&memory[size-8]))
	seen := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(seen)
		var before uint64
		for round := uint64(1); round <= rounds; round++ {
			want := round * 0x0101010101010101
			now := before
			for spin := 0; now == before; spin++ {
				if now = atomic.LoadUint64(last); spin%64 == 63 {
					runtime.Gosched() // there may be one core only
				}
			}
			if now != want {
				t.Errorf("round %d: the word is torn: %#x", round, now)
				return
			}
			before = now
			for i := range size - 8 {
				if b := oneByte(&memory[i]); b != byte(round) {
					t.Errorf("round %d: byte %d is %d", round, i, b)
					return
				}
			}
			seen <- struct{}{}
		}
	})
	message := make([]byte, size)
	for round := uint64(1); round <= rounds; round++ {
		for i := range message {
			message[i] = byte(round)
		}
		word := round * 0x0101010101010101
		*(*uint64)(unsafe.Pointer(&message[size-8])) = word
		if err := p.WriteAt(message[:size-8], 0); err != nil {
			t.Fatal(err)
		}
		if err := p.WriteAt(message[size-8:], size-8); err != nil {
			t.Fatal(err)
		}
		if _, ok := <-seen; !ok {
			break
		}
	}
	wg.Wait()
}

// oneByte reads a byte that the kernel writes.
//
//go:norace
//go:noinline
func oneByte(p *byte) byte { return *p }
