package cuda

// The order of a queue pair's operations. Those in one direction have one stream, which keeps it.
// One in another direction waits in the worker until those before it are over, and those behind it
// wait for it. What other queue pairs have is not kept from going on.

import "github.com/verbena-rdma/verbena/internal/mem"

// direction is where bytes go.
type direction uint8

const (
	fromHost   direction = iota // from the host to the GPU
	toHost                      // and back
	within                      // on the GPU; by the host, if there is no room for that: see queues.go
	directions                  // how many there are
	bothWays                    // of an atomic: nothing else of the queue pair is under way
)

// directionOf returns where an operation's bytes go.
func directionOf(op *mem.Op) direction {
	switch op.Kind {
	case mem.OpStore:
		return fromHost
	case mem.OpLoad:
		return toHost
	case mem.OpCopy:
		return within
	}
	return bothWays
}

// order is what a card keeps for a queue pair. All but the worker is the worker's thread's own.
type order struct {
	worker *worker
	to     direction // of what is under way
	under  int       // how many operations are under way
	waits  int       // how many wait
}

// admits reports whether an operation may begin.
func (o *order) admits(to direction) bool { return o.waits == 0 && (o.under == 0 || o.to == to) }

// begin notes that an operation has begun, end that one is over.
func (o *order) begin(to direction) {
	o.to = to
	o.under++
}

func (o *order) end() { o.under-- }

// submitWaiting queues what waited for operations that are over now. Behind one that still waits,
// the others of its queue pair do.
func (w *worker) submitWaiting() {
	for w.landed { // to begin some may end others
		w.landed = false
		for i := range w.waiting {
			w.waiting[i].order.waits = 0
		}
		kept := w.waiting[:0]
		for _, j := range w.waiting {
			if j.order.admits(directionOf(j.Op)) {
				w.start(j)
				continue
			}
			j.order.waits++
			kept = append(kept, j)
		}
		clear(w.waiting[len(kept):])
		w.waiting = kept
		w.flyAll()
	}
}
