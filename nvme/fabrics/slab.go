package fabrics

import (
	"slices"

	"github.com/verbena-rdma/verbena/verbs"
)

// slab is the memory through which the data of a queue's commands passes. Only the queue's goroutine uses it.
type slab struct {
	mr      *verbs.MR
	mem     []byte
	release func() // gives memory of TargetConfig.Buffers back; nil: it is the region's own
	gaps    []part // what is free, by offset
}

// part is a part of a slab, in whole pages.
type part struct{ off, n int }

const page = 4096

// newSlab returns memory for a queue: of the Buffers that the target was given while there are some.
func (t *Target) newSlab(n int) (*slab, error) {
	if t.cfg.Buffers != nil {
		b, release, err := t.cfg.Buffers.Alloc(n)
		if err == nil && len(b) >= t.cfg.MaxTransfer {
			mr, err := t.pd.RegMR(b, verbs.AccessLocalWrite)
			if err != nil {
				release()
				return nil, err
			}
			return &slab{mr: mr, mem: b, release: release, gaps: []part{{0, len(b) / page * page}}}, nil
		}
		if err == nil {
			release()
		}
		t.stats.ownBuffers.Add(1)
	}
	mr, err := t.pd.AllocMR(n, verbs.AccessLocalWrite)
	if err != nil {
		return nil, err
	}
	return &slab{mr: mr, mem: mr.Bytes(), gaps: []part{{0, n / page * page}}}, nil
}

// alloc returns room for n bytes, if there is any.
func (s *slab) alloc(n int) (part, bool) {
	n = (n + page - 1) / page * page
	for i := range s.gaps {
		g := &s.gaps[i]
		if g.n < n {
			continue
		}
		p := part{g.off, n}
		g.off += n
		if g.n -= n; g.n == 0 {
			s.gaps = slices.Delete(s.gaps, i, i+1)
		}
		return p, true
	}
	return part{}, false
}

// free gives a part back.
func (s *slab) free(p part) {
	i, _ := slices.BinarySearchFunc(s.gaps, p.off, func(g part, off int) int { return g.off - off })
	after := i < len(s.gaps) && s.gaps[i].off == p.off+p.n
	before := i > 0 && s.gaps[i-1].off+s.gaps[i-1].n == p.off
	switch {
	case before && after:
		s.gaps[i-1].n += p.n + s.gaps[i].n
		s.gaps = slices.Delete(s.gaps, i, i+1)
	case before:
		s.gaps[i-1].n += p.n
	case after:
		s.gaps[i] = part{p.off, p.n + s.gaps[i].n}
	default:
		s.gaps = slices.Insert(s.gaps, i, p)
	}
}

func (s *slab) bytes(p part) []byte { return s.mem[p.off : p.off+p.n] }

func (s *slab) close() error {
	err := s.mr.Close()
	if s.release != nil {
		s.release()
	}
	return err
}
