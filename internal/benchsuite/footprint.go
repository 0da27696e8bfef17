package main

// What idle queue pairs cost: memory and CPU time. Both are measured in a fresh
// process, so that nothing else is counted.

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

const crowdQueue = 64

// crowd is many queue pairs of one device, connected in pairs.
type crowd struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qps []*verbs.QP
}

func newCrowd() (_ *crowd, err error) {
	c := new(crowd)
	defer func() {
		if err != nil {
			_ = c.close() // the first error says more
		}
	}()
	if c.dev, err = verbs.Open("", nil); err != nil {
		return nil, err
	}
	if c.pd, err = c.dev.AllocPD(); err != nil {
		return nil, err
	}
	// One queue for all: only two queue pairs at a time have requests under way.
	c.cq, err = c.dev.CreateCQ(4096, nil)
	return c, err
}

// grow makes n queue pairs and connects each to its neighbour.
func (c *crowd) grow(n int) error {
	c.qps = make([]*verbs.QP, 0, n)
	cfg := &verbs.QPConfig{Type: verbs.RC, SendCQ: c.cq, RecvCQ: c.cq,
		Cap: verbs.QPCap{MaxSendWR: crowdQueue, MaxRecvWR: crowdQueue, MaxSendSGE: 1, MaxRecvSGE: 1}}
	for range n {
		qp, err := c.pd.CreateQP(cfg)
		if err != nil {
			return err
		}
		c.qps = append(c.qps, qp)
	}
	for i := 0; i+1 < n; i += 2 {
		a, b := c.qps[i], c.qps[i+1]
		if err := errors.Join(a.Connect(b.Endpoint(), nil), b.Connect(a.Endpoint(), nil)); err != nil {
			return err
		}
	}
	return nil
}

func (c *crowd) close() error {
	var errs []error
	for _, qp := range c.qps {
		errs = append(errs, qp.Close())
	}
	if c.cq != nil {
		errs = append(errs, c.cq.Close())
	}
	if c.pd != nil {
		errs = append(errs, c.pd.Close())
	}
	if c.dev != nil {
		errs = append(errs, c.dev.Close())
	}
	return errors.Join(errs...)
}

// measureMemory returns by how many MB n connected queue pairs make the process
// grow: before they are used, and after each has filled both its queues once. (Memory
// that was never written to is not counted.)
func measureMemory(n int) (mb []float64, err error) {
	c, err := newCrowd()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	before, err := residentBytes()
	if err != nil {
		return nil, err
	}
	for _, step := range []func() error{func() error { return c.grow(n) }, c.useAll} {
		if err := step(); err != nil {
			return nil, err
		}
		now, err := residentBytes()
		if err != nil {
			return nil, err
		}
		mb = append(mb, float64(now-before)/1e6)
	}
	return mb, nil
}

// useAll fills the queues of every queue pair once.
func (c *crowd) useAll() (err error) {
	var b buffer
	if err := b.make(c.pd, 8, false, ""); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	recvs, sends := make([]verbs.RecvWR, crowdQueue), make([]verbs.SendWR, crowdQueue)
	for i := range sends {
		recvs[i].SGL = []verbs.SGE{b.mr.SGE(0, 8)}
		sends[i] = verbs.SendWR{Op: verbs.OpSend, SGL: recvs[i].SGL}
	}
	sends[crowdQueue-1].Flags = verbs.SendSignaled
	for i := 0; i+1 < len(c.qps); i += 2 {
		for _, way := range [][2]*verbs.QP{{c.qps[i], c.qps[i+1]}, {c.qps[i+1], c.qps[i]}} {
			if _, err := way[1].PostRecv(recvs); err != nil {
				return err
			}
			if _, err := way[0].PostSend(sends); err != nil {
				return err
			}
			if err := c.await(crowdQueue + 1); err != nil {
				return err
			}
		}
	}
	return nil
}

// await polls for n completions.
func (c *crowd) await(n int) error {
	wcs := make([]verbs.WC, n)
	var wait spinner
	for n > 0 {
		k, err := c.cq.Poll(wcs)
		if err != nil {
			return err
		}
		for i := range wcs[:k] {
			if err := wcs[i].Err(); err != nil {
				return err
			}
		}
		if n -= k; k == 0 {
			if err := wait.idle(); err != nil {
				return err
			}
		}
	}
	return nil
}

// residentBytes returns VmRSS, after garbage has been collected and its memory
// given back.
func residentBytes() (int64, error) {
	runtime.GC()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for l := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(l, []byte("VmRSS:")); ok {
			f := bytes.Fields(rest)
			if len(f) == 2 && string(f[1]) == "kB" {
				kb, err := strconv.ParseInt(string(f[0]), 10, 64)
				return kb << 10, err
			}
		}
	}
	return 0, fmt.Errorf("/proc/self/status has no VmRSS")
}

// measureIdle returns how many percent of a core an open device uses, with n
// connected queue pairs, while nothing happens.
func measureIdle(n int, d time.Duration) (percent []float64, err error) {
	c, err := newCrowd()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.grow(n); err != nil {
		return nil, err
	}
	runtime.GC()
	debug.FreeOSMemory()
	time.Sleep(d / 10) // until work that creating them has left is done
	start, before := time.Now(), sys.CPUTime()
	time.Sleep(d)
	used, elapsed := sys.CPUTime()-before, time.Since(start)
	return []float64{100 * used.Seconds() / elapsed.Seconds()}, nil
}
