package importer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/peermem/peertest"
)

const peerPage = 64 << 10

func newPeer(t *testing.T, cfg peertest.Config) *peertest.Device {
	t.Helper()
	d, err := peertest.New(cfg)
	check(t, err)
	t.Cleanup(func() {
		check(t, d.Close(context.Background())) // waits until all is released
		if wrong := d.Wrong(); len(wrong) > 0 {
			t.Errorf("out of order: %v", wrong)
		}
		if s := d.Client().Stats(); s.AllocMRs != s.DeallocMRs || s.RegPages != s.DeregPages || s.RegBytes != s.DeregBytes {
			t.Errorf("counted %+v", s)
		}
	})
	return d
}

const allRights = ib.AccessLocalWrite | ib.AccessRemote

// registerPeer registers memory of a client.
func registerPeer(t *testing.T, table *mem.Table, d *peertest.Device, off, n uint64) region {
	t.Helper()
	b, err := importer.ImportPeer(d.Addr()+uintptr(off), n, allRights, nil)
	check(t, err)
	if b == nil {
		t.Fatal("the client does not claim its memory")
	}
	r, err := table.Register(regionOn(b))
	check(t, err)
	return region{r, table, b}
}

var peerLife = []string{"acquire", "get_pages", "dma_map", "dma_unmap", "put_pages", "release"}

func lastCalls(d *peertest.Device) []string {
	all := d.Claims()
	return d.Calls(all[len(all)-1])
}

// A region on memory of a client, across pages that lie anywhere.
func TestPeer(t *testing.T) {
	d := newPeer(t, peertest.Config{Pages: 3})
	r := registerPeer(t, newTable(), d, 100, 2*peerPage)
	if r.Kind() != mem.KindPeer || !r.backing.Pins() || r.Kind().String() != "peer" {
		t.Error(r.Kind())
	}
	r.works(t, "a region", 5)
	b := make([]byte, 2000)
	if d.ReadAt(b, 100+2*peerPage-2000); b[0] != 5 || b[1999] != 5 {
		t.Error("the device does not see what was written")
	}
	wantErr(t, "registering again", r.backing.CanRereg(), syscall.EOPNOTSUPP)
	check(t, r.Close())
	if calls := lastCalls(d); !slices.Equal(calls, peerLife) {
		t.Error(calls)
	}
}

// Each of the client's operations fails in turn: with its errno, in order, and nothing is left.
func TestPeerFails(t *testing.T) {
	d := newPeer(t, peertest.Config{Pages: 2})
	table := newTable()
	want := map[string][]string{"get_pages": {"acquire", "release"}, "dma_map": {"acquire", "get_pages", "put_pages", "release"}}
	for op, calls := range want {
		for _, c := range []struct {
			err  error
			want syscall.Errno
		}{{syscall.ENOMEM, syscall.ENOMEM}, {syscall.EBUSY, syscall.EBUSY}, {ib.Errorf("theirs", syscall.ENOSPC, "full"), syscall.ENOSPC}, {errors.New("bad weather"), syscall.EIO}} {
			d.Fail(op, c.err)
			_, err := importer.ImportPeer(d.Addr(), 10, allRights, nil)
			wantErr(t, fmt.Sprintf("%s: %v", op, c.err), err, c.want)
			if got := lastCalls(d); !slices.Equal(got, calls) {
				t.Errorf("%s: calls %v, should be %v", op, got, calls)
			}
			d.Fail(op, nil)
		}
		r := registerPeer(t, table, d, 0, 2*peerPage)
		r.works(t, "after "+op, 9)
		check(t, r.Close())
	}
	d.Fail("acquire", syscall.EIO) // so it is not the client's
	if b, err := importer.ImportPeer(d.Addr(), 10, allRights, nil); b != nil || err != nil {
		t.Errorf("memory of nobody: %v, %v", b, err)
	}
	d.Fail("acquire", nil)
	d.Lie(func() [][]byte { return d.Table(0, peerPage) }, 0)
	_, err := importer.ImportPeer(d.Addr(), 2*peerPage, allRights, nil)
	wantErr(t, "a table that is too short", err, syscall.EINVAL)
	if got := lastCalls(d); !slices.Equal(got, peerLife) {
		t.Errorf("a table that is too short: calls %v", got)
	}
}

// Each of the client's operations hangs in turn: the registration fails after a while. When the client
// goes on, what it has begun is undone.
func TestPeerHangs(t *testing.T) {
	for _, op := range []string{"acquire", "get_pages", "dma_map", "get_page_size"} {
		d := newPeer(t, peertest.Config{Name: op, Pages: 2})
		patient := impatient(t)
		goOn := d.Hang(op)
		_, err := importer.ImportPeer(d.Addr(), 10, allRights, nil)
		wantErr(t, op, err, syscall.ETIMEDOUT)
		if d.Hanging(op) != 1 {
			t.Errorf("%s does not hang", op)
		}
		goOn()
		patient()
		eventually(t, op+" is undone", func() bool { return len(d.Claims()) == 1 && d.Open() == 0 })
		r := registerPeer(t, newTable(), d, 0, 2*peerPage)
		r.works(t, "after "+op, 9)
		check(t, r.Close())
	}
	for _, op := range []string{"dma_unmap", "put_pages", "release"} {
		d := newPeer(t, peertest.Config{Name: op, Pages: 2})
		r := registerPeer(t, newTable(), d, 0, 2*peerPage)
		patient := impatient(t)
		goOn := d.Hang(op)
		wantErr(t, op, r.Close(), syscall.ETIMEDOUT)
		r.fails(t, op, mem.FaultKey)
		goOn()
		patient()
		eventually(t, op+" is done", func() bool { return d.Open() == 0 })
	}
}

// Memory is invalidated at any moment of a region's life: the client's operations are called once, in
// order, and later accesses fail.
func TestPeerInvalidated(t *testing.T) {
	d := newPeer(t, peertest.Config{Pages: 2})
	table := newTable()

	r := registerPeer(t, table, d, 10, peerPage)
	r.works(t, "before", 1)
	check(t, d.Free())
	r.fails(t, "after", mem.FaultRevoked)
	check(t, d.Free())
	if got := lastCalls(d); !slices.Equal(got, peerLife[:5]) {
		t.Errorf("calls %v", got)
	}
	check(t, r.Close())
	if got := lastCalls(d); !slices.Equal(got, peerLife) {
		t.Errorf("calls %v", got)
	}

	// Before there is a region.
	b, err := importer.ImportPeer(d.Addr(), 10, allRights, nil)
	check(t, err)
	check(t, d.Free())
	mr, err := table.Register(regionOn(b))
	check(t, err)
	region{mr, table, b}.fails(t, "before the region", mem.FaultRevoked)
	check(t, mr.Close())

	// While it is registered: Invalidate waits for that.
	goOn := d.Hang("dma_map")
	var wg sync.WaitGroup
	wg.Go(func() {
		b, err := importer.ImportPeer(d.Addr(), 10, allRights, nil)
		if err != nil {
			t.Error(err)
			return
		}
		mr, err := table.Register(regionOn(b))
		check(t, err)
		// Invalidate may come before or after this access, but not within it.
		eventually(t, "the region is revoked", func() bool {
			f := region{mr, table, b}.write(0, []byte{1})
			return f.Kind == mem.FaultRevoked
		})
		if err := mr.Close(); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "dma_map hangs", func() bool { return d.Hanging("dma_map") == 1 })
	freed := make(chan error)
	go func() { freed <- d.Free() }()
	goOn()
	check(t, <-freed)
	wg.Wait()
	eventually(t, "all is released", func() bool { return d.Open() == 0 })
}

// Regions come and go, and are accessed, while the memory is freed again and again: after Free has
// returned nothing is written to what was registered before.
func TestPeerInvalidatedUnderLoad(t *testing.T) {
	defer watchdog(t)()
	for _, self := range []bool{false, true} {
		d := newPeer(t, peertest.Config{Name: fmt.Sprint(self), Pages: 4, UnmapsItself: self})
		table := newTable()
		var era, revoked atomic.Int64
		var stop atomic.Bool
		var wg sync.WaitGroup
		for w := range 3 {
			wg.Go(func() {
				for i := 0; !stop.Load(); i++ {
					off := uint64(w*1000 + i%7)
					b, err := importer.ImportPeer(d.Addr()+uintptr(off), 2*peerPage, allRights, nil)
					if err != nil {
						t.Error(err)
						return
					}
					mr, err := table.Register(regionOn(b))
					if err != nil {
						t.Error(err)
						return
					}
					r := region{mr, table, b}
					for range 200 {
						now := era.Load()
						f := r.write(peerPage-50, []byte{1, 2, 3, 4, 5, 6, 7, 8})
						if f.Kind == mem.FaultRevoked {
							revoked.Add(1)
							break
						}
						if !f.OK() {
							t.Errorf("a write ends with %v (%d)", f, now)
							break
						}
					}
					if err := mr.Close(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		n := rounds(30)
		for i := 0; (i < n || revoked.Load() < 3) && !t.Failed(); i++ { // the watchdog ends it
			era.Add(1)
			if err := d.Free(); err != nil {
				t.Error(err)
			}
			time.Sleep(100 * time.Microsecond) // for regions to come
		}
		stop.Store(true)
		wg.Wait()
		if d.Open() != 0 || len(d.Claims()) == 0 {
			t.Errorf("%d of %d claims are not released", d.Open(), len(d.Claims()))
		}
		for _, c := range d.Claims() {
			calls := d.Calls(c)
			if !self && !slices.Equal(calls, peerLife) {
				t.Fatalf("calls %v", calls)
			}
		}
		t.Logf("unmaps itself %v: %d regions, %d revoked", self, len(d.Claims()), revoked.Load())
	}
}
