package shm

// The inbox that a process polls, in stages: Poll gathers the bits of the rings that may hold
// records (gather), visits each such ring and hands its records to a sink (visit). A ring that
// stays empty is not visited until its writer sets the bit again (unlist).

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Config configures an inbox. Nil means all defaults.
type Config struct {
	// RingBytes is the size of the rings that peers write to us: a multiple of
	// RingUnit between MinRing and MaxRing. 0 is 512 KiB.
	RingBytes int
}

const (
	defaultRing = 512 << 10

	// visitRecords is how many records one visit takes from a ring at most.
	visitRecords = 32
	// idleVisits is after how many visits in a row that find it empty a ring is not
	// visited until its writer sets the bit. Up to then the bit stays set, and the writer
	// stores to nothing but the ring.
	idleVisits = 256
)

// Sink takes what arrives. Poll calls it, with the records of each peer in their order.
type Sink interface {
	// Record takes a record. The bytes are valid until it returns, and a peer
	// that misbehaves may change them at any time: what is checked must be
	// copied first.
	Record(c *Channel, typ byte, p []byte)
	// Full reports whether the sink wants no more records of a channel in this visit.
	Full(c *Channel) bool
	// Room is called when a channel may have room again, after a Reserve that found none.
	Room(c *Channel)
	// Gone is the last call for a channel that the peer has closed (ErrPeerClosed), whose
	// peer has died (ErrPeerDied) or that is broken (an ErrBroken). All that the peer had
	// committed has been delivered, up to where a ring is broken. Poll then closes the
	// channel.
	Gone(c *Channel, err error)
}

// Inbox receives records from the processes that it has channels with.
type Inbox struct {
	cfg Config

	mem   []byte
	memfd int
	event *sys.Event
	life  int // a descriptor of the process's own, see life.go
	nonce uint64
	words inboxWords

	slots [MaxPeers]atomic.Pointer[Channel]

	// Only Poll writes these; Announce reads active.
	active [slotWords]atomic.Uint64 // rings that Poll visits
	idle   [MaxPeers]uint16         // how often in a row each ring was found empty
	first  int                      // the slot to begin with

	inUse   atomic.Int32 // words of pending whose slots have ever been used
	blocked atomic.Int32 // channels that wait for room in the ring to the peer

	epoch uint64 // the sleep word when awake; only Announce changes it

	watch   *sys.Watch
	ended   chan struct{}  // closed when watchPeers has returned
	joining sync.WaitGroup // handshakes under way
	ctx     context.Context
	cancel  context.CancelFunc

	mu     sync.Mutex // guards what follows, and the segment against poke after Close
	used   [MaxPeers]bool
	grants grantSlots
	closed bool
}

// NewInbox makes an inbox without peers.
func NewInbox(cfg *Config) (*Inbox, error) {
	in := &Inbox{memfd: -1, ended: make(chan struct{})}
	if cfg != nil {
		in.cfg = *cfg
	}
	if in.cfg.RingBytes == 0 {
		in.cfg.RingBytes = defaultRing
	}
	if in.cfg.RingBytes < 0 || !validRing(uint64(in.cfg.RingBytes)) {
		return nil, fmt.Errorf("shm: a ring cannot have %d bytes", in.cfg.RingBytes)
	}
	if err := in.open(); err != nil {
		in.release()
		return nil, fmt.Errorf("shm: %w", err)
	}
	in.ctx, in.cancel = context.WithCancel(context.Background())
	go in.watchPeers()
	return in, nil
}

func (in *Inbox) open() (err error) {
	if in.memfd, in.mem, err = newSegment("verbena-inbox", inboxBytes); err != nil {
		return err
	}
	in.words = wordsOf(in.mem)
	if in.life, err = ownLife(); err != nil {
		return err
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	in.nonce = binary.NativeEndian.Uint64(b[:])
	in.words.nonce.Store(in.nonce)
	if in.event, err = sys.NewEvent(); err != nil {
		return err
	}
	in.watch, err = sys.NewWatch()
	return err
}

// newSegment makes shared memory and maps it.
func newSegment(name string, size int) (fd int, mem []byte, err error) {
	if fd, err = sys.NewMemfd(name, size); err != nil {
		return -1, nil, err
	}
	if mem, err = sys.MapMemfd(fd, size); err != nil {
		_ = sys.CloseFD(fd) // the first error says more
		return -1, nil, err
	}
	return fd, mem, nil
}

// release gives up what open has made, as far as it came; all but the watch, which open
// makes last, and the process's pipe, which no inbox closes.
func (in *Inbox) release() {
	var errs []error
	if in.event != nil {
		errs = append(errs, in.event.Close())
	}
	if in.mem != nil {
		errs = append(errs, sys.Unmap(in.mem), sys.CloseFD(in.memfd))
	}
	if err := errors.Join(errs...); err != nil {
		panic(fmt.Sprintf("shm: closing what is our own: %v", err)) // other code has closed or unmapped it
	}
}

// Poll hands up to about budget records to the sink, without blocking, and returns how many
// calls of Record, Room and Gone it made. One goroutine at a time calls it.
func (in *Inbox) Poll(s Sink, budget int) int {
	n := 0
	if in.blocked.Load() > 0 {
		n = in.pollRoom(s)
	}
	turn := in.first
	for index := turn / 64; index < int(in.inUse.Load()); index++ {
		if n = in.visitAll(s, index, turn, MaxPeers, n, budget); n >= budget {
			return n
		}
	}
	for index := 0; index*64 < turn; index++ {
		if n = in.visitAll(s, index, 0, turn, n, budget); n >= budget {
			return n
		}
	}
	in.first = 0
	return n
}

// visitAll visits the rings of word index of pending that may hold something and whose slots
// are at least from and less than below. It returns n plus the calls made. When the budget is
// used up, the next Poll begins with the slot after the last visited.
func (in *Inbox) visitAll(s Sink, index, from, below, n, budget int) int {
	for set := in.gather(index); set != 0; set &= set - 1 {
		slot := index*64 + bits.TrailingZeros64(set)
		if slot < from || slot >= below && slot < MaxPeers {
			continue
		}
		if n += in.visit(s, slot); n >= budget {
			in.first = (slot + 1) % MaxPeers
			return n
		}
	}
	return n
}

// gather returns which rings of word index of pending may hold something.
func (in *Inbox) gather(index int) uint64 {
	active := in.active[index].Load()
	if more := in.words.pending[index].Load() &^ active; more != 0 {
		active |= more
		in.active[index].Store(active)
	}
	return active
}

// visit delivers records of one ring. If no record is left and the channel is down, or its ring
// is broken, visit reports that to the sink and closes the channel.
func (in *Inbox) visit(s Sink, slot int) int {
	c := in.channel(slot)
	if c == nil {
		in.unlist(slot, nil) // the channel was closed, or a peer set a bit that is not its own
		return 0
	}
	if !c.rx.tryEnter() {
		return 0 // it is closed, or Announce looks at it
	}
	defer c.rx.leave()
	down := c.down.Load() // read before the ring: what was committed before the end is then seen
	n, r := 0, c.rx.ring
	for n < visitRecords && !c.rx.shut.Load() && !(n > 0 && s.Full(c)) {
		typ, p, ok := r.Next()
		if !ok {
			if err := r.Err(); err != nil {
				c.fail(err)
				down = c.down.Load()
			}
			if down == nil {
				break
			}
			if down.err != ErrClosed { // Close is ours: its caller needs no report
				s.Gone(c, down.err)
				n++
			}
			c.Close()
			return n
		}
		n++
		s.Record(c, typ, p)
		if r.Release() {
			c.bell.roomAgain()
		}
	}
	if n > 0 {
		in.idle[slot] = 0
	} else if in.idle[slot]++; in.idle[slot] >= idleVisits {
		in.unlist(slot, c)
	}
	return n
}

// channel returns the channel of a slot, or nil. The last bit of pending has no slot.
func (in *Inbox) channel(slot int) *Channel {
	if slot >= MaxPeers {
		return nil
	}
	return in.slots[slot].Load()
}

// unlist ends the visits to a slot until its bit is set again. c is the channel that the
// caller found there, whose reading end it holds, or nil.
func (in *Inbox) unlist(slot int, c *Channel) {
	index, bit := slotBit(slot)
	in.words.pending[index].And(^bit)
	// A peer that stored a record while the bit was set did not set it: its record is
	// seen now. A peer that stores a record from now on sets the bit.
	if in.channel(slot) != c || c != nil && (c.down.Load() != nil || c.rx.ring.Ready()) {
		return
	}
	in.active[index].And(^bit)
	if slot < MaxPeers {
		in.idle[slot] = 0
	}
}

// pollRoom calls the sink's Room for the channels that wait for room and may have some now. It
// returns how many.
func (in *Inbox) pollRoom(s Sink) int {
	n := 0
	for index := range slotWords {
		w := in.words.room[index]
		if w.Load() == 0 {
			continue
		}
		for set := w.Swap(0); set != 0; set &= set - 1 {
			if c := in.channel(index*64 + bits.TrailingZeros64(set)); c != nil && c.unblock() {
				s.Room(c)
				n++
			}
		}
	}
	return n
}

// Ticket returns a word that only the owner process writes and peers read
// (Channel.PeerTicket). It is mapped until Close.
func (in *Inbox) Ticket() *atomic.Uint64 { return word(in.mem, ticketAt) }

// Remaps returns another such word (Channel.PeerRemaps).
func (in *Inbox) Remaps() *atomic.Uint64 { return word(in.mem, remapsAt) }

// Lease returns word i of MaxLeases more such words.
func (in *Inbox) Lease(i int) *atomic.Uint64 { return word(in.mem, leasesAt+8*i) }

// Peers returns how many channels there are, including those whose handshake is under way.
// Only tests of the link call it: of two channels made at the same time, one is left.
func (in *Inbox) Peers() (n int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, used := range in.used {
		if used {
			n++
		}
	}
	return n
}

// poke makes Poll visit a slot, and wakes an owner that sleeps.
func (in *Inbox) poke(slot int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return // the words may be gone
	}
	index, bit := slotBit(slot)
	in.words.pending[index].Or(bit)
	in.event.Signal()
}

// Close closes all channels and gives up the inbox. No goroutine may be in Poll or wait for
// Event, now or later. It is idempotent.
func (in *Inbox) Close() {
	in.mu.Lock()
	was := in.closed
	in.closed = true
	in.mu.Unlock()
	if was {
		return
	}
	in.cancel()
	in.joining.Wait() // handshakes, which cancel ends
	for i := range in.slots {
		if c := in.slots[i].Load(); c != nil {
			c.Close()
		}
	}
	in.stopWatching()
	in.release()
}
