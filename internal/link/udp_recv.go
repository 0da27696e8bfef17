package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Receiving by UDP, top-down:
//
//  1. Poll takes datagrams from every address's socket, each up to 64 KiB, which the
//     kernel may have joined from many packets (GRO);
//  2. datagram splits them into packets again, and has the Router pass on those for
//     other processes;
//  3. the reassembler (reassemble.go) checks the packets and makes trains of them.

// datagramSize is the longest datagram there is, rounded up.
const datagramSize = 64 << 10

// bigDatagram is the length from which on a system call for each datagram is worth its
// time.
const bigDatagram = 16 << 10

// UDPReceiver reads some of a link's receiving sockets: the link's first receiver those of the
// first place and of multicast groups, each other receiver those of further places (sys.Place).
type UDPReceiver struct {
	u      *UDP
	poller *sys.Poller

	waiting sync.Mutex // guards the poller: Wait holds it, and close before it closes the poller

	mu          sync.Mutex // guards everything below; held by Poll, the sink's code included
	batch       *sys.RecvBatch
	socks       []rxSocket
	next        int // the socket that Poll begins with
	reassembler reassembler
	d           sys.Datagram
	a           arrival
	peers       [peerSlots]peer
	all         Packets // the packets of one datagram
	run         Packets // those of them for one process
	headers     bool    // WantHeaders was called
	groups      []groupEnd
	first       int // the group that was polled last
	closed      bool
}

// rxSocket is a receiving socket, and how many datagrams are read from it at once.
type rxSocket struct {
	addr netip.Addr
	sock *sys.UDPSocket
	want int  // how many datagrams the next call asks for
	full bool // the latest call got as many as it asked for
}

// peer is the checksum prefix of one sender's packets to one of our addresses:
// a cache, by hash.
type peer struct {
	from   netip.AddrPort
	to     netip.Addr
	pseudo wire.Pseudo
}

const peerSlots = 64

// newReceiver makes a receiver of sockets whose Wait also ends at the events. It reads as many
// datagrams at once as it has buffers.
func (u *UDP) newReceiver(buffers int, socks []rxSocket, events ...*sys.Event) (*UDPReceiver, error) {
	r := &UDPReceiver{u: u, socks: socks, batch: sys.NewRecvBatch(buffers, datagramSize)}
	var list []*sys.UDPSocket
	for i := range socks {
		list = append(list, socks[i].sock)
	}
	var err error
	r.poller, err = sys.NewPoller(list, events...)
	return r, err
}

// First returns the link's first receiver.
func (u *UDP) First() *UDPReceiver { return u.recv }

// NewReceiver returns a receiver that has no sockets yet: Listen or Adopt gives it some. It
// ends with the link.
func (u *UDP) NewReceiver() (*UDPReceiver, error) { return u.addReceiver(u.cfg.RecvBuffers) }

func (u *UDP) addReceiver(buffers int) (*UDPReceiver, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed.Load() {
		return nil, ErrClosed
	}
	r, err := u.newReceiver(buffers, nil)
	if err != nil {
		return nil, err
	}
	r.headers = u.headers
	u.more = append(u.more, r)
	return r, nil
}

// receivers returns the link's receivers: those that there were when it was called.
func (u *UDP) receivers() []*UDPReceiver {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]*UDPReceiver{u.recv}, u.more...)
}

// Poll hands what has arrived at the link's first receiver to the sink.
func (u *UDP) Poll(sink Sink, budget int) int { return u.recv.Poll(sink, budget) }

// Poll hands what has arrived to the sink. It reads one socket after another, and begins
// with the next one each time. From each it takes what one system call yields, or of long
// datagrams as many as the budget allows, one at a time. How many datagrams a call asks for
// adapts: after two full calls in a row twice as many, after one that was not full as many
// as came. So a lone packet costs one call for one datagram and is delivered at once, and
// under load a call takes many.
func (r *UDPReceiver) Poll(sink Sink, budget int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0
	}
	packets := 0
	for range r.socks {
		if packets >= budget {
			break
		}
		s := &r.socks[r.next]
		r.next = (r.next + 1) % len(r.socks)
		packets += r.pollSocket(s, sink, budget-packets)
	}
	if len(r.groups) > 0 {
		packets += r.pollGroups(sink)
	}
	return packets
}

func (r *UDPReceiver) pollSocket(s *rxSocket, sink Sink, budget int) (packets int) {
	for {
		n, err := s.sock.Recv(r.batch, s.want)
		if err != nil || n == 0 {
			// Nothing has come, or the kernel reports what happened to an earlier
			// packet of ours: a loss, which its queue pair finds by itself.
			s.want = 1
			s.full = false
			return packets
		}
		for k := range n {
			r.batch.Get(k, &r.d)
			packets += r.datagram(sink, s.addr, &r.d)
		}
		r.reassembler.flush(sink)
		full := n == s.want
		switch {
		case len(r.d.Bytes) >= bigDatagram:
			// One at a time, always into the same buffer: it is still in the
			// processor's cache when the bytes are checked and copied.
			if s.want = 1; full && packets < budget {
				continue
			}
		case !full:
			s.want = n
		case s.full:
			s.want = min(2*n, r.batch.Cap())
		}
		s.full = full
		return packets
	}
}

// datagram takes a datagram, which may be many packets, and returns how many it was.
func (r *UDPReceiver) datagram(sink Sink, to netip.Addr, d *sys.Datagram) int {
	if !r.take(sink, to, d) {
		return 1
	}
	if r.u.cfg.Router != nil {
		return r.route(sink, &r.all)
	}
	return r.packets(sink, &r.all)
}

// take sets r.all to the packets of a datagram. It reports false, and drops the datagram, if
// that was truncated or is no packet of a queue pair.
func (r *UDPReceiver) take(sink Sink, to netip.Addr, d *sys.Datagram) bool {
	if d.Truncated {
		sink.Drop(DropTruncated)
		return false
	}
	if sys.IsProbe(d.Bytes) { // another process looks for its place
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

// packets gives packets to the reassembler, and returns how many there were.
func (r *UDPReceiver) packets(sink Sink, p *Packets) int {
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

// route splits the packets of a datagram into runs for one process each, takes in those
// for this process and passes the others on. It returns how many packets there were.
func (r *UDPReceiver) route(sink Sink, all *Packets) int {
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
		run := all // nearly always, all packets are for one process
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

// destQP returns the destination queue pair in a packet's BTH, or 0, which no queue pair
// has, if the packet is shorter than a BTH.
func destQP(b []byte) uint32 {
	if len(b) < wire.BTHLen {
		return 0
	}
	return binary.BigEndian.Uint32(b[4:]) & 0xffffff
}

// Inject takes in packets that another process has passed on, and returns how many there
// were. Only the goroutine that polls
// the link's first receiver may call it.
func (u *UDP) Inject(sink Sink, p *Packets) int {
	r := u.recv
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || p.Segment <= 0 {
		return 0
	}
	n := r.packets(sink, p)
	r.reassembler.flush(sink)
	return n
}

// peer returns the checksum prefix for packets from a sender to one of our addresses.
func (r *UDPReceiver) peer(from netip.AddrPort, to netip.Addr) *wire.Pseudo {
	b := from.Addr().As16()
	h := uint32(from.Port()) ^ uint32(b[13])<<8 ^ uint32(b[14])<<4 ^ uint32(b[15])
	p := &r.peers[(h^h>>6)%peerSlots]
	if p.from != from || p.to != to {
		p.from, p.to = from, to
		p.pseudo = wire.NewPseudo(from.Addr(), to, from.Port(), wire.RoCEPort)
	}
	return &p.pseudo
}

// Wait blocks until something may have arrived.
func (r *UDPReceiver) Wait(d time.Duration) {
	r.waiting.Lock()
	defer r.waiting.Unlock()
	if r.u.closed.Load() {
		return
	}
	r.poller.Wait(d)
}

// Wake makes Wait return.
func (r *UDPReceiver) Wake() { r.poller.Wake() }

// wantHeaders makes the trains that arrive from now on carry fields of the IP header: see
// UDP.WantHeaders.
func (r *UDPReceiver) wantHeaders() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	r.headers = true
	for i := range r.socks {
		s := &r.socks[i]
		if err := s.sock.RecvHeader(); err != nil {
			return fmt.Errorf("link: headers of packets on %v: %w", s.addr, err)
		}
	}
	return nil // JoinGroup asks for them always
}

// overflows returns how many datagrams the kernel has dropped because Poll did not read them
// in time.
func (r *UDPReceiver) overflows() (sum uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0
	}
	for i := range r.socks {
		if n, err := r.socks[i].sock.Overflows(); err == nil {
			sum += uint64(n)
		}
	}
	for _, g := range r.groups {
		if n, err := g.sock.Overflows(); err == nil {
			sum += uint64(n)
		}
	}
	return sum
}

// shut makes Wait return and waits until no Poll is under way; none does anything afterwards.
func (r *UDPReceiver) shut() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.poller.Wake()
}

// close closes the sockets, once no Wait is under way. shut was called before.
func (r *UDPReceiver) close() error {
	r.waiting.Lock()
	defer r.waiting.Unlock()
	var errs []error
	if r.poller != nil {
		errs = append(errs, r.poller.Close())
	}
	for _, g := range r.groups {
		errs = append(errs, g.sock.Close())
	}
	for i := range r.socks {
		errs = append(errs, r.socks[i].sock.Close())
	}
	return errors.Join(errs...)
}
