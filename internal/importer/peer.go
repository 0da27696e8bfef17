package importer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/peermem"
)

// Memory of PeerDirect clients, which is registered by address. A client's memory is a buffer that
// the region pins: so what the importer does with pinned buffers is what PeerDirect asks for.
//
//  1. Registering an address has failed with EFAULT: it is no memory of the process.
//  2. RegisterPeer asks the clients. The first error stands if it is nobody's.
//  3. The region is one of a pinned buffer. If the client invalidates it, it is revoked.

// notForPeers are rights that regions of PeerDirect clients cannot have: there are no windows on
// them, and nobody knows whether the memory persists.
const notForPeers = ib.AccessMWBind | ib.AccessFlushPersistent

// RegisterPeer registers memory of a PeerDirect client, after registering the address as memory of
// the process has failed. failed is the error of that; it is returned if no client has the memory.
//
// Errors: EINVAL for rights that such regions cannot have; the client's; ETIMEDOUT if the client
// does not answer.
func RegisterPeer(pd provider.PD, addr uintptr, length, iova uint64, access ib.Access, failed error) (provider.MR, error) {
	const op = "reg_mr"
	p, ok := pd.(registrar)
	if length == 0 || length > math.MaxInt || uint64(addr) > math.MaxUint64-length {
		return nil, failed
	}
	// On-demand regions follow the process's own mappings, and have no clients.
	if !ok || !errors.Is(failed, syscall.EFAULT) || access&ib.AccessOnDemand != 0 || len(peermem.Clients()) == 0 {
		return nil, failed
	}
	b, err := ImportPeer(addr, length, access, pd)
	switch {
	case err != nil:
		return nil, err
	case b == nil:
		return nil, failed
	case access&notForPeers != 0:
		_ = b.Close() // the other error says more
		return nil, ib.Errorf(op, syscall.EINVAL, "access bits %#x are not for memory of a PeerDirect client", uint32(access&notForPeers))
	}
	return p.RegBacking(b, iova, access)
}

// ImportPeer makes a backing of memory of a PeerDirect client, nil if no client has it.
func ImportPeer(addr uintptr, length uint64, access ib.Access, device any) (*Backing, error) {
	var buffer *dmabuf.Buffer
	err := inTime("reg_mr", func(context.Context) error {
		found, err := peermem.Find(addr, length, access&ib.AccessLocalWrite != 0)
		buffer = found
		return err
	}, func() {
		if buffer != nil {
			buffer.Put()
		}
	})
	if err != nil || buffer == nil {
		return nil, err
	}
	b, err := Import(buffer, Config{Length: length, Pinned: true, Device: device, Peer: true})
	buffer.Put() // the attachment has a reference of its own
	return b, err
}

// CanRereg refuses to register regions of PeerDirect clients again, as vendors' drivers do.
func (i *Backing) CanRereg() error {
	if i.cfg.Peer {
		return ib.Errorf("rereg_mr", syscall.EOPNOTSUPP, "memory of a PeerDirect client cannot be registered again")
	}
	return nil
}

func init() {
	provider.PeerCounters = func() (all []provider.Counter) {
		for _, c := range peermem.Clients() {
			stats := c.Stats()
			for _, s := range stats.All() {
				all = append(all, provider.Counter{Name: fmt.Sprintf("peer_%s_%s", c.Name(), s.Name), Value: s.Value})
			}
		}
		return all
	}
}

var _ mem.Movable = (*Backing)(nil)
