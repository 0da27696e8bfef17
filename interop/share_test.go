package interop

import (
	"bufio"
	"fmt"
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
				fmt.Sprintf("%s RC class %#x hops %d", tt.a.addr, ofRC(i.rc), i.rcHops),
				fmt.Sprintf("%s UC class %#x hops %d", tt.a.addr, i.rc, i.rcHops),
				fmt.Sprintf("%s UD class %#x hops %d", tt.a.addr, i.ud, i.udHops),
				fmt.Sprintf("%s RC class %#x hops %d", tt.b.addr, ofRC(o.rc), o.rcHops),
			} {
				if lo.result.Seen[want] == 0 {
					t.Errorf("no packet: %s; but %v", want, lo.result.Seen)
				}
			}
		})
	}
}

// The process that has opened the address first is killed, ends, or is stopped, while another
// one talks to the outside: the other one does not notice, and nothing is lost or doubled, which
// both sides of the stream check.
func TestFirstGone(t *testing.T) {
	at := loopbacks()
	for _, tt := range []struct {
		name string
		end  func(t *testing.T, first *actor)
	}{
		{"killed", func(t *testing.T, first *actor) { first.kill(t) }},
		{"ended", func(_ *testing.T, first *actor) { _ = first.stdin.Close() }},
		{"stopped", func(t *testing.T, first *actor) {
			signal(t, first, syscall.SIGSTOP)
			t.Cleanup(func() { signal(t, first, syscall.SIGCONT) })
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			first, _ := holding(t, at[1])
			gone := false
			r := perform(t, script{Scenario: "stream", Seconds: 2}, at[0], at[1], func(_ *actor, body string) {
				if body == `"running"` && !gone {
					gone = true
					time.Sleep(300 * time.Millisecond) // packets are under way
					tt.end(t, first)
				}
			})
			if !gone {
				t.Error("the stream was over before")
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
