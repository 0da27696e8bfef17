package cm

// Whatever arrives: FuzzReceive feeds a core MADs whose every byte is arbitrary, between calls of its
// program and ticks. Nothing may panic, and the tables agree with the states after each step.
//
// An input is records: a byte that chooses what happens, a byte that chooses the Conn it is about, and
// for a MAD its length in two bytes and its bytes.

import (
	"net/netip"
	"testing"
	"time"
)

const (
	opReceive = iota // a MAD as it is
	opForConn        // a MAD, after the ids of a Conn and its peer have been written into it
	opReply          // a right message of the peer of a Conn
	opTick
	opConnect
	opResolve
	opCall // of a Conn
	opEvents
	numOps
)

// messageNames gives the messages of toConn an order.
var messageNames = []string{"REQ", "REQ with its QPN", "MRA of REQ", "MRA of REP", "MRA of LAP", "REJ of REQ", "REJ 10 of REQ", "REJ of REP",
	"REJ", "REJ 10", "REJ 4", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP", "LAP", "APR"}

func record(op, which byte, mad []byte) []byte {
	b := []byte{op, which, byte(len(mad) >> 8), byte(len(mad))}
	return append(b, mad...)
}

func FuzzReceive(f *testing.F) {
	all := golden(f)
	var story []byte
	for _, attr := range []Attr{AttrREQ, AttrREP, AttrRTU, AttrDREQ, AttrDREP} {
		m := all[attr].mad
		story = append(story, record(opReceive, 0, m[:])...)
		story = append(story, record(opEvents, 0, nil)...)
		f.Add(record(opReceive, 0, m[:]))
		f.Add(append(record(opConnect, 0, nil), record(opForConn, 0, m[:])...))
	}
	f.Add(story)
	m := all[AttrREQ].mad
	accept := append(record(opReceive, 0, m[:]), record(opEvents, 0, nil)...)
	accept = append(accept, record(opCall, 0, nil)...)
	for i := range messageNames {
		f.Add(append(accept, append(record(opReply, byte(i)<<3, nil), record(opTick, 40, nil)...)...))
		f.Add(append(record(opConnect, 0, nil), append(record(opReply, byte(i)<<3, nil), record(opTick, 40, nil)...)...))
		f.Add(append(record(opResolve, 0, nil), record(opReply, byte(i)<<3, nil)...))
	}
	f.Fuzz(fuzzReceive)
}

func fuzzReceive(t *testing.T, in []byte) {
	s := newSide(t, "10.0.0.2", guidB, 3, func(c *Config) { c.MaxPending, c.MaxTimeWait = 3, 2 })
	peer := netip.MustParseAddr("10.0.0.1")
	verdicts := []Verdict{{Listener: listener}, {Reject: RejectInvalidGID}, {}, {Reject: RejectConsumer}}
	asked, backlog := 0, &Backlog{Max: 2}
	s.listen = func(q *Request) Verdict {
		asked++
		if len(q.Params.Private) == 0 || q.SIDR && asked%2 == 1 {
			return Verdict{Listener: listener}
		}
		v := verdicts[q.Params.Private[0]&3]
		if v.Listener != nil && q.Params.Private[0]&4 != 0 {
			v.Backlog = backlog
		}
		return v
	}
	var conns []*Conn
	now := Time(0)
	for step := 0; len(in) >= 4 && step < 300; step++ {
		op, which := in[0], in[1]
		mad := in[4:]
		mad = mad[:min(len(mad), int(in[2])<<8|int(in[3]))]
		in = in[4+len(mad):]
		mad = append([]byte(nil), mad...)
		n := (*Conn)(nil)
		if len(conns) > 0 {
			n = conns[int(which&7)%len(conns)]
		}
		switch op % numOps {
		case opReceive:
			recode(t, mad)
			s.Receive(now, peer, s.addr, mad)
		case opForConn:
			if n != nil && len(mad) >= headerLen+8 {
				be.PutUint32(mad[headerLen:], n.remoteID)
				be.PutUint32(mad[headerLen+4:], n.localID)
			}
			s.Receive(now, peer, s.addr, mad)
		case opReply:
			if n != nil {
				s.Receive(now, peer, s.addr, toConn(n)[messageNames[int(which>>3)%len(messageNames)]])
			}
		case opTick:
			now += time.Millisecond << (which & 31)
			s.Tick(now)
			if t0, ok := s.Deadline(); ok && t0 <= now {
				t.Fatal("a timer that is due is left")
			}
		case opConnect:
			if n, err := s.Connect(now, service, []Transport{RC, UC, XRC}[which%3], &Path{Local: s.addr, Remote: peer, LifeTime: which}, nil,
				&Params{QPN: uint32(which), Private: mad}, int(which)); err == nil {
				conns = append(conns, n)
			}
		case opResolve:
			if n, err := s.Resolve(now, udpPort, &Path{Local: s.addr, Remote: peer}, nil, mad, int(which)); err == nil {
				conns = append(conns, n)
			}
		case opCall:
			if n != nil {
				fuzzCall(n, now, which>>3, mad)
			}
		case opEvents:
			for e, ok := s.NextEvent(); ok; e, ok = s.NextEvent() {
				if e.Conn.closed {
					t.Fatalf("%v after Close", e.Type)
				}
				if e.Type == EventRequest || e.Type == EventSIDRRequest {
					conns = append(conns, e.Conn)
				}
			}
		}
		for m, ok := s.NextMAD(); ok; m, ok = s.NextMAD() {
			if _, _, _, ok := Classify(m.MAD[:]); !ok {
				t.Fatalf("sent %x", m.MAD)
			}
		}
		s.check(t)
		if backlog.Len() > backlog.Max {
			t.Fatalf("%d requests in the backlog", backlog.Len())
		}
		for _, n := range conns {
			l, ok := n.Last()
			if words, said := LastWords(&l, 1); ok != said && n.state != Established {
				t.Fatalf("last words of %v: %v, %x", n.state, ok, words)
			}
		}
	}
	for _, n := range conns {
		n.Close(now)
	}
	for e, ok := s.NextEvent(); ok; e, ok = s.NextEvent() {
		e.Conn.Close(now)
	}
	s.Tick(now + 1000*time.Hour)
	s.pump()
	s.out = nil
	s.check(t)
	s.empty()
}

func fuzzCall(n *Conn, now Time, which byte, private []byte) {
	switch which % 8 { // errors are as good as success here
	case 0:
		_ = n.Accept(now, &Params{QPN: 7, Private: private})
	case 1:
		_ = n.Establish(now)
	case 2:
		_ = n.Reject(now, RejectConsumer, nil, private)
	case 3:
		_ = n.Disconnect(now)
	case 4:
		_ = n.Confirm(now)
	case 5:
		_ = n.AnswerSIDR(now, &SIDRReply{Private: private})
	case 6:
		n.Close(now)
	case 7:
		n.Seen()
	}
}

// recode demands that a message that was parsed and written is the same when that is done again.
func recode(t *testing.T, mad []byte) {
	once, ok := reencode(mad)
	if !ok {
		return
	}
	if twice, _ := reencode(once[:]); twice != once {
		t.Fatalf("read  %x\nonce  %x\ntwice %x", mad, once, twice)
	}
}
