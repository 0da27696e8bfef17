package host

// Memory files that a process shares with others of its user: by a handle, which
// the programs pass on themselves. It names the process's socket and, by a token
// that cannot be guessed, the memory.

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// NewToken makes a token.
func NewToken() string {
	var b [16]byte
	rand.Read(b[:]) // never fails: it ends the program instead
	return hex.EncodeToString(b[:])
}

// Handle returns what other processes get the memory with a token by.
func (m *Member) Handle(token string) string {
	return strings.TrimPrefix(m.proc.listener.Addr().String(), namePrefix) + "#" + token
}

// FetchMemory gets the memory file that a handle stands for. The descriptor is the
// caller's.
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

// passMemory answers one who has a token.
func (p *process) passMemory(c *net.UnixConn, token string) {
	fd, length, err := p.cfg.Memory(token)
	if err != nil {
		_ = send(c, refused(err), -1) // who asked may have gone
		return
	}
	_ = send(c, &reply{Length: length}, fd)
	_ = sys.CloseFD(fd) // a copy has been sent
}
