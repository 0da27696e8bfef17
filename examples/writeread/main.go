// Command writeread lets Alice write, read and count in Bob's memory. Bob's program
// posts nothing and polls nothing.
package main

import (
	"encoding/binary"
	"fmt"
	"log"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func main() {
	alice, bob := open(0), open(verbs.AccessRemote)
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	copy(bob.buf[16:], "Bob's secret")

	// Alice needs the address and the key of the memory that Bob registered.
	addr, rkey := bob.mr.Addr(), bob.mr.RKey()

	// WRITE: 10 bytes of Alice's memory go to the beginning of Bob's.
	copy(alice.buf, "hello, Bob")
	alice.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{alice.mr.SGE(0, 10)},
		RemoteAddr: addr, RKey: rkey})
	fmt.Printf("Bob's memory:   %q\n", bob.buf[:10])

	// READ: 12 bytes of Bob's memory, from offset 16 on, come to offset 32 of Alice's.
	alice.do(verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{alice.mr.SGE(32, 12)},
		RemoteAddr: addr + 16, RKey: rkey})
	fmt.Printf("Alice's memory: %q\n", alice.buf[32:44])

	// Atomic: 5 is added to a number of 8 bytes at offset 56 of Bob's memory. The
	// number that was there before comes back.
	for range 2 {
		alice.do(verbs.SendWR{Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{alice.mr.SGE(48, 8)},
			RemoteAddr: addr + 56, RKey: rkey, CompareAdd: 5})
		fmt.Println("Bob's counter:  was", binary.NativeEndian.Uint64(alice.buf[48:]))
	}
	fmt.Println("Bob's counter:  is", binary.NativeEndian.Uint64(bob.buf[56:]))
	fmt.Println("Bob's completions:", try(bob.cq.Poll(make([]verbs.WC, 1))))
	alice.close()
	bob.close()
}

// side is one end of the connection: a device, and one of each object on it.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
	buf []byte
	mr  *verbs.MR
}

// open makes a side whose peer has the given rights to its memory.
func open(remote verbs.Access) *side {
	s := &side{buf: make([]byte, 64)}
	s.dev = try(verbs.Open("", nil))
	s.pd = try(s.dev.AllocPD())
	s.cq = try(s.dev.CreateCQ(16, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 8, MaxSendSGE: 1},
	}))
	s.mr = try(s.pd.RegMR(s.buf, verbs.AccessLocalWrite|remote))
	return s
}

// do posts one request, and polls until it has completed.
func (s *side) do(wr verbs.SendWR) {
	wr.Flags = verbs.SendSignaled
	try(s.qp.PostSend([]verbs.SendWR{wr}))
	wcs := make([]verbs.WC, 1)
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); runtime.Gosched() {
		if try(s.cq.Poll(wcs)) == 1 {
			check(wcs[0].Err())
			return
		}
	}
	log.Fatal("nothing has completed within 5 seconds")
}

// close closes children before parents: anything else fails with EBUSY.
func (s *side) close() {
	check(s.qp.Close())
	check(s.cq.Close())
	check(s.mr.Close())
	check(s.pd.Close())
	check(s.dev.Close())
}

// try returns v, or ends the program if err is not nil.
func try[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
