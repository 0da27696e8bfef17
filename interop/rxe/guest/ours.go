package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// ours is our side, by package verbs.
type ours struct {
	dev    *verbs.Device
	pd     *verbs.PD
	qps    []ourQP
	ahs    []*verbs.AH
	opened []interface{ Close() error } // clear closes the last one first
}

type ourQP struct {
	qp   *verbs.QP
	sent *verbs.CQ
	rcvd *verbs.CQ
}

// openOurs opens a device on an address.
func openOurs(addr netip.Addr, cfg verbs.Config) (*ours, error) {
	cfg.Link = verbs.LinkUDP
	dev, err := verbs.Open(addr.String(), &cfg)
	if err != nil {
		return nil, err
	}
	o := &ours{dev: dev}
	if o.pd, err = dev.AllocPD(); err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return o, nil
}

func (o *ours) who() string    { return "we" }
func (o *ours) gid() verbs.GID { return o.dev.GIDs()[0] }

func (o *ours) keep(c interface{ Close() error }) { o.opened = append(o.opened, c) }

func (o *ours) alloc(size int, access verbs.Access) (*region, error) {
	buf := make([]byte, size)
	mr, err := o.pd.RegMR(buf, access)
	if err != nil {
		return nil, err
	}
	o.keep(mr)
	return &region{addr: mr.Addr(), size: size, lkey: mr.LKey(), rkey: mr.RKey(), buf: buf, mr: mr}, nil
}

func (o *ours) fill(r *region, off, n int, seed uint64) error {
	b := make([]byte, n)
	pattern(n, seed, func(i int, v byte) bool { b[i] = v; return true })
	return o.poke(r, off, b)
}

func (o *ours) check(r *region, off, n int, seed uint64) error {
	b, err := o.peek(r, off, n)
	if err != nil {
		return err
	}
	pattern(n, seed, func(i int, v byte) bool {
		if b[i] != v {
			err = fmt.Errorf("we: byte %d of %d is %#x, want %#x", i, n, b[i], v)
		}
		return err == nil
	})
	return err
}

func (o *ours) peek(r *region, off, n int) ([]byte, error) {
	b := make([]byte, n)
	if r.moves != nil {
		_, err := r.moves.ReadAt(b, int64(off))
		return b, err
	}
	copy(b, r.buf[off:][:n])
	return b, nil
}

func (o *ours) poke(r *region, off int, b []byte) error {
	if r.moves != nil {
		_, err := r.moves.WriteAt(b, int64(off))
		return err
	}
	copy(r.buf[off:], b)
	return nil
}

func (o *ours) newQP(typ verbs.QPType, c verbs.QPCap) (int, uint32, error) {
	sent, err := o.dev.CreateCQ(c.MaxSendWR+1, nil)
	if err != nil {
		return 0, 0, err
	}
	o.keep(sent)
	rcvd, err := o.dev.CreateCQ(c.MaxRecvWR+1, nil)
	if err != nil {
		return 0, 0, err
	}
	o.keep(rcvd)
	qp, err := o.pd.CreateQP(&verbs.QPConfig{Type: typ, SendCQ: sent, RecvCQ: rcvd, Cap: c})
	if err != nil {
		return 0, 0, err
	}
	o.keep(qp)
	o.qps = append(o.qps, ourQP{qp, sent, rcvd})
	return len(o.qps) - 1, qp.Number(), nil
}

func (o *ours) connect(qp int, _ verbs.QPType, a *verbs.QPAttr) error {
	q := o.qps[qp].qp
	return errors.Join(q.ToInit(a), q.ToRTR(a), q.ToRTS(a))
}

func (o *ours) reject(qp int) error {
	return o.qps[qp].qp.Modify(&verbs.QPAttr{State: verbs.QPErr}, verbs.QPMaskState)
}

func (o *ours) state(qp int) (verbs.QPState, error) {
	a, err := o.qps[qp].qp.Query()
	return a.State, err
}

func (o *ours) destroy(qp int) error { return o.qps[qp].qp.Close() }

func (o *ours) address(to verbs.GID) (int, error) {
	ah, err := o.pd.CreateAH(verbs.AHAttr{DGID: to})
	if err != nil {
		return 0, err
	}
	o.keep(ah)
	o.ahs = append(o.ahs, ah)
	return len(o.ahs) - 1, nil
}

func (o *ours) send(qp int, wr *verbs.SendWR, ah int) error {
	w := *wr
	w.Flags |= verbs.SendSignaled
	if o.qps[qp].qp.Type() == verbs.UD {
		w.AH = o.ahs[ah]
	}
	_, err := o.qps[qp].qp.PostSend([]verbs.SendWR{w})
	return err
}

func (o *ours) recv(qp int, wr *verbs.RecvWR) error {
	_, err := o.qps[qp].qp.PostRecv([]verbs.RecvWR{*wr})
	return err
}

func (o *ours) sent(qp int, d time.Duration) (verbs.WC, error) {
	return o.wait(o.qps[qp].sent, "send", d)
}

func (o *ours) received(qp int, d time.Duration) (verbs.WC, error) {
	return o.wait(o.qps[qp].rcvd, "receive", d)
}

// wait polls, and sleeps after some polls: the kernel's device needs the processor too.
func (o *ours) wait(cq *verbs.CQ, what string, d time.Duration) (verbs.WC, error) {
	var wc [1]verbs.WC
	deadline := time.Now().Add(d)
	for tries := 0; ; tries++ {
		if n, err := cq.Poll(wc[:]); n == 1 || err != nil {
			return wc[0], err
		}
		if time.Now().After(deadline) {
			return wc[0], errNone{"we", what, d}
		}
		if tries > 16 {
			time.Sleep(50 * time.Microsecond)
		}
	}
}

func (o *ours) killable(int) (uint32, error) {
	r, err := o.alloc(64, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteInvalidate)
	if err != nil {
		return 0, err
	}
	return r.rkey, nil
}

func (o *ours) newWindow(typ verbs.MWType) (*window, error) {
	mw, err := o.pd.AllocMW(typ)
	if err != nil {
		return nil, err
	}
	o.keep(mw)
	return &window{typ: typ, rkey: mw.RKey(), mw: mw}, nil
}

func (o *ours) bind(qp int, w *window, r *region, off, n int, access verbs.Access) (verbs.WC, error) {
	b := w.mw.Bind(r.mr, off, n, access)
	var err error
	if w.typ == verbs.MWType1 {
		w.rkey, err = o.qps[qp].qp.BindMW(w.mw, bindID, verbs.SendSignaled, b)
	} else {
		err = o.send(qp, &verbs.SendWR{ID: bindID, Op: verbs.OpBindMW, Bind: b}, 0)
		w.rkey = b.RKey
	}
	if err != nil {
		return verbs.WC{}, err
	}
	return o.sent(qp, patience)
}

func (o *ours) endWindow(w *window) error { return w.mw.Close() }

func (o *ours) clear() (err error) {
	for i := len(o.opened) - 1; i >= 0; i-- {
		err = errors.Join(err, o.opened[i].Close())
	}
	o.opened, o.qps, o.ahs = nil, nil, nil
	return errors.Join(err, o.pd.Close(), o.dev.Close())
}

// counters returns the device's counters that are not 0, for a failed case.
func (o *ours) counters() string {
	s := ""
	for _, c := range o.dev.Counters() {
		if c.Value != 0 {
			s += fmt.Sprintf(" %s=%d", c.Name, c.Value)
		}
	}
	return s
}
