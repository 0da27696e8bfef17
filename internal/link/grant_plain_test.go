package link

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// plainWorld is two links, a of which has a grant to plain memory of b.
type plainWorld struct {
	grantWorld
	via  Via
	loan *Loan // nil: a may only read
	free func()
}

// newPlainWorld makes the links and the grant. Without lend, a may only read.
func newPlainWorld(t *testing.T, size int, lend bool) *plainWorld {
	t.Helper()
	w := &plainWorld{grantWorld: grantWorld{t: t, buf: make([]byte, size)}}
	var pages *sys.PinnedPages
	if lend {
		rings, err := sys.NewLentRings()
		if err != nil {
			t.Skipf("kernel: %v", err)
		}
		rings.Close()
		if pages, err = sys.PinPages(uintptr(addrOf(w.buf)), uintptr(size), true); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := pages.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	w.give(func(via Via) *Offer {
		if !via.Plain() {
			t.Skip("kernel: processes may not read each other's memory")
		}
		o := &Offer{Bytes: w.buf, Remaps: via.Remaps()}
		if w.via = via; lend {
			var err error
			if o.Loan, err = via.Lend(pages); err != nil {
				t.Fatal(err)
			}
			w.loan = o.Loan
			w.free = sync.OnceFunc(o.Loan.Free)
			t.Cleanup(w.free)
		}
		return o
	})
	return w
}

// read loads bytes by grant.
func (w *plainWorld) read(off uint64, n int) ([]byte, bool) {
	b := make([]byte, n)
	return b, w.got.Copy(grantVA+off, &mem.List{Raw: [][]byte{b}}, n, 1, true)
}

// Bytes that are written and read by a grant to plain memory are right, whatever their place
// and number, and are counted. The grant ends when its owner shuts it, takes the loan back,
// changes its mappings, or is gone.
func TestGrantPlain(t *testing.T) {
	const size = 1 << 20
	for name, row := range map[string]struct {
		end   func(w *plainWorld)
		reads bool // READs still go
	}{
		"shut":     {end: func(w *plainWorld) { w.given.Shut() }},
		"loan":     {end: func(w *plainWorld) { w.loan.End() }, reads: true},
		"remapped": {end: func(w *plainWorld) { w.b.tickets.remaps.Add(1) }},
		"gone": {end: func(w *plainWorld) {
			w.loan.End()
			if err := w.b.Close(); err != nil {
				w.t.Error(err)
			}
			for deadline := time.Now().Add(10 * time.Second); w.got.Good() && time.Now().Before(deadline); {
				w.a.Poll(&w.k, 10)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newPlainWorld(t, size, true)
			if !w.got.Good() || !w.a.LeadsTo(w.flow, 9, w.got) || !w.got.Covers(77, grantVA, size, false) {
				t.Fatal("the grant is no good")
			}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			want, counts := make([]byte, size), shm.GrantCounts{}
			for _, n := range []int{1, 8, 9, 63, plainShort, plainShort + 1, plainShort + refTail, 64 << 10, 1<<18 + 5} {
				for _, off := range []int{0, 3, 4094, size - n} {
					text := make([]byte, n)
					for i := range text {
						text[i] = byte(rng.Uint32())
					}
					copy(want[off:], text)
					if !w.write(uint64(off), text) || !bytes.Equal(w.buf, want) {
						t.Fatalf("%d bytes at %d are not there", n, off)
					}
					if back, ok := w.read(uint64(off), n); !ok || !bytes.Equal(back, text) {
						t.Fatalf("%d bytes at %d do not come back", n, off)
					}
					for i, more := range []int{1, 1, n, 1, 1, n} {
						counts[i] += uint64(more)
					}
				}
			}
			if c := w.given.Counts(); c != counts {
				t.Errorf("counted are %v, want %v", c, counts)
			}
			row.end(w)
			if w.write(100, []byte("too late")) || w.got.Good() && !row.reads {
				t.Error("the grant is still good")
			}
			if _, ok := w.read(100, 2*plainShort); ok != row.reads {
				t.Errorf("READ: %v", ok)
			}
			if !bytes.Equal(w.buf, want) {
				t.Error("something was written")
			}
		})
	}
}

// Without a loan the grant is for READs alone.
func TestGrantPlainReadOnly(t *testing.T) {
	w := newPlainWorld(t, 8192, false)
	if w.got.Covers(77, grantVA, 8, false) || !w.got.Covers(77, grantVA, 8192, true) {
		t.Error("it covers WRITEs, or not all READs")
	}
	copy(w.buf[4090:], "across pages")
	if b, ok := w.read(4090, 12); !ok || string(b) != "across pages" {
		t.Errorf("%q, %v", b, ok)
	}
	if w.got.Copy(grantVA, &mem.List{Raw: [][]byte{{1}}}, 2, 1, true) {
		t.Error("two bytes are read to one")
	}
	if c := w.given.Counts(); c != (shm.GrantCounts{0, 0, 0, 1, 1, 12}) || w.given.Inside() {
		t.Errorf("counted are %v, inside %v", c, w.given.Inside())
	}
}

// With the last loan the rings are closed, and the peer gives its copies up. The next loan
// brings new ones.
func TestGrantPlainRings(t *testing.T) {
	w := newPlainWorld(t, 8192, true)
	rings := func() (n int) {
		w.a.segments.mu.Lock()
		defer w.a.segments.mu.Unlock()
		for k := range w.a.segments.grants {
			if k.id == w.loan.id {
				n++
			}
		}
		return n
	}
	if rings() != 1 {
		t.Fatalf("%d rings", rings())
	}
	w.given.Shut()
	w.loan.End()
	w.loan.End()
	k := w.loan.from
	if k.rings == nil || k.loans != 1 {
		t.Errorf("the loan, which the peer may be about to write by, has given up its rings: %d loans", k.loans)
	}
	w.free()
	if k.rings != nil || k.loans != 0 {
		t.Errorf("%d loans, rings %v", k.loans, k.rings)
	}
	for deadline := time.Now().Add(10 * time.Second); rings() != 0; w.a.Poll(&w.k, 10) {
		if time.Now().After(deadline) {
			t.Fatal("the peer keeps its copies")
		}
	}
	pages, err := sys.PinPages(uintptr(addrOf(w.buf)), 8192, true)
	if err != nil {
		t.Fatal(err)
	}
	l, err := w.via.Lend(pages)
	if err != nil || l.id == w.loan.id {
		t.Fatal(l, err)
	}
	if err := pages.Close(); err != nil {
		t.Error(err)
	}
	if _, err := w.via.Lend(pages); err == nil {
		t.Error("closed pages are lent")
	}
	l.Free()
}

// What a record says of plain memory is checked.
func TestGrantPlainRecord(t *testing.T) {
	b := make([]byte, plainBytes)
	p := packer{b}
	p.u64(7)
	p.u32(3)
	p.u32(2)
	p.u32(100)
	p.u32(101)
	l, fds, ok := unpackPlain(b, 5)
	if !ok || l.remaps != 7 || l.slot != 3 || l.hint != 5 || len(fds) != 2 || fds[0] != 100 || fds[1] != 101 {
		t.Errorf("%+v, %v, %v", l, fds, ok)
	}
	le.PutUint32(b[12:], sys.MaxLentRings+1)
	if _, _, ok := unpackPlain(b, 5); ok {
		t.Error("too many rings are taken")
	}
}
