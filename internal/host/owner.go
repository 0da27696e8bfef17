package host

// The owner: it has the name of every address of the device, and answers the processes that
// connect to it.
//
//  1. listenAll gets the names: all or none.
//  2. serve accepts connections; answer serves one until it ends. The end of a connection that
//     has joined is taken for the end of its process.
//  3. adopt, after a take-over, waits for the processes of the previous owner.

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"
)

type owner struct {
	dir   *directory
	addrs []netip.Addr
	names []*net.UnixListener
	self  int

	mu     sync.Mutex // guards what follows, and writes to the directory
	conns  map[*net.UnixConn]int
	absent map[int]bool // slots of an earlier owner's processes that have not rejoined yet
	closed bool

	stop chan struct{}
	wg   sync.WaitGroup
}

// listenAll gets the names of all addresses.
func listenAll(addrs []netip.Addr) ([]*net.UnixListener, error) {
	var all []*net.UnixListener
	for _, a := range addrs {
		l, err := listen(ownerName(a))
		if err != nil {
			closeAll(all)
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

func closeAll(ls []*net.UnixListener) {
	for _, l := range ls {
		_ = l.Close() // nothing is lost with it
	}
}

// start begins to serve. self is the slot of the owner's own entry; after is set after a
// take-over, when the other processes have to rejoin.
func (o *owner) start(self int, after bool) {
	o.self = self
	o.conns = make(map[*net.UnixConn]int)
	o.absent = make(map[int]bool)
	o.stop = make(chan struct{})
	if after {
		o.adopt() // only the process that has the names does so
	}
	o.dir.owner.Store(uint32(self))
	for _, l := range o.names {
		o.wg.Go(func() { o.serve(l) })
	}
}

func (o *owner) serve(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // no descriptors, or no memory: not for ever
			continue
		}
		if !o.enter(c) {
			_ = c.Close()
			return
		}
		o.wg.Go(func() { o.answer(c) })
	}
}

// enter registers a connection. It reports false if the owner is closed.
func (o *owner) enter(c *net.UnixConn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return false
	}
	o.conns[c] = -1
	return true
}

// answer serves a connection until it ends.
func (o *owner) answer(c *net.UnixConn) {
	defer o.leave(c)
	if err := checkPeer(c); err != nil {
		var r *refusal
		if errors.As(err, &r) {
			_ = send(c, &reply{Errno: r.errno, Err: r.text}, -1)
		}
		return
	}
	for {
		var q request
		fd, err := receive(c, &q)
		refuseFD(fd)
		if err != nil {
			return
		}
		r, err := o.handle(c, &q)
		var no *refusal
		if errors.As(err, &no) {
			r = reply{Errno: no.errno, Err: no.text}
		}
		pass := -1
		if err == nil && (q.Op == opJoin || q.Op == opLook) {
			pass = o.dir.fd
		}
		if send(c, &r, pass) != nil {
			return
		}
	}
}

// leave closes a connection, and frees the entry and the ranges of its process.
func (o *owner) leave(c *net.UnixConn) {
	_ = c.Close()
	o.mu.Lock()
	defer o.mu.Unlock()
	if slot := o.conns[c]; slot >= 0 && !o.closed {
		o.dir.release(slot)
		delete(o.absent, slot)
	}
	delete(o.conns, c)
}

func (o *owner) handle(c *net.UnixConn, q *request) (reply, error) {
	if q.Protocol != protocol {
		return reply{}, refuse(syscall.EPROTONOSUPPORT, "the device there speaks protocol %d, this process %d: use one version of Verbena", protocol, q.Protocol)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return reply{}, refuse(syscall.ESHUTDOWN, "the owner is leaving")
	}
	switch q.Op {
	case opJoin:
		if o.conns[c] >= 0 {
			return reply{}, refuse(syscall.EINVAL, "this connection has joined already")
		}
		if !slices.Equal(q.Addrs, o.addrs) {
			return reply{}, refuse(syscall.EADDRINUSE, "a device with the addresses %v is open there: open the same ones, or others", o.addrs)
		}
		slot, ok := o.dir.claim(q.PID, q.Nonce)
		if !ok {
			return reply{}, refuse(syscall.EUSERS, "%d processes share the device, which is all there is room for", MaxProcesses)
		}
		o.conns[c] = slot
		return reply{Slot: slot}, nil
	case opRejoin:
		if q.ID != o.dir.id || q.Slot < 0 || q.Slot >= MaxProcesses || o.dir.process[q.Slot].state.Load() != processAlive ||
			o.dir.process[q.Slot].nonce.Load() != q.Nonce {
			return reply{}, refuse(syscall.ESTALE, "the device there is another one")
		}
		delete(o.absent, q.Slot)
		for other, slot := range o.conns { // an earlier connection, which the process has given up
			if slot == q.Slot && other != c {
				o.conns[other] = -1
				_ = other.Close()
			}
		}
		o.conns[c] = q.Slot
		return reply{Slot: q.Slot}, nil
	case opLook:
		return reply{}, nil
	case opLease:
		slot := o.conns[c]
		if slot < 0 {
			return reply{}, refuse(syscall.EINVAL, "join first")
		}
		return o.grantLocked(slot)
	}
	return reply{}, refuse(syscall.EINVAL, "operation %q is unknown", q.Op)
}

func (o *owner) grantLocked(slot int) (reply, error) {
	r, ok := o.dir.grant(slot)
	if !ok {
		return reply{}, refuse(syscall.ENOMEM, "no queue pair number is free")
	}
	return reply{Range: r}, nil
}

// adopt takes over from an owner that is gone: it frees that one's entry now, and the entries of
// processes that ended with it once they have had returnTime to rejoin.
func (o *owner) adopt() {
	if previous := int(o.dir.owner.Load()); previous < MaxProcesses && previous != o.self {
		o.dir.release(previous)
	}
	for i := range o.dir.process {
		if i != o.self && o.dir.process[i].state.Load() == processAlive {
			o.absent[i] = true
		}
	}
	o.wg.Go(func() {
		for wait := true; wait; wait = o.bury() {
			select {
			case <-o.stop:
				return
			case <-time.After(returnTime):
			}
		}
	})
}

// bury frees the entries of processes that have not rejoined and whose sockets are gone. It
// reports whether some are still absent.
func (o *owner) bury() bool {
	o.mu.Lock()
	missing := slices.Collect(maps.Keys(o.absent))
	o.mu.Unlock()
	for _, slot := range missing {
		e := &o.dir.process[slot]
		c, err := dial(processName(o.addrs[0], e.pid.Load(), e.nonce.Load()))
		if err == nil {
			_ = c.Close() // the process lives, and will rejoin
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		o.mu.Lock()
		if o.absent[slot] && !o.closed {
			o.dir.release(slot)
			delete(o.absent, slot)
		}
		o.mu.Unlock()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.absent) > 0
}

// returnTime is how long the processes of an earlier owner have to rejoin.
const returnTime = 2 * time.Second

// close gives up the names, closes all connections and frees the owner's entry.
func (o *owner) close() {
	close(o.stop)
	o.mu.Lock()
	o.closed = true
	o.dir.release(o.self)
	for c := range o.conns {
		_ = c.Close()
	}
	o.mu.Unlock()
	closeAll(o.names)
	o.wg.Wait()
}
