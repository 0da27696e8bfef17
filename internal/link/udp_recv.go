package link

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// What arrives, top-down:
//
//  1. Poll takes datagrams from every address's socket, each up to 64 KiB that
//     the kernel may have put together of many packets;
//  2. datagram cuts them into packets again;
//  3. the reassembler (reassemble.go) checks the packets and makes trains of them.

// datagramSize is the longest datagram there is, rounded up.
const datagramSize = 64 << 10

// bigDatagram is from which length on a system call for each is worth its time.
const bigDatagram = 16 << 10

// receiver is the state of Poll.
type receiver struct {
	u *UDP

	mu          sync.Mutex // guards everything below; held by Poll, the sink's code included
	batch       *sys.RecvBatch
	pace        []pace // by end
	next        int    // the end to begin with
	reassembler reassembler
	d           sys.Datagram
	a           arrival
	peers       [peerSlots]peer
	all         Packets // what came together
	run         Packets // the part of it for one process
	headers     bool    // traffic class and hop limit are wanted
	groups      []groupEnd
	first       int // the group to begin with
	closed      bool
}

// pace is how fast a socket is read.
type pace struct {
	want int  // how many datagrams to ask for next
	full bool // so many came the last time
}

// peer is the checksum prefix of one sender's packets to one of our addresses:
// a cache, by hash.
type peer struct {
	from   netip.AddrPort
	to     netip.Addr
	pseudo wire.Pseudo
}

const peerSlots = 64

func (r *receiver) init(u *UDP) {
	r.u = u
	r.batch = sys.NewRecvBatch(u.cfg.RecvBuffers, datagramSize)
	r.pace = slices.Repeat([]pace{{want: 1}}, len(u.ends))
}

// Poll hands what has arrived to the sink, from one socket after another, each time
// beginning with the next: what one system call yields, or, of long datagrams, as many as
// the budget allows, one at a time. How many a call asks for adapts: after two that were
// full twice as many, after another what came. Lone packets so cost one call for one
// datagram each and are delivered at once; under load a call takes many.
func (u *UDP) Poll(sink Sink, budget int) int {
	r := &u.recv
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0
	}
	packets := 0
	for range u.ends {
		if packets >= budget {
			break
		}
		i := r.next
		r.next = (i + 1) % len(u.ends)
		packets += r.pollEnd(i, sink, budget-packets)
	}
	if len(r.groups) > 0 {
		packets += r.pollGroups(sink)
	}
	return packets
}

func (r *receiver) pollEnd(i int, sink Sink, budget int) (packets int) {
	end, pace := r.u.ends[i], &r.pace[i]
	if end.rx == nil {
		return 0
	}
	for {
		n, err := end.rx.Recv(r.batch, pace.want)
		if err != nil || n == 0 {
			// Nothing, or an error that an earlier packet of ours met on its way:
			// a loss, which the queue pair notices by itself.
			pace.want = 1
			pace.full = false
			return packets
		}
		for k := range n {
			r.batch.Get(k, &r.d)
			packets += r.datagram(sink, end.addr, &r.d)
		}
		r.reassembler.flush(sink)
		full := n == pace.want
		switch {
		case len(r.d.Bytes) >= bigDatagram:
			// One at a time, always into the same buffer, which the processor's
			// cache so has when the bytes are checked and copied.
			if pace.want = 1; full && packets < budget {
				continue
			}
		case !full:
			pace.want = n
		case pace.full:
			pace.want = min(2*n, r.batch.Cap())
		}
		pace.full = full
		return packets
	}
}

// datagram takes what the kernel delivered as one, and returns the number of
// packets that it was.
func (r *receiver) datagram(sink Sink, to netip.Addr, d *sys.Datagram) int {
	if !r.take(sink, to, d) {
		return 1
	}
	if r.u.cfg.Router != nil {
		return r.route(sink, &r.all)
	}
	return r.packets(sink, &r.all)
}

// take makes packets of a datagram, in r.all, unless it did not fit.
func (r *receiver) take(sink Sink, to netip.Addr, d *sys.Datagram) bool {
	if d.Truncated {
		sink.Drop(DropTruncated)
		return false
	}
	p := &r.all // field by field, which is faster than a literal; the ID stays 0
	p.From, p.To = d.From, to
	p.TClass, p.HopLimit = d.TClass, d.HopLimit
	p.Bytes, p.Segment = d.Bytes, d.Segment
	if p.Segment <= 0 {
		p.Segment = max(1, len(d.Bytes))
	}
	return true
}

// packets gives packets to the reassembler, and returns how many they were.
func (r *receiver) packets(sink Sink, p *Packets) int {
	ps := r.peer(p.From, p.To)
	a := &r.a
	a.from, a.to, a.tclass, a.hopLimit = p.From, p.To, p.TClass, p.HopLimit
	rest, n := p.Bytes, 0
	for {
		a.b = rest[:min(p.Segment, len(rest))]
		// A segmented send counts its identifications from 0, and usually
		// arrives whole.
		a.id = p.ID + uint16(n)
		if r.reassembler.packet(sink, ps, a) && r.u.cfg.Tap != nil {
			r.u.cfg.Tap.Packet(time.Now(), a.from, netip.AddrPortFrom(a.to, wire.RoCEPort),
				a.tclass, a.hopLimit, a.id, a.b)
		}
		n++
		rest = rest[len(a.b):]
		if len(rest) == 0 {
			return n
		}
	}
}

// route cuts what came into runs for one process each, takes its own in and
// passes the others on.
func (r *receiver) route(sink Sink, all *Packets) int {
	total := 0
	for rest, id := all.Bytes, uint16(0); ; {
		process, here := r.u.cfg.Router.Route(destQP(rest))
		first, n := id, min(all.Segment, len(rest))
		id++
		for n < len(rest) {
			p, h := r.u.cfg.Router.Route(destQP(rest[n:]))
			if h != here || !h && p != process {
				break
			}
			n += min(all.Segment, len(rest)-n)
			id++
		}
		run := all // as it is, if all of it is for one, as nearly always
		if n < len(all.Bytes) {
			r.run = *all
			run = &r.run
			run.ID, run.Bytes = first, rest[:n]
		}
		if here {
			total += r.packets(sink, run)
		} else {
			r.u.cfg.Router.Forward(process, run)
			total += int(id - first)
		}
		if rest = rest[n:]; len(rest) == 0 {
			return total
		}
	}
}

// destQP is the number in a packet's BTH, or 0, which is nobody's, if it is
// shorter than that.
func destQP(b []byte) uint32 {
	if len(b) < wire.BTHLen {
		return 0
	}
	return binary.BigEndian.Uint32(b[4:]) & 0xffffff
}

// Inject takes in packets that another process has passed on, and returns how
// many. Whoever polls may call it.
func (u *UDP) Inject(sink Sink, p *Packets) int {
	r := &u.recv
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || p.Segment <= 0 {
		return 0
	}
	n := r.packets(sink, p)
	r.reassembler.flush(sink)
	return n
}

// peer returns the checksum prefix for a sender.
func (r *receiver) peer(from netip.AddrPort, to netip.Addr) *wire.Pseudo {
	b := from.Addr().As16()
	h := uint32(from.Port()) ^ uint32(b[13])<<8 ^ uint32(b[14])<<4 ^ uint32(b[15])
	p := &r.peers[(h^h>>6)%peerSlots]
	if p.from != from || p.to != to {
		p.from, p.to = from, to
		p.pseudo = wire.NewPseudo(from.Addr(), to, from.Port(), wire.RoCEPort)
	}
	return &p.pseudo
}
