package device

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

const defaultHopLimit = 64

var flowSeed = maphash.MakeSeed()

// makeFlow prepares the way to an address; destQP is the queue pair there, 0 if
// there will be several.
func (d *Device) makeFlow(op string, a *ib.AHAttr, destQP uint32) (*train.Flow, error) {
	if a.PortNum > 1 {
		return nil, ib.Errorf(op, syscall.EINVAL, "port %d: the device has port 1 alone", a.PortNum)
	}
	if a.SGIDIndex < 0 || a.SGIDIndex >= len(d.addrs) {
		return nil, ib.Errorf(op, syscall.EINVAL, "sgid_index %d: the device has %d GIDs", a.SGIDIndex, len(d.addrs))
	}
	if a.FlowLabel >= 1<<20 {
		return nil, ib.Errorf(op, syscall.EINVAL, "flow_label %#x is longer than 20 bits", a.FlowLabel)
	}
	f := &train.Flow{Src: d.addrs[a.SGIDIndex], Dst: a.DGID.Addr(), TClass: a.TrafficClass, HopLimit: a.HopLimit, Label: a.FlowLabel}
	if f.HopLimit == 0 {
		f.HopLimit = defaultHopLimit
	}
	if a.DGID.IsZero() || f.Dst.IsUnspecified() {
		return nil, ib.Errorf(op, syscall.EINVAL, "dgid is not set")
	}
	if f.Dst.Is4() != f.Src.Is4() {
		return nil, ib.Errorf(op, syscall.EINVAL, "%v cannot be reached from %v: not of the same IP version", f.Dst, f.Src)
	}
	f.SrcPort = 0xc000 | uint16(maphash.Comparable(flowSeed, [2]netip.Addr{f.Src, f.Dst})^uint64(a.FlowLabel))&0x3fff
	if f.Dst.IsMulticast() {
		p, err := d.newGroupPeer(f)
		if err != nil {
			return nil, opError(op, err)
		}
		f.Link = p
		return f, nil
	}
	if d.loopback {
		if p := newLoopPeer(d, f, destQP); p != nil {
			f.Link = p
			return f, nil
		}
	}
	if err := d.link.Prepare(f); err != nil {
		return nil, opError(op, err)
	}
	return f, nil
}

// makePath prepares the path of a connected queue pair.
func (d *Device) makePath(q *QP, a *ib.QPAttr, mask ib.QPAttrMask) (*qp.Path, error) {
	mtu := a.PathMTU
	if mask&ib.QPMaskPathMTU == 0 {
		q.mu.Lock()
		mtu = q.core.Query().PathMTU
		q.mu.Unlock()
	}
	if a.AV.DGID.IsMulticast() {
		return nil, ib.Errorf("modify_qp", syscall.EINVAL, "%v: a multicast group is reached by datagrams alone", a.AV.DGID)
	}
	if mtu.Bytes() > d.mtu {
		return nil, ib.Errorf("modify_qp", syscall.EINVAL, "path_mtu %v: the port's MTU is %d", mtu, d.mtu)
	}
	dest := a.DestQPN
	if mask&ib.QPMaskDestQPN == 0 {
		q.mu.Lock()
		dest = q.core.Query().DestQPN
		q.mu.Unlock()
	}
	f, err := d.makeFlow("modify_qp", &a.AV, dest)
	if err != nil {
		return nil, err
	}
	if _, loop := f.Link.(*loopPeer); loop {
		return &qp.Path{Flow: f, Window: loopWindow, Lossless: true}, nil
	}
	if s, ok := d.link.(*link.Shared); ok && s.IsLocal(f) {
		if err := s.Reach(f, dest); err != nil {
			return nil, opError("modify_qp", err)
		}
	}
	if s, ok := d.link.(*link.Shared); ok && s.IsLocal(f) { // still
		window, short, below := s.LocalWindow(f, dest)
		p := d.peers.get(peerKey{f.Dst, true}, max(1, window/peerWindows))
		q.peer.Store(p)
		return &qp.Path{Flow: f, Window: window, Short: qp.Short{Below: below, Window: short}, Credits: p.credits, Lossless: true}, nil
	}
	window := d.cfg.Window
	if window <= 0 {
		window = d.link.Window(mtu.Bytes())
	}
	p := d.peers.get(peerKey{f.Dst, false}, window)
	q.peer.Store(p)
	return &qp.Path{Flow: f, Window: window, Credits: p.credits}, nil
}

// peerTable knows the peers of a device by address.
type peerTable struct {
	mu     sync.Mutex // guards byAddr
	byAddr map[peerKey]*peer
}

// peerKey is an address, reached by rings or by packets: these have room of their
// own.
type peerKey struct {
	addr  netip.Addr
	local bool
}

// peer is what queue pairs to one address share: the room in its socket buffer.
type peer struct {
	credits *qp.Credits
	starved atomic.Bool // somebody waits

	mu      sync.Mutex // guards waiting
	waiting ring[*QP]  // queue pairs that found no credits, oldest first
}

// peerWindows is how many windows' worth of packets all queue pairs together
// may have under way to one peer.
const peerWindows = 4

func (t *peerTable) get(a peerKey, window int) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byAddr == nil {
		t.byAddr = make(map[peerKey]*peer)
	}
	p := t.byAddr[a]
	if p == nil {
		p = &peer{credits: qp.NewCredits(peerWindows * window)}
		t.byAddr[a] = p
	}
	return p
}

// await notes a queue pair that found no credits. The credits may have come
// back meanwhile: then it goes on at once.
func (d *Device) await(q *QP) {
	p := q.peer.Load()
	if p == nil || !q.waiting.CompareAndSwap(false, true) {
		return
	}
	p.mu.Lock()
	p.waiting.push(q)
	p.starved.Store(true)
	p.mu.Unlock()
	if p.credits.Free() {
		d.later(q)
	}
}

// runWaiting lets queue pairs go on that wait for credits, while there are any.
func (d *Device) runWaiting(p *peer, now qp.Time) {
	for p != nil && p.credits.Free() {
		p.mu.Lock()
		if p.waiting.len() == 0 {
			p.mu.Unlock()
			return
		}
		q := p.waiting.pop()
		p.starved.Store(p.waiting.len() > 0)
		p.mu.Unlock()
		q.waiting.Store(false)
		d.transmit(q, now)
	}
}
