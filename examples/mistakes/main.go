// Command mistakes makes the mistakes that everybody makes at first, one function for
// each, and prints what the program sees of them.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"runtime"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func main() {
	forgottenReceive()
	forgottenReceiveWithLimit()
	noRight()
	peerGone()
	receiveTooShort()
	overrun()
	neverSignaled()
}

// Alice sends, and Bob has posted no receive.
func forgottenReceive() {
	fmt.Println("forgotten receive")
	alice, bob := connected(nil)
	alice.post(verbs.SendWR{ID: 1, Op: verbs.OpSend, Inline: []byte("hello")})
	alice.report("Alice", 50*time.Millisecond)
	bob.postRecv(2, 64)
	alice.report("Alice", time.Second)
	bob.report("Bob", time.Second)
}

// The same, but Alice's queue pair asks only once more.
func forgottenReceiveWithLimit() {
	fmt.Println("forgotten receive, RNRRetry 1")
	alice, _ := connected(&verbs.ConnectConfig{RNRRetry: 1})
	alice.post(verbs.SendWR{ID: 1, Op: verbs.OpSend, Inline: []byte("hello")})
	alice.report("Alice", time.Second)
}

// Bob's region lets peers read. Alice writes, and has posted another request behind.
func noRight() {
	fmt.Println("no right")
	alice, bob := connected(nil)
	write := verbs.SendWR{ID: 1, Op: verbs.OpRDMAWrite, Inline: []byte("hello"),
		RemoteAddr: bob.mr.Addr(), RKey: bob.mr.RKey()}
	alice.post(write, verbs.SendWR{ID: 2, Op: verbs.OpSend})
	alice.report("Alice", time.Second)
	alice.report("Alice", time.Second)
	bob.reportEvent("Bob")
}

// Bob closes his queue pair. Nothing reports that to Alice's device, and Alice sends.
func peerGone() {
	fmt.Println("peer gone")
	alice, bob := connected(&verbs.ConnectConfig{Timeout: 12, RetryCnt: 2}) // 3 times 17 ms
	check(bob.qp.Close())
	alice.post(verbs.SendWR{ID: 1, Op: verbs.OpSend, Inline: []byte("hello")})
	alice.report("Alice", time.Second)
}

// Bob's receive has 4 bytes, Alice's message 5.
func receiveTooShort() {
	fmt.Println("receive too short")
	alice, bob := connected(nil)
	bob.postRecv(2, 4)
	alice.post(verbs.SendWR{ID: 1, Op: verbs.OpSend, Inline: []byte("hello")})
	alice.report("Alice", time.Second)
	bob.report("Bob", time.Second)
}

// Alice's completion queue has 4 entries. She posts 5 signaled requests before she
// polls.
func overrun() {
	fmt.Println("completion queue overrun")
	alice, bob := connected(nil)
	for id := range uint64(5) {
		alice.post(verbs.SendWR{ID: id, Op: verbs.OpRDMARead, SGL: []verbs.SGE{alice.mr.SGE(0, 8)},
			RemoteAddr: bob.mr.Addr(), RKey: bob.mr.RKey()})
	}
	alice.reportEvent("Alice")
	alice.reportEvent("Alice")
	for range 5 {
		alice.report("Alice", time.Second)
	}
}

// Alice signals no request, so there is no completion to poll, and her send queue of
// 8 requests stays full.
func neverSignaled() {
	fmt.Println("never signaled")
	alice, bob := connected(nil)
	for id := range uint64(9) {
		_, err := alice.qp.PostSend([]verbs.SendWR{{ID: id, Op: verbs.OpRDMARead,
			SGL: []verbs.SGE{alice.mr.SGE(0, 8)}, RemoteAddr: bob.mr.Addr(), RKey: bob.mr.RKey()}})
		if !errors.Is(err, syscall.ENOMEM) {
			check(err)
			continue
		}
		fmt.Printf("  Alice: request %d: %v\n", id, err)
	}
	alice.report("Alice", 50*time.Millisecond)
}

// side is one end of the connection: a device, and one of each object on it.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
	mr  *verbs.MR
}

// connected makes two sides whose queue pairs are connected with cfg.
func connected(cfg *verbs.ConnectConfig) (alice, bob *side) {
	alice, bob = open(), open()
	check(alice.qp.Connect(bob.qp.Endpoint(), cfg))
	check(bob.qp.Connect(alice.qp.Endpoint(), cfg))
	return alice, bob
}

// open makes a side. The devices stay open until the program ends.
func open() *side {
	s := new(side)
	s.dev = try(verbs.Open("", nil))
	s.pd = try(s.dev.AllocPD())
	s.cq = try(s.dev.CreateCQ(4, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64},
	}))
	s.mr = try(s.pd.RegMR(make([]byte, 64), verbs.AccessLocalWrite|verbs.AccessRemoteRead))
	return s
}

func (s *side) post(wrs ...verbs.SendWR) {
	for i := range wrs {
		wrs[i].Flags |= verbs.SendSignaled
	}
	try(s.qp.PostSend(wrs))
}

func (s *side) postRecv(id uint64, n int) {
	try(s.qp.PostRecv([]verbs.RecvWR{{ID: id, SGL: []verbs.SGE{s.mr.SGE(0, n)}}}))
}

// report prints the next completion of the side, or that none has come in time.
func (s *side) report(who string, limit time.Duration) {
	wcs := make([]verbs.WC, 1)
	for end := time.Now().Add(limit); time.Now().Before(end); runtime.Gosched() {
		n, err := s.cq.Poll(wcs)
		switch {
		case err != nil:
			fmt.Printf("  %s: %v\n", who, err)
			return
		case n == 1:
			fmt.Printf("  %s: request %d: %v\n", who, wcs[0].ID, wcs[0].Status)
			return
		}
	}
	fmt.Printf("  %s: nothing has completed within %v\n", who, limit)
}

// reportEvent prints the next asynchronous event of the side's device.
func (s *side) reportEvent(who string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	fmt.Printf("  %s: event: %v\n", who, try(s.dev.NextEvent(ctx)).Type)
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
