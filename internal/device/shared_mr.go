package device

// Regions whose memory the library allocates, and that other processes can open:
//
//  1. AllocMR allocates and registers.
//  2. Share makes a handle; the program passes it on.
//  3. OpenSharedMR, in another process, asks this one for the memory (host's
//     sockets, shares.get here) and registers it there, with rights of its own.
//
// The memory lives as long as one of the regions does.

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// AllocMR allocates memory and registers it.
func (p *PD) AllocMR(length uint64, access ib.Access) (provider.MR, error) {
	if access&ib.AccessOnDemand != 0 {
		return nil, errAllocOnDemand("alloc_mr")
	}
	return p.registerWith(memory{}, access, func() (mem.Backing, error) { return p.dev.allocate("alloc_mr", length, access) })
}

// allocate allocates memory for a region.
func (d *Device) allocate(op string, length uint64, access ib.Access) (mem.Backing, error) {
	a, err := mem.NewAlloc(length, access, d.cfg.Lock)
	if err != nil {
		return nil, named(op, err)
	}
	return a, nil
}

// OpenSharedMR registers memory that another process shares.
func (p *PD) OpenSharedMR(handle string, access ib.Access) (provider.MR, error) {
	const op = "open_shared_mr"
	if access&ib.AccessOnDemand != 0 {
		return nil, errAllocOnDemand(op)
	}
	return p.registerWith(memory{}, access, func() (mem.Backing, error) {
		fd, length, err := host.FetchMemory(handle)
		if err != nil {
			return nil, opError(op, err)
		}
		a, err := mem.OpenAlloc(fd, length, access, p.dev.cfg.Lock)
		if err != nil {
			return nil, named(op, err)
		}
		return a, nil
	})
}

// errAllocOnDemand: on-demand paging does not do contiguous pages.
func errAllocOnDemand(op string) error {
	return ib.Errorf(op, syscall.EINVAL, "memory that the library allocates is contiguous, and cannot be on demand")
}

// Bytes returns the memory, if the library has allocated it.
func (m *MR) Bytes() []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a, ok := m.region.Backing().(*mem.Alloc); ok && !m.closed {
		return a.Bytes()
	}
	return nil
}

// Share makes the region one that other processes can open, and returns the handle
// for that: always the same one.
func (m *MR) Share() (string, error) {
	const op = "share_mr"
	m.mu.Lock()
	defer m.mu.Unlock()
	switch _, ok := m.region.Backing().(*mem.Alloc); {
	case m.closed:
		return "", ib.Errorf(op, syscall.EINVAL, "the region is closed")
	case !ok:
		return "", ib.Errorf(op, syscall.EINVAL, "only memory that the library has allocated can be shared")
	case m.pd.dev.member == nil:
		return "", ib.Errorf(op, syscall.EOPNOTSUPP, "a device on the loop link alone is not to be found by other processes")
	}
	return m.pd.dev.member.Handle(m.pd.dev.shares.add(m)), nil
}

// dup returns a descriptor of the memory, for another process.
func (m *MR) dup() (fd int, length uint64, err error) {
	m.mu.Lock() // the region stays as it is meanwhile
	defer m.mu.Unlock()
	a, ok := m.region.Backing().(*mem.Alloc)
	if !ok || m.closed {
		return -1, 0, errNotShared
	}
	from, _, _ := a.Shared()
	fd, err = sys.DupFD(from)
	return fd, a.Len(), err
}

var errNotShared = fmt.Errorf("no region is shared by this handle any more: %w", syscall.ENOENT)

// shares are the regions that other processes may open.
type shares struct {
	mu      sync.Mutex // guards both
	byToken map[string]*MR
	tokens  map[*MR]string
}

// add returns the token of a region.
func (s *shares) add(m *MR) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byToken == nil {
		s.byToken, s.tokens = make(map[string]*MR), make(map[*MR]string)
	}
	if s.tokens[m] == "" {
		token := host.NewToken()
		s.tokens[m], s.byToken[token] = token, m
	}
	return s.tokens[m]
}

// forget makes the handle of a region useless, if it has one.
func (s *shares) forget(m *MR) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byToken, s.tokens[m])
	delete(s.tokens, m)
}

// get returns the memory of the region with a token.
func (s *shares) get(token string) (fd int, length uint64, err error) {
	s.mu.Lock()
	m := s.byToken[token]
	s.mu.Unlock()
	if m == nil {
		return -1, 0, errNotShared
	}
	return m.dup()
}
