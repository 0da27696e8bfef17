package device

import (
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

const (
	maxSGE    = train.MaxSGE
	maxInline = train.MaxInline
)

// PD is a protection domain.
type PD struct {
	dev    *Device
	id     uint32
	refs   int  // guarded by dev.mu: objects in the domain
	closed bool // guarded by dev.mu
}

// AllocPD makes a protection domain.
func (d *Device) AllocPD() (provider.PD, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.countLocked("alloc_pd", &d.counts.pds, d.limits.PDs); err != nil {
		return nil, err
	}
	d.nextPD++
	return &PD{dev: d, id: d.nextPD}, nil
}

// use adds an object to the domain, of which the device counts n.
func (p *PD) use(op string, n *int, limit int) error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if p.closed {
		return ib.Errorf(op, syscall.EINVAL, "the protection domain is closed")
	}
	if err := p.dev.countLocked(op, n, limit); err != nil {
		return err
	}
	p.refs++
	return nil
}

func (p *PD) unuse(n *int) {
	p.dev.mu.Lock()
	p.refs--
	*n--
	p.dev.publishLocked()
	p.dev.mu.Unlock()
}

// Close frees the domain, unless something is left in it.
func (p *PD) Close() error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if p.closed {
		return nil
	}
	if err := p.idleLocked(); err != nil {
		return err
	}
	p.closed = true
	p.dev.counts.pds--
	p.dev.publishLocked()
	return nil
}

// Idle returns nil if the domain could be closed, and otherwise the error of Close.
func (p *PD) Idle() error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	return p.idleLocked()
}

func (p *PD) idleLocked() error {
	if p.refs > 0 {
		return ib.Errorf("dealloc_pd", syscall.EBUSY, "%d objects are left in the domain", p.refs)
	}
	return nil
}

// CreateAH makes an address handle.
func (p *PD) CreateAH(a ib.AHAttr) (*ib.AH, error) {
	if err := p.use("create_ah", &p.dev.counts.ahs, p.dev.limits.AHs); err != nil {
		return nil, err
	}
	flow, err := p.dev.makeFlow("create_ah", &a, 0)
	if err != nil {
		p.unuse(&p.dev.counts.ahs)
		return nil, err
	}
	addr := &qp.Address{PD: p.id, Flow: flow}
	return ib.NewAH(a, addr, func() error {
		if addr.Closed.CompareAndSwap(false, true) {
			p.unuse(&p.dev.counts.ahs)
		}
		return nil
	}), nil
}

// SRQ is a shared receive queue.
type SRQ struct {
	*recvQueue
	pd     *PD
	number uint32
	refs   int         // guarded by dev.mu: queue pairs on it
	closed atomic.Bool // changed under dev.mu

	xrcd *XRCD // nil: not for XRC
	cq   *CQ   // XRC: where receives complete
	core qp.SharedQueue
}

// CreateSRQ makes a shared receive queue.
func (p *PD) CreateSRQ(cfg provider.SRQConfig) (provider.SRQ, error) {
	d := p.dev
	if cfg.MaxWR < 1 || cfg.MaxWR > d.limits.SRQWR || cfg.MaxSGE < 0 || cfg.MaxSGE > maxSGE || cfg.Limit < 0 || cfg.Limit > cfg.MaxWR {
		return nil, ib.Errorf("create_srq", syscall.EINVAL, "max_wr %d (1 to %d), max_sge %d (to %d), limit %d (to max_wr)",
			cfg.MaxWR, d.limits.SRQWR, cfg.MaxSGE, maxSGE, cfg.Limit)
	}
	s := &SRQ{pd: p, recvQueue: newRecvQueue("post_srq_recv", cfg.MaxWR, cfg.MaxSGE)}
	if err := s.join(&cfg); err != nil {
		return nil, err
	}
	if err := p.use("create_srq", &d.counts.srqs, d.limits.SRQs); err != nil {
		s.leave()
		return nil, err
	}
	if s.xrcd != nil && s.xrcd.domain.file != nil {
		d.meet(s.xrcd.domain.name.Words())
	}
	var lease func() (uint32, error)
	if d.member != nil {
		lease = d.member.Places().Lease
	}
	err := addNumbered(d, "create_srq", d.srqs, lease, func(n uint32) *SRQ {
		s.number, s.core.Number = n, n
		return s
	})
	if err != nil {
		s.leave()
		p.unuse(&d.counts.srqs)
		return nil, err
	}
	s.Recv.OnLimit = func() { d.events.push(ib.AsyncEvent{Type: ib.EventSRQLimitReached, SRQ: s.number}) }
	s.Recv.SetLimit(cfg.Limit)
	return s, nil
}

func (s *SRQ) Number() uint32 { return s.number }

func (s *SRQ) use(op string) error {
	if s.closed.Load() {
		return ib.Errorf(op, syscall.EINVAL, "the shared receive queue is closed")
	}
	return nil
}

// PostRecv appends receives.
func (s *SRQ) PostRecv(wrs []ib.RecvWR) (int, error) {
	if err := s.use(s.op); err != nil {
		return 0, err
	}
	return s.recvQueue.PostRecv(wrs)
}

// Modify changes the size and the limit; negative values keep them.
func (s *SRQ) Modify(maxWR, limit int) error {
	if err := s.use("modify_srq"); err != nil {
		return err
	}
	size := s.Recv.Size()
	if maxWR >= 0 {
		size = maxWR
	}
	if maxWR == 0 || size > s.pd.dev.limits.SRQWR || limit > size {
		return ib.Errorf("modify_srq", syscall.EINVAL, "max_wr %d (1 to %d), limit %d (to max_wr)", maxWR, s.pd.dev.limits.SRQWR, limit)
	}
	if maxWR > 0 && !s.Recv.Resize(maxWR) {
		return ib.Errorf("modify_srq", syscall.EINVAL, "max_wr %d: more receives are posted, or the limit is higher", maxWR)
	}
	if limit >= 0 {
		s.Recv.SetLimit(limit)
	}
	return nil
}

// Query returns the size, the longest list and the armed limit.
func (s *SRQ) Query() (maxWR, maxSGE, limit int, err error) {
	return s.Recv.Size(), s.Recv.MaxSGE(), s.Recv.Limit(), s.use("query_srq")
}

// Close destroys the queue, unless queue pairs use it.
func (s *SRQ) Close() error {
	d := s.pd.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.closed.Load() {
		return nil
	}
	if s.refs > 0 {
		return ib.Errorf("destroy_srq", syscall.EBUSY, "%d queue pairs use it", s.refs)
	}
	s.closed.Store(true)
	d.srqs.Remove(s.number)
	s.leaveLocked()
	s.pd.refs--
	d.counts.srqs--
	d.publishLocked()
	return nil
}
