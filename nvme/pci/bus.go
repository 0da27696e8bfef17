package pci

import (
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Bus is what a controller reaches by bus addresses.
type Bus interface {
	// Bytes returns the memory at an address: n bytes, or fewer if they do not lie in one piece, or none if nothing is
	// there. It may be used until the command that it is for has completed.
	Bytes(addr uint64, n int) []byte
}

// Space is a Bus made of regions. The zero value has none.
type Space struct {
	mu      sync.RWMutex // guards regions
	regions []region     // sorted by base; they do not overlap
}

type region struct {
	base uint64
	mem  []byte
}

// end returns the last address, so that a region may end where addresses do.
func (r *region) end() uint64 { return r.base + uint64(len(r.mem)-1) }

// Add puts memory at an address.
//
// Errors: EINVAL for no memory, or more than there are addresses for; EEXIST if something is there.
func (s *Space) Add(base uint64, mem []byte) error {
	const op = "nvme_pci_add_region"
	if len(mem) == 0 || uint64(len(mem)-1) > ^base {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x", len(mem), base)
	}
	r := region{base, mem}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.findLocked(base)
	if i < len(s.regions) && s.regions[i].base <= r.end() {
		return ib.Errorf(op, syscall.EEXIST, "%d bytes at %#x overlap those at %#x", len(mem), base, s.regions[i].base)
	}
	s.regions = slices.Insert(s.regions, i, r)
	return nil
}

// findLocked returns the index of the first region that ends at an address or behind it.
func (s *Space) findLocked(addr uint64) int {
	lo, hi := 0, len(s.regions)
	for lo < hi {
		if mid := (lo + hi) / 2; s.regions[mid].end() < addr {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// Remove takes the memory at an address away, which Add has put there. Commands that have found it still use it.
//
// Errors: ENOENT if no region begins there.
func (s *Space) Remove(base uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.findLocked(base)
	if i == len(s.regions) || s.regions[i].base != base {
		return ib.Errorf("nvme_pci_remove_region", syscall.ENOENT, "%#x", base)
	}
	s.regions = slices.Delete(s.regions, i, i+1)
	return nil
}

// Bytes implements Bus.
func (s *Space) Bytes(addr uint64, n int) []byte {
	s.mu.RLock()
	defer s.mu.RUnlock()
	i := s.findLocked(addr)
	if i == len(s.regions) || s.regions[i].base > addr {
		return nil
	}
	return part(s.regions[i].mem, addr-s.regions[i].base, n)
}

// part returns n bytes at an offset that is inside mem, or those that are left.
func part(mem []byte, off uint64, n int) []byte {
	rest := mem[off:]
	n = max(0, min(n, len(rest)))
	return rest[:n:n]
}
