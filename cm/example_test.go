package cm_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"syscall"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// wait polls until something has completed.
func wait(cq *verbs.CQ) verbs.WC {
	wcs := make([]verbs.WC, 1)
	for {
		n, err := cq.Poll(wcs)
		check(err)
		if n == 1 {
			return wcs[0]
		}
		runtime.Gosched()
	}
}

// side is a connection's buffer. Its setup posts it, before the peer can send.
type side struct {
	buf []byte
	mr  *verbs.MR
}

func (s *side) setup(c *cm.Conn) (err error) {
	s.buf = make([]byte, 64)
	if s.mr, err = c.RegMR(s.buf, verbs.AccessLocalWrite); err != nil {
		return err
	}
	_, err = c.QP().PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{s.mr.SGE(0, len(s.buf))}}})
	return err
}

// An echo: a server sends back what it receives.
func Example() {
	ctx := context.Background()
	var server, client side

	l, err := cm.Listen(ctx, "127.77.1.1:0", &cm.Config{Setup: server.setup})
	check(err)
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := l.Accept(ctx)
		check(err)
		got := wait(conn.RecvCQ())
		check(got.Err())
		_, err = conn.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, SGL: []verbs.SGE{server.mr.SGE(0, int(got.ByteLen))}}})
		check(err)
		<-conn.Done() // the client has what it wanted
		fmt.Println("server:", conn.Err())
		check(conn.Close())
	}()

	conn, err := cm.Dial(ctx, l.Addr().String(), &cm.Config{Setup: client.setup})
	check(err)
	_, err = conn.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte("hello")}})
	check(err)
	got := wait(conn.RecvCQ())
	check(got.Err())
	fmt.Printf("client: %q\n", client.buf[:got.ByteLen])
	check(conn.Close())
	<-served
	check(l.Close())
	// Output:
	// client: "hello"
	// server: the peer has disconnected
}

// The listener tells where its memory is, and the dialer reads it. The program that listens does
// nothing for that.
func ExampleConn_SetPrivate() {
	ctx := context.Background()
	dev, err := verbs.Open("", nil)
	check(err)

	memory := []byte("what the server has")
	l, err := cm.Listen(ctx, ":0", &cm.Config{Device: dev, Setup: func(c *cm.Conn) error {
		mr, err := c.RegMR(memory, verbs.AccessRemoteRead)
		if err != nil {
			return err
		}
		where := binary.BigEndian.AppendUint64(nil, mr.Addr())
		return c.SetPrivate(binary.BigEndian.AppendUint32(where, mr.RKey()))
	}})
	check(err)
	accepted := make(chan *cm.Conn)
	go func() {
		c, err := l.Accept(ctx)
		check(err)
		accepted <- c
	}()

	conn, err := cm.Dial(ctx, fmt.Sprintf(":%d", l.Addr().Port()), &cm.Config{Device: dev})
	check(err)
	where, buf := conn.Private(), make([]byte, len(memory))
	mr, err := conn.RegMR(buf, verbs.AccessLocalWrite)
	check(err)
	_, err = conn.QP().PostSend([]verbs.SendWR{{
		Op: verbs.OpRDMARead, Flags: verbs.SendSignaled, SGL: []verbs.SGE{mr.SGE(0, len(buf))},
		RemoteAddr: binary.BigEndian.Uint64(where), RKey: binary.BigEndian.Uint32(where[8:]),
	}})
	check(err)
	done := wait(conn.SendCQ())
	fmt.Printf("%v: %v, %q\n", done.Op, done.Status, buf)

	check(conn.Close())
	check((<-accepted).Close())
	check(l.Close())
	check(dev.Close())
	// Output:
	// RDMA_READ: success, "what the server has"
}

// A listener that looks at requests before it accepts them.
func ExampleRequest_Reject() {
	ctx := context.Background()
	dev, err := verbs.Open("", nil)
	check(err)
	l, err := cm.Listen(ctx, ":0", &cm.Config{Device: dev})
	check(err)
	go func() {
		r, err := l.Next(ctx)
		check(err)
		check(r.Reject(cm.ReasonProgram, []byte("wrong version")))
	}()

	_, err = cm.Dial(ctx, fmt.Sprintf("%v:%d", dev.Addr(), l.Addr().Port()), &cm.Config{Device: dev, Private: []byte{1}})
	var refused *cm.RejectError
	fmt.Println(errors.Is(err, syscall.ECONNREFUSED), errors.As(err, &refused))
	fmt.Printf("%v: %s\n", refused, refused.Private[:13])
	check(l.Close())
	check(dev.Close())
	// Output:
	// true true
	// connection refused: the program refuses: wrong version
}

// A member of a multicast group receives what another program sends to the group.
func ExampleJoin() {
	ctx := context.Background()
	dev, err := verbs.Open("", nil)
	check(err)
	pd, err := dev.AllocPD()
	check(err)
	cq, err := dev.CreateCQ(16, nil)
	check(err)
	qp, err := pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq,
		Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 4, MaxRecvSGE: 1, MaxInlineData: 64}})
	check(err)
	check(cm.ReadyUD(qp))

	// A datagram comes with the header that it was sent with.
	buf := make([]byte, verbs.GRHLength+64)
	mr, err := pd.RegMR(buf, verbs.AccessLocalWrite)
	check(err)
	_, err = qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, len(buf))}}})
	check(err)

	group, err := cm.Join(ctx, "239.77.1.1", qp, &cm.Config{Device: dev})
	check(err)
	all := group.Peer()
	ah, err := pd.CreateAH(all.AH)
	check(err)
	_, err = qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte("hello, all"), AH: ah, RemoteQPN: all.QPN, RemoteQKey: all.QKey}})
	check(err)
	got := wait(cq)
	fmt.Printf("%v: %s\n", got.Status, buf[verbs.GRHLength:got.ByteLen])

	for _, c := range []interface{ Close() error }{group, ah, qp, mr, cq, pd, dev} {
		check(c.Close())
	}
	// Output:
	// success: hello, all
}
