package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/nvme"
)

// Storage is a namespace of a controller as package nvme has it, so that a subsystem can have it, and a target serve it.
//
// Data that lies in memory of [Storage.Alloc] is moved by the controller itself: if that is the controller memory
// buffer, it passes through no memory of the host. Other data is copied into memory that the controller reaches. Stats counts both.
//
// When a call returns, with an error or without, the controller does not use the memory of the call any more, so the
// caller may use it for something else. A command that takes longer than Config.Timeout, or a controller that reports a
// fatal error, leads to a reset of the controller: the call returns when the controller has stopped. If the controller
// does not stop, the call tries again and waits, until the controller stops, is gone, or completes the command.
//
// A reset ends all queues of the controller. Calls that are under way return ErrReset, whoever has reset it. The next
// call makes new queues. If the controller does not come up again, calls return why; a later call, or Controller.Reset,
// may bring it up.
type Storage struct {
	c     *Controller
	ns    Namespace
	cfg   QueueConfig
	cmb   bool
	piece int // bytes that one command moves at most

	queueMu sync.Mutex // guards what follows; held while a queue is made
	queues  []*Queue
	next    int // the queue of the next command
	closed  bool

	direct, copied atomic.Uint64

	mu      sync.Mutex // guards what follows
	reach   []Memory   // what Alloc has given, by address of the bytes
	spare   []Memory   // for data that lies elsewhere
	drained bool       // Close has given spare back: commands that end later give their memory back
}

// StorageConfig is how a namespace is used. The zero value of a field means the default.
type StorageConfig struct {
	Queues  int  // I/O queues. Zero: 1
	Entries int  // of each: see QueueConfig
	CMB     bool // Alloc gives memory of the controller memory buffer, and of nothing else
}

// StorageStats is what a Storage has moved, in bytes.
type StorageStats struct {
	Direct uint64 // between the disk and memory of Alloc, or of a peer
	Copied uint64 // through other memory of the host
}

// Storage makes a Storage of a namespace. The caller closes it before the Controller.
//
// Errors: EOPNOTSUPP for namespaces with metadata, or if there is no controller memory buffer; those of NewQueue.
func (c *Controller) Storage(ctx context.Context, ns Namespace, cfg StorageConfig) (*Storage, error) {
	const op = "nvme_storage"
	info := c.Info()
	switch {
	case ns.Metadata != 0:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "namespace %d has %d bytes beside each block", ns.ID, ns.Metadata)
	case cfg.CMB && (c.CMB() == nil || info.CMB&(nvme.CMBSZRead|nvme.CMBSZWrite) != nvme.CMBSZRead|nvme.CMBSZWrite):
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the controller has no memory buffer for data")
	case ns.BlockSize <= 0 || ns.Blocks > uint64(1<<62)/uint64(ns.BlockSize):
		return nil, ib.Errorf(op, syscall.EINVAL, "%d blocks of %d bytes", ns.Blocks, ns.BlockSize)
	}
	s := &Storage{c: c, ns: ns, cfg: QueueConfig{Entries: cfg.Entries}, cmb: cfg.CMB, piece: 256 << 10}
	if info.MaxTransfer > 0 {
		s.piece = min(s.piece, info.MaxTransfer)
	}
	s.piece = max(s.piece/ns.BlockSize, 1) * ns.BlockSize
	for range max(cfg.Queues, 1) {
		q, err := c.NewQueue(ctx, s.cfg)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.queues = append(s.queues, q)
	}
	return s, nil
}

// Close gives the queues back. Memory of Alloc is given back by whoever has it. Calls that are under way return ErrClosed
// or as they would have, calls after it ErrClosed. After an error, closing again does what is left to be done.
func (s *Storage) Close() error {
	s.queueMu.Lock()
	s.closed = true // so queues does not change any more
	s.queueMu.Unlock()
	var err error
	for _, q := range s.queues {
		err = errors.Join(err, q.Close())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drained = true
	for i := range s.spare {
		s.spare[i].Free()
	}
	s.spare = nil
	return err
}

// Stats returns what was moved.
func (s *Storage) Stats() StorageStats {
	return StorageStats{Direct: s.direct.Load(), Copied: s.copied.Load()}
}

// Alloc returns memory that the controller reaches.
//
// Errors: ENOMEM if the buffer has not so much; those of DMA.Alloc.
func (s *Storage) Alloc(n int) (b []byte, release func(), err error) {
	from := s.c.dma
	if s.cmb {
		from = s.c.CMB()
	}
	m, err := from.Alloc(n)
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i, _ := slices.BinarySearchFunc(s.reach, addrOf(m.Bytes), func(m Memory, at uintptr) int { return compareAddr(addrOf(m.Bytes), at) })
	s.reach = slices.Insert(s.reach, i, m)
	return m.Bytes[:n], sync.OnceFunc(func() { s.forget(m) }), nil
}

func (s *Storage) forget(m Memory) {
	s.mu.Lock()
	s.reach = slices.DeleteFunc(s.reach, func(o Memory) bool { return o.Addr == m.Addr })
	s.mu.Unlock()
	m.Free()
}

// find returns the memory that bytes lie in, if Alloc has given it.
func (s *Storage) find(b []byte) (Memory, bool) {
	at := addrOf(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	i, found := slices.BinarySearchFunc(s.reach, at, func(m Memory, at uintptr) int { return compareAddr(addrOf(m.Bytes), at) })
	if !found {
		i--
	}
	if i < 0 {
		return Memory{}, false
	}
	m := s.reach[i]
	off := at - addrOf(m.Bytes)
	if off > uintptr(len(m.Bytes)) || uintptr(len(b)) > uintptr(len(m.Bytes))-off {
		return Memory{}, false
	}
	return m.Slice(int(off), len(b)), true //nolint:gosec // inside the memory
}

func compareAddr(a, b uintptr) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// Size returns the number of bytes.
func (s *Storage) Size() int64 { return int64(s.ns.Blocks) * int64(s.ns.BlockSize) } //nolint:gosec // checked by Storage

// BlockSize returns the length of a block.
func (s *Storage) BlockSize() int { return s.ns.BlockSize }

// ReadOnly reports whether the namespace refuses writes.
func (s *Storage) ReadOnly() bool { return s.ns.ReadOnly }

// ReadAt reads blocks. See nvme.Namespace.
func (s *Storage) ReadAt(p []byte, off int64) (int, error) { return s.move(p, off, false) }

// WriteAt writes blocks.
func (s *Storage) WriteAt(p []byte, off int64) (int, error) { return s.move(p, off, true) }

func (s *Storage) check(n, off int64) error {
	if b := int64(s.ns.BlockSize); off < 0 || n < 0 || off > s.Size() || n > s.Size()-off || off%b != 0 || n%b != 0 {
		return ib.Errorf("nvme_storage", syscall.EINVAL, "%d bytes at %d are not blocks of the namespace", n, off)
	}
	return nil
}

// queue returns the queue of the next command. In place of one that has ended it makes a new one.
func (s *Storage) queue() (*Queue, error) {
	s.queueMu.Lock()
	defer s.queueMu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	s.next = (s.next + 1) % len(s.queues)
	q := s.queues[s.next]
	if q.ring.refusal() == nil {
		return q, nil
	}
	if err := s.c.resetFor(q); err != nil {
		return nil, err
	}
	q, err := s.c.NewQueue(context.Background(), s.cfg)
	if err != nil {
		if givenUp(err) {
			err = errors.Join(err, s.c.Reset()) // the next call finds a controller that works, or why it does not
		}
		return nil, err
	}
	s.queues[s.next] = q
	return q, nil
}

// do executes a command with n bytes of data at an address of the bus, or with ranges. When it returns, the command is
// not under way any more.
func (s *Storage) do(cmd nvme.Command, at uint64, n int, ranges []byte) error {
	q, err := s.queue()
	if err != nil {
		return err
	}
	ctx := context.Background()
	req, err := q.ring.submitAt(ctx, false, cmd, at, n, ranges)
	if err != nil {
		return err // the controller does not know of it
	}
	for {
		_, err := req.Wait(ctx)
		if !givenUp(err) {
			return err
		}
		if s.c.resetFor(q) == nil {
			return fmt.Errorf("%w; the controller was reset", err)
		}
		// It did not stop, or it did and did not come up again: Wait and resetFor find out.
	}
}

func (s *Storage) move(p []byte, off int64, write bool) (int, error) {
	if err := s.check(int64(len(p)), off); err != nil {
		return 0, err
	}
	most := s.piece
	for done := 0; done < len(p); {
		n := min(len(p)-done, most)
		if err := s.one(p[done:done+n], off+int64(done), write); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

// Piece returns how many bytes one command moves at most: a multiple of the block size.
func (s *Storage) Piece() int { return s.piece }

// Move moves n bytes, at most Piece, by one command: from off on the disk to an address of the bus, or from there to the
// disk if write is set. The program need not see the memory, which may be a peer's. When Move returns, with an error or
// without, the controller does not use it any more.
//
// Errors: EINVAL for what is not blocks of the namespace, more than Piece, or an address that a command cannot have; those
// of commands.
func (s *Storage) Move(at uint64, n int, off int64, write bool) error {
	if err := s.check(int64(n), off); err != nil {
		return err
	}
	if n > s.piece {
		return ib.Errorf("nvme_storage", syscall.EINVAL, "%d bytes: a command moves %d", n, s.piece)
	}
	cmd, err := s.command(n, off, write)
	if err != nil {
		return err
	}
	if err := s.do(cmd, at, n, nil); err != nil {
		return err
	}
	s.direct.Add(uint64(n)) //nolint:gosec // checked
	return nil
}

// command makes the command that moves n bytes.
func (s *Storage) command(n int, off int64, write bool) (nvme.Command, error) {
	opcode := nvme.IORead
	if write {
		opcode = nvme.IOWrite
	}
	return BlockCommand(opcode, s.ns, uint64(off)/uint64(s.ns.BlockSize), n) //nolint:gosec // checked
}

// one moves what one command can.
func (s *Storage) one(p []byte, off int64, write bool) error {
	cmd, err := s.command(len(p), off, write)
	if err != nil {
		return err
	}
	if m, ok := s.find(p); ok && m.Addr%4 == 0 {
		s.direct.Add(uint64(len(p)))
		return s.do(cmd, m.Addr, len(p), nil)
	}
	s.copied.Add(uint64(len(p)))
	m, err := s.takeSpare()
	if err != nil {
		return err
	}
	defer s.putSpare(m)
	part := m.Slice(0, len(p))
	if write {
		copy(part.Bytes, p)
	}
	if err := s.do(cmd, part.Addr, len(p), nil); err != nil {
		return err
	}
	if !write {
		copy(p, part.Bytes)
	}
	return nil
}

func (s *Storage) takeSpare() (Memory, error) {
	s.mu.Lock()
	if n := len(s.spare); n > 0 {
		m := s.spare[n-1]
		s.spare = s.spare[:n-1]
		s.mu.Unlock()
		return m, nil
	}
	s.mu.Unlock()
	return s.c.dma.Alloc(s.piece)
}

// putSpare keeps memory for the next command, or gives it back.
func (s *Storage) putSpare(m Memory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drained {
		m.Free()
		return
	}
	s.spare = append(s.spare, m)
}

// Flush returns when everything that was written before is on stable storage.
func (s *Storage) Flush() error {
	return s.do(nvme.Command{Opcode: nvme.IOFlush, NSID: s.ns.ID}, 0, 0, nil)
}

// Discard gives blocks back.
func (s *Storage) Discard(off, n int64) error {
	if err := s.check(n, off); err != nil {
		return err
	}
	for b := int64(s.ns.BlockSize); n > 0; {
		part := min(n/b, 1<<32-1)
		cmd, ranges := deallocation(s.ns, uint64(off/b), uint32(part)) //nolint:gosec // checked
		if err := s.do(cmd, 0, 0, ranges); err != nil {
			return err
		}
		off, n = off+part*b, n-part*b
	}
	return nil
}

var _ nvme.Namespace = (*Storage)(nil)
