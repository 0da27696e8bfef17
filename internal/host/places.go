package host

// Places: how a process gets UDP sockets of its own, and the queue pair numbers by which the
// kernel chooses them.
//
// The kernel numbers the sockets of a port in the order in which they were bound, as long as
// none is closed. So each socket is laid on the shelf before it is bound, and is never closed
// while the device has processes. A process that needs a place takes one that no process holds,
// with its sockets from the shelf, or has new sockets bound and finds out what place they have.
// Sockets whose place is not entered yet are noted in the process's entry. If the process dies
// then, the next one with the entry takes them.

import (
	"errors"
	"slices"
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
	// Orphans are descriptors of sockets that a dead process has had bound, by address, to be
	// used instead of new ones; -1: none. Listen takes them over.
	Orphans []int
	// Place is the place of Adopt's sockets, or where new ones are expected.
	Place int
	// Hold is to be called with each new socket before it is bound; addr is the index of its
	// address. If it fails, the socket must not be bound.
	Hold func(addr, fd int) error
}

// Places are the places whose sockets one receiver of this process reads. Nearly always it is
// one: another is taken when all numbers of the last one are leased.
type Places struct {
	m      *Member
	listen func(*Sockets) (place int, err error)
	place  int // guarded by m.leasing: the place that was taken last
	leases int // guarded by m.leasing: ranges of it that are leased
}

// MorePlaces gets a place for another receiver of this process. It fails when half of the
// device's places are in use: the others are for other processes.
func (m *Member) MorePlaces(listen func(*Sockets) (place int, err error)) (*Places, error) {
	m.leasing.Lock()
	defer m.leasing.Unlock()
	if held := m.dir.heldPlaces(); held >= sys.NumPlaces/2 {
		return nil, refuse(syscall.EUSERS, "%d of the device's %d sockets are in use: the others are for other processes", held, sys.NumPlaces)
	}
	l := &Places{m: m, listen: listen}
	return l, l.take()
}

// heldPlaces returns how many places processes hold.
func (d *directory) heldPlaces() (n int) {
	for p := range d.place {
		if d.place[p].holder.Load() != 0 {
			n++
		}
	}
	return n
}

// take gets another place, with sockets.
func (l *Places) take() error {
	m := l.m
	m.dir.sweep(m.self)
	if lock := m.dir.lock(); lock != nil {
		defer lock.Unlock()
		defer m.quietFree()
	}
	orphans := m.orphans()
	if slices.Max(orphans) >= 0 {
		if err := l.bindNew(orphans); !errors.Is(err, errNoPlace) {
			return err
		}
		orphans = m.orphans() // none: bindNew has dropped them
	}
	for p := range m.dir.place {
		e := &m.dir.place[p]
		if !e.free() || !e.holder.CompareAndSwap(0, uint64(m.self)) {
			continue
		}
		if fds := m.fromShelf(e); fds != nil {
			e.quiet.Store(0)
			if _, err := l.listen(&Sockets{Adopt: fds, Place: p}); err == nil {
				l.hold(p)
				return nil
			}
		}
		e.holder.CompareAndSwap(uint64(m.self), 0)
	}
	return l.bindNew(orphans)
}

// errNoPlace means that all places have sockets, and processes.
var errNoPlace = refuse(syscall.EUSERS, "the device has its %d sockets already", sys.NumPlaces)

// bindNew has new sockets bound, or takes orphans, and enters their place.
func (l *Places) bindNew(orphans []int) error {
	m := l.m
	hint := 0
	for p := range m.dir.place {
		if m.dir.place[p].socket[0].Load() != 0 {
			hint = p + 1
		}
	}
	if hint == sys.NumPlaces && slices.Max(orphans) < 0 {
		return errNoPlace
	}
	binding := &m.dir.process[m.Slot()].binding
	p, err := l.listen(&Sockets{Orphans: orphans, Place: hint, Hold: func(addr, fd int) error {
		if addr < maxAddrs {
			inode, _ := sys.Inode(fd) // the descriptor is open: it cannot fail
			binding[addr].Store(inode)
		}
		if err := m.shelf.Put(fd); err != nil {
			return refuse(syscall.ETOOMANYREFS, "the socket cannot be kept for the other processes (%v): this user has more descriptors under way than RLIMIT_NOFILE of this process allows, %d: raise the hard limit (ulimit -Hn, nofile in limits.conf, LimitNOFILE of systemd)", err, sys.PassLimit())
		}
		return nil
	}})
	if err != nil {
		return err
	}
	drop := func() {
		for i := range binding {
			if inode := binding[i].Swap(0); inode != 0 {
				m.shelf.Drop(inode)
			}
		}
	}
	if p >= sys.NumPlaces { // behind all places: the kernel steers nothing there
		drop()
		return errNoPlace
	}
	e := &m.dir.place[p]
	if !e.holder.CompareAndSwap(0, uint64(m.self)) { // it would take that process's packets
		drop()
		return refuse(syscall.EADDRINUSE, "the kernel has given the sockets of this process the place of another process's: another program shares UDP port 4791 of %v", m.cfg.Addrs[0])
	}
	for i := len(binding) - 1; i >= 0; i-- { // the first one last: then the place can be taken over
		e.socket[i].Store(binding[i].Load())
	}
	for i := range binding {
		binding[i].Store(0)
	}
	l.hold(p)
	return nil
}

// orphans returns descriptors of the sockets that an earlier process with this entry has had bound,
// or this process when it could not enter their place; -1 for an address without one.
func (m *Member) orphans() []int {
	fds := make([]int, len(m.cfg.Addrs))
	for i := range fds {
		fds[i] = -1
		if i >= maxAddrs {
			continue
		}
		binding := &m.dir.process[m.Slot()].binding[i]
		inode := binding.Load()
		if inode == 0 {
			continue
		}
		if !m.dir.hasSocket(i, inode) { // else its place was entered just before the process died
			if fd, err := m.shelf.Take(inode); err == nil && fd >= 0 {
				if sys.IsBound(fd) {
					fds[i] = fd
					continue
				}
				refuseFD(fd)
				m.shelf.Drop(inode)
			}
		}
		binding.Store(0)
	}
	return fds
}

// hasSocket reports whether a socket of an address is entered as one of a place.
func (d *directory) hasSocket(addr int, inode uint64) bool {
	for p := range d.place {
		if d.place[p].socket[addr].Load() == inode {
			return true
		}
	}
	return false
}

func (l *Places) hold(place int) { l.place, l.leases = place, 0 }

// free reports whether no process holds the place, and it has sockets.
func (e *placeEntry) free() bool { return e.socket[0].Load() != 0 && e.holder.Load() == 0 }

// quietFree keeps the sockets of free places from holding memory: nobody reads what they receive.
// The caller has the lock.
func (m *Member) quietFree() {
	for p := range m.dir.place {
		e := &m.dir.place[p]
		// This process holds the place meanwhile, so that no other one takes it.
		if e.free() && e.quiet.Load() == 0 && e.holder.CompareAndSwap(0, uint64(m.self)) {
			m.quiet(e)
			e.holder.CompareAndSwap(uint64(m.self), 0)
		}
	}
}

// quiet makes the sockets of a place that this process holds receive nothing.
func (m *Member) quiet(e *placeEntry) {
	fds := m.fromShelf(e)
	for _, fd := range fds {
		if sys.Quiet(fd) != nil { // they are no sockets: nobody can take this place
			break
		}
	}
	refuseFDs(fds)
	e.quiet.Store(1)
}

// tidy makes a goroutine call quietFree. If another process has the lock, it takes a place just
// now, and calls quietFree itself.
func (m *Member) tidy() {
	m.tidying.Lock()
	defer m.tidying.Unlock()
	if m.closed || m.tidies {
		return
	}
	m.tidies = true
	m.wg.Go(func() {
		if l, err := sys.LockByte(m.dir.fd, placesByte); l != nil && err == nil {
			m.quietFree()
			l.Unlock()
		}
		m.tidying.Lock()
		defer m.tidying.Unlock()
		m.tidies = false
	})
}

// quietOwn is quietFree for the places that this process is about to leave, and ends tidy.
func (m *Member) quietOwn() {
	m.tidying.Lock()
	m.closed = true
	m.tidying.Unlock()
	m.wg.Wait()
	if l, err := sys.LockByte(m.dir.fd, placesByte); l != nil && err == nil {
		for p := range m.dir.place {
			if e := &m.dir.place[p]; e.holder.Load() == uint64(m.self) {
				m.quiet(e)
			}
		}
		l.Unlock()
	}
}

// fromShelf takes the sockets of a place from the shelf; nil if they are not all there.
func (m *Member) fromShelf(e *placeEntry) (fds []int) {
	if len(m.cfg.Addrs) > maxAddrs {
		return nil
	}
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

// takeCommon enters the place whose sockets all processes read: no process ever holds it.
func (d *directory) takeCommon() {
	e := &d.place[sys.CommonPlace]
	e.holder.Store(everybody)
	e.socket[0].Store(everybody)
}

// everybody stands for all processes where otherwise one process's identity, or an inode, stands.
const everybody = ^uint64(0)

// Lease gets another range of slots for numbers: see mem.Slots. When all ranges of the place are
// leased, it gets another place.
func (l *Places) Lease() (r uint32, err error) {
	l.m.leasing.Lock()
	defer l.m.leasing.Unlock()
	if l.leases == rangesOfPlace {
		if err := l.take(); err != nil {
			return 0, err
		}
	}
	l.leases++
	return l.m.dir.lease(l.place), nil
}

// lock keeps other processes from taking places at the same time, so that the shelf is used by
// one at a time, and the sockets of several addresses get the same place. It waits while the
// processes before this one get their places, however many they are. If the one that holds the
// lock was stopped just then, all that wait go on to the next of several locks, where they wait
// for each other again: without a lock, each of them would take more places than it needs. With
// the stopped process, when it goes on, FindPlace and the shelf's own precautions have to do. If
// the holders of all locks are stopped, the lock is nil.
func (d *directory) lock() *sys.ByteLock {
	for i := range d.turns {
		turn, since := d.turns[i].Load(), time.Now()
		for time.Since(since) < lockTime {
			l, err := sys.LockByte(d.fd, placesByte+int64(i))
			if err != nil {
				return nil
			}
			if l != nil {
				d.turns[i].Add(1)
				return l
			}
			time.Sleep(time.Millisecond)
			if now := d.turns[i].Load(); now != turn {
				turn, since = now, time.Now()
			}
		}
	}
	return nil
}

const (
	// lockTime is how long a process waits for one that gets its place: far longer than that
	// takes.
	lockTime = time.Second
	// placesByte is the first byte of the directory that lock locks. Those below it are of the
	// processes' entries: see alive.
	placesByte = MaxProcesses
	// placesLocks is how many such bytes there are.
	placesLocks = 8
)

// sweep frees what dead processes have left, on behalf of the process self, and reports whether it
// has found one. A process that does
// not even find itself alive frees nothing: the program has closed the directory's descriptor,
// and may have opened another file by that number.
func (d *directory) sweep(self identity) (found bool) {
	if !d.alive(self) {
		return false
	}
	for i := range d.process {
		if id := identity(d.ids[i].Load()); id != 0 && !d.alive(id) {
			d.release(id)
			found = true
		}
	}
	return found
}

// Alive reports that a process has the device open: this one.
func (m *Member) Alive() bool { return true }

// Gone is called when the channel to a process has ended: the process may be dead.
func (m *Member) Gone(process int) {
	id := m.dir.who(process)
	switch {
	case id == 0:
	case m.dir.alive(id): // the kernel closes sockets before it frees the lock
		m.lookLater()
	case m.dir.alive(m.self):
		m.bury(id)
	}
}

// bury frees what a dead process has left.
func (m *Member) bury(id identity) {
	m.dir.release(id)
	m.tidy()
	m.mourn()
}
