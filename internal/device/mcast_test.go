package device

// Multicast within a process: on the loop link, by packets, and between devices of
// both kinds. Other processes and hosts are in package interop.

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/wire"
)

const mcastKey = 0x1ee7

// testGroup returns a group that no other test uses: part of it is the process's
// number.
func testGroup() ib.GID {
	a := nextAddr().As4()
	return ib.GIDFromAddr(netip.AddrFrom4([4]byte{239, a[1], a[2], a[3]}))
}

// newMember makes an end that takes datagrams, with receives posted.
func newMember(t testing.TB, d *Device) *end {
	t.Helper()
	e := newEnd(t, d, ib.UD, 64<<10)
	t.Cleanup(e.close)
	e.openDatagrams(mcastKey)
	for i := range 8 {
		e.recv(ib.RecvWR{ID: uint64(i), SGL: e.sge(32<<10+i*1024, 1024)})
	}
	return e
}

// sendGroup sends a message to a group and waits until it has left.
func (e *end) sendGroup(group ib.GID, text string) {
	e.t.Helper()
	ah := must[*ib.AH](e.t)(e.pd.CreateAH(ib.AHAttr{DGID: group, TrafficClass: 0x48, HopLimit: 7}))
	defer closeAll(e.t, ah)
	e.post(ib.SendWR{ID: 99, Op: ib.OpSend, Inline: []byte(text), AH: ah, RemoteQPN: ib.MulticastQPN, RemoteQKey: mcastKey})
}

// hear waits for a message to the group and checks it; completions of sends are
// passed over.
func (e *end) hear(from *end, group ib.GID, text string) {
	e.t.Helper()
	for {
		wc := e.ok()
		if wc.Op == ib.WCSend {
			continue
		}
		b := e.buf[32<<10+int(wc.ID)*1024:][:wc.ByteLen]
		want := wire.AppendGRH(nil, from.dev.addrs[0], group.Addr(), 0x48, 7, wire.BTHLen+wire.HasDETH.Len()+len(text)+int(wire.PadFor(len(text)))+wire.ICRCLen)
		if wc.SrcQP != from.qp.Number() || string(b[ib.GRHLength:]) != text || !bytes.Equal(b[:ib.GRHLength], want) {
			e.t.Fatalf("%+v, %q, header %x, want %q from %#x, header %x", wc, b[ib.GRHLength:], b[:ib.GRHLength], text, from.qp.Number(), want)
		}
		e.recv(ib.RecvWR{ID: wc.ID, SGL: e.sge(32<<10+int(wc.ID)*1024, 1024)})
		return
	}
}

// hearNothing checks that nothing but completions of sends waits, when what was
// sent last has arrived at another member.
func (e *end) hearNothing() {
	e.t.Helper()
	wcs := make([]ib.WC, 8)
	for range 100 {
		n := must[int](e.t)(e.cq.Poll(wcs))
		for _, wc := range wcs[:n] {
			if wc.Op != ib.WCSend {
				e.t.Fatalf("unexpected: %+v", wc)
			}
		}
	}
}

// joined reports whether a process in this network namespace has joined a group.
func joined(t testing.TB, group ib.GID) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/net/igmp")
	if err != nil {
		t.Fatal(err)
	}
	a := group.Addr().As4()
	return strings.Contains(string(b), fmt.Sprintf("%02X%02X%02X%02X", a[3], a[2], a[1], a[0]))
}

func TestMulticast(t *testing.T) {
	for _, tt := range []struct {
		name    string
		x, y    string
		packets bool
	}{
		{"loop", linkLoop, linkLoop, false},
		{"default", "", "", true},
		{"udp", linkUDP, linkUDP, true},
		{"default to loop", "", linkLoop, true},
		{"loop to default", linkLoop, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: tt.x}), openDevice(t, provider.Config{Link: tt.y})
			group, other := testGroup(), testGroup()
			a, a2, b, c := newMember(t, x), newMember(t, x), newMember(t, y), newMember(t, y)
			for _, e := range []*end{a, a2, b} {
				must0(t, e.qp.AttachMcast(group))
			}
			must0(t, b.qp.AttachMcast(group)) // still one copy
			must0(t, c.qp.AttachMcast(other))
			if tt.packets && !joined(t, group) {
				t.Error("the group was not joined")
			}
			// One from each device, members and not: every member of the group gets
			// it, the sender too.
			for i, from := range []*end{a, c, b} {
				if from != a && tt.x != tt.y {
					continue // the other direction is a case of its own
				}
				text := fmt.Sprintf("message %d", i)
				from.sendGroup(group, text)
				for _, e := range []*end{a, a2, b} {
					e.hear(from, group, text)
				}
				c.hearNothing()
			}
			for _, e := range []*end{a, a2, b} {
				e.hearNothing() // no second copy
			}
			a.sendGroup(other, "other")
			c.hear(a, other, "other")

			must0(t, b.qp.DetachMcast(group))
			wantErrno(t, "detach twice", b.qp.DetachMcast(group), syscall.EINVAL)
			a.sendGroup(group, "without b")
			a.hear(a, group, "without b")
			a2.hear(a, group, "without b")
			b.hearNothing()
			closeAll(t, a.qp, a2.qp)
			if joined(t, group) {
				t.Error("the group was not left")
			}
			if n := x.counts.mcasts + y.counts.mcasts; n != 1 {
				t.Errorf("%d attachments are counted, want 1", n)
			}
		})
	}
}

// A device that may not send packets to the network still reaches its own host.
func TestMulticastLocal(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkLocal}), openDevice(t, provider.Config{Link: linkLocal})
	group := testGroup()
	a, b := newMember(t, x), newMember(t, y)
	must0(t, b.qp.AttachMcast(group))
	a.sendGroup(group, "near")
	wc := b.ok()
	got := b.buf[32<<10+int(wc.ID)*1024:][:wc.ByteLen]
	if string(got[ib.GRHLength:]) != "near" || got[20+8] != 0 {
		t.Errorf("%q with %d hops to go, want none", got[ib.GRHLength:], got[20+8])
	}
}

// Many messages at once, of one size and of several, arrive whole and in order.
func TestMulticastBurst(t *testing.T) {
	x, y := openDevice(t, provider.Config{}), openDevice(t, provider.Config{})
	group := testGroup()
	a, b := newMember(t, x), newMember(t, y)
	must0(t, b.qp.AttachMcast(group))
	ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: group}))
	defer closeAll(t, ah)
	for round := range 20 {
		wrs := make([]ib.SendWR, 8)
		for i := range wrs {
			wrs[i] = ib.SendWR{ID: uint64(i), Op: ib.OpSendImm, Flags: ib.SendSignaled, Imm: uint32(round*8 + i), SGL: a.sge(0, 100+round%3*i*50), AH: ah,
				RemoteQPN: ib.MulticastQPN, RemoteQKey: mcastKey}
		}
		if n, err := a.qp.PostSend(wrs); n != 8 || err != nil {
			t.Fatal(n, err)
		}
		for i := range wrs {
			a.ok()
			wc := b.ok()
			if wc.Imm != uint32(round*8+i) || int(wc.ByteLen) != ib.GRHLength+100+round%3*i*50 {
				t.Fatalf("round %d, message %d: %+v", round, i, wc)
			}
			b.recv(ib.RecvWR{ID: wc.ID, SGL: b.sge(32<<10+int(wc.ID)*1024, 1024)})
		}
	}
}

func TestMulticastErrors(t *testing.T) {
	d := openDevice(t, provider.Config{})
	group := testGroup()
	ud, rc := newMember(t, d), newEnd(t, d, ib.RC, 4096)
	t.Cleanup(rc.close)
	v6 := ib.GIDFromAddr(netip.MustParseAddr("ff0e::7777"))
	wantErrno(t, "RC", rc.qp.AttachMcast(group), syscall.EINVAL)
	wantErrno(t, "unicast", ud.qp.AttachMcast(d.GIDs()[0]), syscall.EINVAL)
	wantErrno(t, "zero", ud.qp.AttachMcast(ib.GID{}), syscall.EINVAL)
	wantErrno(t, "IPv6 on an IPv4 device", ud.qp.AttachMcast(v6), syscall.EINVAL)
	wantErrno(t, "detach", ud.qp.DetachMcast(group), syscall.EINVAL)
	rc.modify(ib.QPAttr{State: ib.QPInit, Port: 1}, ib.QPMaskPort|ib.QPMaskPKeyIndex|ib.QPMaskAccess)
	wantErrno(t, "connecting to a group", rc.qp.Modify(&ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: group}, PathMTU: ib.MTU1024,
		DestQPN: 5, MaxDestRDAtomic: 1, MinRNRTimer: 1}, ib.QPMaskState|ib.QPMaskAV|ib.QPMaskPathMTU|ib.QPMaskDestQPN|ib.QPMaskRQPSN|
		ib.QPMaskMaxDestRDAtomic|ib.QPMaskMinRNRTimer), syscall.EINVAL)
	closeAll(t, ud.qp)
	wantErrno(t, "closed", ud.qp.AttachMcast(group), syscall.EINVAL)
	if d.counts.mcasts != 0 {
		t.Errorf("%d attachments are counted", d.counts.mcasts)
	}
	one, err := Open("", &provider.Config{Addrs: []netip.Addr{netip.IPv6Loopback()}})
	if err != nil {
		t.Logf("no IPv6 here: %v", err)
		return
	}
	defer closeAll(t, one)
	pd := must[provider.PD](t)(one.AllocPD())
	defer closeAll(t, pd)
	_, err = pd.CreateAH(ib.AHAttr{DGID: v6})
	wantErrno(t, "IPv6 on the loopback interface", err, syscall.EHOSTUNREACH)
}

// The limit of groups that the device reports is the one that holds.
func TestMulticastLimits(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	e := newMember(t, d)
	// All groups but one are taken. To attach to them one by one takes seconds.
	all := map[netip.Addr][]*QP{}
	for i := range d.Attr().MaxMcastGrp - 1 {
		all[netip.AddrFrom4([4]byte{239, 1, byte(i >> 8), byte(i)})] = []*QP{e.qp.(*QP)}
	}
	d.mcast.members.Store(&all)
	defer d.mcast.members.Store(nil)
	last := testGroup()
	must0(t, e.qp.AttachMcast(last))
	wantErrno(t, "one group more", e.qp.AttachMcast(testGroup()), syscall.ENOMEM)
	must0(t, e.qp.DetachMcast(last))
	last = testGroup()
	must0(t, e.qp.AttachMcast(last))
	must0(t, e.qp.DetachMcast(last))
}
