package host

// A process's place in a device, from joining to leaving:
//
//  1. Join makes this process the owner, if there is none, or joins the owner.
//  2. watch waits for the owner to go. Then takeOver makes this process the owner, or
//     joins the new one.
//  3. Close leaves.

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
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

	// Become makes this process the one that receives packets from other hosts. It is
	// called before Join returns, or later by a goroutine of the member's.
	Become func() error
	// Joined, if set, is called with the owner's slot when this process has joined an
	// owner: the first, or a new one after the previous one has gone.
	Joined func(owner int)
	// Channel takes over a connection that another process has opened for a channel to
	// this one. from is an address of that process's device, process its slot there.
	// It may be called before Join returns, and must not wait for that.
	Channel func(c *net.UnixConn, from netip.Addr, process int)
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
	// Trouble, if set, is called with the reason when the owner has gone and this process
	// could neither take its place nor join another for troubleTime, and with nil when it
	// has done so after all. An ESTALE is final, and reported at once: another device has
	// the address now. A goroutine of the member's calls it.
	Trouble func(err error)
}

// Member is this process's place in a device.
type Member struct {
	cfg   Config
	dir   *directory
	slot  int
	nonce uint64
	proc  *process

	mu    sync.Mutex    // guards what follows
	owner *owner        // if this process is the owner
	conn  *net.UnixConn // to the owner, if that is another process
	gone  chan struct{} // closed when conn has ended
	ready chan struct{} // closed while owner or conn is set
	stale error         // set when another device has the address

	orphan chan struct{} // closed with stale

	asking  sync.Mutex // guards the exchange of one request and its reply
	replies chan reply
	stop    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup
}

// joinTime is how long Join and Lease try while owners come and go.
const (
	joinTime  = 5 * time.Second
	retry     = 10 * time.Millisecond
	slowRetry = 100 * time.Millisecond
	// troubleTime is how long a take-over may fail before Trouble is called: the port of
	// an owner that was killed may be free only a moment later.
	troubleTime = time.Second
	dialTries   = 20
)

// Join makes this process one of the device's processes.
func Join(cfg Config) (*Member, error) {
	m := &Member{cfg: cfg, nonce: random(), replies: make(chan reply, 1), stop: make(chan struct{}), ready: make(chan struct{}), orphan: make(chan struct{})}
	for deadline := time.Now().Add(joinTime); ; time.Sleep(retry) {
		again, err := m.tryJoin()
		if err == nil {
			again, err = m.announce()
		}
		if err == nil {
			break
		}
		if !again || time.Now().After(deadline) {
			return nil, err
		}
	}
	if cfg.Packets { // this process has no queue pair yet that others could reach
		m.dir.process[m.slot].packets.Store(1)
	}
	m.wg.Go(m.watch)
	return m, nil
}

// announce opens this process's socket, whose name shows that the device has processes
// (othersLeft). It is called after joining: otherwise two processes that come first to an
// address at the same time would take each other for what is left of an older device. If the
// owner has gone before the name was there, a newcomer may have founded another device
// meanwhile: then Join begins again.
func (m *Member) announce() (again bool, err error) {
	m.proc, err = startProcess(processName(m.cfg.Addrs[0], uint32(os.Getpid()), m.nonce), &m.cfg)
	if err == nil && m.conn != nil {
		again = true
		if err = m.rejoin(m.conn); err != nil {
			m.proc.close()
		}
	}
	if err != nil {
		m.proc = nil
		if m.conn != nil {
			_ = m.conn.Close()
		}
		if m.owner != nil {
			m.owner.close()
		}
		err = errors.Join(err, m.dir.close())
		m.owner, m.conn, m.ready = nil, nil, make(chan struct{})
		m.nonce = random() // the entry of this attempt may be left, and must look dead
	}
	return again, err
}

// rejoin joins the owner with the entry that this process has in the directory.
func (m *Member) rejoin(c *net.UnixConn) error {
	_, _, err := ask(c, &request{Op: opRejoin, PID: os.Getpid(), Nonce: m.nonce, Slot: m.slot, ID: m.dir.id})
	return err
}

func random() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails: it ends the program instead
	return binary.LittleEndian.Uint64(b[:])
}

// tryJoin makes this process the owner, or joins the owner. again reports whether it is worth
// trying again after a failure.
func (m *Member) tryJoin() (again bool, err error) {
	c, err := dial(ownerName(m.cfg.Addrs[0]))
	switch {
	case err == nil && m.cfg.Alone:
		_ = c.Close()
		return false, refuse(syscall.EADDRINUSE, "a device is open at %v already", m.cfg.Addrs[0])
	case err == nil:
		return m.join(c)
	case !errors.Is(err, syscall.ECONNREFUSED):
		return false, err
	}
	return m.found()
}

// join joins the owner at the other end of a connection, which it takes over.
func (m *Member) join(c *net.UnixConn) (again bool, err error) {
	r, fd, err := ask(c, &request{Op: opJoin, Addrs: m.cfg.Addrs, PID: os.Getpid(), Nonce: m.nonce})
	if err == nil {
		m.dir, err = openDirectory(fd)
	}
	if err == nil && (r.Slot < 0 || r.Slot >= MaxProcesses) {
		err = errors.Join(errDirectory, m.dir.close())
	}
	if err != nil {
		var no *refusal
		return !errors.As(err, &no), errors.Join(err, c.Close()) // again: the owner may have gone
	}
	m.slot = r.Slot
	m.setOwner(nil, c)
	return false, nil
}

// found makes a device where there is none.
func (m *Member) found() (again bool, err error) {
	names, err := listenAll(m.cfg.Addrs)
	if err != nil {
		if !errors.Is(err, syscall.EADDRINUSE) {
			return false, err
		}
		if c, e := dial(ownerName(m.cfg.Addrs[0])); e == nil {
			_ = c.Close()
			return true, err // another process was quicker
		}
		return false, refuse(syscall.EADDRINUSE, "another device has one of the addresses %v", m.cfg.Addrs)
	}
	// If the device has processes all the same, their owner has just gone, and one of
	// them is about to take its place. (No further process can join while this one holds
	// the names.)
	if others, err := m.othersLeft(); err != nil || others {
		closeAll(names)
		return true, errors.Join(err, refuse(syscall.EADDRINUSE, "the device's owner is gone, and nobody has taken its place"))
	}
	if err := m.cfg.Become(); err != nil {
		closeAll(names)
		return false, err
	}
	dir, err := createDirectory(m.cfg.Addrs[0], mem.RandomPermKey(), [2]uint64{random(), random()}, m.cfg.Limits)
	if err != nil {
		closeAll(names)
		return false, err
	}
	m.dir = dir
	m.slot, _ = dir.claim(os.Getpid(), m.nonce) // it is empty: this cannot fail
	o := &owner{dir: dir, addrs: m.cfg.Addrs, names: names}
	o.start(m.slot, false)
	m.setOwner(o, nil)
	return false, nil
}

// othersLeft reports whether other processes of the device are there.
func (m *Member) othersLeft() (bool, error) {
	all, err := names()
	if err != nil {
		return false, err
	}
	prefix := ownerName(m.cfg.Addrs[0]) + "/"
	return slices.ContainsFunc(all, func(n string) bool { return strings.HasPrefix(n, prefix) }), nil
}

// setOwner sets the owner: o if it is this process, or else the process at the other end of c.
func (m *Member) setOwner(o *owner, c *net.UnixConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.owner, m.conn, m.gone = o, c, make(chan struct{})
	close(m.ready)
}

// watch waits for the end of the connection to the owner, and takes over.
func (m *Member) watch() {
	for {
		m.mu.Lock()
		c := m.conn
		m.mu.Unlock()
		select {
		case <-m.stop: // Close may have come while there was no connection to close
			c = nil
		default:
		}
		if c == nil {
			return // this process is the owner, or leaves
		}
		if m.cfg.Joined != nil { // in a goroutine of its own: Joined may block
			m.wg.Go(func() { m.cfg.Joined(int(m.dir.owner.Load())) })
		}
		m.read(c)
		_ = c.Close()
		m.mu.Lock()
		close(m.gone)
		m.conn, m.ready = nil, make(chan struct{})
		m.mu.Unlock()
		if !m.takeOver() {
			return
		}
	}
}

// read passes replies to askOwner until the connection ends.
func (m *Member) read(c *net.UnixConn) {
	for {
		var r reply
		fd, err := receive(c, &r)
		refuseFD(fd)
		if err != nil {
			return
		}
		select {
		case m.replies <- r:
		default: // an earlier reply still waits: askOwner drops it
		}
	}
}

// takeOver makes this process the owner, or joins the new one. It reports false if the member
// is closed, or another device has the address now.
func (m *Member) takeOver() bool {
	begin, told := time.Now(), false
	for wait := time.Duration(0); ; {
		select {
		case <-m.stop:
			return false
		case <-time.After(wait):
		}
		select {
		case <-m.stop: // select picks at random if both are ready; stop comes first
			return false
		default:
		}
		err := m.tryTakeOver()
		switch late := time.Since(begin) > troubleTime; {
		case err == nil:
			if told {
				m.trouble(nil)
			}
			return true
		case errors.Is(err, syscall.ESTALE):
			m.mu.Lock()
			m.stale = err
			m.mu.Unlock()
			close(m.orphan)
			m.trouble(err)
			return false
		case late && !told:
			told = true
			m.trouble(err)
			fallthrough
		case late:
			wait = slowRetry
		default:
			wait = retry
		}
	}
}

func (m *Member) trouble(err error) {
	if m.cfg.Trouble != nil {
		m.cfg.Trouble(err)
	}
}

func (m *Member) tryTakeOver() error {
	names, err := listenAll(m.cfg.Addrs)
	if err == nil {
		if err := m.cfg.Become(); err != nil {
			closeAll(names) // another process may succeed
			return err
		}
		o := &owner{dir: m.dir, addrs: m.cfg.Addrs, names: names}
		o.start(m.slot, true)
		m.setOwner(o, nil)
		return nil
	}
	c, err := dial(ownerName(m.cfg.Addrs[0]))
	if err != nil {
		return err
	}
	if err := m.rejoin(c); err != nil {
		_ = c.Close() // the first error is the useful one
		return err
	}
	m.setOwner(nil, c)
	return nil
}

// ID returns the device's identity, which no other device has, not even a later one at the
// same address.
func (m *Member) ID() [2]uint64 { return m.dir.id }

// Slot returns this process's number in the device.
func (m *Member) Slot() int { return m.slot }

// Key returns the key of the permutation that hides queue pair numbers.
func (m *Member) Key() mem.PermKey { return m.dir.key }

// Find returns the process that a queue pair or a shared receive queue belongs to.
func (m *Member) Find(qpn uint32) (process int, ok bool) { return m.dir.findQP(qpn) }

// ByPackets reports whether a process wants to be reached by packets alone.
func (m *Member) ByPackets(process int) bool { return m.dir.byPackets(process) }

// Set publishes how many objects of a kind this process has; Over reports whether all
// processes together have more than the device's limit. A process that wants one more object
// calls Set first and then Over: of two that want the last one, at most one gets it.
func (m *Member) Set(o Object, n int) { m.dir.process[m.slot].count[o].Store(uint64(n)) }

// Limit returns how many objects of a kind all processes together may have.
func (m *Member) Limit(o Object) int { return int(m.dir.limits[o]) }

// Over reports whether all processes together have more objects of a kind than the device's
// limit: see Set.
func (m *Member) Over(o Object) bool { return m.dir.total(o) > m.dir.limits[o] }

// Lease gets another range of slots for numbers. Range r has the 1<<RangeBits slots from
// r<<RangeBits on.
func (m *Member) Lease() (r uint32, err error) {
	for deadline := time.Now().Add(joinTime); time.Now().Before(deadline); {
		m.mu.Lock()
		o, c, gone, ready := m.owner, m.conn, m.gone, m.ready
		m.mu.Unlock()
		if o != nil {
			o.mu.Lock()
			got, err := o.grantLocked(m.slot)
			o.mu.Unlock()
			return got.Range, err
		}
		if c != nil {
			if got, ok := m.askOwner(c, gone); ok {
				return got.Range, got.err()
			}
		}
		select {
		case <-ready: // if c was set, watch may not have noticed yet that the owner has gone
			time.Sleep(retry)
		case <-m.stop:
			return 0, net.ErrClosed
		case <-m.orphan:
			return 0, m.stale
		case <-time.After(time.Until(deadline)):
		}
	}
	return 0, refuse(syscall.ETIMEDOUT, "the device has no owner")
}

// askOwner asks the owner for a range. It is not ok if the owner goes or does not reply.
func (m *Member) askOwner(c *net.UnixConn, gone <-chan struct{}) (reply, bool) {
	m.asking.Lock()
	defer m.asking.Unlock()
	select {
	case <-m.replies: // the reply to an earlier request that was given up
	default:
	}
	if send(c, &request{Op: opLease, Protocol: protocol}, -1) != nil {
		return reply{}, false
	}
	select {
	case r := <-m.replies:
		return r, r.Errno != syscall.ESHUTDOWN && (r.Range < NumRanges || r.err() != nil)
	case <-gone:
	case <-m.stop:
	case <-time.After(replyTime):
	}
	return reply{}, false
}

// Dial opens a connection to another process of the device.
func (m *Member) Dial(process int) (*net.UnixConn, error) {
	return m.dial(m.dir, process)
}

func (m *Member) dial(d *directory, process int) (*net.UnixConn, error) {
	a := d.first()
	if process < 0 || process >= MaxProcesses || d.process[process].state.Load() != processAlive {
		return nil, fmt.Errorf("process %d of the device at %v: %w", process, a, syscall.ESRCH)
	}
	e := &d.process[process]
	name := processName(a, e.pid.Load(), e.nonce.Load())
	c, err := dial(name)
	// A process that has just joined opens its socket a moment later.
	for i := 0; i < dialTries && errors.Is(err, syscall.ECONNREFUSED) && e.state.Load() == processAlive; i++ {
		time.Sleep(retry)
		c, err = dial(name)
	}
	if err != nil {
		return nil, err
	}
	if _, _, err := ask(c, &request{Op: opChannel, Addrs: m.cfg.Addrs[:1], Slot: m.slot}); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close leaves the device. It is idempotent.
func (m *Member) Close() error {
	var err error
	m.once.Do(func() {
		close(m.stop)
		m.mu.Lock()
		if m.conn != nil {
			_ = m.conn.Close()
		}
		m.mu.Unlock()
		m.wg.Wait()
		m.mu.Lock()
		o, c := m.owner, m.conn
		m.mu.Unlock()
		if c != nil {
			_ = c.Close()
		}
		if o != nil {
			o.close()
		}
		if m.proc != nil {
			m.proc.close()
		}
		err = m.dir.close()
	})
	return err
}
