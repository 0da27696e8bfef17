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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
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

// allCounted waits until the victim's device has counted all that was sent, and
// returns the counters' growth.
func (s *scene) allCounted(before counts, packets int) counts {
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

// Packets that no queue pair executes, one for each counter: malformed ones, some for no queue
// pair or for another, some that the connection has had, or might have some time. No memory changes, and
// the connection survives. (internal/wire, internal/link and internal/qp, scripts 9.6 and
// 9.7.4, have every kind of them.)
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
	data := []byte("sixteen bytes...")

	with := func(change func(h *wire.Header)) func() []byte {
		return func() []byte {
			h := s.write(len(data))
			change(&h)
			return s.impostor.packet(h, data)
		}
	}
	same := func(*wire.Header) {}
	short := func(n int) func() []byte { return func() []byte { return s.impostor.seal(with(same)()[:n]) } }
	later := func(n int) func() []byte { return with(func(h *wire.Header) { h.PSN = h.PSN.Add(n) }) }
	answer := func(k wire.Kind, psn int, a wire.Syndrome) func() []byte {
		return func() []byte {
			return s.impostor.packet(wire.Header{Opcode: rc(k, wire.Only), DestQP: s.victim.qp.Number(),
				PSN: wire.MakePSN(s.victim.psn).Add(psn), AETH: wire.AETH{Syndrome: a}}, nil)
		}
	}
	for _, tt := range []struct {
		name   string
		packet func() []byte // of the impostor, or else of the stranger
		want   string
	}{
		{"nothing", func() []byte { return nil }, "drop_short"},
		{"end within the RETH", short(wire.BTHLen + 15), "drop_short"},
		{"not a multiple of four", short(wire.BTHLen + 16 + 3), "drop_headers"},
		{"damaged payload", func() []byte { b := with(same)(); b[wire.BTHLen+16] ^= 8; return b }, "drop_bad_icrc"},
		{"version 1", with(func(h *wire.Header) { h.Version = 1 }), "drop_version"},
		{"opcode without a meaning", with(func(h *wire.Header) { h.Opcode = 0x1f }), "drop_opcode"},
		{"other partition", with(func(h *wire.Header) { h.PKey = 0x8001 }), "drop_bad_pkey"},
		{"longest datagram", func() []byte { return make([]byte, 65507) }, "drop_truncated"},
		{"no queue pair's number", with(func(h *wire.Header) { h.DestQP ^= 0x5a5a5a }), "drop_no_qp"},
		{"multicast number", with(func(h *wire.Header) { h.DestQP = 0xffffff }), "drop_no_qp"},
		{"queue pair in RESET", with(func(h *wire.Header) { h.DestQP = idle.qp.Number() }), "drop_qp_state"},
		{"XRC to RC", with(func(h *wire.Header) { h.Opcode = 0xaa }), "drop_transport"},
		{"RC to UD", with(func(h *wire.Header) { h.DestQP = datagrams.qp.Number() }), "drop_transport"},
		{"from another address", func() []byte { return s.stranger.packet(s.write(len(data)), data) }, "drop_source_address"},
		{"wrong Q_Key", func() []byte {
			return s.stranger.packet(wire.Header{Opcode: ud, DestQP: datagrams.qp.Number(), DETH: wire.DETH{QKey: 0x1112, SrcQP: 5}}, data)
		}, "drop_bad_qkey"},
		{"old WRITE, new bytes", later(-1), "duplicate_requests"},
		{"WRITE of the future", later(3), "out_of_sequence"},
		{"answer to nothing", answer(wire.KindReadResponse, 100, wire.AckNoCredits), "ghost_acks"},
		{"NAK of the past", answer(wire.KindAck, -9, wire.NakRemoteAccess), "ghost_acks"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// The honest peer may have sent a packet twice, if its answer took long.
			eventually(t, "repetitions have come", func() bool {
				return countsOf(y)["duplicate_requests"] >= countsOf(x)["retransmitted_packets"]
			})
			memory := bytes.Clone(s.arena)
			before := countsOf(y)
			by := s.impostor
			if tt.want == "drop_source_address" || tt.want == "drop_bad_qkey" {
				by = s.stranger
			}
			by.raw(tt.packet())
			grown := s.allCounted(before, 1)
			if grown[tt.want] != 1 {
				t.Errorf("%v, want %s by 1", grown, tt.want)
			}
			delete(grown, tt.want)
			for name := range grown {
				if strings.HasPrefix(name, "drop_") || strings.HasPrefix(name, "resp_") {
					t.Errorf("counted besides: %v", grown)
				}
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

// Requests with the expected PSN that are not allowed: they are refused, with the error that
// an honest peer would get, and touch no memory outside the peer's region. (internal/qp,
// scripts 9.7.4.1 and 11.6.2, has every reason.)
func TestHostileRefused(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	bystander := newScene(t, x, y)
	const access, invalid = "resp_remote_access_errors", "resp_invalid_request"
	type part struct {
		kind   wire.Kind
		pos    wire.Pos
		n      int // bytes of payload
		change func(s *scene, h *wire.Header)
	}
	one := func(k wire.Kind, p wire.Pos, n int, change func(s *scene, h *wire.Header)) []part {
		return []part{{k, p, n, change}}
	}
	secret := func(s *scene, h *wire.Header) { h.RETH.RKey, h.RETH.VA = s.secret.RKey(), s.secret.Addr() }
	for _, tt := range []struct {
		name  string
		parts []part // of one message, whose announced length is that of the first, or two full packets
		want  string
	}{
		{"WRITE with a wrong key", one(wire.KindWrite, wire.Only, 64, func(_ *scene, h *wire.Header) { h.RETH.RKey ^= 0x100 }), access},
		{"WRITE without the right", one(wire.KindWrite, wire.Only, 64, secret), access},
		{"WRITE with the key of another domain", one(wire.KindWrite, wire.Only, 64, func(_ *scene, h *wire.Header) {
			h.RETH.RKey, h.RETH.VA = bystander.victim.mr.RKey(), bystander.victim.mr.Addr()
		}), access},
		{"WRITE around the end of the address space", one(wire.KindWrite, wire.Only, 64, func(_ *scene, h *wire.Header) { h.RETH.VA = ^uint64(31) }), access},
		{"WRITE of 4 GiB", one(wire.KindWrite, wire.Only, 64, func(_ *scene, h *wire.Header) { h.RETH.Len = ^uint32(0) }), invalid},
		{"payload above the MTU", one(wire.KindWrite, wire.Only, sceneMTU+4, nil), invalid},
		{"READ without the right", one(wire.KindReadRequest, wire.Only, 0, secret), access},
		{"READ past the end", one(wire.KindReadRequest, wire.Only, 0, func(_ *scene, h *wire.Header) { h.RETH.Len = 1 << 24 }), access},
		{"atomic without the right", one(wire.KindFetchAdd, wire.Only, 0, func(s *scene, h *wire.Header) {
			h.Atomic.RKey, h.Atomic.VA = s.secret.RKey(), s.secret.Addr()&^7
		}), access},
		{"atomic that is not aligned", one(wire.KindFetchAdd, wire.Only, 0, func(_ *scene, h *wire.Header) { h.Atomic.VA += 4 }), invalid},
		{"SEND without a first packet", one(wire.KindSend, wire.Last, 64, nil), invalid},
		{"WRITE, then SEND", []part{{wire.KindWrite, wire.First, sceneMTU, nil}, {wire.KindSend, wire.Middle, sceneMTU, nil}}, invalid},
		{"WRITE longer than announced", []part{{wire.KindWrite, wire.First, sceneMTU, nil}, {wire.KindWrite, wire.Middle, sceneMTU, nil},
			{wire.KindWrite, wire.Middle, sceneMTU, nil}}, invalid},
		{"SEND longer than the receive", []part{{wire.KindSend, wire.First, sceneMTU, nil}, {wire.KindSend, wire.Middle, sceneMTU, nil},
			{wire.KindSend, wire.Middle, sceneMTU, nil}}, invalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t, x, y)
			s.victim.recv(ib.RecvWR{ID: 1, SGL: s.victim.sge(4096, 2*sceneMTU)})
			h := s.write(tt.parts[0].n)
			if tt.parts[0].kind == wire.KindReadRequest {
				h.RETH.Len = 64
			}
			if len(tt.parts) > 1 {
				h.RETH.Len, h.AckReq = 2*sceneMTU, false
			}
			h.Atomic = wire.AtomicETH{VA: s.victim.mr.Addr(), RKey: s.victim.mr.RKey(), SwapAdd: 1}
			memory := bytes.Clone(s.arena)
			before := countsOf(y)
			for i, p := range tt.parts {
				h.Opcode = rc(p.kind, p.pos)
				if p.change != nil {
					p.change(s, &h)
				}
				s.impostor.raw(s.impostor.packet(h, bytes.Repeat([]byte{0xbd}, p.n)))
				h.PSN = h.PSN.Add(1)
				s.allCounted(before, i+1)
			}
			eventually(t, "the NAK is sent", func() bool { return countsOf(y)["naks_sent"] > before["naks_sent"] })
			if grown := countsOf(y).since(before); grown[tt.want] != 1 || grown["naks_sent"] != 1 {
				t.Errorf("%v, want %s and naks_sent by 1", grown, tt.want)
			}
			if st := s.victim.state(); st != ib.QPErr {
				t.Errorf("the queue pair is in %v", st)
			}
			// What came before the mistake may have been written, nothing else.
			base := 24 << 10
			written := [][2]int{}
			if len(tt.parts) > 1 {
				written = [][2]int{{base + 4096, base + 4096 + 2*sceneMTU}, {base + 8000, base + 8000 + 2*sceneMTU}}
			}
			at := 0
			for _, w := range append(written, [2]int{len(memory), len(memory)}) {
				if k := firstDifference(s.arena[at:w[0]], memory[at:w[0]]); k >= 0 {
					t.Errorf("byte %d of memory was changed", at+k)
				}
				at = w[1]
			}
			bystander.exchange()
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
	for i := range lastingOps(1000, 30000) {
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
		if sys.IsProbe(b) {
			continue // it is not counted: processes of this host look for each other by such packets
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
	var grown counts
	var all, counted uint64
	defer func() { t.Logf("%d sent, %d counted: %v", all, counted, grown) }()
	eventually(t, "all packets are counted", func() bool {
		grown, all, counted = countsOf(y).since(before), sent+countsOf(x)["tx_packets"]-tx, 0
		for _, name := range []string{"rx_packets", "drop_no_qp", "drop_transport", "drop_source_address", "drop_short", "drop_opcode",
			"drop_bad_icrc", "drop_version", "drop_bad_pkey", "drop_truncated", "drop_headers", "drop_qp_state"} {
			counted += grown[name]
		}
		return counted >= all
	})
	// A packet may count twice: as received, and as an answer in the wrong state.
	if counted > all+grown["drop_qp_state"] {
		t.Errorf("%d packets are counted, %d were sent: %v", counted, all, grown)
	}
	for _, r := range [][2]int{{0, 24 << 10}, {40 << 10, len(outside)}} {
		if k := firstDifference(prey.arena[r[0]:r[1]], outside[r[0]:r[1]]); k >= 0 {
			t.Errorf("byte %d of memory, outside the region, was changed", r[0]+k)
		}
	}
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
