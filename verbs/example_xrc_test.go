package verbs_test

import (
	"fmt"
	"runtime"

	"github.com/verbena-rdma/verbena/verbs"
)

// Two services behind one connection: each has a shared receive queue and a
// completion queue of its own, and Alice says in each request for whom it is.
func ExampleXRCD() {
	alice, bob := newSide(verbs.RC), newSide(verbs.RC)

	// Bob's side: a domain, a target for Alice, and a queue for each service.
	domain, err := bob.dev.OpenXRCD(nil)
	check(err)
	target, err := domain.CreateQP()
	check(err)
	type service struct {
		cq  *verbs.CQ
		srq *verbs.SRQ
		buf []byte
		mr  *verbs.MR
	}
	open := func() (s service) {
		s.cq, err = bob.dev.CreateCQ(8, nil)
		check(err)
		s.srq, err = bob.pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 8, MaxSGE: 1, XRCD: domain, CQ: s.cq})
		check(err)
		s.buf = make([]byte, 64)
		s.mr = bob.register(s.buf)
		_, err = s.srq.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{s.mr.SGE(0, len(s.buf))}}})
		check(err)
		return s
	}
	mail, news := open(), open()

	// Alice's side: an initiator, connected to the target.
	initiator, err := alice.pd.CreateQP(&verbs.QPConfig{
		Type:   verbs.XRCSend,
		SendCQ: alice.cq,
		Cap:    verbs.QPCap{MaxSendWR: 8, MaxInlineData: 64},
	})
	check(err)
	check(initiator.Connect(target.Endpoint(), nil))
	check(target.Connect(initiator.Endpoint(), nil))
	for text, to := range map[string]service{"a letter": mail, "a headline": news} {
		_, err = initiator.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte(text), RemoteSRQN: to.srq.Number()}})
		check(err)
	}

	for i, s := range []service{mail, news} {
		wcs := make([]verbs.WC, 1)
		for n := 0; n == 0; {
			n, err = s.cq.Poll(wcs)
			check(err)
			runtime.Gosched()
		}
		fmt.Printf("service %d: %v, %q, by the target: %v\n", i+1, wcs[0].Status, s.buf[:wcs[0].ByteLen], wcs[0].QPN == target.Number())
	}

	check(initiator.Close())
	check(target.Close())
	for _, s := range []service{mail, news} {
		check(s.srq.Close())
		check(s.cq.Close())
		check(s.mr.Close())
	}
	check(domain.Close())
	alice.close()
	bob.close()
	// Output:
	// service 1: success, "a letter", by the target: true
	// service 2: success, "a headline", by the target: true
}
