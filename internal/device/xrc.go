package device

// XRC domains, and the shared receive queues and targets in them.

import (
	"io"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// xrcDomains are the XRC domains of a device; guarded by its mu.
type xrcDomains struct {
	byFile map[sys.FileID]*xrcDomain
	open   map[*xrcDomain]struct{}
	last   uint32
}

// xrcDomain is an XRC domain, however often it is open here.
type xrcDomain struct {
	id    uint32
	name  sys.FileID
	file  io.Closer // keeps the identity of the file that names it in use; nil: it has no name
	opens int
}

// XRCD is an open XRC domain.
type XRCD struct {
	dev    *Device
	domain *xrcDomain
	refs   int  // guarded by dev.mu: queue pairs and shared receive queues made with it
	closed bool // guarded by dev.mu
}

// OpenXRCD opens a domain: the one that a file names, or a new one without a
// name.
func (d *Device) OpenXRCD(cfg provider.XRCDConfig) (provider.XRCD, error) {
	const op = "open_xrcd"
	bad := func(errno syscall.Errno, why string) (provider.XRCD, error) {
		return nil, ib.Errorf(op, errno, "%s", why)
	}
	if cfg.Exclusive && !cfg.Create {
		return bad(syscall.EINVAL, "what is not created cannot be new")
	}
	fresh := new(xrcDomain)
	if cfg.File != nil {
		var err error
		if fresh.name, fresh.file, err = sys.HoldFile(cfg.File); err != nil {
			return nil, opError(op, err)
		}
	}
	drop := func() {
		if fresh.file != nil {
			_ = fresh.file.Close() // a duplicate descriptor, for the lookup alone
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	domain := d.domains.byFile[fresh.name]
	if cfg.File == nil {
		domain = nil
	}
	shared := cfg.File != nil && d.member != nil
	elsewhere := shared && d.member.DomainElsewhere(fresh.name.Words())
	switch {
	case domain == nil && !cfg.Create && cfg.File == nil:
		return bad(syscall.EINVAL, "a domain that no file names can only be created")
	case domain == nil && !cfg.Create && !elsewhere:
		drop()
		return bad(syscall.EAGAIN, "no domain is open that the file names")
	case (domain != nil || elsewhere) && cfg.Exclusive:
		drop()
		return bad(syscall.EINVAL, "the domain that the file names is open")
	}
	if err := d.countLocked(op, &d.counts.xrcds, d.limits.PDs); err != nil {
		drop()
		return nil, err
	}
	if domain == nil && shared {
		if err := d.announceDomain(fresh.name.Words(), cfg.Exclusive); err != nil {
			d.counts.xrcds--
			d.publishLocked()
			drop()
			return nil, err
		}
	}
	if domain != nil {
		drop()
	} else {
		domain = fresh
		d.domains.last++
		domain.id = d.domains.last
		if d.domains.open == nil {
			d.domains.open = make(map[*xrcDomain]struct{})
		}
		d.domains.open[domain] = struct{}{}
		if domain.file != nil {
			if d.domains.byFile == nil {
				d.domains.byFile = make(map[sys.FileID]*xrcDomain)
			}
			d.domains.byFile[domain.name] = domain
		}
	}
	domain.opens++
	return &XRCD{dev: d, domain: domain}, nil
}

// announceDomain announces to other processes that this one has a domain open. With exclusive,
// it fails if another process has it open.
func (d *Device) announceDomain(name host.Domain, exclusive bool) error {
	if !d.member.AddDomain(name) {
		return ib.Errorf("open_xrcd", syscall.ENOMEM, "%d domains that files name are open", host.MaxDomains)
	}
	if exclusive && d.member.DomainElsewhere(name) { // since we looked
		d.member.DropDomain(name)
		return ib.Errorf("open_xrcd", syscall.EINVAL, "the domain that the file names is open")
	}
	return nil
}

// useLocked makes something a user of the domain.
func (x *XRCD) useLocked(op string) error {
	if x.closed {
		return ib.Errorf(op, syscall.EINVAL, "the XRC domain is closed")
	}
	x.refs++
	return nil
}

// unuse undoes useLocked for an object of which the device counts n.
func (x *XRCD) unuse(n *int) {
	x.dev.mu.Lock()
	x.refs--
	*n--
	x.dev.publishLocked()
	x.dev.mu.Unlock()
}

// CreateQP makes a target. It has no queues: what it receives goes to the shared
// receive queues of the domain.
func (x *XRCD) CreateQP() (provider.QP, error) {
	const op = "create_qp"
	d := x.dev
	d.mu.Lock()
	err := x.useLocked(op)
	if err == nil {
		if err = d.countLocked(op, &d.counts.qps, d.limits.QPs); err != nil {
			x.refs--
		}
	}
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	q := newQP(d, x)
	q.domain, q.opens = x.domain, 1
	if x.domain.file != nil && d.member != nil {
		q.target = &target{domain: x.domain.name.Words(), away: here}
		d.meet(q.target.domain)
	}
	if err := d.addQP(q, qp.Config{Type: ib.XRCRecv, XRC: qp.XRC{Domain: x.domain.id, Find: d.findSRQ}}); err != nil {
		x.unuse(&d.counts.qps)
		return nil, err
	}
	return &openTarget{QP: q, xrcd: x}, nil
}

// openTarget is a handle of a target: CreateQP and each OpenQP return one. The target is gone
// when the last handle is closed.
type openTarget struct {
	*QP
	xrcd   *XRCD
	closed atomic.Bool
}

// OpenQP opens a target of the domain that is there already.
func (x *XRCD) OpenQP(number uint32) (provider.QP, error) {
	const op = "open_qp"
	d := x.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.findQP(number)
	switch {
	case q != nil && q.domain == x.domain && q.opens > 0:
	case q == nil && x.domain.file != nil && d.isElsewhere(number):
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "another process has queue pair %#06x: a target ends with the process that made it, and cannot be opened from others", number)
	default:
		return nil, ib.Errorf(op, syscall.EINVAL, "no target of the domain has the number %#06x", number)
	}
	if err := x.useLocked(op); err != nil {
		return nil, err
	}
	q.opens++
	return &openTarget{QP: q, xrcd: x}, nil
}

// isElsewhere reports whether a number is one of another process of the device.
func (d *Device) isElsewhere(number uint32) bool {
	if d.member == nil {
		return false
	}
	process, known := d.member.Find(number)
	return known && process != d.member.Slot()
}

// Modify changes attributes and state of the target, for all handles.
func (o *openTarget) Modify(a *ib.QPAttr, mask ib.QPAttrMask) error {
	if o.closed.Load() {
		return ib.Errorf("modify_qp", syscall.EINVAL, "the queue pair is closed")
	}
	return o.QP.Modify(a, mask)
}

// Query returns the attributes.
func (o *openTarget) Query() (ib.QPAttr, error) {
	if o.closed.Load() {
		return ib.QPAttr{}, ib.Errorf("query_qp", syscall.EINVAL, "the queue pair is closed")
	}
	return o.QP.Query()
}

// Close closes the handle, and destroys the target if it was the last.
func (o *openTarget) Close() error {
	if o.closed.Swap(true) {
		return nil
	}
	d := o.dev
	d.mu.Lock()
	o.opens--
	last := o.opens == 0
	if last {
		o.owner = o.xrcd // until the target is gone, it counts in this domain
	} else {
		o.xrcd.refs--
	}
	d.mu.Unlock()
	if last {
		return o.QP.Close()
	}
	return nil
}

// findSRQ returns the shared receive queue that a request to a target names.
func (d *Device) findSRQ(number uint32) *qp.SharedQueue {
	if s := d.srqs.Get(number); s != nil && !s.closed.Load() {
		return &s.core
	}
	return nil
}

// Close closes the domain, unless something that was made with it is left. The domain is gone
// when it is open nowhere in this process.
func (x *XRCD) Close() error {
	d := x.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if x.closed {
		return nil
	}
	if x.refs > 0 {
		return ib.Errorf("close_xrcd", syscall.EBUSY, "%d queue pairs and shared receive queues are left in the domain", x.refs)
	}
	x.closed = true
	d.counts.xrcds--
	d.publishLocked()
	if x.domain.opens--; x.domain.opens > 0 {
		return nil
	}
	delete(d.domains.open, x.domain)
	if x.domain.file == nil {
		return nil
	}
	delete(d.domains.byFile, x.domain.name)
	if d.member != nil {
		d.member.DropDomain(x.domain.name.Words())
	}
	return opError("close_xrcd", x.domain.file.Close())
}

// join makes a shared receive queue one of an XRC domain, if it is to be, with a
// completion queue.
func (s *SRQ) join(cfg *provider.SRQConfig) error {
	const op = "create_srq"
	s.core.PD, s.core.Recv = s.pd.id, s.Recv
	if cfg.XRCD == nil {
		if cfg.CQ != nil {
			return ib.Errorf(op, syscall.EINVAL, "only a queue of an XRC domain has a completion queue")
		}
		return nil
	}
	d := s.pd.dev
	x, ok := cfg.XRCD.(*XRCD)
	cq, ok2 := cfg.CQ.(*CQ)
	if !ok || !ok2 || x.dev != d || cq.dev != d {
		return ib.Errorf(op, syscall.EINVAL, "a queue for XRC needs an XRC domain and a completion queue of the same device")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if cq.closed.Load() {
		return ib.Errorf(op, syscall.EINVAL, "the completion queue is closed")
	}
	if err := x.useLocked(op); err != nil {
		return err
	}
	cq.refs++
	s.xrcd, s.cq = x, cq
	s.core.Domain, s.core.CQ = x.domain.id, cq.CQ
	return nil
}

// leave undoes join.
func (s *SRQ) leave() {
	s.pd.dev.mu.Lock()
	s.leaveLocked()
	s.pd.dev.mu.Unlock()
}

func (s *SRQ) leaveLocked() {
	if s.xrcd != nil {
		s.xrcd.refs--
		s.cq.refs--
	}
}
