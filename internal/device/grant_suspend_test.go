package device

// Grants and leases that are given at the very moment at which they are taken away (grant.go,
// exports.go).

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// While a call takes the grants of a queue pair away, none is given.
func TestGrantBarred(t *testing.T) {
	a, b := byGrants(t, 4096)
	q := b.qp.(*QP)
	q.barGrants()
	for range 200 {
		a.post(a.write(b, 0, 8))
		a.ok()
	}
	if n := b.grantsOpen(); n != 0 {
		t.Errorf("%d grants were given meanwhile", n)
	}
	q.mu.Lock()
	q.unbarLocked()
	q.mu.Unlock()
	a.warm(b)
}

// A grant to a region that is not open is refused before the peer hears of it: the call that
// closed the region may have looked for grants already.
func TestGrantTooLate(t *testing.T) {
	_, b := byGrants(t, 4096)
	region := b.mr.(*MR).region
	before := grantsOf(b.dev)
	closeAll(t, b.mr)
	if b.dev.grants.add(&grant{region: region}) {
		t.Error("a grant to a region that is closed")
	}
	if n := b.grantsOpen(); n != 0 || grantsOf(b.dev) != before-1 {
		t.Errorf("%d grants, %d are known by their region", n, grantsOf(b.dev))
	}
}

// The call that ends a lease waits for a process that is accessing the imported region, also
// if its connection is lost: the process lives.
func TestLeaseBroken(t *testing.T) {
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
	select {
	case <-done:
		t.Error("the owner has not waited for a process that lives, and is inside")
	case <-time.After(50 * time.Millisecond):
	}
	user.Leave()
	<-done
	if len(d.exports.leases) != 0 {
		t.Error("the lease is still there")
	}
	must0(t, user.Close())
}
