package link

// Multicast groups. Each process that has a member of a group opens sockets of its own
// for it, and the kernel gives each socket a copy of a datagram, whether that is from
// another host, from another process of this host, or from this very device. So no process
// passes multicast on, and a process that dies has left its groups.

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

// groupsAtOnce is how many group sockets one Poll reads at most, so that it spends most
// of its time on unicast. More of them take several polls.
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
	r := u.recv
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return undo(ErrClosed)
	}
	for _, s := range socks {
		r.groups = append(r.groups, groupEnd{group, s})
	}
	r.poller.Add(socks)
	return nil
}

// LeaveGroup undoes JoinGroup. Datagrams that have arrived and were not polled are lost.
func (u *UDP) LeaveGroup(group netip.Addr) error {
	var socks []*sys.UDPSocket
	r := u.recv
	r.mu.Lock()
	if !r.closed { // else Close closes the sockets
		r.groups = slices.DeleteFunc(r.groups, func(g groupEnd) bool {
			if g.addr == group {
				socks = append(socks, g.sock)
			}
			return g.addr == group
		})
		r.poller.Remove(socks)
	}
	r.mu.Unlock()
	var errs []error
	for _, s := range socks {
		errs = append(errs, s.LeaveGroup(), s.Close())
	}
	return errors.Join(errs...)
}

// pollGroups reads some of the group sockets, in rotation.
func (r *UDPReceiver) pollGroups(sink Sink) int {
	packets := 0
	for range min(groupsAtOnce, len(r.groups)) {
		r.first = (r.first + 1) % len(r.groups)
		g := &r.groups[r.first]
		n, err := g.sock.Recv(r.batch, r.batch.Cap())
		if err != nil {
			continue // as in pollSocket
		}
		for k := range n {
			r.batch.Get(k, &r.d)
			packets += r.groupDatagram(sink, g.addr, &r.d)
		}
		r.reassembler.flush(sink)
	}
	return packets
}

// groupDatagram takes a datagram that was sent to a group, and drops it if a packet in it
// has another destination queue pair than 0xFFFFFF, which means all members.
func (r *UDPReceiver) groupDatagram(sink Sink, group netip.Addr, d *sys.Datagram) int {
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
