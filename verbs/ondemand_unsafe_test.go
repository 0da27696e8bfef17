package verbs_test

import (
	"bytes"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/verbs"
)

// The usage example of on-demand paging: register 10 MiB once, send from it, unmap
// the first MiB, map something else there, send again. Nothing is registered
// again, and what arrives is what is mapped. On UD, as in the example, and on RC.
//
// The slice of the mapping is made anew whenever it is mapped; addresses are
// numbers in between.
func TestOnDemandUsage(t *testing.T) {
	const mb = 1 << 20
	for _, typ := range []verbs.QPType{verbs.UD, verbs.RC} {
		t.Run(typ.String(), func(t *testing.T) {
			alice, bob := newSide(typ), newSide(typ)
			caps, err := alice.dev.QueryODPCaps()
			check(err)
			if can := map[verbs.QPType]verbs.ODPTransportCaps{verbs.UD: caps.UD, verbs.RC: caps.RC}[typ]; !caps.Supported || can&verbs.ODPSend == 0 {
				t.Fatalf("%+v", caps)
			}
			mmap := func(at uintptr, n uintptr, flags int) uintptr {
				p, _, e := unix.Syscall6(unix.SYS_MMAP, at, n, unix.PROT_READ|unix.PROT_WRITE, uintptr(unix.MAP_SHARED|unix.MAP_ANONYMOUS|flags), ^uintptr(0), 0)
				if e != 0 {
					t.Fatal(e)
				}
				return p
			}
			at := func(p uintptr, n int) []byte {
				return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
			}
			// Nothing else in the process maps memory there while it is free.
			p := mmap(0x5800_0000_0000, 10*mb, unix.MAP_FIXED_NOREPLACE)
			defer unix.Syscall(unix.SYS_MUNMAP, p, 10*mb, 0)
			mr, err := alice.pd.RegMRAddr(p, 10*mb, verbs.AccessLocalWrite|verbs.AccessOnDemand)
			check(err)

			const n = 1000
			to := make([]byte, 4096)
			target := bob.register(to)
			wr := verbs.SendWR{ID: 1, Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{{Addr: uint64(p), Length: n, LKey: mr.LKey()}}}
			skip := 0
			var ah *verbs.AH
			if typ == verbs.UD {
				check(alice.qp.Connect(verbs.Endpoint{}, nil))
				check(bob.qp.Connect(verbs.Endpoint{}, nil))
				peer := bob.qp.Endpoint()
				ah, err = alice.pd.CreateAH(verbs.AHAttr{DGID: peer.GID})
				check(err)
				wr.AH, wr.RemoteQPN, wr.RemoteQKey = ah, peer.QPN, peer.QKey
				skip = verbs.GRHLength
			} else {
				check(alice.qp.Connect(bob.qp.Endpoint(), nil))
				check(bob.qp.Connect(alice.qp.Endpoint(), nil))
			}
			send := func(want []byte) {
				t.Helper()
				copy(at(p, n), want)
				_, err := bob.qp.PostRecv([]verbs.RecvWR{{ID: 2, SGL: []verbs.SGE{target.SGE(0, len(to))}}})
				check(err)
				_, err = alice.qp.PostSend([]verbs.SendWR{wr})
				check(err)
				for _, s := range []*side{alice, bob} {
					if wc := s.wait(); wc.Status != verbs.WCSuccess {
						t.Fatalf("%+v", wc)
					}
				}
				if !bytes.Equal(to[skip:][:n], at(p, n)) || !bytes.HasPrefix(to[skip:], want) {
					t.Fatalf("not what was sent: %q", to[skip:][:20])
				}
			}
			send([]byte("what was there at first"))
			if _, _, e := unix.Syscall(unix.SYS_MUNMAP, p, mb, 0); e != 0 {
				t.Fatal(e)
			}
			if got := mmap(p, mb, unix.MAP_FIXED_NOREPLACE); got != p {
				t.Fatalf("mapped at %#x", got)
			}
			send([]byte("something else, mapped later"))
			s := mr.PagingStats()
			if s.PageFaults != 2 || s.FailedResolutions != 0 {
				t.Errorf("%+v", s)
			}
			if caps.Notifier == "userfaultfd" && (s.Invalidations != 1 || s.InvalidationPages != 1) {
				t.Errorf("%+v", s)
			}
			if ah != nil {
				check(ah.Close())
			}
			alice.close(mr)
			bob.close(target)
		})
	}
}
