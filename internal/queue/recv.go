package queue

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
)

// Recv is a queue of posted receives: the receive queue of one queue pair, or
// one that several share.
type Recv struct {
	// OnLimit is called, without any lock, when the number of receives falls
	// below the limit. The limit is then disarmed. It is set before use.
	OnLimit func()

	count atomic.Int64 // receives that wait

	mu     sync.Mutex // guards what follows
	wqes   []recvWQE
	sges   []ib.SGE // maxSGE for each slot of wqes
	maxSGE int
	head   int
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
	return &Recv{wqes: make([]recvWQE, size), sges: make([]ib.SGE, size*maxSGE), maxSGE: maxSGE}
}

// MaxSGE returns the longest list that a receive may have.
func (r *Recv) MaxSGE() int { return r.maxSGE }

// Size returns the number of receives that fit.
func (r *Recv) Size() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.wqes)
}

// Len returns the number of receives that wait.
func (r *Recv) Len() int { return int(r.count.Load()) }

// Post appends receives and returns how many there was room for. The caller has
// checked the lengths of the lists.
func (r *Recv) Post(wrs []ib.RecvWR) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	count := int(r.count.Load())
	n := min(len(wrs), len(r.wqes)-count)
	for i := range n {
		slot := wrap(r.head+count+i, len(r.wqes))
		r.wqes[slot] = recvWQE{id: wrs[i].ID, nsge: len(wrs[i].SGL)}
		copy(r.sges[slot*r.maxSGE:], wrs[i].SGL)
	}
	r.count.Store(int64(count + n))
	return n
}

// Take removes the oldest receive. It returns false if there is none.
func (r *Recv) Take(t *Taken) bool {
	if r.count.Load() == 0 {
		return false
	}
	r.mu.Lock()
	count := int(r.count.Load())
	if count == 0 {
		r.mu.Unlock()
		return false
	}
	w := &r.wqes[r.head]
	t.ID = w.id
	t.SGEs = append(t.SGEs[:0], r.sges[r.head*r.maxSGE:][:w.nsge]...)
	t.Len = 0
	for i := range t.SGEs {
		t.Len += uint64(t.SGEs[i].Length) // at most 32 times 2^32
	}
	r.head = wrap(r.head+1, len(r.wqes))
	r.count.Store(int64(count - 1))
	fire := r.limit > 0 && count-1 < r.limit
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
	r.count.Store(0)
	r.mu.Unlock()
}

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
// if more than that wait.
func (r *Recv) Resize(size int) bool {
	wqes, sges := make([]recvWQE, size), make([]ib.SGE, size*r.maxSGE)
	r.mu.Lock()
	defer r.mu.Unlock()
	count := int(r.count.Load())
	if count > size || r.limit > size {
		return false
	}
	for i := range count {
		slot := wrap(r.head+i, len(r.wqes))
		wqes[i] = r.wqes[slot]
		copy(sges[i*r.maxSGE:][:r.maxSGE], r.sges[slot*r.maxSGE:])
	}
	r.wqes, r.sges, r.head = wqes, sges, 0
	return true
}
