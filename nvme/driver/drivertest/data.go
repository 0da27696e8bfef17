package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
)

// Rig is a controller with one namespace of 8 MiB or more in blocks of 512 bytes, whose content does not matter.
type Rig struct {
	C    *driver.Controller
	DMA  driver.DMA
	NS   driver.Namespace
	Seed uint64
	// QuietResets: resets wait until no command is under way. QEMU 7.2 needs it: a command that it fetches while it
	// waits for others to end outlives its queue, and the emulator crashes.
	QuietResets bool
}

// Data writes, reads and compares. report is called with the name of each part and what was wrong with it, or nil.
func Data(ctx context.Context, r *Rig, report func(part string, err error)) {
	parts := []struct {
		name string
		run  func(ctx context.Context, r *Rig) error
	}{
		{"sizes and offsets", sizes},
		{"queues that wrap", wrap},
		{"several queues", func(ctx context.Context, r *Rig) error { return many(ctx, r, r.DMA, driver.QueueConfig{}) }},
		{"data in the CMB", inCMB(nvme.CMBSZRead|nvme.CMBSZWrite, driver.QueueConfig{})},
		{"commands in the CMB", inCMB(nvme.CMBSZSQ, driver.QueueConfig{SQInCMB: true})},
		{"completions in the CMB", inCMB(nvme.CMBSZCQ, driver.QueueConfig{CQInCMB: true})},
		{"resets", resets},
		{"a pattern", pattern},
	}
	for _, p := range parts {
		err := p.run(ctx, r)
		if errors.Is(err, errAbsent) {
			continue
		}
		report(p.name, err)
	}
}

// errAbsent is what a part returns that the controller has no means for.
var errAbsent = errors.New("the controller does not have that")

func (r *Rig) random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(r.Seed, stream)) }

func fill(b []byte, rnd *rand.Rand) {
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
}

// withQueue calls do with a queue that is closed then.
func withQueue(ctx context.Context, r *Rig, cfg driver.QueueConfig, do func(q *driver.Queue) error) error {
	q, err := r.C.NewQueue(ctx, cfg)
	if err != nil {
		return err
	}
	err = do(q)
	return errors.Join(err, q.Close())
}

// sizes moves data of many lengths from and to odd places.
func sizes(ctx context.Context, r *Rig) error {
	rnd := r.random(1)
	most := 1 << 20
	if limit := r.C.Info().MaxTransfer; limit > 0 {
		most = min(most, limit)
	}
	mem, err := r.DMA.Alloc(most + 8192)
	if err != nil {
		return err
	}
	defer mem.Free()
	return withQueue(ctx, r, driver.QueueConfig{}, func(q *driver.Queue) error {
		for _, n := range []int{512, 1024, 4096, 4608, 8192, 12288, 65536, most} {
			for _, off := range []int{0, 4, 512, 4092} {
				if err := roundTrip(ctx, r, q, rnd, mem.Slice(off, n)); err != nil {
					return fmt.Errorf("%d bytes at offset %d: %w", n, off, err)
				}
			}
		}
		return q.Flush(ctx, r.NS)
	})
}

// roundTrip writes, compares and reads memory, somewhere.
func roundTrip(ctx context.Context, r *Rig, q *driver.Queue, rnd *rand.Rand, m driver.Memory) error {
	lba := rnd.Uint64N(8<<20/512 - uint64(len(m.Bytes)/512) + 1)
	fill(m.Bytes, rnd)
	want := bytes.Clone(m.Bytes)
	if err := q.Write(ctx, r.NS, lba, m); err != nil {
		return err
	}
	if err := q.Compare(ctx, r.NS, lba, m); err != nil {
		return err
	}
	m.Bytes[len(m.Bytes)-1]++
	if err := q.Compare(ctx, r.NS, lba, m); !errors.Is(err, nvme.StatusCompareFailure) {
		return fmt.Errorf("compare with other data: %w", err)
	}
	clear(m.Bytes)
	if err := q.Read(ctx, r.NS, lba, m); err != nil {
		return err
	}
	if !bytes.Equal(m.Bytes, want) {
		return errors.New("other bytes were read than written")
	}
	return nil
}

// wrap keeps queues of several lengths full for some rounds.
func wrap(ctx context.Context, r *Rig) error {
	for _, entries := range []int{2, 3, 16, 64} {
		err := withQueue(ctx, r, driver.QueueConfig{Entries: entries}, func(q *driver.Queue) error { return wrapOne(ctx, r, q, entries) })
		if err != nil {
			return fmt.Errorf("%d entries: %w", entries, err)
		}
	}
	return nil
}

func wrapOne(ctx context.Context, r *Rig, q *driver.Queue, entries int) error {
	mem, err := r.DMA.Alloc(512 * entries)
	if err != nil {
		return err
	}
	defer mem.Free()
	under := make([]*driver.Request, entries)
	rounds := 5 * entries
	for i := range rounds + entries {
		slot := i % entries
		if under[slot] != nil {
			if _, err := under[slot].Wait(ctx); err != nil {
				return err
			}
		}
		if i >= rounds {
			continue
		}
		m := mem.Slice(512*slot, 512)
		for j := range m.Bytes {
			m.Bytes[j] = byte(i)
		}
		cmd, err := driver.BlockCommand(nvme.IOWrite, r.NS, uint64(i), 512)
		if err != nil {
			return err
		}
		if under[slot], err = q.Submit(ctx, cmd, m, 512); err != nil {
			return err
		}
	}
	for i := range rounds {
		m := mem.Slice(0, 512)
		if err := q.Read(ctx, r.NS, uint64(i), m); err != nil {
			return err
		}
		if m.Bytes[0] != byte(i) || m.Bytes[511] != byte(i) {
			return fmt.Errorf("block %d has the bytes of another", i)
		}
	}
	return nil
}

// many uses several queues by several goroutines.
func many(ctx context.Context, r *Rig, from driver.DMA, cfg driver.QueueConfig) error {
	const queues, users = 3, 2
	errs := make([]error, queues*users)
	var wg sync.WaitGroup
	var qs []*driver.Queue
	for i := range queues {
		cfg.Entries = 2 + 5*i
		q, err := r.C.NewQueue(ctx, cfg)
		if err != nil {
			errs = append(errs, err)
			break
		}
		qs = append(qs, q)
		for j := range users {
			n := users*i + j
			wg.Go(func() { errs[n] = user(ctx, r, q, n, 100, from) })
		}
	}
	wg.Wait()
	for _, q := range qs {
		errs = append(errs, q.Close())
	}
	return errors.Join(errs...)
}

// user writes and reads blocks that nobody else uses.
func user(ctx context.Context, r *Rig, q *driver.Queue, n, rounds int, from driver.DMA) error {
	const blocks = 1000
	m, err := from.Alloc(4096)
	if err != nil {
		return err
	}
	defer m.Free()
	rnd := r.random(100 + uint64(n))
	image, known := make([]byte, 512*blocks), make([]bool, blocks)
	for range rounds {
		count := 1 + rnd.IntN(8)
		at := rnd.IntN(blocks - count + 1)
		part := m.Slice(0, 512*count)
		if rnd.IntN(2) == 0 {
			fill(part.Bytes, rnd)
			if err := q.Write(ctx, r.NS, uint64(n*blocks+at), part); err != nil {
				return err
			}
			copy(image[512*at:], part.Bytes)
			for i := range count {
				known[at+i] = true
			}
			continue
		}
		if err := q.Read(ctx, r.NS, uint64(n*blocks+at), part); err != nil {
			return err
		}
		for i := range count {
			if known[at+i] && !bytes.Equal(part.Bytes[512*i:512*(i+1)], image[512*(at+i):512*(at+i+1)]) {
				return fmt.Errorf("block %d has other bytes", n*blocks+at+i)
			}
		}
	}
	return nil
}

// inCMB uses queues and data in the controller memory buffer, as far as the controller allows it.
func inCMB(needs nvme.CMBSZ, cfg driver.QueueConfig) func(ctx context.Context, r *Rig) error {
	return func(ctx context.Context, r *Rig) error {
		if r.C.CMB() == nil || r.C.Info().CMB&needs != needs {
			return errAbsent
		}
		from := r.DMA
		if needs&nvme.CMBSZRead != 0 {
			from = r.C.CMB()
		}
		return many(ctx, r, from, cfg)
	}
}

// resets resets the controller while queues are in use, or exist at least.
func resets(ctx context.Context, r *Rig) error {
	for round := range 3 {
		rounds := 1 << 30 // until the reset
		if r.QuietResets {
			rounds = 20
		}
		var wg sync.WaitGroup
		errs, qs := make([]error, 2), make([]*driver.Queue, 2)
		for i := range errs {
			var err error
			if qs[i], err = r.C.NewQueue(ctx, driver.QueueConfig{Entries: 8}); err != nil {
				return err
			}
			wg.Go(func() { errs[i] = user(ctx, r, qs[i], i, rounds, r.DMA) })
		}
		// Some commands go through before the reset.
		err := withQueue(ctx, r, driver.QueueConfig{}, func(q *driver.Queue) error { return user(ctx, r, q, 2, 20*round, r.DMA) })
		if r.QuietResets {
			wg.Wait()
		}
		err = errors.Join(err, r.C.Reset())
		wg.Wait()
		for i, q := range qs {
			if errs[i] == nil && r.QuietResets {
				errs[i] = q.Flush(ctx, r.NS)
			}
			if !errors.Is(errs[i], driver.ErrReset) {
				err = errors.Join(err, fmt.Errorf("queue %d after the reset: %v, should be %w", i, errs[i], driver.ErrReset))
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Pattern returns what Data leaves in the first MiB of the namespace, for those who can look at it otherwise.
func Pattern(seed uint64) []byte {
	b := make([]byte, 1<<20)
	fill(b, rand.New(rand.NewPCG(seed, 99)))
	clear(b[512*100 : 512*150])
	return b
}

// pattern leaves Pattern.
func pattern(ctx context.Context, r *Rig) error {
	want := make([]byte, 1<<20)
	fill(want, r.random(99))
	mem, err := r.DMA.Alloc(65536)
	if err != nil {
		return err
	}
	defer mem.Free()
	return withQueue(ctx, r, driver.QueueConfig{}, func(q *driver.Queue) error {
		for off := 0; off < len(want); off += 65536 {
			copy(mem.Bytes, want[off:])
			if err := q.Write(ctx, r.NS, uint64(off/512), mem.Slice(0, 65536)); err != nil {
				return err
			}
		}
		if err := q.WriteZeroes(ctx, r.NS, 100, 50); err != nil {
			return err
		}
		if err := q.Deallocate(ctx, r.NS, 8<<20/512-8, 8); err != nil {
			return err
		}
		return q.Flush(ctx, r.NS)
	})
}
