package device

import (
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// What is a conversation: messages, each followed by a post.
func TestConversation(t *testing.T) {
	const (
		post    = iota // the program posts
		message        // a message's last packets come
		part           // some others of a message come
		read           // a READ is asked for
	)
	for _, tt := range []struct {
		name  string
		steps []int
		want  bool // the last message is answered soon
	}{
		{"nothing is known", []int{post, message}, false},
		{"after three", []int{post, message, post, message, post, message}, true},
		{"long messages", []int{post, part, part, message, post, part, message, post, part, part, message}, true},
		{"one without an answer", []int{post, message, post, message, post, message, message}, false},
		{"and again", []int{post, message, post, message, post, message, message, post, message}, false},
		{"several posts count once", []int{post, post, post, message}, false},
		{"a READ is answered at once", []int{post, message, post, message, post, message, post, read}, false},
		{"and does not end it", []int{post, message, post, message, post, message, post, read, message}, true},
	} {
		q, got := new(QP), false
		for _, s := range tt.steps {
			switch s {
			case post:
				q.posted = true
			case message:
				got = q.conversesLocked(&train.Train{Kind: wire.KindWrite, End: true})
			case part:
				got = q.conversesLocked(&train.Train{Kind: wire.KindWrite})
			case read:
				got = q.conversesLocked(&train.Train{Kind: wire.KindReadRequest, Start: true, End: true})
			}
		}
		if got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

// look reads memory that a peer writes.
//
//go:norace
func look(b []byte, i int) byte { return b[i] }

// Two programs that write to each other alternately, and watch their memory, send one
// train each way for every message. When one falls silent its peer's last message
// is acknowledged all the same, long before that peer would send it again. The time is
// virtual.
func TestConversationEnds(t *testing.T) {
	bubble(t, "watching memory", func(t *testing.T) {
		_, devs := simulated(t, 2, link.FaultyConfig{}, nil)
		a, b := connected(t, devs[0], devs[1], ib.RC, 64, nil)
		for round := byte(1); round <= 20; round++ {
			for off, way := range []struct{ from, to *end }{{a, b}, {b, a}} {
				way.from.buf[off] = round
				way.from.post(way.from.write(way.to, off, 1))
				eventually(t, "a message arrives", func() bool { return look(way.to.buf, off) == round })
			}
			a.ok()
			if round < 20 {
				b.ok()
			}
		}
		// Neither side polls any more: b's last message waits for its acknowledgement.
		eventually(t, "the last message is acknowledged", func() bool { return b.cq.(*CQ).Len() > 0 })
		b.ok()
		for _, e := range []*end{a, b} {
			if c := countsOf(e.dev); c["local_ack_timeouts"]+c["retransmitted_packets"] > 0 {
				t.Errorf("%d timeouts, %d packets sent again", c["local_ack_timeouts"], c["retransmitted_packets"])
			}
		}
	})
}
