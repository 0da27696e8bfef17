package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Messages are JSON, one in each packet of a SOCK_SEQPACKET socket: they are few, and readable
// in the output of strace.

const (
	protocol   = 5
	maxMessage = 4 << 10
	namePrefix = "@verbena/"
)

// Operations of a request at the door.
const (
	opJoin = "join" // get the files that the processes of the device share
	opLook = "look" // get the directory
)

// Operations of a request to a process.
const (
	opChannel = "channel" // use the connection for a channel
	opStatus  = "status"  // get what the process is doing
	opMemory  = "memory"  // get a memory file
	opSegment = "segment" // get a part of the process's memory
	opShared  = "shared"  // get a description by which an engine opens memory
	opImport  = "import"  // import an object: see imports.go
	opWatch   = "watch"   // see watch.go
)

type request struct {
	Op       string       `json:"op"`
	Protocol int          `json:"protocol"`
	Addrs    []netip.Addr `json:"addrs,omitempty"` // join: all of the device; channel: the asker's first
	Slot     int          `json:"slot,omitempty"`  // channel: the asker's number in its device
	Token    string       `json:"token,omitempty"` // memory: which; import: of which set of objects
	Brief    bool         `json:"brief,omitempty"` // status: totals, no lists
	Segment  uint64       `json:"segment,omitempty"`
	Write    bool         `json:"write,omitempty"`  // segment: also to write to
	Object   uint64       `json:"object,omitempty"` // import: which
}

type reply struct {
	Errno  syscall.Errno `json:"errno,omitempty"`
	Err    string        `json:"err,omitempty"`
	What   []byte        `json:"what,omitempty"`   // shared: for the opener
	Length uint64        `json:"length,omitempty"` // memory: bytes
	Extent *Extent       `json:"extent,omitempty"` // import
}

// refusal is an error that one side sends to the other, as the receiver has it.
type refusal struct {
	errno syscall.Errno
	text  string
}

func (r *refusal) Error() string { return r.text }
func (r *refusal) Unwrap() error { return r.errno }

func refuse(errno syscall.Errno, format string, args ...any) *refusal {
	return &refusal{errno, fmt.Sprintf(format, args...)}
}

func (r *reply) err() error {
	if r.Errno == 0 && r.Err == "" {
		return nil
	}
	return &refusal{r.Errno, r.Err}
}

// replyTime is how long sending a message, and waiting for the reply, may take.
const replyTime = 5 * time.Second

// doorName and processName return the names of sockets.
func doorName(a netip.Addr) string { return namePrefix + a.String() }

func processName(a netip.Addr, id identity) string { return doorName(a) + processSuffix(id) }

func processSuffix(id identity) string { return fmt.Sprintf("/%d-%09x", id.pid(), id.nonce()) }

func listen(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
}

func dial(name string) (*net.UnixConn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	if err := checkPeer(c); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// checkPeer returns a refusal if the other end is a process of another user.
func checkPeer(c *net.UnixConn) error {
	who, err := sys.PeerCred(c)
	if err != nil {
		return err
	}
	if who.UID != os.Geteuid() {
		return refuse(syscall.EADDRINUSE, "the device there belongs to another user (uid %d): choose another address, any of 127.0.0.0/8 will do on one host", who.UID)
	}
	return nil
}

// send sends a message with descriptors, which stay the caller's.
func send(c *net.UnixConn, v any, fds ...int) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := c.SetWriteDeadline(time.Now().Add(replyTime)); err != nil {
		return err
	}
	return sys.SendFDs(c, b, fds...)
}

// receive takes a message, and the descriptors that came with it.
func receive(c *net.UnixConn, v any) (fds []int, err error) {
	b := make([]byte, maxMessage)
	n, fds, err := sys.RecvFDs(c, b)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		err = net.ErrClosed // the end of the connection
	} else {
		err = json.Unmarshal(b[:n], v)
	}
	if err != nil {
		refuseFDs(fds)
		return nil, err
	}
	return fds, nil
}

// some returns a list of a descriptor, empty if it is -1.
func some(fd int) []int {
	if fd < 0 {
		return nil
	}
	return []int{fd}
}

// refuseFDs closes descriptors that are not wanted.
func refuseFDs(fds []int) {
	for _, fd := range fds {
		refuseFD(fd)
	}
}

// refuseFD closes a descriptor that is not wanted, unless it is -1.
func refuseFD(fd int) {
	if fd >= 0 {
		_ = sys.CloseFD(fd) // it was open: it cannot fail
	}
}

// ask sends a request and receives the reply, with the one descriptor that may come with it; fd
// is -1 if none did.
func ask(c *net.UnixConn, q *request) (r reply, fd int, err error) {
	fds, err := askWithin(c, q, &r, replyTime)
	if err == nil && len(fds) > 1 {
		refuseFDs(fds)
		err = errors.New("more descriptors than were asked for")
	}
	if err != nil || len(fds) == 0 {
		return r, -1, err
	}
	return r, fds[0], nil
}

// askWithin sends a request and receives the reply, and the descriptors that came with it.
func askWithin(c *net.UnixConn, q *request, r *reply, most time.Duration) (fds []int, err error) {
	q.Protocol = protocol
	if err := send(c, q); err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(most)); err != nil {
		return nil, err
	}
	if fds, err = receive(c, r); err != nil {
		return nil, err
	}
	if err = c.SetReadDeadline(time.Time{}); err == nil {
		err = r.err()
	}
	if err != nil {
		refuseFDs(fds)
		return nil, err
	}
	return fds, nil
}

// names lists the sockets with our names that exist in this network namespace.
func names() ([]string, error) {
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	var all []string
	for line := range strings.Lines(string(b)) {
		if i := strings.Index(line, " "+namePrefix); i >= 0 {
			all = append(all, strings.TrimSpace(line[i:]))
		}
	}
	return all, nil
}
