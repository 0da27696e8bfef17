package sys

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Many datagrams in one system call, without an allocation.
//
// Why this is sound. Every pointer that the kernel follows (names, pieces,
// control data) is stored as a Go pointer in a field that the collector sees,
// in slices that live as long as their batch; uintptr occurs only in the
// argument list of a system call. Lengths are taken from the slices that the pointers
// come from. The calls have MSG_DONTWAIT, so they do not block and may be raw system
// calls, of which the scheduler has no notice.
//
// RawSyscall6 is that of package syscall: the processor mispredicts every return after a
// system call, and the one of package unix has one or two more returns.

// mmsghdr is the kernel's struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32 // bytes sent or received
}

// Sockaddr is a peer's address in the kernel's form.
type Sockaddr struct {
	raw [unix.SizeofSockaddrInet6]byte
	n   uint32
}

// MakeSockaddr converts an address. A zone is not kept.
func MakeSockaddr(a netip.AddrPort) (s Sockaddr) {
	if a.Addr().Is4() {
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(&s.raw))
		in.Family, in.Addr = unix.AF_INET, a.Addr().As4()
		s.n = unix.SizeofSockaddrInet4
	} else {
		in := (*unix.RawSockaddrInet6)(unsafe.Pointer(&s.raw))
		in.Family, in.Addr = unix.AF_INET6, a.Addr().As16()
		s.n = unix.SizeofSockaddrInet6
	}
	binary.BigEndian.PutUint16(s.raw[2:], a.Port()) // the same place in both
	return s
}

// ctlLen is room for three control messages with an int each: segment size, traffic
// class, hop limit.
const ctlLen = 3 * 24

type ctlBuf [ctlLen / 8]uint64 // aligned as a cmsghdr is

// put appends a control message with an int, or with a uint16 if size is 2.
func (c *ctlBuf) put(at int, level, typ int32, size int, v int) int {
	if at+unix.CmsgSpace(size) > ctlLen {
		return at
	}
	h := (*unix.Cmsghdr)(unsafe.Add(unsafe.Pointer(c), at))
	h.Level, h.Type = level, typ
	h.SetLen(unix.CmsgLen(size))
	p := unsafe.Add(unsafe.Pointer(c), at+unix.CmsgLen(0))
	if size == 2 {
		*(*uint16)(p) = uint16(v)
	} else {
		*(*int32)(p) = int32(v)
	}
	return at + unix.CmsgSpace(size)
}

// MaxPieces is the most pieces that the kernel takes for one datagram or one
// segmented send (UIO_MAXIOV).
const MaxPieces = 1024

// SendBatch collects messages for one system call. Add adds pieces to the open message;
// End ends it, with its destination, and opens the next. A message is one datagram, or
// several of the same size.
type SendBatch struct {
	hdrs []mmsghdr
	iovs []unix.Iovec
	ctl  []ctlBuf
	n    int // messages ended
	used int // pieces in all messages
	open int // where the pieces of the open message start
}

// NewSendBatch makes room for so many messages and pieces.
func NewSendBatch(messages, pieces int) *SendBatch {
	return &SendBatch{
		hdrs: make([]mmsghdr, messages),
		iovs: make([]unix.Iovec, pieces),
		ctl:  make([]ctlBuf, messages),
	}
}

// Room returns how many more messages there is room for, with the open one, and how many
// more pieces.
func (b *SendBatch) Room() (messages, pieces int) { return len(b.hdrs) - b.n, len(b.iovs) - b.used }

// Len returns the number of messages ended.
func (b *SendBatch) Len() int { return b.n }

// Pieces returns the number of pieces of all messages.
func (b *SendBatch) Pieces() int { return b.used }

// OpenPieces returns the number of pieces of the open message.
func (b *SendBatch) OpenPieces() int { return b.used - b.open }

// Truncate removes the last pieces of the open message, until all messages together have
// so many.
func (b *SendBatch) Truncate(pieces int) { b.used = max(min(pieces, b.used), b.open) }

// Reset forgets all messages, and with them the memory that they refer to.
func (b *SendBatch) Reset() {
	clear(b.iovs[:b.used])
	b.n, b.used, b.open = 0, 0, 0
}

// Add appends a piece to the open message. The bytes must stay until the batch
// has been sent.
func (b *SendBatch) Add(p []byte) {
	if len(p) == 0 {
		return
	}
	v := &b.iovs[b.used]
	v.Base = unsafe.SliceData(p)
	v.SetLen(len(p))
	b.used++
}

// End ends the open message. segment is the size of the datagrams that the kernel makes
// of it (0: it is one datagram). A traffic class and a hop limit of 0 mean the socket's
// own.
func (b *SendBatch) End(to *Sockaddr, segment int, tclass, hopLimit uint8) {
	h := &b.hdrs[b.n].hdr
	h.Name, h.Namelen = &to.raw[0], to.n
	h.Iov = nil
	if b.used > b.open {
		h.Iov = &b.iovs[b.open]
	}
	h.SetIovlen(b.used - b.open)

	c, at := &b.ctl[b.n], 0
	if segment != 0 {
		at = c.put(at, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2, segment)
	}
	if tclass != 0 || hopLimit != DefaultHopLimit && hopLimit != 0 {
		at = c.putHeader(at, to, tclass, hopLimit)
	}
	h.Control = nil
	if at != 0 {
		h.Control = (*byte)(unsafe.Pointer(c))
	}
	h.SetControllen(at)
	b.n++
	b.open = b.used
}

func (c *ctlBuf) putHeader(at int, to *Sockaddr, tclass, hopLimit uint8) int {
	if to.n == unix.SizeofSockaddrInet4 {
		at = c.put(at, unix.IPPROTO_IP, unix.IP_TOS, 4, int(tclass))
		if hopLimit == 0 {
			return at
		}
		return c.put(at, unix.IPPROTO_IP, unix.IP_TTL, 4, int(hopLimit))
	}
	at = c.put(at, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, 4, int(tclass))
	if hopLimit == 0 {
		return at
	}
	return c.put(at, unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT, 4, int(hopLimit))
}

// EachPiece calls f for every piece of message i, in order.
func (b *SendBatch) EachPiece(i int, f func(p []byte)) {
	h := &b.hdrs[i].hdr
	for _, v := range unsafe.Slice(h.Iov, int(h.Iovlen)) {
		f(unsafe.Slice(v.Base, int(v.Len)))
	}
}

// Send sends the messages from the given one on, and returns how many the kernel took.
// There is an error only if it took none.
func (s *UDPSocket) Send(b *SendBatch, from int) (int, error) {
	if from >= b.n {
		return 0, nil
	}
	for {
		var n uintptr
		var e unix.Errno
		if b.n-from == 1 { // cheaper than a batch of one
			_, _, e = syscall.RawSyscall6(unix.SYS_SENDMSG, uintptr(s.fd),
				uintptr(unsafe.Pointer(&b.hdrs[from].hdr)), unix.MSG_DONTWAIT, 0, 0, 0)
			n = 1
		} else {
			n, _, e = syscall.RawSyscall6(unix.SYS_SENDMMSG, uintptr(s.fd),
				uintptr(unsafe.Pointer(&b.hdrs[from])), uintptr(b.n-from), unix.MSG_DONTWAIT, 0, 0)
		}
		switch e {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, e
		}
	}
}

// SendTo sends one datagram, with the socket's own traffic class and hop limit. It is
// cheaper than Send, for which the kernel has to read a message header from memory.
func (s *UDPSocket) SendTo(p []byte, to *Sockaddr) error {
	for {
		_, _, e := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			unix.MSG_DONTWAIT, uintptr(unsafe.Pointer(&to.raw)), uintptr(to.n))
		switch e {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return e
		}
	}
}

// RecvBatch is where datagrams arrive.
type RecvBatch struct {
	hdrs  []mmsghdr
	iovs  []unix.Iovec
	names []unix.RawSockaddrInet6
	ctl   []ctlBuf
	bufs  [][]byte
}

// NewRecvBatch makes room for n datagrams of size bytes.
func NewRecvBatch(n, size int) *RecvBatch {
	b := &RecvBatch{
		hdrs:  make([]mmsghdr, n),
		iovs:  make([]unix.Iovec, n),
		names: make([]unix.RawSockaddrInet6, n),
		ctl:   make([]ctlBuf, n),
		bufs:  make([][]byte, n),
	}
	all := make([]byte, n*size)
	for i := range n {
		b.bufs[i] = all[i*size : (i+1)*size : (i+1)*size]
		b.iovs[i].Base = &b.bufs[i][0]
		b.iovs[i].SetLen(size)
		h := &b.hdrs[i].hdr
		h.Iov = &b.iovs[i]
		h.SetIovlen(1)
		h.Name = (*byte)(unsafe.Pointer(&b.names[i]))
		h.Control = (*byte)(unsafe.Pointer(&b.ctl[i]))
	}
	return b
}

// Cap returns how many datagrams there is room for.
func (b *RecvBatch) Cap() int { return len(b.hdrs) }

// Recv takes at most limit datagrams that have arrived, in place of those that the
// batch had before, and returns how many; 0 if none has arrived.
func (s *UDPSocket) Recv(b *RecvBatch, limit int) (int, error) {
	limit = min(limit, len(b.hdrs))
	if limit <= 0 {
		return 0, nil
	}
	for i := range limit {
		h := &b.hdrs[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(ctlLen)
	}
	for {
		var n uintptr
		var e unix.Errno
		if limit == 1 { // cheaper than a batch of one
			n, _, e = syscall.RawSyscall6(unix.SYS_RECVMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&b.hdrs[0].hdr)), unix.MSG_DONTWAIT, 0, 0, 0)
			b.hdrs[0].n, n = uint32(n), 1
		} else {
			n, _, e = syscall.RawSyscall6(unix.SYS_RECVMMSG, uintptr(s.fd),
				uintptr(unsafe.Pointer(&b.hdrs[0])), uintptr(limit), unix.MSG_DONTWAIT, 0, 0)
		}
		switch e {
		case 0:
			return int(n), nil
		case unix.EAGAIN:
			return 0, nil
		case unix.EINTR:
		default:
			return 0, e
		}
	}
}

// Datagram is what one receive returned: one datagram, or several of Segment bytes
// each (the last may be shorter) from one sender.
type Datagram struct {
	From      netip.AddrPort
	Bytes     []byte
	Segment   int   // 0: it is one datagram
	Truncated bool  // it was longer than the buffer
	TClass    uint8 // 0 if neither WantTClass was set nor RecvHeader called
	HopLimit  uint8 // DefaultHopLimit if RecvHeader was not called
}

// Get describes datagram i of the last Recv. Bytes are valid until the next.
func (b *RecvBatch) Get(i int, d *Datagram) {
	m := &b.hdrs[i]
	d.Bytes = b.bufs[i][:min(int(m.n), len(b.bufs[i]))]
	d.Truncated = m.hdr.Flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0

	name := &b.names[i]
	port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&name.Port))[:])
	switch name.Family {
	case unix.AF_INET:
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		d.From = netip.AddrPortFrom(netip.AddrFrom4(in.Addr), port)
	case unix.AF_INET6:
		d.From = netip.AddrPortFrom(netip.AddrFrom16(name.Addr), port)
	default:
		d.From = netip.AddrPort{}
	}

	d.Segment, d.TClass, d.HopLimit = 0, 0, DefaultHopLimit
	b.ctl[i].get(int(m.hdr.Controllen), d)
}

// get reads the control messages, n bytes of them.
func (c *ctlBuf) get(n int, d *Datagram) {
	n = min(n, ctlLen)
	for at := 0; n-at >= unix.CmsgLen(0); {
		h := (*unix.Cmsghdr)(unsafe.Add(unsafe.Pointer(c), at))
		size := int(h.Len) - unix.CmsgLen(0)
		if size < 1 || size > n-at-unix.CmsgLen(0) {
			return
		}
		p := unsafe.Add(unsafe.Pointer(c), at+unix.CmsgLen(0))
		v := int(*(*uint8)(p)) // IP_TOS comes as one byte
		if size >= 4 {
			v = int(*(*int32)(p))
		}
		switch {
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO:
			d.Segment = v
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TOS,
			h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_TCLASS:
			d.TClass = uint8(v)
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TTL,
			h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_HOPLIMIT:
			d.HopLimit = uint8(v)
		}
		at += unix.CmsgSpace(size)
	}
}

// Overflows returns how many datagrams the kernel has dropped because the
// receive buffer was full, since this process has the socket.
func (s *UDPSocket) Overflows() (uint32, error) {
	const drops = 8 // SK_MEMINFO_DROPS
	var info [drops + 1]uint32
	n := uint32(unsafe.Sizeof(info))
	_, _, e := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&n)), 0)
	if e != 0 {
		return 0, e
	}
	return info[drops] - s.earlier, nil // it may wrap
}
