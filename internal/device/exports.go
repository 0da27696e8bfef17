package device

// Objects that other processes import, as with ibv_import_device(3) and its like. A process
// names an object by a handle, which the program passes on, and by a number.
//
//  1. Publish makes a handle, with a function that finds objects by their numbers.
//  2. export, on the request of another process that has the handle, returns where a region
//     lies and a guard for it (mem.Guard).
//  3. revoke, when the region is closed or changes, shuts its guards and waits until no
//     process accesses it. While its memory moves they are only suspended, and resumed
//     afterwards.
//
// imports.go is the side of the process that imports.

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Published is an object that other processes may import.
type Published struct {
	MR      provider.MR  // nil: it is no region
	Destroy func() error // destroys the object, for all processes that have it
}

// exports are the objects of a device that other processes import.
type exports struct {
	mu     sync.Mutex // guards what follows, and lease.uses; no call waits for a process under it
	find   map[string]func(object uint64) (Published, error)
	leases map[*mem.Region][]*lease
}

// Publish makes a handle for the objects that find returns, by their numbers. Unpublish
// ends that; objects that were imported before stay imported.
func (d *Device) Publish(find func(object uint64) (Published, error)) (handle string) {
	token := host.NewToken()
	d.exports.mu.Lock()
	if d.exports.find == nil {
		d.exports.find = make(map[string]func(uint64) (Published, error))
	}
	d.exports.find[token] = find
	d.exports.mu.Unlock()
	if d.member == nil {
		return "#" + token // other processes cannot find a device that has the loop link alone
	}
	return d.member.Handle(token)
}

// Unpublish makes a handle useless.
func (d *Device) Unpublish(handle string) {
	d.exports.mu.Lock()
	delete(d.exports.find, tokenOf(handle))
	d.exports.mu.Unlock()
}

// tokenOf returns the part of a handle that is a secret.
func tokenOf(handle string) string {
	_, token, _ := strings.Cut(handle, "#")
	return token
}

var errNotPublished = fmt.Errorf("the process has no such object, or not any more: %w", syscall.ENOENT)

// export returns an object for another process, which has asked for it by a connection that
// lasts as long as the import.
func (l *futureDevice) export(token string, object uint64, c *net.UnixConn) (*host.Export, error) {
	d := l.Load()
	if d == nil {
		return nil, errNotPublished
	}
	d.exports.mu.Lock()
	find := d.exports.find[token]
	d.exports.mu.Unlock()
	if find == nil {
		return nil, errNotPublished
	}
	o, err := find(object)
	if err != nil {
		return nil, err
	}
	x := &host.Export{Guard: -1, Destroy: o.Destroy, Close: func() {}}
	if m, ok := o.MR.(*MR); ok {
		err = m.lease(x, c)
	}
	return x, err
}

// lease is a region that another process has imported.
type lease struct {
	region *mem.Region
	c      *net.UnixConn
	user   int // PID of the process that has imported it
	pidfd  int // of that process; -1: none
	guard  *mem.Guard
	uses   int // guarded by the exports' lock: the last one closes guard and pidfd
}

// gone reports whether the process that has imported the region has ended. Without a pidfd of
// it, the end of its connection is taken for that.
func (l *lease) gone() bool {
	if l.pidfd >= 0 {
		return sys.Exited(l.pidfd)
	}
	return sys.HungUp(l.c)
}

// follow makes the guard what the region is now: shut, suspended or open.
func (l *lease) follow() {
	switch _, usable := l.region.Snapshot(); {
	case !usable:
		l.guard.Shut()
	case l.region.Open():
		l.guard.Resume()
	default:
		l.guard.Suspend()
	}
}

// lease fills in where the region lies, and leases it to the process at the other end of c.
func (m *MR) lease(x *host.Export, c *net.UnixConn) error {
	m.mu.Lock() // the region does not change meanwhile
	defer m.mu.Unlock()
	if m.closed {
		return errNotPublished
	}
	addr, ok := placeOf(m.region.Backing())
	if _, held := m.region.Backing().(*mem.Held); held {
		return fmt.Errorf("a region that is pinned strictly cannot be imported: it has no address: %w", syscall.EOPNOTSUPP)
	}
	if !ok {
		return fmt.Errorf("regions of %v memory cannot be imported: %w", m.region.Kind(), syscall.EOPNOTSUPP)
	}
	access := m.Access()
	// The kernel writes through /proc/PID/mem also to what the owner has mapped read-only.
	// Memory that was pinned for writing was writable; on-demand memory is checked here.
	switch m.region.Kind() {
	case mem.KindImplicit:
		return fmt.Errorf("the whole address space cannot be imported: %w", syscall.EOPNOTSUPP)
	case mem.KindOnDemand:
		if writable, err := sys.Mapped(uintptr(addr), uintptr(m.Length()), true); err != nil || !writable {
			access &^= ib.AccessLocalWrite | ib.AccessRemoteWrite
		}
	}
	who, err := sys.PeerCred(c)
	if err != nil {
		return err
	}
	g, fd, err := mem.NewGuard()
	if err != nil {
		return err
	}
	l := &lease{region: m.region, c: c, user: who.PID, pidfd: -1, guard: g, uses: 1}
	if who.PID > 0 {
		if p, err := sys.OpenPidfd(who.PID); err == nil {
			l.pidfd = p
		}
	}
	d := m.pd.dev
	d.exports.add(l)
	if _, usable := m.region.Snapshot(); !usable { // the call that closed it may have looked for leases before add
		d.exports.end(l)
		_ = sys.CloseFD(fd) // it was open: it cannot fail
		return errNotPublished
	}
	shm.Allow(l.user)
	x.Extent = host.Extent{Addr: addr, Length: m.Length(), IOVA: m.Addr(), Access: uint32(access), Proof: sys.AddrOf(g.Proof())}
	x.Guard = fd
	x.Close = func() {
		shm.Deny(l.user)
		d.exports.end(l)
	}
	return nil
}

// placeOf returns the address of a backing's first byte, if it is memory of this process.
func placeOf(b mem.Backing) (uint64, bool) {
	if h, ok := b.(interface{ Addr() uintptr }); ok {
		return uint64(h.Addr()), true
	}
	if b.Kind() != mem.KindDevice {
		return 0, false
	}
	first, kind := b.Run(0, 1, 0)
	return sys.AddrOf(first), kind == mem.FaultNone
}

func (e *exports) add(l *lease) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.leases == nil {
		e.leases = make(map[*mem.Region][]*lease)
	}
	e.leases[l.region] = append(e.leases[l.region], l)
	l.follow() // the region may have been suspended a moment ago
}

// end removes a lease when its process does not access the region any more, or has ended:
// until then a call that takes the memory back must find the lease. The process may live,
// and only have lost the connection, or broken its protocol.
func (e *exports) end(l *lease) {
	l.guard.Shut()
	l.guard.Await(l.gone)
	e.mu.Lock()
	list := slices.DeleteFunc(e.leases[l.region], func(o *lease) bool { return o == l })
	if e.leases[l.region] = list; len(list) == 0 {
		delete(e.leases, l.region)
	}
	e.letGoLocked(l)
	e.mu.Unlock()
}

func (e *exports) letGoLocked(l *lease) {
	if l.uses--; l.uses > 0 {
		return
	}
	_ = l.guard.Close() // it was mapped: it cannot fail
	if l.pidfd >= 0 {
		_ = sys.CloseFD(l.pidfd) // it was open: it cannot fail
	}
}

// revoke takes a region away from the processes that have imported it, and waits until none
// of them accesses it any more. Without wait it only makes their guards what the region is
// now, suspended for one, and does not wait.
func (e *exports) revoke(r *mem.Region, wait bool) {
	if !wait {
		e.follow(r)
		return
	}
	e.mu.Lock()
	list := slices.Clone(e.leases[r])
	for _, l := range list {
		l.guard.Shut()
		l.uses++
	}
	e.mu.Unlock()
	for _, l := range list {
		l.guard.Await(l.gone)
	}
	e.mu.Lock()
	for _, l := range list {
		e.letGoLocked(l)
	}
	e.mu.Unlock()
}

// shut keeps the processes that have imported a region from beginning another access.
func (e *exports) shut(r *mem.Region) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.leases[r] {
		l.guard.Shut()
	}
}

// inside reports whether a process that has imported a region is accessing it.
func (e *exports) inside(r *mem.Region) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.ContainsFunc(e.leases[r], func(l *lease) bool { return l.guard.Busy() })
}

// follow makes the guards of a region what the region is now. It is called after every change
// of the region, so the last call sets the guards right, in whatever order the calls come.
func (e *exports) follow(r *mem.Region) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.leases[r] {
		l.follow()
	}
}

// resumed opens the guards of a region that is open again after its memory has moved. The
// table calls it. (Grants are not resumed: new ones are given, see grant.go.)
func (d *Device) resumed(r *mem.Region) { d.exports.follow(r) }
