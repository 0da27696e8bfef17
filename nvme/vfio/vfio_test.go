package vfio

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/internal/sys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Real controllers are driven in interop/nvme. Here is none.
func TestNone(t *testing.T) {
	for _, address := range []string{"", "ffff:ff:1f.7", "../../../../dev"} {
		if _, err := Open(address); !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%q: %v", address, err)
		}
	}
}

// Registers after Close, and beside it: nothing is accessed that is not mapped any more. The registers are a file in memory.
func TestRegistersAfterClose(t *testing.T) {
	fd, err := sys.NewMemfd("registers", 2*pageSize)
	if err != nil {
		t.Fatal(err)
	}
	regs, err := sys.MapMemfd(fd, 2*pageSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := sys.CloseFD(fd); err != nil {
		t.Fatal(err)
	}
	d := &Device{dev: new(sys.VFIO), regs: regs}
	d.Write64(0x28, 0x1122334455667788)
	if v := d.Read64(0x28); v != 0x1122334455667788 {
		t.Errorf("%#x", v)
	}
	for _, off := range []uint32{2, 2*pageSize - 2, 2 * pageSize, ^uint32(3)} {
		d.Write32(off, 1)
		if v := d.Read32(off); v != ^uint32(0) {
			t.Errorf("%#x: %#x", off, v)
		}
	}
	var all, begun sync.WaitGroup
	for range 2 {
		begun.Add(1)
		all.Go(func() {
			d.Write32(0x1000, 7)
			begun.Done()
			for d.Read32(0x1000) == 7 {
				d.Write32(0x1000, 7)
			}
		})
	}
	begun.Wait()
	for range 2 {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	all.Wait()
	d.Write64(0x28, 1)
	if v := d.Read64(0x28); v != ^uint64(0) {
		t.Errorf("after Close: %#x", v)
	}
}
