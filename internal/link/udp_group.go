package link

// Multicast groups. Whoever has a member of a group opens a socket for it, in its
// own process: the kernel gives each of them a copy, whether what came is from
// another host, from another process of this one, or from this very device. So
// the owner of the port passes nothing on, a take-over changes nothing, and a
// process that dies has left.

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// groupEnd is a socket that has joined a group.
type groupEnd struct {
	addr netip.Addr
	sock *sys.UDPSocket
}

// groupsAtOnce is how many groups one Poll looks at. With more of them it takes
// several, so that each still finds most of its time for what is not multicast.
const groupsAtOnce = 4

// JoinGroup receives what is sent to a multicast group, on the interfaces of all
// local addresses of its IP version. Each group is joined once.
func (u *UDP) JoinGroup(group netip.Addr) error {
	var socks []*sys.UDPSocket
	undo := func(err error) error {
		for _, s := range socks {
			_ = s.Close() // the first error says more
		}
		return err
	}
	var seen []int
	for _, e := range u.ends {
		if e.addr.Is4() != group.Is4() {
			continue
		}
		index, err := sys.InterfaceIndex(e.addr)
		if err != nil {
			return undo(err)
		}
		if slices.Contains(seen, index) {
			continue
		}
		seen = append(seen, index)
		s, err := sys.OpenGroup(netip.AddrPortFrom(group, wire.RoCEPort), index, u.rxOptions())
		if err != nil {
			return undo(fmt.Errorf("joining %v: %w", group, err))
		}
		socks = append(socks, s)
		if err := s.RecvHeader(); err != nil {
			return undo(err)
		}
	}
	if len(socks) == 0 {
		return ib.Errorf("attach_mcast", syscall.EINVAL, "%v: the device has no address of this IP version", group)
	}
	r := &u.recv
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return undo(ErrClosed)
	}
	for _, s := range socks {
		r.groups = append(r.groups, groupEnd{group, s})
	}
	u.poller.Add(socks)
	return nil
}

// LeaveGroup undoes JoinGroup. What has arrived and was not polled is lost.
func (u *UDP) LeaveGroup(group netip.Addr) error {
	var socks []*sys.UDPSocket
	r := &u.recv
	r.mu.Lock()
	if !r.closed { // or they are closed with the link
		r.groups = slices.DeleteFunc(r.groups, func(g groupEnd) bool {
			if g.addr == group {
				socks = append(socks, g.sock)
			}
			return g.addr == group
		})
		u.poller.Remove(socks)
	}
	r.mu.Unlock()
	var errs []error
	for _, s := range socks {
		errs = append(errs, s.LeaveGroup(), s.Close())
	}
	return errors.Join(errs...)
}

// pollGroups takes what came for some of the groups.
func (r *receiver) pollGroups(sink Sink) int {
	packets := 0
	for range min(groupsAtOnce, len(r.groups)) {
		r.first = (r.first + 1) % len(r.groups)
		g := &r.groups[r.first]
		n, err := g.sock.Recv(r.batch, r.batch.Cap())
		if err != nil {
			continue // a loss
		}
		for k := range n {
			r.batch.Get(k, &r.d)
			packets += r.groupDatagram(sink, g.addr, &r.d)
		}
		r.reassembler.flush(sink)
	}
	return packets
}

// groupDatagram takes what the kernel delivered as one. What goes to a group is
// for all of its members, and says so: its destination queue pair is 0xFFFFFF.
func (r *receiver) groupDatagram(sink Sink, group netip.Addr, d *sys.Datagram) int {
	if !r.take(sink, group, d) {
		return 1
	}
	for rest := d.Bytes; len(rest) > 0; rest = rest[min(r.all.Segment, len(rest)):] {
		if destQP(rest) != wire.MulticastQP {
			sink.Drop(DropOther)
			return 1
		}
	}
	return r.packets(sink, &r.all)
}
