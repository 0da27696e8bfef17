package main

import (
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// pump keeps requests under way. The last request of each list asks for a
// completion, which stands for the whole list.
type pump struct {
	s       *side
	lists   [][]verbs.SendWR // used round robin, so that all slots are used
	depth   int              // lists under way
	turn    turn
	crowded bool      // see spinner
	next    int       // index of the next list
	qp      int       // index of the next queue pair, with inTurn
	_       [128]byte // no other pump lies in the cache line of the fields above, or in the next one
}

// turn is which queue pair posts next.
type turn int

const (
	inTurn      turn = iota // round robin
	whoComplete             // the one whose list completed: each keeps as many under way
)

func newPump(s *side, op verbs.Opcode, list, depth int, t turn) *pump {
	p := &pump{s: s, depth: depth, turn: t}
	for first := 0; first == 0 || first < s.Slots; first += list {
		p.lists = append(p.lists, s.list(op, first, list))
	}
	return p
}

// timeTurns is how many iterations of a loop read the clock once: reading it costs a
// percent of a short copy.
const timeTurns = 16

// pumped is what a pump did.
type pumped struct {
	lists   int           // that completed in time
	elapsed time.Duration // how long it really took
	late    int           // lists that completed afterwards
}

// run keeps requests under way until d after start, or until the first completes. When it
// returns nothing is under way. It does not allocate.
func (p *pump) run(start time.Time, d time.Duration) (done pumped, err error) {
	for range p.depth {
		if err := p.post(p.qp); err != nil {
			return done, err
		}
		p.qp = (p.qp + 1) % len(p.s.qps)
	}
	under := p.depth
	wait := spinner{crowded: p.crowded}
	for turns := 0; ; turns++ {
		wcs, err := p.s.poll()
		if err != nil {
			return done, err
		}
		done.lists += len(wcs)
		under -= len(wcs)
		if turns%timeTurns == 0 {
			if done.elapsed = time.Since(start); done.elapsed >= d && done.lists > 0 {
				break
			}
		}
		if len(wcs) == 0 {
			if err := wait.idle(); err != nil {
				return done, err
			}
			continue
		}
		wait.reset()
		for i := range wcs {
			qp := int(wcs[i].ID)
			if p.turn == inTurn {
				qp, p.qp = p.qp, (p.qp+1)%len(p.s.qps)
			}
			if err := p.post(qp); err != nil {
				return done, err
			}
			under++
		}
	}
	done.late = under
	return done, p.drain(under)
}

func (p *pump) post(qp int) error {
	l := p.lists[p.next]
	if p.next++; p.next == len(p.lists) {
		p.next = 0
	}
	l[len(l)-1].ID = uint64(qp)
	_, err := p.s.qps[qp].PostSend(l)
	return err
}

// drain waits for what is under way.
func (p *pump) drain(under int) error {
	wait := spinner{crowded: p.crowded}
	for under > 0 {
		wcs, err := p.s.poll()
		if err != nil {
			return err
		}
		if under -= len(wcs); len(wcs) > 0 {
			wait.reset()
		} else if err := wait.idle(); err != nil {
			return err
		}
	}
	return nil
}

// copyLoop is what the loop link is compared with: copy() between the same
// buffers, slot by slot.
func copyLoop(dst, src *side, d time.Duration) (messages int, elapsed time.Duration) {
	start := time.Now()
	for slot := 0; ; slot = (slot + 1) % src.Slots {
		off := slot * src.stride()
		copy(dst.rx.bytes[off:off+src.Size], src.tx.bytes[off:off+src.Size])
		messages++
		if messages%timeTurns == 0 {
			if elapsed = time.Since(start); elapsed >= d {
				return messages, elapsed
			}
		}
	}
}

// What the far side does meanwhile.

// pollUntil polls a completion queue that stays empty.
func (s *side) pollUntil(stop *atomic.Bool) error {
	var wait spinner
	for !stop.Load() {
		if _, err := s.poll(); err != nil {
			return err
		}
		wait.pause() // each time: the poll does not show whether something has arrived
	}
	return nil
}

// sink takes messages and posts a receive for each.
func (s *side) sink(stop *atomic.Bool) error {
	var wait spinner
	for !stop.Load() {
		wcs, err := s.poll()
		if err != nil {
			return err
		}
		if len(wcs) == 0 {
			wait.pause()
			continue
		}
		wait.reset()
		for range wcs {
			if _, err := s.qps[0].PostRecv(s.recv); err != nil {
				return err
			}
		}
	}
	return nil
}
