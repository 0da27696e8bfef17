package cma

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
)

// QPAttr returns what the queue pair is to be modified with for a state: Init, RTR or RTS.
func (id *ID) QPAttr(state ib.QPState) (a ib.QPAttr, mask ib.QPAttrMask, err error) {
	const op = "init_qp_attr"
	err = id.look(op, func() error {
		if id.port == nil {
			return ib.Errorf(op, syscall.EINVAL, "the id has no device yet")
		}
		a.State, mask = state, ib.QPMaskState
		switch {
		case state == ib.QPInit:
			id.initAttrLocked(&a, &mask)
			return nil
		case id.isUD() || id.conn == nil:
			return ib.Errorf(op, syscall.EINVAL, "the id has no connection")
		case state == ib.QPRTR:
			return id.rtrAttrLocked(op, &a, &mask)
		case state == ib.QPRTS:
			return id.rtsAttrLocked(op, &a, &mask)
		}
		return ib.Errorf(op, syscall.EINVAL, "state %v", state)
	})
	return a, mask, err
}

func (id *ID) initAttrLocked(a *ib.QPAttr, mask *ib.QPAttrMask) {
	a.Port = 1
	*mask |= ib.QPMaskPKeyIndex | ib.QPMaskPort
	if id.isUD() {
		a.QKey = udpQKey
		*mask |= ib.QPMaskQKey
		return
	}
	*mask |= ib.QPMaskAccess
	if id.conn != nil {
		a.Access = ib.AccessRemoteWrite
		if r, _ := id.resourcesLocked(); r > 0 {
			a.Access |= ib.AccessRemoteRead | ib.AccessRemoteAtomic
		}
	}
}

// resourcesLocked returns how many READs and atomics this side serves, and how many it issues: no more
// than the device can. A peer may offer more than it was asked for: perftest's server on rxe does.
func (id *ID) resourcesLocked() (responder, initiator uint8) {
	responder, initiator = id.agreedLocked()
	most := id.port.mgmt.MaxRDAtomic()
	return min(responder, most), min(initiator, most)
}

func (id *ID) agreedLocked() (responder, initiator uint8) {
	switch {
	case id.agreed:
		return id.own.ResponderResources, id.own.InitiatorDepth
	case id.passive || id.peer.QPN != 0:
		return id.peer.InitiatorDepth, id.peer.ResponderResources
	}
	return id.own.ResponderResources, id.own.InitiatorDepth
}

// connectedLocked reports whether the peer's queue pair is known.
func (id *ID) connectedLocked() bool {
	switch id.conn.State() {
	case cm.RepRcvd, cm.MRARepSent, cm.ReqRcvd, cm.MRAReqSent, cm.RepSent, cm.MRARepRcvd, cm.Established:
		return true
	}
	return false
}

func (id *ID) rtrAttrLocked(op string, a *ib.QPAttr, mask *ib.QPAttrMask) error {
	if !id.connectedLocked() {
		return ib.Errorf(op, syscall.EINVAL, "the peer's queue pair is not known: %v", id.conn.State())
	}
	a.AV, a.PathMTU, a.DestQPN, a.RQPSN = id.ahLocked(), id.path.MTU, id.peer.QPN, id.psn
	*mask |= ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN
	if id.t == ib.RC || id.t == ib.XRCRecv {
		a.MaxDestRDAtomic, _ = id.resourcesLocked()
		*mask |= ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer
	}
	return nil
}

func (id *ID) rtsAttrLocked(op string, a *ib.QPAttr, mask *ib.QPAttrMask) error {
	if !id.connectedLocked() {
		return ib.Errorf(op, syscall.EINVAL, "the peer's queue pair is not known: %v", id.conn.State())
	}
	a.SQPSN = id.peer.PSN
	*mask |= ib.QPMaskSQPSN
	if id.t == ib.UC {
		return nil
	}
	a.Timeout = id.conn.AckTimeout()
	if id.ackTimeout > 0 {
		a.Timeout = id.ackTimeout
	}
	*mask |= ib.QPMaskTimeout
	if id.t == ib.XRCRecv { // a target issues nothing
		return nil
	}
	a.RetryCnt, a.RNRRetry = min(id.own.RetryCount, 7), id.peer.RNRRetry
	if id.passive {
		a.RetryCnt = id.peer.RetryCount
	}
	_, a.MaxRDAtomic = id.resourcesLocked()
	*mask |= ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic
	return nil
}
