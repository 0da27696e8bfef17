package interop

// Multicast between processes, addresses and hosts.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

const choirKey = 0x7777

// singer is a UD queue pair with the Q_Key of the group.
func (c *cast) singer() (*verbs.QP, error) {
	q, err := c.pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: c.cq, RecvCQ: c.cq, Cap: verbs.QPCap{
		MaxSendWR: deep, MaxRecvWR: 4 * deep, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64}})
	if err != nil {
		return nil, err
	}
	c.opened = append(c.opened, q)
	return q, errors.Join(
		q.Modify(&verbs.QPAttr{State: verbs.QPInit, Port: 1, QKey: choirKey}, verbs.QPMaskState|verbs.QPMaskPort|verbs.QPMaskPKeyIndex|verbs.QPMaskQKey),
		q.Modify(&verbs.QPAttr{State: verbs.QPRTR}, verbs.QPMaskState),
		q.Modify(&verbs.QPAttr{State: verbs.QPRTS}, verbs.QPMaskState|verbs.QPMaskSQPSN))
}

const slotBytes = 256

// sing has both sides in a group: they send to it in turn, and both receive every message.
// Then the target leaves the group; from then on only the initiator receives.
func (c *cast) sing() error {
	group := verbs.GIDFromAddr(netip.MustParseAddr(c.script.Group))
	q, err := c.singer()
	if err != nil {
		return err
	}
	if err := q.AttachMcast(group); err != nil {
		return err
	}
	ah, err := c.pd.CreateAH(verbs.AHAttr{DGID: group})
	if err != nil {
		return err
	}
	c.opened = append(c.opened, ah)
	for i := range 4 * deep {
		if err := c.listenFor(q, uint64(i)); err != nil {
			return err
		}
	}
	say := func(n uint32) error {
		return c.post(q, verbs.SendWR{ID: 1 << 32, Op: verbs.OpSendImm, Imm: n, Inline: []byte("la la la"), AH: ah,
			RemoteQPN: verbs.MulticastQPN, RemoteQKey: choirKey})
	}
	if err := c.barrier("attached"); err != nil {
		return err
	}
	if c.script.Note && c.role == "initiator" {
		c.write(envelope{To: "test", Body: []byte(`"running"`)})
	}
	const rounds = 20
	for n := range uint32(rounds) {
		mine := (n%2 == 0) == (c.role == "initiator")
		if mine {
			if err := say(n); err != nil {
				return err
			}
		}
		if err := c.hearSong(q, group, n, patience); err != nil {
			return fmt.Errorf("message %d, mine %v: %w", n, mine, err)
		}
		if err := c.barrier(fmt.Sprint("heard ", n)); err != nil {
			return err
		}
	}
	if c.role == "target" {
		if err := q.DetachMcast(group); err != nil {
			return err
		}
	}
	if err := c.barrier("detached"); err != nil {
		return err
	}
	if c.role == "initiator" {
		if err := errors.Join(say(rounds), c.hearSong(q, group, rounds, patience)); err != nil {
			return err
		}
	}
	if err := c.barrier("last"); err != nil {
		return err
	}
	if c.role == "target" {
		if err := c.hearSong(q, group, rounds, 50*time.Millisecond); err == nil {
			c.fail("a message arrived after the target has left the group")
		}
	}
	return nil
}

func (c *cast) listenFor(q *verbs.QP, slot uint64) error {
	_, err := q.PostRecv([]verbs.RecvWR{{ID: slot, SGL: []verbs.SGE{c.mr.SGE(targetAt+int(slot)*slotBytes, slotBytes)}}})
	return err
}

// hearSong waits for message n and checks it.
func (c *cast) hearSong(q *verbs.QP, group verbs.GID, n uint32, d time.Duration) error {
	for {
		wc, err := c.wait(d)
		if err != nil || wc.Err() != nil {
			return errors.Join(err, wc.Err())
		}
		if wc.Op == verbs.WCSend {
			continue
		}
		b := c.buf[targetAt+int(wc.ID)*slotBytes:][:wc.ByteLen]
		to := b[24:verbs.GRHLength] // of an IPv6 header
		if group.Addr().Is4() {
			to = b[36:verbs.GRHLength]
		}
		if wc.QPN != q.Number() || wc.Imm != n || string(b[verbs.GRHLength:]) != "la la la" || !bytes.Equal(to, group.Addr().AsSlice()) {
			return fmt.Errorf("%+v, %q to %v", wc, b[verbs.GRHLength:], to)
		}
		return c.listenFor(q, wc.ID)
	}
}

// mourn is the initiator's part of "requiem": the target is killed while it is in a group,
// and its membership ends.
func (c *cast) mourn() error {
	if err := c.barrier("attached"); err != nil {
		return err
	}
	if !memberHere(c.script.Group) {
		return errors.New("the target has not joined")
	}
	c.write(envelope{To: "test", Body: []byte(`"kill"`)})
	for deadline := time.Now().Add(patience); memberHere(c.script.Group); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return errors.New("a dead process is in the group")
		}
	}
	return nil
}

func (c *cast) singUntilKilled() error {
	q, err := c.singer()
	if err != nil {
		return err
	}
	if err := errors.Join(q.AttachMcast(verbs.GIDFromAddr(netip.MustParseAddr(c.script.Group))), c.barrier("attached")); err != nil {
		return err
	}
	return c.untilKilled()
}

// memberHere reports whether a socket in this network namespace has joined an IPv4 group.
func memberHere(group string) bool {
	b, err := os.ReadFile("/proc/self/net/igmp")
	a := netip.MustParseAddr(group).As4()
	return err == nil && strings.Contains(string(b), fmt.Sprintf("%02X%02X%02X%02X", a[3], a[2], a[1], a[0]))
}

func groupHere() string {
	return fmt.Sprintf("239.77.%d.%d", byte(os.Getpid()>>8), byte(os.Getpid()))
}

// Two processes on one address and on two, by shared memory and by packets.
func TestMulticastProcesses(t *testing.T) {
	at := loopbacks()
	for _, tt := range []struct {
		name string
		a, b place
		any  bool
	}{
		{"one address", at[0], at[0], true},
		{"one address, by packets", at[0], at[0], false},
		{"two addresses", at[0], at[1], true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, r := range perform(t, script{Scenario: "choir", Any: tt.any, Group: groupHere()}, tt.a, tt.b, nil) {
				wantSound(t, r)
			}
			killed := false
			perform(t, script{Scenario: "requiem", Any: tt.any, Group: groupHere()}, tt.a, tt.b, func(other *actor, body string) {
				if body == `"kill"` && !killed {
					killed = true
					other.kill(t)
				}
			})
			if !killed {
				t.Error("nobody was killed")
			}
			if memberHere(groupHere()) {
				t.Error("a socket is still in the group")
			}
		})
	}
}

// The process that has opened the address first goes while another one is in a group: nothing
// changes for that.
func TestMulticastFirstGone(t *testing.T) {
	at := loopbacks()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	holder := start(ctx, t, "holder", script{}, at[0])
	b := make([]byte, 1)
	if _, err := holder.stdout.Read(b); err != nil {
		t.Fatal(err)
	}
	gone := false
	perform(t, script{Scenario: "choir", Any: true, Group: groupHere(), Note: true}, at[0], at[0], func(_ *actor, body string) {
		if body == `"running"` && !gone {
			gone = true
			holder.kill(t)
		}
	})
	_ = holder.cmd.Wait()
	if !gone {
		t.Error("the holder was not killed")
	}
}

// Two hosts, by IP multicast, with both versions of IP and several scopes.
func TestMulticastNamespaces(t *testing.T) {
	n := newNetwork(t, 1500)
	for _, tt := range []struct {
		group string
		addrs [2]string
	}{
		{"239.7.7.7", n.v4},
		{"224.0.0.123", n.v4},
		{"ff0e::7777", n.v6},
		{"ff05::7777", n.v6},
		{"ff02::7777", n.v6},
	} {
		t.Run(tt.group, func(t *testing.T) {
			at := n.places(tt.addrs)
			for _, r := range perform(t, script{Scenario: "choir", Group: tt.group}, at[0], at[1], nil) {
				wantSound(t, r)
			}
		})
	}
}
