package sys

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Where there are no reserved huge pages, memory on them cannot be mapped. What other threads map at that moment stays mapped.
func TestNewMappedFileBeside(t *testing.T) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
			defer func() {
				if e := recover(); e != nil {
					t.Errorf("a mapping of another goroutine has gone: %v", e)
				}
			}()
			for !stop.Load() {
				b, err := unix.Mmap(-1, 0, 3<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
				if err != nil {
					t.Error(err)
					return
				}
				for i := 0; i < len(b); i += len(b) / 4 {
					b[i]++
				}
				for i := 0; i < len(b); i += len(b) / 4 {
					if b[i] != 1 {
						t.Errorf("byte %d is %d", i, b[i])
					}
				}
				if err := unix.Munmap(b); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 6000 {
		fd, b, err := NewMappedFile("beside", 4<<20)
		if err != nil {
			t.Error(err)
			break
		}
		if err := FreeMapped(b); err != nil {
			t.Error(err)
		}
		if err := CloseFD(fd); err != nil {
			t.Error(err)
		}
	}
	stop.Store(true)
	wg.Wait()
}
