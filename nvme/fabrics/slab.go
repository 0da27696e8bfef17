package fabrics

import (
	"syscall"

	"github.com/verbena-rdma/verbena/internal/pages"
	"github.com/verbena-rdma/verbena/verbs"
)

// slab is the memory through which the data of a queue's commands passes. Whoever uses it locks it.
type slab struct {
	mr      *verbs.MR
	mem     []byte
	release func() // gives memory of TargetConfig.Buffers back; nil: it is the region's own
	pool    pages.Pool
}

const page = pages.Size

func newSlab(mr *verbs.MR, mem []byte, release func()) *slab {
	return &slab{mr: mr, mem: mem, release: release, pool: pages.New(uint64(len(mem)))}
}

// newSlab returns memory for a queue: for an I/O queue, of the Buffers that the target was given while there are some.
func (t *Target) newSlab(n int, qid uint16) (*slab, error) {
	if t.cfg.Buffers != nil && qid != 0 {
		b, release, err := t.cfg.Buffers.Alloc(n)
		if err == nil && len(b) >= t.cfg.MaxTransfer {
			mr, err := t.pd.RegMR(b, verbs.AccessLocalWrite)
			if err != nil {
				release()
				return nil, err
			}
			return newSlab(mr, b, release), nil
		}
		if err == nil {
			release()
			err = syscall.ENOMEM
		}
		t.cfg.Log.Warn("a queue has memory of the target's own", "queue", qid, "error", err)
		t.stats.ownBuffers.Add(1)
	}
	return t.ownSlab(n)
}

// ownSlab returns memory of the target's own.
func (t *Target) ownSlab(n int) (*slab, error) {
	mr, err := t.pd.AllocMR(n, verbs.AccessLocalWrite)
	if err != nil {
		return nil, err
	}
	return newSlab(mr, mr.Bytes(), nil), nil
}

// bytes returns the first n bytes of a part, and sge what a request calls them.
func (s *slab) bytes(r pages.Range, n int) []byte { return s.mem[r.Off:][:n:n] }

func (s *slab) sge(r pages.Range, n int) verbs.SGE { return s.mr.SGE(int(r.Off), n) } //nolint:gosec // inside the memory

func (s *slab) close() error {
	err := s.mr.Close()
	if s.release != nil {
		s.release()
	}
	return err
}
