package interop

import (
	"bufio"
	"testing"
	"time"
)

// Processes that share an address, and processes of different addresses that do
// not need packets to talk.
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
							t.Errorf("%d trains were not delivered, or again", n)
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

// The process that owns the port is killed, or ends, while another one of its
// address talks to the outside: that takes over, and nothing is lost or doubled,
// which both sides of the stream check.
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
				t.Error("the holder has seen nothing")
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
