package programs

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// Package cm and mckey in one multicast group: each gets what the other one sends. mckey sends ten
// messages of 100 bytes with its queue pair number, and as a receiver waits for ten.
func TestMulticastGo(t *testing.T) {
	program(t, "mckey", "rdmacm-utils")
	line := program(t, "stdbuf", "coreutils")
	t.Parallel() // mckey sleeps for some seconds
	const messages, size = 10, 100
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	dev, err := verbs.Open(address(), nil)
	check(err)
	pd, err := dev.AllocPD()
	check(err)
	cq, err := dev.CreateCQ(4*messages, nil)
	check(err)
	qp, err := pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: messages, MaxRecvWR: messages, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: size}})
	check(err)
	check(cm.ReadyUD(qp))
	buf := make([]byte, verbs.GRHLength+size)
	mr, err := pd.RegMR(buf, verbs.AccessLocalWrite)
	check(err)
	for range messages {
		_, err = qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, len(buf))}}})
		check(err)
	}
	poll := func() verbs.WC {
		var wc [1]verbs.WC
		for {
			n, err := cq.Poll(wc[:])
			check(err)
			check(ctx.Err())
			if n == 1 {
				check(wc[0].Err())
				return wc[0]
			}
		}
	}
	group := fmt.Sprintf("239.78.%d.2", os.Getpid()&0xff)
	args := []string{line, "-oL", "mckey", "-m", group, "-b"}
	mckey := func(more ...string) *process {
		at := address()
		return start(ctx, t, side{args: append(append(args[:len(args):len(args)], at), more...), env: []string{"VERBENA_ADDR=" + at}})
	}
	g, err := cm.Join(ctx, group, qp, &cm.Config{Device: dev})
	check(err)
	sender := mckey("-s")
	for range messages {
		wc := poll()
		if wc.ByteLen != verbs.GRHLength+size || wc.Flags&verbs.WCWithImm == 0 || wc.Imm == 0 {
			t.Errorf("%+v has come", wc)
		}
		if got := binary.BigEndian.Uint32(buf[verbs.GRHLength-4:]); got != 0xef4e0002|uint32(os.Getpid()&0xff)<<8 { // the group
			t.Errorf("it was sent to %#x", got)
		}
	}
	if out := sender.finish(t); !strings.Contains(out, "return status 0") {
		t.Errorf("mckey, which sends, says\n%s", out)
	}
	check(g.Close())

	g, err = cm.JoinSendOnly(ctx, group, &cm.Config{Device: dev})
	check(err)
	receiver := mckey()
	receiver.await("joined dgid")
	p := g.Peer()
	ah, err := pd.CreateAH(p.AH)
	check(err)
	for range messages {
		_, err := qp.PostSend([]verbs.SendWR{{Op: verbs.OpSendImm, Imm: qp.Number(), Flags: verbs.SendSignaled, Inline: make([]byte, size), AH: ah, RemoteQPN: p.QPN, RemoteQKey: p.QKey}})
		check(err)
		poll()
	}
	if out := receiver.finish(t); !strings.Contains(out, "return status 0") {
		t.Errorf("mckey, which receives, says\n%s", out)
	}
	for _, c := range []interface{ Close() error }{g, ah, qp, mr, cq, pd, dev} {
		check(c.Close())
	}
}
