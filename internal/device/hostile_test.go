package device

// Packets that no honest peer sends, from a plain UDP socket to a device on a
// real one: malformed, truncated, replayed, forged. A device never crashes for
// them, changes no memory, counts each by its reason, and goes on serving honest
// peers.
//
// A stranger has an address of its own. An impostor has the peer's address, as
// any other program on the peer's host has, and another port.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// attacker sends packets to a device.
type attacker struct {
	t      testing.TB
	conn   *net.UDPConn
	to     netip.AddrPort
	pseudo wire.Pseudo
	sent   uint64
}

func newAttacker(t testing.TB, from, to netip.Addr) *attacker {
	t.Helper()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, conn) })
	port := uint16(conn.LocalAddr().(*net.UDPAddr).Port)
	return &attacker{t: t, conn: conn, to: netip.AddrPortFrom(to, wire.RoCEPort), pseudo: wire.NewPseudo(from, to, port, wire.RoCEPort)}
}

// raw sends bytes as they are.
func (a *attacker) raw(b []byte) {
	a.t.Helper()
	if _, err := a.conn.WriteToUDPAddrPort(b, a.to); err != nil {
		a.t.Fatal(err)
	}
	a.sent++
}

// seal appends the ICRC that the packet would have.
func (a *attacker) seal(b []byte) []byte {
	return a.pseudo.Start(0, len(b)+wire.ICRCLen).Header(b).Append(b)
}

// packet makes a packet with headers and payload, padded and sealed.
func (a *attacker) packet(h wire.Header, payload []byte) []byte {
	h.Pad = wire.PadFor(len(payload))
	if h.PKey == 0 {
		h.PKey = wire.DefaultPKey
	}
	b := append(h.Append(nil), payload...)
	return a.seal(append(b, make([]byte, h.Pad)...))
}

// scene is a connection between an honest peer and its victim, with a stranger
// and an impostor beside it. The victim's region lies in the middle of an arena.
type scene struct {
	honest, victim     *end
	stranger, impostor *attacker
	arena              []byte
	secret             provider.MR // a region of the victim's with no remote rights
}

const sceneMTU = 1024

func newScene(t testing.TB, x, y *Device) *scene {
	t.Helper()
	s := &scene{arena: make([]byte, 64<<10)}
	s.honest, s.victim = newEnd(t, x, ib.RC, 16<<10), newEnd(t, y, ib.RC, 64)
	closeAll(t, s.victim.mr)
	s.victim.buf = s.arena[24<<10:][: 16<<10 : 16<<10]
	s.victim.mr = must[provider.MR](t)(s.victim.pd.RegMR(s.victim.buf, allRemote))
	s.secret = must[provider.MR](t)(s.victim.pd.RegMR(s.arena[48<<10:][:4096:4096], ib.AccessLocalWrite))
	t.Cleanup(func() { s.honest.close(); closeAll(t, s.secret); s.victim.close() })
	s.honest.connect(s.victim)
	s.victim.connect(s.honest)
	s.stranger = newAttacker(t, nextAddr(), y.addrs[0])
	s.impostor = newAttacker(t, x.addrs[0], y.addrs[0])
	noiseInto(s.arena)
	s.exchange()
	return s
}

func noiseInto(b []byte) { copy(b, noise) }

// exchange is honest traffic, which must work.
func (s *scene) exchange() {
	h, v := s.honest, s.victim
	h.t.Helper()
	fill(h.buf[:4000], byte(len(h.buf)))
	h.post(h.write(v, 0, 4000))
	h.ok()
	if k := firstDifference(h.buf[:4000], v.buf[:4000]); k >= 0 {
		h.t.Errorf("honest traffic is wrong from byte %d on", k)
	}
}

// expected returns the PSN that the victim expects next.
func (s *scene) expected() wire.PSN {
	return wire.MakePSN(must[ib.QPAttr](s.victim.t)(s.victim.qp.Query()).RQPSN)
}

// write is the header of a forged WRITE that would be executed.
func (s *scene) write(n int) wire.Header {
	return wire.Header{Opcode: rc(wire.KindWrite, wire.Only), DestQP: s.victim.qp.Number(), PSN: s.expected(), AckReq: true,
		RETH: wire.RETH{VA: s.victim.mr.Addr() + 8000, RKey: s.victim.mr.RKey(), Len: uint32(n)}}
}

func rc(k wire.Kind, p wire.Pos) wire.Opcode {
	op, ok := wire.Op(wire.RC, k, p, wire.NoExtra)
	if !ok {
		panic("no such opcode")
	}
	return op
}

// settled waits until the victim's device has counted all that was sent, and
// returns the counters' growth.
func (s *scene) settled(before counts, packets int) counts {
	s.victim.t.Helper()
	var grown counts
	eventually(s.victim.t, fmt.Sprintf("%d packets are counted", packets), func() bool {
		grown = countsOf(s.victim.dev).since(before)
		n := grown["rx_packets"] + grown["drop_no_qp"] + grown["drop_transport"] + grown["drop_source_address"] +
			grown["drop_short"] + grown["drop_opcode"] + grown["drop_bad_icrc"] + grown["drop_version"] +
			grown["drop_bad_pkey"] + grown["drop_truncated"] + grown["drop_headers"]
		if grown["rx_packets"] == 0 {
			n += grown["drop_qp_state"]
		}
		return n >= uint64(packets)
	})
	return grown
}

// Packets that are dropped without an answer: the connection is not affected.
func TestHostileDropped(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	s := newScene(t, x, y)
	idle := newEnd(t, y, ib.RC, 64) // in RESET
	t.Cleanup(idle.close)
	datagrams := newEnd(t, y, ib.UD, 4096)
	t.Cleanup(datagrams.close)
	datagrams.openDatagrams(0x1111)
	datagrams.recv(ib.RecvWR{SGL: datagrams.sge(0, 4096)})
	ud, _ := wire.Op(wire.UD, wire.KindSend, wire.Only, wire.NoExtra)
	uc, _ := wire.Op(wire.UC, wire.KindWrite, wire.Only, wire.NoExtra)
	data := []byte("sixteen bytes...")

	with := func(change func(h *wire.Header)) []byte {
		h := s.write(len(data))
		change(&h)
		return s.impostor.packet(h, data)
	}
	flip := func(b []byte, bit int) []byte {
		b[bit/8] ^= 1 << (bit % 8)
		return b
	}
	short := func(n int) []byte { return s.impostor.seal(s.impostor.packet(s.write(len(data)), data)[:n]) }
	for _, tt := range []struct {
		name  string
		by    *attacker
		bytes []byte
		want  string
	}{
		{"nothing", s.impostor, nil, "drop_short"},
		{"one byte", s.impostor, []byte{0x0a}, "drop_short"},
		{"a header without a checksum", s.impostor, make([]byte, wire.BTHLen+wire.ICRCLen-1), "drop_short"},
		{"zeros", s.impostor, make([]byte, 64), "drop_bad_icrc"},
		{"cut off after the BTH", s.impostor, short(wire.BTHLen), "drop_short"},
		{"cut off within the RETH", s.impostor, short(wire.BTHLen + 8), "drop_short"},
		{"cut off within the RETH, by a byte", s.impostor, short(wire.BTHLen + 15), "drop_short"},
		{"not a multiple of four", s.impostor, short(wire.BTHLen + 16 + 3), "drop_headers"},
		{"damaged payload", s.impostor, flip(with(func(*wire.Header) {}), 8*(wire.BTHLen+16)+3), "drop_bad_icrc"},
		{"damaged checksum", s.impostor, flip(with(func(*wire.Header) {}), 8*(wire.BTHLen+16+16)), "drop_bad_icrc"},
		{"damaged address", s.impostor, flip(with(func(*wire.Header) {}), 8*wire.BTHLen+1), "drop_bad_icrc"},
		{"version 1", s.impostor, with(func(h *wire.Header) { h.Version = 1 }), "drop_version"},
		{"version 15", s.impostor, with(func(h *wire.Header) { h.Version = 15 }), "drop_version"},
		{"opcode without a meaning", s.impostor, with(func(h *wire.Header) { h.Opcode = 0x1f }), "drop_opcode"},
		{"RD", s.impostor, with(func(h *wire.Header) { h.Opcode = 0x4a }), "drop_opcode"},
		{"XRC to RC", s.impostor, with(func(h *wire.Header) { h.Opcode = 0xaa }), "drop_transport"},
		{"manufacturer's opcode", s.impostor, with(func(h *wire.Header) { h.Opcode = 0xca }), "drop_opcode"},
		{"other partition", s.impostor, with(func(h *wire.Header) { h.PKey = 0x8001 }), "drop_bad_pkey"},
		{"payload in a READ request", s.impostor, with(func(h *wire.Header) { h.Opcode = rc(wire.KindReadRequest, wire.Only) }), "drop_headers"},
		{"longer than a packet may be", s.impostor, make([]byte, 5000), "drop_truncated"},
		{"longest datagram", s.impostor, make([]byte, 65507), "drop_truncated"},
		{"longer than the largest MTU", s.impostor,
			s.impostor.packet(wire.Header{Opcode: rc(wire.KindSend, wire.Only), DestQP: s.victim.qp.Number()}, make([]byte, 4100)), "drop_truncated"},
		{"nobody's number", s.impostor, with(func(h *wire.Header) { h.DestQP ^= 0x5a5a5a }), "drop_no_qp"},
		{"management's number", s.impostor, with(func(h *wire.Header) { h.DestQP = 1 }), "drop_no_qp"},
		{"everybody's number", s.impostor, with(func(h *wire.Header) { h.DestQP = 0xffffff }), "drop_no_qp"},
		{"queue pair in RESET", s.impostor, with(func(h *wire.Header) { h.DestQP = idle.qp.Number() }), "drop_qp_state"},
		{"UC to RC", s.impostor, with(func(h *wire.Header) { h.Opcode = uc }), "drop_transport"},
		{"UD to RC", s.impostor, with(func(h *wire.Header) { h.Opcode = ud }), "drop_transport"},
		{"RC to UD", s.impostor, with(func(h *wire.Header) { h.DestQP = datagrams.qp.Number() }), "drop_transport"},
		{"from another address", s.stranger, s.stranger.packet(s.write(len(data)), data), "drop_source_address"},
		{"wrong Q_Key", s.stranger, s.stranger.packet(wire.Header{Opcode: ud, DestQP: datagrams.qp.Number(),
			DETH: wire.DETH{QKey: 0x1112, SrcQP: 5}}, data), "drop_bad_qkey"},
		{"datagram longer than the MTU's packets", s.stranger, s.stranger.packet(wire.Header{Opcode: ud, DestQP: datagrams.qp.Number(),
			DETH: wire.DETH{QKey: 0x1111, SrcQP: 5}}, make([]byte, 4100)), "drop_truncated"},
		{"answer to nothing", s.impostor, with(func(h *wire.Header) {
			h.Opcode, h.PSN, h.AETH = rc(wire.KindReadResponse, wire.Only), h.PSN.Add(100), wire.AETH{Syndrome: wire.AckNoCredits}
		}), "ghost_acks"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// On a busy machine the peer may have sent something twice, which is
			// still on its way.
			eventually(t, "repetitions have come", func() bool {
				return countsOf(y)["duplicate_requests"] >= countsOf(x)["retransmitted_packets"]
			})
			memory := bytes.Clone(s.arena)
			before := countsOf(y)
			tt.by.raw(tt.bytes)
			grown := s.settled(before, 1)
			if grown[tt.want] != 1 {
				t.Errorf("%v, want %s by 1", grown, tt.want)
			}
			delete(grown, tt.want)
			delete(grown, "rx_packets") // what a queue pair saw before it dropped it
			delete(grown, "rx_bytes")
			if len(grown) > 0 {
				t.Errorf("counted besides: %v", grown)
			}
			if k := firstDifference(s.arena, memory); k >= 0 {
				t.Errorf("byte %d of memory was changed", k)
			}
			s.exchange()
		})
	}
	if p, err := y.Port(1); err != nil || p.BadPKeyCntr != 1 || p.QKeyViolCntr != 1 {
		t.Errorf("port counters: %+v, %v", p, err)
	}
	if n, _ := datagrams.cq.Poll(make([]ib.WC, 1)); n != 0 {
		t.Error("a datagram was received")
	}
	noEvent(t, y)
}

// Packets that a connection has had, or might have some time, from an impostor:
// nothing is executed, and the connection survives.
func TestHostileReplayed(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	data := bytes.Repeat([]byte{0xbd}, 64)
	for _, tt := range []struct {
		name   string
		header func(s *scene) wire.Header
		data   []byte
		want   string
	}{
		{"old WRITE, new bytes", func(s *scene) wire.Header { h := s.write(64); h.PSN = h.PSN.Add(-1); return h }, data, "duplicate_requests"},
		{"very old WRITE", func(s *scene) wire.Header { h := s.write(64); h.PSN = h.PSN.Add(-8000000); return h }, data, "duplicate_requests"},
		{"old SEND", func(s *scene) wire.Header {
			h := s.write(0)
			h.Opcode, h.PSN = rc(wire.KindSend, wire.Only), h.PSN.Add(-1)
			return h
		}, data, "duplicate_requests"},
		{"old atomic that never was", func(s *scene) wire.Header {
			h := s.write(0)
			h.Opcode, h.PSN = rc(wire.KindFetchAdd, wire.Only), h.PSN.Add(-2)
			h.Atomic = wire.AtomicETH{VA: s.victim.mr.Addr(), RKey: s.victim.mr.RKey(), SwapAdd: 1}
			return h
		}, nil, "duplicate_requests"},
		{"WRITE of the future", func(s *scene) wire.Header { h := s.write(64); h.PSN = h.PSN.Add(3); return h }, data, "out_of_sequence"},
		{"WRITE of the far future", func(s *scene) wire.Header { h := s.write(64); h.PSN = h.PSN.Add(8000000); return h }, data, "out_of_sequence"},
		{"acknowledgement of the future", func(s *scene) wire.Header {
			return wire.Header{Opcode: rc(wire.KindAck, wire.Only), DestQP: s.victim.qp.Number(), PSN: wire.MakePSN(s.victim.psn).Add(9),
				AETH: wire.AETH{Syndrome: wire.AckNoCredits}}
		}, nil, "ghost_acks"},
		{"NAK of the past", func(s *scene) wire.Header {
			return wire.Header{Opcode: rc(wire.KindAck, wire.Only), DestQP: s.victim.qp.Number(), PSN: wire.MakePSN(s.victim.psn).Add(-9),
				AETH: wire.AETH{Syndrome: wire.NakRemoteAccess}}
		}, nil, "ghost_acks"},
		{"atomic answer to nothing", func(s *scene) wire.Header {
			return wire.Header{Opcode: rc(wire.KindAtomicAck, wire.Only), DestQP: s.victim.qp.Number(), PSN: wire.MakePSN(s.victim.psn),
				AETH: wire.AETH{Syndrome: wire.AckNoCredits}, Orig: 1}
		}, nil, "ghost_acks"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t, x, y)
			memory := bytes.Clone(s.arena)
			before := countsOf(y)
			s.impostor.raw(s.impostor.packet(tt.header(s), tt.data))
			if grown := s.settled(before, 1); grown[tt.want] != 1 {
				t.Errorf("%v, want %s by 1", grown, tt.want)
			}
			if k := firstDifference(s.arena, memory); k >= 0 {
				t.Errorf("byte %d of memory was changed", k)
			}
			for range 3 {
				s.exchange()
			}
		})
	}
}

// Requests with the expected PSN that are not allowed: they are refused, with the
// error that an honest peer would get, and touch no memory.
func TestHostileRefused(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	bystander := newScene(t, x, y)
	const access, invalid = "resp_remote_access_errors", "resp_invalid_request"
	data := bytes.Repeat([]byte{0xbd}, 64)
	full := bytes.Repeat([]byte{0xbd}, sceneMTU)
	reth := func(change func(s *scene, r *wire.RETH)) func(s *scene) wire.Header {
		return func(s *scene) wire.Header {
			h := s.write(len(data))
			change(s, &h.RETH)
			return h
		}
	}
	opcode := func(k wire.Kind, p wire.Pos) func(s *scene) wire.Header {
		return func(s *scene) wire.Header {
			h := s.write(len(data))
			h.Opcode = rc(k, p)
			return h
		}
	}
	read := func(change func(s *scene, r *wire.RETH)) func(s *scene) wire.Header {
		return func(s *scene) wire.Header {
			h := s.write(len(data))
			h.Opcode = rc(wire.KindReadRequest, wire.Only)
			change(s, &h.RETH)
			return h
		}
	}
	atomic := func(change func(s *scene, a *wire.AtomicETH)) func(s *scene) wire.Header {
		return func(s *scene) wire.Header {
			h := s.write(0)
			h.Opcode = rc(wire.KindFetchAdd, wire.Only)
			h.Atomic = wire.AtomicETH{VA: s.victim.mr.Addr(), RKey: s.victim.mr.RKey(), SwapAdd: 1}
			change(s, &h.Atomic)
			return h
		}
	}
	for _, tt := range []struct {
		name   string
		header func(s *scene) wire.Header
		data   []byte
		want   string
	}{
		{"wrong key", reth(func(_ *scene, r *wire.RETH) { r.RKey ^= 0x100 }), data, access},
		{"wrong tag of the key", reth(func(_ *scene, r *wire.RETH) { r.RKey ^= 1 }), data, access},
		{"key 0", reth(func(_ *scene, r *wire.RETH) { r.RKey = 0 }), data, access},
		{"key without remote rights", reth(func(s *scene, r *wire.RETH) { r.RKey, r.VA = s.secret.RKey(), s.secret.Addr() }), data, access},
		{"key of another domain", reth(func(_ *scene, r *wire.RETH) {
			r.RKey, r.VA = bystander.victim.mr.RKey(), bystander.victim.mr.Addr()
		}), data, access},
		{"one byte before", reth(func(s *scene, r *wire.RETH) { r.VA = s.victim.mr.Addr() - 1 }), data, access},
		{"one byte past", reth(func(s *scene, r *wire.RETH) { r.VA = s.victim.mr.Addr() + s.victim.mr.Length() - 63 }), data, access},
		{"far past", reth(func(_ *scene, r *wire.RETH) { r.VA += 1 << 40 }), data, access},
		{"address 0", reth(func(_ *scene, r *wire.RETH) { r.VA = 0 }), data, access},
		{"wrapping address", reth(func(_ *scene, r *wire.RETH) { r.VA = ^uint64(0) - 10 }), data, access},
		{"wrapping into the region", reth(func(_ *scene, r *wire.RETH) { r.VA = ^uint64(31) }), data, access},
		{"length of 2 GiB", reth(func(_ *scene, r *wire.RETH) { r.Len = 1 << 31 }), data, invalid},
		{"longest length", reth(func(_ *scene, r *wire.RETH) { r.Len = ^uint32(0) }), data, invalid},
		{"length above the region", reth(func(_ *scene, r *wire.RETH) { r.Len = 1 << 20 }), data, access},
		{"length below the payload", reth(func(_ *scene, r *wire.RETH) { r.Len = 63 }), data, invalid},
		{"length above the payload", reth(func(_ *scene, r *wire.RETH) { r.Len = 65 }), data, invalid},
		{"length 0 with a payload", reth(func(_ *scene, r *wire.RETH) { r.Len = 0 }), data, invalid},
		{"payload above the MTU", reth(func(_ *scene, r *wire.RETH) { r.Len = sceneMTU + 4 }), append(full[:sceneMTU:sceneMTU], 1, 2, 3, 4), invalid},
		{"WRITE middle without a first", opcode(wire.KindWrite, wire.Middle), full, invalid},
		{"WRITE last without a first", opcode(wire.KindWrite, wire.Last), data, invalid},
		{"SEND middle without a first", opcode(wire.KindSend, wire.Middle), full, invalid},
		{"SEND last without a first", opcode(wire.KindSend, wire.Last), data, invalid},
		{"WRITE first shorter than the MTU", opcode(wire.KindWrite, wire.First), data, invalid},
		{"SEND first shorter than the MTU", opcode(wire.KindSend, wire.First), data, invalid},
		{"READ with a wrong key", read(func(_ *scene, r *wire.RETH) { r.RKey ^= 1 }), nil, access},
		{"READ without the right", read(func(s *scene, r *wire.RETH) { r.RKey, r.VA = s.secret.RKey(), s.secret.Addr() }), nil, access},
		{"READ past the end", read(func(_ *scene, r *wire.RETH) { r.Len = 1 << 24 }), nil, access},
		{"READ of 4 GiB", read(func(_ *scene, r *wire.RETH) { r.Len = ^uint32(0) }), nil, invalid},
		{"READ around the end", read(func(_ *scene, r *wire.RETH) { r.VA = ^uint64(0) }), nil, access},
		{"atomic with a wrong key", atomic(func(_ *scene, a *wire.AtomicETH) { a.RKey ^= 1 }), nil, access},
		{"atomic that is not aligned", atomic(func(_ *scene, a *wire.AtomicETH) { a.VA += 4 }), nil, invalid},
		{"atomic past the end", atomic(func(s *scene, a *wire.AtomicETH) { a.VA += s.victim.mr.Length() }), nil, access},
		{"atomic at the last address", atomic(func(_ *scene, a *wire.AtomicETH) { a.VA = ^uint64(7) }), nil, access},
		{"atomic without the right", atomic(func(s *scene, a *wire.AtomicETH) { a.RKey, a.VA = s.secret.RKey(), s.secret.Addr()&^7 }), nil, access},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t, x, y)
			memory := bytes.Clone(s.arena)
			before := countsOf(y)
			s.impostor.raw(s.impostor.packet(tt.header(s), tt.data))
			s.settled(before, 1)
			eventually(t, "the NAK is sent", func() bool { return countsOf(y)["naks_sent"] > before["naks_sent"] })
			if grown := countsOf(y).since(before); grown[tt.want] != 1 || grown["naks_sent"] != 1 {
				t.Errorf("%v, want %s and naks_sent by 1", grown, tt.want)
			}
			if k := firstDifference(s.arena, memory); k >= 0 {
				t.Errorf("byte %d of memory was changed", k)
			}
			if st := s.victim.state(); st != ib.QPErr {
				t.Errorf("the queue pair is in %v", st)
			}
			bystander.exchange()
		})
	}
}

// A long message whose sender leaves it in the middle, or goes on with another
// operation or more than it announced.
func TestHostileMessages(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	full := bytes.Repeat([]byte{0xbd}, sceneMTU)
	type part struct {
		kind wire.Kind
		pos  wire.Pos
		n    int
	}
	for _, tt := range []struct {
		name  string
		parts []part
	}{
		{"WRITE, then SEND", []part{{wire.KindWrite, wire.First, sceneMTU}, {wire.KindSend, wire.Middle, sceneMTU}}},
		{"WRITE, then a new WRITE", []part{{wire.KindWrite, wire.First, sceneMTU}, {wire.KindWrite, wire.First, sceneMTU}}},
		{"WRITE longer than announced", []part{{wire.KindWrite, wire.First, sceneMTU}, {wire.KindWrite, wire.Middle, sceneMTU}, {wire.KindWrite, wire.Middle, sceneMTU}}},
		{"WRITE shorter than announced", []part{{wire.KindWrite, wire.First, sceneMTU}, {wire.KindWrite, wire.Last, 4}}},
		{"WRITE with an empty end", []part{{wire.KindWrite, wire.First, sceneMTU}, {wire.KindWrite, wire.Middle, sceneMTU}, {wire.KindWrite, wire.Last, 0}}},
		{"WRITE with a short middle", []part{{wire.KindWrite, wire.First, sceneMTU}, {wire.KindWrite, wire.Middle, sceneMTU - 4}}},
		{"SEND, then READ", []part{{wire.KindSend, wire.First, sceneMTU}, {wire.KindReadRequest, wire.Only, 0}}},
		{"SEND longer than the receive", []part{{wire.KindSend, wire.First, sceneMTU}, {wire.KindSend, wire.Middle, sceneMTU}, {wire.KindSend, wire.Middle, sceneMTU}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t, x, y)
			s.victim.recv(ib.RecvWR{ID: 1, SGL: s.victim.sge(4096, 2*sceneMTU)})
			h := s.write(2 * sceneMTU) // the announced length
			h.AckReq = false
			outside := bytes.Clone(s.arena)
			before := countsOf(y)
			for i, p := range tt.parts {
				h.Opcode = rc(p.kind, p.pos)
				s.impostor.raw(s.impostor.packet(h, full[:p.n]))
				h.PSN = h.PSN.Add(1)
				s.settled(before, i+1)
			}
			eventually(t, "the NAK is sent", func() bool { return countsOf(y)["naks_sent"] > before["naks_sent"] })
			if grown := countsOf(y).since(before); grown["resp_invalid_request"] != 1 || grown["naks_sent"] != 1 {
				t.Errorf("%v", grown)
			}
			if st := s.victim.state(); st != ib.QPErr {
				t.Errorf("the queue pair is in %v", st)
			}
			// What came before the mistake may have been written, nothing else.
			base := 24 << 10
			for _, r := range [][2]int{{0, base + 4096}, {base + 4096 + 2*sceneMTU, base + 8000}, {base + 8000 + 2*sceneMTU, len(s.arena)}} {
				if k := firstDifference(s.arena[r[0]:r[1]], outside[r[0]:r[1]]); k >= 0 {
					t.Errorf("byte %d of memory was changed", r[0]+k)
				}
			}
		})
	}
}

// A flood of packets that were valid before a few of their bits were changed,
// and sealed again, from a stranger and an impostor, while honest traffic goes
// on. Every one is accounted for, and no memory but what is open to the peer
// changes.
func TestHostileFlood(t *testing.T) {
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	honest := newScene(t, x, y)
	prey := newScene(t, x, y)
	uc := newEnd(t, y, ib.UC, 4096)
	t.Cleanup(uc.close)
	uc.connectTo(x.addrs[0], 77, 0, 0)
	ud := newEnd(t, y, ib.UD, 4096)
	t.Cleanup(ud.close)
	ud.openDatagrams(5)
	numbers := []uint32{prey.victim.qp.Number(), uc.qp.Number(), ud.qp.Number()}
	before, sent := countsOf(y), uint64(0)
	tx := countsOf(x)["tx_packets"]
	outside := bytes.Clone(prey.arena)
	for i := range lastingOps(3000, 30000) {
		a := prey.impostor
		if i%5 == 0 {
			a = prey.stranger
		}
		h := prey.write(rng.IntN(64))
		kind := rng.IntN(len(numbers))
		h.DestQP, h.PSN = numbers[kind], h.PSN.Add(max(rng.IntN(7)-3, 0)-max(rng.IntN(7)-4, 0))
		h.Opcode = wire.Opcode(rng.Uint32())
		if rng.IntN(8) != 0 { // mostly opcodes that exist, and for that queue pair
			h.Opcode = wire.Opcode(rng.IntN(0x18)) | wire.Opcode([]wire.Transport{wire.RC, wire.UC, wire.UD}[kind])<<5
		}
		h.Atomic = wire.AtomicETH{VA: h.RETH.VA, RKey: h.RETH.RKey + uint32(rng.IntN(2)), SwapAdd: rng.Uint64()}
		h.AETH.Syndrome, h.DETH.QKey, h.Imm = wire.Syndrome(rng.Uint32()), uint32(5+rng.IntN(2)), prey.victim.mr.RKey()
		b := a.packet(h, noise[:rng.IntN(1400)])
		b = b[:len(b)-wire.ICRCLen]
		for range max(rng.IntN(6)-3, 0) {
			b[rng.IntN(len(b))] ^= 1 << rng.IntN(8)
		}
		if rng.IntN(8) == 0 {
			b = b[:rng.IntN(len(b))]
		}
		if len(b) > 4 && rng.IntN(16) != 0 {
			b = a.seal(b)
		}
		a.raw(b)
		sent++
		if i%50 == 0 {
			honest.exchange()
			if st := prey.victim.state(); st == ib.QPErr { // it has been killed: raise it again
				must0(t, prey.victim.qp.Modify(&ib.QPAttr{State: ib.QPReset}, ib.QPMaskState))
				prey.victim.connect(prey.honest)
			}
		}
	}
	honest.exchange()
	prey.settled(before, 1)
	time.Sleep(20 * time.Millisecond)
	grown := countsOf(y).since(before)
	all := sent + countsOf(x)["tx_packets"] - tx
	var counted uint64
	for _, name := range []string{"rx_packets", "drop_no_qp", "drop_transport", "drop_source_address", "drop_short", "drop_opcode",
		"drop_bad_icrc", "drop_version", "drop_bad_pkey", "drop_truncated", "drop_headers", "drop_qp_state"} {
		counted += grown[name]
	}
	// A packet may count twice: as received, and as an answer in the wrong state.
	if counted < all || counted > all+grown["drop_qp_state"] {
		t.Errorf("%d packets are counted, %d were sent: %v", counted, all, grown)
	}
	for _, r := range [][2]int{{0, 24 << 10}, {40 << 10, len(outside)}} {
		if k := firstDifference(prey.arena[r[0]:r[1]], outside[r[0]:r[1]]); k >= 0 {
			t.Errorf("byte %d of memory, outside the region, was changed", r[0]+k)
		}
	}
	t.Logf("%v", grown)
}

// The same over IPv6, where the checksum has all of its bits.
func TestHostileIPv6(t *testing.T) {
	self := netip.IPv6Loopback()
	d := openIPv6(t)
	e := newEnd(t, d, ib.RC, 4096)
	t.Cleanup(e.close)
	e.connect(e)
	a := newAttacker(t, self, self)
	h := wire.Header{Opcode: rc(wire.KindWrite, wire.Only), DestQP: e.qp.Number(), PSN: wire.MakePSN(e.psn).Add(7),
		RETH: wire.RETH{VA: e.mr.Addr(), RKey: e.mr.RKey(), Len: 8}}
	good := a.packet(h, noise[:8])
	before := countsOf(d)
	a.raw(good)
	for bit := range 8 * len(good) {
		if bit/8 == 4 {
			continue // the byte that routers may change
		}
		bad := bytes.Clone(good)
		bad[bit/8] ^= 1 << (bit % 8)
		a.raw(bad)
		if bit%64 == 0 {
			e.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: e.sge(0, 100), RemoteAddr: e.mr.Addr() + 2000, RKey: e.mr.RKey()})
			e.ok()
		}
	}
	want := uint64(8*len(good) - 8)
	eventually(t, "all are counted", func() bool { return countsOf(d).since(before)["drop_bad_icrc"] >= want })
	grown := countsOf(d).since(before)
	if grown["drop_bad_icrc"] != want || grown["out_of_sequence"] != 1 {
		t.Errorf("%v, want %d bad checksums and one packet out of sequence", grown, want)
	}
	if got := binary.BigEndian.Uint64(e.buf); got != 0 {
		t.Errorf("memory was changed: %x", got)
	}
}

// openIPv6 opens a device at ::1, which there is only one of: the tests of other
// packages use it too, so it may take a while.
func openIPv6(t *testing.T) *Device {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		d, err := Open("", &provider.Config{Link: linkUDP, Addrs: []netip.Addr{netip.IPv6Loopback()}})
		switch {
		case err == nil:
			t.Cleanup(func() { closeAll(t, d) })
			return d
		case isErrno(err, syscall.EADDRNOTAVAIL) || isErrno(err, syscall.EAFNOSUPPORT):
			t.Skip("this machine has no IPv6 loopback address")
		case !isErrno(err, syscall.EADDRINUSE) || time.Now().After(deadline):
			t.Fatal(err)
		}
	}
}
