package perf

import (
	"errors"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// What peers may do to the two buffers.
const (
	txRights = verbs.AccessRemoteRead
	rxRights = verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic
)

// makeMemory makes the two buffers, of at least n bytes, and registers them. They
// start on a cache line, and end on one.
func (r *rig) makeMemory(dev *verbs.Device, n int) (err error) {
	n = (n + 4095) &^ 4095 // Go aligns an allocation of whole pages to at least that
	register := func(access verbs.Access) (*verbs.MR, []byte, error) {
		if r.p.Mem == MemShared {
			mr, err := r.pd.AllocMR(n, access)
			if err != nil {
				return nil, nil, err
			}
			return mr, mr.Bytes(), nil
		}
		buf := make([]byte, n)
		mr, err := r.pd.RegMR(buf, access)
		return mr, buf, err
	}
	tx, rx := txRights, verbs.AccessLocalWrite|rxRights
	if r.p.Mem == MemWindow { // then only the windows let peers in
		tx, rx = verbs.AccessMWBind, verbs.AccessMWBind|verbs.AccessLocalWrite
	}
	if r.txMR, r.tx, err = register(tx); err != nil {
		return err
	}
	if r.rxMR, r.rx, err = register(rx); err != nil {
		return err
	}
	if r.p.Mem == MemWindow {
		return r.windows.open(dev, r.pd, r.txMR, r.rxMR)
	}
	return nil
}

// windows are what the peer's requests go through, if anything: windows of type 1,
// which serve all queue pairs. They are bound before those are connected, so on one
// that is connected to itself and has nothing else to do.
type windows struct {
	cq     *verbs.CQ
	qp     *verbs.QP
	tx, rx *verbs.MW
}

func (w *windows) open(dev *verbs.Device, pd *verbs.PD, tx, rx *verbs.MR) (err error) {
	if w.cq, err = dev.CreateCQ(2, nil); err != nil {
		return err
	}
	w.qp, err = pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: w.cq, RecvCQ: w.cq, Cap: verbs.QPCap{MaxSendWR: 2}})
	if err != nil {
		return err
	}
	if err = w.qp.Connect(w.qp.Endpoint(), nil); err != nil {
		return err
	}
	if w.tx, err = pd.AllocMW(verbs.MWType1); err != nil {
		return err
	}
	if w.rx, err = pd.AllocMW(verbs.MWType1); err != nil {
		return err
	}
	return errors.Join(w.bind(w.tx, tx, txRights), w.bind(w.rx, rx, rxRights))
}

// bind binds a window to all of a region.
func (w *windows) bind(mw *verbs.MW, mr *verbs.MR, access verbs.Access) error {
	if _, err := w.qp.BindMW(mw, 0, verbs.SendSignaled, mw.Bind(mr, 0, int(mr.Length()), access)); err != nil {
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

// txKey and rxKey are the keys that the peer gets: the windows', or the regions'
// own.
func (w *windows) txKey(mr *verbs.MR) uint32 { return keyOf(w.tx, mr) }
func (w *windows) rxKey(mr *verbs.MR) uint32 { return keyOf(w.rx, mr) }

func keyOf(mw *verbs.MW, mr *verbs.MR) uint32 {
	if mw != nil {
		return mw.RKey()
	}
	return mr.RKey()
}

func (w *windows) close() error {
	var errs []error
	for _, mw := range []*verbs.MW{w.tx, w.rx} {
		if mw != nil {
			errs = append(errs, mw.Close())
		}
	}
	if w.qp != nil {
		errs = append(errs, w.qp.Close())
	}
	if w.cq != nil {
		errs = append(errs, w.cq.Close())
	}
	return errors.Join(errs...)
}
