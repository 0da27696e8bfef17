package cm

import (
	"container/heap"
	"time"
)

// Codes of timeouts that Linux's rdma_cm uses.
const (
	responseTimeout = 20 // CM response timeouts of REQ, 4096 ms
	serviceTimeout  = 24 // of MRA, 65536 ms
	maxCMRetries    = 15
)

// duration returns what the code of a timeout stands for, 4.096 µs × 2^code, as Linux rounds it.
func duration(code uint8) Time {
	return time.Millisecond << max(int(code&31)-8, 0)
}

// repeat sends a MAD and repeats it until there is an answer, or too often.
func (n *Conn) repeat(now Time, s *Send) {
	n.msg, n.interval, n.left = s, n.timeout, n.maxRetries
	n.core.queue(s)
	n.arm(now + n.interval)
}

// cancel ends the repetition, and any other timer.
func (n *Conn) cancel() {
	n.msg = nil
	if n.timer != 0 {
		heap.Remove(&n.core.timers, n.timer-1)
	}
}

// expire handles the timer of the Conn, which has just ended.
func (n *Conn) expire(now Time) {
	if n.msg != nil && n.left > 0 {
		n.left--
		n.core.queue(n.msg)
		n.arm(now + n.interval)
		return
	}
	switch n.state {
	case ReqSent, MRAReqRcvd, RepSent, MRARepRcvd, SIDRReqSent:
		n.idle()
		n.emit(Event{Type: EventUnreachable})
	case DreqSent:
		n.enterTimeWait(now)
		n.emitDisconnected(true)
	case TimeWait:
		n.idle()
		if n.disconnected {
			n.emit(Event{Type: EventTimewaitExit})
		}
	}
}

// arm makes the timer of the Conn end at t.
func (n *Conn) arm(t Time) {
	n.deadline = t
	if n.timer != 0 {
		heap.Fix(&n.core.timers, n.timer-1)
	} else {
		heap.Push(&n.core.timers, n)
	}
}

// timers is a heap of the Conns whose timer runs, by deadline.
type timers []*Conn

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].deadline < t[j].deadline }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].timer, t[j].timer = i+1, j+1
}

// Push is for package heap.
func (t *timers) Push(x any) {
	n := x.(*Conn)
	*t = append(*t, n)
	n.timer = len(*t)
}

// Pop is for package heap.
func (t *timers) Pop() any {
	end := len(*t) - 1
	n := (*t)[end]
	(*t)[end] = nil
	*t = (*t)[:end]
	n.timer = 0
	return n
}
