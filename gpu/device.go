package gpu

import (
	"container/list"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Sizes of the BAR, for [Config].
const (
	BARFull  = 0         // all of the VRAM
	BARSmall = 256 << 20 // what PCI devices have without a resizable BAR
)

// DefaultVRAM is the VRAM of a software GPU that is opened without a [Config].
const DefaultVRAM = 256 << 20

const (
	maxDevices = 64
	maxVRAM    = 1 << 40
	minBAR     = 1 << 20 // of a resizable BAR, as PCI Express has it
)

// Config is what a software GPU is like; nil and the zero value mean the defaults.
type Config struct {
	// VRAM is the size of the GPU's memory, which is rounded up to whole pages; 0: DefaultVRAM.
	// Pages take memory of the host when they are used first.
	VRAM uint64

	// Host is how much system memory there is for objects that are evicted, or that are allocated
	// there; 0: three times the VRAM.
	Host uint64

	// NoEvict: objects are not evicted when VRAM runs out. Alloc fails instead.
	NoEvict bool

	// BAR is how much of the VRAM the CPU and other devices can reach, from its beginning on; 0
	// (BARFull): all. A smaller BAR is a power of two, and at least 1 MiB. [Device.ResizeBAR]
	// changes it.
	BAR uint64

	// Engines is how many operations are executed at once; 0: 2.
	Engines int

	// Costs are what operations take at least; the zero value: as long as the host takes.
	Costs Costs

	// Distance returns how far away an importer's device is, as the kernel's pci_p2pdma_distance
	// does: a negative number means that there is no way for peer-to-peer accesses, and objects
	// that the importer maps move to system memory. nil: every device is near.
	Distance func(device any) int
}

// normalize checks the configuration, and fills in the defaults.
func (cfg *Config) normalize(op string) error {
	if cfg.VRAM == 0 {
		cfg.VRAM = DefaultVRAM
	}
	if cfg.Engines == 0 {
		cfg.Engines = 2
	}
	switch {
	case cfg.VRAM > maxVRAM || cfg.Host > 4*maxVRAM:
		return ib.Errorf(op, syscall.EINVAL, "%d bytes of VRAM, %d of system memory", cfg.VRAM, cfg.Host)
	case cfg.Engines < 0 || cfg.Engines > 64:
		return ib.Errorf(op, syscall.EINVAL, "%d engines", cfg.Engines)
	}
	cfg.VRAM = roundUp(cfg.VRAM, page)
	if cfg.Host == 0 {
		cfg.Host = 3 * cfg.VRAM
	}
	cfg.Host = roundUp(cfg.Host, page)
	if _, err := barLimit(op, cfg.BAR, cfg.VRAM); err != nil {
		return err
	}
	return cfg.Costs.check(op)
}

// barLimit returns where the part of the VRAM ends that a BAR of a size shows.
func barLimit(op string, bar, vram uint64) (uint64, error) {
	if bar == BARFull || bar >= vram {
		return vram, nil
	}
	if bar < minBAR || bar&(bar-1) != 0 {
		return 0, ib.Errorf(op, syscall.EINVAL, "a BAR of %d bytes: it is a power of two, and at least %d", bar, minBAR)
	}
	return bar, nil
}

// cards are the GPUs that are open in this process, by their names.
var cards struct {
	mu sync.Mutex // guards by, and how many devices each card has
	by map[string]*card
}

// card is a GPU: what all devices of one name share.
type card struct {
	name       string
	cfg        Config
	vram, host *heap
	space      *sys.AddressSpace
	engine     engine

	devices int          // guarded by cards.mu
	uses    atomic.Int64 // devices, objects that have memory, mappings by importers, and calls: the memory stays as long
	bar     atomic.Uint64

	resizing sync.Mutex // held while bar changes: guards against a second change meanwhile

	mu        sync.Mutex // guards what follows, and the heaps' spaces
	addresses spaces     // what of space is free
	objects   []*object  // in the order of their addresses
	lru       list.List  // objects in VRAM, the one that was not used for longest first
	clock     uint64     // counts uses of objects
	stats     Stats
}

// Device is a GPU as a part of the program uses it: what other systems call a context. Its methods
// may be called by several goroutines.
type Device struct {
	card *card

	mu      sync.Mutex // guards what follows
	closed  bool
	buffers map[*Buffer]bool
	streams map[*Stream]bool
}

// Open opens a GPU by its name: "soft:0" to "soft:63" are software GPUs, which are always there.
// What is opened twice in one process is one GPU, whose memory both share; it exists until the last
// [Device.Close]. cfg is for the first Open; later ones pass nil, or what the first one has passed.
//
// Errors: ENODEV if there is no such GPU; EINVAL for a configuration that cannot be; EBUSY if the
// GPU is open with another one; ENOMEM.
func Open(name string, cfg *Config) (*Device, error) {
	const op = "gpu_open"
	index, ok := strings.CutPrefix(name, "soft:")
	n, err := strconv.Atoi(index)
	if !ok || err != nil || n < 0 || n >= maxDevices || strconv.Itoa(n) != index {
		return nil, ib.Errorf(op, syscall.ENODEV, "no GPU has the name %q", name)
	}
	cards.mu.Lock()
	defer cards.mu.Unlock()
	c := cards.by[name]
	if c == nil {
		if c, err = newCard(op, name, cfg); err != nil {
			return nil, err
		}
		if cards.by == nil {
			cards.by = make(map[string]*card)
		}
		cards.by[name] = c
	} else if cfg != nil && !c.isLike(*cfg) {
		return nil, ib.Errorf(op, syscall.EBUSY, "%s is open with another configuration", name)
	}
	c.devices++
	c.uses.Add(1)
	return &Device{card: c, buffers: make(map[*Buffer]bool), streams: make(map[*Stream]bool)}, nil
}

// isLike reports whether the card is what a configuration asks for. Functions cannot be compared: a
// configuration with one is like none.
func (c *card) isLike(cfg Config) bool {
	if cfg.normalize("") != nil || cfg.Distance != nil || c.cfg.Distance != nil {
		return false
	}
	own := c.cfg
	return cfg.VRAM == own.VRAM && cfg.Host == own.Host && cfg.NoEvict == own.NoEvict && cfg.BAR == own.BAR &&
		cfg.Engines == own.Engines && cfg.Costs == own.Costs
}

// addressFactor is how many times more addresses a card has than memory, so that addresses of what
// was freed do not come again soon.
const addressFactor = 8

func newCard(op, name string, cfg *Config) (c *card, err error) {
	c = &card{name: name}
	if cfg != nil {
		c.cfg = *cfg
	}
	if err := c.cfg.normalize(op); err != nil {
		return nil, err
	}
	limit, err := barLimit(op, c.cfg.BAR, c.cfg.VRAM)
	if err != nil {
		return nil, err
	}
	c.bar.Store(limit)
	if c.vram, err = newHeap("vram", c.cfg.VRAM); err == nil {
		c.vram.own = true
		if c.host, err = newHeap("host", c.cfg.Host); err == nil {
			for factor := uint64(addressFactor); factor > 0; factor /= 2 { // the process may be limited
				size := roundUp(factor*(c.cfg.VRAM+c.cfg.Host), largeAlign)
				if size > math.MaxInt {
					continue
				}
				if c.space, err = sys.ReserveAddresses(int(size)); err == nil {
					c.addresses = newSpaces(size)
					break
				}
			}
		}
	}
	if err != nil {
		c.free()
		return nil, ib.Errorf(op, syscall.ENOMEM, "%v", err)
	}
	c.engine.init(c.cfg.Engines)
	return c, nil
}

// free gives the memory back.
func (c *card) free() {
	for _, h := range []*heap{c.vram, c.host} {
		if h != nil {
			h.close()
		}
	}
	if c.space != nil {
		if err := c.space.Release(); err != nil {
			slog.Warn("verbena: addresses of a GPU are not given back", "error", err)
		}
	}
}

// unuse ends a use of the card's memory.
func (c *card) unuse() {
	if c.uses.Add(-1) == 0 {
		c.free()
	}
}

// Name returns the GPU's name.
func (d *Device) Name() string { return d.card.name }

// Config returns what the GPU is like, with the defaults filled in.
func (d *Device) Config() Config { return d.card.cfg }

// BAR returns how many bytes of the VRAM the CPU and other devices reach.
func (d *Device) BAR() uint64 { return d.card.bar.Load() }

// Close ends the use of the GPU: what is queued in its streams fails with [ErrClosed], its streams
// end and its buffers are freed. Closing again does nothing.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	var buffers []*Buffer
	var streams []*Stream
	for b := range d.buffers {
		buffers = append(buffers, b)
	}
	for s := range d.streams {
		streams = append(streams, s)
	}
	d.mu.Unlock()
	for _, s := range streams {
		_ = s.Close() // it has no error
	}
	for _, b := range buffers {
		_ = b.Free() // another goroutine may have
	}
	cards.mu.Lock()
	c := d.card
	c.devices--
	last := c.devices == 0
	if last {
		delete(cards.by, c.name)
	}
	cards.mu.Unlock()
	if last {
		c.engine.wait()
	}
	c.unuse()
	return nil
}

// ok returns an error if the device is closed.
func (d *Device) ok(op string) error { return d.begin(op, 0) }

// begin is ok for calls that use the card's memory and hold no object of it. With uses 1 the memory stays until they call
// unuse of the card, also if the device is closed meanwhile.
func (d *Device) begin(op string, uses int64) error {
	if d == nil {
		return ib.Errorf(op, syscall.EINVAL, "nil device")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fail(op, ErrClosed, "%s", d.card.name)
	}
	d.card.uses.Add(uses)
	return nil
}

// Stats are counters of a GPU.
type Stats struct {
	VRAM, VRAMFree uint64 // bytes
	LargestFree    uint64 // the longest free part of the VRAM
	Host, HostFree uint64 // bytes of system memory for evicted objects
	Objects        uint64 // that are allocated
	Resident       uint64 // of them, in VRAM

	Moves      uint64 // of an object to another place
	MovedBytes uint64
	Evictions  uint64 // moves from VRAM to system memory because others needed the VRAM
	Returns    uint64 // moves back to VRAM
	InPlace    uint64 // uses of an evicted object that were served in system memory
	// Thrash counts evicted objects that were needed again so soon that fewer objects had been
	// used since than VRAM holds.
	Thrash     uint64
	Operations uint64 // that streams have executed
	Bytes      uint64 // that they have written
}

// Stats returns the counters of the GPU. They count what all devices of its name do.
func (d *Device) Stats() Stats {
	c := d.card
	c.mu.Lock()
	s := c.stats
	s.VRAM, s.VRAMFree, s.LargestFree = c.cfg.VRAM, c.vram.spaces.total, c.vram.spaces.largest()
	s.Host, s.HostFree = c.cfg.Host, c.host.spaces.total
	s.Objects, s.Resident = uint64(len(c.objects)), uint64(c.lru.Len())
	c.mu.Unlock()
	s.Operations, s.Bytes = c.engine.operations.Load(), c.engine.bytes.Load()
	return s
}
