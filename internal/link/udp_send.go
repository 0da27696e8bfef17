package link

import (
	"net/netip"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Sending by UDP, top-down:
//
//  1. Send acquires a sender for itself, so that it holds no lock while it reads
//     memory, which may take long.
//  2. send makes packets of train after train. Either all bytes of a packet are in
//     the sender's arena (copyPackets: short messages, and trains that ask for a
//     private copy), or only its header and checksum are, and the kernel fetches the
//     payload from the region (referPackets).
//  3. room gives each packet a place in a message: packets of one size to one
//     destination, and one shorter one behind them, go as one segmented send.
//  4. push hands the messages to the kernel. A message that the kernel refuses is
//     lost, with two exceptions: if the kernel refuses segmentation or faults on
//     memory, the packets not sent yet are made again, without segmentation or with
//     private copies.
//
// A fault on memory shows in three places. A copy reports it. A checksum over
// memory that was unmapped meanwhile panics, and a send from such memory returns
// EFAULT; both lead to a private copy, which then succeeds or reports the fault.

const (
	// maxMessages and maxPieces bound what one batch hands to the kernel.
	maxMessages = 64
	maxPieces   = 2048
	// arenaSize is the room for headers, checksums and copied payload: two
	// messages of 64 KiB, which still stay in a core's own cache.
	arenaSize = 128 << 10
	// maxSegments is the most that every kernel segments one send into.
	maxSegments = 64
	// maxMessage is the longest UDP payload over IPv4; over IPv6 it is 20 bytes longer.
	maxMessage = 65507
	// maxRuns is the most pieces of memory that a train's payload may lie in and still
	// be sent from there.
	maxRuns = 128
	// copyMax is the length up to which copying a train is cheaper than handing the
	// kernel one more piece for every packet.
	copyMax = 1024
)

// sender makes and sends packets: storage for one Send at a time.
type sender struct {
	u     *UDP
	first bool // it is kept in UDP.first, not in UDP.idle
	sock  *sys.UDPSocket
	gso   bool
	copy  bool // every packet gets a private copy of its payload

	batch *sys.SendBatch
	from  [maxMessages]cursor // by message: its first packet
	info  [maxMessages]message
	open  message // the message that room is adding to

	arena []byte
	added int // how much of the arena the batch has as pieces

	at         cursor // the packet to make next
	place      uint32 // of the destination queue pair of the train that is being sent
	packetizer packetizer
	runs       [][]byte // storage for the pieces of a train's payload
	reading    []byte   // the piece that is being checksummed
	pins       mem.Pins // keeps the runs of all trains in the batch accessible
	pinned     int      // how many bytes those are
}

// cursor names a packet of the trains that send was given.
type cursor struct{ train, packet int }

// message is what one send carries.
type message struct {
	flow   *udpFlow
	place  uint32 // of the destination queue pairs, by which the peer's kernel may choose a socket
	size   int    // of the packets, but for a shorter last one
	n      int    // packets
	bytes  int
	pieces int
	closed bool // by a shorter packet
}

// Send sends trains in order.
func (u *UDP) Send(ts []*train.Train) (int, error) {
	if len(ts) == 0 {
		return 0, nil
	}
	s, err := u.acquire()
	if err != nil {
		return 0, err
	}
	defer u.release(s)
	done := 0
	for done < len(ts) {
		f, err := u.flowOf(ts[done])
		if err != nil {
			return done, err
		}
		n := 1
		for done+n < len(ts) {
			if g, err := u.flowOf(ts[done+n]); err != nil || g.sock != f.sock {
				break
			}
			n++
		}
		if n == 1 && s.isLone(ts[done], f) {
			if err := s.lone(ts[done], f); err != nil {
				return done, err
			}
			done++
			continue
		}
		s.begin(f.sock)
		sent, err := s.send(ts[done : done+n])
		done += sent
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

func (u *UDP) flowOf(t *train.Train) (*udpFlow, error) {
	if t.Flow != nil {
		if f, ok := t.Flow.Link.(*udpFlow); ok && f.link == u {
			return f, nil
		}
	}
	return nil, ErrTrain
}

// acquire takes a sender that is not in use: most often the first, by one exchange.
func (u *UDP) acquire() (*sender, error) {
	if !u.closed.Load() { // senders of a closed link would keep Close waiting
		if s := u.first.Swap(nil); s != nil {
			return s, nil
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed.Load() {
		return nil, ErrClosed
	}
	u.busy++
	if n := len(u.idle); n > 0 {
		s := u.idle[n-1]
		u.idle = u.idle[:n-1]
		return s, nil
	}
	return newSender(u), nil
}

func newSender(u *UDP) *sender {
	return &sender{
		u:     u,
		batch: sys.NewSendBatch(maxMessages, maxPieces),
		arena: make([]byte, 0, arenaSize),
		runs:  make([][]byte, 0, maxRuns),
	}
}

func (u *UDP) release(s *sender) {
	if s.first {
		u.first.Store(s)
		if !u.closed.Load() {
			return
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !s.first {
		u.idle = append(u.idle, s)
		u.busy--
	}
	u.allIdle.Broadcast()
}

// awaitSendersLocked waits until no sender of a closed link is in use. It takes the first
// sender away, so that acquire cannot.
func (u *UDP) awaitSendersLocked() {
	for u.busy > 0 || u.first.Swap(nil) == nil {
		u.allIdle.Wait()
	}
}

// isLone reports whether a train can go by lone: it is one short packet that needs neither
// a tap, nor a traffic class or hop limit of its own, nor FLUSH's second ICRC.
func (s *sender) isLone(t *train.Train, f *udpFlow) bool {
	return t.N == 1 && t.Len <= copyMax && f.plain && s.u.cfg.Tap == nil && t.Kind != wire.KindFlush
}

// lone makes and sends the packet of a train for which isLone is true, without a batch.
func (s *sender) lone(t *train.Train, f *udpFlow) error {
	if err := s.packetizer.start(t); err != nil {
		return err
	}
	h, n, err := s.packetizer.header(0)
	if err != nil {
		return err
	}
	b, fault := s.packetizer.appendPacket(s.arena, h, 0, n)
	if !fault.OK() {
		return &PayloadError{Fault: fault}
	}
	s.sent(1, f.sock.SendTo(seal(b, 0, &f.pseudo, 0), &f.to))
	return nil
}

// sent counts packets that the kernel took or refused.
func (s *sender) sent(packets int, err error) {
	if err == nil {
		s.u.txPackets.Add(uint64(packets))
		return
	}
	errno, _ := err.(syscall.Errno)
	s.u.txLost.Add(uint64(packets))
	s.u.txErrno.Store(uint32(errno))
}

// begin makes the sender ready for trains that share a socket.
func (s *sender) begin(sock *sys.UDPSocket) {
	s.sock = sock
	s.gso = s.u.gso.Load()
	s.copy = s.u.cfg.Tap != nil // a tap must be shown the very bytes that are sent
	s.at = cursor{}
}

// send sends trains, from s.at on. It returns how many it took: all, or with an error those
// before the train that the error is about.
func (s *sender) send(ts []*train.Train) (int, error) {
	for {
		var err error
		if s.at.train < len(ts) {
			err = s.train(ts[s.at.train])
			if err == nil {
				continue // at s.at: the next train, or an earlier one if push has set s.at back
			}
		}
		n := s.at.train
		if s.push() {
			s.unpin()
			return n, err
		}
		// push has set s.at back; what made it do so will not happen again
	}
}

// train makes the packets of a train, from s.at on. It returns early, without an
// error, if push has set s.at back.
func (s *sender) train(t *train.Train) error {
	if err := s.packetizer.start(t); err != nil {
		return err
	}
	f := t.Flow.Link.(*udpFlow) // Send has checked the type
	s.place = sys.Place(t.DestQP)
	if s.copy || t.Bounce || t.Len <= copyMax {
		return s.copyPackets(t, f)
	}
	return s.referPackets(t, f)
}

// copyPackets makes packets wholly in the arena. A FLUSH that is sent again goes twice:
// with the right ICRC, and with the one that Linux's own device wants, which a peer that
// follows the specification drops as damaged.
func (s *sender) copyPackets(t *train.Train, f *udpFlow) error {
	count := t.N
	if t.Kind == wire.KindFlush && t.Transport == wire.RC && t.Bounce {
		count++
	}
	for s.at.packet < count {
		i := min(s.at.packet, t.N-1)
		h, n, err := s.packetizer.header(i)
		if err != nil {
			return err
		}
		size := packetSize(h, n)
		id, ok := s.room(f, size, size, 1)
		if !ok {
			return nil
		}
		start := len(s.arena)
		b, fault := s.packetizer.appendPacket(s.arena, h, i, n)
		if !fault.OK() {
			return &PayloadError{Fault: fault, Packet: s.at.packet}
		}
		if s.at.packet == t.N {
			s.arena = sealTwice(b, start, &f.pseudo, id)
		} else {
			s.arena = seal(b, start, &f.pseudo, id)
		}
		s.commit(f, size)
	}
	s.at = cursor{train: s.at.train + 1}
	return nil
}

// referPackets makes packets whose payload the kernel fetches from where it lies.
func (s *sender) referPackets(t *train.Train, f *udpFlow) error {
	if !s.pinWithinLimit(t.Len) {
		return nil
	}
	runs, fault, whole := s.gatherRest(t)
	if !fault.OK() {
		return &PayloadError{Fault: fault, Packet: s.at.packet}
	}
	if !whole { // too many pieces
		return s.copyPackets(t, f)
	}
	made := s.mark()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer s.copyAfterFault(&made)
	for s.at.packet < t.N {
		h, n, err := s.packetizer.header(s.at.packet)
		if err != nil {
			return err
		}
		size := packetSize(h, n)
		id, ok := s.room(f, size, size-n, len(runs)+2)
		if !ok {
			return nil
		}
		made = s.mark()
		runs = s.referPacket(h, f.pseudo.Start(id, size), n, runs)
		s.commit(f, size)
	}
	s.at = cursor{train: s.at.train + 1}
	return nil
}

// pinWithinLimit counts n bytes as pinned. If one batch must not pin so many, it sends
// the batch and unpins its memory first; it returns false if push has set s.at back.
func (s *sender) pinWithinLimit(n int) bool {
	if s.pinned > 0 && n > train.MaxBytes-s.pinned {
		if !s.push() {
			return false
		}
		s.unpin()
	}
	s.pinned += n
	return true
}

// gatherRest pins the payload of a train from packet s.at on, and returns the pieces that
// it lies in. whole is false if those are more than maxRuns.
func (s *sender) gatherRest(t *train.Train) (runs [][]byte, f mem.Fault, whole bool) {
	skip := s.at.packet * t.MTU
	s.packetizer.src.Off = t.Payload.Off + uint64(skip)
	return mem.Gather(&s.packetizer.src, uint64(t.Len-skip), s.runs, &s.pins)
}

// referPacket makes one packet: header, padding and checksum in the arena, and between
// header and padding the first n bytes of the runs. It returns the rest of the runs.
func (s *sender) referPacket(h *wire.Header, crc wire.CRC, n int, runs [][]byte) [][]byte {
	start := len(s.arena)
	s.arena = h.Append(s.arena)
	crc = crc.Header(s.arena[start:])
	s.addArena()
	for n > 0 {
		p := runs[0]
		if len(p) > n {
			p, runs[0] = p[:n], p[n:]
		} else {
			runs = runs[1:]
		}
		n -= len(p)
		s.reading = p
		crc = crc.Add(p)
		s.batch.Add(p)
	}
	crc = crc.AddPad(h.Pad)
	s.arena = crc.Append(append(s.arena, zeros[:h.Pad]...))
	return runs
}

// mark is how much a sender has made.
type mark struct{ pieces, arena, added int }

func (s *sender) mark() mark {
	return mark{pieces: s.batch.Pieces(), arena: len(s.arena), added: s.added}
}

// copyAfterFault is deferred by code that reads payload which may be unmapped meanwhile.
// After a fault it removes the half-made packet, which is all behind the mark, and makes
// this and all further packets be copied.
func (s *sender) copyAfterFault(made *mark) {
	e := recover()
	if e == nil {
		return
	}
	if !faultIn(s.reading, e) {
		panic(e)
	}
	s.batch.Truncate(made.pieces)
	s.arena, s.added = s.arena[:made.arena], made.added
	s.copy = true
}

// unpin releases the memory of trains that have been sent.
func (s *sender) unpin() {
	if s.pinned == 0 {
		return
	}
	s.pins.Release()
	s.pinned = 0
	s.reading = nil
	clear(s.runs[:cap(s.runs)])
}

// room makes room for a packet of size bytes that takes so many bytes of the arena and so
// many pieces. It returns the packet's place in its message, which is its identification,
// or false if it had to push and push has set s.at back.
func (s *sender) room(f *udpFlow, size, arena, pieces int) (id uint16, ok bool) {
	m := &s.open
	if m.n > 0 && (!s.gso || m.closed || size > m.size || m.n == maxSegments ||
		size > maxMessage-m.bytes || pieces > sys.MaxPieces-m.pieces || m.place != s.place || !m.flow.sameWay(f)) {
		s.end()
	}
	freeMessages, freePieces := s.batch.Room()
	if arena > cap(s.arena)-len(s.arena) || freeMessages == 0 || pieces > freePieces {
		if !s.push() {
			return 0, false
		}
	}
	return uint16(m.n), true
}

// commit adds the packet that was made to the open message.
func (s *sender) commit(f *udpFlow, size int) {
	m := &s.open
	if m.n == 0 {
		m.flow, m.place, m.size = f, s.place, size
		s.from[s.batch.Len()] = s.at
	}
	m.closed = size < m.size
	m.n++
	m.bytes += size
	m.pieces = s.batch.OpenPieces() + 1 // 1: the part of the arena that addArena has not added yet
	s.at.packet++
}

// addArena adds what was appended to the arena since its last call to the batch, as a piece.
func (s *sender) addArena() {
	s.batch.Add(s.arena[s.added:])
	s.added = len(s.arena)
}

// end ends the open message.
func (s *sender) end() {
	m := &s.open
	if m.n == 0 {
		return
	}
	s.addArena()
	segment := 0
	if m.n > 1 {
		segment = m.size
	}
	s.info[s.batch.Len()] = *m
	s.batch.End(&m.flow.to, segment, m.flow.own, m.flow.hopLimit)
	*m = message{}
}

// push sends all messages of the batch. If the kernel refuses a segmented send, or faults
// on memory that is not the arena, push sets s.at back to the first packet not sent, turns
// segmentation off or copying on, and returns false.
func (s *sender) push() bool {
	s.end()
	defer s.reset()
	for i := 0; i < s.batch.Len(); {
		n, err := s.sock.Send(s.batch, i)
		for range n {
			s.count(i)
			i++
		}
		if err == nil {
			continue
		}
		switch errno, _ := err.(syscall.Errno); {
		case errno == syscall.EFAULT && !s.copy:
			s.copy = true
			s.at = s.from[i]
			return false
		case (errno == syscall.EIO || errno == syscall.EINVAL) && s.info[i].n > 1:
			s.u.gso.Store(false)
			s.gso = false
			s.at = s.from[i]
			return false
		default:
			s.sent(s.info[i].n, errno)
			i++
		}
	}
	return true
}

// reset empties the batch and the arena.
func (s *sender) reset() {
	s.batch.Reset()
	s.arena, s.added = s.arena[:0], 0
	s.open = message{}
}

// count counts message i as sent, and shows it to the tap.
func (s *sender) count(i int) {
	m := &s.info[i]
	s.sent(m.n, nil)
	if s.u.cfg.Tap == nil {
		return
	}
	now := time.Now()
	var all []byte
	s.batch.EachPiece(i, func(p []byte) { all = append(all, p...) })
	for id := uint16(0); len(all) > 0; id++ {
		p := all[:min(m.size, len(all))]
		all = all[len(p):]
		s.u.cfg.Tap.Packet(now, s.sock.Local(), netip.AddrPortFrom(m.flow.dst, wire.RoCEPort),
			m.flow.tclass, m.flow.hopLimit, id, p)
	}
}
