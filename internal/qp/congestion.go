package qp

import (
	"time"

	"github.com/verbena-rdma/verbena/internal/train"
)

// congestion decides how many packets may be under way, and when none may be sent: the
// window of a requester. A path has a window of its own, which is never exceeded.
//
//   - lost halves the window, down to minWindow, unless a controller looks after that
//     (control.go).
//   - notReady stops the sending for a while. If the peer remains not ready, the window
//     is one packet, until that is acknowledged.
//   - acked opens the window: to what it was before the peer was not ready, and by an
//     eighth of what was acknowledged.
type congestion struct {
	path   int // the path's window
	pipe   int // packets that may be under way besides, since the network holds them
	named  int // the same for payloads by name (Carrier), if it is wider
	short  Short
	window int // at most the path's, but for minWindow
	wide   int // the window to return to when the peer is ready again; 0 if it was not narrowed

	until Time // nothing is sent before; 0 if the peer is ready, or is to be asked again
	since Time // when the peer was first not ready; 0 if it is ready
}

// minWindow is what the window shrinks to under loss.
const minWindow = 4

// A peer that is not ready may stay so for as long as its storage takes, and 7
// retries mean for ever. The RNR NAK names the shortest wait (IBA 9.7.5.2.8). The next
// wait is at least an eighth of the time that the peer has not been ready, up to
// maxRNRWait.
const (
	rnrShare   = 8
	maxRNRWait = 50 * time.Millisecond
)

// begin sets the window of a new path, which nothing has narrowed yet.
func (c *congestion) begin(p *Path) {
	c.path, c.named, c.short, c.window, c.wide, c.pipe = p.Window, p.Named, p.Short, p.Window, 0, 0
}

// allowance returns how many packets may be under way when one of a message of n bytes is
// sent.
func (c *congestion) allowance(n int) int {
	w := min(c.window, c.path)
	if w == c.path {
		w += c.pipe
	}
	if n < c.short.Below {
		w = min(w, c.short.Window)
	}
	return w
}

// allowanceNamed is allowance for a payload by name, of some packets, which takes no room on the
// link. The wider window is for as many messages as the peer can take moves.
func (c *congestion) allowanceNamed(n, packets int) int {
	if n >= train.LeastCarried && c.open() {
		return max(c.path, min(c.named, maxMoves*packets))
	}
	return c.allowance(n)
}

// open reports whether the window is as wide as the path's.
func (c *congestion) open() bool { return c.window >= c.path }

// acked notes that n packets were acknowledged: the peer is ready.
func (c *congestion) acked(n int) {
	c.since = 0
	if c.window >= c.path {
		return
	}
	if c.wide != 0 {
		c.window, c.wide = c.wide, 0
	}
	c.window = min(c.path, c.window+max(1, n/8))
}

// lost notes that packets are sent again, on a path without a controller.
func (c *congestion) lost() { c.window = max(minWindow, c.window/2) }

// notReady notes an RNR NAK that asks for a wait of d at least.
func (c *congestion) notReady(d, now Time) {
	if c.since == 0 {
		c.since, c.until = now, now+d
		return
	}
	if c.wide == 0 {
		c.wide, c.window = c.window, 1
	}
	c.until = now + max(d, min((now-c.since)/rnrShare, maxRNRWait))
}

// waits reports whether the requester waits for the peer to become ready.
func (c *congestion) waits() bool { return c.until != 0 }

// deadline returns when that wait ends, 0 if there is none.
func (c *congestion) deadline() Time { return c.until }

// askAgain ends the wait: the peer is to be asked whether it is ready.
func (c *congestion) askAgain() { c.until = 0 }

// stop ends the wait, since nothing is to be sent any more.
func (c *congestion) stop() { c.until, c.since = 0, 0 }
