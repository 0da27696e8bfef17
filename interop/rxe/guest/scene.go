package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// end is one end of a connection.
type end struct {
	party
	qp  int
	qpn uint32
	psn uint32
	ah  int // UD

	patience time.Duration // how long to wait for a completion
}

// patientTimeout is an acknowledgement timeout of half a second, as a code: one processor of the machine may stand still while
// the host is busy.
const patientTimeout = 17

// connection is how two ends are connected. A field that is zero gets the default that its
// comment names.
type connection struct {
	typ     verbs.QPType // RC
	mtu     verbs.MTU    // 1024
	psn     uint32       // of the initiator; the target's is 100 more. 0x123456
	depth   int          // of all queues: 16
	sges    int          // 4
	timeout uint8        // patientTimeout
	retry   uint8        // 7
	rnr     uint8        // RNR retries: 7, for ever
	timer   uint8        // the RNR timer: 12, 0.64 ms
	access  verbs.Access // what the peer may do: all
}

// patience is how long cases wait for something that must come; those with very
// long messages wait longer.
const (
	patience     = 2 * time.Minute
	longPatience = 20 * time.Minute
)

// qkey is the Q_Key of all UD queue pairs.
const qkey = 0x11111111

func (c *connection) defaults() {
	set := func(v *uint8, d uint8) {
		if *v == 0 {
			*v = d
		}
	}
	if c.typ == 0 {
		c.typ = verbs.RC
	}
	if c.mtu == 0 {
		c.mtu = verbs.MTU1024
	}
	if c.psn == 0 {
		c.psn = 0x123456
	}
	if c.depth == 0 {
		c.depth = 16
	}
	if c.sges == 0 {
		c.sges = 4
	}
	set(&c.timeout, patientTimeout)
	set(&c.retry, 7)
	set(&c.rnr, 7)
	set(&c.timer, 12)
	if c.access == 0 {
		c.access = verbs.AccessRemote
		if c.typ == verbs.UC {
			c.access = verbs.AccessRemoteWrite
		}
	}
}

// sides returns the initiator and the target of the case.
func (s *scene) sides() (initiator, target party) {
	if s.weInit {
		return s.ours, s.kernel
	}
	return s.kernel, s.ours
}

// connect makes two queue pairs, the initiator's and the target's, and connects
// them.
func (s *scene) connect(c connection) (i, t *end, err error) {
	c.defaults()
	a, b := s.sides()
	i, t = &end{party: a, psn: c.psn & 0xffffff}, &end{party: b, psn: (c.psn + 100) & 0xffffff}
	caps := verbs.QPCap{MaxSendWR: c.depth, MaxRecvWR: c.depth, MaxSendSGE: c.sges, MaxRecvSGE: c.sges}
	for _, e := range []*end{i, t} {
		e.patience = patience
		if s.soak {
			e.patience = longPatience
		}
		if e.qp, e.qpn, err = e.newQP(c.typ, caps); err != nil {
			return nil, nil, err
		}
	}
	for _, x := range []struct{ e, peer *end }{{t, i}, {i, t}} {
		attr := &verbs.QPAttr{
			Access: c.access, Port: 1, QKey: qkey,
			AV:      verbs.AHAttr{DGID: x.peer.gid(), PortNum: 1, HopLimit: 64},
			PathMTU: c.mtu, Timeout: c.timeout, RetryCnt: c.retry, RNRRetry: c.rnr, MinRNRTimer: c.timer,
			RQPSN: x.peer.psn, SQPSN: x.e.psn, DestQPN: x.peer.qpn, MaxRDAtomic: 16, MaxDestRDAtomic: 16,
		}
		if err := x.e.connect(x.e.qp, c.typ, attr); err != nil {
			return nil, nil, fmt.Errorf("connecting %s: %w", x.e.who(), err)
		}
		if c.typ == verbs.UD {
			if x.e.ah, err = x.e.address(x.peer.gid()); err != nil {
				return nil, nil, err
			}
		}
	}
	return i, t, nil
}

func (e *end) post(wr verbs.SendWR) error { return e.send(e.qp, &wr, e.ah) }

func (e *end) receive(id uint64, sgl ...verbs.SGE) error {
	return e.recv(e.qp, &verbs.RecvWR{ID: id, SGL: sgl})
}

// do posts a request and waits for its completion, which must be a success.
func (e *end) do(wr verbs.SendWR) (verbs.WC, error) {
	wc, err := e.try(wr)
	if err == nil {
		err = wc.Err()
	}
	if err != nil {
		return wc, fmt.Errorf("%s: %v: %w", e.who(), wr.Op, err)
	}
	if want := completedAs[wr.Op]; wc.Op != want || wc.QPN != e.qpn {
		return wc, fmt.Errorf("%s: %v completed as %+v", e.who(), wr.Op, wc)
	}
	return wc, nil
}

// try posts a request and waits for its completion, of whatever status.
func (e *end) try(wr verbs.SendWR) (verbs.WC, error) {
	if err := e.post(wr); err != nil {
		return verbs.WC{}, err
	}
	wc, err := e.sent(e.qp, e.patience)
	if err == nil && wc.ID != wr.ID {
		err = fmt.Errorf("%s: request %d completed, not %d", e.who(), wc.ID, wr.ID)
	}
	return wc, err
}

var completedAs = map[verbs.Opcode]verbs.WCOpcode{
	verbs.OpSend: verbs.WCSend, verbs.OpSendImm: verbs.WCSend, verbs.OpSendInv: verbs.WCSend,
	verbs.OpRDMAWrite: verbs.WCRDMAWrite, verbs.OpRDMAWriteImm: verbs.WCRDMAWrite, verbs.OpRDMARead: verbs.WCRDMARead,
	verbs.OpAtomicCmpSwap: verbs.WCCompSwap, verbs.OpAtomicFetchAdd: verbs.WCFetchAdd,
	verbs.OpAtomicWrite: verbs.WCAtomicWrite, verbs.OpFlush: verbs.WCFlush,
	verbs.OpLocalInv: verbs.WCLocalInv,
}

// wantReceived waits for the completion of a receive and compares it.
func (e *end) wantReceived(want verbs.WC) error {
	wc, err := e.received(e.qp, e.patience)
	if err != nil {
		return err
	}
	want.QPN = e.qpn
	if want.SrcQP == 0 { // not a datagram
		wc.SrcQP = 0
		wc.Flags &^= verbs.WCGRH // the kernel always sets it; docs/interop.md
	}
	if wc != want {
		return fmt.Errorf("%s: received %+v, want %+v", e.who(), wc, want)
	}
	return nil
}

// wantStatus checks the status of a completion.
func wantStatus(who string, wc verbs.WC, err error, want verbs.WCStatus) error {
	if err != nil {
		return err
	}
	if wc.Status != want {
		return fmt.Errorf("%s: completed with %q (vendor error %#x), want %q", who, wc.Status, wc.VendorErr, want)
	}
	return nil
}

const (
	allRights = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead | verbs.AccessRemoteAtomic
	guard     = 64 // bytes behind the data, which must not change

	// maxRegion is the largest region of rxe in Linux 7: it keeps 16 bytes for each page, in
	// one allocation, which can have 4 MiB at most.
	maxRegion = 1 << 30
)

// buffers allocates a region on both sides.
func buffers(i, t party, size int) (at, to *region, err error) {
	at, err1 := i.alloc(size, allRights)
	to, err2 := t.alloc(size, allRights)
	return at, to, errors.Join(err1, err2)
}
