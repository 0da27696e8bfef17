package device

// Serving as a watcher: what a process does that "verbena exec" leaves beside a program.

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"os"

	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// ServeWatcher watches the processes that ask for it by the listener, and tells the peers of those
// that die. It returns when ended is closed and none of them is left.
func ServeWatcher(l *net.UnixListener, ended <-chan struct{}) error {
	return host.ServeWatcher(l, ended, sayLastWords)
}

// AwaitExit waits until the process of a pidfd has ended. Reads of the file must not block.
func AwaitExit(pidfd *os.File) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	// The poller reports an end once, and Read forgets a report that came before it.
	return raw.Read(func(fd uintptr) bool { return sys.Exited(int(fd)) })
}

// watcherName returns the name of the watcher's socket, which "verbena exec" sets; "" if there is none.
func watcherName() string {
	if name := Getenv("VERBENA_WATCHER"); name != "off" {
		return name
	}
	return ""
}

func sayLastWords(addrs []netip.Addr, words []host.LastWords) {
	if len(words) == 0 {
		return
	}
	udp, err := link.OpenUDP(&link.UDPConfig{Addrs: addrs, Router: deaf{}})
	if err != nil {
		return // the addresses have gone
	}
	defer func() { _ = udp.Close() }()
	s := madSender{psn: rand.Uint32()}
	send := func(d *provider.MAD) error { return s.send(udp, d, wire.ManagementQP) }
	all := lastMADs(addrs, words)
	sayLast(all, send)
	repeatLast(all, send, nil)
}

// deaf routes packets to no process: the watcher receives none.
type deaf struct{}

func (deaf) Route(uint32) (int, bool)   { return 0, true }
func (deaf) Forward(int, *link.Packets) {}
