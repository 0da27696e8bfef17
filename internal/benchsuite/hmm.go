package main

// One address space for the CPU and GPUs: migration, faults of the CPU, and RDMA into its pages wherever they lie.

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/hmm"
	"github.com/verbena-rdma/verbena/verbs"
)

// spaceOf is a space with memory of it, and a GPU that its pages may move to.
type spaceOf struct {
	space  *hmm.Space
	dev    *hmm.Device
	mirror *hmm.Mirror
	bytes  []byte
	stay   bool // pages must not come home
}

func newSpace(n int) (_ *spaceOf, err error) {
	s := new(spaceOf)
	if s.space, err = hmm.Open(nil); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.space.Close())
		}
	}()
	if s.dev, err = s.space.AddGPU("soft:3", &hmm.GPUConfig{GPU: &gpu.Config{VRAM: uint64(n) + 4<<20}}); err != nil {
		return nil, err
	}
	if s.bytes, err = s.space.Alloc(n); err != nil {
		return nil, err
	}
	fill(s.bytes)
	return s, nil
}

// migrate moves all pages to the GPU, or home.
func (s *spaceOf) migrate(to *hmm.Device) error {
	n, err := s.space.Migrate(s.bytes, to)
	if err == nil && n*4096 != len(s.bytes) {
		err = fmt.Errorf("%d pages of %d bytes have moved", n, len(s.bytes))
	}
	return err
}

func (s *spaceOf) close() error {
	if n := s.space.Stats().HomePages; s.stay && n > 0 {
		return errors.Join(fmt.Errorf("%d pages have come home", n), s.mirror.Close(), s.space.Close())
	}
	if s.mirror != nil {
		if err := s.mirror.Close(); err != nil {
			return err
		}
	}
	return s.space.Close()
}

// makeMirror makes a buffer in memory of a space, whose pages lie in VRAM or at home.
func (b *buffer) makeMirror(pd *verbs.PD, n int, away bool) (err error) {
	if b.space, err = newSpace((n + 4095) &^ 4095); err != nil {
		return err
	}
	s := b.space
	s.stay = away
	if away {
		if err := s.migrate(s.dev); err != nil {
			return err
		}
	}
	if s.mirror, err = s.dev.Mirror(s.bytes); err != nil { // which reaches the GPU's memory
		return err
	}
	b.bytes, b.addr = make([]byte, n), s.mirror.Addr()
	b.mr, err = pd.RegGPU(s.mirror, everything)
	return err
}

// hmmWrite compares WRITEs into pages in VRAM with WRITEs into a buffer of the GPU, and WRITEs into pages that are home with
// WRITEs into on-demand memory.
func (b *bench) hmmWrite(newRig func(spec) (*rig, error), link verbs.LinkMode, depth int) ([]contender, error) {
	sp := spec{Link: link, Type: verbs.RC, QPs: 1, Size: 64 << 10, Slots: 1, Sends: depth, Mapped: true}
	list, under := 1, depth
	if link == verbs.LinkLoop {
		sp.Slots, list, under = depth, depth, 1
	}
	var cs []contender
	for _, c := range []struct {
		name    string
		kind    memory
		against string
		goal    *goal
	}{
		{name: "into a buffer in VRAM", kind: inVRAM},
		{"into pages in VRAM", awayPages, "into a buffer in VRAM", &goal{"≥", 0.9}},
		{name: "into on-demand memory", kind: onDemand},
		{"into pages at home", homePages, "into on-demand memory", &goal{"≥", 0.95}},
	} {
		sp.Into = c.kind
		r, err := newRig(sp)
		if err != nil {
			return nil, err
		}
		cs = append(cs, r.bandwidth(row{name: c.name, unit: "GB/s", against: c.against, goal: c.goal}, verbs.OpRDMAWrite, list, under, inTurn, modePassive))
	}
	return cs, nil
}

const migrated = 2 << 20

// hmmMigrate compares moving 2 MiB to a GPU and home with copying as much.
func (b *bench) hmmMigrate() ([]contender, error) {
	s, err := newSpace(migrated)
	if err != nil {
		return nil, err
	}
	b.later(s.close)
	from, to := make([]byte, migrated), make([]byte, migrated)
	fill(from)
	const plain = "copy()"
	way := func(to *hmm.Device) contender {
		name, back := "2 MiB to VRAM", s.dev
		if to == nil {
			name = "2 MiB home"
		} else {
			back = nil
		}
		return contender{rows: []row{{name, "GB/s", plain, &goal{"≥", 0.5}}}, rates: func(d time.Duration) ([]rate, error) {
			before, err := cpuWith(nil)
			if err != nil {
				return nil, err
			}
			var took time.Duration
			began, n := time.Now(), 0
			for ; took < d; n++ {
				if err := s.migrate(back); err != nil {
					return nil, err
				}
				start := time.Now()
				if err := s.migrate(to); err != nil {
					return nil, err
				}
				took += time.Since(start)
			}
			after, err := cpuWith(nil)
			// The way back takes CPU time, too: it is left out by the time that it took.
			share := float64(took) / float64(time.Since(began))
			return []rate{rateOf(float64(n)*migrated/1e9, took, time.Duration(float64(after-before)*share))}, err
		}}
	}
	return []contender{
		timed(row{name: plain, unit: "GB/s"}, migrated, func() error { copy(to, from); return nil }),
		way(s.dev), way(nil),
	}, nil
}

// hmmFault measures the CPU's touch of a page that is away.
func (b *bench) hmmFault() ([]contender, error) {
	const pages = 256
	s, err := newSpace(pages * 4096)
	if err != nil {
		return nil, err
	}
	b.later(s.close)
	keep := newSampler(1 << 16)
	return []contender{{rows: []row{
		{name: "fault to data, p50", unit: "µs", goal: &goal{"≤", 20}},
		{name: "p99", unit: "µs"},
	}, run: func(d time.Duration) ([]float64, error) {
		keep.reset()
		for end := time.Now().Add(d); time.Now().Before(end); {
			if err := s.migrate(s.dev); err != nil {
				return nil, err
			}
			for i := range pages {
				start := time.Now()
				s.bytes[i*4096]++
				if !keep.add(time.Since(start)) {
					end = start
					break
				}
			}
		}
		q := keep.quantiles(0.5, 0.99)
		return []float64{q[0] / 1e3, q[1] / 1e3}, nil
	}}}, nil
}
