package device

// Indirect memory keys. Package mem implements them, and a request of a queue pair configures
// them. They count as regions.

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

// Shelter keeps peers from invalidating the key. It is called before a peer learns the key.
func (k *MKey) Shelter() { k.key.Shelter() }

// Close ends the key, configured or not, unless another key refers to it: when Close has
// succeeded, no request accesses memory through it.
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
