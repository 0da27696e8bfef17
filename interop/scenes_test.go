package interop

// The scenarios, each with its two roles.

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

var scenes = map[string]map[string]func(*cast) error{
	"operations": {"initiator": (*cast).operate, "target": (*cast).beOperated},
	"stream":     {"initiator": (*cast).stream, "target": (*cast).stream},
	"choir":      {"initiator": (*cast).sing, "target": (*cast).sing},
	"requiem":    {"initiator": (*cast).mourn, "target": (*cast).singUntilKilled},
	"doomed":     {"initiator": (*cast).outlive, "target": (*cast).untilKilled},
}

// pattern fills b with bytes that depend on a number.
func pattern(b []byte, n uint64) {
	for i := range b {
		b[i] = byte(n*131) + byte(i*7) + byte(i>>8)*3 + byte(i>>16)
	}
}

func matches(b []byte, n uint64) error {
	want := make([]byte, len(b))
	if pattern(want, n); bytes.Equal(b, want) {
		return nil
	}
	for i := range b {
		if b[i] != want[i] {
			return fmt.Errorf("wrong from byte %d of %d on", i, len(b))
		}
	}
	return nil
}

// Areas of the buffer, on both sides.
const (
	sourceAt = 0       // what is sent, up to 1 MiB
	targetAt = 1 << 21 // where the peer writes
	wordsAt  = bufBytes - 64
)

func sizes(mtu int) []int { return []int{0, 1, mtu - 1, mtu, mtu + 1, 64 << 10, 1 << 20} }

// operate does every operation with every size, and checks what it reads. The target checks
// what arrives.
func (c *cast) operate() error {
	src := func(n int) []verbs.SGE { // in two pieces
		return []verbs.SGE{c.mr.SGE(sourceAt, n/3), c.mr.SGE(sourceAt+n/3, n-n/3)}
	}
	for i, n := range sizes(c.result.MTU) {
		id := uint64(i + 1)
		at := c.peer.Addr + targetAt
		step := func(op verbs.Opcode, wr verbs.SendWR) error {
			wr.ID, wr.Op, wr.RKey, wr.RemoteAddr = id, op, c.peer.RKey, at
			if wr.SGL == nil {
				wr.SGL = src(n)
			}
			if err := c.ready(); err != nil { // the target has posted its receive, if one is needed
				return err
			}
			if wc, err := c.do(c.rc, wr); err != nil || op == verbs.OpRDMARead && int(wc.ByteLen) != n {
				return fmt.Errorf("%v of %d bytes: %w (%d bytes)", op, n, err, wc.ByteLen)
			}
			return c.barrier(fmt.Sprintf("%v of %d", op, n))
		}
		pattern(c.buf[sourceAt:][:n], id)
		if err := errors.Join(
			step(verbs.OpRDMAWrite, verbs.SendWR{}),
			step(verbs.OpRDMAWriteImm, verbs.SendWR{Imm: uint32(id)}),
			step(verbs.OpSend, verbs.SendWR{}),
			step(verbs.OpSendImm, verbs.SendWR{Imm: uint32(id)}),
		); err != nil {
			return err
		}
		clear(c.buf[sourceAt:][:n])
		if err := step(verbs.OpRDMARead, verbs.SendWR{}); err != nil {
			return err
		}
		if err := matches(c.buf[sourceAt:][:n], id); err != nil {
			return fmt.Errorf("READ: %w", err)
		}
	}
	if err := c.atomics(); err != nil {
		return err
	}
	if err := c.ready(); err != nil {
		return err
	}
	if _, err := c.do(c.rc, verbs.SendWR{Op: verbs.OpSendInv, Inline: []byte("over"), InvalidateKey: c.peer.Spare}); err != nil {
		return fmt.Errorf("SEND with invalidate: %w", err)
	}
	if err := c.barrier("invalidated"); err != nil {
		return err
	}
	return c.unreliable()
}

// ready waits until both sides are ready for the next operation.
func (c *cast) ready() error { return c.barrier("ready") }

// beOperated is operate's other side: it posts the receives and checks memory.
func (c *cast) beOperated() error {
	for i, n := range sizes(c.result.MTU) {
		id := uint64(i + 1)
		for _, op := range []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMAWriteImm, verbs.OpSend, verbs.OpSendImm, verbs.OpRDMARead} {
			want := verbs.WC{ID: id, QPN: c.rc.Number(), ByteLen: uint32(n), Op: verbs.WCRecv}
			recv := verbs.RecvWR{ID: id, SGL: []verbs.SGE{c.mr.SGE(targetAt, n/2), c.mr.SGE(targetAt+n/2, n-n/2)}}
			receives := true
			switch op {
			case verbs.OpRDMAWriteImm:
				want.Op, want.Flags, want.Imm, recv.SGL = verbs.WCRecvRDMAWithImm, verbs.WCWithImm, uint32(id), nil
			case verbs.OpSendImm:
				want.Flags, want.Imm = verbs.WCWithImm, uint32(id)
			case verbs.OpRDMAWrite, verbs.OpRDMARead:
				receives = false
			}
			if op != verbs.OpRDMARead {
				clear(c.buf[targetAt:][:n+64])
			}
			if receives {
				if _, err := c.rc.PostRecv([]verbs.RecvWR{recv}); err != nil {
					return err
				}
			}
			if err := c.ready(); err != nil {
				return err
			}
			if receives {
				if wc, err := c.wait(patience); err != nil || wc != want {
					return fmt.Errorf("%v of %d bytes: %w, %+v, want %+v", op, n, err, wc, want)
				}
			}
			if err := c.barrier(fmt.Sprintf("%v of %d", op, n)); err != nil {
				return err
			}
			if err := matches(c.buf[targetAt:][:n], id); err != nil {
				c.fail("%v: %v", op, err)
			}
			if !bytes.Equal(c.buf[targetAt+n:][:64], make([]byte, 64)) {
				c.fail("%v of %d bytes: bytes behind the end were changed", op, n)
			}
		}
	}
	if err := c.barrier("atomics"); err != nil {
		return err
	}
	if got, swapped := wordAt(c.buf, wordsAt), wordAt(c.buf, wordsAt+8); got != 45 || swapped != 99 {
		c.fail("atomics have made %d and %d, want 45 and 99", got, swapped)
	}
	if _, err := c.rc.PostRecv([]verbs.RecvWR{{ID: 5, SGL: []verbs.SGE{c.mr.SGE(targetAt, 64)}}}); err != nil {
		return err
	}
	if err := c.ready(); err != nil {
		return err
	}
	wc, err := c.wait(patience)
	if err != nil || wc.Flags != verbs.WCWithInv || wc.InvalidatedKey != c.spare.RKey() || string(c.buf[targetAt:][:4]) != "over" {
		return fmt.Errorf("SEND with invalidate: %w, %+v", err, wc)
	}
	if err := c.barrier("invalidated"); err != nil {
		return err
	}
	return c.unreliableTarget()
}

// atomics adds 0 to 9 to one of the target's words and swaps the other.
func (c *cast) atomics() error {
	result := []verbs.SGE{c.mr.SGE(wordsAt, 8)}
	var sum uint64
	for i := range uint64(10) {
		_, err := c.do(c.rc, verbs.SendWR{ID: i, Op: verbs.OpAtomicFetchAdd, SGL: result, RemoteAddr: c.peer.Addr + wordsAt, RKey: c.peer.RKey, CompareAdd: i})
		if got := wordAt(c.buf, wordsAt); err != nil || got != sum {
			return fmt.Errorf("fetch-and-add: %w, found %d, want %d", err, got, sum)
		}
		sum += i
	}
	for _, swap := range []struct{ compare, with, found uint64 }{{1, 50, 0}, {0, 77, 0}, {0, 88, 77}, {77, 99, 77}} {
		_, err := c.do(c.rc, verbs.SendWR{Op: verbs.OpAtomicCmpSwap, SGL: result, RemoteAddr: c.peer.Addr + wordsAt + 8, RKey: c.peer.RKey,
			CompareAdd: swap.compare, Swap: swap.with})
		if got := wordAt(c.buf, wordsAt); err != nil || got != swap.found {
			return fmt.Errorf("compare-and-swap: %w, found %d, want %d", err, got, swap.found)
		}
	}
	return c.barrier("atomics")
}

// unreliable sends UC messages and datagrams. Where the network loses some, it repeats each
// until it has arrived.
func (c *cast) unreliable() error {
	for i, m := range c.letters() {
		pattern(c.buf[sourceAt:][:m.size], uint64(i))
		for {
			if err := c.ready(); err != nil {
				return err
			}
			wr := verbs.SendWR{ID: uint64(i), Op: m.op, Imm: uint32(i), SGL: []verbs.SGE{c.mr.SGE(sourceAt, m.size)},
				RemoteAddr: c.peer.Addr + targetAt, RKey: c.peer.RKey}
			qp := c.uc
			if m.datagram {
				qp, wr.AH, wr.RemoteQPN, wr.RemoteQKey = c.ud, c.ah, c.peer.UD.QPN, c.peer.UD.QKey
			}
			if _, err := c.do(qp, wr); err != nil {
				return fmt.Errorf("letter %d, %+v: %w", i, m, err)
			}
			var arrived bool
			if err := c.hear(&arrived); err != nil {
				return err
			}
			if arrived {
				break
			}
		}
	}
	return nil
}

// parcel is an unreliable message.
type parcel struct {
	op       verbs.Opcode
	datagram bool
	size     int
}

func (c *cast) letters() (all []parcel) {
	mtu := c.result.MTU
	for _, n := range []int{0, 1, mtu, mtu + 1, 10 * mtu} {
		all = append(all, parcel{verbs.OpSendImm, false, n}, parcel{verbs.OpRDMAWriteImm, false, n})
		if n <= mtu {
			all = append(all, parcel{verbs.OpSendImm, true, n})
		}
	}
	return all
}

// unreliableTarget receives the letters, and tells the initiator after each whether it has
// arrived.
func (c *cast) unreliableTarget() error {
	posted := map[*verbs.QP]bool{} // a receive is posted: a lost letter has not taken it
	for i, m := range c.letters() {
		for tries := 0; ; tries++ {
			qp, at := c.uc, targetAt
			if m.datagram {
				qp, at = c.ud, targetAt+verbs.GRHLength
			}
			post := func() error {
				_, err := qp.PostRecv([]verbs.RecvWR{{ID: 9, SGL: []verbs.SGE{c.mr.SGE(targetAt, 1<<20)}}})
				return err
			}
			if !posted[qp] {
				if err := post(); err != nil {
					return err
				}
				posted[qp] = true
			}
			if err := c.ready(); err != nil {
				return err
			}
			d := patience
			if c.script.Lossy {
				d = 200 * time.Millisecond
			}
			wc, err := c.wait(d)
			for err == nil && c.script.Lossy && wc.Err() == nil && wc.QPN == qp.Number() && wc.Imm < uint32(i) {
				// An earlier letter, which was late, not lost, and so was sent twice.
				if err = post(); err == nil {
					wc, err = c.wait(d)
				}
			}
			if err != nil && c.script.Lossy && tries < 50 {
				c.tell(false)
				continue
			}
			want := m.size
			if m.datagram {
				want += verbs.GRHLength
			}
			if err != nil || wc.Err() != nil || int(wc.ByteLen) != want || wc.Imm != uint32(i) || wc.QPN != qp.Number() {
				return fmt.Errorf("letter %d, %+v: %w, %+v", i, m, err, wc)
			}
			if err := matches(c.buf[at:][:m.size], uint64(i)); err != nil {
				c.fail("letter %d, %+v: %v", i, m, err)
			}
			if m.datagram && c.script.Classes {
				c.checkHeader(c.buf[targetAt:][:verbs.GRHLength])
			}
			posted[qp] = false
			c.tell(true)
			break
		}
	}
	return nil
}

// stream writes and reads for some time, in both directions at once, and checks all bytes
// that it reads.
func (c *cast) stream() error {
	const chunk = 256 << 10
	pattern(c.buf[targetAt:][:1<<20], 42) // what the peer reads; its WRITEs go behind it
	if err := c.barrier("filled"); err != nil {
		return err
	}
	if c.role == "initiator" {
		c.write(envelope{To: "test", Body: []byte(`"running"`)})
	}
	pattern(c.buf[sourceAt:][:chunk], 7)
	want := make([]byte, 1<<20)
	pattern(want, 42)
	until := time.Now().Add(time.Duration(c.script.Seconds) * time.Second)
	for i := 0; time.Now().Before(until); i++ {
		off := i % 4 * chunk
		if _, err := c.do(c.rc, verbs.SendWR{ID: 1, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{c.mr.SGE(sourceAt, chunk)},
			RemoteAddr: c.peer.Addr + targetAt + 1<<20, RKey: c.peer.RKey}); err != nil {
			return err
		}
		if _, err := c.do(c.rc, verbs.SendWR{ID: 2, Op: verbs.OpRDMARead, SGL: []verbs.SGE{c.mr.SGE(1<<20, chunk)},
			RemoteAddr: c.peer.Addr + uint64(targetAt+off), RKey: c.peer.RKey}); err != nil {
			return err
		}
		if !bytes.Equal(c.buf[1<<20:][:chunk], want[off:][:chunk]) {
			c.fail("READ %d is wrong", i)
		}
		clear(c.buf[1<<20:][:chunk])
		c.result.Bytes += 2 * chunk
	}
	if err := c.barrier("done"); err != nil {
		return err
	}
	return matches(c.buf[targetAt+1<<20:][:chunk], 7)
}

// outlive has requests under way when the target is killed: the first one fails with
// WCRetryExcErr, the others and the receives are flushed.
func (c *cast) outlive() error {
	out, done := 0, 0
	wr := verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{c.mr.SGE(sourceAt, 64<<10)}, RemoteAddr: c.peer.Addr, RKey: c.peer.RKey}
	for range 3 {
		if _, err := c.rc.PostRecv([]verbs.RecvWR{{ID: 1000}}); err != nil {
			return err
		}
	}
	var next uint64
	for {
		for ; out < deep/2; out++ {
			wr.ID = next
			if err := c.post(c.rc, wr); err != nil {
				return err
			}
			next++
		}
		wc, err := c.wait(patience)
		if err != nil {
			return err
		}
		if wc.Status != verbs.WCSuccess {
			if wc.Status != verbs.WCRetryExcErr || wc.ID != uint64(done) {
				return fmt.Errorf("request %d failed with %v, want %d with %v", wc.ID, wc.Status, done, verbs.WCRetryExcErr)
			}
			break
		}
		out, done = out-1, done+1
		if done == 50 {
			c.write(envelope{To: "test", Body: []byte(`"kill"`)})
		}
	}
	for i := range out - 1 + 3 {
		wc, err := c.wait(time.Second)
		want := uint64(done + 1 + i)
		if i >= out-1 {
			want = 1000
		}
		if err != nil || wc.Status != verbs.WCWRFlushErr || wc.ID != want {
			return fmt.Errorf("flushing: %w, request %d ended with %v, want %d", err, wc.ID, wc.Status, want)
		}
	}
	if wc, err := c.wait(50 * time.Millisecond); err == nil {
		return fmt.Errorf("one completion too many: %+v", wc)
	}
	return nil
}

// untilKilled waits to be killed.
func (c *cast) untilKilled() error {
	time.Sleep(patience)
	return errors.New("the target was not killed")
}
