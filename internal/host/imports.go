package host

// Imported objects: a process imports an object of another process of its user by a handle,
// which the programs pass on, and a number. The two processes exchange messages on a connection
// to the exporter's socket, which stays open for as long as the import lives:
//
//  1. The importer asks for an object (opImport). The reply describes it; for a region a guard
//     comes with it.
//  2. The importer opens the exporter's memory by the process number that the kernel reports
//     for the other end. Random bytes of the guard that it finds there prove that the memory
//     is the exporter's.
//  3. The importer may ask to have the object destroyed (opDestroy).
//  4. The connection ends: the importer gives the import up, or one of the two has died.

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// opDestroy is the operation of a request on such a connection, after opImport. The importer
// waits until the exporter has destroyed the object or has ended, however long that takes.
const (
	opDestroy = "destroy"
	untilGone = time.Duration(1 << 62)
)

// Extent describes a region by addresses of the exporter's process.
type Extent struct {
	Addr   uint64 `json:"addr,omitempty"`
	Length uint64 `json:"length,omitempty"`
	IOVA   uint64 `json:"iova,omitempty"`
	Access uint32 `json:"access,omitempty"`
	Proof  uint64 `json:"proof,omitempty"` // where the guard's random bytes are
}

// Export is the exporter's side of an import.
type Export struct {
	Extent
	Guard   int          // a descriptor, closed once it has been sent; -1: none
	Destroy func() error // destroys the object
	Close   func()       // called when the import has ended
}

// export answers the requests of an importer until the connection ends.
func (p *process) export(c *net.UnixConn, token string, object uint64) {
	x, err := p.cfg.Export(token, object, c)
	if err != nil {
		_ = send(c, refused(err)) // the importer may have gone
		return
	}
	defer x.Close()
	err = send(c, &reply{Extent: &x.Extent}, some(x.Guard)...)
	refuseFD(x.Guard) // a copy has been sent
	for err == nil && p.stays(c) {
		var q request
		fds, bad := receive(c, &q)
		refuseFDs(fds)
		if bad != nil || q.Op != opDestroy {
			return
		}
		r := &reply{}
		if bad = x.Destroy(); bad != nil {
			r = refused(bad)
		}
		err = send(c, r)
	}
}

// stays lets a connection be silent for any time. It reports false if this process leaves the
// device.
func (p *process) stays(c *net.UnixConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.closed && c.SetReadDeadline(time.Time{}) == nil
}

func refused(err error) *reply {
	errno := syscall.EIO
	errors.As(err, &errno)
	return &reply{Errno: errno, Err: err.Error()}
}

// Import is the importer's side of an import.
type Import struct {
	Extent
	PID   int // of the exporter, as the kernel reports it
	Guard int // a descriptor, the caller's to close; -1: none
	c     *net.UnixConn
}

// HungUp reports whether the exporter has ended, or closed the connection.
func (i *Import) HungUp() bool { return sys.HungUp(i.c) }

// FetchObject imports an object by a handle and the object's number.
func FetchObject(handle string, object uint64) (*Import, error) {
	c, token, err := dialHandle(handle, "object")
	if err != nil {
		return nil, err
	}
	who, err := sys.PeerCred(c)
	var r reply
	fd := -1
	if err == nil {
		r, fd, err = ask(c, &request{Op: opImport, Token: token, Object: object})
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	i := &Import{PID: who.PID, Guard: fd, c: c}
	if r.Extent != nil {
		i.Extent = *r.Extent
	}
	return i, nil
}

// Destroy has the exporter destroy the object. If the exporter has ended, its objects are gone,
// and Destroy returns nil.
func (i *Import) Destroy() error {
	fds, err := askWithin(i.c, &request{Op: opDestroy}, &reply{}, untilGone)
	refuseFDs(fds)
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	return err
}

// Close ends the import. It is idempotent.
func (i *Import) Close() error {
	if err := i.c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// dialHandle connects to the process that a handle names, and returns the handle's token. what
// names the kind of object in errors.
func dialHandle(handle, what string) (c *net.UnixConn, token string, err error) {
	name, token, ok := strings.Cut(handle, "#")
	if !ok || name == "" || token == "" || len(handle) > maxMessage/4 {
		return nil, "", refuse(syscall.EINVAL, "%.40q is not the handle of a shared %s", handle, what)
	}
	if c, err = dial(namePrefix + name); err != nil {
		var no *refusal
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			err = refuse(syscall.ENOENT, "the process that shares the %s is gone", what)
		case errors.As(err, &no):
			err = refuse(syscall.EACCES, "the process that shares the %s belongs to another user", what)
		}
		return nil, "", err
	}
	return c, token, nil
}
