package sys

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// needPins skips a test where the kernel has no io_uring for it.
func needPins(tb testing.TB) {
	tb.Helper()
	if err := CanPin(); err != nil {
		if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
			tb.Skipf("kernel: %v", err)
		}
		tb.Fatal(err)
	}
}

// needMemlock skips a test that pins more than an ordinary user may.
func needMemlock(tb testing.TB, n uint64) {
	tb.Helper()
	if limit := MemlockLimit(); os.Getuid() != 0 && limit < n {
		tb.Skipf("RLIMIT_MEMLOCK is %d bytes, %d are needed", limit, n)
	}
}

// pinSeed returns the source of a test's random choices, and prints its seed.
func pinSeed(tb testing.TB) *rand.Rand {
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 0, 64); err != nil {
			tb.Fatal(err)
		}
	}
	tb.Logf("VERBENA_SEED=%#x", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// mustPin pins memory until the test ends.
func mustPin(tb testing.TB, b []byte) *PinnedPages {
	tb.Helper()
	t, err := pins()
	if err != nil {
		tb.Fatal(err)
	}
	return mustPinIn(tb, t, b)
}

func mustPinIn(tb testing.TB, t *pinTable, b []byte) *PinnedPages {
	tb.Helper()
	p, err := t.pin(uintptr(AddrOf(b)), uintptr(len(b)), true)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// pinTables are the ways in which pages can be pinned: as this kernel can, and as older
// ones can; both also with buffers so short that memory is split into many.
func pinTables(t *testing.T, test func(t *testing.T, table *pinTable)) {
	needPins(t)
	for _, c := range []struct {
		name   string
		clones bool
		size   uintptr
	}{{"cloned", true, uringMaxBuffer}, {"cloned, short", true, 12345}, {"direct", false, pinShortBuffer}, {"direct, short", false, 12345}} {
		t.Run(c.name, func(t *testing.T) {
			table, err := newPinTable()
			if err != nil {
				t.Fatal(err)
			}
			if !table.clones && c.clones {
				t.Skip("kernel: buffers cannot be cloned")
			}
			table.clones, table.bufferSize = c.clones, c.size
			t.Cleanup(func() { table.drop(t) })
			test(t, table)
		})
	}
}

// drop closes a table of the test's own, which must be empty.
func (t *pinTable) drop(tb testing.TB) {
	for _, b := range t.banks {
		if b.count != 0 {
			tb.Errorf("%d slots are in use", b.count)
		}
		b.close()
	}
	for _, r := range t.staging {
		r.close()
	}
	for _, p := range t.pipes.idle {
		n, err := unix.IoctlGetInt(p.r, unix.TIOCINQ)
		if n != 0 || err != nil || p.source.Base != nil {
			tb.Errorf("an idle pipe has %d bytes, %v", n, err)
		}
		p.close()
	}
	t.pipes.idle = nil
}

// pinKinds are the kinds of memory that can be pinned.
var pinKinds = []struct {
	name string
	make func(tb testing.TB, n int) []byte
}{
	{"anonymous", anonymous},
	{"heap", func(_ testing.TB, n int) []byte { return make([]byte, n) }},
	{"memfd", func(tb testing.TB, n int) []byte { return sharedMemory(tb, n, 0) }},
	{"hugetlb", func(tb testing.TB, n int) []byte {
		if t, ok := tb.(*testing.T); ok {
			allowHugePages(t)
		}
		return sharedMemory(tb, n, unix.MFD_HUGETLB)
	}},
	{"private file", func(tb testing.TB, n int) []byte { return fileMemory(tb, n, unix.MAP_PRIVATE) }},
}

// sharedMemory maps a file in memory; it skips the test if there are no pages for it.
func sharedMemory(tb testing.TB, n, flags int) []byte {
	tb.Helper()
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC|flags)
	if err != nil {
		tb.Fatal(err)
	}
	defer unix.Close(fd)
	size := (n + hugePage - 1) &^ (hugePage - 1)
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		tb.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err == unix.ENOMEM && flags != 0 {
		tb.Skip("kernel: no huge pages are reserved")
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(b) })
	return b[:n:n]
}

// fileMemory maps a file of a disk.
func fileMemory(tb testing.TB, n, flags int) []byte {
	tb.Helper()
	f, err := os.CreateTemp("/var/tmp", "verbena-test")
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	os.Remove(f.Name())
	if err := f.Truncate(int64(n)); err != nil {
		tb.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(b) })
	return b
}

// shrinkPipe makes the next pipe as short as those of a user who has too many.
func (t *pinTable) shrinkPipe(tb testing.TB) {
	p, err := t.pipes.get()
	if err != nil {
		tb.Fatal(err)
	}
	if p.size, err = unix.FcntlInt(uintptr(p.w), unix.F_SETPIPE_SZ, int(pageSize)); err != nil {
		tb.Fatal(err)
	}
	t.pipes.put(p, true)
}

// Bytes of any length at any place go in and out, as a model says, and no others change.
func TestPinnedMoves(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		for i, kind := range pinKinds {
			t.Run(kind.name, func(t *testing.T) {
				if i%2 == 0 {
					table.shrinkPipe(t)
				}
				rng := pinSeed(t)
				const size = 1<<20 + 777
				memory := kind.make(t, size+64)
				for i := range memory {
					memory[i] = byte(rng.Uint32())
				}
				model := bytes.Clone(memory)
				shift := rng.IntN(64)
				p := mustPinIn(t, table, memory[shift:][:size])
				buf := make([]byte, size+64)
				for round := range 100 {
					off := rng.IntN(size)
					n := min(1+rng.IntN(1<<rng.IntN(21)), size-off)
					b := buf[rng.IntN(64):][:n]
					if round%2 == 0 {
						if err := p.ReadAt(b, uint64(off)); err != nil {
							t.Fatal(err)
						}
						if !bytes.Equal(b, model[shift+off:][:n]) {
							t.Fatalf("round %d: %d bytes at %d differ", round, n, off)
						}
						continue
					}
					for i := 0; i < n; i += 1 + n/5000 {
						b[i] = byte(rng.Uint32())
					}
					if err := p.WriteAt(b, uint64(off)); err != nil {
						t.Fatal(err)
					}
					copy(model[shift+off:], b)
					clear(b) // what was written counts, not what is there later
				}
				if !bytes.Equal(memory, model) {
					t.Error("the program sees something else")
				}
			})
		}
	})
}

// Bounds, rights and lengths are checked.
func TestPinnedRefuses(t *testing.T) {
	needPins(t)
	b := anonymous(t, 2*int(pageSize))
	p := mustPin(t, b[10:110])
	reader, err := PinPages(uintptr(AddrOf(b)), pageSize, false)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if p.length != 100 {
		t.Errorf("%d bytes", p.length)
	}
	for _, c := range []struct {
		n    int
		off  uint64
		want unix.Errno
	}{{101, 0, unix.EINVAL}, {1, 100, unix.EINVAL}, {2, ^uint64(0), unix.EINVAL}, {0, 101, unix.EINVAL}, {0, 100, 0}, {100, 0, 0}, {1, 99, 0}} {
		for name, err := range map[string]error{"read": p.ReadAt(make([]byte, c.n), c.off), "write": p.WriteAt(make([]byte, c.n), c.off)} {
			var access *PinAccessError
			if c.want == 0 && err != nil || c.want != 0 && (!errors.As(err, &access) || access.Err != c.want || access.Buffer) {
				t.Errorf("%s of %d bytes at %d: %v", name, c.n, c.off, err)
			}
		}
	}
	if err := reader.ReadAt(make([]byte, 9), 5); err != nil {
		t.Error(err)
	}
	if err := reader.WriteAt(make([]byte, 9), 5); !errors.Is(err, unix.EACCES) {
		t.Errorf("a write to what is pinned to be read: %v", err)
	}
	for _, c := range []struct{ addr, n uintptr }{{uintptr(AddrOf(b)), 0}, {^uintptr(0) - 5, 7}} {
		if _, err := PinPages(c.addr, c.n, true); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes at %#x: %v", c.n, c.addr, err)
		}
	}
}

// What cannot be pinned is an error of a known kind, and leaves nothing pinned.
func TestPinRefused(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		page := int(pageSize)
		readOnly := anonymous(t, 4*page)
		if err := unix.Mprotect(readOnly[3*page:], unix.PROT_READ); err != nil {
			t.Fatal(err)
		}
		hole := anonymous(t, 8*page)
		if err := unix.Mprotect(hole[7*page:], unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name string
			b    []byte
		}{{"read-only", readOnly}, {"a hole", hole}, {"a shared file", fileMemory(t, 4*page, unix.MAP_SHARED)}} {
			before := pinnedKiB(t)
			_, err := table.pin(uintptr(AddrOf(c.b)), uintptr(len(c.b)), false)
			var pin *PinError
			if !errors.As(err, &pin) || !errors.Is(err, unix.EFAULT) {
				t.Errorf("%s: %v", c.name, err)
			}
			if after := pinnedKiB(t); after != before {
				t.Errorf("%s: %d KiB are pinned, before %d", c.name, after, before)
			}
		}
	})
}

// An error about the caller's bytes that are not mapped is distinguished from one about the
// pages, and leaves nothing behind in a pipe.
func TestPinnedBufferFaults(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		const size = 1 << 20
		memory := anonymous(t, size)
		p := mustPinIn(t, table, memory)
		for _, mapped := range []int{0, 1, 100, 2 * int(pageSize), 70 * int(pageSize)} {
			for _, n := range []int{mapped + 8, mapped + 2048, mapped + 300<<10} {
				for name, access := range map[string]func([]byte, uint64) error{"read": p.ReadAt, "write": p.WriteAt} {
					b := beforeHole(t, mapped, n)
					clear(memory)
					for i := range mapped {
						b[i] = 7
					}
					err := access(b, 5)
					var failed *PinAccessError
					if !errors.As(err, &failed) || !failed.Buffer || failed.Err != unix.EFAULT {
						t.Fatalf("%s of %d bytes of which %d are mapped: %v", name, n, mapped, err)
					}
					if name == "write" && bytes.Count(memory, []byte{7}) > mapped {
						t.Errorf("more than %d bytes were written", mapped)
					}
				}
				model := bytes.Clone(memory)
				copy(model[9:], "after it")
				got := make([]byte, size)
				if err := errors.Join(p.WriteAt([]byte("after it"), 9), p.ReadAt(got, 0)); err != nil || !bytes.Equal(got, model) {
					t.Fatalf("after it: %v, or the bytes differ", err)
				}
			}
		}
	})
}

// Memory that the kernel gives no references to can be written from all the same.
func TestPinnedFromSecret(t *testing.T) {
	needPins(t)
	const size = 64 << 10
	fd, err := unix.MemfdSecret(unix.O_CLOEXEC)
	if err != nil {
		t.Skipf("kernel: memfd_secret: %v", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	secret, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(secret)
	copy(secret[size-9:], "a secret.")
	if _, err := PinPages(uintptr(AddrOf(secret)), size, true); !errors.Is(err, unix.EFAULT) {
		t.Errorf("it was pinned: %v", err)
	}
	memory := anonymous(t, size)
	p := mustPin(t, memory)
	if err := p.WriteAt(secret, 0); err != nil || !bytes.Equal(memory, secret) {
		t.Errorf("%v, or the bytes differ", err)
	}
}

// When Close has returned nothing is written any more, and an access fails with EBADF.
func TestPinnedCloseUnderLoad(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		rng := pinSeed(t)
		const size = 600 << 10
		for range 12 {
			memory := anonymous(t, size)
			p, err := table.pin(uintptr(AddrOf(memory)), size, true)
			if err != nil {
				t.Fatal(err)
			}
			var running, wg sync.WaitGroup
			for i := range 4 {
				n := 1 + rng.IntN(1<<(5+4*i))
				running.Add(1)
				wg.Go(func() {
					b := make([]byte, n)
					started := sync.OnceFunc(running.Done)
					for round := 0; ; round++ {
						b[0], b[n-1] = byte(round), byte(round)
						access := p.WriteAt
						if round%3 == 0 {
							access = p.ReadAt
						}
						err := access(b, uint64(i*1000))
						started()
						var failed *PinAccessError
						if errors.As(err, &failed) && failed.Err == unix.EBADF && !failed.Buffer {
							return
						}
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			running.Wait()
			var closed atomic.Int32
			for range 2 {
				wg.Go(func() {
					if err := p.Close(); err != nil {
						t.Error(err)
					}
					closed.Add(1)
				})
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			before := bytes.Clone(memory)
			wg.Wait()
			if !bytes.Equal(before, memory) {
				t.Fatal("bytes changed after the end")
			}
			if closed.Load() != 2 {
				t.Error("Close did not return")
			}
		}
	})
}

// Accesses allocate nothing.
func TestPinnedAlloc(t *testing.T) {
	needPins(t)
	p := mustPin(t, anonymous(t, 1<<20))
	small, big := make([]byte, 8), make([]byte, 1<<20)
	if n := testing.AllocsPerRun(100, func() {
		for _, b := range [][]byte{small, big} {
			if p.WriteAt(b, 0) != nil || p.ReadAt(b, 0) != nil {
				t.Error("an access failed")
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
