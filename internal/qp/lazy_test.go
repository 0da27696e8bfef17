package qp

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// lazy is memory whose pages are there or have to be fetched first, as a test
// says. Its pages are small, so that messages have many.
type lazy struct {
	mem.Backing
	there   []bool
	gone    bool        // what is not there never will be
	fetched [][2]uint64 // offset and length of what was fetched
	evict   func() int  // if set: the page that goes whenever others are used, if there is such a one
}

const lazyPage = 128

func newLazy(h mem.Backing) *lazy {
	z := &lazy{Backing: h, there: make([]bool, (h.Len()+lazyPage-1)/lazyPage)}
	z.bring(0, h.Len())
	return z
}

// Durable and Persist are the disk's, if there is one below.
func (z *lazy) Durable() bool {
	_, ok := z.Backing.(*disk)
	return ok
}

func (z *lazy) Persist(off, n uint64) error { return z.Backing.(*disk).Persist(off, n) }

func (z *lazy) set(off, n uint64, there bool) {
	for i := off / lazyPage; n > 0 && i <= (off+n-1)/lazyPage && i < uint64(len(z.there)); i++ {
		z.there[i] = there
	}
}

func (z *lazy) drop(off, n uint64)  { z.set(off, n, false) }
func (z *lazy) bring(off, n uint64) { z.set(off, n, true) }

// Run returns what is there in one piece.
func (z *lazy) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	if z.evict != nil {
		if i := z.evict(); i < len(z.there) {
			z.there[i] = false
		}
	}
	have := uint64(0)
	for have < n && z.there[(off+have)/lazyPage] {
		have += min(n-have, lazyPage-(off+have)%lazyPage)
	}
	switch {
	case have > 0:
		return z.Backing.Run(off, have, acc)
	case z.gone:
		return nil, mem.FaultStale
	}
	return nil, mem.FaultPending
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
