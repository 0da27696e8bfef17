// Command sleep waits for a message without spinning: Bob's goroutine sleeps on a
// completion channel until Alice's WRITE with immediate data has arrived.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	alice, bob := open(), open()
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))

	// Bob posts a receive for the notification. It needs no memory: the data goes
	// where the WRITE says.
	try(bob.qp.PostRecv([]verbs.RecvWR{{ID: 1}}))

	go func() {
		time.Sleep(20 * time.Millisecond)
		try(alice.qp.PostSend([]verbs.SendWR{{
			Op: verbs.OpRDMAWriteImm, Flags: verbs.SendSignaled, Imm: 42, Inline: []byte("wake up"),
			RemoteAddr: bob.mr.Addr(), RKey: bob.mr.RKey(),
		}}))
	}()

	wc := bob.wait(ctx)
	fmt.Printf("Bob:   %v, immediate %d, %q\n", wc.Op, wc.Imm, bob.buf[:wc.ByteLen])
	wc = alice.wait(ctx)
	fmt.Printf("Alice: %v, %v\n", wc.Op, wc.Status)
	alice.close()
	bob.close()
}

// wait sleeps until a request has completed: arm, poll, and sleep only if the poll
// has found nothing. A completion that comes after the arming raises an event.
func (s *side) wait(ctx context.Context) verbs.WC {
	wcs := make([]verbs.WC, 1)
	for {
		check(s.cq.RequestNotify(false))
		if try(s.cq.Poll(wcs)) == 1 {
			check(wcs[0].Err())
			return wcs[0]
		}
		event := try(s.ch.Next(ctx))
		event.Ack()
	}
}

// side is one end of the connection: a device, and one of each object on it.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	ch  *verbs.Channel
	cq  *verbs.CQ
	qp  *verbs.QP
	buf []byte
	mr  *verbs.MR
}

func open() *side {
	s := &side{buf: make([]byte, 64)}
	s.dev = try(verbs.Open("", nil))
	s.pd = try(s.dev.AllocPD())
	s.ch = try(s.dev.CreateChannel())
	s.cq = try(s.dev.CreateCQ(16, s.ch))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64},
	}))
	s.mr = try(s.pd.RegMR(s.buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite))
	return s
}

// close closes children before parents: anything else fails with EBUSY.
func (s *side) close() {
	check(s.qp.Close())
	check(s.cq.Close())
	check(s.ch.Close())
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
