package main

// One end of some queue pairs between two processes. Each queue pair has buffers of its own on both sides, of as many
// slots as messages are under way; message n of a queue pair goes from slot n to slot n, modulo their number. A
// measurement ends with the last slot, so that afterwards all data must have arrived.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// spec is what both ends are made of.
type spec struct {
	Addr    string
	QPs     int
	Size    int   // bytes of a message
	Depth   int   // messages under way on each queue pair
	Traffic uint8 // DSCP and ECN bits
	Poll    bool  // the initiator polls instead of sleeping
	Target  bool  // this end receives messages
}

// offer is what the other end must know.
type offer struct {
	Endpoints    []verbs.Endpoint
	Tx, Rx       uint64 // addresses
	TxKey, RxKey uint32
}

// ahead is how many receives a target keeps posted on each queue pair: more than arrive while its process has no
// processor. Several of them are for the same slot.
const ahead = 1024

type side struct {
	spec
	dev    *verbs.Device
	pd     *verbs.PD
	ch     *verbs.Channel // of the completions that this end waits for
	cq     *verbs.CQ
	tx, rx []byte
	txMR   *verbs.MR
	rxMR   *verbs.MR
	qps    []*verbs.QP
	sent   []int // messages of each queue pair, ever
	peer   *offer

	sinking  sync.WaitGroup
	stopSink context.CancelFunc

	mu     sync.Mutex // guards failed
	failed error      // how receiving ended
}

// newSide makes one end. On failure nothing is left.
func newSide(sp spec) (_ *side, err error) {
	s := &side{spec: sp, sent: make([]int, sp.QPs)}
	defer func() {
		if err != nil {
			_ = s.close() // the first error says more
		}
	}()
	if s.dev, err = verbs.Open(sp.Addr, &verbs.Config{Link: verbs.LinkUDP}); err != nil {
		return nil, err
	}
	if s.pd, err = s.dev.AllocPD(); err != nil {
		return nil, err
	}
	n := sp.QPs * sp.Depth * sp.Size
	s.tx, s.rx = make([]byte, n), make([]byte, n)
	fill(s.tx)
	const rights = verbs.AccessLocalWrite | verbs.AccessRemote
	if s.txMR, err = s.pd.RegMR(s.tx, rights); err != nil {
		return nil, err
	}
	if s.rxMR, err = s.pd.RegMR(s.rx, rights); err != nil {
		return nil, err
	}
	if s.ch, err = s.dev.CreateChannel(); err != nil {
		return nil, err
	}
	if s.cq, err = s.dev.CreateCQ(sp.QPs*(sp.Depth+ahead), s.ch); err != nil {
		return nil, err
	}
	limits := verbs.QPCap{MaxSendWR: sp.Depth, MaxRecvWR: ahead, MaxSendSGE: 1, MaxRecvSGE: 1}
	for range sp.QPs {
		qp, err := s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq, Cap: limits})
		if err != nil {
			return nil, err
		}
		s.qps = append(s.qps, qp)
	}
	return s, nil
}

// fill writes what every tx buffer holds, and every rx buffer must hold in the end.
func fill(b []byte) { _, _ = rand.NewChaCha8([32]byte{}).Read(b) } // never fails

func (s *side) offer() offer {
	o := offer{Tx: s.txMR.Addr(), TxKey: s.txMR.RKey(), Rx: s.rxMR.Addr(), RxKey: s.rxMR.RKey()}
	for _, qp := range s.qps {
		o.Endpoints = append(o.Endpoints, qp.Endpoint())
	}
	return o
}

// at returns where a message of a queue pair lies in a buffer.
func (s *side) at(qp, message int) int { return (qp*s.Depth + message%s.Depth) * s.Size }

// connect connects every queue pair to its peer. A target begins to receive.
func (s *side) connect(o *offer) error {
	s.peer = o
	for i, qp := range s.qps {
		if err := qp.Connect(o.Endpoints[i], &verbs.ConnectConfig{TrafficClass: s.Traffic}); err != nil {
			return err
		}
		if !s.Target {
			continue
		}
		for n := range ahead {
			if err := s.postRecv(i, n); err != nil {
				return err
			}
		}
	}
	if s.Target {
		ctx, cancel := context.WithCancel(context.Background())
		s.stopSink = cancel
		s.sinking.Go(func() {
			if err := s.sink(ctx); ctx.Err() == nil {
				s.mu.Lock()
				s.failed = err
				s.mu.Unlock()
			}
		})
	}
	return nil
}

func (s *side) postRecv(qp, n int) error {
	sge := s.rxMR.SGE(s.at(qp, n), s.Size)
	_, err := s.qps[qp].PostRecv([]verbs.RecvWR{{ID: uint64(qp)<<32 | uint64(n), SGL: []verbs.SGE{sge}}})
	return err
}

// sink takes messages, until it fails or ctx is done, and posts a receive for each.
func (s *side) sink(ctx context.Context) error {
	wcs := make([]verbs.WC, 64)
	for {
		got, err := s.next(ctx, wcs)
		if err != nil {
			return err
		}
		for i := range got {
			if err := s.postRecv(int(got[i].ID>>32), int(uint32(got[i].ID))+ahead); err != nil {
				return err
			}
		}
	}
}

// next waits for completions and returns them. It fails with the first that did.
func (s *side) next(ctx context.Context, wcs []verbs.WC) ([]verbs.WC, error) {
	for armed := false; ; {
		n, err := s.cq.Poll(wcs)
		if err != nil {
			return nil, err
		}
		for i := range wcs[:n] {
			if wcs[i].Status != verbs.WCSuccess {
				return nil, wcs[i].Err()
			}
		}
		switch {
		case n > 0:
			return wcs[:n], nil
		case s.Poll && !s.Target:
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			sys.Yield()
			runtime.Gosched()
		case !armed:
			if err := s.cq.RequestNotify(false); err != nil {
				return nil, err
			}
			armed = true
		default:
			ev, err := s.ch.Next(ctx)
			if err != nil {
				return nil, err
			}
			ev.Ack()
			armed = false
		}
	}
}

// stallLimit is how long an end waits for any completion.
const stallLimit = time.Minute

// pumped is what pump has done.
type pumped struct {
	bytes []int64       // of each queue pair, completed in time
	took  time.Duration // how long the measurement really took
	all   int64         // bytes, with those that completed afterwards
}

// pump keeps messages under way on every queue pair for d, and then until all slots were used equally often.
func (s *side) pump(verb verbs.Opcode, d time.Duration) (p pumped, err error) {
	start := time.Now()
	under := 0
	for i := range s.qps {
		for range s.Depth {
			if err := s.post(verb, i); err != nil {
				return p, err
			}
			under++
		}
	}
	p.bytes = make([]int64, len(s.qps))
	over := false
	wcs := make([]verbs.WC, 64)
	for under > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), stallLimit)
		got, err := s.next(ctx, wcs)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("stalled: nothing has completed for %v", stallLimit)
		}
		if err != nil {
			return p, err
		}
		if now := time.Since(start); !over && now >= d {
			p.took, over = now, true
			for i := range got {
				p.bytes[got[i].ID] += int64(s.Size) // the completions that ended the measurement belong to it
			}
		}
		under -= len(got)
		p.all += int64(len(got) * s.Size)
		for i := range got {
			qp := int(got[i].ID)
			if p.took == 0 {
				p.bytes[qp] += int64(s.Size)
			}
			if !over || s.sent[qp]%s.Depth != 0 {
				if err := s.post(verb, qp); err != nil {
					return p, err
				}
				under++
			}
		}
	}
	return p, nil
}

// post posts the next message of a queue pair.
func (s *side) post(verb verbs.Opcode, qp int) error {
	off := s.at(qp, s.sent[qp])
	wr := verbs.SendWR{ID: uint64(qp), Op: verb, Flags: verbs.SendSignaled}
	switch verb {
	case verbs.OpRDMARead:
		wr.SGL, wr.RemoteAddr, wr.RKey = []verbs.SGE{s.rxMR.SGE(off, s.Size)}, s.peer.Tx+uint64(off), s.peer.TxKey
	case verbs.OpRDMAWrite:
		wr.SGL, wr.RemoteAddr, wr.RKey = []verbs.SGE{s.txMR.SGE(off, s.Size)}, s.peer.Rx+uint64(off), s.peer.RxKey
	default:
		wr.SGL = []verbs.SGE{s.txMR.SGE(off, s.Size)}
	}
	s.sent[qp]++
	_, err := s.qps[qp].PostSend([]verbs.SendWR{wr})
	return err
}

func (s *side) counters() map[string]uint64 {
	m := map[string]uint64{}
	for _, c := range s.dev.Counters() {
		m[c.Name] = c.Value
	}
	return m
}

func (s *side) forget() { clear(s.rx) }

// arrived returns an error unless rx holds what every tx buffer holds.
func (s *side) arrived() error {
	if bytes.Equal(s.rx, s.tx) {
		return nil
	}
	for i := range s.rx {
		if s.rx[i] != s.tx[i] {
			return fmt.Errorf("byte %d of slot %d is %#x, not %#x as was sent", i%s.Size, i/s.Size, s.rx[i], s.tx[i])
		}
	}
	return nil
}

// failure returns how receiving failed, or nil.
func (s *side) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

func (s *side) close() error {
	if s.stopSink != nil {
		s.stopSink()
		s.sinking.Wait()
	}
	var errs []error
	for _, qp := range s.qps {
		errs = append(errs, qp.Close())
	}
	if s.cq != nil {
		errs = append(errs, s.cq.Close())
	}
	if s.ch != nil {
		errs = append(errs, s.ch.Close())
	}
	for _, mr := range []*verbs.MR{s.txMR, s.rxMR} {
		if mr != nil {
			errs = append(errs, mr.Close())
		}
	}
	if s.pd != nil {
		errs = append(errs, s.pd.Close())
	}
	if s.dev != nil {
		errs = append(errs, s.dev.Close())
	}
	return errors.Join(errs...)
}
