package host

// The door: the listening sockets by whose names newcomers find the device, one for each
// address. All processes of the device have them open, and each one accepts connections. A
// connection that a process has accepted just before it was stopped is given up by the
// newcomer, which then comes again.

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

type door struct {
	dir    *directory
	shelf  *sys.Shelf
	addrs  []netip.Addr
	fds    []int // of the listening sockets, to be passed on
	common []int // of the sockets that all processes read, to be passed on

	listeners []*net.UnixListener
	mu        sync.Mutex // guards conns and closed
	conns     map[*net.UnixConn]bool
	closed    bool
	wg        sync.WaitGroup
}

// listenAll gets the names of all addresses, and returns the sockets' descriptors.
func listenAll(addrs []netip.Addr) ([]int, error) {
	var all []int
	for _, a := range addrs {
		l, err := listen(doorName(a))
		if err == nil {
			var fd int
			if fd, err = sys.DupConn(l); err == nil {
				all = append(all, fd)
			}
			err = errors.Join(err, l.Close())
		}
		if err != nil {
			refuseFDs(all)
			return nil, err
		}
	}
	return all, nil
}

// open makes listeners of the descriptors.
func (d *door) open() error {
	d.conns = make(map[*net.UnixConn]bool)
	for _, fd := range d.fds {
		l, err := listenerOf(fd)
		if err != nil {
			for _, l := range d.listeners {
				_ = l.Close() // nothing is lost with it
			}
			return err
		}
		d.listeners = append(d.listeners, l)
	}
	return nil
}

func listenerOf(fd int) (*net.UnixListener, error) {
	dup, err := sys.DupFD(fd)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(dup), "door")
	defer f.Close() //nolint:errcheck // FileListener has made another descriptor
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(errDirectory, l.Close())
	}
	return u, nil
}

// start begins to serve.
func (d *door) start() {
	for _, l := range d.listeners {
		d.wg.Go(func() { d.serve(l) })
	}
}

func (d *door) serve(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // no descriptors, or no memory: not for ever
			continue
		}
		if !d.enter(c) {
			_ = c.Close()
			continue
		}
		d.wg.Go(func() {
			d.answer(c)
			_ = c.Close()
			d.mu.Lock()
			delete(d.conns, c)
			d.mu.Unlock()
		})
	}
}

// enter registers a connection, and gives it a deadline. It reports false if the door is closed.
func (d *door) enter(c *net.UnixConn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || c.SetDeadline(time.Now().Add(replyTime)) != nil {
		return false
	}
	d.conns[c] = true
	return true
}

// answer answers the one request of a connection.
func (d *door) answer(c *net.UnixConn) {
	err := checkPeer(c)
	var q request
	var fds []int
	if err == nil {
		fds, err = receive(c, &q)
		refuseFDs(fds)
		if err == nil {
			fds, err = d.handle(&q)
		}
	}
	var no *refusal
	switch {
	case err == nil:
		// The newcomer may have gone, or the kernel passes no more descriptors. If the door was closed
		// meanwhile, which ends the send by its deadline, the newcomer hears nothing and knocks again.
		if err := send(c, &reply{}, fds...); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			_ = send(c, refused(err))
		}
	case errors.As(err, &no):
		_ = send(c, &reply{Errno: no.errno, Err: no.text})
	}
}

// handle returns the descriptors that a request asks for, which stay the door's.
func (d *door) handle(q *request) ([]int, error) {
	if q.Protocol != protocol {
		return nil, refuse(syscall.EPROTONOSUPPORT, "the device there speaks protocol %d, this process %d: use one version of Verbena", protocol, q.Protocol)
	}
	switch q.Op {
	case opJoin:
		if !slices.Equal(q.Addrs, d.addrs) {
			return nil, refuse(syscall.EADDRINUSE, "a device with the addresses %v is open there: open the same ones, or others", d.addrs)
		}
		in, out := d.shelf.FDs()
		return slices.Concat([]int{d.dir.fd, in, out}, d.fds, d.common), nil
	case opLook:
		return []int{d.dir.fd}, nil
	}
	return nil, refuse(syscall.EINVAL, "operation %q is unknown", q.Op)
}

// close stops serving. It waits until no descriptor is being passed on. The caller closes fds.
func (d *door) close() {
	for _, l := range d.listeners {
		_ = l.Close() // nothing is lost with it
	}
	d.mu.Lock()
	d.closed = true
	for c := range d.conns {
		_ = c.SetDeadline(time.Unix(1, 0))
	}
	d.mu.Unlock()
	d.wg.Wait()
}
