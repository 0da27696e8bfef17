package host

// Watching: processes of a device that have connections, whose peers must hear of their death, are
// watched by some of the other processes. A watch is a connection between two processes, on which
// nothing is sent. The kernel closes it when one of them ends, and the other one then looks for dead
// processes (sweep). It also looks now and then, since a forked child may keep the connection open.
//
// A process that has connections asks others to watch it. If there are too few of them, those that
// join later offer it by themselves.

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// watchers is how many processes watch one that has connections, if there are so many: all but one
// of them may be stopped.
const watchers = 3

// lookAfter are the pauses between looks for a dead process.
var lookAfter = [...]time.Duration{
	0, time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond, time.Second,
}

type watch struct {
	mu     sync.Mutex // guards what follows
	wanted bool       // this process has connections
	conns  map[*net.UnixConn]bool
	// watcher is a connection to a process that only watches, nil if there is none: see watcher.go.
	watcher *net.UnixConn
	closed  bool
	looks   bool          // a goroutine of lookLater is under way
	ending  chan struct{} // closed with closed
	wg      sync.WaitGroup
}

// wantWatch has other processes watch this one from now on: when it returns they will notice its end.
func (m *Member) wantWatch() {
	w := &m.watch
	w.mu.Lock()
	if w.wanted || w.closed {
		w.mu.Unlock()
		return
	}
	w.wanted = true
	m.publishWatchLocked()
	w.mu.Unlock()
	// Now, not soon: this process may die as soon as its first message has left. To connect, the other
	// processes need not be awake.
	if m.cfg.Watcher != "" {
		m.callWatcher()
	}
	m.seekWatchers()
}

// publishWatchLocked lets processes that join know whether this one needs watchers.
func (m *Member) publishWatchLocked() {
	n := uint32(0)
	if m.watch.wanted {
		n = 1 + uint32(len(m.watch.conns))
	}
	m.dir.process[m.Slot()].watched.Store(n)
}

// seekWatchers asks processes to watch this one, until there are enough.
func (m *Member) seekWatchers() {
	for i := range m.dir.process {
		if id := m.dir.who((m.Slot() + 1 + i) % MaxProcesses); id != 0 && id != m.self && !m.watchWith(id) {
			return
		}
	}
}

// Watch begins to watch other processes, for which Config.Died is called from now on: those that
// have too few watchers. It also calls it for those that have died before.
func (m *Member) Watch() {
	m.mourn()
	m.lookLater() // a process may have ended just now
	for i := range m.dir.process {
		if id := m.dir.who(i); id != 0 && id != m.self {
			if n := m.dir.process[i].watched.Load(); n > 0 && n <= watchers {
				m.watch.mu.Lock()
				if !m.watch.closed {
					m.watch.wg.Go(func() { m.connectWatch(id) })
				}
				m.watch.mu.Unlock()
			}
		}
	}
}

// watchWith begins a watch with a process, and reports whether this process needs more.
func (m *Member) watchWith(id identity) bool {
	m.watch.mu.Lock()
	enough := m.watch.closed || len(m.watch.conns) >= watchers
	m.watch.mu.Unlock()
	if enough {
		return false
	}
	m.connectWatch(id)
	return true
}

// connectWatch begins a watch with a process.
func (m *Member) connectWatch(id identity) {
	c, err := dial(processName(m.dir.first(), id))
	if err != nil {
		return
	}
	if c.SetWriteDeadline(time.Now().Add(replyTime)) != nil || send(c, &request{Op: opWatch, Protocol: protocol}) != nil {
		_ = c.Close()
		return
	}
	m.watch.mu.Lock()
	closed := m.watch.closed
	if !closed {
		m.watch.wg.Go(func() { m.watched(c) })
	}
	m.watch.mu.Unlock()
	if closed {
		_ = c.Close()
	}
}

// watched waits for the end of a watch, and then looks for dead processes.
func (m *Member) watched(c *net.UnixConn) {
	<-m.settled // others find this process as soon as it has an entry
	w := &m.watch
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		_ = c.Close()
		return
	}
	if w.conns == nil {
		w.conns = make(map[*net.UnixConn]bool)
	}
	w.conns[c] = true
	m.publishWatchLocked()
	w.mu.Unlock()
	m.waitForEnd(c)
	_ = c.Close()
	w.mu.Lock()
	delete(w.conns, c)
	closed, wanted := w.closed, w.wanted
	if !closed {
		m.publishWatchLocked()
	}
	w.mu.Unlock()
	if closed {
		return
	}
	m.lookForDead()
	if wanted {
		m.seekWatchers()
	}
}

// waitForEnd waits until the other process of a watch ends, or leaves the device, and looks for dead
// processes meanwhile.
func (m *Member) waitForEnd(c *net.UnixConn) {
	var b [1]byte
	for {
		if c.SetReadDeadline(time.Now().Add(lookInterval)) != nil {
			return
		}
		if _, err := c.Read(b[:]); !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		select {
		case <-m.watch.ending:
			return
		default:
		}
		m.look()
	}
}

// look frees what dead processes have left, and reports whether there were any.
func (m *Member) look() bool {
	if !m.dir.sweep(m.self) {
		return false
	}
	m.tidy()
	m.mourn()
	return true
}

// lookForDead looks for a dead process. The kernel closes the sockets of a process before it frees the
// lock that shows that the process lives, on some machines 80 ms before: so it looks several times,
// unless it finds one.
func (m *Member) lookForDead() {
	for _, d := range lookAfter {
		select {
		case <-m.watch.ending:
			return
		case <-time.After(d):
		}
		if m.look() {
			return
		}
	}
}

// lookLater makes a goroutine look for dead processes.
func (m *Member) lookLater() {
	w := &m.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.looks {
		return
	}
	w.looks = true
	w.wg.Go(func() {
		m.lookForDead()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.looks = false
	})
}

// endWatch ends all watches.
func (m *Member) endWatch() {
	w := &m.watch
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		close(w.ending)
	}
	for c := range w.conns {
		_ = c.Close() // nothing is lost with it
	}
	if w.watcher != nil {
		_ = w.watcher.Close()
	}
	w.mu.Unlock()
	w.wg.Wait()
}
