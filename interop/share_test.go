package interop

import (
	"bufio"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// Processes that share an address, and processes on two addresses that talk by shared memory.
func TestShared(t *testing.T) {
	at := loopbacks()
	for _, tt := range []struct {
		name     string
		a, b     place
		any      bool
		noPacket bool
	}{
		{"one address", at[0], at[0], true, true},
		{"two addresses", at[0], at[1], true, true},
		{"one address, by packets", at[0], at[0], false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, scenario := range []string{"operations", "stream"} {
				t.Run(scenario, func(t *testing.T) {
					for _, r := range perform(t, script{Scenario: scenario, Seconds: 1, Any: tt.any, Lossy: !tt.noPacket}, tt.a, tt.b, nil) {
						wantSound(t, r)
						t.Logf("%.0f MB/s, %d packets, %d again, %d timeouts, %d undelivered", float64(r.Bytes)/1e6, r.Counters["tx_packets"],
							r.Counters["retransmitted_packets"], r.Counters["local_ack_timeouts"], r.Counters["local_undelivered"])
						if n := r.Counters["local_undelivered"] + r.Counters["retransmitted_packets"]; tt.noPacket && n != 0 {
							t.Errorf("%d trains were not delivered, or delivered again", n)
						}
					}
				})
			}
			t.Run("doomed", func(t *testing.T) {
				perform(t, script{Scenario: "doomed", Any: tt.any}, tt.a, tt.b, func(other *actor, body string) {
					if body == `"kill"` && !other.killed {
						other.kill(t)
					}
				})
			})
		})
	}
}

// If one side wants packets, both send them, on one address and on two. If neither does,
// there are none. A process that listens to the interface checks that.
func TestPacketsBothWays(t *testing.T) {
	n := newNetwork(t, 1500)
	a, b := place{n.ns[0], "127.0.0.1"}, place{n.ns[0], "127.0.0.2"}
	for _, tt := range []struct {
		name    string
		a, b    place
		packets string
	}{
		{"initiator", a, b, "initiator"},
		{"target", a, b, "target"},
		{"one address", a, a, "target"},
		{"nobody", a, b, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lo := newListener(t, place{n.ns[0], "lo"})
			s := script{Scenario: "operations", Any: true, Packets: tt.packets, Lossy: true, Classes: true}
			for _, r := range perform(t, s, tt.a, tt.b, nil) {
				wantSound(t, r)
			}
			time.Sleep(100 * time.Millisecond) // the last packets
			_ = lo.stdin.Close()
			lo.read(t)
			if tt.packets == "" {
				if len(lo.result.Seen) != 0 {
					t.Errorf("packets that neither side wants: %v", lo.result.Seen)
				}
				return
			}
			i, o := classes["initiator"], classes["target"]
			for _, want := range []string{
				fmt.Sprintf("%s RC class %#x hops %d", tt.a.addr, i.rc, i.rcHops),
				fmt.Sprintf("%s UC class %#x hops %d", tt.a.addr, i.rc, i.rcHops),
				fmt.Sprintf("%s UD class %#x hops %d", tt.a.addr, i.ud, i.udHops),
				fmt.Sprintf("%s RC class %#x hops %d", tt.b.addr, o.rc, o.rcHops),
			} {
				if lo.result.Seen[want] == 0 {
					t.Errorf("no packet: %s; but %v", want, lo.result.Seen)
				}
			}
		})
	}
}

// The process that owns the port is killed, or ends, while another process on its address
// talks to a third. The other process takes over the port. No data is lost or doubled, which
// both sides of the stream check.
func TestTakeOver(t *testing.T) {
	at := loopbacks()
	for _, tt := range []struct {
		name string
		end  func(t *testing.T, holder *actor)
	}{
		{"killed", func(t *testing.T, holder *actor) { holder.kill(t) }},
		{"ended", func(_ *testing.T, holder *actor) { _ = holder.stdin.Close() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			holder := start(t.Context(), t, "holder", script{}, at[1])
			defer func() { _ = holder.stdin.Close(); _ = holder.cmd.Wait() }()
			if !bufio.NewScanner(holder.stdout).Scan() { // it holds the address
				t.Fatalf("the holder does not start: %s", holder.stderr)
			}
			gone := false
			r := perform(t, script{Scenario: "stream", Seconds: 2}, at[0], at[1], func(_ *actor, body string) {
				if body == `"running"` && !gone {
					gone = true
					time.Sleep(300 * time.Millisecond)
					tt.end(t, holder)
				}
			})
			if !gone {
				t.Error("the holder was not ended")
			}
			for _, r := range r {
				t.Logf("%.0f MB/s, %d packets sent, %d again, %d timeouts", float64(r.Bytes)/2e6,
					r.Counters["tx_packets"], r.Counters["retransmitted_packets"], r.Counters["local_ack_timeouts"])
				wantSound(t, r)
				if r.Bytes == 0 {
					t.Error("nothing was moved")
				}
			}
		})
	}
}

// holding starts a process that holds an address.
func holding(t *testing.T, at place) (*actor, *bufio.Scanner) {
	t.Helper()
	h := start(t.Context(), t, "holder", script{}, at)
	t.Cleanup(func() { _ = h.stdin.Close(); _ = h.cmd.Wait() })
	lines := newLines(h.stdout)
	if !lines.Scan() {
		t.Fatalf("the holder does not start: %s", h.stderr)
	}
	return h, lines
}

func signal(t testing.TB, a *actor, s syscall.Signal) {
	t.Helper()
	if err := a.cmd.Process.Signal(s); err != nil {
		t.Error(err)
	}
}

// A process is stopped while the owner of its address is killed and another one takes over.
// When it goes on it finds the new owner, and no data is lost or doubled.
func TestTakeOverStopped(t *testing.T) {
	at := loopbacks()
	first, _ := holding(t, at[1])
	_, _ = holding(t, at[1]) // it will take over
	gone := false
	r := perform(t, script{Scenario: "stream", Seconds: 2}, at[0], at[1], func(target *actor, body string) {
		if body != `"running"` || gone {
			return
		}
		gone = true
		time.Sleep(100 * time.Millisecond)
		signal(t, target, syscall.SIGSTOP)
		first.kill(t)
		time.Sleep(300 * time.Millisecond)
		signal(t, target, syscall.SIGCONT)
	})
	if !gone {
		t.Error("the target was not stopped")
	}
	for _, r := range r {
		wantSound(t, r)
		if r.Bytes == 0 {
			t.Error("nothing was moved")
		}
	}
}

// A socket that is not Verbena's takes the port at the moment when no process has it. The
// process that cannot take over gets EventPortErr, and EventPortActive when it has.
func TestTakeOverPortTaken(t *testing.T) {
	at := loopbacks()
	first, _ := holding(t, at[0])
	second, lines := holding(t, at[0])
	signal(t, second, syscall.SIGSTOP)
	first.kill(t)
	_ = first.cmd.Wait()
	foreign, err := net.ListenPacket("udp4", fmt.Sprintf("%s:4791", at[0].addr))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = foreign.Close() }()
	signal(t, second, syscall.SIGCONT)
	expect := func(what verbs.EventType) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("the process has ended: %s", second.stderr)
		}
		if want := fmt.Sprintf(`{"to":"test","body":%q}`, what); lines.Text() != want {
			t.Fatalf("%s, want %s", lines.Text(), want)
		}
	}
	expect(verbs.EventPortErr)
	_ = foreign.Close()
	expect(verbs.EventPortActive)
}

// A device with two addresses, which two processes share; they use the second.
func TestSharedTwoAddresses(t *testing.T) {
	at := loopbacks()
	s := script{Scenario: "operations", Any: true, Addrs: []string{at[0].addr, at[1].addr}, SGID: 1}
	for _, any := range []bool{true, false} {
		s.Any, s.Lossy = any, !any
		for _, r := range perform(t, s, at[0], at[0], nil) {
			wantSound(t, r)
		}
	}
}

// Devices of one host whose ports have different MTUs.
func TestSharedMixedMTU(t *testing.T) {
	n := newNetwork(t, 1500)
	lo, veth := place{n.ns[0], "127.0.0.1"}, place{n.ns[0], n.v4[0]}
	for _, tt := range [][2]place{{lo, veth}, {veth, lo}} {
		for _, r := range perform(t, script{Scenario: "operations", Any: true, MixedMTU: true}, tt[0], tt[1], nil) {
			wantSound(t, r)
			if r.MTU != 1024 {
				t.Errorf("the MTU is %d", r.MTU)
			}
		}
	}
}

// Traffic class and hop limit reach a datagram's header without packets, too.
func TestTrafficClassLocal(t *testing.T) {
	at := loopbacks()
	perform(t, script{Scenario: "operations", Any: true, Classes: true}, at[0], at[0], nil)
}

// The process of a device at another address is killed, or ends, and is started again. Each
// time there is a new device, which a process that knew the old ones reaches by shared
// memory at once.
func TestSharedRestarted(t *testing.T) {
	at := loopbacks()
	c := newCaller(t, verbs.LinkLocal, at[0].addr)
	for round := range 3 {
		all := house(t, verbs.LinkAny, at[1], "target")
		c.call(all[0], &verbs.ConnectConfig{Timeout: 17, RetryCnt: 4, RNRRetry: 7})
		for range 20 {
			c.letter(all[0], 5000)
			c.ok(1)
		}
		if round%2 == 0 {
			all[0].kill(t)
			c.letter(all[0], 10)
			if wc := c.wait(); wc.Status != verbs.WCRetryExcErr {
				t.Errorf("to a process that is gone: %v", wc.Status)
			}
		} else {
			all[0].finish(t)
		}
		_ = all[0].cmd.Wait()
	}
}
