package host

// The watcher: a process beside a program that "verbena exec" has started. Other processes of the
// device say the last words of one that dies (watch.go); the watcher says those of the last one.
//
// A process that has connections sends the watcher its directory, on a connection that the kernel
// closes when the process ends.

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// callWatcher has the watcher watch this process.
func (m *Member) callWatcher() {
	c, err := dial(m.cfg.Watcher)
	if err != nil {
		return // nobody started one, or it belongs to another user
	}
	if send(c, &request{Op: opWatch, Protocol: protocol, Addrs: m.cfg.Addrs}, m.dir.fd) != nil {
		_ = c.Close() // the watcher has ended
		return
	}
	m.watch.mu.Lock()
	defer m.watch.mu.Unlock()
	if m.watch.closed {
		_ = c.Close()
		return
	}
	m.watch.watcher = c
}

// ServeWatcher watches the processes that ask for it, until ended is closed and none is left. died is
// called with the last words of those that have died, and the addresses of their device. The
// listener is closed.
func ServeWatcher(l *net.UnixListener, ended <-chan struct{}, died func(addrs []netip.Addr, words []LastWords)) error {
	calls, done, stop := make(chan *net.UnixConn), make(chan struct{}), make(chan struct{})
	var last error
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(calls)
		last = acceptAll(l, calls, stop)
	})
	asked := false // acceptAll is to hand over what waits, and then nil
	for watching, left := 0, false; !left; {
		select {
		case c, ok := <-calls:
			switch {
			case !ok: // no more will come
				calls, ended = nil, nil
			case c == nil:
				asked = false
				left = watching == 0
			default:
				watching++
				wg.Go(func() { watchOver(c, died); done <- struct{}{} })
			}
		case <-done:
			watching--
		case <-ended:
			ended = nil
		}
		switch {
		case ended != nil || watching > 0 || asked:
		case calls == nil:
			left = true
		case !left:
			// A process that died at once has called, and its call may wait to be accepted.
			asked = true
			_ = l.SetDeadline(time.Unix(1, 0)) // fails if it is closed, and then calls is closed, too
		}
	}
	close(stop)
	err := l.Close()
	wg.Wait()
	return errors.Join(last, err)
}

// acceptAll accepts connections until the listener or stop is closed. When the listener's deadline is
// over it hands over those that wait, and then nil.
func acceptAll(l *net.UnixListener, calls chan<- *net.UnixConn, stop <-chan struct{}) error {
	hand := func(c *net.UnixConn) {
		select {
		case calls <- c:
		case <-stop:
			if c != nil {
				_ = c.Close()
			}
		}
	}
	draining := false
	for {
		if draining && !sys.CanAccept(l) {
			draining = false
			hand(nil)
		}
		c, err := l.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := l.SetDeadline(time.Time{}); err != nil {
				return nil // it is closed
			}
			draining = true
		case err != nil && !isTemporary(err):
			return err
		case err != nil:
			time.Sleep(retry) // too few descriptors
		default:
			hand(c)
		}
	}
}

// isTemporary reports whether another Accept may succeed.
func isTemporary(err error) bool {
	var e *net.OpError
	return errors.As(err, &e) && e.Temporary()
}

// lookInterval is how often those that watch a process look for dead ones: a child that the process has
// forked may keep the connection open.
const lookInterval = time.Second

// watchOver waits for the end of a process.
func watchOver(c *net.UnixConn, died func([]netip.Addr, []LastWords)) {
	defer func() { _ = c.Close() }()
	if checkPeer(c) != nil || c.SetReadDeadline(time.Now().Add(replyTime)) != nil {
		return
	}
	var q request
	fds, err := receive(c, &q)
	if err != nil {
		return
	}
	if len(fds) != 1 || q.Op != opWatch || q.Protocol != protocol || len(q.Addrs) == 0 {
		refuseFDs(fds)
		return
	}
	d, err := openDirectory(fds[0])
	if err != nil {
		return
	}
	defer func() { _ = d.close() }()
	for {
		if c.SetReadDeadline(time.Now().Add(lookInterval)) != nil {
			return
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			break // the process has ended, or leaves the device
		}
		if words, found := d.lastWords(); found {
			died(q.Addrs, words)
		}
	}
	for _, pause := range lookAfter {
		time.Sleep(pause)
		if words, found := d.lastWords(); found {
			died(q.Addrs, words)
			return
		}
	}
}

// lastWords returns the last words of all processes that have died, unless another process says them.
// It has an entry meanwhile, so that nobody takes what it has taken.
func (d *directory) lastWords() (words []LastWords, found bool) {
	var dead []identity
	for c := range d.chunkHolder {
		if id := identity(d.chunkHolder[c].Load()); id != 0 && !d.alive(id) {
			dead = append(dead, id)
		}
	}
	if len(dead) == 0 {
		return nil, false
	}
	for i := range d.process {
		if d.process[i].isBinding() {
			continue // a newcomer finds the sockets of a dead process by it
		}
		id, life, err := d.claimEntry(i, os.Getpid(), random())
		if err != nil {
			return nil, false
		}
		if life == nil {
			continue
		}
		for _, id := range dead {
			d.release(id)
		}
		d.mourn(id, func(w []LastWords) { words = append(words, w...) })
		d.release(id)
		life.Unlock()
		return words, true
	}
	return nil, false
}
