package tools

import (
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// Result is the result of a run. If the run failed, it is filled as far as the run came.
type Result struct {
	Program     string    // as "ib_write_bw"
	Role        Role      // of this side
	PeerVersion string    // perftest's; empty for pingpong
	MTU         verbs.MTU // that both sides use

	Sent          uint64 // requests of this side that completed: SEND, WRITE, READ, atomics
	Received      uint64 // messages of the peer that completed a receive here
	SentBytes     uint64
	ReceivedBytes uint64 // with the bytes that READs brought, without UD's headers

	// Verified counts the messages, READs, atomics and slots of memory whose
	// contents were compared and right. A wrong one is an error.
	Verified uint64
	// GRHs counts the UD headers that were checked and right.
	GRHs uint64

	// Completions counts all completions of this side by their status.
	Completions map[verbs.WCStatus]int
	// LastUnacknowledged is whether the last SEND of a ping-pong was not
	// acknowledged. The program ends as soon as it has received that message: if the
	// acknowledgement is lost, it is not sent again.
	LastUnacknowledged bool

	Elapsed    time.Duration // from the first request to the last completion; next to 0 if this side only serves
	PeerReport *Report       // of a bandwidth test's peer, where it sends one
}

// String returns the result in one line.
func (r *Result) String() string {
	s := fmt.Sprintf("%s %v: sent %d (%d bytes), received %d (%d bytes), verified %d",
		r.Program, r.Role, r.Sent, r.SentBytes, r.Received, r.ReceivedBytes, r.Verified)
	if r.GRHs > 0 {
		s += fmt.Sprintf(", headers %d", r.GRHs)
	}
	for status := verbs.WCLocLenErr; status <= verbs.WCGeneralErr; status++ {
		if n := r.Completions[status]; n > 0 {
			s += fmt.Sprintf(", %d times %q", n, status)
		}
	}
	if r.LastUnacknowledged {
		s += ", the last message unacknowledged"
	}
	return s + fmt.Sprintf(", %v", r.Elapsed.Round(time.Microsecond))
}

func (r *Result) complete(wc *verbs.WC) {
	if r.Completions == nil {
		r.Completions = make(map[verbs.WCStatus]int)
	}
	r.Completions[wc.Status]++
}
