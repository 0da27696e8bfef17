// Command echo is a server that sends back what it receives, and a client of it, by SEND and receive over a connection of
// package cm. Both are in this process, each on a device of its own.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

const room = 64 // bytes of a message

func main() {
	ctx := context.Background()
	there, here := try(verbs.Open("", nil)), try(verbs.Open("", nil))

	var server side
	listener := try(cm.Listen(ctx, there.Addr().String()+":0", &cm.Config{Device: there, Notify: true, Setup: server.setup}))
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn := try(listener.Accept(ctx))
		server.serve(ctx, conn)
		fmt.Println("server: the client has gone")
		check(conn.Close())
	}()

	var client side
	conn := try(cm.Dial(ctx, listener.Addr().String(), &cm.Config{Device: here, Notify: true, Setup: client.setup}))
	for _, text := range []string{"hello", "how are you?"} {
		fmt.Printf("client: %q\n", client.ask(ctx, conn, text))
	}
	check(conn.Close())
	<-served
	check(listener.Close())
	check(there.Close())
	check(here.Close())
}

// side is an end of the connection: the memory for one message.
type side struct {
	buf []byte
	mr  *verbs.MR
}

// setup posts the first receive. Package cm calls it when the queue pair takes receives, and the peer cannot send yet.
func (s *side) setup(conn *cm.Conn) (err error) {
	s.buf = make([]byte, room)
	if s.mr, err = conn.RegMR(s.buf, verbs.AccessLocalWrite); err != nil {
		return err
	}
	return s.receive(conn)
}

func (s *side) receive(conn *cm.Conn) error {
	_, err := conn.QP().PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{s.mr.SGE(0, room)}}})
	return err
}

// serve sends back what comes, until the client has gone. The receive is posted again before the answer is sent: the client
// may send its next message as soon as it has the answer.
func (s *side) serve(ctx context.Context, conn *cm.Conn) {
	for {
		wc := next(ctx, conn)
		if wc.Status == verbs.WCWRFlushErr { // the connection has ended
			return
		}
		check(wc.Err())
		answer := append([]byte(nil), s.buf[:wc.ByteLen]...)
		check(s.receive(conn))
		try(conn.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: answer}}))
	}
}

// ask sends a message, and returns the answer.
func (s *side) ask(ctx context.Context, conn *cm.Conn, text string) string {
	try(conn.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte(text)}}))
	wc := next(ctx, conn)
	check(wc.Err())
	answer := string(s.buf[:wc.ByteLen])
	check(s.receive(conn))
	return answer
}

// next waits for a completion: arm, poll, and sleep only if the poll has found nothing.
func next(ctx context.Context, conn *cm.Conn) verbs.WC {
	wcs := make([]verbs.WC, 1)
	for {
		check(conn.RecvCQ().RequestNotify(false))
		if try(conn.RecvCQ().Poll(wcs)) == 1 {
			return wcs[0]
		}
		event := try(conn.Channel().Next(ctx))
		event.Ack()
	}
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
