package cm

import "testing"

// check demands that the tables of a core agree with the states of its Conns.
func (c *Core) check(t testing.TB) {
	t.Helper()
	bad := func(n *Conn, what string) {
		t.Helper()
		t.Fatalf("%v, id %#x: %s: %+v", n.state, n.localID, what, n)
	}
	pending := 0
	waits := func(n *Conn) bool {
		if n.backlog != nil {
			return n.pool == n.backlog.pool(n.request.Again) && n.pool.conns[n.slot] == n
		}
		pending++
		return n.pool == &c.pending
	}
	for id, n := range c.conns {
		if id != n.localID || n.state == Idle || n.closed {
			bad(n, "among the Conns")
		}
		switch n.state {
		case ReqRcvd, MRAReqSent:
			if !waits(n) || n.timer != 0 || n.msg != nil {
				bad(n, "waits for the program")
			}
		case SIDRReqRcvd:
			if !waits(n) || n.timer != 0 || c.sidr[sidrKey{n.path.Remote, n.remoteID}] != n {
				bad(n, "waits for the program")
			}
		case ReqSent, MRAReqRcvd, RepSent, MRARepRcvd, DreqSent, SIDRReqSent:
			if n.msg == nil || n.timer == 0 || n.pool != nil {
				bad(n, "waits for the peer")
			}
		case TimeWait:
			if n.msg != nil || n.timer == 0 || n.pool != nil {
				bad(n, "in time wait")
			}
		case RepRcvd, MRARepSent, Established, DreqRcvd:
			if n.msg != nil || n.timer != 0 || n.pool != nil {
				bad(n, "waits for the program")
			}
		default:
			bad(n, "no such state")
		}
		switch n.state {
		case ReqSent, MRAReqRcvd, SIDRReqSent:
			if n.remoteID != 0 {
				bad(n, "knows a peer")
			}
		case TimeWait, SIDRReqRcvd:
		default:
			if c.byID[remoteKey{n.guid, n.remoteID}] != n || c.byQPN[remoteKey{n.guid, n.remoteQPN}] != n {
				bad(n, "is not found by its peer")
			}
		}
	}
	if len(c.pending.conns) != pending || pending > c.cfg.MaxPending || len(c.waiting.conns) > c.cfg.MaxTimeWait {
		t.Fatalf("%d in the pool, %d pending, %d waiting", len(c.pending.conns), pending, len(c.waiting.conns))
	}
	for _, p := range []*pool{&c.pending, &c.waiting} {
		for i, n := range p.conns {
			if n.slot != i || n.pool != p {
				bad(n, "place in the pool")
			}
		}
	}
	for _, n := range c.waiting.conns {
		if n.state != TimeWait || !n.closed || n.timer == 0 {
			bad(n, "among the closed ones")
		}
	}
	live := func(n *Conn) bool { return c.conns[n.localID] == n || n.pool == &c.waiting }
	for key, n := range c.byID {
		if key != (remoteKey{n.guid, n.remoteID}) || !live(n) {
			bad(n, "in byID")
		}
	}
	for key, n := range c.byQPN {
		if key != (remoteKey{n.guid, n.remoteQPN}) || !live(n) || n.state == TimeWait {
			bad(n, "in byQPN")
		}
	}
	for key, n := range c.sidr {
		if key != (sidrKey{n.path.Remote, n.remoteID}) || n.state != SIDRReqRcvd {
			bad(n, "in sidr")
		}
	}
	for i, n := range c.timers {
		if n.timer != i+1 || !live(n) || i > 0 && c.timers[(i-1)/2].deadline > n.deadline {
			bad(n, "in timers")
		}
	}
	last := (*queued)(nil)
	for q := c.head; q != nil; q = q.next {
		if q.prev != last {
			t.Fatalf("queue of events: %+v", q)
		}
		last = q
	}
	if c.tail != last {
		t.Fatalf("end of the queue of events: %+v", c.tail)
	}
}
