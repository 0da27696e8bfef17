package tour

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/word"
	"github.com/verbena-rdma/verbena/verbs"
)

// sendStep gathers a message from two pieces and scatters it into two.
func sendStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.a, length)
		dst, off := l.b.sink(length)
		const cut = 4000
		if err := postRecv(p.b, verbs.RecvWR{ID: 1, SGL: []verbs.SGE{l.b.mr.SGE(off, 100), l.b.mr.SGE(off+100, length-100)}}); err != nil {
			return "", err
		}
		if err := post(p.a, verbs.SendWR{ID: 2, Op: verbs.OpSend, SGL: []verbs.SGE{l.a.mr.SGE(0, cut), l.a.mr.SGE(cut, length-cut)}}); err != nil {
			return "", err
		}
		recv, err := l.expect(l.b.cq, verbs.WCRecv)
		if err != nil {
			return "", err
		}
		send, err := l.expect(l.a.cq, verbs.WCSend)
		if err != nil {
			return "", err
		}
		if recv.ID != 1 || send.ID != 2 || recv.ByteLen != length || recv.QPN != p.b.Number() {
			return "", fmt.Errorf("completions say %+v and %+v", recv, send)
		}
		return fmt.Sprintf("%d bytes, gathered from two pieces, scattered into two", length), same(dst, src)
	})
}

// receive posts a receive at b and a request at a, and waits for the completions of both.
func (l *lab) receive(p *pair, dst verbs.SGE, wr verbs.SendWR, atA, atB verbs.WCOpcode) (verbs.WC, error) {
	if err := postRecv(p.b, verbs.RecvWR{SGL: []verbs.SGE{dst}}); err != nil {
		return verbs.WC{}, err
	}
	if err := post(p.a, wr); err != nil {
		return verbs.WC{}, err
	}
	wc, err := l.expect(l.b.cq, atB)
	if err != nil {
		return wc, err
	}
	_, err = l.expect(l.a.cq, atA)
	return wc, err
}

func sendImmStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.a, length)
		dst, off := l.b.sink(length)
		imm := l.rand.Uint32()
		wc, err := l.receive(p, l.b.mr.SGE(off, length),
			verbs.SendWR{Op: verbs.OpSendImm, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, Imm: imm}, verbs.WCSend, verbs.WCRecv)
		if err != nil {
			return "", err
		}
		if wc.Flags&verbs.WCWithImm == 0 || wc.Imm != imm || wc.ByteLen != length {
			return "", fmt.Errorf("the receive says %+v, the immediate data was %#x", wc, imm)
		}
		return fmt.Sprintf("%d bytes and immediate data %#08x", length, imm), same(dst, src)
	})
}

// sendInvStep lets the peer write, then takes that back with a SEND that
// invalidates the key: the next write is refused.
func sendInvStep(l *lab) (string, error) {
	memory := make([]byte, 4096)
	mr, err := l.b.pd.RegMR(memory, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteInvalidate)
	if err != nil {
		return "", err
	}
	detail, err := l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.a, 4096)
		write := verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, 4096)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()}
		if err := post(p.a, write); err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
			return "", err
		}
		_, off := l.b.sink(16)
		wc, err := l.receive(p, l.b.mr.SGE(off, 16),
			verbs.SendWR{Op: verbs.OpSendInv, SGL: []verbs.SGE{l.a.mr.SGE(0, 16)}, InvalidateKey: mr.RKey()}, verbs.WCSend, verbs.WCRecv)
		if err != nil {
			return "", err
		}
		if wc.Flags&verbs.WCWithInv == 0 || wc.InvalidatedKey != mr.RKey() {
			return "", fmt.Errorf("the receive says %+v, the key was %#x", wc, mr.RKey())
		}
		if err := same(memory, src); err != nil {
			return "", err
		}
		before := bytes.Clone(memory)
		l.source(l.a, 4096)
		if err := post(p.a, write); err != nil {
			return "", err
		}
		if err := l.expectStatus(l.a.cq, verbs.WCRemAccessErr); err != nil {
			return "", fmt.Errorf("a write with the dead key: %w", err)
		}
		return fmt.Sprintf("key %#08x invalidated; a write with it is then refused", mr.RKey()), same(memory, before)
	})
	return detail, errors.Join(err, mr.Close())
}

func writeStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.a, half)
		dst, off := l.b.sink(half)
		addr, rkey := l.b.remote(off)
		if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, half)}, RemoteAddr: addr, RKey: rkey}); err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
			return "", err
		}
		// nothingLeft checks, when the step ends, that the peer saw no completion.
		return fmt.Sprintf("%d bytes into the peer's memory, which notices nothing", half), same(dst, src)
	})
}

func writeImmStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.a, length)
		dst, off := l.b.sink(length)
		addr, rkey := l.b.remote(off)
		imm := l.rand.Uint32()
		if err := postRecv(p.b, verbs.RecvWR{ID: 3}); err != nil { // needs no memory
			return "", err
		}
		if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWriteImm, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, RemoteAddr: addr, RKey: rkey, Imm: imm}); err != nil {
			return "", err
		}
		wc, err := l.expect(l.b.cq, verbs.WCRecvRDMAWithImm)
		if err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
			return "", err
		}
		if wc.ID != 3 || wc.Flags&verbs.WCWithImm == 0 || wc.Imm != imm || wc.ByteLen != length {
			return "", fmt.Errorf("the receive says %+v, the immediate data was %#x", wc, imm)
		}
		return fmt.Sprintf("%d bytes written, the peer is told by immediate data %#08x", length, imm), same(dst, src)
	})
}

func readStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.b, half)
		dst, off := l.a.sink(half)
		addr, rkey := l.b.remote(0)
		if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{l.a.mr.SGE(off, half)}, RemoteAddr: addr, RKey: rkey}); err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCRDMARead); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d bytes out of the peer's memory, which notices nothing", half), same(dst, src)
	})
}

// atomic executes an atomic on the first 8 bytes of the peer's sink and returns the
// value before it.
func (l *lab) atomic(p *pair, wr verbs.SendWR, op verbs.WCOpcode) (uint64, error) {
	result, off := l.a.sink(8)
	wr.SGL = []verbs.SGE{l.a.mr.SGE(off, 8)}
	wr.RemoteAddr, wr.RKey = l.b.remote(half)
	if err := post(p.a, wr); err != nil {
		return 0, err
	}
	if _, err := l.expect(l.a.cq, op); err != nil {
		return 0, err
	}
	return word.Load(result), nil
}

// cmpSwapStep takes a lock, and fails to take it a second time.
func cmpSwapStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		lock := l.b.buf[half:]
		const free, mine, yours = 0x1111, 0x2222, 0x3333
		word.Store(lock, free)
		before, err := l.atomic(p, verbs.SendWR{Op: verbs.OpAtomicCmpSwap, CompareAdd: free, Swap: mine}, verbs.WCCompSwap)
		if err != nil {
			return "", err
		}
		again, err := l.atomic(p, verbs.SendWR{Op: verbs.OpAtomicCmpSwap, CompareAdd: free, Swap: yours}, verbs.WCCompSwap)
		if err != nil {
			return "", err
		}
		if now := word.Load(lock); before != free || again != mine || now != mine {
			return "", fmt.Errorf("returned %#x and %#x and left %#x", before, again, now)
		}
		return "a lock in the peer's memory taken once, not twice", nil
	})
}

func fetchAddStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		counter := l.b.buf[half:]
		word.Store(counter, 0)
		const times, step = 10, 1<<40 + 7
		for i := range uint64(times) {
			before, err := l.atomic(p, verbs.SendWR{Op: verbs.OpAtomicFetchAdd, CompareAdd: step}, verbs.WCFetchAdd)
			if err != nil {
				return "", err
			}
			if before != i*step {
				return "", fmt.Errorf("addition %d returned %#x, not %#x", i, before, i*step)
			}
		}
		if now := word.Load(counter); now != times*step {
			return "", fmt.Errorf("%d additions left %#x", times, now)
		}
		return fmt.Sprintf("a counter in the peer's memory, %d additions, each result right", times), nil
	})
}

// inlineStep sends memory that is not registered, and changes it at once.
func inlineStep(l *lab) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		want := []byte("copied when posted, so the sender may reuse it at once")
		dst, off := l.b.sink(len(want))
		if err := postRecv(p.b, verbs.RecvWR{SGL: []verbs.SGE{l.b.mr.SGE(off, len(want))}}); err != nil {
			return "", err
		}
		words := append([]byte(nil), want...)
		if err := post(p.a, verbs.SendWR{Op: verbs.OpSend, Inline: words}); err != nil {
			return "", err
		}
		clear(words)
		if _, err := l.expect(l.b.cq, verbs.WCRecv); err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCSend); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d bytes of memory that is not registered", len(want)), same(dst, want)
	})
}
