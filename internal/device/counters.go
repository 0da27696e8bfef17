package device

import (
	"fmt"
	"sync"

	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// deviceCounters adds up the counters of queue pairs: each queue pair counts under its own
// lock, and when it is closed its counters are added to past.
type deviceCounters struct {
	mu     sync.Mutex // guards what follows; taken before a queue pair's lock
	living map[*QP]struct{}
	past   qp.Counters // of those closed
}

func (c *deviceCounters) add(q *QP) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.living == nil {
		c.living = make(map[*QP]struct{})
	}
	c.living[q] = struct{}{}
}

func (c *deviceCounters) remove(q *QP) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.living, q)
	q.mu.Lock()
	c.past.Sum(&q.core.Counters)
	q.mu.Unlock()
}

func (c *deviceCounters) sum() qp.Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.past
	for q := range c.living {
		q.mu.Lock()
		q.absorbLocked()
		all.Sum(&q.core.Counters)
		q.mu.Unlock()
	}
	return all
}

// byName gives counters their names.
func byName(c *qp.Counters) (all []provider.Counter) {
	for i := range c {
		all = append(all, provider.Counter{Name: qp.Counter(i).String(), Value: c[i]})
	}
	return all
}

// Counters returns what the queue pair has counted, by name.
func (q *QP) Counters() []provider.Counter {
	q.mu.Lock()
	q.absorbLocked()
	c := q.core.Counters
	q.mu.Unlock()
	return byName(&c)
}

// Counters returns what the device has counted, by name.
func (d *Device) Counters() []provider.Counter {
	sum := d.counters.sum()
	all := byName(&sum)
	for i := range d.drops {
		all = append(all, provider.Counter{Name: link.Reason(i).String(), Value: d.drops[i].Load()})
	}
	all = append(all,
		provider.Counter{Name: "drop_no_qp", Value: d.noQP.Load()},
		provider.Counter{Name: "management_received", Value: d.management.received.Load()},
		provider.Counter{Name: "management_sent", Value: d.management.sent.Load()},
		provider.Counter{Name: "management_dropped", Value: d.management.dropped.Load()},
		provider.Counter{Name: "management_passed", Value: d.management.passed.Load()},
		provider.Counter{Name: "stale_faults", Value: d.table.StaleFaults()})
	closed, overruns := mem.Remapped() // of the process, whatever the device
	all = append(all,
		provider.Counter{Name: "remap_ranges_closed", Value: closed},
		provider.Counter{Name: "remap_overruns", Value: overruns})
	all = append(all,
		provider.Counter{Name: "dmabuf_regions", Value: d.dmabufs.Regions.Load()},
		provider.Counter{Name: "dmabuf_mappings", Value: d.dmabufs.Mappings.Load()},
		provider.Counter{Name: "dmabuf_faults", Value: d.dmabufs.Faults.Load()},
		provider.Counter{Name: "dmabuf_invalidations", Value: d.dmabufs.Invalidations.Load()},
		provider.Counter{Name: "dmabuf_pins", Value: d.dmabufs.Pins.Load()})
	all = append(all, provider.PeerCounters()...) // of the process, too
	for from := range mem.NumKinds {
		for to := range mem.NumKinds {
			name := fmt.Sprintf("copied_bytes_%v_to_%v", from, to)
			all = append(all, provider.Counter{Name: name, Value: d.table.Moved(from, to)})
		}
	}
	if d.capture != nil {
		all = append(all, provider.Counter{Name: "capture_lost_packets", Value: d.capture.Lost()})
	}
	if u, ok := d.link.(*link.Shared); ok {
		s := u.Stats()
		fetched, direct := u.Fetched()
		all = append(all,
			provider.Counter{Name: "tx_refused_packets", Value: s.TxLost},
			provider.Counter{Name: "rx_overflow_packets", Value: s.Overflows},
			provider.Counter{Name: "local_undelivered", Value: u.Lost()},
			provider.Counter{Name: "local_forwarded_packets", Value: u.Forwarded()},
			provider.Counter{Name: "local_fetched_trains", Value: fetched},
			provider.Counter{Name: "local_named_trains", Value: u.Named()},
			provider.Counter{Name: "local_mapped_trains", Value: direct})
	}
	return all
}
