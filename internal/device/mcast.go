package device

// Multicast: a message to a group reaches every UD queue pair that is attached to
// it, the sender's own too if it is a member, as with adapters and with Linux's
// soft-RoCE driver. (A program that does not want its own messages compares SrcQP and the
// source in the header with its own.)
//
//  1. AttachMcast makes a queue pair a member; the first one of a group makes the
//     link join it.
//  2. A sender's packets go to the group's address, and the kernel gives a copy to
//     every process of this host and every host that has joined. Devices without a
//     network link are reached by a call, within the process (groupPeer).
//  3. deliverGroup gives what came to all members.

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

// Limits. A group takes a descriptor, an attachment a few words.
const (
	maxGroups       = 1024
	maxGroupMembers = 4096
	maxAttachments  = 1 << 16
)

// mcast are the groups that a device has members of.
type mcast struct {
	mu sync.Mutex // orders attaching and detaching, with the joining and leaving that they need

	// members by group. The map never changes: setLocked replaces it, under mu, and
	// deliverGroup reads it without.
	members atomic.Pointer[map[netip.Addr][]*QP]
}

func (m *mcast) of(group netip.Addr) []*QP {
	if all := m.members.Load(); all != nil {
		return (*all)[group]
	}
	return nil
}

// setLocked replaces the members of a group.
func (m *mcast) setLocked(group netip.Addr, qs []*QP) {
	all := map[netip.Addr][]*QP{}
	if old := m.members.Load(); old != nil {
		all = maps.Clone(*old)
	}
	if len(qs) > 0 {
		all[group] = qs
	} else {
		delete(all, group)
	}
	m.members.Store(&all)
}

func (m *mcast) countLocked() int {
	if all := m.members.Load(); all != nil {
		return len(*all)
	}
	return 0
}

// groupLink is a link that can join multicast groups.
type groupLink interface {
	JoinGroup(netip.Addr) error
	LeaveGroup(netip.Addr) error
}

// AttachMcast makes the queue pair a member of a group.
func (q *QP) AttachMcast(gid ib.GID) error {
	const op = "attach_mcast"
	group, err := q.checkGroup(op, gid)
	if err != nil {
		return err
	}
	d := q.dev
	d.mcast.mu.Lock()
	defer d.mcast.mu.Unlock()
	q.mu.Lock()
	closed := q.closed
	q.mu.Unlock()
	old := d.mcast.of(group)
	switch {
	case closed:
		return ib.Errorf(op, syscall.EINVAL, "the queue pair is closed")
	case slices.Contains(old, q):
		return nil // once is enough for one copy
	case len(old) >= maxGroupMembers:
		return ib.Errorf(op, syscall.ENOMEM, "the group has %d members already", len(old))
	case len(old) == 0 && d.mcast.countLocked() >= maxGroups:
		return ib.Errorf(op, syscall.ENOMEM, "the device has members of %d groups already", maxGroups)
	}
	d.mu.Lock()
	err = d.countLocked(op, &d.counts.mcasts, maxAttachments)
	d.mu.Unlock()
	if err != nil {
		return err
	}
	if len(old) == 0 {
		if err := d.joinGroup(op, group); err != nil {
			d.uncountMcast()
			return err
		}
	}
	d.mcast.setLocked(group, append(slices.Clip(old), q))
	return nil
}

// DetachMcast undoes AttachMcast.
func (q *QP) DetachMcast(gid ib.GID) error {
	const op = "detach_mcast"
	group, err := q.checkGroup(op, gid)
	if err != nil {
		return err
	}
	q.dev.mcast.mu.Lock()
	defer q.dev.mcast.mu.Unlock()
	if !slices.Contains(q.dev.mcast.of(group), q) {
		return ib.Errorf(op, syscall.EINVAL, "the queue pair is not attached to %v", gid)
	}
	return opError(op, q.detachLocked(group))
}

func (q *QP) checkGroup(op string, gid ib.GID) (netip.Addr, error) {
	if q.Type() != ib.UD {
		return netip.Addr{}, ib.Errorf(op, syscall.EINVAL, "a %v queue pair: only UD ones take part in multicast", q.Type())
	}
	if !gid.IsMulticast() {
		return netip.Addr{}, ib.Errorf(op, syscall.EINVAL, "%v is not the GID of a multicast group", gid)
	}
	return gid.Addr(), nil
}

// detachLocked ends a membership; the last one makes the link leave.
func (q *QP) detachLocked(group netip.Addr) error {
	d := q.dev
	left := slices.DeleteFunc(slices.Clone(d.mcast.of(group)), func(o *QP) bool { return o == q })
	d.mcast.setLocked(group, left)
	d.uncountMcast()
	if l, ok := d.link.(groupLink); ok && len(left) == 0 {
		return l.LeaveGroup(group)
	}
	return nil
}

// detachAll ends the memberships of a queue pair that is being closed.
func (q *QP) detachAll() {
	if q.Type() != ib.UD {
		return
	}
	m := &q.dev.mcast
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.members.Load()
	if all == nil {
		return
	}
	for group, qs := range *all {
		if slices.Contains(qs, q) {
			_ = q.detachLocked(group) // it closes a socket: there is nothing to lose in it
		}
	}
}

func (d *Device) uncountMcast() {
	d.mu.Lock()
	d.counts.mcasts--
	d.publishLocked()
	d.mu.Unlock()
}

func (d *Device) joinGroup(op string, group netip.Addr) error {
	if !slices.ContainsFunc(d.addrs, func(a netip.Addr) bool { return a.Is4() == group.Is4() }) {
		return ib.Errorf(op, syscall.EINVAL, "%v: the device has no address of this IP version", group)
	}
	if l, ok := d.link.(groupLink); ok {
		return opError(op, l.JoinGroup(group))
	}
	if d.network() {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "the device's link has no multicast")
	}
	return nil
}

// network reports whether the device has a link that leaves the process.
func (d *Device) network() bool {
	_, none := d.link.(*noLink)
	return !none
}

// deliverGroup gives a message to all members of the group that it is for. A fault
// is the sender's.
func (d *Device) deliverGroup(t *train.Train, now qp.Time) mem.Fault {
	members := d.mcast.of(t.To)
	if len(members) == 0 {
		d.noQP.Add(uint64(t.N))
	}
	for _, q := range members {
		if fault, _, _ := q.receive(t, now); !fault.OK() { // a datagram leaves nothing to send
			return fault
		}
	}
	return mem.Fault{}
}

// groupPeer is the way to a multicast group.
type groupPeer struct {
	rest *train.Flow // by packets; nil: the device has no network link
}

// newGroupPeer prepares the way to a group.
func (d *Device) newGroupPeer(f *train.Flow) (*groupPeer, error) {
	if !d.network() {
		return &groupPeer{}, nil
	}
	rest := *f
	if err := d.link.Prepare(&rest); err != nil {
		return nil, err
	}
	return &groupPeer{&rest}, nil
}

// send sends a message to a group. It calls the devices of this process that have no network
// link and, if the sender has none, those that have one, too. All others get packets.
func (p *groupPeer) send(from *Device, one []*train.Train, now qp.Time) mem.Fault {
	t := one[0]
	t.From, t.To = t.Flow.Src, t.Flow.Dst
	t.TClass, t.HopLimit = t.Flow.TClass, t.Flow.HopLimit
	if from.capture != nil && p.rest == nil {
		_ = link.Capture(t, from.capture, time.Now()) // deliverGroup returns the fault, if any
	}
	for _, to := range openDevices() {
		if !to.loopback || p.rest != nil && to.network() || len(to.mcast.of(t.To)) == 0 {
			continue
		}
		if fault := to.deliverGroup(t, now+from.base.Sub(to.base)); !fault.OK() {
			return fault
		}
	}
	if p.rest == nil {
		return mem.Fault{}
	}
	t.Flow = p.rest
	_, fault, _ := from.sendLink(one) // packets to a group never find the link busy
	return fault
}
