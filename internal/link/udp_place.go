package link

// How a receiver gets sockets where several processes, or several receivers of one, share the
// addresses: the kernel chooses a socket by the place that is in the destination queue pair's
// number (sys.Place).

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Listen opens receiving sockets, one for each address, whose places in the kernel's group are
// the same: packets to queue pairs that have this place in their numbers reach this receiver. It
// returns the place. Before a socket is bound, Listen calls hold with the index of its address.
// orphans are descriptors of sockets that a dead process has had bound, by address, which Listen
// takes over and uses instead of new ones, if their places are the same; -1: none of this address;
// nil: none at all.
// hint is the place if it cannot be found out, because packets of this host to its own address
// do not arrive, as where the loopback interface is down. Only a link with a Router needs
// Listen.
func (r *UDPReceiver) Listen(hint int, orphans []int, hold func(addr, fd int) error) (place int, err error) {
	u := r.u
	socks := u.adopt(orphans)
	at := make([]int, len(u.ends))
	fail := func(err error) (int, error) {
		closeSockets(socks)
		return 0, err
	}
	bind := func(i int) (err error) {
		socks[i], err = u.bind(u.ends[i].addr, func(fd int) error { return hold(i, fd) })
		return err
	}
	findPlace := func(i int) {
		at[i] = hint
		if p, err := socks[i].FindPlace(sys.CommonPlace+1, rand.Uint64()); err == nil {
			at[i] = int(p)
		}
		place = max(place, at[i])
	}
	for i := range u.ends {
		if socks[i] == nil {
			if err := bind(i); err != nil {
				return fail(err)
			}
		}
		findPlace(i)
	}
	// A process that was killed between two of its binds has left one group a socket longer.
	for i := range u.ends {
		for tries := 0; at[i] < place; tries++ {
			_ = socks[i].Close() // hold keeps it open
			if err := bind(i); err != nil {
				return fail(err)
			}
			findPlace(i)
			if tries == sys.NumPlaces {
				return fail(ib.Errorf("open_device", syscall.EADDRINUSE, "the sockets of %v get no place", u.ends[i].addr))
			}
		}
	}
	if slices.Min(at) != place {
		return fail(ib.Errorf("open_device", syscall.EAGAIN, "other processes open the device at the same time"))
	}
	return place, r.listen(socks)
}

// adopt returns the sockets of descriptors, which it takes over: nil for an address of which there
// is none, or none that is bound to it.
func (u *UDP) adopt(orphans []int) []*sys.UDPSocket {
	socks := make([]*sys.UDPSocket, len(u.ends))
	for i, fd := range orphans {
		if fd < 0 {
			continue
		}
		var err error
		if socks[i], err = sys.AdoptUDP(fd, netip.AddrPortFrom(u.ends[i].addr, wire.RoCEPort)); err != nil {
			_ = sys.CloseFD(fd) // it was open: it cannot fail
		}
	}
	return socks
}

// Adopt is Listen with sockets that another process has opened, one for each address. It takes
// the descriptors over.
func (r *UDPReceiver) Adopt(fds []int) error {
	var socks []*sys.UDPSocket
	for i, e := range r.u.ends {
		rx, err := sys.AdoptUDP(fds[i], netip.AddrPortFrom(e.addr, wire.RoCEPort))
		if err != nil {
			closeSockets(socks)
			for _, fd := range fds[i:] {
				_ = sys.CloseFD(fd) // the first error says more
			}
			return err
		}
		socks = append(socks, rx)
	}
	return r.listen(socks)
}

// OpenCommon opens sockets that all processes of the device read, one for each address
// (sys.CommonPlace). No other socket of the port may be open yet. The descriptors are the caller's.
func (u *UDP) OpenCommon() (fds []int, err error) {
	fail := func(err error) ([]int, error) {
		for _, fd := range fds {
			_ = sys.CloseFD(fd) // the first error says more
		}
		return nil, err
	}
	for _, e := range u.ends {
		s, err := u.bind(e.addr, func(int) error { return nil })
		if err != nil {
			return fail(err)
		}
		place, err := s.FindPlace(sys.CommonPlace, rand.Uint64())
		fds = append(fds, s.Detach())
		if err == nil && place != sys.CommonPlace {
			return fail(ib.Errorf("open_device", syscall.EADDRINUSE, "another program shares UDP port %d of %v", wire.RoCEPort, e.addr))
		}
	}
	return fds, nil
}

// NewCommonReceiver returns a receiver that reads sockets of OpenCommon, which may be another
// process's. The descriptors stay the caller's.
func (u *UDP) NewCommonReceiver(fds []int) (*UDPReceiver, error) {
	if len(fds) != len(u.ends) {
		return nil, ib.Errorf("open_device", syscall.EINVAL, "%d sockets for %d addresses", len(fds), len(u.ends))
	}
	r, err := u.addReceiver(1) // management is rare
	if err != nil {
		return nil, err
	}
	var socks []*sys.UDPSocket
	for i, fd := range fds {
		var s *sys.UDPSocket
		if fd, err = sys.DupFD(fd); err == nil {
			if s, err = sys.ShareUDP(fd, netip.AddrPortFrom(u.ends[i].addr, wire.RoCEPort)); err != nil {
				_ = sys.CloseFD(fd) // the first error says more
			}
		}
		if err != nil {
			closeSockets(socks)
			return nil, err
		}
		socks = append(socks, s)
	}
	return r, r.listen(socks)
}

// listen makes Poll read sockets, one for each address.
func (r *UDPReceiver) listen(socks []*sys.UDPSocket) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := ErrClosed
	if !r.closed {
		err = nil
		for _, s := range socks {
			if r.headers {
				err = errors.Join(err, s.RecvHeader())
			}
		}
	}
	if err != nil {
		closeSockets(socks)
		return err
	}
	for i, e := range r.u.ends {
		r.socks = append(r.socks, rxSocket{addr: e.addr, sock: socks[i], want: 1})
	}
	r.poller.Add(socks)
	return nil
}

func closeSockets(socks []*sys.UDPSocket) {
	for _, s := range socks {
		if s != nil {
			_ = s.Close() // the first error says more
		}
	}
}
