package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// rig is a path with a process at each end: the first one initiates.
type rig struct {
	*path
	near, far *peer
	port      int // where the far end listens for TCP
}

// newRig starts the processes and connects their queue pairs.
func newRig(p *path, sp spec) (_ *rig, err error) {
	r := &rig{path: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.stop())
		}
	}()
	if r.near, err = newPeer(p, 0); err != nil {
		return nil, err
	}
	if r.far, err = newPeer(p, 1); err != nil {
		return nil, err
	}
	if sp.QPs > 0 {
		if err = r.connect(sp); err != nil {
			return nil, err
		}
	}
	l, err := r.far.call(request{Op: "listen", Addr: p.addr[1]})
	r.port = l.Port
	return r, err
}

// connect makes queue pairs at both ends and connects them.
func (r *rig) connect(sp spec) error {
	own, its := sp, sp
	own.Addr, its.Addr, its.Target = r.addr[0], r.addr[1], true
	a, err := r.near.call(request{Op: "make", Spec: &own})
	if err != nil {
		return err
	}
	b, err := r.far.call(request{Op: "make", Spec: &its})
	if err != nil {
		return err
	}
	if _, err = r.far.call(request{Op: "connect", Offer: a.Offer}); err != nil {
		return err
	}
	_, err = r.near.call(request{Op: "connect", Offer: b.Offer})
	return err
}

// stop ends the processes, and leaves the path.
func (r *rig) stop() error {
	var errs []error
	for _, p := range []*peer{r.near, r.far} {
		if p != nil {
			errs = append(errs, p.Stop())
		}
	}
	return errors.Join(errs...)
}

// figures are what was seen in one measurement.
type figures struct {
	mibs     float64            // MiB/s
	shares   []float64          // of each queue pair, MiB/s
	cpu      float64            // CPU seconds of both processes for each GB
	counters map[string]float64 // of both devices together; of TCP, tcp_retransmitted
}

const mib = 1 << 20

// mark begins to count.
func (r *rig) mark() (net map[string]uint64, err error) {
	for _, p := range []*peer{r.near, r.far} {
		if _, err := p.call(request{Op: "mark"}); err != nil {
			return nil, err
		}
	}
	return r.network()
}

// count ends counting. The end that verifies must have received everything.
func (r *rig) count(f *figures, before map[string]uint64, verifies *peer) error {
	f.counters = map[string]float64{}
	var cpu time.Duration
	for _, p := range []*peer{r.near, r.far} {
		c, err := p.call(request{Op: "count", Verify: p == verifies})
		if err != nil {
			return err
		}
		cpu += c.CPU
		for k, v := range c.Counters {
			f.counters[k] += float64(v)
		}
	}
	f.cpu = cpu.Seconds() // divided by the caller
	after, err := r.network()
	if err != nil {
		return err
	}
	for k, name := range map[string]string{"Tcp.RetransSegs": "tcp_retransmitted", "Tcp.OutSegs": "tcp_sent", "Udp.RcvbufErrors": "udp_rcvbuf_errors"} {
		f.counters[name] = float64(after[k] - before[k])
	}
	return nil
}

// verbs measures messages of one kind on all queue pairs.
func (r *rig) verbs(verb verbs.Opcode, d time.Duration) (figures, error) {
	all, err := together([]*rig{r}, verb, d)
	return all[0], err
}

// startTogether is how long processes have to get ready for a common start.
const startTogether = 100 * time.Millisecond

// together measures several rigs in the same time.
func together(rigs []*rig, verb verbs.Opcode, d time.Duration) ([]figures, error) {
	all, errs, before := make([]figures, len(rigs)), make([]error, len(rigs)), make([]map[string]uint64, len(rigs))
	for i, r := range rigs {
		var err error
		if before[i], err = r.mark(); err != nil {
			return all, err
		}
	}
	var start time.Time // at once
	if len(rigs) > 1 {
		start = time.Now().Add(startTogether)
	}
	done := make([]reply, len(rigs))
	var wg sync.WaitGroup
	for i, r := range rigs {
		wg.Go(func() { done[i], errs[i] = r.near.call(request{Op: "pump", Verb: verb, Start: start, For: d}) })
	}
	wg.Wait()
	for i, r := range rigs {
		if errs[i] == nil {
			errs[i] = r.pumped(&all[i], &done[i], before[i], verb)
		}
	}
	return all, errors.Join(errs...)
}

// pumped makes figures of what a pump has done.
func (r *rig) pumped(f *figures, done *reply, before map[string]uint64, verb verbs.Opcode) error {
	verifies := r.far
	if verb == verbs.OpRDMARead {
		verifies = r.near
	}
	if err := r.count(f, before, verifies); err != nil {
		return err
	}
	var all int64
	for _, n := range done.Bytes {
		all += n
		f.shares = append(f.shares, float64(n)/mib/done.Took.Seconds())
	}
	f.mibs = float64(all) / mib / done.Took.Seconds()
	f.cpu /= float64(done.All) / 1e9 // CPU time covers what completed afterwards, too
	return nil
}

// tcp measures some TCP connections at a time.
func (r *rig) tcp(connections int, d time.Duration) (f figures, err error) {
	before, err := r.mark()
	if err != nil {
		return f, err
	}
	if _, err := r.near.call(request{Op: "stream", Addr: fmt.Sprintf("%s:%d", r.addr[1], r.port), Connections: connections, For: d}); err != nil {
		return f, err
	}
	var all int64
	for range connections {
		got, err := r.far.call(request{Op: "streamed"})
		if err != nil {
			return f, err
		}
		all += got.Bytes[0]
		f.shares = append(f.shares, float64(got.Bytes[0])/mib/got.Took.Seconds())
		f.mibs += f.shares[len(f.shares)-1]
	}
	if err := r.count(&f, before, nil); err != nil {
		return f, err
	}
	f.cpu /= max(float64(all), 1) / 1e9
	return f, nil
}

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	n := len(s)
	if n == 0 {
		return 0
	}
	return (s[(n-1)/2] + s[n/2]) / 2
}

// medianOf returns the median of something in several measurements.
func medianOf(fs []figures, of func(*figures) float64) float64 {
	var all []float64
	for i := range fs {
		all = append(all, of(&fs[i]))
	}
	return median(all)
}

// ratio returns the median of the rounds' ratios.
func ratio(a, b []figures) float64 {
	var all []float64
	for i := range min(len(a), len(b)) {
		if b[i].mibs > 0 {
			all = append(all, a[i].mibs/b[i].mibs)
		}
	}
	return median(all)
}

func least(fs []figures) float64 {
	return slices.MinFunc(fs, func(a, b figures) int { return cmp.Compare(a.mibs, b.mibs) }).mibs
}

func most(fs []figures) float64 {
	return slices.MaxFunc(fs, func(a, b figures) int { return cmp.Compare(a.mibs, b.mibs) }).mibs
}

// leastOfLargest returns what part of the largest share the smallest is.
func leastOfLargest(shares []float64) float64 {
	if most := slices.Max(shares); most > 0 {
		return slices.Min(shares) / most
	}
	return 0
}

func rateOf(f *figures) float64 { return f.mibs }
