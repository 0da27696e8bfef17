package host

// A process's own socket, where other processes ask for a channel to it, for its status, for
// memory and for objects to import; and how this process asks others.

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

type process struct {
	listener *net.UnixListener
	cfg      *Config
	watched  func(*net.UnixConn)

	mu     sync.Mutex // guards conns and closed
	conns  map[*net.UnixConn]bool
	closed bool

	wg sync.WaitGroup
}

func startProcess(name string, cfg *Config, watched func(*net.UnixConn)) (*process, error) {
	l, err := listen(name)
	if err != nil {
		return nil, err
	}
	p := &process{listener: l, cfg: cfg, watched: watched, conns: make(map[*net.UnixConn]bool)}
	p.wg.Go(p.serve)
	return p, nil
}

func (p *process) serve() {
	for {
		c, err := p.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // no descriptors, or no memory: not for ever
			continue
		}
		p.mu.Lock()
		p.conns[c] = true
		p.mu.Unlock()
		p.wg.Go(func() {
			if !p.answer(c) {
				_ = c.Close()
			}
			p.mu.Lock()
			delete(p.conns, c)
			p.mu.Unlock()
		})
	}
}

// answer serves a connection. It reports whether Config.Channel has taken it over.
func (p *process) answer(c *net.UnixConn) bool {
	if checkPeer(c) != nil || c.SetReadDeadline(time.Now().Add(replyTime)) != nil {
		return false
	}
	var q request
	fds, err := receive(c, &q)
	refuseFDs(fds)
	if err != nil || q.Protocol != protocol || c.SetReadDeadline(time.Time{}) != nil {
		return false
	}
	switch {
	case q.Op == opChannel && p.cfg.Channel != nil && len(q.Addrs) == 1:
		if send(c, &reply{}) != nil {
			return false
		}
		p.cfg.Channel(c, q.Addrs[0], q.Slot)
		return true
	case q.Op == opWatch:
		p.watched(c)
	case q.Op == opMemory && p.cfg.Memory != nil:
		p.passMemory(c, q.Token)
	case q.Op == opSegment && p.cfg.Segment != nil:
		p.passSegment(c, q.Segment, q.Write)
	case q.Op == opShared && p.cfg.Shared != nil:
		p.passShared(c, q.Segment)
	case q.Op == opImport && p.cfg.Export != nil:
		p.export(c, q.Token, q.Object)
	case q.Op == opStatus && p.cfg.Status != nil:
		if b, err := json.Marshal(p.cfg.Status(q.Brief)); err == nil {
			_ = sendLong(c, b) // the process that asked may have gone
		}
	}
	return false
}

// passSegment sends a descriptor of a part of this process's memory to a process of the same
// user.
func (p *process) passSegment(c *net.UnixConn, id uint64, write bool) {
	fd, err := p.cfg.Segment(id, write)
	if err != nil {
		_ = send(c, &reply{Errno: syscall.ENOENT, Err: err.Error()}) // the asker may have gone
		return
	}
	_ = send(c, &reply{}, fd) // likewise
	_ = sys.CloseFD(fd)       // it was open: it cannot fail
}

// Segment gets a descriptor of a part of another process's memory, to read from or
// also to write to.
func (m *Member) Segment(process int, id uint64, write bool) (fd int, err error) {
	return m.dir.askSegment(process, id, write)
}

// Segment gets a descriptor of a part of a process's memory.
func (d *Directory) Segment(process int, id uint64, write bool) (fd int, err error) {
	return d.dir.askSegment(process, id, write)
}

func (d *directory) askSegment(process int, id uint64, write bool) (int, error) {
	_, fd, err := d.askProcess(process, &request{Op: opSegment, Segment: id, Write: write})
	if err == nil && fd < 0 {
		err = errors.New("a segment without a descriptor")
	}
	return fd, err
}

// askProcess sends a request to a process of the device and receives the reply.
func (d *directory) askProcess(process int, q *request) (r reply, fd int, err error) {
	id := d.who(process)
	if id == 0 {
		return r, -1, syscall.ESRCH
	}
	c, err := dial(processName(d.first(), id))
	if err != nil {
		return r, -1, err
	}
	defer c.Close() //nolint:errcheck // nothing is lost with it
	return ask(c, q)
}

// passShared sends a process of the same user the description by which it opens memory.
func (p *process) passShared(c *net.UnixConn, id uint64) {
	what, fd, err := p.cfg.Shared(id)
	if err != nil {
		_ = send(c, &reply{Errno: syscall.ENOENT, Err: err.Error()}) // the asker may have gone
		return
	}
	_ = send(c, &reply{What: what}, some(fd)...) // likewise
	refuseFD(fd)
}

// Shared gets the description by which this process opens a part of another process's memory,
// and a descriptor, -1 if there is none: see Config.Shared.
func (m *Member) Shared(process int, id uint64) (what []byte, fd int, err error) {
	r, fd, err := m.dir.askProcess(process, &request{Op: opShared, Segment: id})
	return r.What, fd, err
}

// Shared is Member.Shared for a process of the directory.
func (d *Directory) Shared(process int, id uint64) (what []byte, fd int, err error) {
	r, fd, err := d.dir.askProcess(process, &request{Op: opShared, Segment: id})
	return r.What, fd, err
}

// sendLong sends bytes that may be more than a packet holds. The end of the connection marks
// their end.
func sendLong(c *net.UnixConn, b []byte) error {
	for len(b) > 0 {
		n := min(len(b), maxMessage)
		if err := c.SetWriteDeadline(time.Now().Add(replyTime)); err != nil {
			return err
		}
		if _, err := c.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func receiveLong(c *net.UnixConn, deadline time.Time) ([]byte, error) {
	var all []byte
	b := make([]byte, maxMessage)
	if err := c.SetReadDeadline(deadline); err != nil {
		return nil, err
	}
	for {
		n, err := c.Read(b)
		all = append(all, b[:n]...)
		if errors.Is(err, io.EOF) || err == nil && n == 0 {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (p *process) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.SetReadDeadline(time.Unix(1, 0)) // answer stops waiting for the next request
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// Directory is the directory of another device, as this member sees it.
type Directory struct {
	dir *directory
	me  *Member
}

// Look finds the device at an address of this host, if a process of this user
// has one open. It fails with ECONNREFUSED if there is none.
func (m *Member) Look(a netip.Addr) (*Directory, error) {
	dir, err := look(a)
	if err != nil {
		return nil, err
	}
	return &Directory{dir, m}, nil
}

func look(a netip.Addr) (*directory, error) { return lookWithin(a, replyTime) }

// lookWithin gets the directory of the device at an address. A process that has accepted the
// connection may be stopped, so it asks again, each time with more patience.
func lookWithin(a netip.Addr, most time.Duration) (*directory, error) {
	fds, err := askDoor(a, &request{Op: opLook}, time.Now().Add(most))
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		refuseFDs(fds)
		return nil, errDirectory
	}
	return openDirectory(fds[0])
}

// askDoor sends a request to whichever process of a device answers first.
func askDoor(a netip.Addr, q *request, deadline time.Time) (fds []int, err error) {
	for patience := firstPatience; ; patience = min(2*patience, replyTime) {
		c, err := dial(doorName(a))
		if err != nil {
			return nil, err
		}
		var r reply
		fds, err = askWithin(c, q, &r, max(min(patience, time.Until(deadline)), retry))
		_ = c.Close() // nothing is lost with it
		var no *refusal
		if err == nil || errors.As(err, &no) || errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || time.Now().After(deadline) {
			return fds, err
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			time.Sleep(retry) // the process at the other end is leaving
		}
	}
}

// firstPatience is how long a process waits at first for an answer at a door.
const firstPatience = 100 * time.Millisecond

// Find returns the process that a queue pair belongs to.
func (d *Directory) Find(qpn uint32) (process int, ok bool) { return d.dir.findQP(qpn) }

// ByPackets reports whether a process wants to be reached by packets alone.
func (d *Directory) ByPackets(process int) bool { return d.dir.byPackets(process) }

// Gone is called when the channel to a process has ended. The processes of that device free its
// entry.
func (d *Directory) Gone(int) {}

// Alive reports whether any process has the device open.
func (d *Directory) Alive() bool {
	for i := range d.dir.process {
		if id := identity(d.dir.ids[i].Load()); id != 0 && d.dir.alive(id) {
			return true
		}
	}
	return false
}

// Dial opens a connection to a process.
func (d *Directory) Dial(process int) (*net.UnixConn, error) {
	return d.me.dial(d.dir, process)
}

// ID returns the device's identity: see Member.ID.
func (d *Directory) ID() [2]uint64 { return d.dir.id }

// Close unmaps the directory. No goroutine may use it any more.
func (d *Directory) Close() error { return d.dir.close() }
