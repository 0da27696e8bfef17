package shm

// How two processes that are connected by a unix socket (SOCK_SEQPACKET) make a
// channel. One message is one packet.
//
//	dialer                                       acceptor
//	is it our user? may it read our memory?      is it our user? (otherwise: refuse)
//	hello: version, slot, ring, nonce ─────────▶ map its ring and inbox
//	  + descriptors: ring, inbox, event, life
//	                              ◀───────────── hello, with its own
//	map its ring and inbox
//	try to read its nonce                        try to read its nonce
//	ready: could I? ───────────────────────────▶
//	                              ◀───────────── ready: could I?
//
// The socket stays open afterwards and carries no message but bye: its end is the
// end of the peer.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// ErrRefused means that the peer did not want the channel, or we did not want
// the peer. The text gives the reason.
var ErrRefused = errors.New("refused")

const (
	version    = 5
	magic      = 0x4d485356 // "VSHM"
	maxMessage = 256
)

// Kinds of messages.
const (
	msgHello byte = iota + 1
	msgReady
	msgRefuse
	msgBye
)

// Every message begins with the magic number, its kind and the version.
const preambleBytes = 8

func message(kind byte) []byte {
	b := make([]byte, 0, maxMessage)
	b = binary.LittleEndian.AppendUint32(b, magic)
	return append(b, kind, version, 0, 0)
}

// kindOf returns the kind of a message, or 0 if it is none.
func kindOf(b []byte) byte {
	if len(b) < preambleBytes || binary.LittleEndian.Uint32(b) != magic {
		return 0
	}
	return b[4]
}

// hello describes the side that sends it.
type hello struct {
	pid       uint32 // in its own PID namespace
	slot      uint32 // the receiver's bit in the sender's inbox
	ring      uint64 // bytes of the ring that the receiver will write
	nonce     uint64
	nonceAddr uint64
}

const helloBytes = preambleBytes + 4 + 4 + 8 + 8 + 8

func (h *hello) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, h.pid)
	b = binary.LittleEndian.AppendUint32(b, h.slot)
	b = binary.LittleEndian.AppendUint64(b, h.ring)
	b = binary.LittleEndian.AppendUint64(b, h.nonce)
	return binary.LittleEndian.AppendUint64(b, h.nonceAddr)
}

// parseHello reads and checks a hello.
func parseHello(b []byte) (h hello, err error) {
	if kindOf(b) != msgHello || len(b) != helloBytes {
		return h, fmt.Errorf("%w: %d bytes of kind %d instead of a hello", ErrBroken, len(b), kindOf(b))
	}
	b = b[preambleBytes:]
	h.pid = binary.LittleEndian.Uint32(b)
	h.slot = binary.LittleEndian.Uint32(b[4:])
	h.ring = binary.LittleEndian.Uint64(b[8:])
	h.nonce = binary.LittleEndian.Uint64(b[16:])
	h.nonceAddr = binary.LittleEndian.Uint64(b[24:])
	if h.slot >= MaxPeers || !validRing(h.ring) {
		return h, fmt.Errorf("%w: slot %d, ring of %d bytes", ErrBroken, h.slot, h.ring)
	}
	return h, nil
}

// Dial makes a channel over a connection that we have dialled, Accept over one
// that we have accepted. The connection belongs to the channel from then on,
// and is closed on an error. Channel.Tag returns the tag.
//
// Poll may hand out records of the channel before Dial or Accept returns.
func (in *Inbox) Dial(ctx context.Context, conn *net.UnixConn, tag any) (*Channel, error) {
	return in.join(ctx, conn, tag, true)
}

// Accept makes a channel over a connection that we have accepted: see Dial.
func (in *Inbox) Accept(ctx context.Context, conn *net.UnixConn, tag any) (*Channel, error) {
	return in.join(ctx, conn, tag, false)
}

func (in *Inbox) join(ctx context.Context, conn *net.UnixConn, tag any, dialer bool) (*Channel, error) {
	c := &Channel{tag: tag, in: in, conn: conn}
	h := handshake{c: c, in: in, conn: conn, dialer: dialer, uid: os.Geteuid()}
	if err := h.join(ctx); err != nil {
		_ = conn.Close() // the first error says more
		return nil, fmt.Errorf("shm: %w", err)
	}
	return c, nil
}

// join takes a slot, does the handshake, and puts the channel to use; or leaves
// nothing behind but the connection.
func (h *handshake) join(ctx context.Context) error {
	c, in := h.c, h.in
	if err := in.takeSlot(c); err != nil {
		return h.refuse(err)
	}
	defer in.joining.Done()
	// Both contexts end the handshake by making the connection time out.
	expire := func() { _ = h.conn.SetDeadline(time.Unix(1, 0)) } // it fails on a closed connection
	stop, stopIn := context.AfterFunc(ctx, expire), context.AfterFunc(in.ctx, expire)
	err := h.run()
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if !stopIn() {
		err = errors.Join(ErrClosed, err)
	}
	if err == nil {
		err = h.conn.SetDeadline(time.Time{})
	}
	if err != nil {
		h.undo()
		in.freeSlot(c.slot)
		return err
	}
	return in.attach(c)
}

// takeSlot takes a slot of the inbox for a channel, which Poll does not find there before
// attach, and counts its handshake.
func (in *Inbox) takeSlot(c *Channel) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return ErrClosed
	}
	for i := range in.used {
		if !in.used[i] {
			in.used[i] = true
			in.inUse.Store(max(in.inUse.Load(), int32(i/64+1)))
			in.joining.Add(1)
			c.slot = i
			return nil
		}
	}
	return fmt.Errorf("%w: %d peers are connected already", ErrRefused, MaxPeers)
}

func (in *Inbox) freeSlot(slot int) {
	in.slots[slot].Store(nil)
	in.mu.Lock()
	in.used[slot] = false
	in.mu.Unlock()
}

// attach puts a channel that is complete to use. From here on Close ends it, which a sink may
// call before attach returns.
func (in *Inbox) attach(c *Channel) error {
	in.slots[c.slot].Store(c)
	if err := c.watch(); err != nil {
		c.Close()
		return err
	}
	in.poke(c.slot) // the peer may have sent before the slot was set, and Poll have dropped its bit
	return nil
}

// handshake makes a channel. What it has made so far is in the fields.
type handshake struct {
	c      *Channel
	in     *Inbox
	conn   *net.UnixConn
	dialer bool
	uid    int // ours

	cred    sys.Cred
	ringfd  int
	allowed bool // reach.allow was called for the peer
}

func (h *handshake) run() (err error) {
	if h.cred, err = sys.PeerCred(h.conn); err != nil {
		return err
	}
	if h.cred.UID != h.uid {
		return h.refuse(fmt.Errorf("%w: the processes belong to different users, %d and %d", ErrRefused, h.uid, h.cred.UID))
	}
	reach.allow(h.cred.PID)
	h.allowed = true
	if err := h.makeRing(); err != nil {
		return h.refuse(err)
	}
	defer func() { _ = sys.CloseFD(h.ringfd) }() // the mapping and the peer's copy stay

	if !h.dialer {
		if err := h.recvHello(); err != nil {
			return err
		}
	}
	// A peer that has closed the connection may have sent a refusal first: go on to read it.
	if err := h.sendHello(); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		return h.refuse(err)
	}
	if h.dialer {
		if err := h.recvHello(); err != nil {
			return err
		}
	}
	return h.tryReading()
}

// refuse sends the peer the reason why there will be no channel, and returns it.
func (h *handshake) refuse(err error) error {
	text := err.Error()
	b := append(message(msgRefuse), text[:min(len(text), maxMessage-preambleBytes)]...)
	_ = sys.SendNow(h.conn, b) // if it does not arrive, the end of the socket does
	return err
}

func (h *handshake) makeRing() (err error) {
	c := h.c
	h.ringfd, c.rx.mem, err = newSegment("verbena-ring", controlPage+h.in.cfg.RingBytes)
	if err != nil {
		return err
	}
	c.rx.ring = newReader(c.rx.mem)
	return nil
}

func (h *handshake) sendHello() error {
	in := h.in
	m := hello{
		pid:       uint32(os.Getpid()),
		slot:      uint32(h.c.slot),
		ring:      uint64(in.cfg.RingBytes),
		nonce:     in.nonce,
		nonceAddr: sys.AddrOf(in.mem[nonceAt:]),
	}
	return sys.SendFDs(h.conn, m.append(message(msgHello)), h.ringfd, in.memfd, in.event.FD(), in.life)
}

// receive receives a message of a kind, or the reason for a refusal.
func (h *handshake) receive(kind byte) (msg []byte, fds []int, err error) {
	b := make([]byte, maxMessage)
	n, fds, err := sys.RecvFDs(h.conn, b)
	if errors.Is(err, syscall.ECONNRESET) { // the peer has closed; its last message can still be read
		n, fds, err = sys.RecvFDs(h.conn, b)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("handshake: %w", err)
	}
	b = b[:n]
	switch got := kindOf(b); {
	case got == msgRefuse:
		err = fmt.Errorf("%w by process %d: %q", ErrRefused, h.cred.PID, b[preambleBytes:])
	case got != 0 && b[5] != version:
		err = h.refuse(fmt.Errorf("%w: version %d meets version %d", ErrRefused, version, b[5]))
	case got != kind:
		err = h.refuse(fmt.Errorf("%w: %d bytes of kind %d, not %d", ErrBroken, n, got, kind))
	}
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return b, fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = sys.CloseFD(fd) // an error changes nothing: they are not used any more
	}
}

// recvHello takes what the peer offers, after checking it.
func (h *handshake) recvHello() error {
	b, fds, err := h.receive(msgHello)
	if err != nil {
		return err
	}
	m, err := parseHello(b)
	if err == nil && (len(fds) != 4 || !sys.IsPipe(fds[3])) {
		err = fmt.Errorf("%w: %d descriptors with a hello, or the fourth is no pipe", ErrBroken, len(fds))
	}
	if err != nil {
		closeAll(fds)
		return h.refuse(err)
	}
	if err := h.take(m, fds[0], fds[1], fds[2], fds[3]); err != nil {
		return h.refuse(err)
	}
	return nil
}

// take maps what the peer has sent. It closes the descriptors, or keeps them.
func (h *handshake) take(m hello, ringfd, inboxfd, eventfd, lifefd int) error {
	defer closeAll([]int{ringfd, inboxfd})
	event, err := sys.OpenEvent(eventfd)
	if err != nil {
		closeAll([]int{eventfd, lifefd})
		return err
	}
	inbox, err := sys.MapMemfd(inboxfd, inboxBytes)
	if err != nil {
		closeAll([]int{lifefd})
		return errors.Join(err, event.Close())
	}
	ring, err := sys.MapMemfd(ringfd, controlPage+int(m.ring))
	if err != nil {
		closeAll([]int{lifefd})
		return errors.Join(err, sys.Unmap(inbox), event.Close())
	}
	c := h.c
	c.bell = newBell(inbox, event, int(m.slot))
	c.rx.bell, c.tx.bell = c.bell, c.bell
	c.tx.mem, c.tx.ring = ring, newWriter(ring)
	c.limit = c.tx.ring.MaxRecord()
	c.peer.nonce, c.peer.nonceAddr = m.nonce, m.nonceAddr
	c.peer.pid = h.cred.PID
	c.life = newLife(h.lifeOf(int(m.pid), lifefd))
	return nil
}

// lifeOf returns the descriptor by which the end of the process is noticed: a pidfd, even
// if a child that the process forked keeps the socket and the pipe open; or the pipe that
// came with the hello. The kernel's number is that of the process that made the socket, which
// may be the parent of the process that uses it: so a pidfd is used only if the hello claims
// the same number.
func (h *handshake) lifeOf(claimed, pipe int) int {
	if h.cred.PID == 0 || h.cred.PID != claimed {
		return pipe
	}
	fd, err := sys.OpenPidfd(h.cred.PID)
	if err != nil {
		return pipe
	}
	closeAll([]int{pipe})
	return fd
}

// tryReading tries to read the peer's memory, sends the peer the result, and receives whether
// the peer can read ours.
func (h *handshake) tryReading() error {
	p := &h.c.peer
	p.canRead = p.pid > 0 && h.c.readNonce() == nil
	var can byte
	if p.canRead {
		can = 1
	}
	if err := sys.SendFDs(h.conn, append(message(msgReady), can)); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	b, fds, err := h.receive(msgReady)
	if err != nil {
		return err
	}
	closeAll(fds) // there should be none
	if len(b) != preambleBytes+1 {
		return h.refuse(fmt.Errorf("%w: %d bytes of ready", ErrBroken, len(b)))
	}
	p.readsUs = b[preambleBytes] == 1
	return nil
}

// undo gives up what was made for a channel whose handshake failed. No other goroutine has the
// channel yet.
func (h *handshake) undo() {
	c := h.c
	if h.allowed {
		reach.deny(h.cred.PID)
	}
	if c.life != nil {
		c.life.drop()
	}
	c.closed = true
	c.setDown(ErrClosed)
	if c.bell == nil { // our own ring is all there is
		if c.rx.mem != nil {
			_ = sys.Unmap(c.rx.mem) // it was mapped: it cannot fail
		}
		return
	}
	c.tx.close()
	c.rx.close()
}
