package mem_test

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Which memory is pinned to be lent: what the program cannot remap, or what the kernel reports
// every change of.
func TestPinToLend(t *testing.T) {
	needPins(t)
	if s := mem.PagingMeans(); s.Notifier != "userfaultfd" || s.Scan != "PAGEMAP_SCAN" {
		t.Skipf("kernel: %+v", s)
	}
	const n = 64 << 10
	const access = ib.AccessLocalWrite | ib.AccessRemoteWrite
	private := func(t *testing.T, flags int) []byte {
		b := mmap(t, -1, n, unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_ANONYMOUS)
		t.Cleanup(func() { _ = unix.Munmap(b) })
		return b
	}
	host := func(b []byte, lock ib.LockMode) func(t *testing.T) (mem.Backing, []byte) {
		return func(t *testing.T) (mem.Backing, []byte) {
			h, err := mem.NewHostBytes(b, access, lock)
			if err != nil {
				t.Fatal(err)
			}
			return h, b
		}
	}
	for _, row := range []struct {
		name string
		make func(t *testing.T) (mem.Backing, []byte)
		end  func(t *testing.T, r *mem.Region, b []byte)
		want error
	}{
		{"Go heap", host(make([]byte, n), ib.LockAuto), nil, nil},
		{"private", func(t *testing.T) (mem.Backing, []byte) { return host(private(t, unix.MAP_PRIVATE), ib.LockAuto)(t) }, nil, nil},
		{"a part of a page", func(t *testing.T) (mem.Backing, []byte) {
			return host(private(t, unix.MAP_PRIVATE)[5:77], ib.LockAuto)(t)
		}, nil, nil},
		{"shared", func(t *testing.T) (mem.Backing, []byte) { return host(private(t, unix.MAP_SHARED), ib.LockAuto)(t) }, nil, mem.ErrNotLendable},
		{"lock off", host(make([]byte, n), ib.LockOff), nil, mem.ErrNotLendable},
		{"much Go heap", host(make([]byte, 256<<20+1), ib.LockAuto), nil, mem.ErrNotLendable},
		{"strictly pinned", func(t *testing.T) (mem.Backing, []byte) {
			b, err := mem.NewPinned(addrOf(private(t, unix.MAP_PRIVATE)), n, access, ib.LockStrict, nil)
			if err != nil {
				t.Fatal(err)
			}
			return b, nil
		}, nil, mem.ErrNotLendable},
		{"region closed", host(make([]byte, n), ib.LockAuto), func(t *testing.T, r *mem.Region, _ []byte) {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}, mem.ErrNotLendable},
		{"mapped over", func(t *testing.T) (mem.Backing, []byte) { return host(private(t, unix.MAP_PRIVATE), ib.LockAuto)(t) },
			func(t *testing.T, _ *mem.Region, b []byte) {
				if _, err := unix.MmapPtr(-1, 0, ptr(b[4096:]), 4096, unix.PROT_READ|unix.PROT_WRITE,
					unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED); err != nil {
					t.Fatal(err)
				}
			}, mem.ErrNotLendable},
	} {
		t.Run(row.name, func(t *testing.T) {
			backing, b := row.make(t)
			table := mem.NewTable(mem.TableConfig{MaxRegions: 4})
			r, err := table.Register(mem.RegionConfig{PD: 1, Access: access, Length: backing.Len(), Backing: backing})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = r.Close() }) // a second time, for one row
			if row.end != nil {
				row.end(t, r, b)
			}
			p, err := mem.PinToLend(r)
			if !errors.Is(err, row.want) {
				t.Fatal(err)
			}
			if err != nil {
				return
			}
			text := []byte("to the pages")
			if err := p.WriteAt(text, uint64(len(b)-len(text))); err != nil || !bytes.HasSuffix(b, text) {
				t.Errorf("%v, or they are other pages", err)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if first, second := mem.NewLoanNumber(), mem.NewLoanNumber(); first == 0 || second == first {
		t.Errorf("the numbers %d and %d", first, second)
	}
}
