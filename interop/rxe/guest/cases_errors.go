package main

// Receives that are posted late or never, and requests that the target refuses.

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func lateReceivers() (rows []*testCase) {
	for _, op := range opNames {
		switch op.op {
		case verbs.OpSend, verbs.OpSendImm, verbs.OpRDMAWriteImm:
			rows = append(rows, everyWay(testCase{name: "rc/rnr/late/" + op.name, short: op.op != verbs.OpSendImm},
				func(s *scene) error { return s.late(op.op) })...)
		}
	}
	rows = append(rows, everyWay(testCase{name: "rc/rnr/never", short: true}, (*scene).never)...)
	return rows
}

// late sends before a receive is posted. The target answers with RNR NAKs until there is one.
func (s *scene) late(op verbs.Opcode) error {
	const size, seed = 5000, 3
	i, t, err := s.connect(connection{timer: 14}) // 1.28 ms, by IBA table 45
	if err != nil {
		return err
	}
	local, remote, err := buffers(i, t, size)
	if err != nil {
		return err
	}
	if err := i.fill(local, 0, size, seed); err != nil {
		return err
	}
	if err := i.post(verbs.SendWR{ID: 1, Op: op, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr, RKey: remote.rkey}); err != nil {
		return err
	}
	if wc, err := i.sent(i.qp, 100*time.Millisecond); !errors.As(err, new(errNone)) {
		return fmt.Errorf("%s: without a receive the request ended: %+v, %w", i.who(), wc, err)
	}
	if err := t.receive(2, remote.sge(0, size)); err != nil {
		return err
	}
	wc, err := i.sent(i.qp, patience)
	if err := wantStatus(i.who(), wc, err, verbs.WCSuccess); err != nil {
		return err
	}
	wc, err = t.received(t.qp, patience)
	if err := wantStatus(t.who(), wc, err, verbs.WCSuccess); err != nil {
		return err
	}
	return t.check(remote, 0, size, seed)
}

// never sends where no receive is ever posted, with few retries.
func (s *scene) never() error {
	i, t, err := s.connect(connection{rnr: 2, timer: 14})
	if err != nil {
		return err
	}
	local, _, err := buffers(i, t, 64)
	if err != nil {
		return err
	}
	wc, err := i.try(verbs.SendWR{ID: 1, Op: verbs.OpSend, SGL: []verbs.SGE{local.sge(0, 64)}})
	if err := wantStatus(i.who(), wc, err, verbs.WCRNRRetryExcErr); err != nil {
		return err
	}
	return errors.Join(wantState(i, verbs.QPErr), wantState(t, verbs.QPRTS))
}

func wantState(e *end, want verbs.QPState) error {
	got, err := e.state(e.qp)
	// A thread of the kernel makes the change, and may not have done it yet.
	for n := 0; n < 50 && err == nil && got != want; n++ {
		time.Sleep(10 * time.Millisecond)
		got, err = e.state(e.qp)
	}
	if err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%s: the queue pair is in %v, want %v", e.who(), got, want)
	}
	return nil
}

// violation is a request that the target must refuse.
type violation struct {
	name   string
	op     verbs.Opcode
	access verbs.Access // of the target's region; zero: all
	qp     verbs.Access // what the target's queue pair allows; zero: all
	change func(wr *verbs.SendWR, target *region)
	recv   int            // bytes of the posted receive
	want   verbs.WCStatus // at the initiator
	target verbs.WCStatus // of the receive at the target
	kernel *deviation     // what the kernel does instead, as a target; docs/interop.md
	weOnly bool           // only we initiate: the user-space driver of rxe refuses the request
	needs  uint64         // capabilities that not every kernel has
}

// deviation is what differs if the kernel is the target.
type deviation struct{ want, target verbs.WCStatus }

func violations() (rows []*testCase) {
	const size = 4096
	badKey := func(wr *verbs.SendWR, _ *region) { wr.RKey ^= 0x5a }
	far := func(wr *verbs.SendWR, r *region) { wr.RemoteAddr = r.addr + uint64(r.size) - 8 }
	beyond := func(wr *verbs.SendWR, r *region) { wr.RemoteAddr = r.addr + uint64(r.size+7)&^7 }
	wraps := func(wr *verbs.SendWR, _ *region) { wr.RemoteAddr = ^uint64(0) - 8 }
	crooked := func(wr *verbs.SendWR, _ *region) { wr.RemoteAddr += 4 }
	local := verbs.AccessLocalWrite
	access, invalid, flushed := verbs.WCRemAccessErr, verbs.WCRemInvReqErr, verbs.WCWRFlushErr
	allButFlush := verbs.AccessRemote
	persistent := func(wr *verbs.SendWR, _ *region) { wr.FlushType = verbs.FlushGlobal | verbs.FlushPersistent }
	for _, v := range []violation{
		{name: "write/key", op: verbs.OpRDMAWrite, change: badKey, want: access, target: flushed},
		{name: "write/bounds", op: verbs.OpRDMAWrite, change: far, want: access, target: flushed},
		{name: "write/wrap", op: verbs.OpRDMAWrite, change: wraps, want: access, target: flushed},
		{name: "write/right", op: verbs.OpRDMAWrite, access: local | verbs.AccessRemoteRead, want: access, target: flushed},
		{name: "write_imm/key", op: verbs.OpRDMAWriteImm, change: badKey, want: access, target: flushed},
		{name: "read/key", op: verbs.OpRDMARead, change: badKey, want: access, target: flushed},
		{name: "read/bounds", op: verbs.OpRDMARead, change: far, want: access, target: flushed},
		{name: "read/right", op: verbs.OpRDMARead, access: local | verbs.AccessRemoteWrite, want: access, target: flushed},
		{name: "cas/key", op: verbs.OpAtomicCmpSwap, change: badKey, want: access, target: flushed},
		{name: "cas/right", op: verbs.OpAtomicCmpSwap, access: local | verbs.AccessRemoteWrite, want: access, target: flushed},
		{name: "fadd/crooked", op: verbs.OpAtomicFetchAdd, change: crooked, want: invalid, target: flushed, weOnly: true},
		{name: "send/long", op: verbs.OpSend, recv: size - 1, want: invalid, target: verbs.WCLocLenErr,
			kernel: &deviation{verbs.WCRemOpErr, verbs.WCLocQPOpErr}},
		{name: "send_inv/key", op: verbs.OpSendInv, change: func(wr *verbs.SendWR, r *region) { wr.InvalidateKey = r.rkey ^ 0x5a }, recv: size,
			want: access, target: verbs.WCLocAccessErr, kernel: &deviation{verbs.WCSuccess, verbs.WCRemInvReqErr}},
		{name: "write/queuepair", op: verbs.OpRDMAWrite, qp: verbs.AccessRemoteRead, want: invalid, target: flushed},
		{name: "atomic_write/key", op: verbs.OpAtomicWrite, needs: kernelAtomicWrite, change: badKey, want: access, target: flushed},
		{name: "atomic_write/bounds", op: verbs.OpAtomicWrite, needs: kernelAtomicWrite, change: beyond, want: access, target: flushed},
		{name: "atomic_write/right", op: verbs.OpAtomicWrite, needs: kernelAtomicWrite, access: local | verbs.AccessRemoteRead, want: access, target: flushed},
		{name: "atomic_write/crooked", op: verbs.OpAtomicWrite, needs: kernelAtomicWrite, change: crooked, want: invalid, target: flushed},
		{name: "atomic_write/queuepair", op: verbs.OpAtomicWrite, needs: kernelAtomicWrite, qp: verbs.AccessRemoteRead, want: invalid, target: flushed},
		{name: "flush/key", op: verbs.OpFlush, needs: kernelFlushGlobal, change: badKey, want: access, target: flushed},
		{name: "flush/bounds", op: verbs.OpFlush, needs: kernelFlushGlobal, change: far, want: access, target: flushed},
		{name: "flush/right", op: verbs.OpFlush, needs: kernelFlushGlobal, access: local | allButFlush, want: access, target: flushed},
		// Ordinary memory is not persistent, and cannot be registered as such.
		{name: "flush/persistent", op: verbs.OpFlush, needs: kernelFlushGlobal, change: persistent, want: access, target: flushed},
		{name: "flush/queuepair", op: verbs.OpFlush, needs: kernelFlushGlobal, qp: allButFlush, want: invalid, target: flushed},
	} {
		short := v.name == "write/key" || v.name == "read/key" || v.name == "send/long" || v.name == "cas/key"
		for _, row := range everyWay(testCase{name: "rc/refused/" + v.name, short: short}, func(s *scene) error { return s.violate(v) }) {
			if !v.weOnly || row.weInitiate() {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// violate posts a request that the target refuses, and another one behind it. The first one
// fails, the second is flushed. The target's queue pair goes to ERR, its receive ends with
// v.target, and its memory is unchanged.
func (s *scene) violate(v violation) error {
	const size, seed = 4096, 4
	if err := s.needs(v.needs); err != nil {
		return err
	}
	c := connection{timeout: 14, retry: 3}
	rights := allRights
	if v.op == verbs.OpFlush {
		c.access = verbs.AccessRemote | verbs.AccessFlush
		rights |= verbs.AccessFlushGlobal
	}
	if v.qp != 0 {
		c.access = v.qp
	}
	i, t, err := s.connect(c)
	if err != nil {
		return err
	}
	if v.access == 0 {
		v.access = rights
	}
	local, err := i.alloc(size, allRights)
	if err != nil {
		return err
	}
	remote, err := t.alloc(size, v.access)
	if err != nil {
		return err
	}
	if err := errors.Join(t.fill(remote, 0, size, seed), i.fill(local, 0, size, seed+1)); err != nil {
		return err
	}
	inbox, err := t.alloc(size, verbs.AccessLocalWrite)
	if err != nil {
		return err
	}
	if v.recv == 0 {
		v.recv = size
	}
	behind := verbs.WCWRFlushErr
	if v.kernel != nil && s.weInit {
		v.want, v.target = v.kernel.want, v.kernel.target
		if v.want == verbs.WCSuccess { // then the next one gets no answer
			behind = verbs.WCRetryExcErr
		}
	}
	if err := t.receive(7, inbox.sge(0, v.recv)); err != nil {
		return err
	}
	wr := verbs.SendWR{ID: 1, Op: v.op, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr, RKey: remote.rkey}
	switch v.op {
	case verbs.OpAtomicCmpSwap, verbs.OpAtomicFetchAdd, verbs.OpAtomicWrite:
		wr.SGL = []verbs.SGE{local.sge(0, 8)}
	case verbs.OpFlush:
		wr.SGL, wr.RemoteLength, wr.FlushType, wr.FlushLevel = nil, size, verbs.FlushGlobal, verbs.FlushRange
	}
	if v.change != nil {
		v.change(&wr, remote)
	}
	next := verbs.SendWR{ID: 2, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr, RKey: remote.rkey}
	if err := i.post(wr); err != nil {
		return err
	}
	if err := i.post(next); err != nil {
		return err
	}
	wc, err := i.sent(i.qp, patience)
	if err := errors.Join(wantStatus(i.who(), wc, err, v.want), wantID(i, wc, 1)); err != nil {
		return err
	}
	wc, err = i.sent(i.qp, patience)
	if err := errors.Join(wantStatus(i.who()+", the request behind", wc, err, behind), wantID(i, wc, 2)); err != nil {
		return err
	}
	if err := errors.Join(wantState(i, verbs.QPErr), wantState(t, verbs.QPErr)); err != nil {
		return err
	}
	wc, err = t.received(t.qp, 2*time.Second)
	if err := wantStatus(t.who()+", the receive", wc, err, v.target); err != nil {
		return err
	}
	return t.check(remote, 0, size, seed)
}
