package p2p

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// OrchestratorConfig is what an orchestrator is like; nil and the zero value mean the defaults.
type OrchestratorConfig struct {
	// Seed chooses among providers at the same distance.
	Seed uint64

	// Fallback: what cannot be done with peer memory is done with system memory, and counted. If it
	// is not set, it fails.
	Fallback bool
}

// Orchestrator chooses providers for clients, and drives transfers. Its methods may be called by
// several goroutines.
type Orchestrator struct {
	t        *Topology
	fallback bool

	mu        sync.Mutex // guards what follows
	random    *rand.Rand
	providers []*Provider
	stats     Stats
}

// Stats are counters of an orchestrator.
type Stats struct {
	// Transfers that have ended well.
	Transfers uint64 `json:"transfers"`
	// Bytes that clients have moved, by path. Each transfer has two legs, and counts twice.
	SystemBytes     uint64 `json:"system_bytes"`
	BusBytes        uint64 `json:"bus_bytes"`
	HostBridgeBytes uint64 `json:"host_bridge_bytes"`
	// Refusals counts what could not be done with peer memory, by the reason; Fallbacks how many of
	// them were done with system memory. No reason has a length in it, and after 256 different ones
	// the others are counted together, as "other reasons".
	Refusals  map[string]uint64 `json:"refusals"`
	Fallbacks uint64            `json:"fallbacks"`
}

// NewOrchestrator makes an orchestrator for a machine.
func NewOrchestrator(t *Topology, cfg *OrchestratorConfig) *Orchestrator {
	if cfg == nil {
		cfg = &OrchestratorConfig{}
	}
	return &Orchestrator{t: t, fallback: cfg.Fallback, random: rand.New(rand.NewPCG(cfg.Seed, 0)), stats: Stats{Refusals: map[string]uint64{}}}
}

// AddProvider offers a provider. It is chosen while it is published.
//
// Errors: EEXIST if the function has a provider already; EINVAL for a provider of another topology.
func (o *Orchestrator) AddProvider(p *Provider) error {
	const op = "p2p_add_provider"
	if p.t != o.t {
		return ib.Errorf(op, syscall.EINVAL, "the provider %v is of another topology", p.at)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	i, found := slices.BinarySearchFunc(o.providers, p, func(a, b *Provider) int { return a.at.Compare(b.at) })
	if found && !o.providers[i].isRemoved() {
		return ib.Errorf(op, syscall.EEXIST, "%v is a provider already", p.at)
	}
	if found {
		o.providers[i] = p
	} else {
		o.providers = slices.Insert(o.providers, i, p)
	}
	return nil
}

func (p *Provider) isRemoved() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.removed
}

// Find returns the published provider that is nearest to all clients, and the sum of the distances.
//
// Errors: ENODEV if there is none, with the reason that the last provider has.
func (o *Orchestrator) Find(clients ...*Client) (p *Provider, sum int, err error) {
	at := make([]Address, len(clients))
	for i, c := range clients {
		at[i] = c.at
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	var published []Address
	byAddress := map[Address]*Provider{}
	why := "no provider has published memory"
	for _, p := range o.providers {
		if p.Published() {
			published = append(published, p.at)
			byAddress[p.at] = p
			if _, reason := o.t.DistanceMany(p.at, at); reason != "" {
				why = reason
			}
		}
	}
	nearest, sum, ok := o.t.nearest(published, at, o.random)
	if !ok {
		return nil, -1, ib.Errorf("p2p_find", syscall.ENODEV, "%s", why)
	}
	return byAddress[nearest], sum, nil
}

// Buffer is memory for a set of clients: a provider's, or system memory.
type Buffer struct {
	peer   *Range
	system []byte
}

// Peer returns the provider's memory; nil: it is system memory.
func (b *Buffer) Peer() *Range { return b.peer }

// Segment returns all of the buffer, for clients to map.
func (b *Buffer) Segment() Segment {
	if b.peer != nil {
		return Segment{Peer: b.peer}
	}
	return Segment{System: b.system}
}

// Free gives the memory back. Errors: those of [Range.Free].
func (b *Buffer) Free() error {
	if b.peer == nil {
		return nil
	}
	return b.peer.Free()
}

// Alloc allocates n bytes that all clients reach: of the nearest provider, or else, if the
// orchestrator may fall back, of system memory.
//
// Errors: EINVAL for no bytes; those of [Orchestrator.Find] and [Provider.Alloc]; ENOMEM if the machine
// has less system memory than that.
func (o *Orchestrator) Alloc(n uint64, clients ...*Client) (*Buffer, error) {
	if n == 0 {
		return nil, ib.Errorf("p2p_alloc", syscall.EINVAL, "no bytes")
	}
	p, _, err := o.Find(clients...)
	if err == nil {
		var g *Range
		if g, err = p.Alloc(n); err == nil {
			return &Buffer{peer: g}, nil
		}
	}
	why := err.Error()
	var failed *ib.OpError
	if errors.As(err, &failed) {
		why = failed.Detail
	}
	if errors.Is(err, syscall.ENOMEM) {
		why = fmt.Sprintf("the provider %v has no free range of the length", p.at)
	}
	o.refused(why)
	if !o.fallback {
		return nil, err
	}
	return o.system(n)
}

// system allocates system memory instead of a provider's.
func (o *Orchestrator) system(n uint64) (*Buffer, error) {
	if total := sys.TotalMemory(); n > total { // make would end the program
		return nil, ib.Errorf("p2p_alloc", syscall.ENOMEM, "%d bytes of system memory, of %d that the machine has", n, total)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stats.Fallbacks++
	return &Buffer{system: make([]byte, n)}, nil
}

// Reasons that an orchestrator tells apart: those of verdicts name addresses, of which clients that are not of the
// machine may have any.
const (
	mostReasons  = 256
	otherReasons = "other reasons"
)

// refused counts what could not be done with peer memory.
func (o *Orchestrator) refused(why string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, known := o.stats.Refusals[why]; !known && len(o.stats.Refusals) >= mostReasons {
		why = otherReasons
	}
	o.stats.Refusals[why]++
}

// Transfer is data that one device writes and another one reads.
type Transfer struct {
	From, To *Client
	Length   uint64

	// Produce writes the data, as From's DMA engine; Consume reads it, as To's. If a provider vanishes
	// on the way and the orchestrator may fall back, both are called again.
	Produce, Consume func(bytes [][]byte) error
}

// Do drives a transfer: it finds a provider for both clients, allocates, and lets one write and the
// other one read. It returns how the data has gone.
//
// Errors: those of [Orchestrator.Alloc] and [Client.Map]; those of Produce and Consume; ENODEV if the
// provider vanishes on the way.
func (o *Orchestrator) Do(t Transfer) (produced, consumed Path, err error) {
	b, err := o.Alloc(t.Length, t.From, t.To)
	if err != nil {
		return 0, 0, err
	}
	produced, consumed, err = o.through(b, &t)
	if b.peer == nil || !errors.Is(err, syscall.ENODEV) || !b.peer.isGone() {
		return produced, consumed, err
	}
	o.refused(fmt.Sprintf("the provider %v has vanished", b.peer.Provider().at))
	if !o.fallback {
		return produced, consumed, err
	}
	if b, err = o.system(t.Length); err != nil {
		return 0, 0, err
	}
	return o.through(b, &t)
}

func (g *Range) isGone() bool {
	g.res.p.mu.Lock()
	defer g.res.p.mu.Unlock()
	return g.res.gone
}

// through moves the data through a buffer, and frees it.
func (o *Orchestrator) through(b *Buffer, t *Transfer) (produced, consumed Path, err error) {
	defer func() { err = errors.Join(err, b.Free()) }()
	if produced, err = leg(t.From, b, t.Produce); err != nil {
		return 0, 0, err
	}
	if consumed, err = leg(t.To, b, t.Consume); err != nil {
		return 0, 0, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stats.Transfers++
	for _, path := range []Path{produced, consumed} {
		*o.stats.of(path) += t.Length
	}
	return produced, consumed, nil
}

// of returns the counter of a path.
func (s *Stats) of(p Path) *uint64 {
	return [numPaths]*uint64{&s.SystemBytes, &s.BusBytes, &s.HostBridgeBytes}[p]
}

// leg lets one client access a buffer.
func leg(c *Client, b *Buffer, access func([][]byte) error) (Path, error) {
	m, err := c.Map(b.Segment())
	if err != nil {
		return 0, err
	}
	defer m.Unmap()
	return m.dma[0].Path, m.Access(access)
}

// Stats returns the counters.
func (o *Orchestrator) Stats() Stats {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.stats
	s.Refusals = maps.Clone(s.Refusals)
	return s
}
