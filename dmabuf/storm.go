package dmabuf

// Storms: VERBENA_DMABUF_STORM=SEED,RATE makes the life of importers hard, in any program that has
// buffers of this package, to test how they and their peers take it. RATE times a second, one of
// the process's buffers, chosen at random, is
//
//   - moved or evicted, if it is memory of Alloc or of a software GPU that nobody has pinned;
//   - otherwise told to its importers as if it had moved, which an exporter may do at any time.
//
// With SEED,RATE,REVOKE one in REVOKE such events revokes the buffer, if it is memory of Alloc or of a software
// GPU. The choices follow from SEED.

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// stormVar is the variable that asks for a storm.
const stormVar = "VERBENA_DMABUF_STORM"

// maxStormRate is how many events a second there are at most.
const maxStormRate = 100_000

// storm is the process's storm.
var storm struct {
	mu      sync.Mutex // guards what follows
	buffers []*Buffer  // those that live, oldest first
	stop    chan struct{}
}

// stormConfig is the value of the variable.
type stormConfig struct {
	seed   uint64
	rate   int
	revoke int // 0: never
}

func parseStorm(text string) (c stormConfig, err error) {
	parts := strings.Split(text, ",")
	if len(parts) != 2 && len(parts) != 3 {
		return c, fmt.Errorf("%q is not SEED,RATE or SEED,RATE,REVOKE", text)
	}
	if c.seed, err = strconv.ParseUint(parts[0], 0, 64); err != nil {
		return c, fmt.Errorf("the seed %q is not a number", parts[0])
	}
	if c.rate, err = strconv.Atoi(parts[1]); err != nil || c.rate < 1 || c.rate > maxStormRate {
		return c, fmt.Errorf("the rate %q is not a number from 1 to %d", parts[1], maxStormRate)
	}
	if len(parts) == 3 {
		if c.revoke, err = strconv.Atoi(parts[2]); err != nil || c.revoke < 1 {
			return c, fmt.Errorf("%q is not a number from 1 on", parts[2])
		}
	}
	return c, nil
}

// enterStorm exposes a new buffer to the storm, if there is one.
func (b *Buffer) enterStorm() {
	text := sys.Getenv(stormVar)
	if text == "" {
		return
	}
	c, err := parseStorm(text)
	if err != nil {
		slog.Warn("verbena: "+stormVar+" is ignored", "error", err)
		return
	}
	storm.mu.Lock()
	defer storm.mu.Unlock()
	storm.buffers = append(storm.buffers, b)
	if storm.stop == nil {
		storm.stop = make(chan struct{})
		go c.blow(storm.stop)
	}
}

// leaveStorm takes a buffer that is released out of the storm. The storm ends with the last one.
func (b *Buffer) leaveStorm() {
	storm.mu.Lock()
	defer storm.mu.Unlock()
	i := slices.Index(storm.buffers, b)
	if i < 0 {
		return
	}
	if storm.buffers = slices.Delete(storm.buffers, i, i+1); len(storm.buffers) == 0 {
		close(storm.stop)
		storm.stop = nil
	}
}

// blow is the storm, until stop is closed.
func (c stormConfig) blow(stop <-chan struct{}) {
	rng := rand.New(rand.NewPCG(c.seed, 0))
	tick := time.NewTicker(time.Second / time.Duration(c.rate))
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		if b := pickBuffer(rng); b != nil {
			b.disturb(rng, c.revoke)
			b.Put()
		}
	}
}

// pickBuffer returns a buffer, with a reference; nil if the one that was picked is being released.
func pickBuffer(rng *rand.Rand) *Buffer {
	storm.mu.Lock()
	defer storm.mu.Unlock()
	if len(storm.buffers) == 0 {
		return nil
	}
	if b := storm.buffers[rng.IntN(len(storm.buffers))]; b.Get() {
		return b
	}
	return nil
}

// mover is implemented by what stands behind a buffer ([Config].Priv) if storms can move it.
type mover interface {
	Move(ctx context.Context) error
	Evict(ctx context.Context) error
}

// revoker is implemented by what stands behind a buffer if storms can revoke it.
type revoker interface {
	Revoke(ctx context.Context) error
}

// disturb moves a buffer, or does as if it moved. Whether that succeeds does not matter.
func (b *Buffer) disturb(rng *rand.Rand, revoke int) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	what := rng.IntN(4)
	revokes := revoke > 0 && rng.IntN(revoke) == 0
	r, ends := b.cfg.Priv.(revoker)
	m, moves := b.cfg.Priv.(mover)
	switch {
	case ends && revokes:
		_ = r.Revoke(ctx)
	case moves && what == 0:
		_ = m.Evict(ctx)
	case moves && what < 3:
		_ = m.Move(ctx)
	default:
		if b.resv.LockContext(ctx) == nil {
			b.invalidateUnpinned()
			b.resv.Unlock()
		}
	}
}

// invalidateUnpinned is InvalidateMappings for importers that have not pinned the buffer: to the
// others it would mean the end.
func (b *Buffer) invalidateUnpinned() {
	for _, a := range slices.Clone(b.attachments) {
		if a.Revocable() && a.pins == 0 {
			a.importer.InvalidateMappings(a)
		}
	}
}
