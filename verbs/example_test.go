package verbs_test

import (
	"fmt"
	"runtime"

	"github.com/verbena-rdma/verbena/verbs"
)

// side is one side of a connection: a device and what it takes to talk.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
}

func newSide(typ verbs.QPType) *side { return openSide(typ, nil) }

// openSide is newSide with a device that is not as usual.
func openSide(typ verbs.QPType, cfg *verbs.Config) *side {
	s := new(side)
	var err error
	s.dev, err = verbs.Open("", cfg)
	check(err)
	s.pd, err = s.dev.AllocPD()
	check(err)
	s.cq, err = s.dev.CreateCQ(64, nil)
	check(err)
	s.qp, err = s.pd.CreateQP(&verbs.QPConfig{
		Type:   typ,
		SendCQ: s.cq,
		RecvCQ: s.cq,
		Cap:    verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64},
	})
	check(err)
	return s
}

// register makes memory of this side visible to its device and its peer.
func (s *side) register(buf []byte) *verbs.MR {
	mr, err := s.pd.RegMR(buf, verbs.AccessLocalWrite|verbs.AccessRemote)
	check(err)
	return mr
}

// wait polls until something has completed.
func (s *side) wait() *verbs.WC {
	wcs := make([]verbs.WC, 1)
	for {
		n, err := s.cq.Poll(wcs)
		check(err)
		if n == 1 {
			return &wcs[0]
		}
		runtime.Gosched()
	}
}

// close closes children before parents.
func (s *side) close(mrs ...*verbs.MR) {
	check(s.qp.Close())
	check(s.cq.Close())
	for _, mr := range mrs {
		check(mr.Close())
	}
	check(s.pd.Close())
	check(s.dev.Close())
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// Two devices in one process. Alice writes into Bob's memory; Bob's program does
// nothing for it.
func Example() {
	alice, bob := newSide(verbs.RC), newSide(verbs.RC)

	// In two processes, or on two hosts, the endpoints travel by any means: a
	// TCP connection, a file, a parameter.
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))

	from, to := []byte("hello, Bob"), make([]byte, 16)
	source, target := alice.register(from), bob.register(to)

	_, err := alice.qp.PostSend([]verbs.SendWR{{
		ID:         1,
		Op:         verbs.OpRDMAWrite,
		Flags:      verbs.SendSignaled,
		SGL:        []verbs.SGE{source.SGE(0, len(from))},
		RemoteAddr: target.Addr() + 2, // what Bob told Alice about his memory
		RKey:       target.RKey(),
	}})
	check(err)

	wc := alice.wait()
	fmt.Println(wc.ID, wc.Op, wc.Status)
	fmt.Printf("%q\n", to)

	alice.close(source)
	bob.close(target)
	// Output:
	// 1 RDMA_WRITE success
	// "\x00\x00hello, Bob\x00\x00\x00\x00"
}
