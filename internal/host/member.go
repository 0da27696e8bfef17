package host

// A process's place in a device, from joining to leaving:
//
//  1. enter gets the files that the processes share from one of them, or makes them.
//  2. settleIn enters this process in the directory, with a place (places.go).
//  3. Close leaves.

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Config configures Join: the device, and what this process does for the others.
type Config struct {
	// Addrs are the device's addresses: the same in every process of a device.
	Addrs []netip.Addr
	// Alone makes Join fail if a device is open at the addresses already.
	Alone bool
	// Packets makes other processes reach this one by packets, even those that could use
	// shared memory.
	Packets bool
	// Limits are those of the device, if this process is the first.
	Limits [NumObjects]uint64

	// Common, if set, opens the UDP sockets that all processes of the device read
	// (sys.CommonPlace), one for each address, and returns their descriptors, which it leaves to
	// the caller. It is called if this process is the first.
	Common func() ([]int, error)
	// Listen opens the UDP sockets of a place, one for each address, for the first receiver of
	// this process, and returns the place that they have. It is called before Join returns, and
	// again when this receiver needs more queue pair numbers than a place has.
	Listen func(*Sockets) (place int, err error)
	// Channel takes over a connection that another process has opened for a channel to
	// this one. from is an address of that process's device, process its slot there.
	// It may be called before Join returns, and must not wait for that.
	Channel func(c *net.UnixConn, from netip.Addr, process int)
	// Died, if set, is called for the connections of a process of the device that has died, some of
	// them at a time. Of all processes, one is called. It must not wait for a process.
	Died func([]LastWords)
	// Watcher is the name of a socket where a process watches this one: see ServeWatcher. "" if
	// there is none.
	Watcher string
	// Status returns what this process is doing, as a value for encoding/json; only
	// totals if brief is set.
	Status func(brief bool) any
	// Memory returns a memory file that this process shares, by its token, and how
	// many bytes of it. The descriptor is the caller's to close.
	Memory func(token string) (fd int, length uint64, err error)
	// Export lets a process import an object, by the token under which this process
	// shares objects, and the object's number there. The connection stays open as long as
	// the import lives.
	Export func(token string, object uint64, c *net.UnixConn) (*Export, error)
	// Segment, if set, returns a descriptor of a part of this process's memory that
	// others may read or, if write is set, also write. The caller closes it.
	Segment func(id uint64, write bool) (fd int, err error)
	// Shared, if set, returns a description by which another process opens memory that its
	// engine is to access, and a descriptor, -1 if there is none. The caller closes it.
	Shared func(id uint64) (what []byte, fd int, err error)
}

// Member is this process's place in a device.
type Member struct {
	cfg   Config
	dir   *directory
	shelf *sys.Shelf
	self  identity
	life  *sys.ByteLock // of the entry; nil before there is one
	proc  *process
	door  *door

	common  []int         // descriptors of the sockets that all processes read
	first   int           // the place that this process has got first
	settled chan struct{} // closed when settleIn has returned
	records records       // of connections, see lastwords.go
	watch   watch         // see watch.go
	places  *Places       // of the first receiver
	leasing sync.Mutex    // guards the places
	once    sync.Once

	tidying sync.Mutex // guards what follows
	closed  bool
	tidies  bool // a goroutine of tidy is under way
	wg      sync.WaitGroup
}

// joinTime is how long Join tries while processes come and go, or do not answer.
const (
	joinTime = 5 * time.Second
	retry    = 10 * time.Millisecond
)

// Join makes this process one of the device's processes.
func Join(cfg Config) (*Member, error) {
	m := &Member{cfg: cfg, settled: make(chan struct{}), watch: watch{ending: make(chan struct{})}}
	if err := m.enter(); err != nil {
		return nil, err
	}
	err := m.settleIn()
	close(m.settled)
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	m.door.start()
	return m, nil
}

// enter gets the files that the processes of the device share, or makes them if there is no
// device yet.
func (m *Member) enter() error {
	for deadline := time.Now().Add(joinTime); ; time.Sleep(retry) {
		fds, err := askDoor(m.cfg.Addrs[0], &request{Op: opJoin, Addrs: m.cfg.Addrs}, deadline)
		switch {
		case err == nil && m.cfg.Alone:
			refuseFDs(fds)
			return refuse(syscall.EADDRINUSE, "a device is open at %v already", m.cfg.Addrs[0])
		case err == nil:
			return m.join(fds)
		case errors.Is(err, syscall.ECONNREFUSED):
			if err = m.found(); err == nil || !errors.Is(err, syscall.EADDRINUSE) {
				return err
			}
			// Another process was quicker, and may not listen yet; or another device has one
			// of the addresses.
			for _, a := range m.cfg.Addrs[1:] {
				if c, e := dial(doorName(a)); e == nil {
					_ = c.Close()
					if c, e = dial(doorName(m.cfg.Addrs[0])); e == nil {
						_ = c.Close()
						break
					}
					return refuse(syscall.EADDRINUSE, "another device has one of the addresses %v", m.cfg.Addrs)
				}
			}
		}
		var no *refusal
		if errors.As(err, &no) {
			return err
		}
		if time.Now().After(deadline) {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = refuse(syscall.ETIMEDOUT, "none of the processes that have the device at %v open answers: they may be stopped", m.cfg.Addrs[0])
			}
			return err
		}
	}
}

// join takes over the files of a device.
func (m *Member) join(fds []int) (err error) {
	n := len(m.cfg.Addrs)
	if len(fds) != 3+n && len(fds) != 3+2*n {
		refuseFDs(fds)
		return errDirectory
	}
	if m.dir, err = openDirectory(fds[0]); err != nil {
		refuseFDs(fds[1:])
		return err
	}
	m.common = fds[3+n:]
	return m.share(sys.OpenShelf(fds[1], fds[2]), fds[3:3+n])
}

// found makes a device where there is none.
func (m *Member) found() error {
	doors, err := listenAll(m.cfg.Addrs)
	if err != nil {
		return err
	}
	shelf, err := sys.NewShelf(fmt.Sprintf("%sshelf/%016x", namePrefix, random()))
	if err == nil {
		if m.dir, err = createDirectory(m.cfg.Addrs[0], mem.RandomPermKey(), [2]uint64{random(), random()}, m.cfg.Limits); err != nil {
			_ = shelf.Close() // the first error says more
		}
	}
	if err != nil {
		refuseFDs(doors)
		return err
	}
	if m.cfg.Common != nil {
		if m.common, err = m.cfg.Common(); err != nil {
			refuseFDs(doors)
			return errors.Join(err, shelf.Close(), m.dir.close())
		}
		m.dir.takeCommon()
	}
	return m.share(shelf, doors)
}

// share keeps the files of the device, besides the directory.
func (m *Member) share(shelf *sys.Shelf, doors []int) error {
	m.shelf = shelf
	m.door = &door{dir: m.dir, shelf: shelf, addrs: m.cfg.Addrs, fds: doors, common: m.common}
	if err := m.door.open(); err != nil {
		refuseFDs(doors)
		m.door = nil
		return errors.Join(err, m.Close())
	}
	return nil
}

// settleIn gives this process a name, an entry and a place. The name comes first, so that others
// reach a process that has an entry.
func (m *Member) settleIn() (err error) {
	nonce := random()
	m.proc, err = startProcess(processName(m.cfg.Addrs[0], makeIdentity(os.Getpid(), nonce, 0)), &m.cfg, m.watched)
	if err != nil {
		return err
	}
	id, life, err := m.dir.claim(os.Getpid(), nonce)
	if err != nil {
		return err
	}
	if life == nil {
		return refuse(syscall.EUSERS, "%d processes share the device, which is all there is room for", MaxProcesses)
	}
	m.life = life
	m.self = id
	m.places = &Places{m: m, listen: m.cfg.Listen}
	if err := m.places.take(); err != nil {
		return err
	}
	m.first = m.places.place
	if m.cfg.Packets { // this process has no queue pair yet that others could reach
		m.dir.process[m.Slot()].packets.Store(1)
	}
	return nil
}

func random() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails: it ends the program instead
	return binary.LittleEndian.Uint64(b[:])
}

// ID returns the device's identity, which no other device has, not even a later one at the
// same address.
func (m *Member) ID() [2]uint64 { return m.dir.id }

// Places returns the places of this process's first receiver.
func (m *Member) Places() *Places { return m.places }

// Common returns descriptors of the sockets that all processes of the device read, one for each
// address. They stay the member's.
func (m *Member) Common() []int { return m.common }

// Slot returns this process's number in the device.
func (m *Member) Slot() int { return m.self.slot() }

// Key returns the key of the permutation that hides queue pair numbers.
func (m *Member) Key() mem.PermKey { return m.dir.key }

// Find returns the process that a queue pair or a shared receive queue belongs to.
func (m *Member) Find(qpn uint32) (process int, ok bool) { return m.dir.findQP(qpn) }

// ByPackets reports whether a process wants to be reached by packets alone.
func (m *Member) ByPackets(process int) bool { return m.dir.byPackets(process) }

// Set publishes how many objects of a kind this process has; Over reports whether all
// processes together have more than the device's limit. A process that wants one more object
// calls Set first and then Over: of two that want the last one, at most one gets it.
func (m *Member) Set(o Object, n int) { m.dir.process[m.Slot()].count[o].Store(uint64(n)) }

// Limit returns how many objects of a kind all processes together may have.
func (m *Member) Limit(o Object) int { return int(m.dir.limits[o]) }

// Over reports whether all processes together have more objects of a kind than the device's
// limit: see Set.
func (m *Member) Over(o Object) bool {
	if m.dir.total(o) <= m.dir.limits[o] {
		return false
	}
	m.look() // a process may have ended without giving back what it had
	return m.dir.total(o) > m.dir.limits[o]
}

// Dial opens a connection to another process of the device.
func (m *Member) Dial(process int) (*net.UnixConn, error) {
	return m.dial(m.dir, process)
}

func (m *Member) dial(d *directory, process int) (*net.UnixConn, error) {
	id := d.who(process)
	if id == 0 {
		return nil, fmt.Errorf("process %d of the device at %v: %w", process, d.first(), syscall.ESRCH)
	}
	c, err := dial(processName(d.first(), id))
	if err != nil {
		return nil, err
	}
	if _, _, err := ask(c, &request{Op: opChannel, Addrs: m.cfg.Addrs[:1], Slot: m.Slot()}); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close leaves the device. It is idempotent.
func (m *Member) Close() (err error) {
	m.once.Do(func() {
		m.endWatch()
		if m.life != nil {
			m.quietOwn()
			m.dir.release(m.self)
			m.life.Unlock()
		}
		if m.door != nil {
			m.door.close()
		}
		if m.proc != nil {
			m.proc.close()
		}
		err = m.shelf.Close()
		refuseFDs(m.common)
		if m.door != nil { // last: whoever gets the name finds the port free
			refuseFDs(m.door.fds)
		}
		err = errors.Join(err, m.dir.close())
	})
	return err
}
