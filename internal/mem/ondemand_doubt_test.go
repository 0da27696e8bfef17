package mem_test

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/sys/modetest"
	"github.com/verbena-rdma/verbena/internal/sys/slowfs"
)

// pageOut has the kernel reclaim pages of a file, as it does when memory is short.
func (o *odp) pageOut(off, n uint64) {
	o.tb.Helper()
	for p := off; p < off+n; p += page {
		at := o.addr + uintptr(p)
		for tries := 0; ; tries++ { // reclaim may leave pages that are in use just then
			o.call(unix.SYS_MADVISE, p, page, unix.MADV_PAGEOUT)
			if slow, err := sys.MayBlock(at, at+page, false); slow && err == nil {
				break
			}
			if tries == 1000 {
				o.tb.Fatalf("the page at %d is not reclaimed", p)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// The kernel does not report what it reclaims. Once pages are found to be gone, no access
// gets stuck on those that are reclaimed next: each asks the kernel before, until a sweep
// finds no more.
func TestOnDemandDoubt(t *testing.T) {
	if modetest.Current() == modetest.Unprivileged {
		t.Skip("full: in the mode unprivileged the slow file system is somebody else's")
	}
	const n = 16 * page
	fs := slowfs.New(t, n)
	t.Cleanup(fs.Kill)
	o := newODP(t, n)
	file := fs.Open()
	o.mapAt(0, n, unix.PROT_READ, unix.MAP_PRIVATE, int(file.Fd()))
	want := make([]byte, n)
	for i := range want {
		want[i] = slowfs.Byte(int64(i))
	}
	mem.WithoutSweeper(func(sweep func()) {
		mem.NoDoubt()
		o.mustRead(0, want)
		o.pageOut(0, 4*page)
		sweep() // finds them
		o.pageOut(8*page, 4*page)
		fs.Hold()
		read := make(chan mem.Fault)
		go func() {
			_, f := o.tryRead(6*page, 6*page)
			read <- f
		}()
		select {
		case f := <-read:
			if f.Kind != mem.FaultPending {
				t.Errorf("%v, want that the bytes have to be fetched", f)
			}
			fs.Go()
		case <-time.After(10 * time.Second):
			t.Error("it waits in the middle of a copy")
			fs.Go()
			<-read
		}
		if s := o.backing.Stats(); s.Invalidations != 2 || s.InvalidationPages != 8 {
			t.Errorf("%+v, want two invalidations of 8 pages", s)
		}
		o.mustRead(0, want)
		// Two sweeps that find nothing more end it.
		sweep()
		sweep()
		o.pageOut(0, 2*page)
		o.mustRead(0, want)
		if s := o.backing.Stats(); s.Invalidations != 2 {
			t.Errorf("%+v: somebody has looked", s)
		}
	})
}

// tryRead reads, without waiting for anything.
func (o *odp) tryRead(off, n uint64) ([]byte, mem.Fault) {
	b := make([]byte, n)
	l := mem.List{Table: o.table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteRead,
		SGEs: []ib.SGE{{Addr: uint64(o.addr) + off, Length: uint32(n), LKey: o.region.Key()}}}
	f, _ := mem.Copy(&mem.List{Raw: [][]byte{b}}, &l, n, false)
	return b, f
}

// While there is doubt, an access still allocates nothing.
func TestOnDemandDoubtAllocs(t *testing.T) {
	const n = 64 * page
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, anonPages, -1)
	o.mustWrite(0, pattern(n, 1))
	mem.WithoutSweeper(func(func()) {
		mem.Doubt()
		defer mem.NoDoubt()
		b := make([]byte, n)
		src := mem.List{Table: o.table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteRead,
			SGEs: []ib.SGE{{Addr: uint64(o.addr), Length: n, LKey: o.region.Key()}}}
		dst := mem.List{Raw: [][]byte{b}}
		if k := testing.AllocsPerRun(100, func() {
			if f, _ := mem.Copy(&dst, &src, n, false); !f.OK() {
				t.Fatal(f)
			}
		}); k != 0 {
			t.Errorf("%v allocations", k)
		}
	})
}
