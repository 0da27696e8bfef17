// Command ondemand registers 1 GiB of memory on demand, of which a peer touches a few
// pages, and prints the page faults that the device has met.
package main

import (
	"fmt"
	"log"
	"os"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func main() {
	page := os.Getpagesize()
	const gib = 1 << 30
	alice := open(make([]byte, 2*page), 0)
	bob := open(make([]byte, gib), verbs.AccessRemoteWrite|verbs.AccessOnDemand)
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	fmt.Println("registered:", bob.mr.Length()/(1<<20), "MiB")
	bob.report("nothing touched")

	// One page at each of three places, far apart.
	for i := range 3 {
		alice.write(bob.mr, i*gib/3/page*page, page)
	}
	bob.report("3 WRITEs")

	// The same places again: the pages are there now.
	for i := range 3 {
		alice.write(bob.mr, i*gib/3/page*page, page)
	}
	bob.report("3 more, same places")

	// Two new pages in one WRITE are one fault.
	alice.write(bob.mr, gib/2, 2*page)
	bob.report("1 of two pages")

	// Bob has 64 pages brought in before they are used.
	const at = 3 * gib / 4
	check(bob.pd.AdviseMR(verbs.AdvisePrefetchWrite, verbs.AdviseFlush, bob.mr.SGE(at, 64*page)))
	for i := range 32 {
		alice.write(bob.mr, at+2*i*page, 2*page)
	}
	bob.report("32 after a prefetch")
	alice.close()
	bob.close()
}

// side is one end of the connection: a device, and one of each object on it.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
	mr  *verbs.MR
}

func open(memory []byte, access verbs.Access) *side {
	s := new(side)
	s.dev = try(verbs.Open("", nil))
	s.pd = try(s.dev.AllocPD())
	s.cq = try(s.dev.CreateCQ(16, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 8, MaxSendSGE: 1},
	}))
	s.mr = try(s.pd.RegMR(memory, verbs.AccessLocalWrite|access))
	return s
}

// report prints the fault counters of the side's region.
func (s *side) report(when string) {
	c := s.mr.PagingStats()
	fmt.Printf("%-20s %d faults, %d pages faulted in, %d pages prefetched\n",
		when+":", c.PageFaults, c.PageFaultPages, c.PrefetchPages)
}

// write writes n bytes to an offset of the target, and polls until that is done.
func (s *side) write(target *verbs.MR, offset, n int) {
	try(s.qp.PostSend([]verbs.SendWR{{
		Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{s.mr.SGE(0, n)},
		RemoteAddr: target.Addr() + uint64(offset), RKey: target.RKey(),
	}}))
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
