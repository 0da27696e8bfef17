package p2p

import (
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/pages"
)

// Path is how a client reaches a segment.
type Path uint8

const (
	PathSystem     Path = iota // system memory
	PathBus                    // a peer's memory, by its address on the bus
	PathHostBridge             // a peer's memory, through the host bridge
	numPaths
)

var pathNames = [...]string{"system memory", "peer, by bus address", "peer, through host bridge"}

// String names the path.
func (p Path) String() string { return pathNames[p] }

// ClientConfig is what a client is like; nil and the zero value mean the defaults.
type ClientConfig struct {
	// Gone is called for each mapping that has ended because a provider has vanished. Accesses fail
	// by then. It must not wait for the provider. nil: nobody is told; accesses fail all the same.
	Gone func(*Mapping)
}

// Client is a device that reads and writes memory of others. Its methods may be called by several
// goroutines.
type Client struct {
	t   *Topology
	at  Address
	cfg ClientConfig

	mu   sync.Mutex // guards iova
	iova pages.Pool // addresses of the IOMMU that are free, in pages
}

// iovaBase is where the addresses of the IOMMU begin that a client gets: below 4 GiB, as for PCI
// devices in Linux, and not at 0.
const iovaBase = 0x10000000

// NewClient makes a device a client. If the topology has no such function, as for a device that is
// software, the client reaches system memory only.
func NewClient(t *Topology, at Address, cfg *ClientConfig) *Client {
	c := &Client{t: t, at: at, iova: pages.New(1<<32 - iovaBase)}
	if cfg != nil {
		c.cfg = *cfg
	}
	return c
}

// Address returns where the client is.
func (c *Client) Address() Address { return c.at }

// Segment is memory for a client to map: a part of a peer's range, or system memory.
type Segment struct {
	Peer   *Range // nil: system memory
	Offset uint64 // in Peer
	Length uint64 // of Peer; 0: up to its end

	System  []byte
	Address uint64 // physical address of System
}

// DMA is a segment as the client's device addresses it.
type DMA struct {
	Address uint64
	Length  uint64
	Path    Path
}

// Mapping is a list of segments that a client has mapped.
type Mapping struct {
	client *Client
	dma    []DMA
	bytes  [][]byte
	ranges []*Range
	iovas  []pages.Range

	mu    sync.RWMutex // held for reading by accesses; guards err and unmapped
	err   error        // why accesses fail; nil: they do not
	ended bool
}

// Map maps a list of segments for the client's DMA. It tells peer memory from system memory: peer
// memory has a bus address or one through the host bridge, or the whole list is refused.
//
// Errors: EREMOTEIO if the client does not reach a segment, with the reason; ENODEV if a provider has
// vanished; EINVAL for an empty list, an empty segment, or one outside its range; ENOMEM if the
// IOMMU has no addresses left.
func (c *Client) Map(segments ...Segment) (*Mapping, error) {
	const op = "p2p_map"
	if len(segments) == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "no segments")
	}
	m := &Mapping{client: c}
	for i := range segments {
		if err := m.add(&segments[i]); err != nil {
			m.release()
			return nil, err
		}
	}
	m.mu.RLock()
	err := m.err
	m.mu.RUnlock()
	if err != nil { // a provider has vanished meanwhile
		m.release()
		return nil, err
	}
	return m, nil
}

func (m *Mapping) add(s *Segment) error {
	const op = "p2p_map"
	c := m.client
	if s.Peer == nil {
		if len(s.System) == 0 {
			return ib.Errorf(op, syscall.EINVAL, "an empty segment")
		}
		at, err := m.translate(s.Address, uint64(len(s.System)))
		if err != nil {
			return err
		}
		m.dma = append(m.dma, DMA{at, uint64(len(s.System)), PathSystem})
		m.bytes = append(m.bytes, s.System)
		return nil
	}
	n := s.Length
	if n == 0 && s.Offset < s.Peer.n {
		n = s.Peer.n - s.Offset
	}
	v := c.t.Verdict(s.Peer.Provider().at, c.at)
	if v.Map == NotSupported {
		return ib.Errorf(op, syscall.EREMOTEIO, "%v does not reach memory of %v: %s", c.at, v.Provider, v.Reason)
	}
	bytes, err := s.Peer.attach(m, s.Offset, n)
	if err != nil {
		return err
	}
	m.ranges = append(m.ranges, s.Peer)
	m.bytes = append(m.bytes, bytes...)
	if v.Map == BusAddress {
		m.dma = append(m.dma, DMA{s.Peer.BusAddress() + s.Offset, n, PathBus})
		return nil
	}
	at, err := m.translate(s.Peer.Address()+s.Offset, n)
	m.dma = append(m.dma, DMA{at, n, PathHostBridge})
	return err
}

// translate returns the address by which the device reaches what the CPU has at an address: one of
// the IOMMU's, if it is on.
func (m *Mapping) translate(address, n uint64) (uint64, error) {
	if !m.client.t.spec.IOMMU {
		return address, nil
	}
	in := address % pages.Size
	c := m.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > c.iova.Size()-pages.Size {
		return 0, ib.Errorf("p2p_map", syscall.ENOMEM, "%d bytes", n)
	}
	got, ok := c.iova.Alloc(in + n)
	if !ok {
		return 0, ib.Errorf("p2p_map", syscall.ENOMEM, "the IOMMU has no addresses left")
	}
	m.iovas = append(m.iovas, got)
	return iovaBase + got.Off + in, nil
}

// Client returns the client that has mapped the list.
func (m *Mapping) Client() *Client { return m.client }

// DMA returns the segments as the device addresses them.
func (m *Mapping) DMA() []DMA { return m.dma }

// Access calls f with the bytes of all segments, in order: what the device's DMA engine does. The
// memory stays until f returns; f must not wait for the provider or the exporter of its memory, which
// may wait for f.
//
// Errors: f's; ENODEV if a provider has vanished; EINVAL after Unmap.
func (m *Mapping) Access(f func(bytes [][]byte) error) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.err != nil {
		return m.err
	}
	return f(m.bytes)
}

// end makes accesses fail, after those under way. It reports whether they had not failed before.
func (m *Mapping) end(why error) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return false
	}
	m.err = why
	return true
}

// Unmap ends the mapping, after the accesses under way. Unmapping again does nothing.
func (m *Mapping) Unmap() {
	m.end(ib.Errorf("p2p_access", syscall.EINVAL, "it is unmapped"))
	m.mu.Lock()
	ended := m.ended
	m.ended = true
	m.mu.Unlock()
	if !ended {
		m.release()
	}
}

// release gives up what the mapping holds.
func (m *Mapping) release() {
	for _, g := range m.ranges {
		g.detach(m)
	}
	c := m.client
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range m.iovas {
		c.iova.Free(e)
	}
}
