package verbs

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/provider"
)

// CQ is a completion queue: where queue pairs report what became of their
// requests. See ibv_create_cq(3).
type CQ struct {
	p  provider.CQ
	ch *Channel // nil for a queue that is only polled
}

func (cq *CQ) ok() bool { return cq != nil && cq.p != nil }

// Number returns the queue's number, as in [AsyncEvent].
func (cq *CQ) Number() uint32 { return cq.p.Number() }

// Cap returns the number of completions that the queue can hold.
func (cq *CQ) Cap() int { return cq.p.Cap() }

// Poll takes up to len(wcs) completions out of the queue, oldest first, and
// returns how many; 0 if there are none. It waits for no completion. In a program
// that polls, it is Poll that receives packets and sends answers. A completion that
// reports a failure is no error of Poll: look at each Status. See ibv_poll_cq(3).
//
// Errors: EOVERFLOW if the queue has overflowed, once the completions that were
// still in it are polled; EINVAL for a queue that is nil or closed.
func (cq *CQ) Poll(wcs []WC) (int, error) {
	if !cq.ok() {
		return 0, invalid("poll_cq", "nil completion queue")
	}
	return cq.p.Poll(wcs)
}

// RequestNotify arms the queue: the next completion that is added to it raises
// one event on the queue's channel, and disarms it. With solicitedOnly only a
// completion that failed, or that received a message sent with [SendSolicited],
// counts. Arming again before the event only ever widens what counts.
//
// Completions that are in the queue already raise no event. So arm first, then poll
// until the queue is empty, then wait: no completion is missed. See
// ibv_req_notify_cq(3).
//
// Errors: EINVAL if the queue is nil or has no channel.
func (cq *CQ) RequestNotify(solicitedOnly bool) error {
	if !cq.ok() {
		return invalid("req_notify_cq", "nil completion queue")
	}
	return cq.p.RequestNotify(solicitedOnly)
}

// Resize changes the number of entries to at least n. Completions in the queue
// stay there. See ibv_resize_cq(3).
//
// Errors: EINVAL if n is less than 1, more than MaxCQE in [DeviceAttr], or less
// than the number of completions in the queue, or the queue is nil.
func (cq *CQ) Resize(n int) error {
	if !cq.ok() {
		return invalid("resize_cq", "nil completion queue")
	}
	return cq.p.Resize(n)
}

// Close destroys the queue. Like ibv_destroy_cq(3) it first waits until all
// events that [Channel.Next] has returned for the queue are acknowledged, so a
// goroutine that holds such an event must call [Event.Ack] before it closes the
// queue. Completions that were not polled are dropped, and so are events that Next has
// not returned yet. It is idempotent.
//
// Errors: EBUSY, at once, while a queue pair uses the queue; EINVAL for a nil
// queue.
func (cq *CQ) Close() error {
	if !cq.ok() {
		return invalid("destroy_cq", "nil completion queue")
	}
	err := cq.p.Close()
	if err == nil && cq.ch != nil {
		cq.ch.remove(cq)
	}
	return err
}

// Channel is a completion channel: where completion queues that were armed
// report that something has completed. See ibv_create_comp_channel(3).
type Channel struct {
	p provider.Channel

	mu  sync.Mutex          // guards cqs
	cqs map[provider.CQ]*CQ // the open queues that report here
}

func (ch *Channel) ok() bool { return ch != nil && ch.p != nil }

func (ch *Channel) add(cq *CQ) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	ch.cqs[cq.p] = cq
}

func (ch *Channel) remove(cq *CQ) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	delete(ch.cqs, cq.p)
}

func (ch *Channel) find(p provider.CQ) *CQ {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.cqs[p]
}

// Next waits for an event and returns it. Each event is returned once, to one
// caller, which must call [Event.Ack]. An event means that the queue had a
// completion, not that it still has one: Poll may return 0. See
// ibv_get_cq_event(3).
//
// Errors: the context's error when ctx is done; EBADF when the channel is
// closed; EINVAL for a nil channel.
func (ch *Channel) Next(ctx context.Context) (*Event, error) {
	if !ch.ok() {
		return nil, invalid("get_cq_event", "nil channel")
	}
	for {
		p, err := ch.p.Next(ctx)
		if err != nil {
			return nil, err
		}
		// From here to Ack, Close of the queue waits, so find finds the queue. An
		// event of a queue that is gone all the same is dropped.
		if cq := ch.find(p); cq != nil {
			return &Event{CQ: cq, p: p}, nil
		}
		p.Ack(1)
	}
}

// Ready returns a channel for select statements: a value can be received from it when
// there may be an event. Who has received it calls Next with a context that is done, which
// returns an event if there is one and does not wait. Of several goroutines one receives the
// value; if Next leaves events to others, there is another one. It is nil for a nil channel.
func (ch *Channel) Ready() <-chan struct{} {
	if !ch.ok() {
		return nil
	}
	return ch.p.Ready()
}

// Close destroys the channel; calls that wait in Next return EBADF. It is idempotent.
// See ibv_destroy_comp_channel(3).
//
// Errors: EBUSY while a completion queue uses the channel; EINVAL for a nil
// channel.
func (ch *Channel) Close() error {
	if !ch.ok() {
		return invalid("destroy_comp_channel", "nil channel")
	}
	return ch.p.Close()
}

// Event is the report that an armed completion queue has had a completion.
type Event struct {
	CQ *CQ

	p     provider.CQ
	acked atomic.Bool
}

// Ack acknowledges the event; [CQ.Close] waits for that. Acknowledging an event
// again does nothing. See ibv_ack_cq_events(3).
func (e *Event) Ack() {
	if e != nil && e.p != nil && e.acked.CompareAndSwap(false, true) {
		e.p.Ack(1)
	}
}
