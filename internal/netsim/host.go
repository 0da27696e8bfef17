package netsim

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// What hosts are like.
const (
	mtu      = 4096
	overhead = 14 + 20 + 8 + 12 + 16 + 4 // bytes of headers around the payload
	wake     = 3 * time.Microsecond      // until a host looks at what has arrived
	window   = 128                       // packets, as package link has it
	depth    = 32                        // messages under way
	reads    = 16                        // READs under way
	keptFor  = 64                        // most pieces that a host joins
)

// piece is one packet of a train.
type piece struct {
	t *train.Train
}

// host is a machine with one queue pair.
type host struct {
	s     *sim
	out   func(*packet) // its way into the network
	q     *qp.QP
	peer  *host
	addr  netip.Addr
	table *mem.Table
	cq    *queue.CQ
	recv  *queue.Recv
	reg   *mem.Region

	op       ib.Opcode // what its program posts; the program posts nothing if size is 0
	size     int
	posted   int
	done     int64 // bytes of messages that have completed
	failed   error
	arrived  []*packet
	waking   bool
	deadline Time
}

// payload is what every message consists of: nobody looks at it.
var payload = make([]byte, train.MaxBytes)

// newHost makes a host, whose queue pair is connected by connect.
func newHost(s *sim, n int, out func(*packet)) (*host, error) {
	h := &host{s: s, out: out, addr: netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)})}
	h.table = mem.NewTable(mem.TableConfig{MaxRegions: 8, Seed: uint64(n)})
	h.cq, h.recv = queue.NewCQ(4096), queue.NewRecv(1024, 1)
	backing, err := mem.NewHostBytes(make([]byte, 4<<20), ib.AccessLocalWrite|ib.AccessRemote, ib.LockOff)
	if err != nil {
		return nil, err
	}
	if h.reg, err = h.table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, IOVA: 1 << 28, Length: 4 << 20, Backing: backing}); err != nil {
		return nil, err
	}
	h.q = qp.New(qp.Config{Type: ib.RC, Number: uint32(16 + n), PD: 1,
		Cap:    ib.QPCap{MaxSendWR: 1024, MaxRecvWR: 1024, MaxSendSGE: 1, MaxRecvSGE: 1},
		SendCQ: h.cq, RecvCQ: queue.NewCQ(1 << 16), Recv: h.recv, RecvPD: 1, Table: h.table,
		Event: func(e ib.EventType) { h.failed = fmt.Errorf("host %d: %v", n, e) }})
	return h, nil
}

// connect connects the queue pairs of two hosts.
func connect(a, b *host) error {
	a.peer, b.peer = b, a
	for _, h := range []*host{a, b} {
		path := &qp.Path{Window: window, Selective: true,
			Flow:    &train.Flow{Src: h.addr, Dst: h.peer.addr},
			Credits: qp.NewControlled(4<<24, 4*window*mtu, mtu).Costing(1 << 24 / window)}
		steps := []struct {
			a    ib.QPAttr
			mask ib.QPAttrMask
			path *qp.Path
		}{
			{ib.QPAttr{State: ib.QPInit, Port: 1, Access: ib.AccessRemote}, ib.QPMaskPKeyIndex | ib.QPMaskPort | ib.QPMaskAccess, nil},
			{ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: ib.GIDFromAddr(h.peer.addr)}, PathMTU: ib.MTU4096, DestQPN: h.peer.q.Number, MaxDestRDAtomic: reads, MinRNRTimer: 1},
				ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN | ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer, path},
			{ib.QPAttr{State: ib.QPRTS, Timeout: 16, RetryCnt: 7, RNRRetry: 7, MaxRDAtomic: reads},
				ib.QPMaskSQPSN | ib.QPMaskTimeout | ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic, nil},
		}
		for i := range steps {
			if err := h.q.Modify(&steps[i].a, steps[i].mask|ib.QPMaskState, steps[i].path, h.s.now); err != nil {
				return err
			}
		}
	}
	return nil
}

// start starts the host's program.
func (h *host) start() {
	h.postReceives()
	h.peer.postReceives()
	h.step()
}

func (h *host) postReceives() {
	for h.recv.Len() < 512 {
		h.recv.Post([]ib.RecvWR{{SGL: []ib.SGE{{Addr: h.reg.IOVA(), Length: 4 << 20, LKey: h.reg.Key()}}}})
	}
}

// program completes and posts messages.
func (h *host) program() {
	var wc [16]ib.WC
	for n := h.cq.Poll(wc[:]); n > 0; n = h.cq.Poll(wc[:]) {
		for i := range n {
			if wc[i].Status != ib.WCSuccess {
				h.failed = fmt.Errorf("%v: %v", h.addr, wc[i].Status)
				return
			}
			h.done += int64(h.size)
			h.posted--
		}
	}
	if h.recv.Len() < 256 {
		h.postReceives()
	}
	for h.size > 0 && h.posted < depth && h.failed == nil {
		h.post()
	}
}

func (h *host) post() {
	wr := ib.SendWR{Op: h.op, Flags: ib.SendSignaled, RemoteAddr: h.peer.reg.IOVA(), RKey: h.peer.reg.Key(),
		SGL: []ib.SGE{{Addr: h.reg.IOVA(), Length: uint32(h.size), LKey: h.reg.Key()}}}
	if _, err := h.q.PostSend([]ib.SendWR{wr}); err != nil {
		h.failed = err
		return
	}
	h.posted++
}

// step lets the program and the queue pair act.
func (h *host) step() {
	h.program()
	for h.q.Pending() {
		t := new(train.Train)
		if !h.q.Pull(t, h.s.now) {
			break
		}
		h.transmit(t)
		h.q.Sent(t, h.s.now)
	}
	h.program()
	if d := h.q.Deadline(); d != 0 && (h.deadline == 0 || d < h.deadline) {
		h.deadline = d
		h.s.at(d, h.tick)
	}
}

func (h *host) tick() {
	h.deadline = 0
	if d := h.q.Deadline(); d != 0 && d <= h.s.now {
		h.q.Tick(h.s.now)
	}
	h.step()
}

// transmit cuts a train into packets.
func (h *host) transmit(t *train.Train) {
	t.From, t.To = h.addr, h.peer.addr
	own := t.Kind == wire.KindGaps || t.Kind == wire.KindCNP
	if t.Len > 0 && !own {
		t.Payload = mem.List{}
	}
	for i := range t.N {
		c := *t
		last := i == t.N-1
		c.PSN, c.N = t.PSN.Add(i), 1
		c.Start, c.End = t.Start && i == 0, t.End && last
		if t.Len > 0 {
			c.Len = min(mtu, t.Len-i*mtu)
		}
		c.AckReq = t.AckReq && last
		if !own && c.Len > 0 {
			c.Payload = mem.List{Raw: [][]byte{payload[:c.Len]}}
		} else if own {
			b := make([]byte, t.Len)
			mem.Copy(&mem.List{Raw: [][]byte{b}}, &t.Payload, uint64(t.Len), false)
			c.Payload = mem.List{Raw: [][]byte{b}}
		}
		h.out(&packet{size: c.Len + overhead, capable: t.Kind != wire.KindCNP, piece: piece{&c}, arrive: h.peer.arrive})
	}
}

// arrive takes a packet from the network. The host looks at it a little later.
func (h *host) arrive(p *packet) {
	h.arrived = append(h.arrived, p)
	if !h.waking {
		h.waking = true
		h.s.at(h.s.now+wake, h.receive)
	}
}

// receive joins the packets that have arrived, and gives them to the queue pair.
func (h *host) receive() {
	h.waking = false
	in := h.arrived
	h.arrived = nil
	for len(in) > 0 {
		t, n := in[0].t, 1
		t.Marked = marks(in[0])
		for ; n < len(in) && n < keptFor && joins(t, in[n].t); n++ {
			o := in[n].t
			t.N++
			t.Len += o.Len
			t.MTU = mtu
			t.End, t.AckReq = o.End, t.AckReq || o.AckReq
			if o.End {
				t.Extra, t.Imm, t.AETH = o.Extra, o.Imm, o.AETH
			}
			t.Payload.Raw = append(t.Payload.Raw, o.Payload.Raw...)
			t.Marked += marks(in[n])
		}
		h.q.Receive(t, h.s.now)
		in = in[n:]
	}
	h.step()
}

func marks(p *packet) int {
	if p.marked {
		return 1
	}
	return 0
}

// joins reports whether a packet continues a train.
func joins(t, o *train.Train) bool {
	return !t.End && !o.Start && t.Kind == o.Kind && t.Hints == o.Hints && o.PSN == t.PSN.Add(t.N) &&
		t.Len == t.N*mtu && o.Len > 0 && (t.Kind == wire.KindSend || t.Kind == wire.KindWrite || t.Kind == wire.KindReadResponse)
}
