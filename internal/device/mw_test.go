package device

// Memory windows between devices: what a peer may do through which key, and that a key that
// was taken away gives no access.

import (
	"bytes"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// linkRings is the local link by the rings that lead to other processes, though
// the other device is in this one.
const linkRings = "rings"

var allLinks = []string{linkLoop, linkRings, linkUDP}

// openFor opens a device whose traffic takes one link.
func openFor(t testing.TB, mode string) *Device {
	t.Helper()
	if mode != linkRings {
		return openDevice(t, provider.Config{Link: mode})
	}
	d := openDevice(t, provider.Config{Link: linkLocal})
	d.loopback = false
	return d
}

// windowed makes a connection to an end whose region allows windows and nothing
// else to peers.
func windowed(t testing.TB, mode string, size int) (a, b *end) {
	t.Helper()
	a, b = connected(t, openFor(t, mode), openFor(t, mode), ib.RC, size, nil)
	b.allowWindows()
	return a, b
}

func (e *end) allowWindows() {
	e.t.Helper()
	closeAll(e.t, e.mr)
	e.mr = must[provider.MR](e.t)(e.pd.RegMR(e.buf, ib.AccessLocalWrite|ib.AccessMWBind))
}

// window makes a window, which goes before the region does.
func (e *end) window(typ ib.MWType) provider.MW {
	e.t.Helper()
	w := must[provider.MW](e.t)(e.pd.AllocMW(typ))
	e.t.Cleanup(func() { closeAll(e.t, w) })
	return w
}

// onto is what a window is bound to: n bytes of the end's region.
func (e *end) onto(w provider.MW, off, n int, access ib.Access) ib.MWBind {
	return ib.MWBind{MW: w.RKey(), RKey: w.RKey() + 1, LKey: e.mr.LKey(), Addr: e.mr.Addr() + uint64(off), Length: uint64(n), Access: access}
}

// bind binds a window in the way of its type, waits for that, and returns its key.
func (e *end) bind(w provider.MW, off, n int, access ib.Access) uint32 {
	e.t.Helper()
	if w.Type() == ib.MWType1 {
		key := must[uint32](e.t)(e.qp.BindMW(w, 77, ib.SendSignaled, e.onto(w, off, n, access)))
		if wc := e.ok(); wc.Op != ib.WCBindMW || wc.ID != 77 || w.RKey() != key {
			e.t.Fatalf("%+v, key %#x, promised %#x", wc, w.RKey(), key)
		}
		return key
	}
	e.post(ib.SendWR{Op: ib.OpBindMW, Bind: e.onto(w, off, n, access)})
	if wc := e.ok(); wc.Op != ib.WCBindMW {
		e.t.Fatalf("%+v", wc)
	}
	return w.RKey()
}

// through is a request through a key, at an offset of the region behind it.
func (e *end) through(o *end, op ib.Opcode, key uint32, off, n int) ib.SendWR {
	return ib.SendWR{Op: op, SGL: e.sge(off, n), RemoteAddr: o.mr.Addr() + uint64(off), RKey: key, CompareAdd: 1}
}

// Two peers have different rights to different parts of one region. A window of type 2 is its
// queue pair's peer's alone; a window of type 1 is for every peer of the domain.
func TestWindowsForPeers(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			x, y := openFor(t, mode), openFor(t, mode)
			a1, b1 := connected(t, x, y, ib.RC, 8192, nil)
			a2, b2 := newEnd(t, x, ib.RC, 8192), newEnd(t, y, ib.RC, 8192)
			t.Cleanup(a2.close)
			// The second queue pair is of the first one's domain.
			own := b2.pd
			closeAll(t, b2.qp)
			b2.qp = must[provider.QP](t)(b1.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: b2.cq, RecvCQ: b2.cq,
				Cap: ib.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}}))
			t.Cleanup(func() { closeAll(t, b2.qp, b2.mr, b2.cq, own) })
			a2.connect(b2)
			b2.connect(a2)
			b1.allowWindows()

			forAll := b1.bind(b1.window(ib.MWType1), 0, 8192, ib.AccessRemoteWrite)
			w1, w2 := b1.window(ib.MWType2), b1.window(ib.MWType2)
			k1 := b1.bind(w1, 0, 4096, ib.AccessRemoteWrite)
			b2.post(ib.SendWR{Op: ib.OpBindMW, Bind: b1.onto(w2, 4096, 4096, ib.AccessRemoteRead)})
			b2.ok()
			fill(a1.buf, 2)
			fill(a2.buf, 3)
			a1.post(a1.through(b1, ib.OpRDMAWrite, k1, 0, 4096))
			a1.ok()
			a2.post(a2.through(b1, ib.OpRDMAWrite, forAll, 4096, 4096))
			a2.ok()
			if !bytes.Equal(b1.buf[:4096], a1.buf[:4096]) || !bytes.Equal(b1.buf[4096:], a2.buf[4096:]) {
				t.Error("a WRITE has left other bytes")
			}
			clear(a2.buf)
			a2.post(a2.through(b1, ib.OpRDMARead, w2.RKey(), 4096, 4096))
			a2.ok()
			if !bytes.Equal(b1.buf[4096:], a2.buf[4096:]) {
				t.Error("a READ has brought other bytes")
			}
			a2.post(a2.through(b1, ib.OpRDMAWrite, k1, 0, 8)) // the other queue pair's key
			a2.status(ib.WCRemAccessErr)
			a1.post(a1.through(b1, ib.OpRDMARead, k1, 0, 8)) // a right that it has not
			a1.status(ib.WCRemAccessErr)
		})
	}
}

// The peer that invalidates a window itself can use it until then, and not
// afterwards.
func TestWindowInvalidatedByPeer(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			a, b := windowed(t, mode, 64<<10)
			w := b.window(ib.MWType2)
			fill(a.buf, 1)
			for round := range lastingOps(5, 150) {
				key := b.bind(w, 0, 64<<10, ib.AccessRemoteWrite)
				b.recv(ib.RecvWR{SGL: b.sge(0, 8)})
				n := 1 + round*9973%(64<<10)
				wrs := []ib.SendWR{a.through(b, ib.OpRDMAWrite, key, 0, n), {Op: ib.OpSendInv, InvalidateKey: key, Flags: ib.SendSignaled}}
				if _, err := a.qp.PostSend(wrs); err != nil {
					t.Fatal(err)
				}
				a.ok()
				if wc := b.ok(); wc.Flags&ib.WCWithInv == 0 || wc.InvalidatedKey != key {
					t.Fatalf("%+v", wc)
				}
				if k := firstDifference(a.buf[:n], b.buf[:n]); k >= 0 {
					t.Fatalf("round %d: byte %d is wrong", round, k)
				}
			}
			closeAll(t, b.mr)
			a.post(a.through(b, ib.OpRDMAWrite, w.RKey(), 0, 8))
			a.status(ib.WCRemAccessErr)
			b.mr = must[provider.MR](t)(b.pd.RegMR(b.buf, 0))
		})
	}
}

// Windows, regions, domains and queue pairs: which keeps which from being closed.
func TestWindowLives(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{MWs: 2}})
	a, b := connected(t, d, d, ib.RC, 4096, nil)
	b.allowWindows()
	w, w2 := b.window(ib.MWType2), b.window(ib.MWType1)
	_, err := b.pd.AllocMW(ib.MWType1)
	wantErrno(t, "one window more than there may be", err, syscall.ENOMEM)
	_, err = b.qp.BindMW(w, 0, 0, ib.MWBind{})
	wantErrno(t, "the verb for a window of type 2", err, syscall.EINVAL)
	if attr := d.Attr(); attr.MaxMW != 2 || attr.Caps&ib.CapMemWindow == 0 || attr.Caps&ib.CapMemWindowType2B == 0 {
		t.Errorf("%+v", attr)
	}
	b.bind(w2, 0, 100, ib.AccessRemoteRead)
	key := b.bind(w, 0, 100, ib.AccessRemoteRead)
	wantErrno(t, "Close of a region with windows", b.mr.Close(), syscall.EBUSY)
	a.post(a.through(b, ib.OpRDMARead, key, 0, 8)) // it works as before
	a.ok()
	wantErrno(t, "Close of a domain with windows", b.pd.Close(), syscall.EBUSY)
	closeAll(t, w2, w2)
	wantErrno(t, "Close of a region with a window", b.mr.Close(), syscall.EBUSY)
	// Without its queue pair the window is free: the number may be another's.
	closeAll(t, b.qp, b.mr)
	closeAll(t, w)
	if _, err := b.pd.AllocMW(3); err == nil {
		t.Error("a window of type 3")
	}
}

// A bind that is refused when it is posted leaves the window its key.
func TestBindNotPosted(t *testing.T) {
	a, b := windowed(t, linkLoop, 4096)
	w := b.window(ib.MWType1)
	key := b.bind(w, 0, 100, ib.AccessRemote)
	fresh := must[provider.QP](t)(b.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: b.cq, RecvCQ: b.cq, Cap: ib.QPCap{MaxSendWR: 1}}))
	defer closeAll(t, fresh)
	_, err := fresh.BindMW(w, 1, 0, b.onto(w, 0, 100, ib.AccessRemote))
	wantErrno(t, "BindMW in RESET", err, syscall.EINVAL)
	if w.RKey() != key {
		t.Errorf("the key is %#x, was %#x", w.RKey(), key)
	}
	a.post(a.through(b, ib.OpRDMAWrite, w.RKey(), 0, 100))
	a.ok()
}
