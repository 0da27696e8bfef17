package device

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/queue"
)

// Channel delivers the events of completion queues.
type Channel struct {
	fifo[*CQ]
	dev    *Device
	refs   int  // guarded by dev.mu: completion queues on it
	closed bool // guarded by dev.mu
}

// CreateChannel makes a completion channel.
func (d *Device) CreateChannel() (provider.Channel, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.countLocked("create_comp_channel", &d.counts.channels, d.limits.CQs); err != nil {
		return nil, err
	}
	ch := &Channel{dev: d}
	ch.init()
	return ch, nil
}

// Next waits for an event. The event counts until it is acknowledged.
func (c *Channel) Next(ctx context.Context) (provider.CQ, error) {
	for {
		cq, closed, err := c.wait(ctx)
		switch {
		case err != nil:
			return nil, err
		case closed:
			return nil, ib.Errorf("get_cq_event", syscall.EBADF, "the channel is closed")
		case cq.take():
			return cq, nil
		}
	}
}

// Ready implements provider.Channel.
func (c *Channel) Ready() <-chan struct{} { return c.ready }

// Close destroys the channel, unless completion queues use it.
func (c *Channel) Close() error {
	c.dev.mu.Lock()
	defer c.dev.mu.Unlock()
	if c.closed {
		return nil
	}
	if c.refs > 0 {
		return ib.Errorf("destroy_comp_channel", syscall.EBUSY, "%d completion queues use it", c.refs)
	}
	c.closed = true
	c.dev.counts.channels--
	c.dev.publishLocked()
	c.fifo.close()
	return nil
}

// CQ is a completion queue.
type CQ struct {
	*queue.CQ
	dev     *Device
	number  uint32
	channel *Channel
	refs    int         // guarded by dev.mu: queue pairs on it
	closed  atomic.Bool // changed under dev.mu

	polled   polled
	patience patience
	home     *shard // guarded by Device.spread: of the latest queue pair that sends to it

	acks struct {
		sync.Mutex // guards what follows
		taken      int
		closing    bool
		none       *sync.Cond // taken is 0
	}
}

// CreateCQ makes a completion queue of at least entries.
func (d *Device) CreateCQ(entries int, ch provider.Channel) (provider.CQ, error) {
	if entries < 1 || entries > d.limits.CQE {
		return nil, ib.Errorf("create_cq", syscall.EINVAL, "%d entries: 1 to %d are possible", entries, d.limits.CQE)
	}
	var channel *Channel
	if ch != nil {
		c, ok := ch.(*Channel)
		if !ok || c.dev != d {
			return nil, ib.Errorf("create_cq", syscall.EINVAL, "the channel belongs to another device")
		}
		channel = c
	}
	cq := &CQ{CQ: queue.NewCQ(entries), dev: d, channel: channel}
	cq.polls(nil, nil)
	cq.acks.none = sync.NewCond(&cq.acks)
	cq.OnOverflow = func() { d.events.push(ib.AsyncEvent{Type: ib.EventCQErr, CQ: cq.number}) }
	if channel != nil {
		cq.OnEvent = func() { channel.push(cq) }
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if channel != nil && channel.closed {
		return nil, ib.Errorf("create_cq", syscall.EINVAL, "the channel is closed")
	}
	if err := d.countLocked("create_cq", &d.counts.cqs, d.limits.CQs); err != nil {
		return nil, err
	}
	if channel != nil {
		channel.refs++
	}
	d.nextCQ++
	cq.number = d.nextCQ
	return cq, nil
}

func (c *CQ) Number() uint32 { return c.number }

// Poll takes completions. If the queue is empty, it makes progress for a shard of its queue
// pairs first: the poller itself reads the packets that it waits for.
func (c *CQ) Poll(wcs []ib.WC) (int, error) {
	n, err := c.PollNotes(wcs, nil)
	if n == 0 {
		c.patience.foundNothing()
		if c.closed.Load() {
			c.patience.rest() // Close, which sets closed first, may have called it too early
		}
	} else {
		c.patience.foundSome()
	}
	return n, err
}

// Note is what a poll returns about a completion beyond its ib.WC.
type Note = queue.Note

// PollNotes is Poll, but it never yields; notes, if it is not nil, has room for as many.
func (c *CQ) PollNotes(wcs []ib.WC, notes []Note) (int, error) {
	shards := c.polled.shards()
	for _, s := range shards {
		if s.deferred.Load() {
			s.flushDeferred()
		}
	}
	n := c.CQ.PollNotes(wcs, notes)
	if n == 0 && len(wcs) > 0 {
		i := c.polled.choose(len(shards))
		var got bool
		if n, got = shards[i].poll(c, wcs, notes); got && len(shards) > 1 {
			c.polled.busy.Store(uint32(i))
		}
		if n == 0 {
			c.polled.help(shards)
		}
	}
	if n == 0 && c.closed.Load() {
		return 0, errClosedCQ("poll_cq")
	}
	if n == 0 && c.Overflowed() {
		return 0, ib.Errorf("poll_cq", syscall.EOVERFLOW, "the completion queue has overflowed and lost completions")
	}
	return n, nil
}

func errClosedCQ(op string) error {
	return ib.Errorf(op, syscall.EINVAL, "the completion queue is closed")
}

// RequestNotify arms the queue.
func (c *CQ) RequestNotify(solicitedOnly bool) error {
	if c.closed.Load() {
		return errClosedCQ("req_notify_cq")
	}
	if c.channel == nil {
		return ib.Errorf("req_notify_cq", syscall.EINVAL, "the completion queue has no channel")
	}
	c.patience.rest()
	c.Arm(solicitedOnly)
	return nil
}

// Arm arms the queue. The program is about to sleep until something completes: the background
// goroutines of the queue's shards receive for it from now on.
func (c *CQ) Arm(solicitedOnly bool) {
	c.CQ.Arm(solicitedOnly)
	for _, s := range c.polled.shards() {
		s.programSleeps()
	}
}

// Resize changes the number of entries.
func (c *CQ) Resize(entries int) error {
	if c.closed.Load() {
		return errClosedCQ("resize_cq")
	}
	if entries < 1 || entries > c.dev.limits.CQE {
		return ib.Errorf("resize_cq", syscall.EINVAL, "%d entries: 1 to %d are possible", entries, c.dev.limits.CQE)
	}
	if !c.CQ.Resize(entries) {
		return ib.Errorf("resize_cq", syscall.EINVAL, "%d entries are fewer than the completions that wait", entries)
	}
	return nil
}

// take counts an event that Next returns, unless the queue is being destroyed.
func (c *CQ) take() bool {
	c.acks.Lock()
	defer c.acks.Unlock()
	if c.acks.closing {
		return false
	}
	c.acks.taken++
	return true
}

// Ack acknowledges events.
func (c *CQ) Ack(events int) {
	c.acks.Lock()
	defer c.acks.Unlock()
	c.acks.taken -= events
	if c.acks.taken <= 0 {
		c.acks.none.Broadcast()
	}
}

// Close destroys the queue, unless queue pairs use it. It waits until the
// events that were taken are acknowledged.
func (c *CQ) Close() error {
	d := c.dev
	d.mu.Lock()
	if c.closed.Load() || c.refs > 0 {
		refs, closed := c.refs, c.closed.Load()
		d.mu.Unlock()
		if closed {
			return nil
		}
		return ib.Errorf("destroy_cq", syscall.EBUSY, "%d queue pairs use it", refs)
	}
	c.closed.Store(true)
	d.mu.Unlock()
	c.patience.rest()
	c.End()

	c.acks.Lock()
	c.acks.closing = true
	for c.acks.taken > 0 {
		c.acks.none.Wait()
	}
	c.acks.Unlock()
	if c.channel != nil {
		c.channel.remove(func(o *CQ) bool { return o == c })
	}
	d.mu.Lock()
	d.counts.cqs--
	d.publishLocked()
	if c.channel != nil {
		c.channel.refs--
	}
	d.mu.Unlock()
	return nil
}
