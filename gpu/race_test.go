package gpu

import (
	"sync"
	"testing"
)

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
