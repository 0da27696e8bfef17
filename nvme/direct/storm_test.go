package direct

import (
	"context"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/verbena-rdma/verbena/gpu"
)

// Several goroutines read the disk into buffers that together need twice the VRAM, write them to other places and read
// them again, while others evict, fetch and free. Every byte is compared.
func TestStorm(t *testing.T) {
	const workers, rounds, part = 4, 40, 256 << 10
	m := newMachine(t, intel)
	ctx, rnd := longTime(t), seeded(t)
	r := newRig(t, Config{Topology: m.Topology, Places: m.places, At: m.near})
	disk := r.pattern(t, rnd)
	card := newGPU(t, m)
	// The first half of the disk is read; each worker writes to a part of its own of the second half.
	half := int64(diskSize / 2)
	pressure, stop := context.WithCancel(ctx)
	var pushing sync.WaitGroup
	var buffers [workers]*gpu.Buffer
	for i := range buffers {
		buffers[i] = must(card.Alloc(2 * part))(t) // 2 MiB in a VRAM of 1 MiB
	}
	for range 2 {
		own := rand.New(rand.NewPCG(rnd.Uint64(), 1))
		pushing.Go(func() {
			for pressure.Err() == nil {
				b := buffers[own.IntN(workers)]
				var err error
				if own.IntN(2) == 0 {
					err = b.Evict(pressure)
				} else {
					err = b.Prefetch(pressure)
				}
				// VRAM may be full of what is in use, or what is pinned.
				if err != nil && pressure.Err() == nil && !errors.Is(err, gpu.ErrOutOfMemory) && !errors.Is(err, gpu.ErrPinned) {
					t.Error(err)
					return
				}
			}
		})
	}
	var working sync.WaitGroup
	for w, b := range buffers {
		own := rand.New(rand.NewPCG(rnd.Uint64(), 2))
		working.Go(func() {
			mine := half + int64(w)*part
			for i := range rounds {
				mem, err := r.AttachRegion(b, AttachConfig{Owner: &m.gpu, Pin: w == 0 && i%8 == 7})
				if errors.Is(err, gpu.ErrBAR) || errors.Is(err, gpu.ErrPinned) {
					continue // no room to pin it
				}
				if err != nil {
					t.Error(err)
					return
				}
				n := uint64(1+own.IntN(part/blockSize)) * blockSize
				at := uint64(own.IntN(2*part-int(n)+1)) &^ 3
				off := int64(own.IntN(int(half)-int(n)+1)) &^ (blockSize - 1)
				err = errors.Join(r.Read(ctx, mem, at, n, off), r.Write(ctx, mem, at, n, mine))
				check := make([]byte, n)
				if err == nil {
					_, err = r.ram.ReadAt(check, mine)
				}
				if err == nil && crc32.ChecksumIEEE(check) != crc32.ChecksumIEEE(disk[off:off+int64(n)]) {
					t.Errorf("worker %d, round %d: %d bytes from %d on the disk to %d in the buffer differ", w, i, n, off, at)
				}
				if err = errors.Join(err, mem.Close()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	working.Wait()
	stop()
	pushing.Wait()
	s := r.Stats()
	t.Logf("%+v, %+v", s, card.Stats())
	if s.Bus == 0 || s.System == 0 || s.Transfers < workers*rounds || s.Copied != 0 {
		t.Errorf("%+v", s)
	}
}
