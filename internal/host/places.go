package host

// Places: how a process gets UDP sockets of its own, and the queue pair numbers by which the
// kernel chooses them.
//
// The kernel numbers the sockets of a port in the order in which they were bound, as long as
// none is closed. So each socket is laid on the shelf before it is bound, and is never closed
// while the device has processes. A process that needs a place takes one that no process holds,
// with its sockets from the shelf, or has new sockets bound and finds out what place they have.

import (
	"errors"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// maxAddrs is of how many addresses of a device sockets are taken over. A device that has more
// always binds new ones.
const maxAddrs = 8

// Sockets are what Config.Listen is to open.
type Sockets struct {
	// Adopt are descriptors of sockets that were bound before, one for each address, which
	// Listen takes over; nil: it is to bind new ones.
	Adopt []int
	// Place is the place of these sockets, or where new ones are expected.
	Place int
	// Hold is to be called with each new socket before it is bound; addr is the index of its
	// address.
	Hold func(addr, fd int)
}

// takePlace gets a place for this process, with sockets.
func (m *Member) takePlace() error {
	unlock := m.dir.lock()
	defer unlock()
	if p, fds := m.freePlace(); fds != nil {
		if _, err := m.cfg.Listen(&Sockets{Adopt: fds, Place: p}); err != nil {
			m.dir.place[p].holder.CompareAndSwap(uint64(m.self), 0)
			return err
		}
		m.hold(p)
		return nil
	}
	hint := 0
	for p := range m.dir.place {
		if m.dir.place[p].socket[0].Load() != 0 {
			hint = p + 1
		}
	}
	if hint == sys.NumPlaces {
		return noPlace()
	}
	var inodes [maxAddrs]uint64
	p, err := m.cfg.Listen(&Sockets{Place: hint, Hold: func(addr, fd int) {
		if addr < maxAddrs && m.shelf.Put(fd) == nil { // else a process that ends takes its socket with it
			inodes[addr], _ = sys.Inode(fd) // the descriptor is open: it cannot fail
		}
	}})
	if err != nil {
		return err
	}
	if e := &m.dir.place[p]; e.holder.CompareAndSwap(0, uint64(m.self)) {
		for i := range inodes {
			e.socket[i].Store(inodes[i])
		}
		m.hold(p)
		return nil
	}
	// Another process has the numbers of this place, and its sockets another place by now: a
	// process has ended whose sockets were not on the shelf. Then this process takes numbers
	// that no socket has the place of, and gets its packets from the others.
	for p := sys.NumPlaces - 1; p >= 0; p-- {
		if e := &m.dir.place[p]; e.socket[0].Load() == 0 && e.holder.CompareAndSwap(0, uint64(m.self)) {
			m.hold(p)
			return nil
		}
	}
	return noPlace()
}

func noPlace() error {
	return refuse(syscall.EUSERS, "the device has its %d sockets already", sys.NumPlaces)
}

func (m *Member) hold(place int) { m.place, m.leases = place, 0 }

// freePlace takes a place that no process holds, and its sockets; nil if there is none.
func (m *Member) freePlace() (place int, fds []int) {
	if len(m.cfg.Addrs) > maxAddrs {
		return 0, nil
	}
	for swept := false; ; swept = true {
		for p := range m.dir.place {
			e := &m.dir.place[p]
			if e.socket[0].Load() == 0 || e.holder.Load() != 0 || !e.holder.CompareAndSwap(0, uint64(m.self)) {
				continue
			}
			if fds := m.fromShelf(e); fds != nil {
				return p, fds
			}
			e.holder.CompareAndSwap(uint64(m.self), 0)
		}
		if swept {
			return 0, nil
		}
		m.dir.sweep()
	}
}

// fromShelf takes the sockets of a place from the shelf; nil if they are not all there.
func (m *Member) fromShelf(e *placeEntry) (fds []int) {
	for i := range m.cfg.Addrs {
		fd, err := m.shelf.Take(e.socket[i].Load())
		if err != nil || fd < 0 {
			refuseFDs(fds)
			return nil
		}
		fds = append(fds, fd)
	}
	return fds
}

// Lease gets another range of slots for numbers: see mem.Slots. When all ranges of the place are
// leased, it gets another place.
func (m *Member) Lease() (r uint32, err error) {
	m.leasing.Lock()
	defer m.leasing.Unlock()
	if m.leases == rangesOfPlace {
		if err := m.takePlace(); err != nil {
			return 0, err
		}
	}
	m.leases++
	return m.dir.lease(m.place), nil
}

// lock keeps other processes from taking places at the same time, so that the shelf is used by
// one at a time, and the sockets of several addresses get the same place. If another process
// was stopped just then, lock does without: then FindPlace and the shelf's own precautions have
// to do.
func (d *directory) lock() (unlock func()) {
	own, err := sys.Reopen(d.fd)
	if err != nil {
		return func() {}
	}
	for deadline := time.Now().Add(lockTime); ; time.Sleep(time.Millisecond) {
		ok, err := sys.TryLock(own)
		if ok || err != nil || time.Now().After(deadline) {
			break
		}
	}
	return func() { _ = sys.CloseFD(own) } // and with it the lock is gone
}

// lockTime is how long a process may take to get its place: far longer than it needs.
const lockTime = 500 * time.Millisecond

// alive reports whether a process lives: its socket is there.
func (d *directory) alive(id identity) bool {
	c, err := dial(processName(d.first(), id))
	if err == nil {
		_ = c.Close()
		return true
	}
	// Another user's process may have taken the name of one that has ended.
	var no *refusal
	return !errors.Is(err, syscall.ECONNREFUSED) && !errors.As(err, &no)
}

// sweep frees what dead processes have left.
func (d *directory) sweep() {
	for i := range d.process {
		if id := identity(d.process[i].id.Load()); id != 0 && !d.alive(id) {
			d.release(id)
		}
	}
}

// Gone is called when the channel to a process has ended: the process may be dead.
func (m *Member) Gone(process int) {
	if id := m.dir.who(process); id != 0 && !m.dir.alive(id) {
		m.dir.release(id)
	}
}
