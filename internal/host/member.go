package host

// A process's place in a device, from joining to leaving:
//
//  1. Join becomes the owner, if nobody is, or finds him and joins.
//  2. watch waits for the owner to go. Then takeOver: become the owner, or find
//     the new one.
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

// Config says what to join.
type Config struct {
	// Addrs are the device's addresses: the same in every process of a device.
	Addrs []netip.Addr
	// Alone wants nobody else at the addresses.
	Alone bool
	// Packets says that this process wants to be reached by packets, also by those
	// who could do without.
	Packets bool
	// Limits are those of the device, if this process is the first.
	Limits [NumObjects]uint64

	// Become makes this process the one that packets from outside reach. It is
	// called before Join returns, or later by a goroutine of the member's.
	Become func() error
	// Joined tells that another process has become the owner, or was when this
	// one joined, and which.
	Joined func(owner int)
	// Channel takes over a connection by which another process wants to talk
	// to this one: of the device at an address, and its number there. It may be
	// called before Join returns, and must not wait for that.
	Channel func(c *net.UnixConn, from netip.Addr, process int)
	// Status tells what this process is doing, as something for encoding/json;
	// only totals if brief is set.
	Status func(brief bool) any
	// Memory returns a memory file that this process shares, by its token, and how
	// many bytes of it. The descriptor is the caller's to close.
	Memory func(token string) (fd int, length uint64, err error)
	// Export lets a process import an object, by the token of who shares it and its
	// number there. The connection stays open as long as the import lives.
	Export func(token string, object uint64, c *net.UnixConn) (*Export, error)
	// Segment, if set, returns a descriptor of a part of this process's memory that
	// others may read. It is closed when it has been passed on.
	Segment func(id uint64, write bool) (fd int, err error)
	// Shared, if set, returns what an opener needs to know of memory that engines of other
	// processes reach, and a descriptor, -1 if there is none.
	Shared func(id uint64) (what []byte, fd int, err error)
	// Trouble, if set, tells that the owner has gone and this process cannot take
	// its place nor join another, and why; nil, that it has now. An error that is
	// ESTALE is final: the device is another one now. A goroutine of the member's
	// calls it.
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
	owner *owner        // if this process is it
	conn  *net.UnixConn // to the owner, if it is another
	gone  chan struct{} // closed when conn has ended
	ready chan struct{} // closed while owner or conn is set
	stale error         // set when the device is another one

	orphan chan struct{} // closed with stale

	asking  sync.Mutex // held by who waits for a reply
	replies chan reply
	stop    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup
}

// joinTime is how long to try while owners come and go.
const (
	joinTime  = 5 * time.Second
	retry     = 10 * time.Millisecond
	slowRetry = 100 * time.Millisecond
	// troubleTime is how long a take-over may fail before that is said: the port of
	// an owner that was killed may be free a moment later.
	troubleTime = time.Second
	dialTries   = 20
)

// Join makes this process one of the device's.
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
	if cfg.Packets { // nobody knows a queue pair of this process yet
		m.dir.process[m.slot].packets.Store(1)
	}
	m.wg.Go(m.watch)
	return m, nil
}

// announce opens this process's socket, whose name tells that there is a device.
// (Not before joining: those who come first to an address at the same time would
// take each other for what is left of an older device.) If the owner has gone
// before the name was there, a newcomer may have founded another device
// meanwhile: then everything begins again.
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

// rejoin tells the owner that this process is here, with the entry that it has.
func (m *Member) rejoin(c *net.UnixConn) error {
	_, _, err := ask(c, &request{Op: opRejoin, PID: os.Getpid(), Nonce: m.nonce, Slot: m.slot, ID: m.dir.id})
	return err
}

func random() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails: it ends the program instead
	return binary.LittleEndian.Uint64(b[:])
}

// tryJoin becomes the owner or joins him. again says that a failure may pass.
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

// join joins an owner. It takes the connection over.
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
		return !errors.As(err, &no), errors.Join(err, c.Close()) // it may have gone meanwhile
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
			return true, err // somebody was quicker
		}
		return false, refuse(syscall.EADDRINUSE, "another device has one of the addresses %v", m.cfg.Addrs)
	}
	// If the device has processes all the same, their owner has just gone, and
	// one of them is about to take its place. (Who holds the names can be sure:
	// nobody else becomes one of its processes now.)
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
	m.slot, _ = dir.claim(os.Getpid(), m.nonce) // it is empty
	o := &owner{dir: dir, addrs: m.cfg.Addrs, names: names}
	o.start(m.slot, false)
	m.setOwner(o, nil)
	return false, nil
}

// othersLeft tells whether other processes of the device are there.
func (m *Member) othersLeft() (bool, error) {
	all, err := names()
	if err != nil {
		return false, err
	}
	prefix := ownerName(m.cfg.Addrs[0]) + "/"
	return slices.ContainsFunc(all, func(n string) bool { return strings.HasPrefix(n, prefix) }), nil
}

// setOwner notes who the owner is: this process, or the one at the other end.
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
		case <-m.stop: // also if it came while there was no connection to close
			c = nil
		default:
		}
		if c == nil {
			return // this process is the owner, or leaves
		}
		if m.cfg.Joined != nil { // beside reading: it may take its time
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

// read passes replies on until the connection ends.
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
		default: // nobody has asked
		}
	}
}

// takeOver becomes the owner or joins the new one. It gives up when the member
// is closed, or the device is another one now.
func (m *Member) takeOver() bool {
	begin, told := time.Now(), false
	for wait := time.Duration(0); ; {
		select {
		case <-m.stop:
			return false
		case <-time.After(wait):
		}
		select {
		case <-m.stop: // also if the time was up as well: it was this process that has gone
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
			closeAll(names) // for others to try
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
		_ = c.Close() // the first error says more
		return err
	}
	m.setOwner(nil, c)
	return nil
}

// ID tells devices apart, also those that follow each other at one address.
func (m *Member) ID() [2]uint64 { return m.dir.id }

// Slot is this process's number in the device.
func (m *Member) Slot() int { return m.slot }

// Key selects the permutation that hides queue pair numbers.
func (m *Member) Key() mem.PermKey { return m.dir.key }

// Find returns the process that a queue pair or a shared receive queue belongs to.
func (m *Member) Find(qpn uint32) (process int, ok bool) { return m.dir.findQP(qpn) }

// ByPackets tells whether a process wants to be reached by packets alone.
func (m *Member) ByPackets(process int) bool { return m.dir.byPackets(process) }

// Set tells how many objects of a kind this process has; Over reports whether all
// processes together have more than the device's limit. Who wants one more sets
// first and asks then: of two that want the last one, at most one gets it.
func (m *Member) Set(o Object, n int) { m.dir.process[m.slot].count[o].Store(uint64(n)) }

// Limit is how many objects of a kind all processes together may have.
func (m *Member) Limit(o Object) int { return int(m.dir.limits[o]) }

// Over is explained at Set.
func (m *Member) Over(o Object) bool { return m.dir.total(o) > m.dir.limits[o] }

// Lease gets another range of slots for numbers: range r is
// r<<RangeBits and the following.
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
		case <-ready: // of the owner that has gone, if c was set: then soon again
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

// askOwner asks for a range. It fails if the owner goes.
func (m *Member) askOwner(c *net.UnixConn, gone <-chan struct{}) (reply, bool) {
	m.asking.Lock()
	defer m.asking.Unlock()
	select {
	case <-m.replies: // a late one
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
	// One that has just joined opens its socket a moment later.
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
