package interop

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

// loopbacks returns two loopback addresses that no other test uses.
func loopbacks() [2]place {
	pid := uint32(os.Getpid()) * 2654435761 >> 16
	var p [2]place
	for i := range p {
		p[i].addr = fmt.Sprintf("127.%d.%d.%d", 201+pid>>8%50, pid&0xff, i+1)
	}
	return p
}

// All operations between two processes on two loopback addresses.
func TestProcesses(t *testing.T) {
	at := loopbacks()
	r := perform(t, script{Scenario: "operations"}, at[0], at[1], nil)
	for _, r := range r {
		if r.MTU != 4096 {
			t.Errorf("the MTU is %d", r.MTU)
		}
		t.Logf("offloads %v, %d packets sent, %d again", r.Offloads, r.Counters["tx_packets"], r.Counters["retransmitted_packets"])
		wantSound(t, r)
	}
}

// wantSound checks that no packet was dropped as damaged or malformed, and no request refused.
func wantSound(t testing.TB, r *result) {
	t.Helper()
	for _, name := range []string{"drop_bad_icrc", "drop_short", "drop_opcode", "drop_version", "drop_bad_pkey", "drop_truncated",
		"drop_headers", "drop_no_qp", "drop_transport", "drop_source_address", "resp_invalid_request", "resp_remote_access_errors"} {
		if n := r.Counters[name]; n != 0 {
			t.Errorf("%s: %d", name, n)
		}
	}
}

// Both sides write and read at once.
func TestProcessesStream(t *testing.T) {
	at := loopbacks()
	seconds := 1
	if os.Getenv("VERBENA_FULL") != "" {
		seconds = 30
	}
	r := perform(t, script{Scenario: "stream", Seconds: seconds}, at[0], at[1], nil)
	for _, r := range r {
		t.Logf("%.0f MB/s, %d packets sent, %d again, %d timeouts", float64(r.Bytes)/float64(seconds)/1e6,
			r.Counters["tx_packets"], r.Counters["retransmitted_packets"], r.Counters["local_ack_timeouts"])
		wantSound(t, r)
		if r.Bytes == 0 {
			t.Error("nothing was moved")
		}
	}
}

// A peer is killed: it cannot close anything.
func TestProcessKilled(t *testing.T) {
	at := loopbacks()
	killed := false
	perform(t, script{Scenario: "doomed"}, at[0], at[1], func(other *actor, body string) {
		if body == `"kill"` && !killed {
			killed = true
			other.kill(t)
		}
	})
	if !killed {
		t.Error("nobody was killed")
	}
	// Its address is free at once.
	perform(t, script{Scenario: "operations"}, at[0], at[1], nil)
}

// A peer is stopped for less time than the retries last, and goes on.
func TestProcessPaused(t *testing.T) {
	at := loopbacks()
	r := perform(t, script{Scenario: "stream", Seconds: 1}, at[0], at[1], func(other *actor, body string) {
		if body != `"running"` {
			return
		}
		time.Sleep(100 * time.Millisecond)
		for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
			if err := other.cmd.Process.Signal(sig); err != nil {
				t.Error(err)
			}
			time.Sleep(150 * time.Millisecond)
		}
	})
	if n := r[0].Counters["local_ack_timeouts"]; n == 0 {
		t.Error("no timeout: the peer was not stopped for long enough")
	}
	wantSound(t, r[0])
	wantSound(t, r[1])
}
