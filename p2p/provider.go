package p2p

// A provider's life: memory is added (AddResource, AddBuffer), published, and allocated in ranges.
// Clients map ranges. When the provider vanishes (Remove), or a dma-buf that it has is revoked, the
// mappings are ended first, which waits for the accesses under way; then the clients are told; then
// the memory goes.

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/pages"
)

// sectionSize is the granularity of memory with pages: the kernel refuses BARs that it cannot give
// pages in such units (2 MiB on x86).
const sectionSize = 2 << 20

// Provider is a device whose memory others may use. Its methods may be called by several
// goroutines.
type Provider struct {
	t  *Topology
	at Address

	mu        sync.Mutex // guards what follows, and the pools and ranges of the resources
	published bool
	removed   bool
	resources []*resource
}

// resource is a part of a BAR.
type resource struct {
	p      *Provider
	bar    *BAR
	offset uint64 // in the BAR
	pool   pages.Pool
	ranges map[*Range]struct{}
	gone   bool

	memory []byte // of AddResource

	// Of AddBuffer. The reservation lock guards them; the table stays until gone is set.
	attachment *dmabuf.Attachment
	table      *dmabuf.Table
	pinned     bool
}

// Range is memory that a provider has allocated.
type Range struct {
	res    *resource
	off, n uint64
	pages  pages.Range
	freed  bool                  // guarded by the provider's mu
	maps   map[*Mapping]struct{} // guarded by the provider's mu
}

// NewProvider makes a device of the topology a provider. It has no memory yet.
//
// Errors: ENODEV if the topology has no such function.
func NewProvider(t *Topology, at Address) (*Provider, error) {
	if t.byAddress[at] == nil {
		return nil, ib.Errorf("p2p_provider", syscall.ENODEV, "%v is no PCI function of this machine", at)
	}
	return &Provider{t: t, at: at}, nil
}

// Address returns where the provider is.
func (p *Provider) Address() Address { return p.at }

// AddResource adds size bytes of a BAR from offset on as memory with pages; size 0 means the rest of
// the BAR. memory is what the BAR shows there; nil: new memory of this process.
//
// Errors, as pci_p2pdma_add_resource has them: EINVAL for a BAR that there is not or that has ports,
// a range outside it, memory of another length, or addresses that are no multiples of 2 MiB;
// EOPNOTSUPP if the CPU cannot map the BARs; ENOMEM if a part of it is added already; ENODEV after
// Remove.
func (p *Provider) AddResource(bar int, size, offset uint64, memory []byte) error {
	const op = "p2p_add_resource"
	b, size, err := p.part(op, bar, size, offset)
	if err != nil {
		return err
	}
	start := uint64(b.Address) + offset
	switch {
	case start%sectionSize != 0 || size%sectionSize != 0:
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x: memory with pages comes in multiples of 2 MiB", size, start)
	case memory != nil && uint64(len(memory)) != size:
		return ib.Errorf(op, syscall.EINVAL, "%d bytes of memory for %d of the BAR", len(memory), size)
	}
	if memory == nil {
		memory = make([]byte, size)
	}
	r := &resource{p: p, bar: b, offset: offset, memory: memory, pool: pages.New(size), ranges: map[*Range]struct{}{}}
	return p.add(op, r)
}

// part checks a range of a BAR, and returns how long it is.
func (p *Provider) part(op string, bar int, size, offset uint64) (*BAR, uint64, error) {
	n := p.t.byAddress[p.at]
	b := n.bar(bar)
	switch {
	case b == nil || b.IO:
		return nil, 0, ib.Errorf(op, syscall.EINVAL, "%v has no memory in BAR %d", p.at, bar)
	case offset >= uint64(b.Size):
		return nil, 0, ib.Errorf(op, syscall.EINVAL, "offset %#x in BAR %d, of %v bytes", offset, bar, b.Size)
	case size > uint64(b.Size)-offset:
		return nil, 0, ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x in BAR %d, of %v bytes", size, offset, bar, b.Size)
	case n.NonMappableBARs:
		return nil, 0, ib.Errorf(op, syscall.EOPNOTSUPP, "the CPU cannot map the BARs of %v", p.at)
	}
	if size == 0 {
		size = uint64(b.Size) - offset
	}
	return b, size, nil
}

func (p *Provider) add(op string, r *resource) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.removed:
		return ib.Errorf(op, syscall.ENODEV, "the provider %v is removed", p.at)
	case r.gone:
		return ib.Errorf(op, syscall.ENODEV, "the memory was taken away meanwhile")
	}
	for _, other := range p.resources {
		if !other.gone && other.bar.Index == r.bar.Index && r.offset < other.offset+other.pool.Size() && other.offset < r.offset+r.pool.Size() {
			return ib.Errorf(op, syscall.ENOMEM, "BAR %d from %#x on is added already", r.bar.Index, other.offset)
		}
	}
	p.resources = append(p.resources, r)
	return nil
}

// AddBuffer adds a dma-buf of the device as memory without pages, shown in a BAR from offset on: a
// buffer of package gpu, or device memory of package verbs. The memory is held in place, if its
// exporter allows that. When the exporter takes it away, that part of the provider vanishes.
//
// Errors: those of the exporter; EINVAL for a part of a BAR that there is not, and for less than a
// page; EOPNOTSUPP, ENOMEM and ENODEV as AddResource.
func (p *Provider) AddBuffer(ctx context.Context, bar int, offset uint64, buf *dmabuf.Buffer) error {
	const op = "p2p_add_buffer"
	if buf == nil || buf.Size() < pages.Size || offset%pages.Size != 0 {
		return ib.Errorf(op, syscall.EINVAL, "a buffer of at least a page is added at a multiple of a page")
	}
	b, size, err := p.part(op, bar, buf.Size(), offset)
	if err != nil {
		return err
	}
	r := &resource{p: p, bar: b, offset: offset, pool: pages.New(size), ranges: map[*Range]struct{}{}}
	if err := r.attach(ctx, buf); err != nil {
		return err
	}
	if err := p.add(op, r); err != nil {
		r.detach()
		return err
	}
	return nil
}

// detach ends what attach began.
func (r *resource) detach() {
	resv := r.attachment.Buffer().Reservation()
	resv.Lock()
	r.unmapLocked()
	resv.Unlock()
	r.attachment.Detach()
}

// attach maps the buffer, with the provider as the importer's device.
func (r *resource) attach(ctx context.Context, buf *dmabuf.Buffer) error {
	a, err := buf.DynamicAttach(r.p, dmabuf.Importer{AllowPeer2Peer: true, InvalidateMappings: func(*dmabuf.Attachment) { r.revoked() }})
	if err != nil {
		return err
	}
	resv := buf.Reservation()
	resv.Lock()
	if err = a.Pin(); errors.Is(err, syscall.EOPNOTSUPP) {
		err = nil // memory that does not move, but may be taken away
	} else {
		r.pinned = err == nil
	}
	if err == nil {
		r.attachment = a
		if r.table, err = a.Map(ctx, dmabuf.Bidirectional); err == nil {
			err = resv.Wait(ctx, dmabuf.Kernel)
		}
	}
	if err != nil {
		r.unmapLocked()
	}
	resv.Unlock()
	if err != nil {
		a.Detach()
		r.attachment = nil
	}
	return err
}

// unmapLocked gives the mapping of the buffer up. The reservation is locked.
func (r *resource) unmapLocked() {
	if r.table != nil {
		r.attachment.Unmap(r.table, dmabuf.Bidirectional)
		r.table = nil
	}
	if r.pinned {
		r.pinned = false
		r.attachment.Unpin()
	}
}

// revoked is called with the reservation locked when the exporter takes the memory away.
func (r *resource) revoked() {
	r.vanish()
	r.unmapLocked()
}

// vanish ends what uses the resource.
func (r *resource) vanish() {
	r.p.mu.Lock()
	r.gone = true
	ended := r.mappingsLocked()
	clear(r.ranges)
	r.p.mu.Unlock()
	endAll(ended, r.p)
}

// mappingsLocked returns the mappings of all ranges. The provider's mu is held.
func (r *resource) mappingsLocked() (all []*Mapping) {
	for g := range r.ranges {
		all = slices.AppendSeq(all, maps.Keys(g.maps))
	}
	return all
}

// endAll ends mappings, all of them before the first client is told.
func endAll(all []*Mapping, p *Provider) {
	var told []*Mapping
	for _, m := range all {
		if m.end(ib.Errorf("p2p_access", syscall.ENODEV, "the provider %v has vanished", p.at)) {
			told = append(told, m)
		}
	}
	for _, m := range told {
		if gone := m.client.cfg.Gone; gone != nil {
			gone(m)
		}
	}
}

// Publish lets orchestrators choose the provider, or no longer.
func (p *Provider) Publish(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.published = on
}

// Published reports whether orchestrators may choose the provider: it is published and has memory.
func (p *Provider) Published() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.published && !p.removed && slices.ContainsFunc(p.resources, func(r *resource) bool { return !r.gone })
}

// Size returns how much memory there is.
func (p *Provider) Size() uint64 {
	return p.sum(func(r *resource) uint64 { return r.pool.Size() })
}

// Available returns how much memory is free.
func (p *Provider) Available() uint64 {
	return p.sum(func(r *resource) uint64 { return r.pool.Available() })
}

func (p *Provider) sum(of func(*resource) uint64) (n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.resources {
		if !r.gone {
			n += of(r)
		}
	}
	return n
}

// Alloc allocates n bytes, in whole pages that lie together.
//
// Errors: EINVAL for no bytes; ENOMEM if there is no free range of this length; ENODEV after
// Remove, and if all memory was taken away.
func (p *Provider) Alloc(n uint64) (*Range, error) {
	const op = "p2p_alloc"
	if n == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	alive := false
	for _, r := range p.resources {
		if r.gone {
			continue
		}
		alive = true
		if got, ok := r.pool.Alloc(n); ok {
			g := &Range{res: r, off: got.Off, n: n, pages: got, maps: map[*Mapping]struct{}{}}
			r.ranges[g] = struct{}{}
			return g, nil
		}
	}
	if p.removed || !alive && len(p.resources) > 0 {
		return nil, ib.Errorf(op, syscall.ENODEV, "the provider %v has vanished", p.at)
	}
	return nil, ib.Errorf(op, syscall.ENOMEM, "the provider %v has no %d bytes free", p.at, n)
}

// Remove takes the provider away, as when its driver is unbound: mappings are ended, which waits for
// the accesses under way, then clients are told, then all memory is given up. Removing again does
// nothing. It must not be called from within an access.
func (p *Provider) Remove() {
	p.mu.Lock()
	if p.removed {
		p.mu.Unlock()
		return
	}
	p.removed, p.published = true, false
	resources := p.resources
	var ended []*Mapping
	for _, r := range resources {
		if !r.gone {
			r.gone = true
			ended = append(ended, r.mappingsLocked()...)
			clear(r.ranges)
		}
	}
	p.mu.Unlock()
	endAll(ended, p)
	for _, r := range resources {
		r.memory = nil
		if r.attachment != nil {
			r.detach()
		}
	}
}

// Provider returns whose memory it is.
func (g *Range) Provider() *Provider { return g.res.p }

// Len returns how many bytes were asked for.
func (g *Range) Len() uint64 { return g.n }

// BusAddress returns the address of the first byte on the bus.
func (g *Range) BusAddress() uint64 { return g.res.bar.BusAddress() + g.res.offset + g.off }

// Address returns the address of the first byte that the CPU has for it.
func (g *Range) Address() uint64 { return uint64(g.res.bar.Address) + g.res.offset + g.off }

// Free gives the memory back. Freeing again does nothing.
//
// Errors: EBUSY while it is mapped.
func (g *Range) Free() error {
	p := g.res.p
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case g.freed:
		return nil
	case len(g.maps) > 0:
		return ib.Errorf("p2p_free", syscall.EBUSY, "%d clients have mapped it", len(g.maps))
	}
	g.freed = true
	if _, ok := g.res.ranges[g]; ok {
		delete(g.res.ranges, g)
		g.res.pool.Free(g.pages)
	}
	return nil
}

// attach notes a mapping of a part of the range, and returns the bytes there.
func (g *Range) attach(m *Mapping, off, n uint64) ([][]byte, error) {
	const op = "p2p_map"
	if off > g.n || n > g.n-off || n == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d of a range of %d", n, off, g.n)
	}
	p := g.res.p
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case g.res.gone:
		return nil, ib.Errorf(op, syscall.ENODEV, "the provider %v has vanished", p.at)
	case g.freed:
		return nil, ib.Errorf(op, syscall.EINVAL, "the range is freed")
	}
	g.maps[m] = struct{}{}
	if g.res.memory != nil {
		return [][]byte{g.res.memory[g.off+off:][:n]}, nil
	}
	return g.res.table.Part(g.off+off, n).Segments(), nil
}

// detach ends what attach began.
func (g *Range) detach(m *Mapping) {
	g.res.p.mu.Lock()
	defer g.res.p.mu.Unlock()
	delete(g.maps, m)
}
