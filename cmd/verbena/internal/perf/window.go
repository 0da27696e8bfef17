package perf

import (
	"errors"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// window is a memory window that the peer's requests go through. It is of type 1, which
// serves all queue pairs. It is bound before these are connected: on a queue pair of its
// own, which is connected to itself.
type window struct {
	cq *verbs.CQ
	qp *verbs.QP
	mw *verbs.MW
}

// open binds a window to all of a region.
func (w *window) open(dev *verbs.Device, pd *verbs.PD, mr *verbs.MR, access verbs.Access) (err error) {
	if w.cq, err = dev.CreateCQ(1, nil); err != nil {
		return err
	}
	w.qp, err = pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: w.cq, RecvCQ: w.cq, Cap: verbs.QPCap{MaxSendWR: 1}})
	if err != nil {
		return err
	}
	if err = w.qp.Connect(w.qp.Endpoint(), nil); err != nil {
		return err
	}
	if w.mw, err = pd.AllocMW(verbs.MWType1); err != nil {
		return err
	}
	if _, err := w.qp.BindMW(w.mw, 0, verbs.SendSignaled, w.mw.Bind(mr, 0, int(mr.Length()), access)); err != nil {
		return err
	}
	var wc [1]verbs.WC
	for start := time.Now(); time.Since(start) < stallLimit; runtime.Gosched() {
		n, err := w.cq.Poll(wc[:])
		if err != nil {
			return err
		}
		if n > 0 {
			return wc[0].Err()
		}
	}
	return errors.New("stalled: a memory window is not bound")
}

func (w *window) close() error {
	var errs []error
	if w.mw != nil {
		errs = append(errs, w.mw.Close())
	}
	if w.qp != nil {
		errs = append(errs, w.qp.Close())
	}
	if w.cq != nil {
		errs = append(errs, w.cq.Close())
	}
	return errors.Join(errs...)
}
