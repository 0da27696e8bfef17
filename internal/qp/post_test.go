package qp

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// TestPostRefused: what PostSend refuses at once (IBA 11.4.1.1), with which errno
// and which message. The requests before the bad one are posted.
func TestPostRefused(t *testing.T) {
	sge := ib.SGE{Length: 1 << 29}
	ah := ib.NewAH(ib.AHAttr{}, &Address{}, nil)
	for _, c := range []struct {
		name  string
		typ   ib.QPType
		wr    ib.SendWR
		errno syscall.Errno
		says  string
	}{
		{"no opcode", ib.RC, ib.SendWR{}, syscall.EINVAL, "opcode 0 is unknown"},
		{"opcode", ib.RC, ib.SendWR{Op: 99}, syscall.EINVAL, "opcode 99 is unknown"},
		{"flags", ib.RC, ib.SendWR{Op: ib.OpSend, Flags: 0x80}, syscall.EINVAL, "send flags 0x80 are unknown"},
		{"UC READ", ib.UC, ib.SendWR{Op: ib.OpRDMARead}, syscall.EINVAL, "RDMA_READ is not an operation of UC"},
		{"UC atomic", ib.UC, ib.SendWR{Op: ib.OpAtomicCmpSwap}, syscall.EINVAL, "not an operation of UC"},
		{"UC invalidate", ib.UC, ib.SendWR{Op: ib.OpSendInv}, syscall.EINVAL, "not an operation of UC"},
		{"UD WRITE", ib.UD, ib.SendWR{Op: ib.OpRDMAWrite, AH: ah}, syscall.EINVAL, "not an operation of UD"},
		{"UD invalidate", ib.UD, ib.SendWR{Op: ib.OpSendInv, AH: ah}, syscall.EINVAL, "not an operation of UD"},
		{"SGEs", ib.RC, ib.SendWR{Op: ib.OpSend, SGL: make([]ib.SGE, 5)}, syscall.EINVAL, "5 SGEs, the queue pair takes 4"},
		{"message", ib.RC, ib.SendWR{Op: ib.OpSend, SGL: []ib.SGE{sge, sge, {Length: 1}}}, syscall.EINVAL, "message of 1073741825 bytes"},
		{"atomic", ib.RC, ib.SendWR{Op: ib.OpAtomicFetchAdd}, syscall.EINVAL, "an atomic returns 8 bytes, the SGL holds 0"},
		{"inline", ib.RC, ib.SendWR{Op: ib.OpSend, Inline: make([]byte, 65)}, syscall.EINVAL, "65 bytes of inline data, the queue pair takes 64"},
		{"inline READ", ib.RC, ib.SendWR{Op: ib.OpRDMARead, Inline: []byte{1}}, syscall.EINVAL, "inline data goes with SEND, WRITE and ATOMIC WRITE"},
		{"inline and SGL", ib.RC, ib.SendWR{Op: ib.OpSend, Inline: []byte{1}, SGL: []ib.SGE{{}}}, syscall.EINVAL, "inline data"},
		{"no address", ib.UD, ib.SendWR{Op: ib.OpSend}, syscall.EINVAL, "needs an address handle"},
		{"number", ib.UD, ib.SendWR{Op: ib.OpSend, AH: ah, RemoteQPN: 1 << 24}, syscall.EINVAL, "remote_qpn 0x1000000 is longer than 24 bits"},
		{"foreign address", ib.UD, ib.SendWR{Op: ib.OpSend, AH: ib.NewAH(ib.AHAttr{}, 5, nil)}, syscall.EINVAL, "another provider"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := usual()
			s.typ = c.typ
			w := newPair(t, s, s)
			good := ib.SendWR{Op: ib.OpSend, AH: ah}
			n, err := w.a.q.PostSend([]ib.SendWR{good, good, c.wr, good})
			var op *ib.OpError
			if n != 2 || !errors.As(err, &op) || op.Op != "post_send" || op.Errno != c.errno {
				t.Fatalf("%d posted, %v", n, err)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q does not say %q", err, c.says)
			}
			if got := w.a.q.sq.tail - w.a.q.sq.head; got != 2 {
				t.Errorf("%d requests wait", got)
			}
		})
	}
}

// TestPostFull: a place in the queue is free when its completion, or one after
// it, has been polled (IBA 10.8.5.1).
func TestPostFull(t *testing.T) {
	s := usual()
	s.sq = 3
	w := newPair(t, s, s)
	wr := ib.SendWR{Op: ib.OpRDMAWrite, RKey: 1}
	signaled := wr
	signaled.Flags = ib.SendSignaled
	n, err := w.a.q.PostSend([]ib.SendWR{wr, signaled, wr, wr})
	if n != 3 || !errors.Is(err, syscall.ENOMEM) {
		t.Fatalf("%d posted, %v", n, err)
	}
	w.pullAll()
	for _, t := range w.b.wire {
		w.b.receive(t)
	}
	w.pullAll()
	for _, t := range w.a.wire {
		w.a.receive(t)
	}
	if _, err := w.a.q.PostSend([]ib.SendWR{wr}); !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("before polling: %v", err)
	}
	var wcs [4]ib.WC
	if w.a.sendCQ.Poll(wcs[:]) != 1 {
		t.Fatal("no completion")
	}
	if n, err := w.a.q.PostSend([]ib.SendWR{wr, wr, wr}); n != 2 || !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("after polling: %d posted, %v", n, err)
	}
}

func TestPostState(t *testing.T) {
	for st := ib.QPReset; st <= ib.QPErr; st++ {
		for _, typ := range []ib.QPType{ib.RC, ib.UC} {
			e := inState(t, typ, st)
			if e == nil {
				continue
			}
			n, err := e.q.PostSend([]ib.SendWR{{Op: ib.OpSend}})
			if may := st >= ib.QPRTS; may != (err == nil) || may != (n == 1) {
				t.Errorf("%v in %v: %d, %v", typ, st, n, err)
			}
		}
	}
}

// TestLateSent: a train that left before a reset, and is reported afterwards,
// completes nothing of the new life.
func TestLateSent(t *testing.T) {
	s := usual()
	s.typ = ib.UC
	w := newPair(t, s, s)
	a := w.a
	wr := []ib.SendWR{{ID: 1, Op: ib.OpSend, Flags: ib.SendSignaled}}
	var old, older, fresh train.Train
	post := func(id uint64, into *train.Train) {
		wr[0].ID = id
		if _, err := a.q.PostSend(wr); err != nil || !a.q.Pull(into, w.now) {
			t.Fatal("nothing to send", err)
		}
	}
	post(0, &older)
	post(1, &old)
	if err := a.modify(ib.QPAttr{State: ib.QPReset}, ib.QPMaskState, s.window); err != nil {
		t.Fatal(err)
	}
	s.psn = 0x555
	a.toState(ib.QPRTS, s, s)
	post(2, &fresh)
	a.q.Sent(&older, w.now)
	a.q.Sent(&old, w.now)
	var wcs [4]ib.WC
	if n := a.sendCQ.Poll(wcs[:]); n != 0 {
		t.Fatalf("completed: %+v", wcs[:n])
	}
	a.q.SendFailed(&old, mem.Fault{Kind: mem.FaultDead}, w.now) // nor does it fail one
	a.q.Sent(&fresh, w.now)
	a.q.Sent(&fresh, w.now) // twice is once
	a.q.SendFailed(&fresh, mem.Fault{Kind: mem.FaultDead}, w.now)
	if n := a.sendCQ.Poll(wcs[:]); n != 1 || wcs[0].ID != 2 || wcs[0].Status != ib.WCSuccess || a.q.State() != ib.QPRTS {
		t.Fatalf("completed: %+v", wcs[:n])
	}
}

// TestLateSendFailed: a link's report that it could not read a payload, when the
// packet has been answered meanwhile (it was a repetition), or the queue pair is
// in another state, changes nothing.
func TestLateSendFailed(t *testing.T) {
	w := newPair(t, usual(), usual())
	a := w.a
	if _, err := a.q.PostSend([]ib.SendWR{{Op: ib.OpRDMAWrite, SGL: []ib.SGE{a.regions["mem"].at(0, 10)}},
		{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled}}); err != nil {
		t.Fatal(err)
	}
	var first, second train.Train
	if !a.q.Pull(&first, w.now) || !a.q.Pull(&second, w.now) {
		t.Fatal("nothing to send")
	}
	a.q.Receive(&train.Train{From: w.b.addr, To: w.a.addr, Kind: wire.KindAck, N: 1, Start: true, End: true, PSN: first.PSN}, w.now)
	a.q.SendFailed(&first, mem.Fault{Kind: mem.FaultDead}, w.now)
	if a.q.State() != ib.QPRTS {
		t.Fatal("it failed for a packet that was acknowledged")
	}
	a.q.Receive(&train.Train{From: w.b.addr, To: w.a.addr, Kind: wire.KindAck, N: 1, Start: true, End: true, PSN: second.PSN}, w.now)
	var wcs [2]ib.WC
	if a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCSuccess {
		t.Fatalf("%+v", wcs[0])
	}
	if err := a.modify(ib.QPAttr{State: ib.QPErr}, ib.QPMaskState, 64); err != nil {
		t.Fatal(err)
	}
	a.q.SendFailed(&first, mem.Fault{Kind: mem.FaultDead}, w.now)
	first.Kind = wire.KindReadResponse
	a.q.SendFailed(&first, mem.Fault{Kind: mem.FaultDead}, w.now)
	if a.pull() != 0 || a.sendCQ.Poll(wcs[:]) != 0 || len(a.events) != 0 {
		t.Errorf("something happened in the error state: %+v, %v", wcs[0], a.events)
	}
}

// TestLastNak: the answer to a READ cannot be read any more, and the NAK of the request behind
// it was to leave with it. The NAK leaves alone, and the peer, which gets no answer to its READ
// ever, does not ask for it again: the READ fails.
func TestLastNak(t *testing.T) {
	for _, kind := range []mem.FaultKind{mem.FaultDead, mem.FaultPending} {
		w := newPair(t, usual(), usual())
		a, b := w.a, w.b
		there := b.regions["mem"].at(0, 10)
		read := ib.SendWR{Op: ib.OpRDMARead, Flags: ib.SendSignaled, SGL: []ib.SGE{a.regions["mem"].at(0, 10)}, RemoteAddr: there.Addr, RKey: there.LKey}
		bad := read
		read.ID, bad.ID, bad.RKey = 1, 2, 0
		if _, err := a.q.PostSend([]ib.SendWR{read, bad}); err != nil {
			t.Fatal(err)
		}
		var req, answer, nak train.Train
		for a.q.Pull(&req, w.now) {
			req.From, req.To = a.addr, b.addr
			b.q.Receive(&req, w.now)
		}
		if !b.q.Pull(&answer, w.now) || answer.Kind != wire.KindReadResponse || !b.q.Pull(&nak, w.now) || b.q.State() != ib.QPErr {
			t.Fatalf("answers %v and %v, in state %v", answer.Kind, nak.Kind, b.q.State())
		}
		b.q.SendFailed(&answer, mem.Fault{Kind: kind}, w.now)
		b.q.NotSent(&nak)
		var last train.Train
		if !b.q.Pull(&last, w.now) || last.Kind != wire.KindAck || last.PSN != nak.PSN || last.AETH.Syndrome != wire.NakRemoteAccess {
			t.Fatalf("the NAK is lost: %+v", last)
		}
		if b.q.Pull(&answer, w.now) || b.q.Counters[CntNaksSent] != 1 {
			t.Error("it is sent twice")
		}
		last.From, last.To = b.addr, a.addr
		a.q.Receive(&last, w.now)
		var wcs [4]ib.WC
		if n := a.sendCQ.Poll(wcs[:]); n != 2 || wcs[0].ID != 1 || wcs[0].Status != ib.WCRemAccessErr || wcs[1].Status != ib.WCWRFlushErr {
			t.Errorf("completed: %+v", wcs[:n])
		}
	}
}

// TestRNRTimers: the requester waits exactly as long as each code of the RNR NAK
// says (IBA 9.7.5.2.8, table 45), and b sends the code that it was given.
func TestRNRTimers(t *testing.T) {
	for code := range uint8(32) {
		s := usual()
		s.timer = code
		w := newPair(t, s, s)
		if _, err := w.a.q.PostSend([]ib.SendWR{{Op: ib.OpSend}}); err != nil {
			t.Fatal(err)
		}
		w.pullAll()
		w.b.receive(w.b.wire[0])
		w.pullAll()
		if len(w.a.wire) != 1 || w.a.wire[0].AETH.Syndrome != wire.RNRNak(code) {
			t.Fatalf("code %d: %+v", code, w.a.wire)
		}
		w.a.receive(w.a.wire[0])
		w.b.wire = nil
		at := epoch + wire.RNRDelay(code)
		if got := w.a.q.Deadline(); got != at {
			t.Errorf("code %d: deadline at %v, not %v", code, got-epoch, at-epoch)
		}
		w.now = at - 1
		w.a.q.Tick(w.now)
		if w.a.pull(); len(w.b.wire) != 0 {
			t.Errorf("code %d: too early", code)
		}
		w.now = at
		w.a.q.Tick(w.now)
		if w.a.pull(); len(w.b.wire) != 1 {
			t.Errorf("code %d: %d trains at %v", code, len(w.b.wire), at-epoch)
		}
	}
	if d := wire.RNRDelay(0); d != 655360*time.Microsecond {
		t.Errorf("code 0 is %v", d)
	}
}

// TestTimeoutBound: if the peer does not answer, a request fails after T has passed
// retry+1 times and before it has passed 4 × (retry+1) times, whatever T and the
// count (IBA 9.7.6.1.3 lets a timer run for up to 4 T).
func TestTimeoutBound(t *testing.T) {
	for timeout := uint8(1); timeout <= 31; timeout++ {
		for retry := range uint8(8) {
			s := usual()
			s.timeout, s.retry = timeout, retry
			w := newPair(t, s, s)
			if _, err := w.a.q.PostSend([]ib.SendWR{{Op: ib.OpSend, Flags: ib.SendSignaled}}); err != nil {
				t.Fatal(err)
			}
			w.pullAll()
			for w.a.q.State() == ib.QPRTS {
				d := w.a.q.Deadline()
				if d <= w.now {
					t.Fatalf("timeout %d, retry %d: the next deadline is %v, it is %v", timeout, retry, d, w.now)
				}
				w.now = d
				w.a.q.Tick(d)
				w.pullAll()
			}
			var wcs [1]ib.WC
			if w.a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCRetryExcErr {
				t.Fatalf("timeout %d, retry %d: %+v", timeout, retry, wcs[0])
			}
			T, took := wire.AckTimeout(timeout), w.now-epoch
			if lo := T * Time(retry+1); took < lo || took > 4*lo {
				t.Errorf("timeout %d (%v), retry %d: failed after %v", timeout, T, retry, took)
			}
		}
	}
}

// TestGRH: the 40 bytes in front of a datagram: for IPv4 peers the header is in
// the last 20 (annex A17.4.5.2), for IPv6 it is the whole.
func TestGRH(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		s := usual()
		s.typ = ib.UD
		w := newPair(t, s, s)
		b := w.b
		b.recv.Post([]ib.RecvWR{{SGL: []ib.SGE{b.regions["mem"].at(0, 100)}}})
		tr := &train.Train{From: w.a.addr, To: b.addr, TClass: 0x28, HopLimit: 9, Transport: wire.UD, Kind: wire.KindSend,
			Start: true, End: true, N: 1, DETH: wire.DETH{QKey: s.qkey, SrcQP: 0x77}}
		tr.SetInline([]byte("hello"))
		if v6 {
			tr.From = ib.GID{0xfd, 15: 1}.Addr()
			tr.To = ib.GID{0xfd, 15: 2}.Addr()
		}
		if f := b.q.Receive(tr, w.now); !f.OK() {
			t.Fatal(f)
		}
		var wcs [2]ib.WC
		if b.recvCQ.Poll(wcs[:]) != 1 || wcs[0].ByteLen != 45 || wcs[0].Flags != ib.WCGRH || wcs[0].SrcQP != 0x77 {
			t.Fatalf("%+v", wcs[0])
		}
		got := b.regions["mem"].buf
		// BTH, DETH, 5 bytes, 3 of padding, ICRC
		want := wire.AppendGRH(nil, tr.From, tr.To, 0x28, 9, 12+8+8+4)
		if string(got[:40]) != string(want) || string(got[40:45]) != "hello" || got[45] != 0 {
			t.Errorf("% x", got[:46])
		}
		if version := got[0]>>4 == 6; version != v6 {
			t.Errorf("the first byte is %#x", got[0])
		}
		if !v6 && (got[20] != 0x45 || got[28] != 9 || got[32] != 127 || got[39] != 2) {
			t.Errorf("IPv4 header % x", got[20:40])
		}
	}
}
