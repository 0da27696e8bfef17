package nvme

// The log page of discovery subsystems (NVMe over Fabrics 1.1, 5): where hosts find subsystems.

import (
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// AddressFamily is the kind of a transport address.
type AddressFamily uint8

// Address families.
const (
	AddressPCI   AddressFamily = 0
	AddressIPv4  AddressFamily = 1
	AddressIPv6  AddressFamily = 2
	AddressIB    AddressFamily = 3
	AddressFC    AddressFamily = 4
	AddressIntra AddressFamily = 254
)

// DiscoveryEntry is where a host finds a subsystem.
type DiscoveryEntry struct {
	Transport TransportType
	Family    AddressFamily
	Discovery bool // another discovery service, not a subsystem with namespaces
	PortID    uint16
	Address   string // as in "192.0.2.1"
	Service   string // as in "4420"
	NQN       string
}

// Sizes of the discovery log page.
const (
	discoveryHeader = 1024
	discoveryRecord = 1024
)

// The part of a record that is about RDMA.
const (
	tsasOffset       = 768
	rdmaReliable     = 1 // queue pairs: reliable, connected
	rdmaProviderRoCE = 4 // RoCE v2
	rdmaCM           = 1 // connections by RDMA-CM
)

// SetDiscovery replaces the entries of a discovery subsystem's log page. Controllers whose hosts have asked for it
// report the change.
//
// Errors: EOPNOTSUPP if it is no discovery subsystem; EINVAL for names and addresses that are too long.
func (s *Subsystem) SetDiscovery(entries []DiscoveryEntry) error {
	const op = "nvme_set_discovery"
	if !s.cfg.Discovery {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "%s is no discovery subsystem", s.cfg.NQN)
	}
	records := make([]byte, 0, len(entries)*discoveryRecord)
	for i := range entries {
		e := &entries[i]
		if !validNQN(e.NQN) || len(e.Address) > 256 || len(e.Service) > 32 {
			return ib.Errorf(op, syscall.EINVAL, "entry %d, %q at %q, %q", i, e.NQN, e.Address, e.Service)
		}
		records = e.append(records)
	}
	s.mu.Lock()
	if slices.Equal(records, s.discovery) {
		s.mu.Unlock()
		return nil
	}
	s.discovery = records
	s.generation++
	notify := s.controllersLocked()
	s.mu.Unlock()
	for _, c := range notify {
		c.discoveryChanged()
	}
	return nil
}

func (e *DiscoveryEntry) append(to []byte) []byte {
	var b [discoveryRecord]byte
	b[0], b[1], b[2] = uint8(e.Transport), uint8(e.Family), 2
	if e.Discovery {
		b[2] = 1
	}
	b[3] = 2 // TREQ: a secure channel is not required
	le.PutUint16(b[4:], e.PortID)
	le.PutUint16(b[6:], CNTLIDDynamic)
	le.PutUint16(b[8:], 32) // entries of the admin queue
	putText(b[32:64], e.Service)
	copy(b[256:256+MaxNQN], e.NQN)
	putText(b[512:768], e.Address)
	if e.Transport == TransportRDMA {
		b[tsasOffset], b[tsasOffset+1], b[tsasOffset+2] = rdmaReliable, rdmaProviderRoCE, rdmaCM
	}
	return append(to, b[:]...)
}

// ParseDiscovery reads a discovery log page: its generation, and the entries that are whole.
func ParseDiscovery(page []byte) (generation uint64, entries []DiscoveryEntry) {
	if len(page) < discoveryHeader {
		return 0, nil
	}
	generation = le.Uint64(page)
	count := le.Uint64(page[8:])
	for b := page[discoveryHeader:]; count > 0 && len(b) >= discoveryRecord; b, count = b[discoveryRecord:], count-1 {
		entries = append(entries, DiscoveryEntry{
			Transport: TransportType(b[0]), Family: AddressFamily(b[1]), Discovery: b[2] != 2,
			PortID: le.Uint16(b[4:]), Service: text(b[32:64]), NQN: text(b[256:512]), Address: text(b[512:768])})
	}
	return generation, entries
}

// text is ASCII without the spaces and zeros that fill it up.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			b = b[:i]
			break
		}
	}
	for len(b) > 0 && b[len(b)-1] == ' ' {
		b = b[:len(b)-1]
	}
	return string(b)
}

func (s *Subsystem) discoveryPage() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := make([]byte, discoveryHeader, discoveryHeader+len(s.discovery))
	le.PutUint64(b, s.generation)
	le.PutUint64(b[8:], uint64(len(s.discovery)/discoveryRecord))
	return append(b, s.discovery...)
}
