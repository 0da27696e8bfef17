package queue

import (
	"sync"

	"github.com/verbena-rdma/verbena/ib"
)

// Recv is a queue of posted receives: the receive queue of one queue pair, or
// one that several share.
type Recv struct {
	// OnLimit is called, with no lock held, when the number of receives falls
	// below the limit. The limit is then disarmed. It is set before use.
	OnLimit func()

	mu     sync.Mutex // guards what follows
	wqes   ring[recvWQE]
	sges   []ib.SGE // maxSGE for each slot of wqes
	maxSGE int
	limit  int // 0: not armed
}

type recvWQE struct {
	id   uint64
	nsge int
}

// Taken is a receive that was taken off the queue: it belongs to one message.
type Taken struct {
	ID   uint64
	SGEs []ib.SGE // storage is reused by the next Take
	Len  uint64   // bytes that the list holds
}

// NewRecv makes a queue of size receives with up to maxSGE pieces each.
func NewRecv(size, maxSGE int) *Recv {
	return &Recv{wqes: ring[recvWQE]{slots: make([]recvWQE, size)}, sges: make([]ib.SGE, size*maxSGE), maxSGE: maxSGE}
}

// MaxSGE returns the longest list that a receive may have.
func (r *Recv) MaxSGE() int { return r.maxSGE }

// Size returns the number of receives that fit.
func (r *Recv) Size() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.wqes.slots)
}

// Len returns the number of receives that wait.
func (r *Recv) Len() int { return r.wqes.len() }

// Post appends receives and returns how many there was room for. The caller has
// checked the lengths of the lists.
func (r *Recv) Post(wrs []ib.RecvWR) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	count := r.wqes.len()
	n := min(len(wrs), len(r.wqes.slots)-count)
	for i := range n {
		*r.wqes.at(count + i) = recvWQE{id: wrs[i].ID, nsge: len(wrs[i].SGL)}
		copy(r.sgesOf(count+i), wrs[i].SGL)
	}
	r.wqes.add(n)
	return n
}

// Take removes the oldest receive. It returns false if there is none.
func (r *Recv) Take(t *Taken) bool {
	if r.wqes.len() == 0 {
		return false
	}
	r.mu.Lock()
	if r.wqes.len() == 0 {
		r.mu.Unlock()
		return false
	}
	w := r.wqes.at(0)
	t.ID = w.id
	t.SGEs = append(t.SGEs[:0], r.sgesOf(0)[:w.nsge]...)
	t.Len = 0
	for i := range t.SGEs {
		t.Len += uint64(t.SGEs[i].Length) // at most 32 times 2^32
	}
	r.wqes.drop(1)
	fire := r.limit > 0 && r.wqes.len() < r.limit
	if fire {
		r.limit = 0
	}
	r.mu.Unlock()
	if fire && r.OnLimit != nil {
		r.OnLimit()
	}
	return true
}

// Clear forgets all receives.
func (r *Recv) Clear() {
	r.mu.Lock()
	r.wqes.drop(r.wqes.len())
	r.mu.Unlock()
}

// sgesOf returns the room for the list of receive i, counted from the oldest.
func (r *Recv) sgesOf(i int) []ib.SGE { return r.sges[r.wqes.slot(i)*r.maxSGE:][:r.maxSGE] }

// Limit returns the armed limit, 0 if none is.
func (r *Recv) Limit() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.limit
}

// SetLimit arms the limit event; 0 disarms it. A limit that is already undercut
// fires at the next receive taken, as the specification has it (IBA 11.2.3.3).
func (r *Recv) SetLimit(n int) {
	r.mu.Lock()
	r.limit = n
	r.mu.Unlock()
}

// Resize makes room for size receives. It returns false, and changes nothing,
// if more than that wait, or the armed limit is more.
func (r *Recv) Resize(size int) bool {
	wqes, sges := make([]recvWQE, size), make([]ib.SGE, size*r.maxSGE)
	r.mu.Lock()
	defer r.mu.Unlock()
	count := r.wqes.len()
	if count > size || r.limit > size {
		return false
	}
	for i := range count {
		copy(sges[i*r.maxSGE:], r.sgesOf(i))
	}
	r.wqes.moveTo(wqes)
	r.sges = sges
	return true
}
