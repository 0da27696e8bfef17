package main

// Memory windows: the target binds one, and the initiator uses it, within its bounds and
// rights and beyond them.

import (
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

const (
	bindID = 99 // of requests that bind

	mwRegion = 8192
	mwOff    = 1000 // where the window begins in the region
	mwLen    = 5000
)

// windowCase is a request of the initiator through a window that the target has bound, and
// its status.
type windowCase struct {
	name   string
	typ    verbs.MWType
	access verbs.Access // of the window
	op     verbs.Opcode
	// change, if not nil, changes the window, or the request, which covers the window.
	change    func(w *windowScene, wr *verbs.SendWR) error
	want      verbs.WCStatus
	unchecked bool // the kernel, as a target, allows it; docs/interop.md
}

// windowScene is a bound window.
type windowScene struct {
	*scene
	i, t          *end
	local, remote *region
	w             *window
	base          uint64 // the window's address in requests
}

func windows() (rows []*testCase) {
	const remote = verbs.AccessRemote
	refused := verbs.WCRemAccessErr
	before := func(_ *windowScene, wr *verbs.SendWR) error { wr.RemoteAddr--; return nil }
	behind := func(_ *windowScene, wr *verbs.SendWR) error { wr.RemoteAddr++; return nil }
	other := func(_ *windowScene, wr *verbs.SendWR) error { wr.RKey ^= 0x80; return nil }
	for _, typ := range []verbs.MWType{verbs.MWType1, verbs.MWType2} {
		for _, c := range []windowCase{
			{name: "write", access: remote, op: verbs.OpRDMAWrite},
			{name: "read", access: remote, op: verbs.OpRDMARead},
			{name: "fadd", access: remote, op: verbs.OpAtomicFetchAdd},
			{name: "before", access: remote, op: verbs.OpRDMAWrite, change: before, want: refused, unchecked: true},
			{name: "behind", access: remote, op: verbs.OpRDMAWrite, change: behind, want: refused, unchecked: true},
			{name: "right", access: verbs.AccessRemoteRead, op: verbs.OpRDMAWrite, want: refused},
			{name: "readright", access: verbs.AccessRemoteWrite, op: verbs.OpRDMARead, want: refused},
			{name: "key", access: remote, op: verbs.OpRDMAWrite, change: other, want: refused},
			{name: "closed", access: remote, op: verbs.OpRDMAWrite, change: closeWindow, want: refused},
			{name: "again", access: remote, op: verbs.OpRDMAWrite, change: bindAgain},
			{name: "old", access: remote, op: verbs.OpRDMAWrite, change: oldKey, want: refused},
			{name: "zerobased", typ: verbs.MWType2, access: remote | verbs.AccessZeroBased, op: verbs.OpRDMAWrite},
			{name: "localinv", typ: verbs.MWType2, access: remote, op: verbs.OpRDMAWrite, change: invalidateHere, want: refused},
			{name: "sendinv", typ: verbs.MWType2, access: remote, op: verbs.OpRDMAWrite, change: invalidateThere, want: refused},
			{name: "queuepair", typ: verbs.MWType2, access: remote, op: verbs.OpRDMAWrite, change: otherQueuePair, want: refused},
			{name: "empty", typ: verbs.MWType1, access: remote, op: verbs.OpRDMAWrite, change: bindNothing, want: refused},
		} {
			if c.typ != 0 && c.typ != typ {
				continue
			}
			c.typ = typ
			row := testCase{name: fmt.Sprintf("rc/mw/type%d/%s", typ, c.name), shortV4: c.name == "write" || c.name == "behind" || c.name == "localinv"}
			rows = append(rows, everyWay(row, func(s *scene) error { return s.throughWindow(c) })...)
		}
	}
	rows = append(rows, everyWay(testCase{name: "rc/mw/refusedbind"}, (*scene).refusedBinds)...)
	return rows
}

// throughWindow binds a window, makes a request through it and compares every
// byte of the region.
func (s *scene) throughWindow(c windowCase) error {
	const seed, old = 11, 12
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	w := &windowScene{scene: s, i: i, t: t}
	if w.local, err = i.alloc(mwRegion, allRights); err != nil {
		return err
	}
	if w.remote, err = t.alloc(mwRegion, verbs.AccessLocalWrite|verbs.AccessMWBind); err != nil {
		return err
	}
	if err := errors.Join(i.fill(w.local, 0, mwRegion, seed), t.fill(w.remote, 0, mwRegion, old)); err != nil {
		return err
	}
	if w.w, err = t.newWindow(c.typ); err != nil {
		return err
	}
	if err := w.bind(mwOff, mwLen, c.access); err != nil {
		return err
	}
	if w.base = w.remote.addr + mwOff; c.access&verbs.AccessZeroBased != 0 {
		w.base = 0
	}
	wr := verbs.SendWR{ID: 1, Op: c.op, SGL: []verbs.SGE{w.local.sge(0, mwLen)}, RemoteAddr: w.base, RKey: w.w.rkey, CompareAdd: 1}
	if c.op == verbs.OpAtomicFetchAdd {
		wr.SGL[0].Length = 8
	}
	if c.change != nil {
		if err := c.change(w, &wr); err != nil {
			return err
		}
	}
	want := c.want
	if c.unchecked && s.weInit {
		want = verbs.WCSuccess
	}
	wc, err := w.i.try(wr)
	if err := wantStatus(w.i.who(), wc, err, want); err != nil {
		return err
	}
	return w.compare(&wr, want, seed, old)
}

// bind binds the window on the target's queue pair.
func (w *windowScene) bind(off, n int, access verbs.Access) error {
	wc, err := w.t.bind(w.t.qp, w.w, w.remote, off, n, access)
	if err == nil {
		err = wc.Err()
	}
	if err == nil && (wc.ID != bindID || wc.Op != verbs.WCBindMW) {
		err = fmt.Errorf("the bind completed as %+v", wc)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", w.t.who(), err)
	}
	return nil
}

// compare checks all bytes of the target's region: unchanged, except by a request that
// succeeded.
func (w *windowScene) compare(wr *verbs.SendWR, status verbs.WCStatus, seed, old uint64) error {
	got, err := w.t.peek(w.remote, 0, mwRegion)
	if err != nil {
		return err
	}
	want := make([]byte, mwRegion)
	pattern(mwRegion, old, func(i int, b byte) bool { want[i] = b; return true })
	at := mwOff + int(wr.RemoteAddr-w.base)
	switch {
	case status != verbs.WCSuccess:
	case wr.Op == verbs.OpRDMAWrite:
		pattern(mwLen, seed, func(i int, b byte) bool { want[at+i] = b; return true })
	case wr.Op == verbs.OpAtomicFetchAdd:
		for k := at; k < at+8; k++ { // adds 1; every guest is little-endian
			if want[k]++; want[k] != 0 {
				break
			}
		}
	case wr.Op == verbs.OpRDMARead:
		read, err := w.i.peek(w.local, 0, mwLen)
		if err != nil {
			return err
		}
		for k := range read {
			if read[k] != want[at+k] {
				return fmt.Errorf("%s: byte %d that was read is %#x, want %#x", w.i.who(), k, read[k], want[at+k])
			}
		}
	}
	for k := range want {
		if got[k] != want[k] {
			return fmt.Errorf("%s: byte %d of the region is %#x, want %#x; the window is %d to %d", w.t.who(), k, got[k], want[k], mwOff, mwOff+mwLen)
		}
	}
	return nil
}

func closeWindow(w *windowScene, _ *verbs.SendWR) error { return w.t.endWindow(w.w) }

// free unbinds a window, if its type must be unbound before the next bind.
func (w *windowScene) free() error {
	if w.w.typ == verbs.MWType1 {
		return nil
	}
	return invalidateHere(w, nil)
}

// bindAgain binds the window elsewhere: the new key works there.
func bindAgain(w *windowScene, wr *verbs.SendWR) error {
	if err := errors.Join(w.free(), w.bind(mwOff+500, mwLen, verbs.AccessRemote)); err != nil {
		return err
	}
	wr.RKey = w.w.rkey
	wr.RemoteAddr += 500
	return nil
}

// oldKey binds the window once more and uses the key that it had before.
func oldKey(w *windowScene, wr *verbs.SendWR) error {
	old := w.w.rkey
	err := errors.Join(w.free(), w.bind(mwOff, mwLen, verbs.AccessRemote))
	if err == nil && w.w.rkey == old {
		err = errors.New("the key has not changed")
	}
	return err
}

func bindNothing(w *windowScene, wr *verbs.SendWR) error {
	err := w.bind(mwOff, 0, verbs.AccessRemote)
	wr.RKey = w.w.rkey
	return err
}

func invalidateHere(w *windowScene, _ *verbs.SendWR) error {
	_, err := w.t.do(verbs.SendWR{ID: 5, Op: verbs.OpLocalInv, InvalidateKey: w.w.rkey})
	return err
}

// invalidateThere has the initiator invalidate the window, by SEND with invalidate.
func invalidateThere(w *windowScene, _ *verbs.SendWR) error {
	inbox, err := w.t.alloc(64, verbs.AccessLocalWrite)
	if err != nil {
		return err
	}
	if err := w.t.receive(6, inbox.sge(0, 64)); err != nil {
		return err
	}
	if _, err := w.i.do(verbs.SendWR{ID: 7, Op: verbs.OpSendInv, InvalidateKey: w.w.rkey, SGL: []verbs.SGE{w.local.sge(0, 16)}}); err != nil {
		return err
	}
	return w.t.wantReceived(verbs.WC{ID: 6, Op: verbs.WCRecv, ByteLen: 16, Flags: verbs.WCWithInv, InvalidatedKey: w.w.rkey})
}

// otherQueuePair uses the key on a second connection.
func otherQueuePair(w *windowScene, _ *verbs.SendWR) error {
	i, _, err := w.connect(connection{psn: 0x777777})
	w.i = i
	return err
}

// refusedBinds tries binds that must fail, each on a queue pair of its own, which goes to ERR.
func (s *scene) refusedBinds() error {
	for _, c := range []struct {
		name   string
		typ    verbs.MWType
		rights verbs.Access // of the region
		n      int
		access verbs.Access
	}{
		{"no right to bind", verbs.MWType2, allRights, 100, verbs.AccessRemoteRead},
		{"a right to write, of a region without local write", verbs.MWType2, verbs.AccessMWBind, 100, verbs.AccessRemoteWrite},
		{"beyond the region", verbs.MWType2, verbs.AccessMWBind, mwRegion + 1, verbs.AccessRemoteRead},
		{"no bytes", verbs.MWType2, verbs.AccessMWBind, 0, verbs.AccessRemoteRead},
	} {
		_, t, err := s.connect(connection{})
		if err != nil {
			return err
		}
		r, err := t.alloc(mwRegion, c.rights)
		if err != nil {
			return err
		}
		w, err := t.newWindow(c.typ)
		if err != nil {
			return err
		}
		wc, err := t.bind(t.qp, w, r, 0, c.n, c.access)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		flushed := wc.Status == verbs.WCWRFlushErr && s.weInit // the kernel is the target; docs/interop.md
		if wc.Status != verbs.WCMWBindErr && !flushed {
			return fmt.Errorf("%s: %s: %q", t.who(), c.name, wc.Status)
		}
		if err := wantState(t, verbs.QPErr); err != nil {
			return err
		}
	}
	return nil
}
