package peermem

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Client is a driver of memory that is registered by address. Acquire, GetPages, DMAMap, DMAUnmap
// and PutPages are mandatory.
//
// Operations may be called by several goroutines, for different regions at the same time. For one
// region they are called one after the other, in the order that the package's documentation has.
type Client struct {
	Name    string // 1 to 63 bytes, without a slash: it is the name of a directory
	Version string // at most 15 bytes

	// Acquire reports whether size bytes at an address are the client's. private is passed to the
	// other operations.
	Acquire func(addr uintptr, size uint64) (private any, mine bool)

	// GetPages holds the memory in place until PutPages. write is always true, and force is true
	// if the region is registered without the right to write to it: so vendors' kernels ask. core
	// is what the client calls [Registered.Invalidate] with.
	GetPages func(private any, addr uintptr, size uint64, write, force bool, core uint64) error
	PutPages func(private any)

	// DMAMap returns where the bytes are: whole pages of PageSize, from the one that has the
	// first byte on. They stay there until DMAUnmap.
	DMAMap   func(private any) ([][]byte, error)
	DMAUnmap func(private any)

	// PageSize returns the size of the memory's pages: a power of two, at least that of the
	// system's. nil: they are the system's.
	PageSize func(private any) uint64

	// Release ends what Acquire has begun. It may be nil.
	Release func(private any)

	// Invalidates: the client calls Invalidate when memory is freed that is registered. Importers
	// that cannot bear that are refused with EOPNOTSUPP.
	Invalidates bool
	// UnmapsItself: Invalidate calls neither DMAUnmap nor PutPages; the client does what is needed
	// after it has returned. Vendors' kernels call the flag INVALIDATE_UNMAPS.
	UnmapsItself bool
}

const (
	maxName    = 63
	maxVersion = 15
)

// Stats are a client's counters, those of /sys/kernel/mm/memory_peers/NAME.
type Stats struct {
	AllocMRs, DeallocMRs uint64 // mappings that were made, and that have ended
	RegPages, DeregPages uint64 // their pages, of the client's size
	RegBytes, DeregBytes uint64
	FreeCallbacks        uint64 // calls of Invalidate
}

// Stat is one counter.
type Stat struct {
	Name  string // as that of its file
	Value uint64
}

// All returns the counters by name.
func (s *Stats) All() []Stat {
	return []Stat{
		{"num_alloc_mrs", s.AllocMRs}, {"num_dealloc_mrs", s.DeallocMRs},
		{"num_reg_pages", s.RegPages}, {"num_dereg_pages", s.DeregPages},
		{"num_reg_bytes", s.RegBytes}, {"num_dereg_bytes", s.DeregBytes},
		{"num_free_callbacks", s.FreeCallbacks},
	}
}

// Registered is a client that is registered.
type Registered struct {
	client Client

	allocMRs, deallocMRs, regPages, deregPages, regBytes, deregBytes, freeCallbacks atomic.Uint64

	mu   sync.Mutex      // guards what follows
	uses map[uint64]*use // what is claimed, by its core number
	busy int             // uses, and calls of Acquire under way
	gone bool            // Unregister was called
	idle chan struct{}   // closed when gone is set and busy is 0
}

var (
	clientsMu sync.Mutex    // guards clients
	clients   []*Registered // in the order of registration

	cores atomic.Uint64 // the last core number: none is used twice
)

// Register makes a client known. Clients are asked in the order of their registration.
//
// Errors: EINVAL if a mandatory operation is missing, or the name or the version is not as it must
// be; EEXIST if there is a client of that name.
func Register(c Client) (*Registered, error) {
	const op = "register_peer_memory_client"
	switch {
	case c.Acquire == nil || c.GetPages == nil || c.DMAMap == nil || c.DMAUnmap == nil || c.PutPages == nil:
		return nil, ib.Errorf(op, syscall.EINVAL, "a client needs Acquire, GetPages, DMAMap, DMAUnmap and PutPages")
	case c.Name == "" || len(c.Name) > maxName || c.Name == "." || c.Name == ".." || strings.ContainsAny(c.Name, "/\x00"):
		return nil, ib.Errorf(op, syscall.EINVAL, "a client called %q", c.Name)
	case len(c.Version) > maxVersion || strings.ContainsAny(c.Version, "\n\x00"):
		return nil, ib.Errorf(op, syscall.EINVAL, "version %q", c.Version)
	case c.UnmapsItself && !c.Invalidates:
		return nil, ib.Errorf(op, syscall.EINVAL, "a client that does not invalidate cannot unmap by itself")
	}
	clientsMu.Lock()
	defer clientsMu.Unlock()
	if slices.ContainsFunc(clients, func(r *Registered) bool { return r.client.Name == c.Name }) {
		return nil, ib.Errorf(op, syscall.EEXIST, "there is a client called %q", c.Name)
	}
	r := &Registered{client: c, uses: map[uint64]*use{}, idle: make(chan struct{})}
	clients = append(clients, r)
	return r, nil
}

// Clients returns the clients, in the order of their registration.
func Clients() []*Registered {
	clientsMu.Lock()
	defer clientsMu.Unlock()
	return slices.Clone(clients)
}

// Name returns the client's name.
func (r *Registered) Name() string { return r.client.Name }

// Version returns the client's version.
func (r *Registered) Version() string { return r.client.Version }

// Stats returns the client's counters.
func (r *Registered) Stats() Stats {
	return Stats{
		AllocMRs: r.allocMRs.Load(), DeallocMRs: r.deallocMRs.Load(),
		RegPages: r.regPages.Load(), DeregPages: r.deregPages.Load(),
		RegBytes: r.regBytes.Load(), DeregBytes: r.deregBytes.Load(),
		FreeCallbacks: r.freeCallbacks.Load(),
	}
}

// Unregister ends the use of a client: it is not asked any more, and the call waits until its last
// region is closed. When it has returned nil, no operation of the client is called. Unregistering
// again waits, too.
//
// Errors: the context's. The client stays out of use then.
func (r *Registered) Unregister(ctx context.Context) error {
	clientsMu.Lock()
	clients = slices.DeleteFunc(clients, func(other *Registered) bool { return other == r })
	clientsMu.Unlock()
	r.mu.Lock()
	if !r.gone {
		r.gone = true
		r.restLocked()
	}
	r.mu.Unlock()
	select {
	case <-r.idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// restLocked reports that nothing uses the client any more, if Unregister waits for that.
func (r *Registered) restLocked() {
	if r.gone && r.busy == 0 {
		close(r.idle)
	}
}

// enter begins a use of the client. It reports whether the client is still there.
func (r *Registered) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		return false
	}
	r.busy++
	return true
}

// leave ends a use.
func (r *Registered) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy--
	r.restLocked()
}

// Invalidate is called by the client when memory is freed that is registered; core is the number
// that GetPages was given. When it has returned, no device accesses the memory any more. Requests
// that need it end in access errors; the region keeps its keys until it is closed. Unless
// UnmapsItself is set, DMAUnmap and PutPages are called from within. Release is called when the
// region is closed.
//
// A number whose region is closed, or invalidated already, does nothing. Invalidate waits for a
// registration that is under way. So the client must not hold a lock that one of its operations
// takes, and must not call Invalidate from within them.
//
// Errors: EINVAL if the client did not set Invalidates.
func (r *Registered) Invalidate(core uint64) error {
	if !r.client.Invalidates {
		return ib.Errorf("invalidate_peer_memory", syscall.EINVAL, "the client %s does not invalidate", r.client.Name)
	}
	r.freeCallbacks.Add(1)
	r.mu.Lock()
	u := r.uses[core]
	r.mu.Unlock()
	if u == nil || !u.buffer.Get() {
		return nil
	}
	defer u.buffer.Put()
	resv := u.buffer.Reservation()
	resv.Lock()
	defer resv.Unlock()
	u.freed = true
	u.buffer.InvalidateMappings()
	return nil
}
