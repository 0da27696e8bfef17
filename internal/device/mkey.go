package device

// Indirect memory keys: what they are is package mem's business, when they are
// configured that of the queue pair. They count as regions.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// MKey is an indirect memory key.
type MKey struct {
	pd  *PD
	key *mem.MKey

	mu     sync.Mutex // guards closed
	closed bool
}

// CreateMKey makes an indirect key of at most so many pieces.
func (p *PD) CreateMKey(pieces int) (provider.MKey, error) {
	d := p.dev
	if err := p.use("create_mkey", &d.counts.mrs, d.limits.MRs); err != nil {
		return nil, err
	}
	k, err := d.table.CreateMKey(p.id, pieces)
	if err != nil {
		p.unuse(&d.counts.mrs)
		return nil, err
	}
	return &MKey{pd: p, key: k}, nil
}

func (k *MKey) Key() uint32 { return k.key.Key() }

// Shelter keeps peers from invalidating the key, before it is told anybody.
func (k *MKey) Shelter() { k.key.Shelter() }

// Close ends the key, configured or not, unless another stands on it: when it
// returns, nobody accesses memory through it.
func (k *MKey) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	if err := k.key.Close(); err != nil {
		return err
	}
	k.closed = true
	k.pd.unuse(&k.pd.dev.counts.mrs)
	return nil
}
