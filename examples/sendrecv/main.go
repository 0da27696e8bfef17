// Command sendrecv sends two messages from one queue pair to another. Both are in
// this process, each on a device of its own.
package main

import (
	"fmt"
	"log"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func main() {
	alice, bob := open(), open()
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))

	// Bob offers two buffers, before any message comes.
	try(bob.qp.PostRecv([]verbs.RecvWR{
		{ID: 1, SGL: []verbs.SGE{bob.mr.SGE(0, 32)}},
		{ID: 2, SGL: []verbs.SGE{bob.mr.SGE(32, 32)}},
	}))

	// Alice sends two messages from her own buffer.
	copy(alice.buf, "hellohow are you?")
	try(alice.qp.PostSend([]verbs.SendWR{
		{ID: 10, Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{alice.mr.SGE(0, 5)}},
		{ID: 11, Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{alice.mr.SGE(5, 12)}},
	}))

	for range 2 {
		wc := bob.wait()
		text := bob.buf[32*(wc.ID-1):][:wc.ByteLen]
		fmt.Printf("Bob:   request %d, %v, %v, %d bytes: %q\n", wc.ID, wc.Op, wc.Status, wc.ByteLen, text)
	}
	for range 2 {
		wc := alice.wait()
		fmt.Printf("Alice: request %d, %v, %v\n", wc.ID, wc.Op, wc.Status)
	}
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

func open() *side {
	s := &side{buf: make([]byte, 64)}
	s.dev = try(verbs.Open("", nil))
	s.pd = try(s.dev.AllocPD())
	s.cq = try(s.dev.CreateCQ(16, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1},
	}))
	s.mr = try(s.pd.RegMR(s.buf, verbs.AccessLocalWrite))
	return s
}

// wait polls until a request has completed, and ends the program if it failed.
func (s *side) wait() verbs.WC {
	wcs := make([]verbs.WC, 1)
	// Poll never waits; Gosched lets other goroutines run in between.
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); runtime.Gosched() {
		if try(s.cq.Poll(wcs)) == 1 {
			check(wcs[0].Err())
			return wcs[0]
		}
	}
	log.Fatal("nothing has completed within 5 seconds")
	return verbs.WC{}
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
