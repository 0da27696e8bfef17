package sys

import (
	"fmt"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// anonymous maps private memory, all of it present, until the test ends.
func anonymous(tb testing.TB, n int) []byte {
	tb.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(b) })
	return b
}

func sizeName(n int) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%dMiB", n>>20)
	case n >= 1<<10:
		return fmt.Sprintf("%dKiB", n>>10)
	}
	return fmt.Sprintf("%dB", n)
}

// BenchmarkPin pins and unpins memory that is there.
func BenchmarkPin(b *testing.B) {
	needPins(b)
	for _, n := range []int{4 << 10, 256 << 10, 64 << 20} {
		b.Run(sizeName(n), func(b *testing.B) {
			needMemlock(b, uint64(n)+1<<20)
			addr := uintptr(AddrOf(anonymous(b, n)))
			for b.Loop() {
				p, err := PinPages(addr, uintptr(n), true)
				if err != nil {
					b.Fatal(err)
				}
				if err := p.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPinAmongThousand pins and unpins one page while 1,000 others are pinned.
func BenchmarkPinAmongThousand(b *testing.B) {
	needPins(b)
	m := anonymous(b, 1001*int(pageSize))
	for i := range 1000 {
		mustPin(b, m[i*int(pageSize):][:pageSize])
	}
	addr := uintptr(AddrOf(m[1000*pageSize:]))
	for b.Loop() {
		p, err := PinPages(addr, pageSize, true)
		if err != nil {
			b.Fatal(err)
		}
		p.Close()
	}
}

// BenchmarkPinned moves bytes into and out of pinned pages, by one goroutine and by two,
// and beside it by copy.
func BenchmarkPinned(b *testing.B) {
	needPins(b)
	const size = 4 << 20
	p := mustPin(b, anonymous(b, size))
	plain := anonymous(b, size)
	for _, op := range []struct {
		name string
		do   func(b []byte, off uint64) error
	}{
		{"write", p.WriteAt},
		{"read", p.ReadAt},
		{"copy", func(b []byte, off uint64) error { copy(plain[off:], b); return nil }},
	} {
		for _, n := range []int{8, 4 << 10, 64 << 10, 256 << 10, 1 << 20} {
			for _, goroutines := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/%s/%d", op.name, sizeName(n), goroutines), func(b *testing.B) {
					b.SetBytes(int64(n))
					var wg sync.WaitGroup
					for g := range goroutines {
						buf := anonymous(b, n)
						wg.Go(func() {
							for range b.N / goroutines {
								if err := op.do(buf, uint64(g)*size/2); err != nil {
									b.Error(err)
									return
								}
							}
						})
					}
					wg.Wait()
				})
			}
		}
	}
}
