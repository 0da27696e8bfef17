package host

// Memory files that a process shares with other processes of its user, by a handle that the
// programs pass on themselves. The handle names the process's socket and, by a token that
// cannot be guessed, the memory.

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// NewToken returns a new random token.
func NewToken() string {
	var b [16]byte
	rand.Read(b[:]) // never fails: it ends the program instead
	return hex.EncodeToString(b[:])
}

// Handle returns the handle by which other processes get what this process shares under a token
// (FetchMemory, FetchObject).
func (m *Member) Handle(token string) string {
	return strings.TrimPrefix(m.proc.listener.Addr().String(), namePrefix) + "#" + token
}

// FetchMemory gets the memory file that a handle stands for. The caller closes the descriptor.
func FetchMemory(handle string) (fd int, length uint64, err error) {
	c, token, err := dialHandle(handle, "region")
	if err != nil {
		return -1, 0, err
	}
	defer c.Close() //nolint:errcheck // nothing is lost with it
	r, fd, err := ask(c, &request{Op: opMemory, Token: token})
	if err != nil {
		return -1, 0, err
	}
	if fd < 0 {
		return -1, 0, fmt.Errorf("no memory came: %w", syscall.EPROTO)
	}
	return fd, r.Length, nil
}

// passMemory sends a memory file to a process that has its token.
func (p *process) passMemory(c *net.UnixConn, token string) {
	fd, length, err := p.cfg.Memory(token)
	if err != nil {
		_ = send(c, refused(err)) // the process that asked may have gone
		return
	}
	_ = send(c, &reply{Length: length}, fd)
	_ = sys.CloseFD(fd) // a copy has been sent
}
