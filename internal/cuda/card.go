package cuda

import (
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// card is the engine for the memory of one context: bytes are copied on streams of that context.
type card struct {
	drv     *Driver
	ctx     uintptr
	device  int32
	uuid    [16]byte
	primary bool // the context is the device's primary one, which the card retains

	workers []*worker
	next    atomic.Uint32 // whose turn it is to get a queue pair
	atomics sync.Mutex    // guards words of the GPU's memory while an atomic changes one
	said    atomic.Bool   // that the context is not usable any more

	// What follows is guarded by the driver's mu.
	ready    chan struct{} // closed when the card was made, or could not be
	err      error
	users    int // memories, and calls that make one
	memories map[*Memory]bool
	dead     bool // its context is gone, or going

	opened   sync.Mutex // guards imports and left; it is held while memory is opened or closed
	imports  map[importKey]*imported
	left     bool   // the context is gone: what was opened in it is closed
	unlocked func() // ends the locking of staging bytes
	scratch  uint64 // memory of the GPU for firstUse; 0: there is none
}

// scratchSize is the length of scratch.
const scratchSize = 2 * 128 << 10

// cardOf returns the card of a context, and makes it if there is none. The caller gives it back.
func (d *Driver) cardOf(op string, ctx uintptr, device int32) (*card, error) {
	d.mu.Lock()
	c := d.cards[ctx]
	if c != nil {
		c.users++
		d.mu.Unlock()
		<-c.ready
		if c.err != nil {
			d.putCard(c)
			return nil, c.err
		}
		return c, nil
	}
	c = &card{drv: d, ctx: ctx, device: device, ready: make(chan struct{}), users: 1,
		memories: make(map[*Memory]bool), imports: make(map[importKey]*imported)}
	d.cards[ctx] = c
	d.mu.Unlock()
	d.use() // until the card has ended
	c.err = c.setUp(op)
	close(c.ready)
	if c.err != nil {
		d.putCard(c)
		return nil, c.err
	}
	return c, nil
}

// putCard gives a card back. The last one who does ends it.
func (d *Driver) putCard(c *card) {
	d.mu.Lock()
	c.users--
	last := c.users == 0
	if last && d.cards[c.ctx] == c {
		delete(d.cards, c.ctx)
	}
	d.mu.Unlock()
	if last {
		c.tearDown()
		d.Close()
	}
}

// setUp makes what the card needs. A primary context stays as long as the card: a program that
// releases it while memory in it is registered does not pull it away from under the copies.
func (c *card) setUp(op string) error {
	d := c.drv
	r := d.asks.in(c.ctx, func() (r Result) {
		c.uuid, r = d.uuid(c.device)
		if r != success || !d.primaryActive(c.device) {
			return r
		}
		ctx, r := d.retainPrimary(c.device)
		if c.primary = r == success && ctx == c.ctx; r == success && !c.primary {
			d.releasePrimary(c.device)
		}
		return success
	})
	if err := d.check(op, fnCtxSetCurrent, r); err != nil {
		return err
	}
	d.asks.in(c.ctx, func() (r Result) {
		c.scratch, r = d.alloc(scratchSize)
		return r
	})
	for range workers {
		w, r := c.startWorker()
		if r != success {
			<-w.gone
			return d.check(op, fnStreamCreate, r)
		}
		c.workers = append(c.workers, w)
	}
	c.unlocked = sync.OnceFunc(mem.LockStaging(c.lockStaging))
	return nil
}

func (c *card) tearDown() {
	if c.unlocked != nil {
		c.unlocked()
	}
	for _, w := range c.workers {
		w.end()
	}
	c.drv.host.forget(c.drv, c.ctx)
	if c.scratch != 0 && !c.left {
		c.drv.slow.in(c.ctx, func() Result { return c.drv.free(c.scratch) })
	}
	if c.primary && !c.left { // nobody has the card any more
		c.drv.slow.do(func() { c.drv.releasePrimary(c.device) })
	}
}

// settle waits until no copy is under way that was begun before. If it is the last time, the
// workers give up what they have in the context, and all that comes later fails.
func (c *card) settle(last bool) {
	var passed sync.WaitGroup
	for _, w := range c.workers {
		passed.Add(1)
		w.begin(job{passed: &passed, last: last})
	}
	passed.Wait()
}

// leave ends all use of the context, which is about to be destroyed.
func (c *card) leave() {
	c.unlocked()
	c.drv.host.forget(c.drv, c.ctx)
	c.opened.Lock() // nothing is being opened or closed
	c.left = true
	c.opened.Unlock()
	c.settle(true)
}

// told says once that the context is not usable any more.
func (c *card) told(r Result) {
	if !c.said.Swap(true) {
		slog.Warn("verbena: a CUDA context is not usable any more; requests that need its memory fail", "error", c.drv.resultName(r))
	}
}

// orderOf returns what the card keeps for a queue pair, with the worker that its operations go to.
func (c *card) orderOf(s *mem.Stream) *order {
	return s.State(c, func() any { return &order{worker: c.workers[int(c.next.Add(1))%len(c.workers)]} }).(*order)
}

// newWord allocates page-locked bytes for a worker. The context is current.
func (c *card) newWord() ([]byte, Result) {
	addr, r := c.drv.allocHost(bounce + wordSize)
	if r != success {
		return nil, r
	}
	return bytesAt(addr, bounce+wordSize), success
}

func (c *card) freeWord(b []byte) {
	if b != nil {
		c.drv.freeHost(addrOf(b))
	}
}
