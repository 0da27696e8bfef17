package cma

import (
	"net/netip"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// JoinMulticast joins a group; MulticastJoin or MulticastError follows. The queue pair joins by
// itself (AttachMcast), which sendOnly asks the program not to do.
func (id *ID) JoinMulticast(group netip.Addr, sendOnly bool) (*Join, error) {
	const op = "join_multicast"
	group = group.Unmap()
	j := &Join{ID: id, Addr: group}
	return j, id.do(op, func() error {
		switch {
		case !id.isUD():
			return ib.Errorf(op, syscall.EINVAL, "a %v id", id.t)
		case id.port == nil:
			return ib.Errorf(op, syscall.EINVAL, "the id has no device yet")
		case !group.IsMulticast():
			return ib.Errorf(op, syscall.EINVAL, "%v is not a multicast group", group)
		case !group.Is4():
			return ib.Errorf(op, syscall.EOPNOTSUPP, "RoCE v2 has no groups of IPv6")
		case slices.ContainsFunc(id.joins, func(o *Join) bool { return o.Addr == group }):
			return ib.Errorf(op, syscall.EADDRINUSE, "%v is joined already", group)
		}
		id.joins = append(id.joins, j)
		id.emitLocked(Event{Type: MulticastJoin, Join: j, UD: UDParam{QPN: ib.MulticastQPN, QKey: udpQKey, AH: ib.AHAttr{
			DGID: ib.GIDFromAddr(group), SGIDIndex: max(0, slices.Index(id.port.dev.Addrs, id.src.Addr())), HopLimit: 64, TrafficClass: id.tos, PortNum: 1}}})
		return nil
	}, stateBound, stateAddrResolved, stateRouteResolved, stateConnect)
}

// Leave ends a membership. No event of it follows.
func (j *Join) Leave() error {
	m := j.ID.m
	m.mu.Lock()
	defer m.mu.Unlock()
	j.ID.joins = slices.DeleteFunc(j.ID.joins, func(o *Join) bool { return o == j })
	m.events = slices.DeleteFunc(m.events, func(e *Event) bool { return e.Join == j })
	m.flushedLocked() // no event of it is being delivered
	return nil
}
