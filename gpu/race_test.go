package gpu

import (
	"errors"
	"sync"
	"testing"
)

// TestCloseAmidAlloc closes a GPU while other goroutines allocate memory of it: what they have under way is finished or
// refused, and the GPU's memory stays until then.
func TestCloseAmidAlloc(t *testing.T) {
	for range 100 {
		d := must[*Device](t)(Open("soft:0", &Config{VRAM: 4 * mib}))
		var group sync.WaitGroup
		begun := make(chan struct{}, 2)
		for range 2 {
			group.Go(func() {
				for i := 0; ; i++ {
					if i == 8 {
						begun <- struct{}{}
					}
					b, err := d.Alloc(mib - 1)
					if err == nil {
						_, err = b.WriteAt([]byte{1}, 5)
						_ = b.Free() // the device may have
					}
					if err != nil && !errors.Is(err, ErrFreed) {
						wantErr(t, "Alloc amid Close", err, ErrClosed)
						return
					}
				}
			})
		}
		<-begun
		<-begun
		check(t, d.Close())
		group.Wait()
	}
}

// TestFreeAmidPin frees a Buffer while another goroutine pins and maps it. No pin outlives the Buffer: the object, of
// which there is another Buffer or none, can move.
func TestFreeAmidPin(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	for i := range 2000 {
		whole := alloc(t, d, 8192)
		b := must[*Buffer](t)(whole.Sub(0, 4096))
		if i%2 == 0 {
			check(t, whole.Free())
		}
		var group sync.WaitGroup
		for _, do := range []func() error{b.Pin, func() error { _, err := b.Map(); return err }} {
			group.Go(func() {
				for {
					if err := do(); err != nil {
						wantErr(t, "a pin amid Free", err, ErrFreed)
						return
					}
				}
			})
		}
		check(t, b.Free())
		group.Wait()
		if i%2 == 1 {
			check(t, whole.Evict(longTime(t)))
			check(t, whole.Free())
		}
	}
}
