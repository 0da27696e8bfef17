package dmabuf

// Importers in another process: the exporter's side of remote.go. The process listens on a socket
// while buffers of it have descriptors. For each importer there is a goroutine, which ends with the
// connection, and an attachment.

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

const (
	tokenBytes = 16
	maxRemotes = 1024 // importers in other processes that are connected at once

	// maxRemoteMappings is how many mappings an importer may have: remote.go has one, and one that it
	// is about to give up.
	maxRemoteMappings = 16
)

// server is what other processes connect to.
var server remoteServer

type remoteServer struct {
	token    func() string     // of this process
	listener *net.UnixListener // nil: there is none
	slots    chan struct{}     // has a place for each importer that is connected
}

func init() {
	server.slots = make(chan struct{}, maxRemotes)
	server.token = sync.OnceValue(func() string {
		var b [tokenBytes]byte
		_, _ = rand.Read(b[:]) // it never fails
		return hex.EncodeToString(b[:])
	})
}

// name returns the name of descriptors of this process, and of its socket.
func (s *remoteServer) name() string { return handlePrefix + s.token() }

// open begins to listen. If that fails, other processes cannot import.
func (s *remoteServer) open() {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "@" + s.name(), Net: "unixpacket"})
	if err != nil {
		slog.Warn("verbena: other processes cannot import the dma-bufs of this one", "error", err)
		return
	}
	s.listener = l
	go s.accept(l)
}

// close ends the listening. Importers that are connected stay.
func (s *remoteServer) close() {
	if s.listener != nil {
		_ = s.listener.Close() // it ends accept
		s.listener = nil
	}
}

func (s *remoteServer) accept(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // descriptors have run out, perhaps for a moment
			continue
		}
		select {
		case s.slots <- struct{}{}:
			go func() {
				defer func() { <-s.slots }()
				serve(c)
			}()
		default:
			_ = c.Close() // too many
		}
	}
}

// remoteImporter is an importer in another process.
type remoteImporter struct {
	c          *net.UnixConn
	attachment *Attachment

	tables []*Table // what it has mapped, oldest first; guarded by the reservation lock

	mapped int            // mappings that it has; used by the connection's goroutine alone
	pins   int            // pins that it has; used by the connection's goroutine alone
	jobs   sync.WaitGroup // goroutines of later

	mu        sync.Mutex // guards what follows
	open      bool       // it has a mapping that was not invalidated
	owed      []*Fence   // for each INVALIDATE that it has not answered, oldest first
	interrupt func()     // ends the wait of unlessMoving for the reservation lock; nil: it does not wait
}

// serve serves one importer until its connection ends.
func serve(c *net.UnixConn) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(remotePatience)) // a connection that is open takes one
	b, wish, err := meet(c)
	if wish != nil {
		wish.answer(c, b, err)
		return
	}
	if err != nil {
		_ = sys.SendFDs(c, encode(msgWelcome, errnoOf(err), 0)) // it may have gone
		return
	}
	defer b.Put()
	r := &remoteImporter{c: c}
	r.attachment, err = b.DynamicAttach(r, Importer{InvalidateMappings: r.invalidate})
	if err != nil {
		_ = sys.SendFDs(c, encode(msgWelcome, errnoOf(err), 0))
		return
	}
	defer r.end()
	if sys.SendFDs(c, encode(msgWelcome, 0, b.Size())) != nil {
		return
	}
	_ = c.SetDeadline(time.Time{})
	buf := make([]byte, 64)
	for {
		n, fds, err := sys.RecvFDs(c, buf)
		if err != nil || n == 0 {
			closeAll(fds)
			return
		}
		kind, args := decode(buf[:n])
		ok := r.handle(kind, args, fds)
		closeAll(fds)
		if !ok {
			return
		}
	}
}

// meet reads what another process begins with, and returns the buffer of the descriptor that it shows,
// with a reference; and what it wishes, if it is no importer.
func meet(c *net.UnixConn) (*Buffer, *wish, error) {
	const op = "dma_buf_get"
	buf := make([]byte, 64)
	n, fds, err := sys.RecvFDs(c, buf)
	if err != nil {
		return nil, nil, err
	}
	kind, args := decode(buf[:n])
	var w *wish
	shown := fds
	switch {
	case kind == msgControl && len(args) == controlArgs && (len(fds) == 1 || len(fds) == 2):
		w = &wish{request: args[1], flags: args[2], name: buf[8*(1+3) : n], fences: fds[1:]}
		shown = fds[:1]
	case kind != msgHello || len(args) != 1 || len(fds) != 1:
		closeAll(fds)
		return nil, nil, ib.Errorf(op, syscall.EPROTO, "a process that does not speak our language")
	}
	defer closeAll(shown)
	if args[0] != remoteVersion {
		return nil, w, ib.Errorf(op, syscall.EPROTO, "a process that does not speak our version")
	}
	id, err := sys.HandleIDOf(shown[0])
	if err != nil {
		return nil, w, err
	}
	if b := find(id); b != nil {
		return b, w, nil
	}
	return nil, w, ib.Errorf(op, syscall.EINVAL, "the descriptor is none of this process")
}

// handle does what a message asks for. It reports whether the importer keeps to the rules.
func (r *remoteImporter) handle(kind message, args []uint64, fds []int) bool {
	if len(fds) != 0 && kind != msgImportFence {
		return false
	}
	switch kind {
	case msgMap:
		return len(args) == 1 && Direction(args[0]).valid() && r.mapped < maxRemoteMappings && r.doMap(Direction(args[0]))
	case msgUnmapped:
		if r.mapped == 0 {
			return false
		}
		if r.mapped--; r.mapped == 0 {
			r.allUnmapped()
		}
		r.later(r.unmapFirst)
		return true
	case msgPin:
		return r.send(encode(msgPinned, errnoOf(r.doPin()))) == nil
	case msgUnpin:
		if r.pins == 0 {
			return false
		}
		r.pins--
		r.later(r.attachment.Unpin)
		return true
	case msgInvalidated:
		if len(args) == 1 && args[0] != 0 {
			r.attachment.StillWritten() // before the exporter goes on
		}
		return r.invalidated()
	case msgExportFence:
		return len(args) == 1 && args[0] < uint64(numUsages) && r.doExportFence(Usage(args[0]))
	case msgImportFence:
		return len(args) == 1 && args[0] < uint64(numUsages) && len(fds) == 1 &&
			r.send(encode(msgFence, errnoOf(r.doImportFence(fds[0], Usage(args[0]))))) == nil
	}
	return false
}

// doExportFence answers with a descriptor of the buffer's fences.
func (r *remoteImporter) doExportFence(usage Usage) bool {
	fd, err := r.resv().ExportFence(usage)
	if err != nil {
		return r.send(encode(msgFence, errnoOf(err))) == nil
	}
	err = r.send(encode(msgFence, 0), fd)
	_ = sys.CloseFD(fd) // the importer has its own
	return err == nil
}

// doImportFence adds the fence of a descriptor to the buffer's.
func (r *remoteImporter) doImportFence(fd int, usage Usage) error {
	f, err := FenceFromFD(fd)
	if err != nil {
		return err
	}
	return r.unlessMoving(func() error {
		r.resv().Add(f, usage)
		return nil
	})
}

// send sends an answer. An importer that does not read is not waited for.
func (r *remoteImporter) send(b []byte, fds ...int) error {
	_ = r.c.SetWriteDeadline(time.Now().Add(time.Second)) // a connection that is open takes one
	return sys.SendFDs(r.c, b, fds...)
}

// later does something with the reservation locked. The connection's goroutine does not wait for the
// lock: its holder may be waiting for an answer that this goroutine has yet to read.
func (r *remoteImporter) later(do func()) {
	r.jobs.Go(func() { r.locked(do) })
}

func (r *remoteImporter) resv() *Reservation { return r.attachment.Buffer().Reservation() }

func (r *remoteImporter) locked(do func()) {
	r.resv().Lock()
	defer r.resv().Unlock()
	do()
}

// doMap maps the buffer, waits for its Kernel fences, and answers. The importer asks for it when it has
// nothing mapped, so that no holder of the reservation lock waits for it.
func (r *remoteImporter) doMap(dir Direction) bool {
	ctx, cancel := context.WithTimeout(context.Background(), remotePatience/2)
	defer cancel()
	refuse := func(err error) bool { return r.send(encode(msgMapped, errnoOf(err))) == nil }
	if r.resv().LockContext(ctx) != nil {
		return refuse(syscall.ETIMEDOUT)
	}
	defer r.resv().Unlock()
	t, err := r.attachment.Map(ctx, dir)
	if err != nil {
		return refuse(err)
	}
	switch {
	case t.files == nil || len(t.files.segments) > maxRemoteSegments || len(t.files.fds) > maxRemoteFiles:
		err = ib.Errorf("dma_buf_map_attachment", syscall.EOPNOTSUPP, "the memory cannot be shown to another process")
	case !t.files.sealed():
		err = ib.Errorf("dma_buf_map_attachment", syscall.EOPNOTSUPP, "the memory is not in memory files that are sealed against shrinking")
	case r.resv().Wait(ctx, Kernel) != nil:
		err = syscall.ETIMEDOUT
	}
	if err != nil {
		r.attachment.Unmap(t, dir)
		return refuse(err)
	}
	t.files.show()
	r.tables = append(r.tables, t)
	r.mapped++
	r.mu.Lock()
	r.open = true
	r.mu.Unlock()
	answer := []uint64{0, 0}
	if t.files.place != nil {
		answer[1] = givenUp
	}
	left := r.attachment.Buffer().Size() // the table may have more bytes
	for _, s := range t.files.segments {
		n := min(uint64(s.n), left)
		answer = append(answer, uint64(s.file), uint64(s.off), n)
		left -= n
	}
	return r.send(encode(msgMapped, answer...), t.files.fds...) == nil
}

// sealed reports whether no file can shrink under a mapping.
func (f *files) sealed() bool {
	return !slices.ContainsFunc(f.fds, func(fd int) bool { return !sys.CannotShrink(fd) })
}

// unmapFirst ends the oldest mapping. The reservation is locked.
func (r *remoteImporter) unmapFirst() {
	r.attachment.Unmap(r.tables[0], Bidirectional)
	r.tables = r.tables[1:]
}

// doPin pins the buffer.
func (r *remoteImporter) doPin() error {
	return r.unlessMoving(func() error {
		if err := r.attachment.Pin(); err != nil {
			return err
		}
		r.pins++
		return nil
	})
}

// unlessMoving does something with the reservation locked. The importer's process holds its own
// reservation lock until it is answered, and so cannot answer an INVALIDATE: if the exporter has sent
// one and waits, the request is refused.
func (r *remoteImporter) unlessMoving(do func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), remotePatience/2)
	defer cancel()
	r.mu.Lock()
	r.interrupt = cancel
	owes := len(r.owed) > 0
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.interrupt = nil
		r.mu.Unlock()
	}()
	if owes || r.resv().LockContext(ctx) != nil {
		return ib.Errorf("dma_buf_get", syscall.EBUSY, "the buffer is moving")
	}
	defer r.resv().Unlock()
	return do()
}

// invalidate tells the importer that the buffer moves, and has the exporter wait for its answer. The
// reservation is locked.
func (r *remoteImporter) invalidate(*Attachment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.open {
		for _, f := range r.owed { // of an earlier move that has not waited for it to the end
			r.resv().Add(f, Bookkeep)
		}
		return
	}
	r.open = false
	f := NewFence()
	r.owed = append(r.owed, f)
	r.resv().Add(f, Bookkeep)
	if r.interrupt != nil {
		r.interrupt()
	}
	if sys.SendNow(r.c, encode(msgInvalidate)) != nil {
		// It does not read, or has gone. If it still accesses the memory, it does so until it has
		// seen the end of the connection, and closes its own end then.
		_ = r.c.CloseWrite()
	}
}

// allUnmapped is called when the importer has given up its last mapping. If an INVALIDATE has crossed that,
// the exporter waits no more: the importer may have sent a MAP behind it, which waits for the lock that the
// exporter holds, and the INVALIDATED comes behind that.
func (r *remoteImporter) allUnmapped() {
	r.mu.Lock()
	r.open = false
	crossed := slices.Clone(r.owed)
	r.mu.Unlock()
	for _, f := range crossed {
		f.Signal(nil)
	}
}

// invalidated is the importer's answer.
func (r *remoteImporter) invalidated() bool {
	r.mu.Lock()
	if len(r.owed) == 0 {
		r.mu.Unlock()
		return false
	}
	f := r.owed[0]
	r.owed = r.owed[1:]
	r.mu.Unlock()
	f.Signal(nil)
	return true
}

// end gives up what the importer has: its process has ended, or closed the connection, or broken
// the rules.
func (r *remoteImporter) end() {
	r.mu.Lock()
	abrupt := r.open || len(r.owed) > 0
	r.open = false // an exporter that moves the buffer from now on waits for no answer, while end waits for the lock
	r.mu.Unlock()
	if abrupt { // its peers may write to the memory by themselves, and have nobody left to stop them
		r.attachment.StillWritten()
	}
	for r.invalidated() {
		continue // one fence each time
	}
	r.jobs.Wait()
	r.locked(func() {
		for len(r.tables) > 0 {
			r.unmapFirst()
		}
		for ; r.pins > 0; r.pins-- {
			r.attachment.Unpin()
		}
	})
	r.attachment.Detach()
}
