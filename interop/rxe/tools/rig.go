package tools

// rig has the objects that both kinds of programs need: a protection domain, one
// completion queue, buffers and queue pairs. close closes them in the reverse of the
// order in which they were made.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

type rig struct {
	dev    *verbs.Device
	pd     *verbs.PD
	cq     *verbs.CQ
	gid    verbs.GID // this side's address
	result *Result

	wcs     []verbs.WC
	idle    int // polls in a row that found nothing
	closers []func() error
}

// The numbers that both kinds of programs use.
const (
	udQKey      = 0x11111111
	ackTimeout  = 14
	retryCount  = 7
	rnrRetry    = 7
	minRNRTimer = 12
	hopLimit    = 64
)

// newRig makes a domain and a completion queue. gidIndex chooses the address.
func newRig(dev *verbs.Device, gidIndex, cqe int, result *Result) (*rig, error) {
	if dev == nil {
		return nil, errors.New("no device")
	}
	gids := dev.GIDs()
	if gidIndex < 0 || gidIndex >= len(gids) {
		return nil, fmt.Errorf("GID index %d: the device has %d GIDs", gidIndex, len(gids))
	}
	r := &rig{dev: dev, gid: gids[gidIndex], result: result, wcs: make([]verbs.WC, 32)}
	var err error
	if r.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	r.onClose(r.pd.Close)
	if r.cq, err = dev.CreateCQ(cqe, nil); err != nil {
		return nil, errors.Join(err, r.close())
	}
	r.onClose(r.cq.Close)
	return r, nil
}

func (r *rig) onClose(fn func() error) { r.closers = append(r.closers, fn) }

// close closes everything. It may be called again.
func (r *rig) close() error {
	var errs []error
	for len(r.closers) > 0 {
		last := len(r.closers) - 1
		errs = append(errs, r.closers[last]())
		r.closers = r.closers[:last]
	}
	return errors.Join(errs...)
}

// buffer allocates and registers at least n bytes. Their start and length are multiples of 8,
// so that the word around each byte lies inside: for atomics and loadByte.
func (r *rig) buffer(n int, access verbs.Access) ([]byte, *verbs.MR, error) {
	const page = 4096
	buf := make([]byte, (max(n, 1)+page-1)&^(page-1))
	mr, err := r.pd.RegMR(buf, access)
	if err != nil {
		return nil, nil, err
	}
	r.onClose(mr.Close)
	return buf, mr, nil
}

// queuePair makes a queue pair and takes it to INIT.
func (r *rig) queuePair(typ verbs.QPType, depth verbs.QPCap, srq *verbs.SRQ, access verbs.Access) (*verbs.QP, error) {
	qp, err := r.pd.CreateQP(&verbs.QPConfig{Type: typ, SendCQ: r.cq, RecvCQ: r.cq, SRQ: srq, Cap: depth})
	if err != nil {
		return nil, err
	}
	r.onClose(qp.Close)
	return qp, qp.ToInit(&verbs.QPAttr{Port: 1, Access: access, QKey: udQKey})
}

// link is how a queue pair reaches its peer.
type link struct {
	mtu           verbs.MTU
	gidIndex      int
	localPSN      uint32
	peer          Address
	timeout       uint8
	reads, serves uint8 // READs and atomics: as initiator, as responder
}

// connect takes a queue pair from INIT to RTS. For UD it returns the address
// handle of the peer, for the others nil.
func (r *rig) connect(qp *verbs.QP, l *link) (*verbs.AH, error) {
	if l.timeout == 0 {
		l.timeout = ackTimeout
	}
	attr := &verbs.QPAttr{
		AV:      verbs.AHAttr{DGID: l.peer.GID, SGIDIndex: l.gidIndex, HopLimit: hopLimit, PortNum: 1},
		PathMTU: l.mtu, DestQPN: l.peer.QPN, RQPSN: l.peer.PSN, SQPSN: l.localPSN,
		Timeout: l.timeout, RetryCnt: retryCount, RNRRetry: rnrRetry, MinRNRTimer: minRNRTimer,
		MaxRDAtomic: l.reads, MaxDestRDAtomic: l.serves,
	}
	if err := qp.ToRTR(attr); err != nil {
		return nil, err
	}
	if err := qp.ToRTS(attr); err != nil {
		return nil, err
	}
	if qp.Type() != verbs.UD {
		return nil, nil
	}
	ah, err := r.pd.CreateAH(attr.AV)
	if err != nil {
		return nil, err
	}
	r.onClose(ah.Close)
	return ah, nil
}

// poll returns completions, none if there are none, and counts them.
func (r *rig) poll() ([]verbs.WC, error) {
	n, err := r.cq.Poll(r.wcs)
	for i := range r.wcs[:n] {
		r.result.complete(&r.wcs[i])
	}
	if n > 0 {
		r.idle = 0
	}
	return r.wcs[:n], err
}

// After spins polls in vain the loops sleep between polls: the program at the other side
// spins, and there may be fewer processors than programs.
const (
	spins    = 200
	nap      = 50 * time.Microsecond
	ctxEvery = 64
)

// rest yields or sleeps after a poll in vain. It returns the context's error.
func (r *rig) rest(ctx context.Context) error {
	r.idle++
	if r.idle%ctxEvery == 0 && ctx.Err() != nil {
		return ctx.Err()
	}
	if r.idle < spins {
		runtime.Gosched()
	} else {
		time.Sleep(nap)
	}
	return nil
}

// wait polls until something has completed.
func (r *rig) wait(ctx context.Context) ([]verbs.WC, error) {
	for {
		wcs, err := r.poll()
		if err != nil || len(wcs) > 0 {
			return wcs, err
		}
		if err := r.rest(ctx); err != nil {
			return nil, err
		}
	}
}

// linger waits, while the device acknowledges again what the peer may send again.
func (r *rig) linger(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Work request identifiers: whether it is a receive, the queue pair, and a
// number that the caller chooses.
const (
	recvID  = 1 << 63
	qpShift = 40
)

func makeID(qp int, n uint64) uint64 { return uint64(qp)<<qpShift | n }

func splitID(id uint64) (recv bool, qp int, n uint64) {
	recv = id&recvID != 0
	id &^= recvID
	return recv, int(id >> qpShift), id & (1<<qpShift - 1)
}
