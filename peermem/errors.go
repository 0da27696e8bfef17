package peermem

import (
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// named returns an error of a client's operation as that of a registration. A client may return a
// bare errno; an error without one is EIO.
func (u *use) named(what string, err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) || errno == 0 {
		errno = syscall.EIO
	}
	return ib.Errorf(opAttach, errno, "%s of the client %s: %v", what, u.of.client.Name, err)
}
