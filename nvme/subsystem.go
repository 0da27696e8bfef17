package nvme

import (
	"crypto/sha256"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// SubsystemConfig describes a subsystem.
type SubsystemConfig struct {
	NQN      string // qualified name, as in "nqn.2026-01.example:disk"; needed
	Serial   string // "": made from the NQN; at most 20 bytes
	Model    string // "": "Verbena"; at most 40 bytes
	Firmware string // "": "1.0"; at most 8 bytes

	// MaxNamespaces is the largest namespace number, from 1 to 65536; 0: 1024.
	MaxNamespaces uint32

	// Discovery makes it a discovery subsystem: its controllers have no namespaces and no I/O queues, but the log page
	// of SetDiscovery. NQN may be "" then: DiscoveryNQN.
	Discovery bool
}

// Subsystem is namespaces, and the controllers through which hosts use them.
type Subsystem struct {
	cfg   SubsystemConfig
	table atomic.Pointer[table] // replaced, under mu, when namespaces come and go

	mu          sync.Mutex // guards what follows, and changes of table
	controllers map[uint16]*Controller
	lastID      uint16
	past        smartCounts // what controllers counted that are closed
	discovery   []byte      // the records of the discovery log page
	generation  uint64      // counts changes of discovery
}

// table is the namespaces at one time. It does not change.
type table struct {
	byID map[uint32]*attached
	ids  []uint32 // sorted
}

// attached is a namespace of a subsystem.
type attached struct {
	nsid uint32
	Namespace
	shift    uint // of the block size
	readOnly bool

	use  sync.RWMutex // held for reading while a command uses the namespace; guards gone
	gone bool
}

// NewSubsystem makes a subsystem without namespaces.
//
// Errors: EINVAL for names that are missing, too long or not printable ASCII.
func NewSubsystem(cfg SubsystemConfig) (*Subsystem, error) {
	const op = "nvme_new_subsystem"
	if cfg.Discovery && cfg.NQN == "" {
		cfg.NQN = DiscoveryNQN
	}
	if !validNQN(cfg.NQN) {
		return nil, ib.Errorf(op, syscall.EINVAL, "name %q: it begins with \"nqn.\" and has at most %d bytes", cfg.NQN, MaxNQN)
	}
	if cfg.Serial == "" {
		sum := sha256.Sum256([]byte("serial " + cfg.NQN))
		const digits = "0123456789ABCDEF"
		for _, b := range sum[:8] {
			cfg.Serial += string(digits[b>>4]) + string(digits[b&0xf])
		}
	}
	if cfg.Model == "" {
		cfg.Model = "Verbena"
	}
	if cfg.Firmware == "" {
		cfg.Firmware = "1.0"
	}
	for _, s := range []struct {
		what, text string
		most       int
	}{{"serial number", cfg.Serial, 20}, {"model", cfg.Model, 40}, {"firmware revision", cfg.Firmware, 8}} {
		if len(s.text) > s.most || strings.ContainsFunc(s.text, func(r rune) bool { return r < 0x20 || r > 0x7e }) {
			return nil, ib.Errorf(op, syscall.EINVAL, "%s %q: at most %d printable ASCII characters", s.what, s.text, s.most)
		}
	}
	if cfg.MaxNamespaces == 0 {
		cfg.MaxNamespaces = 1024
	}
	if cfg.MaxNamespaces > 65536 {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d namespaces: at most 65536", cfg.MaxNamespaces)
	}
	s := &Subsystem{cfg: cfg, controllers: map[uint16]*Controller{}, generation: 1}
	s.table.Store(&table{byID: map[uint32]*attached{}})
	return s, nil
}

// NQN returns the subsystem's name.
func (s *Subsystem) NQN() string { return s.cfg.NQN }

// AddNamespace attaches a namespace to all controllers. The caller keeps it, and closes it after RemoveNamespace.
//
// Errors: EINVAL for a number or a geometry that is not possible; EEXIST if the number is taken; EOPNOTSUPP for a
// discovery subsystem.
func (s *Subsystem) AddNamespace(nsid uint32, ns Namespace) error {
	const op = "nvme_add_namespace"
	if s.cfg.Discovery {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "a discovery subsystem has no namespaces")
	}
	if nsid == 0 || nsid > s.cfg.MaxNamespaces {
		return ib.Errorf(op, syscall.EINVAL, "namespace %d: 1 to %d are possible", nsid, s.cfg.MaxNamespaces)
	}
	if err := checkGeometry(op, ns.Size(), ns.BlockSize()); err != nil {
		return err
	}
	a := &attached{nsid: nsid, Namespace: ns}
	for 1<<a.shift < ns.BlockSize() {
		a.shift++
	}
	if p, ok := ns.(Protected); ok {
		a.readOnly = p.ReadOnly()
	}
	s.mu.Lock()
	old := s.table.Load()
	if old.byID[nsid] != nil {
		s.mu.Unlock()
		return ib.Errorf(op, syscall.EEXIST, "namespace %d", nsid)
	}
	next := &table{byID: maps.Clone(old.byID)}
	next.byID[nsid] = a
	s.replaceLocked(next)
	notify := s.controllersLocked()
	s.mu.Unlock()
	namespaceChanged(notify, nsid)
	return nil
}

// RemoveNamespace detaches a namespace. It waits for the commands that use it. Controllers whose hosts have asked for it
// report the change.
//
// Errors: ENOENT if there is none of this number.
func (s *Subsystem) RemoveNamespace(nsid uint32) error {
	s.mu.Lock()
	old := s.table.Load()
	a := old.byID[nsid]
	if a == nil {
		s.mu.Unlock()
		return ib.Errorf("nvme_remove_namespace", syscall.ENOENT, "namespace %d", nsid)
	}
	next := &table{byID: maps.Clone(old.byID)}
	delete(next.byID, nsid)
	s.replaceLocked(next)
	notify := s.controllersLocked()
	s.mu.Unlock()

	a.use.Lock()
	a.gone = true
	a.use.Unlock()
	namespaceChanged(notify, nsid)
	return nil
}

func (s *Subsystem) replaceLocked(next *table) {
	next.ids = slices.Sorted(maps.Keys(next.byID))
	s.table.Store(next)
}

func (s *Subsystem) controllersLocked() []*Controller {
	return slices.Collect(maps.Values(s.controllers))
}

func namespaceChanged(cs []*Controller, nsid uint32) {
	for _, c := range cs {
		c.namespaceChanged(nsid)
	}
}

// lookup finds a namespace and holds it for a command; release ends that.
func (s *Subsystem) lookup(nsid uint32) (*attached, Status) {
	if nsid == 0 || nsid > s.cfg.MaxNamespaces && nsid != NSIDAll {
		return nil, StatusInvalidNamespace | StatusDNR
	}
	a := s.table.Load().byID[nsid]
	if a == nil {
		return nil, StatusInvalidField | StatusDNR // not active, or all of them: NVMe Base 1.4, 6.1
	}
	a.use.RLock()
	if a.gone {
		a.use.RUnlock()
		return nil, StatusInvalidField | StatusDNR
	}
	return a, StatusSuccess
}

func (a *attached) release() { a.use.RUnlock() }

// blocks returns how many logical blocks the namespace has.
func (a *attached) blocks() uint64 { return uint64(max(a.Size(), 0)) >> a.shift }

// guid makes an identifier of a namespace that stays the same as long as the names of the subsystem do, so that a host
// recognises its disk when the subsystem was started again.
func (s *Subsystem) guid(kind string, nsid uint32) (id [16]byte) {
	b := le.AppendUint32([]byte(kind+"\x00"+s.cfg.NQN+"\x00"+s.cfg.Serial+"\x00"), nsid)
	sum := sha256.Sum256(b)
	return [16]byte(sum[:])
}

// uuid makes a version 8 UUID (RFC 9562) of guid.
func (s *Subsystem) uuid(nsid uint32) [16]byte {
	id := s.guid("uuid", nsid)
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}
