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
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

const defaultHopLimit = 64

var flowSeed = maphash.MakeSeed()

// makeFlow prepares the flow to an address; destQP is the queue pair there, 0 if there will
// be several.
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
	f.SrcPort = 0xc000 | uint16(maphash.Comparable(flowSeed, [2]netip.Addr{f.Src, f.Dst})^uint64(a.FlowLabel^sys.Place(destQP)))&0x3fff // kernels join packets of one port
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

// makePath prepares the path of a connected queue pair, and its use of the peer's credits:
// nil where there are none. The use is the caller's, to leave.
func (d *Device) makePath(q *QP, a *ib.QPAttr, mask ib.QPAttrMask) (*qp.Path, *peerUse, error) {
	mtu := a.PathMTU
	if mask&ib.QPMaskPathMTU == 0 {
		q.mu.Lock()
		mtu = q.core.Query().PathMTU
		q.mu.Unlock()
	}
	if a.AV.DGID.IsMulticast() {
		return nil, nil, ib.Errorf("modify_qp", syscall.EINVAL, "%v: a multicast group is reached by datagrams alone", a.AV.DGID)
	}
	if mtu.Bytes() > d.mtu {
		return nil, nil, ib.Errorf("modify_qp", syscall.EINVAL, "path_mtu %v: the port's MTU is %d", mtu, d.mtu)
	}
	dest := a.DestQPN
	if mask&ib.QPMaskDestQPN == 0 {
		q.mu.Lock()
		dest = q.core.Query().DestQPN
		q.mu.Unlock()
	}
	av := a.AV
	if q.Type() != ib.UC && av.TrafficClass&wire.ECNMask == 0 { // a reliable queue pair heeds marks
		av.TrafficClass |= wire.ECT0
	}
	f, err := d.makeFlow("modify_qp", &av, dest)
	if err != nil {
		return nil, nil, err
	}
	if p, loop := f.Link.(*loopPeer); loop {
		// UC completes a request when its trains have left: then the program may change its
		// memory, so the bytes must be copied by then.
		copied := q.Type() == ib.UC
		seen := d.capture != nil || p.target.Load().dev.capture != nil // a capture needs the bytes
		return &qp.Path{Flow: f, Window: loopWindow, Lossless: true, ByReference: !seen && !copied}, nil, nil
	}
	if s, ok := d.link.(*link.Shared); ok && s.IsLocal(f) {
		if err := s.Reach(f, dest); err != nil {
			return nil, nil, opError("modify_qp", err)
		}
	}
	if s, ok := d.link.(*link.Shared); ok && s.IsLocal(f) { // still
		window, short, below := s.LocalWindow(f, dest)
		use := d.peers.use(q, peerKey{f.Dst, true, 0}, func() *qp.Credits { return qp.NewCredits(peerWindows * windowCredits) })
		credits := use.credits.Costing(cost(max(1, window/peerWindows))) // all queue pairs share the ring
		p := &qp.Path{Flow: f, Window: window, Short: qp.Short{Below: below, Window: short}, Credits: credits, Lossless: true}
		if q.Type() == ib.RC {
			if c := s.NewCarrier(f, dest); c != nil {
				use.carrier, p.Carrier, p.Named = c, c, namedWindow/max(mtu.Bytes(), 1)
			}
		}
		return p, use, nil
	}
	window := d.cfg.Window
	if window <= 0 {
		window = d.link.Window(mtu.Bytes())
	}
	use := d.peers.use(q, peerKey{f.Dst, false, d.socketOf(f, dest)}, func() *qp.Credits {
		return qp.NewControlled(peerWindows*windowCredits, peerWindows*window*mtu.Bytes(), mtu.Bytes())
	})
	// A target that processes share hands requests on, which keeps their order only where none is kept.
	shared := q.target != nil || q.proxy != nil
	return &qp.Path{Flow: f, Window: window, Credits: use.credits.Costing(cost(window)), Selective: q.Type() != ib.UC && !shared}, use, nil
}

// namedWindow is how many bytes may be under way by name, for another process's engine to
// move: enough work for the engine while an acknowledgement goes back and more is sent.
const namedWindow = 8 * train.MaxCarried

// All queue pairs together may have peerWindows windows' worth of packets in one peer's socket
// buffer, or ring. Windows differ, as MTUs do: so a window costs windowCredits, whatever its length,
// and a packet its share of them.
const (
	peerWindows   = 4
	windowCredits = 1 << 24
)

// cost returns how many credits a packet costs, with a window of so many packets.
func cost(window int) int { return (windowCredits + window - 1) / max(window, 1) }

// peerTable is the peers of a device by address, as long as queue pairs have a path to them.
type peerTable struct {
	mu     sync.Mutex // guards byAddr, and the peers' users
	byAddr map[peerKey]*peer
}

// peerKey is an address, reached by rings (local) or by packets: each has credits of its own.
// A device of this host is known to have several sockets: each of them has, too.
type peerKey struct {
	addr   netip.Addr
	local  bool
	socket int // see socketOf
}

// socketOf returns a number of the socket that packets to a queue pair arrive at; 0 if the peer
// is taken to have one socket, as any that is not a device of this host.
func (d *Device) socketOf(f *train.Flow, destQP uint32) int {
	s, ok := d.link.(*link.Shared)
	if !ok || !s.OnHost(f, destQP) {
		return 0
	}
	return 1 + int(sys.Place(destQP))
}

// peer is what queue pairs to one address share: the room in its socket buffer, or its ring.
type peer struct {
	key     peerKey
	users   int // guarded by the table's lock
	credits *qp.Credits
	starved atomic.Bool // the line is not empty

	mu   sync.Mutex     // guards line, and the uses' waits and left
	line ring[*peerUse] // of queue pairs that found no credits, oldest first
}

// peerUse is one queue pair's use of one peer. When the queue pair gets another path, or
// none, it leaves the use, and with it the line.
type peerUse struct {
	*peer
	q       *QP
	carrier *link.Carrier // nil: none; used under the queue pair's lock
	waits   bool          // it is in the line
	left    bool
}

// use returns a new use of the peer at an address. credits makes those of a new peer.
func (t *peerTable) use(q *QP, k peerKey, credits func() *qp.Credits) *peerUse {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byAddr == nil {
		t.byAddr = make(map[peerKey]*peer)
	}
	p := t.byAddr[k]
	if p == nil {
		p = &peer{key: k, credits: credits()}
		t.byAddr[k] = p
	}
	p.users++
	return &peerUse{peer: p, q: q}
}

// lineChanged notes how long the line is. The caller holds the lock.
func (p *peer) lineChanged() {
	p.starved.Store(p.line.len() > 0)
	p.credits.Waiting(p.line.len())
}

// leave ends a use, once; the last one ends the peer. The queue pair has given its credits
// back. A nil use is ignored.
func (t *peerTable) leave(u *peerUse) {
	if u == nil {
		return
	}
	if u.carrier != nil {
		u.carrier.Close()
	}
	u.mu.Lock()
	u.left = true
	if u.waits {
		u.waits = false
		u.line.remove(func(o *peerUse) bool { return o == u })
		u.lineChanged()
	}
	u.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if u.users--; u.users == 0 {
		delete(t.byAddr, u.key)
	}
}

// leavePeer ends a use of a queue pair, and lets others go on with its credits.
func (d *Device) leavePeer(u *peerUse) {
	d.peers.leave(u)
	d.runWaiting(u, d.now())
}

// await puts a queue pair that is stalled on credits into the line, unless it has another peer
// by now. If credits have come back meanwhile, the queue pair goes on soon.
func (d *Device) await(u *peerUse) {
	if u == nil {
		return
	}
	u.mu.Lock()
	if u.waits || u.left {
		u.mu.Unlock()
		return
	}
	u.waits = true
	u.line.push(u)
	u.lineChanged()
	u.mu.Unlock()
	if u.credits.Free() {
		u.q.later()
	}
}

// runWaiting lets the queue pairs in a peer's line go on, each once, while there are credits. One
// that has its share goes to the end of the line again. A nil use is ignored.
func (d *Device) runWaiting(u *peerUse, now qp.Time) {
	if u == nil || !u.starved.Load() {
		return
	}
	p := u.peer
	p.mu.Lock()
	n := p.line.len()
	p.mu.Unlock()
	for ; n > 0 && p.credits.Free(); n-- {
		p.mu.Lock()
		if p.line.len() == 0 {
			p.mu.Unlock()
			return
		}
		next := p.line.pop()
		next.waits = false
		p.lineChanged()
		p.mu.Unlock()
		d.transmit(next.q, now)
	}
}
