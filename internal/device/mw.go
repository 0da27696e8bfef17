package device

// Memory windows. Package mem implements them, and a queue pair executes their binds.

import (
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// MW is a memory window.
type MW struct {
	pd     *PD
	window *mem.Window
	once   sync.Once
	err    error
}

// AllocMW makes a memory window.
func (p *PD) AllocMW(typ ib.MWType) (provider.MW, error) {
	d := p.dev
	if err := p.use("alloc_mw", &d.counts.mws, d.limits.MWs); err != nil {
		return nil, err
	}
	w, err := d.table.AllocWindow(p.id, typ)
	if err != nil {
		p.unuse(&d.counts.mws)
		return nil, err
	}
	return &MW{pd: p, window: w}, nil
}

func (w *MW) Type() ib.MWType { return w.window.Type() }
func (w *MW) RKey() uint32    { return w.window.Key() }

// Close frees the window, bound or not: when it returns, no peer accesses memory
// through it.
func (w *MW) Close() error {
	w.once.Do(func() {
		w.err = w.window.Close()
		w.pd.unuse(&w.pd.dev.counts.mws)
	})
	return w.err
}

// BindMW posts a bind of a type 1 window.
func (q *QP) BindMW(mw provider.MW, id uint64, flags ib.SendFlags, b ib.MWBind) (uint32, error) {
	w, ok := mw.(*MW)
	switch {
	case !ok || w.pd.dev != q.dev:
		return 0, ib.Errorf("bind_mw", syscall.EINVAL, "the window belongs to another device")
	case w.Type() != ib.MWType1:
		return 0, ib.Errorf("bind_mw", syscall.EINVAL, "a window of %v is bound by a work request", w.Type())
	}
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return 0, ib.Errorf("bind_mw", syscall.EINVAL, "the queue pair is closed")
	}
	b.MW, b.RKey = w.RKey(), w.window.NextKey()
	err := q.core.PostBind(id, flags, &b)
	q.mu.Unlock()
	if err != nil {
		w.window.NoKey(b.RKey)
		return 0, named("bind_mw", err)
	}
	q.dev.transmit(q, q.dev.now())
	return b.RKey, nil
}
