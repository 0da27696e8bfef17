package rconn

import (
	"io"
	"testing"
)

// What a connection writes from changes its place when much has been written. All bytes arrive, those that were under way at
// that moment, too.
func TestMapOutput(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, link, 1<<16)
			r := seeded(t)
			want := make([]byte, mapAfter+1<<20)
			for i := range want {
				want[i] = byte(r.Uint32())
			}
			wrote := make(chan error, 1)
			go func() {
				left := want
				for len(left) > 0 {
					n := min(1+r.IntN(5000), len(left))
					if _, err := a.Write(left[:n]); err != nil {
						wrote <- err
						return
					}
					left = left[n:]
				}
				wrote <- nil
			}()
			got := make([]byte, len(want))
			if _, err := io.ReadFull(b, got); err != nil {
				t.Fatal(err)
			}
			if err := <-wrote; err != nil {
				t.Fatal(err)
			}
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("byte %d is %d, not %d", i, got[i], want[i])
				}
			}
			a.writes.Lock()
			defer a.writes.Unlock()
			if a.mapping != mapped || a.before != nil {
				t.Fatalf("after %d bytes: state %d, the memory before: %v", len(want), a.mapping, a.before)
			}
		})
	}
}
