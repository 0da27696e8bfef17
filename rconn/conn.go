package rconn

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// Addr is the address of a connection's end: a port of the RDMA connection manager.
type Addr struct{ netip.AddrPort }

// Network returns "rdma".
func (Addr) Network() string { return "rdma" }

// Conn is a connection: a stream of bytes each way. It is a [net.Conn], and all methods are safe for concurrent use.
//
// A call that waits polls the completion queue for a while. Then one of the calls that wait sleeps until something completes,
// and takes the completions of all. So whoever the device wakes is a call that has something to do.
type Conn struct {
	cm     *cm.Conn
	memory *verbs.MR // of the ring that this side writes from; held by Write: see mapOutput
	words  *verbs.MR // of room for control messages; the peer reaches neither
	bytes  []byte    // that room

	reads, writes sync.Mutex // one call of Read, and one of Write, at a time; writes guards memory and what follows
	mapping       mapping
	before        *verbs.MR // the memory before the one that is mapped, while requests use it
	beforeEnd     uint64    // of the stream, what lies there
	rd, wd        deadline
	readable      event // there may be something to read, or an end
	writable      event // there may be room, or an end

	polling sync.Mutex // guards wcs and again: held by who takes completions
	wcs     [32]verbs.WC
	again   []verbs.RecvWR

	sending sync.Mutex // held over a post, so that requests are posted in the order in which they are counted; before mu
	wr      [1]verbs.SendWR
	sge     [1]verbs.SGE
	word    [controlBytes]byte

	mu     sync.Mutex // guards what follows
	in     inbound
	out    outbound
	marks  [sends]uint64 // how much of the ring each request frees, with those before it
	err    error         // why the connection has ended; what has come may still be read
	shut   bool          // CloseWrite was called
	probe  uint64        // the last request that asks for the peer
	last   uint64        // the request that tells the peer of the end
	moved  bool          // something has come since keepAlive looked last
	closed atomic.Bool

	watching chan struct{} // has a value while a call waits for completions, for all that wait
	ctx      context.Context
	cancel   context.CancelFunc
	alive    *time.Timer // asks now and then whether the peer is there
	every    time.Duration

	close sync.Once
	ended error // what Close returns
}

var _ net.Conn = (*Conn)(nil)

// LocalAddr returns the address of this side.
func (c *Conn) LocalAddr() net.Addr { return Addr{c.cm.LocalAddr()} }

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() net.Addr { return Addr{c.cm.RemoteAddr()} }

// SetDeadline sets the time after which Read and Write fail with os.ErrDeadlineExceeded, also calls that wait already. Zero:
// never.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline is SetDeadline for Read.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(&c.rd, t) }

// SetWriteDeadline is SetDeadline for Write. A Write that has failed may have written a part.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(&c.wd, t) }

func (c *Conn) setDeadline(d *deadline, t time.Time) error {
	if c.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	d.set(t)
	return nil
}

func (c *Conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "rdma", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// Read reads what has come: at least a byte, unless b is empty. It waits if nothing has.
//
// Errors: io.EOF when the peer has ended its stream; in a *net.OpError os.ErrDeadlineExceeded, net.ErrClosed, ECONNRESET if
// the peer is gone, ETIMEDOUT if it does not answer any more, EPROTO if it does what no peer may.
func (c *Conn) Read(b []byte) (int, error) {
	c.reads.Lock()
	defer c.reads.Unlock()
	late := c.rd.wait()
	for {
		switch {
		case c.closed.Load():
			return 0, c.opError("read", net.ErrClosed)
		case isClosed(late):
			return 0, c.opError("read", os.ErrDeadlineExceeded)
		}
		n, err := c.take(b)
		switch {
		case err == io.EOF:
			return n, err
		case err != nil:
			return n, c.opError("read", err)
		case n > 0 || len(b) == 0:
			return n, nil
		}
		c.await(&c.readable, late, c.hasInput)
		late = c.rd.wait() // it may have been set anew
	}
}

// take copies what has come. Zero bytes and no error: nothing has. Only the caller of Read moves in.read, so the bytes
// stay while they are copied without the lock.
func (c *Conn) take(b []byte) (n int, err error) {
	for n < len(b) {
		c.mu.Lock()
		next := c.in.next()
		if len(next) == 0 {
			if n == 0 {
				err = c.err
				if c.in.end {
					err = io.EOF
				}
			}
			c.mu.Unlock()
			break
		}
		c.mu.Unlock()
		k := copy(b[n:], next)
		n += k
		c.mu.Lock()
		c.in.read += uint64(k)
		due := c.in.due() && c.err == nil
		c.mu.Unlock()
		if due {
			c.tell(false)
		}
	}
	return n, err
}

func (c *Conn) hasInput() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.in.next()) > 0 || c.in.end || c.err != nil
}

func (c *Conn) hasRoom() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.out.room()) > 0 || c.err != nil
}

// Write writes b, and waits until all of it is on its way.
//
// Errors: those of Read but io.EOF; EPIPE after CloseWrite, and when the peer has closed the connection.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.writes.Lock()
	defer c.writes.Unlock()
	late := c.wd.wait()
	for {
		switch {
		case c.closed.Load():
			return n, c.opError("write", net.ErrClosed)
		case isClosed(late):
			return n, c.opError("write", os.ErrDeadlineExceeded)
		}
		c.mu.Lock()
		err, room := c.err, c.out.room()
		if c.shut || err != nil && c.in.end {
			err = syscall.EPIPE
		}
		c.mu.Unlock()
		switch {
		case err != nil:
			return n, c.opError("write", err)
		case n == len(b):
			return n, nil
		case len(room) > 0:
			if c.mapping != mapped && c.mapOutput() {
				continue
			}
			if k := copy(room, b[n:]); c.send(k) {
				n += k
			}
			continue
		}
		c.await(&c.writable, late, c.hasRoom)
		late = c.wd.wait()
	}
}

// mapping is whether a peer process on this host can map the memory that this side writes from.
type mapping uint8

const (
	notMapped mapping = iota
	changing          // requests still use the memory before
	mapped            // or it cannot be
)

// mapAfter is after how many bytes the memory changes: a connection that moves little has no use for it, and it takes a
// descriptor and all of its pages.
const mapAfter = 1 << 20

// mapOutput has the ring that this side writes from lie in a memory file, when much has been written. A peer process on this
// host maps it, and takes the bytes by one copy of its own; otherwise the kernel copies, which takes longer. It reports whether
// the ring has changed. The caller holds writes.
func (c *Conn) mapOutput() bool {
	o := &c.out
	c.mu.Lock()
	put, sent, size := o.put, o.sent, len(o.ring)
	c.mu.Unlock()
	if c.mapping == changing {
		if sent >= c.beforeEnd {
			_ = c.before.Close() // Close of the connection closes what cannot be closed now
			c.before, c.mapping = nil, mapped
		}
		return false
	}
	if put < mapAfter {
		return false
	}
	mr, err := c.cm.AllocMR(size, verbs.AccessLocalWrite)
	if err != nil {
		c.mapping = mapped // there is no descriptor left, or no memory: the ring stays where it is
		return false
	}
	c.before, c.beforeEnd, c.memory, c.mapping = c.memory, put, mr, changing
	c.mu.Lock()
	o.ring = mr.Bytes() // what was put before stays where it was posted from
	c.mu.Unlock()
	return true
}

// send posts a message of n bytes, which lie in the ring. If it cannot, the connection has failed.
func (c *Conn) send(n int) bool {
	c.sending.Lock()
	defer c.sending.Unlock()
	o := &c.out
	c.mu.Lock()
	at := o.put & uint64(len(o.ring)-1)
	c.sge[0] = c.memory.SGE(int(at), n)                                                                                              //nolint:gosec // inside the ring
	c.wr[0] = verbs.SendWR{Op: verbs.OpRDMAWriteImm, SGL: c.sge[:], Imm: uint32(n), RemoteAddr: o.peer.at(o.put), RKey: o.peer.rkey} //nolint:gosec // at most maxMessage
	o.put += uint64(n)                                                                                                               //nolint:gosec // positive
	o.messages++
	return c.postLocked(uint64(n), false) //nolint:gosec // positive
}

// tell tells the peer how far this side has read, and whether that was all that it sends. What is told is taken when it is
// posted: it never goes back.
func (c *Conn) tell(end bool) {
	c.sending.Lock()
	defer c.sending.Unlock()
	c.mu.Lock()
	word := control{bytes: c.in.read, messages: c.in.messages, end: end}
	c.in.told = word
	word.put(&c.word)
	c.wr[0] = verbs.SendWR{Op: verbs.OpSend, Inline: c.word[:]}
	if end {
		c.last = c.out.posted + 1
	}
	c.postLocked(0, end)
}

// postLocked posts c.wr. The caller holds sending and mu, and mu is released: a post may make system calls.
// It reports whether it is posted.
func (c *Conn) postLocked(n uint64, always bool) bool {
	o := &c.out
	if o.signal(n, always) {
		c.wr[0].Flags = verbs.SendSignaled
	}
	c.wr[0].ID = o.posted
	c.marks[o.posted%sends] = o.put
	full := o.posted-o.completed > sends
	c.mu.Unlock()
	if full {
		c.fail(syscall.ENOBUFS) // room and the peer's turns leave places for control messages, so that cannot be
		return false
	}
	_, err := c.cm.QP().PostSend(c.wr[:])
	if err != nil {
		c.fail(syscall.ECONNRESET) // the queue pair has failed: completions tell why, if they come first
	}
	return err == nil
}

// idRecv marks the receives; the rest of their ID is which one it is. The IDs of sends are their numbers.
const idRecv = 1 << 63

// poll takes completions, and reports whether there were some. If another goroutine is taking them, poll returns false at once.
func (c *Conn) poll() bool {
	if !c.polling.TryLock() {
		return false
	}
	defer c.polling.Unlock()
	n, err := c.cm.RecvCQ().Poll(c.wcs[:])
	if err != nil {
		c.fail(syscall.ECONNRESET)
		return false
	}
	if n > 0 {
		c.completed(c.wcs[:n])
	}
	return n > 0
}

// completed takes completions. Receives are posted again first: then they are counted, and the peer may be told.
func (c *Conn) completed(wcs []verbs.WC) {
	var words [len(c.wcs)]control
	var valid [len(c.wcs)]bool
	c.again = c.again[:0]
	for i := range wcs {
		w := &wcs[i]
		if w.ID&idRecv == 0 || w.Status != verbs.WCSuccess {
			continue
		}
		k := int(w.ID &^ idRecv) //nolint:gosec // one of receives
		if w.Flags&verbs.WCWithImm == 0 {
			words[i], valid[i] = parseControl(c.controlAt(k), w.ByteLen)
		}
		c.again = append(c.again, c.receive(k))
	}
	if len(c.again) > 0 {
		if _, err := c.cm.QP().PostRecv(c.again); err != nil {
			defer c.fail(syscall.ECONNRESET)
		}
	}
	lies := false
	c.mu.Lock()
	for i := range wcs {
		w := &wcs[i]
		ok := true
		switch {
		case w.Status != verbs.WCSuccess:
			c.failLocked(reason(w.Status))
		case w.ID&idRecv == 0:
			c.out.completed, c.out.sent = w.ID, c.marks[w.ID%sends]
		case w.Flags&verbs.WCWithImm != 0:
			c.moved = true
			ok = w.Imm == w.ByteLen && c.in.arrive(uint64(w.ByteLen))
		default:
			c.moved = true
			ok = valid[i] && !(c.in.end && words[i].end) && c.out.hear(words[i])
			c.in.end = c.in.end || ok && words[i].end
		}
		if !ok {
			c.failLocked(syscall.EPROTO)
			lies = true
		}
	}
	c.mu.Unlock()
	if lies { // it writes no more
		_ = c.cm.QP().Modify(&verbs.QPAttr{State: verbs.QPErr}, verbs.QPMaskState) // fails if it is closed
	}
	c.readable.notify()
	c.writable.notify()
}

// reason is the error of a connection whose request has failed.
func reason(s verbs.WCStatus) error {
	if s == verbs.WCRetryExcErr {
		return syscall.ETIMEDOUT
	}
	return syscall.ECONNRESET
}

// fail ends the connection, unless it has ended.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	c.failLocked(err)
	c.mu.Unlock()
	c.readable.notify()
	c.writable.notify()
}

func (c *Conn) failLocked(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *Conn) controlAt(i int) []byte {
	return c.bytes[i*controlStride:][:controlBytes]
}

// controlStride is what the room for a control message takes.
const controlStride = 32

func (c *Conn) receive(i int) verbs.RecvWR {
	return verbs.RecvWR{ID: idRecv | uint64(i), SGL: []verbs.SGE{c.words.SGE(i*controlStride, controlBytes)}} //nolint:gosec // an index
}

// spin is how long a call polls before it sleeps: some exchanges of short messages, and longer than it takes to wake a peer
// that sleeps. Otherwise two sides that sleep would wake each other, and neither would poll again.
const spin = 50 * time.Microsecond

// mostSkips is how many calls sleep at once, at most, after one that has polled in vain.
const mostSkips = 31

// event is what calls of one kind wait for.
type event struct {
	token chan struct{} // it may have happened, or an end
	vain  int           // calls that sleep at once after the next one that polls in vain; guarded by the calls' lock
	skips int           // calls that still do; likewise
}

func newEvent() event { return event{token: make(chan struct{}, 1)} }

func (e *event) notify() {
	select {
	case e.token <- struct{}{}:
	default:
	}
}

// await polls until something holds, and then sleeps until the event, which Close gives, too. It may return before it holds.
// Who has polled in vain does not poll the next times: the peer is slow, or the processor that polling takes is the one that it
// needs.
func (c *Conn) await(e *event, late <-chan struct{}, holds func() bool) {
	if e.skips == 0 {
		for began := time.Now(); time.Since(began) < spin; runtime.Gosched() {
			if c.poll() && holds() {
				e.vain = 0
				return
			}
		}
		e.vain = min(2*e.vain+1, mostSkips)
		e.skips = e.vain
	} else {
		e.skips--
	}
	select {
	case <-e.token:
	case <-late:
	case <-c.ctx.Done():
	case c.watching <- struct{}{}:
		c.watch(e, late)
		<-c.watching
	}
}

// watch waits for completions and takes them, for all calls that wait. It returns when there were some, or when the call of
// its own goroutine has to look for another reason.
func (c *Conn) watch(e *event, late <-chan struct{}) {
	for {
		if c.cm.RecvCQ().RequestNotify(false) != nil {
			c.fail(syscall.ECONNRESET)
			return
		}
		if c.drain() {
			return
		}
		select {
		case <-c.cm.Channel().Ready():
			if ev, err := c.cm.Channel().Next(past); err == nil {
				ev.Ack()
			}
			if c.drain() {
				return
			}
		case <-e.token:
			return
		case <-late:
			return
		case <-c.ctx.Done():
			return
		}
	}
}

// drain takes all completions, and reports whether there were some.
func (c *Conn) drain() (some bool) {
	for {
		c.polling.Lock()
		n, err := c.cm.RecvCQ().Poll(c.wcs[:])
		if n > 0 {
			c.completed(c.wcs[:n])
		}
		c.polling.Unlock()
		switch {
		case err != nil:
			c.fail(syscall.ECONNRESET)
			return true
		case n == 0:
			return some
		}
		some = true
	}
}

// keepAlive posts a WRITE of no bytes if nothing has come for a while: the peer's device acknowledges it, or it fails.
func (c *Conn) keepAlive() {
	c.sending.Lock()
	defer c.sending.Unlock()
	if c.closed.Load() {
		return
	}
	c.poll()
	c.mu.Lock()
	if c.err != nil || c.closed.Load() { // Close stops the timer with mu held
		c.mu.Unlock()
		return
	}
	c.alive.Reset(c.every)
	if c.moved || c.probe > c.out.completed || c.out.posted-c.out.completed >= sends {
		c.moved = false
		c.mu.Unlock()
		return
	}
	c.probe = c.out.posted + 1
	c.wr[0] = verbs.SendWR{Op: verbs.OpRDMAWrite, RemoteAddr: c.out.peer.addr, RKey: c.out.peer.rkey}
	c.postLocked(0, true)
}

// CloseWrite ends this side's stream: the peer reads what was written, then io.EOF. Read goes on.
//
// Errors: those of Write.
func (c *Conn) CloseWrite() error {
	if c.closed.Load() {
		return c.opError("close", net.ErrClosed)
	}
	c.writes.Lock()
	defer c.writes.Unlock()
	if err := c.finish(); err != nil {
		return c.opError("close", err)
	}
	return nil
}

// finish tells the peer that nothing more comes, once. The caller holds writes.
func (c *Conn) finish() error {
	c.mu.Lock()
	err, done := c.err, c.shut
	c.shut = true
	c.mu.Unlock()
	if err == nil && !done {
		c.tell(true)
	}
	return err
}

// linger is how long Close waits for the peer's device to confirm the last bytes.
const linger = 2 * time.Second

// Close ends the connection. What was written arrives, unless the peer's device does not confirm it within two seconds. Calls
// that wait return net.ErrClosed. It is idempotent.
func (c *Conn) Close() error {
	c.close.Do(func() {
		c.mu.Lock()
		c.closed.Store(true)
		if c.alive != nil {
			c.alive.Stop()
		}
		c.mu.Unlock()
		c.readable.notify()
		c.writable.notify()
		c.rd.set(time.Time{})
		c.wd.set(time.Time{})
		c.writes.Lock() // a Write that is under way returns
		if c.finish() == nil {
			c.flush()
		}
		c.writes.Unlock()
		c.reads.Lock() // and a Read
		c.cancel()
		c.sending.Lock()       // and keepAlive
		c.ended = c.cm.Close() // the region is one that it closes
		c.sending.Unlock()
		c.reads.Unlock()
	})
	return c.ended
}

// flush waits until the peer has been told of the end, or a while. Only Close calls it: there is nobody else to wait.
func (c *Conn) flush() {
	ctx, cancel := context.WithTimeout(c.ctx, linger)
	defer cancel()
	for ctx.Err() == nil {
		c.mu.Lock()
		done := c.err != nil || c.out.completed >= c.last
		c.mu.Unlock()
		if done {
			return
		}
		c.await(&c.writable, ctx.Done(), func() bool { return false })
	}
}
