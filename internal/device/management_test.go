package device

import (
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// withoutDescriptors calls f while the process can open no more descriptors.
func withoutDescriptors(t *testing.T, f func()) {
	t.Helper()
	var limit syscall.Rlimit
	must0(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	must0(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: limit.Max}))
	defer func() { must0(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)) }()
	f()
}

// Reach fails with EMFILE if there is no descriptor left. If it has succeeded, messages to all places
// of the peer are sent without a further descriptor, and come to it.
func TestManagementWithoutDescriptors(t *testing.T) {
	a, b := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	from, to := a.addrs[0], b.addrs[0]
	var got atomic.Int32
	b.Management().Handle(func(netip.Addr, netip.Addr, []byte) { got.Add(1) })
	withoutDescriptors(t, func() {
		wantErrno(t, "Reach", a.Management().Reach(from, to), syscall.EMFILE)
	})
	must0(t, a.Management().Reach(from, to))
	send := func(id uint32) error {
		all := lastMADs(a.addrs, []host.LastWords{{State: uint8(cm.Established), Peer: to, Local: 1, Remote: id, QPN: 3}})
		return a.Management().Send(&all[0])
	}
	withoutDescriptors(t, func() {
		for place := range uint32(16) {
			if err := send(place<<24 | 7); err != nil {
				t.Errorf("to place %d: %v", place, err)
			}
		}
		before := got.Load()
		must0(t, send(b.Management().NewCommID()))
		eventually(t, "a message to the place of the peer", func() bool { return got.Load() > before })
	})
}
