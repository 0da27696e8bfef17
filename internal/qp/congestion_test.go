package qp

import (
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/train"
)

// TestCongestion: what each event does to the window and to the time of the next packet.
func TestCongestion(t *testing.T) {
	const ms = time.Millisecond
	type step struct {
		do     string // an event; and its number:
		n      int    // packets acknowledged; milliseconds that an RNR NAK asks for
		at     Time
		window int
		until  Time
	}
	for name, c := range map[string]struct {
		path  Path
		steps []step
	}{
		"an acknowledgement opens no more than the path": {Path{Window: 64}, []step{
			{do: "acked", n: 1000, window: 64},
		}},
		"loss halves, acknowledgements add an eighth": {Path{Window: 64}, []step{
			{do: "lost", window: 32}, {do: "lost", window: 16}, {do: "acked", n: 1, window: 17},
			{do: "acked", n: 15, window: 18}, {do: "acked", n: 16, window: 20}, {do: "acked", n: 1 << 20, window: 64},
		}},
		"loss leaves a few packets": {Path{Window: 64}, []step{
			{do: "lost", window: 32}, {do: "lost", window: 16}, {do: "lost", window: 8}, {do: "lost", window: 4}, {do: "lost", window: 4},
		}},
		"loss on a narrow path": {Path{Window: 3}, []step{
			{do: "lost", window: 3}, {do: "lost", window: 3}, {do: "acked", n: 1, window: 3},
		}},
		"not ready once": {Path{Window: 64}, []step{
			{do: "notReady", n: 2, at: 10 * ms, window: 64, until: 12 * ms}, {do: "askAgain", window: 64},
			{do: "acked", n: 1, window: 64},
			{do: "notReady", n: 2, at: 900 * ms, window: 64, until: 902 * ms}, // the first again
		}},
		"not ready for long": {Path{Window: 64}, []step{
			{do: "lost", window: 32},
			{do: "notReady", n: 2, at: 10 * ms, window: 32, until: 12 * ms}, {do: "askAgain", window: 32},
			{do: "notReady", n: 2, at: 12 * ms, window: 1, until: 14 * ms}, {do: "askAgain", window: 1},
			{do: "notReady", n: 2, at: 90 * ms, window: 1, until: 100 * ms}, {do: "askAgain", window: 1},
			{do: "notReady", n: 2, at: 10_010 * ms, window: 1, until: 10_060 * ms}, {do: "askAgain", window: 1},
			{do: "notReady", n: 491, at: 20_000 * ms, window: 1, until: 20_491 * ms}, {do: "askAgain", window: 1},
			{do: "acked", n: 8, window: 33},
			{do: "acked", n: 8, window: 34},
		}},
		"loss while not ready": {Path{Window: 64}, []step{
			{do: "notReady", n: 1, at: 1 * ms, window: 64, until: 2 * ms}, {do: "notReady", n: 1, at: 2 * ms, window: 1, until: 3 * ms},
			{do: "lost", window: 4, until: 3 * ms}, {do: "acked", n: 1, window: 64, until: 3 * ms},
		}},
		"stopped": {Path{Window: 64}, []step{
			{do: "notReady", n: 1, at: 1 * ms, window: 64, until: 2 * ms}, {do: "stop", window: 64},
			{do: "notReady", n: 1, at: 5 * ms, window: 64, until: 6 * ms}, // the first again
		}},
		"another path": {Path{Window: 64}, []step{
			{do: "notReady", n: 1, at: 1 * ms, window: 64, until: 2 * ms}, {do: "notReady", n: 1, at: 2 * ms, window: 1, until: 3 * ms},
			{do: "begin", window: 64, until: 3 * ms},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var g congestion
			g.begin(&c.path)
			for i, s := range c.steps {
				switch s.do {
				case "acked":
					g.acked(s.n)
				case "lost":
					g.lost()
				case "notReady":
					g.notReady(Time(s.n)*ms, s.at)
				case "askAgain":
					g.askAgain()
				case "stop":
					g.stop()
				case "begin":
					g.begin(&c.path)
				}
				if w := g.allowance(1 << 20); w != s.window || g.deadline() != s.until || g.waits() != (s.until != 0) {
					t.Fatalf("step %d, %s: window %d, waits until %v; want %d, %v", i+1, s.do, w, g.deadline(), s.window, s.until)
				}
				if g.open() != (s.window == c.path.Window) {
					t.Errorf("step %d, %s: open is %v with a window of %d", i+1, s.do, g.open(), s.window)
				}
			}
		})
	}
}

// TestCongestionNamed: payloads by reference have a wider window, but for short messages, and
// after a loss.
func TestCongestionNamed(t *testing.T) {
	var g congestion
	g.begin(&Path{Window: 64, Named: 500})
	if s, l := g.allowanceNamed(train.LeastCarried-1, 16), g.allowanceNamed(train.LeastCarried, 16); s != 64 || l != 500 {
		t.Errorf("%d packets of short messages, %d of long ones", s, l)
	}
	if g.lost(); g.allowanceNamed(train.LeastCarried, 16) != 32 {
		t.Errorf("%d packets after a loss", g.allowanceNamed(train.LeastCarried, 16))
	}
}

// TestCongestionShort: short messages have a window of their own, within the other.
func TestCongestionShort(t *testing.T) {
	var g congestion
	g.begin(&Path{Window: 64, Short: Short{Below: 256, Window: 20}})
	for _, c := range []struct{ losses, short, long int }{{0, 20, 64}, {1, 20, 32}, {1, 16, 16}} {
		for range c.losses {
			g.lost()
		}
		if s, l := g.allowance(255), g.allowance(256); s != c.short || l != c.long {
			t.Errorf("%d packets of short messages, %d of long ones; want %d, %d", s, l, c.short, c.long)
		}
	}
}
