package verbs

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// The fake provider does no RDMA. It records the arguments that package verbs calls it
// with, and returns what the test has set.

type fakeDevice struct {
	attr  ib.DeviceAttr
	port  ib.PortAttr
	gids  []ib.GID
	err   error // what every call returns, if set
	event ib.AsyncEvent

	entries int // what CreateCQ was asked for
	channel provider.Channel
	xrcd    provider.XRCDConfig // what OpenXRCD was asked for
	dm      provider.DMConfig   // what AllocDM was asked for
	closed  int
}

func (d *fakeDevice) Attr() ib.DeviceAttr { return d.attr }
func (d *fakeDevice) Port(port int) (ib.PortAttr, error) {
	if port != 1 {
		return ib.PortAttr{}, ib.Errorf("query_port", syscall.EINVAL, "port %d", port)
	}
	return d.port, d.err
}
func (d *fakeDevice) AllocDMAH(cfg ib.DMAHConfig) (provider.DMAH, error) {
	if d.err != nil {
		return nil, d.err
	}
	return &fakeDMAH{cfg: cfg}, nil
}
func (d *fakeDevice) GIDs() []ib.GID { return d.gids }
func (d *fakeDevice) Counters() []provider.Counter {
	return []provider.Counter{{Name: "tx_packets", Value: 3}, {Name: "rx_packets", Value: 5}}
}
func (d *fakeDevice) NextEvent(ctx context.Context) (ib.AsyncEvent, error) {
	if err := ctx.Err(); err != nil {
		return ib.AsyncEvent{}, err
	}
	return d.event, d.err
}
func (d *fakeDevice) AllocPD() (provider.PD, error) {
	if d.err != nil {
		return nil, d.err
	}
	return &fakePD{dev: d}, nil
}
func (d *fakeDevice) CreateChannel() (provider.Channel, error) {
	if d.err != nil {
		return nil, d.err
	}
	return &fakeChannel{events: make(chan provider.CQ, 16)}, nil
}
func (d *fakeDevice) CreateCQ(entries int, ch provider.Channel) (provider.CQ, error) {
	d.entries, d.channel = entries, ch
	if d.err != nil {
		return nil, d.err
	}
	return &fakeCQ{number: uint32(entries), wcs: make([]ib.WC, 0, entries)}, nil
}
func (d *fakeDevice) OpenXRCD(cfg provider.XRCDConfig) (provider.XRCD, error) {
	d.xrcd = cfg
	if d.err != nil {
		return nil, d.err
	}
	return &fakeXRCD{dev: d}, nil
}
func (d *fakeDevice) Management() provider.Management { return nil }

func (d *fakeDevice) AllocDM(cfg provider.DMConfig) (provider.DM, error) {
	d.dm = cfg
	if d.err != nil {
		return nil, d.err
	}
	return &fakeDM{cfg: cfg}, nil
}
func (d *fakeDevice) Close() error { d.closed++; return d.err }

// fakeDM is device memory that only says what it was asked.
type fakeDM struct {
	provider.DM
	cfg    provider.DMConfig
	closed int
}

func (m *fakeDM) Length() uint64    { return m.cfg.Length }
func (m *fakeDM) Class() ib.DMClass { return m.cfg.Class }
func (m *fakeDM) Close() error      { m.closed++; return nil }

type fakeXRCD struct {
	dev    *fakeDevice
	closed int
}

func (x *fakeXRCD) CreateQP() (provider.QP, error) {
	if x.dev.err != nil {
		return nil, x.dev.err
	}
	return &fakeQP{typ: ib.XRCRecv, number: 0x321}, nil
}
func (x *fakeXRCD) OpenQP(uint32) (provider.QP, error) { return x.CreateQP() }
func (x *fakeXRCD) Close() error                       { x.closed++; return x.dev.err }

type fakePD struct {
	dev *fakeDevice

	buf          []byte // of the last RegMR
	addr         uintptr
	length, iova uint64
	access       ib.Access
	handle       string
	qpConfig     provider.QPConfig
	srqConfig    provider.SRQConfig
	ahAttr       ib.AHAttr
	advice       fakeAdvice
	pieces       int // of the last CreateMKey
	closed       int
}

func (p *fakePD) RegMR(buf []byte, access ib.Access) (provider.MR, error) {
	p.buf, p.access = buf, access
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMR{addr: 0x1000, length: uint64(len(buf)), access: access}, nil
}
func (p *fakePD) RegMRAddr(addr uintptr, length, iova uint64, access ib.Access) (provider.MR, error) {
	p.addr, p.length, p.iova, p.access = addr, length, iova, access
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMR{addr: iova, length: length, access: access}, nil
}
func (p *fakePD) AllocMR(length uint64, access ib.Access) (provider.MR, error) {
	p.length, p.access = length, access
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMR{length: length, access: access}, nil
}
func (p *fakePD) RegDMMR(dm provider.DM, off, length uint64, access ib.Access) (provider.MR, error) {
	p.iova, p.length, p.access = off, length, access
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMR{length: length, access: access}, nil
}
func (p *fakePD) CreateMKey(pieces int) (provider.MKey, error) {
	p.pieces = pieces
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMKey{}, nil
}

// fakeMKey is an indirect key that is not one.
type fakeMKey struct{ closed int }

func (k *fakeMKey) Key() uint32  { return 0x700 }
func (k *fakeMKey) Close() error { k.closed++; return nil }

func (p *fakePD) OpenSharedMR(handle string, access ib.Access) (provider.MR, error) {
	p.handle, p.access = handle, access
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMR{access: access}, nil
}
func (p *fakePD) AllocMW(typ ib.MWType) (provider.MW, error) {
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMW{typ: typ, dev: p.dev}, nil
}
func (p *fakePD) CreateQP(cfg provider.QPConfig) (provider.QP, error) {
	p.qpConfig = cfg
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeQP{typ: cfg.Type, number: 0x123}, nil
}
func (p *fakePD) CreateSRQ(cfg provider.SRQConfig) (provider.SRQ, error) {
	p.srqConfig = cfg
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeSRQ{}, nil
}
func (p *fakePD) CreateAH(attr ib.AHAttr) (*ib.AH, error) {
	p.ahAttr = attr
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return ib.NewAH(attr, nil, func() error { return nil }), nil
}
func (p *fakePD) Close() error { p.closed++; return p.dev.err }

type fakeDMAH struct {
	cfg    ib.DMAHConfig
	pd     provider.PD // of the last Register
	access ib.Access
	closed int
}

func (h *fakeDMAH) Config() ib.DMAHConfig { return h.cfg }
func (h *fakeDMAH) Register(pd provider.PD, access ib.Access, reg func() (provider.MR, error)) (provider.MR, error) {
	h.pd, h.access = pd, access
	mr, err := reg()
	if err == nil {
		mr.(*fakeMR).dmah = h
	}
	return mr, err
}
func (h *fakeDMAH) Close() error { h.closed++; return nil }

type fakeMR struct {
	dmah         provider.DMAH
	addr, length uint64
	access       ib.Access
	err          error
	change       provider.MRChange // of the last Rereg
	closed       int
}

func (m *fakeMR) DMAH() provider.DMAH             { return m.dmah }
func (m *fakeMR) Bytes() []byte                   { return make([]byte, m.length) }
func (m *fakeMR) Share() (string, error)          { return "handle", m.err }
func (m *fakeMR) Rereg(c provider.MRChange) error { m.change = c; return m.err }

type fakeMW struct {
	typ    ib.MWType
	dev    *fakeDevice
	closed int
}

func (w *fakeMW) Type() ib.MWType { return w.typ }
func (w *fakeMW) RKey() uint32    { return 0x12ff }
func (w *fakeMW) Close() error    { w.closed++; return w.dev.err }

func (m *fakeMR) LKey() uint32           { return 0xaa }
func (m *fakeMR) RKey() uint32           { return 0xbb }
func (m *fakeMR) Addr() uint64           { return m.addr }
func (m *fakeMR) Length() uint64         { return m.length }
func (m *fakeMR) Access() ib.Access      { return m.access }
func (m *fakeMR) Locked() (bool, string) { return false, "Go heap" }
func (m *fakeMR) Close() error           { m.closed++; return m.err }

type fakeChannel struct {
	events chan provider.CQ
	err    error
	closed int
}

func (c *fakeChannel) Next(ctx context.Context) (provider.CQ, error) {
	select {
	case cq := <-c.events:
		return cq, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
func (c *fakeChannel) Ready() <-chan struct{} { return nil }
func (c *fakeChannel) Close() error           { c.closed++; return c.err }

type fakeCQ struct {
	number uint32
	acked  atomic.Int32
	mu     sync.Mutex // guards wcs
	wcs    []ib.WC
	err    error
	asked  []bool // RequestNotify's arguments
	size   int
	closed int
}

func (c *fakeCQ) Number() uint32 { return c.number }
func (c *fakeCQ) Cap() int       { return cap(c.wcs) }
func (c *fakeCQ) Poll(wcs []ib.WC) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(wcs, c.wcs)
	return n, c.err
}
func (c *fakeCQ) RequestNotify(solicitedOnly bool) error {
	c.asked = append(c.asked, solicitedOnly)
	return c.err
}
func (c *fakeCQ) Ack(events int)     { c.acked.Add(int32(events)) }
func (c *fakeCQ) Resize(n int) error { c.size = n; return c.err }
func (c *fakeCQ) Close() error       { c.closed++; return c.err }

type modify struct {
	attr ib.QPAttr
	mask ib.QPAttrMask
}

// fakeBind is what BindMW was asked for.
type fakeBind struct {
	mw    provider.MW
	id    uint64
	flags ib.SendFlags
	ib.MWBind
}

type fakeQP struct {
	bound   fakeBind
	typ     ib.QPType
	number  uint32
	sent    []ib.SendWR // of the last PostSend
	recvd   []ib.RecvWR
	accept  int // how many a Post takes
	err     error
	modifys []modify
	failAt  ib.QPState // Modify to this state fails with err
	closed  int
	groups  []ib.GID
}

func (q *fakeQP) Counters() []provider.Counter {
	return []provider.Counter{{Name: "drop_bad_qkey", Value: 7}}
}
func (q *fakeQP) Number() uint32  { return q.number }
func (q *fakeQP) Type() ib.QPType { return q.typ }
func (q *fakeQP) PostSend(wrs []ib.SendWR) (int, error) {
	q.sent = wrs
	return q.accept, q.err
}
func (q *fakeQP) PostRecv(wrs []ib.RecvWR) (int, error) {
	q.recvd = wrs
	return q.accept, q.err
}
func (q *fakeQP) BindMW(mw provider.MW, id uint64, flags ib.SendFlags, b ib.MWBind) (uint32, error) {
	q.bound = fakeBind{mw, id, flags, b}
	return 0x77, q.err
}
func (q *fakeQP) Modify(attr *ib.QPAttr, mask ib.QPAttrMask) error {
	q.modifys = append(q.modifys, modify{*attr, mask})
	if attr.State == q.failAt {
		return q.err
	}
	return nil
}
func (q *fakeQP) Query() (ib.QPAttr, error) { return ib.QPAttr{State: ib.QPRTS}, q.err }
func (q *fakeQP) Close() error              { q.closed++; return q.err }
func (q *fakeQP) AttachMcast(g ib.GID) error {
	q.groups = append(q.groups, g)
	return q.err
}
func (q *fakeQP) DetachMcast(g ib.GID) error {
	q.groups = slices.DeleteFunc(q.groups, func(o ib.GID) bool { return o == g })
	return q.err
}

type fakeSRQ struct {
	maxWR, limit int // Modify's arguments
	modified     int
	recvd        []ib.RecvWR
	accept       int
	err          error
	closed       int
}

func (s *fakeSRQ) Number() uint32 { return 9 }
func (s *fakeSRQ) PostRecv(wrs []ib.RecvWR) (int, error) {
	s.recvd = wrs
	return s.accept, s.err
}
func (s *fakeSRQ) Modify(maxWR, limit int) error {
	s.maxWR, s.limit = maxWR, limit
	s.modified++
	return s.err
}
func (s *fakeSRQ) Query() (maxWR, maxSGE, limit int, err error) { return 64, 4, 8, s.err }
func (s *fakeSRQ) Close() error                                 { s.closed++; return s.err }
