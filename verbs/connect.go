package verbs

// How a queue pair is connected, top-down:
//
//  1. Endpoint is what the peer must know.
//  2. Connect makes attributes of the peer's Endpoint and a ConnectConfig, and
//     takes the queue pair through the states.
//  3. ToInit, ToRTR and ToRTS are those steps. transitionMasks lists the attributes
//     that each needs, by type of queue pair.

// Endpoint is what a peer must know of a queue pair to connect to it, or for UD
// to send to it. It marshals to JSON.
type Endpoint struct {
	GID  GID    `json:"gid"`            // the address
	QPN  uint32 `json:"qpn"`            // the queue pair's number
	PSN  uint32 `json:"psn"`            // the first packet sequence number it sends
	QKey uint32 `json:"qkey,omitempty"` // UD: what requests to it must carry
}

// Endpoint returns what the peer must know of this queue pair. It is the same
// in all states: the PSN, and for UD the Q_Key, are random numbers chosen when
// the queue pair was made, and [QP.Connect] uses them. The GID is the device's
// first; a program that connects from another one (SGIDIndex in
// [ConnectConfig]) puts that into the Endpoint that it gives away.
func (qp *QP) Endpoint() Endpoint {
	ep := Endpoint{QPN: qp.p.Number(), PSN: qp.psn, QKey: qp.qkey}
	if gids := qp.dev.p.GIDs(); len(gids) > 0 {
		ep.GID = gids[0]
	}
	return ep
}

// ConnectConfig is how a queue pair is connected. A nil *ConnectConfig, and the
// zero value of each field, mean the default. A value of 0 itself, such as no
// retries, can be had with [QP.ToRTR] and [QP.ToRTS] instead of Connect.
type ConnectConfig struct {
	// MTU is the path MTU, which must be the same on both sides. Zero: the
	// port's active MTU; set it if the two ports' differ.
	MTU MTU

	// Access is what the peer may do to regions that allow it too. Zero: all
	// that the type can do: READ, WRITE, atomics and FLUSH for RC, WRITE for UC.
	// AccessLocalWrite alone grants nothing.
	Access Access

	// Timeout is how long to wait for an acknowledgement, 4.096 µs × 2^Timeout.
	// Zero: 16, 268 ms: with seven retries the peer's process may go without a
	// processor for two seconds. Lost packets are sent again much earlier.
	// This field and those up to MaxDestRDAtomic are for RC and XRC only.
	Timeout uint8
	// RetryCnt is how often to send again when no acknowledgement comes. Zero: 7.
	RetryCnt uint8
	// RNRRetry is how often to send again when the peer has no receive posted.
	// Zero: 7, for ever.
	RNRRetry uint8
	// MinRNRTimer is how long the peer is to wait before it sends again, when this
	// queue pair has no receive posted: a code of IBA table 45. Zero: 12, 0.64 ms.
	MinRNRTimer uint8
	// MaxRDAtomic is how many READs, atomics, ATOMIC_WRITEs and FLUSHes together may
	// be under way to the peer; not more than the peer's MaxDestRDAtomic. Zero: 16,
	// or the device's limit if that is lower.
	MaxRDAtomic uint8
	// MaxDestRDAtomic is how many such requests of the peer this queue pair serves
	// at a time. Zero: 16, or the device's limit if that is lower.
	MaxDestRDAtomic uint8

	SGIDIndex    int   // which of the device's GIDs to connect from
	TrafficClass uint8 // DSCP and ECN bits of the packets
	HopLimit     uint8 // Zero: 64
}

// The defaults of ConnectConfig.
const (
	defaultTimeout     = 16
	defaultRetryCnt    = 7
	defaultRNRRetry    = 7
	defaultMinRNRTimer = 12
	defaultRDAtomic    = 16
)

// connectPort is the port that Connect uses: the only one there is.
const connectPort = 1

// Connect takes a queue pair from RESET or INIT to RTS: connected to the remote
// queue pair, ready to send and to receive. The peer must do the same with this
// queue pair's [QP.Endpoint], before or after: requests to a peer that is not
// connected yet are repeated (RC) or lost (UC). A UD queue pair has no peer;
// remote is ignored.
//
// To have receives posted before the first message can come, go to INIT with
// [QP.ToInit] first, post them, then Connect.
//
// A nil cfg means defaults. If Connect fails, the queue pair may be in any
// state up to RTR: close it, or move it to RESET.
//
// Errors: those of [QP.Modify]. So EINVAL means that the queue pair is not in
// RESET or INIT, or that a value in remote or cfg is invalid, such as an unset GID.
func (qp *QP) Connect(remote Endpoint, cfg *ConnectConfig) error {
	if !qp.ok() {
		return invalid("modify_qp", "nil queue pair")
	}
	attr, err := qp.connectAttr(remote, cfg)
	if err != nil {
		return err
	}
	if err := qp.ToInit(attr); err != nil {
		return err
	}
	if err := qp.ToRTR(attr); err != nil {
		return err
	}
	return qp.ToRTS(attr)
}

// connectAttr returns the attributes of all three transitions; the masks choose
// from them.
func (qp *QP) connectAttr(remote Endpoint, cfg *ConnectConfig) (*QPAttr, error) {
	var c ConnectConfig
	if cfg != nil {
		c = *cfg
	}
	if c.MTU == 0 {
		port, err := qp.dev.p.Port(connectPort)
		if err != nil {
			return nil, err
		}
		c.MTU = port.ActiveMTU
	}
	if c.Access == 0 {
		c.Access = AccessRemote | AccessFlush
		if qp.p.Type() == UC {
			c.Access = AccessRemoteWrite
		}
	}
	dev := qp.dev.p.Attr()
	setDefault(&c.Timeout, defaultTimeout)
	setDefault(&c.RetryCnt, defaultRetryCnt)
	setDefault(&c.RNRRetry, defaultRNRRetry)
	setDefault(&c.MinRNRTimer, defaultMinRNRTimer)
	setDefault(&c.MaxRDAtomic, uint8(min(defaultRDAtomic, dev.MaxQPInitRDAtom)))
	setDefault(&c.MaxDestRDAtomic, uint8(min(defaultRDAtomic, dev.MaxQPRDAtom)))
	return &QPAttr{
		Access: c.Access,
		Port:   connectPort,
		QKey:   qp.qkey,
		AV: AHAttr{
			DGID:         remote.GID,
			SGIDIndex:    c.SGIDIndex,
			TrafficClass: c.TrafficClass,
			HopLimit:     c.HopLimit,
			PortNum:      connectPort,
		},
		PathMTU:         c.MTU,
		Timeout:         c.Timeout,
		RetryCnt:        c.RetryCnt,
		RNRRetry:        c.RNRRetry,
		RQPSN:           remote.PSN,
		MaxRDAtomic:     c.MaxRDAtomic,
		MinRNRTimer:     c.MinRNRTimer,
		SQPSN:           qp.psn,
		MaxDestRDAtomic: c.MaxDestRDAtomic,
		DestQPN:         remote.QPN,
	}, nil
}

func setDefault(field *uint8, v uint8) {
	if *field == 0 {
		*field = v
	}
}

// transitionMasks are the attributes that each step needs besides the state, by
// type: the tables of ibv_modify_qp(3).
var transitionMasks = map[QPState]map[QPType]QPAttrMask{
	QPInit: {
		RC: QPMaskPKeyIndex | QPMaskPort | QPMaskAccess,
		UC: QPMaskPKeyIndex | QPMaskPort | QPMaskAccess,
		UD: QPMaskPKeyIndex | QPMaskPort | QPMaskQKey,

		XRCSend: QPMaskPKeyIndex | QPMaskPort | QPMaskAccess,
		XRCRecv: QPMaskPKeyIndex | QPMaskPort | QPMaskAccess,
	},
	QPRTR: {
		RC: QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN | QPMaskMaxDestRDAtomic | QPMaskMinRNRTimer,
		UC: QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN,
		UD: 0,

		XRCSend: QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN,
		XRCRecv: QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN | QPMaskMaxDestRDAtomic | QPMaskMinRNRTimer,
	},
	QPRTS: {
		RC: QPMaskSQPSN | QPMaskTimeout | QPMaskRetryCnt | QPMaskRNRRetry | QPMaskMaxRDAtomic,
		UC: QPMaskSQPSN,
		UD: QPMaskSQPSN,

		XRCSend: QPMaskSQPSN | QPMaskTimeout | QPMaskRetryCnt | QPMaskRNRRetry | QPMaskMaxRDAtomic,
		XRCRecv: QPMaskSQPSN | QPMaskTimeout,
	},
}

// ToInit moves the queue pair from RESET or INIT to INIT: from now on receives
// can be posted. It uses only those fields of attr that the transition needs, and
// does not change attr:
//
//	RC, UC, XRC  PKeyIndex, Port, Access
//	UD           PKeyIndex, Port, QKey
//
// A Port of 0 means 1.
//
// Errors: those of [QP.Modify].
func (qp *QP) ToInit(attr *QPAttr) error { return qp.to(QPInit, attr) }

// ToRTR moves the queue pair from INIT to RTR, ready to receive: from now on it
// serves its peer. It uses only those fields of attr that the transition needs, and
// does not change attr:
//
//	RC, XRC_RECV  AV, PathMTU, DestQPN, RQPSN, MaxDestRDAtomic, MinRNRTimer
//	UC, XRC_SEND  AV, PathMTU, DestQPN, RQPSN
//	UD            nothing
//
// RQPSN is the SQPSN of the peer.
//
// Errors: those of [QP.Modify].
func (qp *QP) ToRTR(attr *QPAttr) error { return qp.to(QPRTR, attr) }

// ToRTS moves the queue pair from RTR to RTS, ready to send. It uses only those
// fields of attr that the transition needs, and does not change attr:
//
//	RC, XRC_SEND  SQPSN, Timeout, RetryCnt, RNRRetry, MaxRDAtomic
//	XRC_RECV      SQPSN, Timeout
//	UC, UD        SQPSN
//
// Errors: those of [QP.Modify].
func (qp *QP) ToRTS(attr *QPAttr) error { return qp.to(QPRTS, attr) }

func (qp *QP) to(state QPState, attr *QPAttr) error {
	if !qp.ok() {
		return invalid("modify_qp", "nil queue pair")
	}
	if attr == nil {
		return invalid("modify_qp", "nil QPAttr")
	}
	a := *attr
	a.State = state
	if state == QPInit && a.Port == 0 {
		a.Port = 1
	}
	return qp.p.Modify(&a, QPMaskState|transitionMasks[state][qp.p.Type()])
}
