package verbs_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// Two peers exchange endpoints as JSON.
func ExampleQP_Connect() {
	server, client := newSide(verbs.RC), newSide(verbs.RC)

	// On the server: to be sent to the client.
	offer, err := json.Marshal(server.qp.Endpoint())
	check(err)

	// On the client: what came from the server.
	var remote verbs.Endpoint
	check(json.Unmarshal(offer, &remote))
	check(client.qp.Connect(remote, &verbs.ConnectConfig{MTU: verbs.MTU1024, RNRRetry: 3}))

	attr, err := client.qp.Query()
	check(err)
	fmt.Println(attr.State, attr.PathMTU, attr.RNRRetry)
	fmt.Println(attr.DestQPN == server.qp.Number(), attr.AV.DGID.Addr() == server.dev.Addr())

	client.close()
	server.close()
	// Output:
	// RTS 1024 3
	// true true
}

// The same step by step, with a receive in place before the first message can
// come.
func ExampleQP_ToRTR() {
	alice, bob := newSide(verbs.UC), newSide(verbs.UC)
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))

	in := make([]byte, 8)
	target := bob.register(in)
	peer := alice.qp.Endpoint()
	attr := verbs.QPAttr{
		Access:  verbs.AccessRemoteWrite,
		AV:      verbs.AHAttr{DGID: peer.GID},
		PathMTU: verbs.MTU4096,
		DestQPN: peer.QPN,
		RQPSN:   peer.PSN,
	}
	check(bob.qp.ToInit(&attr))
	_, err := bob.qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{target.SGE(0, len(in))}}})
	check(err)
	check(bob.qp.ToRTR(&attr))
	attr.SQPSN = bob.qp.Endpoint().PSN
	check(bob.qp.ToRTS(&attr))

	_, err = alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte("early")}})
	check(err)
	wc := bob.wait()
	fmt.Printf("%v %q\n", wc.Status, in[:wc.ByteLen])
	fmt.Println(alice.wait().Status)

	alice.close()
	bob.close(target)
	// Output:
	// success "early"
	// success
}

// Two clients, and one pool of receives for both.
func ExamplePD_CreateSRQ() {
	server := newSide(verbs.RC)
	srq, err := server.pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 8, MaxSGE: 1})
	check(err)
	pool := make([]byte, 4*16)
	mr := server.register(pool)
	wrs := make([]verbs.RecvWR, 4)
	for i := range wrs {
		wrs[i] = verbs.RecvWR{ID: uint64(i), SGL: []verbs.SGE{mr.SGE(16*i, 16)}}
	}
	_, err = srq.PostRecv(wrs)
	check(err)

	for _, name := range []string{"Ann", "Joe"} {
		qp, err := server.pd.CreateQP(&verbs.QPConfig{
			Type: verbs.RC, SendCQ: server.cq, RecvCQ: server.cq, SRQ: srq,
		})
		check(err)
		client := newSide(verbs.RC)
		check(qp.Connect(client.qp.Endpoint(), nil))
		check(client.qp.Connect(qp.Endpoint(), nil))

		_, err = client.qp.PostSend([]verbs.SendWR{{
			Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte("I am " + name),
		}})
		check(err)
		wc := server.wait()
		at := 16 * wc.ID
		fmt.Printf("receive %d: %q, from the right queue pair: %v\n",
			wc.ID, pool[at:at+uint64(wc.ByteLen)], wc.QPN == qp.Number())
		check(client.wait().Err())
		check(qp.Close())
		client.close()
	}

	check(srq.Close())
	server.close(mr)
	// Output:
	// receive 0: "I am Ann", from the right queue pair: true
	// receive 1: "I am Joe", from the right queue pair: true
}

// Sleeping until something completes: arm, poll until empty, wait.
func ExampleChannel() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	alice := newSide(verbs.RC)
	dev, err := verbs.Open("", nil)
	check(err)
	pd, err := dev.AllocPD()
	check(err)
	ch, err := dev.CreateChannel()
	check(err)
	cq, err := dev.CreateCQ(16, ch)
	check(err)
	qp, err := pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxRecvWR: 4, MaxRecvSGE: 1},
	})
	check(err)
	check(qp.Connect(alice.qp.Endpoint(), nil))
	check(alice.qp.Connect(qp.Endpoint(), nil))
	in := make([]byte, 32)
	mr, err := pd.RegMR(in, verbs.AccessLocalWrite)
	check(err)
	_, err = qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, len(in))}}})
	check(err)

	check(cq.RequestNotify(false))
	wcs := make([]verbs.WC, 4)
	n, err := cq.Poll(wcs)
	check(err)
	fmt.Println("before:", n)

	_, err = alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte("wake up")}})
	check(err)

	ev, err := ch.Next(ctx) // sleeps; gives up when ctx is done
	check(err)
	ev.Ack()
	n, err = ev.CQ.Poll(wcs)
	check(err)
	fmt.Printf("after: %d, %q\n", n, in[:wcs[0].ByteLen])

	// Nothing was armed again, so nothing comes.
	soon, stop := context.WithTimeout(ctx, 10*time.Millisecond)
	defer stop()
	_, err = ch.Next(soon)
	fmt.Println("then:", errors.Is(err, context.DeadlineExceeded))

	check(alice.wait().Err())
	alice.close()
	check(qp.Close())
	check(cq.Close())
	check(ch.Close())
	check(mr.Close())
	check(pd.Close())
	check(dev.Close())
	// Output:
	// before: 0
	// after: 1, "wake up"
	// then: true
}

// A shared receive queue says when it runs low.
func ExampleDevice_NextEvent() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	server, client := newSide(verbs.RC), newSide(verbs.RC)
	srq, err := server.pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4})
	check(err)
	_, err = srq.PostRecv([]verbs.RecvWR{{ID: 1}, {ID: 2}})
	check(err)
	check(srq.SetLimit(2)) // tell me when fewer than two are left

	qp, err := server.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: server.cq, RecvCQ: server.cq, SRQ: srq})
	check(err)
	check(qp.Connect(client.qp.Endpoint(), nil))
	check(client.qp.Connect(qp.Endpoint(), nil))
	_, err = client.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled}}) // an empty message
	check(err)
	check(server.wait().Err())
	check(client.wait().Err())

	ev, err := server.dev.NextEvent(ctx)
	check(err)
	fmt.Println(ev.Type, ev.SRQ == srq.Number())
	attr, err := srq.Query()
	check(err)
	fmt.Println("limit now:", attr.Limit)

	check(qp.Close())
	check(srq.Close())
	server.close()
	client.close()
	// Output:
	// SRQ limit reached true
	// limit now: 0
}

// A request that was accepted and failed later: the peer refuses the key. The
// queue pair is in error, and what was behind the failure is flushed.
func ExampleWC() {
	alice, bob := connected()
	wr := verbs.SendWR{Op: verbs.OpRDMAWrite, Inline: []byte("x"), RKey: 0xbad}
	wr2 := wr
	wr.ID, wr2.ID = 1, 2
	_, err := alice.qp.PostSend([]verbs.SendWR{wr, wr2})
	check(err) // nothing wrong so far

	for range 2 {
		wc := alice.wait() // failures complete without being asked to
		var failed *verbs.StatusError
		fmt.Println(wc.ID, errors.As(wc.Err(), &failed), wc.Status)
	}
	attr, err := alice.qp.Query()
	check(err)
	fmt.Println(attr.State)

	alice.close()
	bob.close()
	// Output:
	// 1 true remote access error
	// 2 true Work Request Flushed Error
	// ERR
}

// Something that is in use cannot be closed.
func ExampleOpError() {
	s := newSide(verbs.RC)
	err := s.pd.Close()
	var op *verbs.OpError
	fmt.Println(errors.Is(err, syscall.EBUSY), errors.As(err, &op))
	s.close()
	// Output:
	// true true
}
