package peermem_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/peermem"
	"github.com/verbena-rdma/verbena/peermem/peertest"
)

func TestMain(m *testing.M) {
	dmabuf.CheckLocks(true)
	goleak.VerifyTestMain(m)
}

const page = 64 << 10

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, err error, want syscall.Errno) {
	t.Helper()
	var op *ib.OpError
	if !errors.Is(err, want) || !errors.As(err, &op) {
		t.Errorf("%s: %v, should be %v", what, err, want)
	}
}

func newDevice(t *testing.T, cfg peertest.Config) *peertest.Device {
	t.Helper()
	d, err := peertest.New(cfg)
	check(t, err)
	t.Cleanup(func() {
		check(t, d.Close(context.Background()))
		if wrong := d.Wrong(); len(wrong) > 0 || d.Open() != 0 {
			t.Errorf("%d claims are not released; out of order: %v", d.Open(), wrong)
		}
	})
	return d
}

// find finds memory of a device, which must be there.
func find(t *testing.T, d *peertest.Device, off, n uint64) *dmabuf.Buffer {
	t.Helper()
	b, err := peermem.Find(d.Addr()+uintptr(off), n, true)
	check(t, err)
	if b == nil {
		t.Fatal("the client does not claim its memory")
	}
	return b
}

// importer is one that pins.
type importer struct {
	a           *dmabuf.Attachment
	table       *dmabuf.Table
	invalidated int
}

// attach attaches an importer, which gives the memory up when it is told to.
func attach(t *testing.T, b *dmabuf.Buffer) *importer {
	t.Helper()
	i := new(importer)
	a, err := b.DynamicAttach(nil, dmabuf.Importer{AllowPeer2Peer: true, InvalidateMappings: func(*dmabuf.Attachment) {
		i.invalidated++
		i.drop()
	}})
	check(t, err)
	i.a = a
	return i
}

func (i *importer) drop() {
	if i.table != nil {
		i.a.Unmap(i.table, dmabuf.Bidirectional)
		i.table = nil
		i.a.Unpin()
	}
}

// take pins and maps the memory.
func (i *importer) take() error {
	r := i.a.Buffer().Reservation()
	r.Lock()
	defer r.Unlock()
	if err := i.a.Pin(); err != nil {
		return err
	}
	table, err := i.a.Map(context.Background(), dmabuf.Bidirectional)
	if err != nil {
		i.a.Unpin()
		return err
	}
	i.table = table
	return nil
}

// end gives the memory up, and the buffer.
func (i *importer) end() {
	b := i.a.Buffer()
	b.Reservation().Lock()
	i.drop()
	b.Reservation().Unlock()
	i.a.Detach()
	b.Put()
}

var life = []string{"acquire", "get_pages", "dma_map", "dma_unmap", "put_pages", "release"}

// A buffer of a client is its memory at the address: whole pages, cut to what was asked for, whatever
// their order is.
func TestBuffer(t *testing.T) {
	d := newDevice(t, peertest.Config{Pages: 4})
	content := make([]byte, d.Len())
	for i := range content {
		content[i] = byte(i / 251)
	}
	d.WriteAt(content, 0)
	var want peermem.Stats
	for i, r := range [][2]uint64{{0, d.Len()}, {0, 1}, {1, 1}, {d.Len() - 1, 1}, {page - 3, 6}, {100, 3*page - 7}, {page, page}, {2*page - 1, page + 2}} {
		off, n := r[0], r[1]
		im := attach(t, find(t, d, off, n))
		check(t, im.take())
		var got []byte
		for _, s := range im.table.Segments() {
			got = append(got, s...)
		}
		if !bytes.Equal(got, content[off:][:n]) {
			t.Errorf("%d bytes at %d are others", n, off)
		}
		if b := im.a.Buffer(); b.Size() != n || b.Exporter() != "peertest" {
			t.Errorf("a buffer of %d bytes of %s", b.Size(), b.Exporter())
		}
		im.end()
		c := d.Claims()[i]
		if calls := d.Calls(c); !slices.Equal(calls, life) || c.Force {
			t.Errorf("calls %v, force %v", calls, c.Force)
		}
		pages := (off+n-1)/page - off/page + 1
		want.AllocMRs, want.RegPages, want.RegBytes = want.AllocMRs+1, want.RegPages+pages, want.RegBytes+n
		want.DeallocMRs, want.DeregPages, want.DeregBytes = want.AllocMRs, want.RegPages, want.RegBytes
		if got := d.Client().Stats(); got != want {
			t.Errorf("counted %+v, should be %+v", got, want)
		}
	}
	// Reading alone is asked for by force, as in vendors' kernels.
	b, err := peermem.Find(d.Addr(), 10, false)
	check(t, err)
	im := attach(t, b)
	check(t, im.take())
	im.end()
	if c := d.Claims()[len(d.Claims())-1]; !c.Force {
		t.Error("memory that is only read is not asked for by force")
	}
}

// Clients are asked in the order of their registration, until one claims the memory.
func TestOrder(t *testing.T) {
	first, second := newDevice(t, peertest.Config{Name: "first", Pages: 1}), newDevice(t, peertest.Config{Name: "second", Pages: 1})
	for _, d := range []*peertest.Device{first, second} {
		b := find(t, d, 0, 10)
		if b.Exporter() != d.Client().Name() {
			t.Errorf("memory of %s is claimed by %s", d.Client().Name(), b.Exporter())
		}
		b.Put()
	}
	if first.Asked() != 2 || second.Asked() != 1 {
		t.Errorf("asked %d and %d times, should be 2 and 1", first.Asked(), second.Asked())
	}
	for what, r := range map[string][2]uint64{"before": {^uint64(0), 1}, "behind": {page, 1}, "beyond": {1, page}} {
		b, err := peermem.Find(first.Addr()+uintptr(r[0]), r[1], true)
		if b != nil || err != nil {
			t.Errorf("%s the memory: %v, %v", what, b, err)
		}
	}
	for _, r := range []struct {
		addr uintptr
		n    uint64
	}{{first.Addr(), 0}, {first.Addr(), 1 << 63}, {^uintptr(0), 2}, {1, ^uint64(0)}} {
		_, err := peermem.Find(r.addr, r.n, true)
		wantErr(t, fmt.Sprint(r), err, syscall.EINVAL)
	}
	if names := []string{peermem.Clients()[0].Name(), peermem.Clients()[1].Name()}; !slices.Equal(names, []string{"first", "second"}) {
		t.Error(names)
	}
}

// Clients that are not whole are refused.
func TestRegisterRefuses(t *testing.T) {
	whole := func() peermem.Client {
		return peermem.Client{
			Name: "whole", Version: "1",
			Acquire:  func(uintptr, uint64) (any, bool) { return nil, false },
			GetPages: func(any, uintptr, uint64, bool, bool, uint64) error { return nil },
			PutPages: func(any) {}, DMAUnmap: func(any) {},
			DMAMap: func(any) ([][]byte, error) { return nil, nil },
		}
	}
	for what, spoil := range map[string]func(c *peermem.Client){
		"no name":                               func(c *peermem.Client) { c.Name = "" },
		"a long name":                           func(c *peermem.Client) { c.Name = strings.Repeat("x", 64) },
		"a name with a slash":                   func(c *peermem.Client) { c.Name = "a/b" },
		"..":                                    func(c *peermem.Client) { c.Name = ".." },
		"a long version":                        func(c *peermem.Client) { c.Version = strings.Repeat("1", 16) },
		"no Acquire":                            func(c *peermem.Client) { c.Acquire = nil },
		"no GetPages":                           func(c *peermem.Client) { c.GetPages = nil },
		"no PutPages":                           func(c *peermem.Client) { c.PutPages = nil },
		"no DMAMap":                             func(c *peermem.Client) { c.DMAMap = nil },
		"no DMAUnmap":                           func(c *peermem.Client) { c.DMAUnmap = nil },
		"unmaps, though it does not invalidate": func(c *peermem.Client) { c.UnmapsItself = true },
	} {
		c := whole()
		spoil(&c)
		_, err := peermem.Register(c)
		wantErr(t, what, err, syscall.EINVAL)
	}
	r, err := peermem.Register(whole())
	check(t, err)
	if r.Name() != "whole" || r.Version() != "1" {
		t.Errorf("%s %s", r.Name(), r.Version())
	}
	_, err = peermem.Register(whole())
	wantErr(t, "a second client of that name", err, syscall.EEXIST)
	wantErr(t, "a client that does not invalidate", r.Invalidate(1), syscall.EINVAL)
	check(t, r.Unregister(t.Context()))
	check(t, r.Unregister(t.Context()))
	if len(peermem.Clients()) != 0 {
		t.Error("a client is left")
	}
}

// Tables and page sizes that cannot be true are refused, and everything is undone.
func TestLies(t *testing.T) {
	d := newDevice(t, peertest.Config{Pages: 4})
	whole := d.Table(0, 4*page)
	const off, n = page - 100, 2 * page // three pages
	lies := map[string]struct {
		table [][]byte
		page  uint64
	}{
		"no table":                  {nil, page},
		"no segments":               {[][]byte{}, page},
		"too short":                 {whole[:2], page},
		"an empty segment":          {append([][]byte{{}}, whole...), page},
		"a part of a page":          {[][]byte{whole[0], whole[1], whole[2][:page-1], whole[3]}, page},
		"a segment twice":           {[][]byte{whole[0], whole[1], whole[0]}, page},
		"segments that overlap":     {[][]byte{whole[0], make([]byte, 3*page)[:page], whole[0]}, page},
		"pages of 2^63 bytes":       {whole, 1 << 63},
		"pages of a byte":           {whole, 1},
		"pages of no bytes":         {whole, 0},
		"no power of two":           {whole, 3 * page},
		"smaller than the system's": {whole, uint64(os.Getpagesize()) / 2},
		"larger than the memory":    {whole, 8 * page},
		"larger than all memory":    {whole, 1 << 62},
	}
	one := make([]byte, 3*page)
	lies["half a page further"] = struct {
		table [][]byte
		page  uint64
	}{[][]byte{one[:2*page], one[page:]}, page}
	for what, lie := range lies {
		d.Lie(func() [][]byte { return lie.table }, lie.page)
		d.SetPageSize(lie.page) // also 0
		im := attach(t, find(t, d, off, n))
		wantErr(t, what, im.take(), syscall.EINVAL)
		im.end()
		c := d.Claims()[len(d.Claims())-1]
		if calls := d.Calls(c); !slices.Equal(calls, life) {
			t.Errorf("%s: calls %v", what, calls)
		}
	}
	if s := d.Client().Stats(); s != (peermem.Stats{}) {
		t.Errorf("counted %+v", s)
	}
	// More than is needed is no lie.
	d.Lie(func() [][]byte { return whole }, page)
	im := attach(t, find(t, d, off, n))
	check(t, im.take())
	if im.table.Len() != n {
		t.Errorf("%d bytes", im.table.Len())
	}
	im.end()
}

// Who may import what a client has.
func TestImporters(t *testing.T) {
	d := newDevice(t, peertest.Config{Pages: 1})
	b := find(t, d, 0, page)
	_, err := b.Attach(nil)
	wantErr(t, "a static importer", err, syscall.EOPNOTSUPP)
	_, err = b.DynamicAttach(nil, dmabuf.Importer{})
	wantErr(t, "an importer that cannot be told", err, syscall.EOPNOTSUPP)
	im := attach(t, b)
	_, err = b.DynamicAttach(nil, dmabuf.Importer{InvalidateMappings: func(*dmabuf.Attachment) {}})
	wantErr(t, "a second importer", err, syscall.EBUSY)
	b.Reservation().Lock()
	_, err = im.a.Map(t.Context(), dmabuf.Bidirectional)
	wantErr(t, "an importer that does not pin", err, syscall.EOPNOTSUPP)
	b.Reservation().Unlock()
	check(t, im.take())
	b.Reservation().Lock()
	_, err = im.a.Map(t.Context(), dmabuf.Bidirectional)
	wantErr(t, "a second mapping", err, syscall.EBUSY)
	b.Reservation().Unlock()
	im.end()

	// A client that does not invalidate takes static importers, too.
	mute := newDevice(t, peertest.Config{Name: "mute", Pages: 1, Mute: true})
	b = find(t, mute, 0, page)
	a, err := b.Attach(nil)
	check(t, err)
	b.Reservation().Lock()
	table, err := a.Map(t.Context(), dmabuf.ToDevice)
	check(t, err)
	a.Unmap(table, dmabuf.ToDevice)
	b.Reservation().Unlock()
	a.Detach()
	b.Put()
}

// Invalidate takes the memory away, once: unmapped and put from within, or left to the client.
// Numbers that are stale do nothing.
func TestInvalidate(t *testing.T) {
	for _, self := range []bool{false, true} {
		t.Run(fmt.Sprintf("itself=%v", self), func(t *testing.T) {
			d := newDevice(t, peertest.Config{Pages: 2, UnmapsItself: self})
			im, other := attach(t, find(t, d, 0, page)), attach(t, find(t, d, page, page))
			check(t, im.take())
			check(t, other.take())
			c := d.Claims()[0]
			check(t, d.Client().Invalidate(c.Core))
			want := []string{"acquire", "get_pages", "dma_map", "dma_unmap", "put_pages"}
			if self {
				want = want[:3]
			}
			if calls := d.Calls(c); !slices.Equal(calls, want) || im.invalidated != 1 || other.invalidated != 0 {
				t.Errorf("calls %v; told %d and %d times", calls, im.invalidated, other.invalidated)
			}
			check(t, d.Client().Invalidate(c.Core))
			if calls := d.Calls(c); !slices.Equal(calls, want) {
				t.Errorf("the second time: calls %v", calls)
			}
			wantErr(t, "after Invalidate", im.take(), syscall.ENODEV)
			if s := d.Client().Stats(); s.DeallocMRs != 1 || s.DeregPages != 1 || s.DeregBytes != page || s.FreeCallbacks != 2 {
				t.Errorf("counted %+v", s)
			}
			check(t, d.Free()) // a client that unmaps by itself notes it here
			im.end()
			other.end()
			for _, core := range []uint64{c.Core, 0, 1 << 63} {
				check(t, d.Client().Invalidate(core))
			}
			if calls := d.Calls(c); calls[len(calls)-1] != "release" {
				t.Errorf("calls %v", calls)
			}
			if s := d.Client().Stats(); s.AllocMRs != 2 || s.DeallocMRs != 2 || s.DeregBytes != 2*page {
				t.Errorf("counted %+v", s)
			}
		})
	}
}

// Unregister waits for the last region, and for calls of Acquire under way. The client is not asked
// any more meanwhile.
func TestUnregisterWaits(t *testing.T) {
	d, err := peertest.New(peertest.Config{Pages: 1})
	check(t, err)
	b := find(t, d, 0, 10)
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := d.Client().Unregister(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Unregister while memory is claimed: %v", err)
	}
	asked := d.Asked()
	if b, err := peermem.Find(d.Addr(), 10, true); b != nil || err != nil || d.Asked() != asked {
		t.Errorf("a client that is unregistered: %v, %v", b, err)
	}
	done := make(chan error)
	go func() { done <- d.Close(context.Background()) }()
	select {
	case err := <-done:
		t.Fatalf("Close has not waited: %v", err)
	case <-time.After(10 * time.Millisecond):
	}
	b.Put()
	check(t, <-done)
	if calls := d.Calls(d.Claims()[0]); !slices.Equal(calls, []string{"acquire", "release"}) {
		t.Errorf("calls %v", calls)
	}
}
