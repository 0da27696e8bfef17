package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// MW is a memory window: a key that gives peers access to a part of a memory region,
// with rights of its own. Binding a window and taking it away again is much faster
// than registering and closing a region. With windows, different peers can have
// different rights to different parts of one region. See ibv_alloc_mw(3).
//
// A window is bound by a request in a send queue, which is executed in order and
// sends no packet. There are two types:
//
//   - A window of [MWType1] is bound by [QP.BindMW], which returns its new rkey at
//     once. Binding it again makes the old rkey useless; binding it to no bytes makes
//     it free. It serves all queue pairs of its protection domain.
//   - A window of [MWType2] is bound by a request [OpBindMW], with an rkey whose
//     low 8 bits the program chooses ([IncRKey]). It must be free: new, or
//     invalidated by [OpLocalInv] or by the peer's [OpSendInv]. It serves only the
//     queue pair that it was bound on.
//
// The region must grant [AccessMWBind], and [AccessLocalWrite] if peers are to
// write or do atomics; its own remote rights do not matter. Window, region and queue
// pair are of the same protection domain. A bind that is refused ends in
// [WCMWBindErr], and moves the queue pair to the error state.
//
// When the bind to another range, the invalidation or [MW.Close] is done, no access
// goes through the old key any more. A region to which windows are bound can be
// neither closed nor registered again.
type MW struct {
	p provider.MW
}

func (mw *MW) ok() bool { return mw != nil && mw.p != nil }

// AllocMW makes a memory window, which is free. See ibv_alloc_mw(3).
//
// Errors: EINVAL for an unknown type, or for a domain that is nil or closed; ENOMEM
// if the device has no more windows (MaxMW in [DeviceAttr]); ENODEV if the device is
// closed.
func (pd *PD) AllocMW(typ MWType) (*MW, error) {
	if !pd.ok() {
		return nil, invalid("alloc_mw", "nil protection domain")
	}
	p, err := pd.p.AllocMW(typ)
	if err != nil {
		return nil, err
	}
	return &MW{p}, nil
}

// Type returns the window's type.
func (mw *MW) Type() MWType { return mw.p.Type() }

// RKey returns the window's key: for type 1 the one that [QP.BindMW] returned last,
// for type 2 the one that the window was last bound with.
func (mw *MW) RKey() uint32 { return mw.p.RKey() }

// IncRKey returns the rkey that follows another one: the next in its low 8 bits.
// See ibv_inc_rkey(3).
func IncRKey(rkey uint32) uint32 { return rkey&^0xff | uint32(uint8(rkey)+1) }

// Bind returns the description of a bind of the window to n bytes of a region from
// offset off on, for the Bind field of an [OpBindMW] or for [QP.BindMW]. For type 2,
// the rkey is the one that follows the window's last. Bind checks nothing and changes
// nothing.
func (mw *MW) Bind(mr *MR, off, n int, access Access) MWBind {
	return MWBind{MW: mw.RKey(), RKey: IncRKey(mw.RKey()), LKey: mr.LKey(), Addr: mr.Addr() + uint64(off),
		Length: uint64(n), Access: access}
}

// Close destroys the window. When it has returned, no peer accesses memory through
// the window any more, and it keeps no region from being closed. It is idempotent. See
// ibv_dealloc_mw(3).
//
// Errors: EINVAL for a nil window.
func (mw *MW) Close() error {
	if !mw.ok() {
		return invalid("dealloc_mw", "nil memory window")
	}
	return mw.p.Close()
}

// BindMW posts a bind of a type 1 window to the send queue and returns the rkey
// that the window has from then on; the fields MW and RKey of bind are ignored. The
// request completes as [WCBindMW], with id, if flags has [SendSignaled]. Requests
// posted after it on this queue pair find the window bound. A bind of length 0 makes
// the window free. See ibv_bind_mw(3).
//
// Errors: those of [QP.PostSend]; EINVAL if the window is nil, of type 2, or of
// another device. Everything else shows in the completion.
func (qp *QP) BindMW(mw *MW, id uint64, flags SendFlags, bind MWBind) (rkey uint32, err error) {
	if !qp.ok() {
		return 0, invalid("bind_mw", "nil queue pair")
	}
	if !mw.ok() {
		return 0, invalid("bind_mw", "nil memory window")
	}
	return qp.p.BindMW(mw.p, id, flags, bind)
}
