package perf

import (
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// bandwidth keeps the send queue of each of the thread's queue pairs as full as the depth
// allows, batch by batch, until the limit, and waits for the last completion. The time
// from the posting of a batch to its completion is its latency. Time counts from start on,
// which is the same for all threads.
//
// Nothing in the loop allocates.
func (m *initiator) bandwidth(start time.Time, l limit) (span, error) {
	var done uint64
	left := uint64(l.iters) // with a duration: not used
	full := uint64(m.p.Batch)
	now := start
	inflight := 0 // batches
	for more := true; more || inflight > 0; {
		for _, f := range m.flows {
			for more && f.posted-f.done+full <= uint64(m.p.Depth) {
				n := full
				if l.iters > 0 {
					n = min(full, left)
					left -= n
					more = left > 0
				}
				if err := f.postBatch(int(n), m.p.Batch); err != nil {
					return span{}, err
				}
				inflight++
			}
		}
		wcs, err := m.poll()
		if err != nil {
			return span{}, err
		}
		if len(wcs) == 0 {
			if err := m.idle.wait(pollTurns); err != nil {
				return span{}, err
			}
			continue
		}
		m.idle.reset()
		now = time.Now()
		for i := range wcs {
			n, posted := m.flows[wcs[i].ID].retire()
			done += uint64(n)
			m.hist.Record(now.Sub(posted))
		}
		inflight -= len(wcs)
		if l.iters == 0 && now.Sub(start) >= l.duration {
			more = false
		}
		if err := m.err(); err != nil {
			return span{}, err
		}
	}
	return span{messages: done, elapsed: now.Sub(start)}, nil
}

// postBatch posts the next n requests. A full batch has more or as many.
func (f *flow) postBatch(n, full int) error {
	at := int(f.posted & uint64(len(f.sends)-1))
	wrs := f.sends[at : at+n]
	if n < full {
		// The last one of a batch asks for the completion: here it is another.
		wrs = f.tail[:copy(f.tail, wrs)]
		wrs[n-1].Flags |= verbs.SendSignaled
	}
	f.batches[(f.head+f.len)%len(f.batches)] = batch{time.Now(), n}
	if _, err := f.qp.PostSend(wrs); err != nil {
		return err
	}
	f.posted += uint64(n)
	f.len++
	return nil
}

// retire takes the oldest batch off, which has completed: a send queue
// completes in order.
func (f *flow) retire() (n int, posted time.Time) {
	b := f.batches[f.head]
	f.head = (f.head + 1) % len(f.batches)
	f.len--
	f.done += uint64(b.requests)
	return b.requests, b.posted
}
