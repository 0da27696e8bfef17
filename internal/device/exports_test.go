package device

import (
	"net"
	"os"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// The call that ends a lease waits for a process that is accessing the imported region, also
// if its connection is lost: the process lives.
func TestLeaseOutlivesItsConnection(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	e := newEnd(t, d, ib.RC, 64)
	defer e.close()
	region := e.mr.(*MR).region
	name := &net.UnixAddr{Name: "@verbena-lease-" + nextAddr().String(), Net: "unixpacket"}
	listener := must[*net.UnixListener](t)(net.ListenUnix("unixpacket", name))
	c := must[*net.UnixConn](t)(net.DialUnix("unixpacket", nil, name))
	must0(t, listener.Close()) // the connection is broken
	defer func() { must0(t, c.Close()) }()

	g, fd, err := mem.NewGuard()
	must0(t, err)
	user := must[*mem.Guard](t)(mem.OpenGuard(fd))
	must0(t, sys.CloseFD(fd))
	l := &lease{region: region, c: c, pidfd: must[int](t)(sys.OpenPidfd(os.Getpid())), guard: g, uses: 1}
	d.exports.add(l)
	if _, kind := user.Enter(); kind != mem.FaultNone || !sys.HungUp(c) {
		t.Fatal("the importer is not inside, or its connection is not broken")
	}
	done := make(chan struct{})
	go func() {
		d.killed(region, true)
		d.exports.end(l)
		close(done)
	}()
	stillWaits(t, done)
	user.Leave()
	<-done
	if len(d.exports.leases) != 0 {
		t.Error("the lease is still there")
	}
	must0(t, user.Close())
}
