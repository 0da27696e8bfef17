package qp

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// lazy is memory whose pages are there or have to be fetched first, as a test
// says. Its pages are small, so that messages have many.
type lazy struct {
	*mem.Host
	there   []bool
	gone    bool          // what is not there never will be
	fetched [][2]uint64   // offset and length of what was fetched
	evict   func() uint64 // if set: a page that goes whenever others are used
}

const lazyPage = 128

func newLazy(h *mem.Host) *lazy {
	z := &lazy{Host: h, there: make([]bool, (h.Len()+lazyPage-1)/lazyPage)}
	z.bring(0, h.Len())
	return z
}

// Solid hides the host's: the copy loop must take the careful way.
func (z *lazy) Solid() bool { return false }

func (z *lazy) set(off, n uint64, there bool) {
	for i := off / lazyPage; n > 0 && i <= (off+n-1)/lazyPage && i < uint64(len(z.there)); i++ {
		z.there[i] = there
	}
}

func (z *lazy) drop(off, n uint64)  { z.set(off, n, false) }
func (z *lazy) bring(off, n uint64) { z.set(off, n, true) }

// Run returns what is there in one piece.
func (z *lazy) Run(off, n uint64, acc ib.Access) ([]byte, mem.Fault) {
	if z.evict != nil {
		z.there[z.evict()%uint64(len(z.there))] = false
	}
	have := uint64(0)
	for have < n && z.there[(off+have)/lazyPage] {
		have += min(n-have, lazyPage-(off+have)%lazyPage)
	}
	switch {
	case have > 0:
		return z.Host.Run(off, have, acc)
	case z.gone:
		return nil, mem.Fault{Kind: mem.FaultStale}
	}
	return nil, mem.Fault{Kind: mem.FaultPending}
}

// Gone is for memory that really vanishes: this does not.
func (z *lazy) Gone(uint64, uint64, ib.Access) mem.FaultKind { return mem.FaultStale }

func (z *lazy) Await(off, n uint64, _ ib.Access) mem.FaultKind {
	if z.gone {
		return mem.FaultStale
	}
	z.fetched = append(z.fetched, [2]uint64{off, n})
	z.bring(off, n)
	return mem.FaultNone
}
