package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// MW is a memory window: a key that opens a part of a memory region to peers,
// with rights of its own, and can be made and taken away again much faster than a
// region is registered and closed. Different peers can so have different rights
// to different parts of one region. See ibv_alloc_mw(3).
//
// There are two types, and a bind is always a request in a send queue, executed
// in its turn, without a packet:
//
//   - A window of [MWType1] is bound by [QP.BindMW], which tells its new rkey at
//     once; bound again, the old key is useless, and bound to no bytes it is
//     free. It serves all queue pairs of its protection domain.
//   - A window of [MWType2] is bound by a request [OpBindMW], with an rkey whose
//     low 8 bits the program chooses ([IncRKey]). It must be free: new, or
//     invalidated by [OpLocalInv] or by the peer's [OpSendInv]. It serves the
//     queue pair that it was bound on alone.
//
// The region must grant [AccessMWBind], and [AccessLocalWrite] if peers are to
// write or do atomics; what it grants to peers itself does not matter. Window,
// region and queue pair are of the same protection domain. A bind that does not
// fit ends in [WCMWBindErr], and the queue pair with it.
//
// When the bind of another range, the invalidation or [MW.Close] is done, no
// access through the old key happens any more. A region to which windows are
// bound can neither be closed nor registered again.
type MW struct {
	p provider.MW
}

func (mw *MW) ok() bool { return mw != nil && mw.p != nil }

// AllocMW makes a memory window, which is free. See ibv_alloc_mw(3).
//
// Errors: EINVAL for another type than the two, or for a domain that is nil or
// closed; ENOMEM if the device has no more windows (MaxMW in [DeviceAttr]); ENODEV
// if the device is closed.
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

// RKey returns the window's key: for type 1 what [QP.BindMW] has returned last, for
// type 2 what it was bound with last.
func (mw *MW) RKey() uint32 { return mw.p.RKey() }

// IncRKey returns the rkey that follows another one: the next in its low 8 bits.
// See ibv_inc_rkey(3).
func IncRKey(rkey uint32) uint32 { return rkey&^0xff | uint32(uint8(rkey)+1) }

// Bind says how to bind the window to n bytes of a region from offset off on; for
// type 2 with the rkey that follows the last. It checks nothing, and does nothing
// before it is posted: in the Bind field of an [OpBindMW], or by [QP.BindMW].
func (mw *MW) Bind(mr *MR, off, n int, access Access) MWBind {
	return MWBind{MW: mw.RKey(), RKey: IncRKey(mw.RKey()), LKey: mr.LKey(), Addr: mr.Addr() + uint64(off),
		Length: uint64(n), Access: access}
}

// Close frees the window. When it has returned, no peer accesses memory through it
// any more, and the region is free of it. It is idempotent. See ibv_dealloc_mw(3).
//
// Errors: EINVAL for a nil window.
func (mw *MW) Close() error {
	if !mw.ok() {
		return invalid("dealloc_mw", "nil memory window")
	}
	return mw.p.Close()
}

// BindMW posts a bind of a type 1 window to the send queue and returns the rkey
// that the window has from then on; bind's own MW and RKey do not count. The
// request completes as [WCBindMW], with id, if flags has [SendSignaled]. Requests
// that are posted behind it, on this queue pair, find the window bound. A bind of
// length 0 frees the window. See ibv_bind_mw(3).
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
