package p2p

import (
	"os"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe"
	rxeresult "github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
)

// TestPeerMemory registers the memory of an NVMe controller with our device, in a virtual machine. The kernel's rxe uses
// it over the network, disks use it by O_DIRECT, perftest has its buffers there (interop/rxe, cases rc/p2pmem). That no
// byte goes through system memory is confirmed by the kernel, in these cases, and by the emulator, here: it has noted
// every address that a disk has used.
func TestPeerMemory(t *testing.T) {
	vmtest.Need(t, rxe.Check())
	_, err := vm.FindKernel(t.Context(), suite, vm.Amd64)
	vmtest.Need(t, err)
	o := rxe.Options{Suite: suite, Order: rxeresult.Order{Peers: true, Short: os.Getenv("VERBENA_FULL") == ""}, Dir: t.TempDir(), Limit: 20 * time.Minute}
	cases := 0
	err = rxe.Run(t.Context(), o, func(l rxeresult.Line) {
		switch {
		case l.Plan != nil:
			t.Logf("Linux %s, %d cases", l.Plan.Release, len(l.Plan.Cases))
		case l.Case != nil:
			cases++
			t.Run(l.Case.Name, func(t *testing.T) {
				if l.Case.Err != "" || l.Case.Skip != "" {
					t.Error(l.Case.Err, l.Case.Skip)
				}
			})
		}
	})
	if err != nil || cases == 0 {
		t.Fatalf("%d cases, %v", cases, err)
	}
	used, err := vm.PeerUses(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	near, far := used[vm.PeerNear], used[vm.PeerFar]
	if want := uint64(2 * 2 * (256 + 128 + 64) << 10); near.Memory != want || near.After != 0 { // both ways, and there and back
		t.Errorf("the disk behind the switch has used %d bytes of the memory, should be %d, and then %d elsewhere", near.Memory, want, near.After)
	}
	if far.Memory != 0 || far.Before < 2*65536 { // what the cases write from system memory
		t.Errorf("the other disk has used %d bytes of the memory, and %d elsewhere", far.Memory, far.Before)
	}
}
