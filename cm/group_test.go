package cm

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// member is a UD queue pair with receives.
type member struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
	buf []byte
	mr  *verbs.MR
}

const memberSlot = verbs.GRHLength + 32

func newMember(t *testing.T, dev *verbs.Device) *member {
	t.Helper()
	m := &member{dev: dev, buf: make([]byte, 16*memberSlot)}
	var err error
	m.pd, err = dev.AllocPD()
	check(t, err)
	m.cq, err = dev.CreateCQ(64, nil)
	check(t, err)
	m.qp, err = m.pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: m.cq, RecvCQ: m.cq, Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxRecvSGE: 1, MaxInlineData: 32}})
	check(t, err)
	m.mr, err = m.pd.RegMR(m.buf, verbs.AccessLocalWrite)
	check(t, err)
	t.Cleanup(func() { closeAll(t, m.qp, m.mr, m.cq, m.pd) })
	check(t, ReadyUD(m.qp))
	for i := range 16 {
		_, err := m.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SGL: []verbs.SGE{m.mr.SGE(i*memberSlot, memberSlot)}}})
		check(t, err)
	}
	return m
}

// say sends a message to a group.
func (m *member) say(t *testing.T, g *Group, text string) {
	t.Helper()
	p := g.Peer()
	ah, err := m.pd.CreateAH(p.AH)
	check(t, err)
	_, err = m.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte(text), AH: ah, RemoteQPN: p.QPN, RemoteQKey: p.QKey}})
	check(t, err)
	check(t, ah.Close())
}

// hear waits for a message.
func (m *member) hear(t *testing.T, want string) {
	t.Helper()
	wc := poll(t, m.cq)
	check(t, wc.Err())
	at := int(wc.ID) * memberSlot
	if got := string(m.buf[at+verbs.GRHLength : at+int(wc.ByteLen)]); got != want {
		t.Errorf("%q has come, want %q", got, want)
	}
}

func testGroup(n int) string { return fmt.Sprintf("239.77.%d.%d", os.Getpid()&0xff, n) }

// Members get what is sent to a group, those who only send do not, and nobody does after it has left.
func TestJoin(t *testing.T) {
	for _, link := range []verbs.LinkMode{verbs.LinkLoop, verbs.LinkLocal, verbs.LinkUDP} {
		t.Run(string(link), func(t *testing.T) {
			a, b, c := newMember(t, device(t, link)), newMember(t, device(t, link)), newMember(t, device(t, link))
			ctx, group, other := within(t), testGroup(1), testGroup(2)
			ga, err := Join(ctx, group, a.qp, &Config{Device: a.dev, TOS: 8})
			check(t, err)
			gb, err := Join(ctx, group, b.qp, &Config{Device: b.dev})
			check(t, err)
			gc, err := JoinSendOnly(ctx, group, &Config{Device: c.dev})
			check(t, err)
			p := ga.Peer()
			if p.QPN != verbs.MulticastQPN || p.QKey != QKey || p.AH.DGID != verbs.GIDFromAddr(netip.MustParseAddr(group)) || p.AH.TrafficClass != 8 ||
				ga.Addr().String() != group || p.RemoteAddr.Addr() != ga.Addr() || p.LocalAddr.Addr() != a.dev.Addr() {
				t.Errorf("%v: %+v", ga.Addr(), p)
			}
			c.say(t, gc, "to both")
			a.hear(t, "to both")
			b.hear(t, "to both")
			a.say(t, ga, "to all members")
			a.hear(t, "to all members")
			b.hear(t, "to all members")
			// Another group of the same queue pair, which it stays in.
			gb2, err := Join(ctx, other, b.qp, &Config{Device: b.dev})
			check(t, err)
			closeAll(t, gb, gb)
			c.say(t, gc, "to one")
			a.hear(t, "to one")
			o, err := JoinSendOnly(ctx, other, &Config{Device: c.dev})
			check(t, err)
			c.say(t, o, "to the other") // b would have got "to one" before it
			b.hear(t, "to the other")
			gb, err = Join(ctx, group, b.qp, &Config{Device: b.dev})
			check(t, err)
			c.say(t, gc, "again")
			b.hear(t, "again")
			a.hear(t, "again")
			closeAll(t, ga, gb, gb2, gc, o)
			if n, err := c.cq.Poll(make([]verbs.WC, 1)); n != 0 || err != nil {
				t.Errorf("the queue pair that only sends has got something: %v", err)
			}
		})
	}
}

// What cannot be joined, and what is left behind: nothing.
func TestJoinRefused(t *testing.T) {
	m := newMember(t, device(t, ""))
	cfg := &Config{Device: m.dev}
	group := testGroup(3)
	g, err := Join(within(t), group, m.qp, cfg)
	check(t, err)
	for _, c := range []struct {
		group string
		cfg   *Config
		want  error
	}{
		{group, cfg, syscall.EADDRINUSE},
		{"", cfg, syscall.EINVAL},
		{"239.1.2.3:7", cfg, syscall.EINVAL},
		{"nobody", cfg, syscall.EINVAL},
		{"192.0.2.1", cfg, syscall.EINVAL},
		{"0.0.0.0", cfg, syscall.EINVAL},
		{"255.255.255.255", cfg, syscall.EINVAL},
		{"ff0e::1", cfg, syscall.EOPNOTSUPP},
		{"::ffff:192.0.2.1", cfg, syscall.EINVAL},
		{testGroup(4), nil, syscall.EINVAL},
		{testGroup(4), &Config{Device: new(verbs.Device)}, syscall.EINVAL},
		{testGroup(4), &Config{Device: m.dev, Private: []byte{1}}, syscall.EINVAL},
		{testGroup(4), &Config{Device: m.dev, Local: netip.MustParseAddrPort("192.0.2.1:0")}, syscall.ENODEV},
	} {
		if _, err := Join(within(t), c.group, m.qp, c.cfg); !errors.Is(err, c.want) {
			t.Errorf("%q: %v, want %v", c.group, err, c.want)
		}
		if c.want == syscall.EADDRINUSE {
			continue
		}
		if _, err := JoinSendOnly(within(t), c.group, c.cfg); !errors.Is(err, c.want) {
			t.Errorf("%q, to send only: %v, want %v", c.group, err, c.want)
		}
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Join(gone, testGroup(4), m.qp, cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that has ended: %v", err)
	}
	m.say(t, g, "still a member")
	m.hear(t, "still a member")

	// A queue pair without the Q_Key, and one that is closed.
	cq, err := m.dev.CreateCQ(4, nil)
	check(t, err)
	qp, err := m.pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
	check(t, err)
	if _, err := Join(within(t), group, qp, cfg); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a queue pair without the Q_Key: %v", err)
	}
	check(t, ReadyUD(qp))
	g2, err := Join(within(t), group, qp, cfg)
	check(t, err)
	closeAll(t, qp, g2, cq) // the membership ends with the queue pair
	if _, err := Join(within(t), group, qp, cfg); err == nil {
		t.Error("a queue pair that is closed has become a member")
	}
	m.say(t, g, "alone")
	m.hear(t, "alone")

	// Many at once: one of them is the member.
	closeAll(t, g)
	var wg sync.WaitGroup
	var mu sync.Mutex // guards members
	var members []*Group
	for range 16 {
		wg.Go(func() {
			g, err := Join(within(t), group, m.qp, cfg)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				members = append(members, g)
			} else if !errors.Is(err, syscall.EADDRINUSE) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(members) != 1 {
		t.Fatalf("%d memberships of one queue pair", len(members))
	}
	m.say(t, members[0], "once")
	m.hear(t, "once")
	closeAll(t, members[0])
}
