package verbs

// AttachMcast makes a UD queue pair a member of a multicast group: from now on it
// receives each message to the group once, however often it is attached. The GID
// is an IP multicast address, as RoCE v2 has it: an IPv4 one (mapped, as
// [GIDFromAddr] makes it; 239.0.0.0/8 is for private use) or an IPv6 one (ff00::/8).
// The device joins the group on the network interfaces of its addresses of that IP
// version. See ibv_attach_mcast(3); there is no LID here, and no subnet manager to
// ask.
//
// To send to a group, make an address handle with its GID and name
// [MulticastQPN] as the RemoteQPN. The message reaches every member whose Q_Key is
// that of the request: in this process, in others that share the device, on other
// devices of this host and, over the network, on other hosts. A sender that is a
// member receives its own messages too. The header in front of what a member receives
// names the group as the destination. The address handle's HopLimit is how many
// routers the message may pass.
//
// So all members need the same Q_Key: set it with [QP.ToInit]. ([QP.Connect] gives
// each queue pair a Q_Key of its own.)
//
// A member must have a receive posted, as for every datagram; a group is neither
// reliable nor ordered. Linux's loopback interface carries groups of IPv4 alone.
//
//	group := verbs.GIDFromAddr(netip.MustParseAddr("239.7.7.7"))
//	err := qp.AttachMcast(group)
//
// Errors: EINVAL if the queue pair is nil, closed or not of type UD, the GID is not
// that of a multicast group, or the device has no address of its IP version; ENOMEM
// if one of the limits MaxMcastGrp, MaxMcastQPAttach and MaxTotalMcastQPAttach in
// [DeviceAttr] is reached; ENODEV if the device is closed; EMFILE and ENFILE if
// there is no descriptor left, ENOBUFS if the kernel has no room for a membership.
func (qp *QP) AttachMcast(group GID) error {
	if !qp.ok() {
		return invalid("attach_mcast", "nil queue pair")
	}
	return qp.p.AttachMcast(group)
}

// DetachMcast ends the membership, however often AttachMcast was called. Closing the
// queue pair ends it too (where ibv_destroy_qp(3) refuses), and so does the end of
// the process. See ibv_detach_mcast(3).
//
// Errors: EINVAL if the queue pair is nil, not of type UD or not attached to the
// group, or the GID is not that of a multicast group.
func (qp *QP) DetachMcast(group GID) error {
	if !qp.ok() {
		return invalid("detach_mcast", "nil queue pair")
	}
	return qp.p.DetachMcast(group)
}
