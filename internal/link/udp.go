package link

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// The udp link: RoCE v2 to any peer, from ordinary sockets.
//
//  1. OpenUDP binds one receiving socket for each local address to port 4791,
//     the only port that RoCE v2 fixes. Where several processes share the
//     addresses, Listen binds them (udp_place.go): each process has sockets of its
//     own, or several sets of them, each with a receiver, and the kernel chooses
//     one by the destination queue pair (sys.Place). Packets that come to another
//     process all the same are passed on (Router), and taken in (Inject).
//  2. Prepare gives a flow one of a few sending sockets of its address, on random
//     ports: routers spread flows by the source port.
//  3. Send (udp_send.go) and Poll (udp_recv.go) move the packets. Each multicast
//     group is received by sockets of its own (udp_group.go).
//  4. Close wakes Wait, waits until no Send, Poll or Wait is under way, and closes
//     the sockets.

// UDPConfig says what to open.
type UDPConfig struct {
	// Addrs are the local addresses to be reached at: at least one.
	Addrs []netip.Addr
	// Tap, if set, is shown every packet.
	Tap Tap
	// NoGSO and NoGRO turn the kernel's offloads for long trains off.
	NoGSO, NoGRO bool
	// RecvBuffers is how many datagrams, of up to 64 KiB each, one system call
	// takes; 0 means 8.
	RecvBuffers int
	// Router is set where several processes share the addresses. Then the sockets
	// receive nothing before Listen.
	Router Router
	// Event, if set, ends Wait.
	Event *sys.Event
	// NearGroups keeps what is sent to multicast groups on this host.
	NearGroups bool
	// SocketBuffer is how large a socket's buffers should be, in bytes; 0 means
	// 4 MiB. The kernel grants at most net.core.rmem_max and wmem_max.
	SocketBuffer int
}

// Tap is shown packets: those sent, and those received whose ICRC was right.
type Tap interface {
	// Packet takes a packet's UDP payload, from the BTH through the ICRC, which
	// is valid during the call, and what the IP and UDP headers held. Several
	// goroutines may call it at once.
	Packet(ts time.Time, src, dst netip.AddrPort, tclass, hopLimit uint8, id uint16, udpPayload []byte)
}

// Router routes packets to the processes that share the addresses of a link.
type Router interface {
	// Route returns the process that a queue pair belongs to. here is true if
	// that is this process, or no process has the queue pair.
	Route(qpn uint32) (process int, here bool)
	// Forward passes packets on to another process. They are valid during the
	// call. Packets that cannot be passed on are lost.
	Forward(process int, p *Packets)
}

// Packets are UDP payloads that came together: all of Segment bytes, but for a
// shorter last one.
type Packets struct {
	From     netip.AddrPort
	To       netip.Addr
	TClass   uint8
	HopLimit uint8
	ID       uint16 // the IPv4 identification to try first for the first packet
	Segment  int
	Bytes    []byte
}

// ErrClosed is returned by a link that was closed.
var ErrClosed = fmt.Errorf("link: %w", net.ErrClosed)

const (
	defaultRecvBuffers  = 8
	defaultSocketBuffer = 4 << 20

	// txSockets is how many source ports the flows of one address spread over. Threads that
	// send by one socket at the same time hinder each other.
	txSockets = 16
	// There are as many again of class wire.ECT0, so that the usual flows need not name their class with
	// every message, and one that sends to groups.
	ectSockets   = txSockets
	groupSocket  = 2 * txSockets
	numTxSockets = groupSocket + 1
	// Source ports: the dynamic range, as IBA A17.3.2 and RFC 6335 advise.
	firstSrcPort = 0xc000
	lastSrcPort  = 0xffff
)

// UDP is a link over UDP sockets.
type UDP struct {
	cfg    UDPConfig
	ends   []*udpEnd // one for each address
	mtu    int
	rcvBuf int // the smallest receive buffer, as the kernel counts

	gso atomic.Bool // off for good when the kernel has refused it once
	gro bool

	txPackets atomic.Uint64
	txLost    atomic.Uint64
	txErrno   atomic.Uint32

	recv *UDPReceiver // the first receiver

	first  atomic.Pointer[sender] // the sender that is tried first; nil while it is in use
	closed atomic.Bool            // changed under mu

	mu      sync.Mutex // guards the fields below and the ends' sending sockets
	idle    []*sender
	busy    int        // senders in use besides the first
	allIdle *sync.Cond // signalled when a sender was released
	more    []*UDPReceiver
	headers bool // WantHeaders was called
}

// udpEnd is one local address.
type udpEnd struct {
	addr netip.Addr
	tx   [numTxSockets]*sys.UDPSocket // opened when first needed; guarded by UDP.mu
}

// OpenUDP opens the link.
func OpenUDP(cfg *UDPConfig) (*UDP, error) {
	u := &UDP{cfg: *cfg}
	u.cfg.Addrs = slices.Clone(cfg.Addrs)
	u.allIdle = sync.NewCond(&u.mu)
	if u.cfg.RecvBuffers <= 0 {
		u.cfg.RecvBuffers = defaultRecvBuffers
	}
	if u.cfg.SocketBuffer <= 0 {
		u.cfg.SocketBuffer = defaultSocketBuffer
	}
	if err := u.open(); err != nil {
		return nil, err
	}
	s := newSender(u)
	s.first = true
	u.first.Store(s)
	return u, nil
}

func (u *UDP) open() error {
	if len(u.cfg.Addrs) == 0 {
		return ib.Errorf("open_device", syscall.EINVAL, "no local address given")
	}
	for i, a := range u.cfg.Addrs {
		u.cfg.Addrs[i] = a.Unmap()
		if slices.Contains(u.cfg.Addrs[:i], u.cfg.Addrs[i]) {
			return ib.Errorf("open_device", syscall.EINVAL, "local address %v given twice", a)
		}
	}
	gso, gro := true, true
	var socks []rxSocket
	open := u.openEnd
	if u.cfg.Router != nil {
		open = u.probeEnd
	}
	fail := func(err error) error {
		for _, s := range socks {
			_ = s.sock.Close() // the first error says more
		}
		return err
	}
	for i, a := range u.cfg.Addrs {
		rx, mtu, err := open(a)
		if err != nil {
			return fail(err)
		}
		gso, gro = gso && rx.GSO(), gro && rx.GRO()
		if i == 0 || mtu < u.mtu {
			u.mtu = mtu
		}
		if i == 0 || rx.RcvBuf() < u.rcvBuf {
			u.rcvBuf = rx.RcvBuf()
		}
		if u.cfg.Router != nil {
			_ = rx.Close() // it was only probed
		} else {
			socks = append(socks, rxSocket{addr: a, sock: rx, want: 1})
		}
		u.ends = append(u.ends, &udpEnd{addr: a})
	}
	u.gso.Store(gso && !u.cfg.NoGSO)
	u.gro = gro && !u.cfg.NoGRO
	var err error
	var events []*sys.Event
	if u.cfg.Event != nil {
		events = append(events, u.cfg.Event)
	}
	if u.recv, err = u.newReceiver(u.cfg.RecvBuffers, socks, events...); err != nil {
		return fail(err)
	}
	return nil
}

// openEnd opens the receiving socket of an address, and returns the largest payload of
// the address's packets.
func (u *UDP) openEnd(a netip.Addr) (*sys.UDPSocket, int, error) {
	mtu, err := endMTU(a)
	if err != nil {
		return nil, 0, err
	}
	rx, err := u.bind(a, nil)
	return rx, mtu, err
}

// probeEnd opens a socket on any port, to find out the buffer size and offloads that the
// receiving socket will have.
func (u *UDP) probeEnd(a netip.Addr) (*sys.UDPSocket, int, error) {
	mtu, err := endMTU(a)
	if err != nil {
		return nil, 0, err
	}
	s, err := sys.OpenUDP(netip.AddrPortFrom(a, 0), u.rxOptions())
	if err != nil {
		return nil, 0, fmt.Errorf("open_device: UDP socket on %v: %w", a, err)
	}
	return s, mtu, nil
}

// endMTU checks an address, and returns the largest payload of its packets.
func endMTU(a netip.Addr) (int, error) {
	if err := checkAddr(a); err != nil {
		return 0, ib.Errorf("open_device", syscall.EINVAL, "local address: %v", err)
	}
	name, netMTU, err := sys.Interface(a)
	if err != nil {
		errno := syscall.EADDRNOTAVAIL
		errors.As(err, &errno) // for example, that no descriptor is free
		return 0, ib.Errorf("open_device", errno, "no network interface is found that has the address %v", a)
	}
	mtu := PathMTU(netMTU, a.Is6())
	if mtu == 0 {
		return 0, ib.Errorf("open_device", syscall.EMSGSIZE,
			"interface %s of address %v has an MTU of %d bytes, too small for a packet of 256", name, a, netMTU)
	}
	return mtu, nil
}

func (u *UDP) rxOptions() sys.UDPOptions {
	return sys.UDPOptions{RcvBuf: u.cfg.SocketBuffer, SndBuf: u.cfg.SocketBuffer, GRO: !u.cfg.NoGRO, WantTClass: true}
}

// bind opens a receiving socket of an address; with held, one that others may share the port
// with: see sys.UDPOptions.
func (u *UDP) bind(a netip.Addr, held func(fd int) error) (*sys.UDPSocket, error) {
	o := u.rxOptions()
	o.Held = held
	rx, err := sys.OpenUDP(netip.AddrPortFrom(a, wire.RoCEPort), o)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, ib.Errorf("open_device", syscall.EADDRINUSE,
			"UDP port %d of address %v is taken: another process, or the kernel's own soft-RoCE driver, "+
				"receives RoCE there; stop it or choose another address (on one host, any of 127.0.0.0/8 will do)",
			wire.RoCEPort, a)
	case err != nil:
		return nil, fmt.Errorf("open_device: UDP socket on %v port %d: %w", a, wire.RoCEPort, err)
	}
	return rx, nil
}

// checkAddr returns an error unless a is the address of one interface that RoCE can reach.
func checkAddr(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return errors.New("is missing")
	case a.IsUnspecified():
		return fmt.Errorf("%v is not the address of one interface", a)
	case a.IsMulticast():
		return fmt.Errorf("%v is a multicast address", a)
	case a.Zone() != "" || a.Is6() && a.IsLinkLocalUnicast():
		return fmt.Errorf("%v is a link-local address, which needs a zone, and a GID has no room for one", a)
	}
	return nil
}

// PathMTU returns the largest payload, of 256 to 4096, whose packets fit an interface of
// MTU netMTU even with the longest headers, or 0 if none does.
func PathMTU(netMTU int, v6 bool) int {
	overhead := wire.IPv4Len + wire.UDPLen + wire.MaxPacket - wire.MaxPayload
	if v6 {
		overhead += wire.IPv6Len - wire.IPv4Len
	}
	for mtu := wire.MaxPayload; mtu >= 256; mtu /= 2 {
		if mtu <= netMTU-overhead {
			return mtu
		}
	}
	return 0
}

// udpFlow is a flow prepared for this link.
type udpFlow struct {
	link     *UDP
	sock     *sys.UDPSocket
	dst      netip.Addr
	to       sys.Sockaddr
	tclass   uint8
	own      uint8 // the class that messages name; 0: none, it is the socket's
	hopLimit uint8
	plain    bool // traffic class and hop limit are the socket's defaults
	pseudo   wire.Pseudo

	elsewhere bool // no device of this host was at dst when the flow was made
}

// sameWay reports whether packets of both flows may share a segmented send.
func (f *udpFlow) sameWay(g *udpFlow) bool {
	return f == g || f.sock == g.sock && f.dst == g.dst && f.tclass == g.tclass && f.hopLimit == g.hopLimit
}

// Prepare gives the flow a sending socket, and sets f.SrcPort to its port.
//
// The IPv6 flow label is not sent, because the kernel makes its own of addresses and
// ports. It only helps to choose the socket.
func (u *UDP) Prepare(f *train.Flow) error {
	src, dst := f.Src.Unmap(), f.Dst.Unmap()
	group := dst.IsMulticast()
	if err := checkAddr(dst); err != nil && !group {
		return ib.Errorf("prepare_flow", syscall.EINVAL, "peer address: %v", err)
	}
	if group && src.Is6() && src.IsLoopback() {
		return ib.Errorf("prepare_flow", syscall.EHOSTUNREACH, "Linux carries no IPv6 multicast on the loopback interface: use IPv4 groups from addresses of 127.0.0.0/8")
	}
	if src.Is4() != dst.Is4() {
		return ib.Errorf("prepare_flow", syscall.EINVAL, "from %v to %v: not the same address family", src, dst)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed.Load() {
		return ErrClosed
	}
	var end *udpEnd
	for _, e := range u.ends {
		if e.addr == src {
			end = e
		}
	}
	if end == nil {
		return ib.Errorf("prepare_flow", syscall.EADDRNOTAVAIL, "%v is not an address of this device", src)
	}
	slot := (uint32(f.SrcPort) + flowHash(dst, 0, f.Label)) % txSockets // neighbouring ports get different sockets
	hop := f.HopLimit
	switch {
	case group && u.cfg.NearGroups:
		hop = 0 // the socket's default
	case hop == 0:
		hop = sys.DefaultHopLimit
	}
	usual := hop == 0 || hop == sys.DefaultHopLimit
	own := f.TClass
	switch {
	case group:
		slot = groupSocket
	case own == wire.ECT0 && usual:
		slot, own = slot+ectSockets, 0
	}
	sock, err := u.txSocketLocked(end, slot)
	if err != nil {
		return err
	}
	f.SrcPort = sock.Local().Port()
	f.Link = &udpFlow{
		link:     u,
		sock:     sock,
		dst:      dst,
		to:       sys.MakeSockaddr(netip.AddrPortFrom(dst, wire.RoCEPort)),
		tclass:   f.TClass,
		own:      own,
		hopLimit: hop,
		plain:    own == 0 && usual,
		pseudo:   wire.NewPseudo(src, dst, f.SrcPort, wire.RoCEPort),
	}
	return nil
}

func flowHash(dst netip.Addr, port uint16, label uint32) uint32 {
	const prime = 16777619 // FNV-1a
	h := uint32(2166136261)
	b := dst.As16()
	for _, v := range b {
		h = (h ^ uint32(v)) * prime
	}
	for _, v := range [...]uint32{uint32(port), label} {
		h = (h ^ v) * prime
	}
	return h ^ h>>16
}

// txSocketLocked returns a sending socket of an address, and opens it on a random port
// when it is first needed.
func (u *UDP) txSocketLocked(e *udpEnd, slot uint32) (*sys.UDPSocket, error) {
	if e.tx[slot] != nil {
		return e.tx[slot], nil
	}
	o := sys.UDPOptions{
		RcvBuf: 1, // nothing is read here: the kernel rounds up to its minimum
		SndBuf: u.cfg.SocketBuffer,
	}
	var err error
	if slot >= ectSockets && slot < groupSocket {
		o.TClass = wire.ECT0
	}
	if slot == groupSocket {
		if o.Groups, err = sys.InterfaceIndex(e.addr); err != nil {
			return nil, err
		}
		if !u.cfg.NearGroups {
			o.GroupHops = sys.DefaultHopLimit
		}
	}
	const tries = 100
	for range tries {
		port := firstSrcPort + uint16(rand.N(lastSrcPort-firstSrcPort+1))
		e.tx[slot], err = sys.OpenUDP(netip.AddrPortFrom(e.addr, port), o)
		if err == nil {
			return e.tx[slot], nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("UDP socket to send from %v: %w", e.addr, err)
}

// WantHeaders makes trains that arrive from now on carry the hop limit of their packets;
// without it, it is 64. A device calls it when its first
// UD queue pair is made, which needs them for the routing header: the kernel takes about
// a tenth of a microsecond for them, for every datagram.
func (u *UDP) WantHeaders() error {
	u.mu.Lock()
	u.headers = true // of receivers that are made from now on
	u.mu.Unlock()
	for _, r := range u.receivers() {
		if err := r.wantHeaders(); err != nil {
			return err
		}
	}
	return nil
}

// Wait blocks until something may have arrived at the link's first receiver.
func (u *UDP) Wait(d time.Duration) { u.recv.Wait(d) }

// Wake makes Wait return.
func (u *UDP) Wake() { u.recv.Wake() }

// MTU returns the largest payload that fits the interfaces of all addresses.
func (u *UDP) MTU() int { return u.mtu }

// fullWindow is how many bytes under way to one queue pair suffice for full speed:
// 128 packets of 4 KiB, measured.
const fullWindow = 128 * 4096

// Window returns how many packets may be under way to one queue pair: as many as
// suffice for full speed, but at most half of what the peer's receive buffer holds,
// which is taken to be as large as ours.
func (u *UDP) Window(mtu int) int {
	mtu = max(mtu, 1)
	// The kernel charges a packet about twice its size and 3/4 KiB: 990 packets
	// of 4 KiB fit a buffer of 8 MiB in its count, measured.
	held := u.rcvBuf / (2*mtu + 768)
	return max(min(fullWindow/mtu, held/2), 4)
}

// Addrs are the local addresses.
func (u *UDP) Addrs() []netip.Addr {
	out := make([]netip.Addr, len(u.ends))
	for i, e := range u.ends {
		out[i] = e.addr
	}
	return out
}

// Offloads returns those of "gso" and "gro" that are in use.
func (u *UDP) Offloads() []string {
	var out []string
	if u.gso.Load() {
		out = append(out, "gso")
	}
	if u.gro {
		out = append(out, "gro")
	}
	return out
}

// UDPStats are counters since the link was opened.
type UDPStats struct {
	TxPackets uint64        // handed to the kernel
	TxLost    uint64        // refused by the kernel: buffer full, no route, …
	TxErrno   syscall.Errno // why the latest was refused
	Overflows uint64        // datagrams the kernel dropped because Poll did not read them in time
	RcvBuf    int           // the smallest receive buffer, as the kernel counts
}

// Stats returns the counters.
func (u *UDP) Stats() UDPStats {
	s := UDPStats{
		TxPackets: u.txPackets.Load(),
		TxLost:    u.txLost.Load(),
		TxErrno:   syscall.Errno(u.txErrno.Load()),
		RcvBuf:    u.rcvBuf,
	}
	for _, r := range u.receivers() {
		s.Overflows += r.overflows()
	}
	return s
}

// Close closes the link, with all receivers. It makes Wait return, and waits for every Send and Poll under
// way. It is idempotent.
func (u *UDP) Close() error {
	u.mu.Lock()
	if u.closed.Load() {
		u.mu.Unlock()
		return nil
	}
	u.closed.Store(true)
	u.awaitSendersLocked()
	u.mu.Unlock()

	var errs []error
	all := u.receivers()
	for _, r := range all {
		r.shut()
	}
	for _, r := range all {
		errs = append(errs, r.close())
	}
	for _, e := range u.ends {
		for _, s := range e.tx {
			if s != nil {
				errs = append(errs, s.Close())
			}
		}
	}
	return errors.Join(errs...)
}
