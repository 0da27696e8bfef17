package interop

import "testing"

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
