package dmabuf

// Importers in another process. The descriptor of a buffer has a name that leads to a socket of
// the exporter's process; whoever has the descriptor can connect there and show it.
//
//	importer's process                      exporter's process
//	    HELLO, the descriptor        ─►      attaches, dynamically
//	    MAP                          ─►      maps
//	                                 ◄─      MAPPED, the place's memory files, the segments
//	    (accesses)
//	                                 ◄─      INVALIDATE: the exporter moves the buffer, and
//	    stops, unmaps                        waits (a Bookkeep fence)
//	    INVALIDATED                  ─►      the fence is signalled
//
// If the importer's process ends, its connection does, and the exporter goes on. A process that is
// stopped delays Move until its context ends. If the exporter's process ends, the buffer is revoked.
//
// This file has the messages and the importer's side; serve.go has the exporter's.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// message is the kind of a message between the processes.
type message uint64

const (
	msgHello       message = iota + 1 // version
	msgWelcome                        // errno, size
	msgMap                            // direction
	msgMapped                         // errno; flags, and the file, offset and length of each segment
	msgUnmapped                       // nothing: the mapping that was made first is given up
	msgPin                            // nothing
	msgPinned                         // errno
	msgUnpin                          // nothing
	msgInvalidate                     // nothing: the mapping is to be given up
	msgInvalidated                    // it is; not 0: a process may still write there, see StillWritten
	msgExportFence                    // class
	msgImportFence                    // class; the descriptor of a fence comes with it
	msgFence                          // errno; the answer to both, with a descriptor to the first
	msgControl                        // version, ioctl, flags, name: in the place of HELLO (control.go)
	msgControlled                     // errno; perhaps with the descriptor of a fence
)

// givenUp is a flag of msgMapped: the exporter gives the file up when the buffer leaves it.
const givenUp = 1

const (
	remoteVersion     = 2
	maxRemoteSegments = 4096 // of a buffer that another process maps
	maxRemoteFiles    = sys.MaxPassedFDs
	maxMessage        = 8 * (3 + 3*maxRemoteSegments)
	handlePrefix      = "verbena-dmabuf:" // of the name of a buffer's descriptor; the token of the process follows
)

// remotePatience is how long a process waits for the other one's answer.
const remotePatience = 10 * time.Second

func encode(kind message, args ...uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(kind))
	for _, a := range args {
		b = binary.LittleEndian.AppendUint64(b, a)
	}
	return b
}

// decode returns the kind of a message and its arguments; kind 0 for what is none.
func decode(b []byte) (kind message, args []uint64) {
	if len(b) < 8 || len(b)%8 != 0 {
		return 0, nil
	}
	for ; len(b) > 0; b = b[8:] {
		args = append(args, binary.LittleEndian.Uint64(b))
	}
	return message(args[0]), args[1:]
}

// errnoOf returns an error's errno, for the other process.
func errnoOf(err error) uint64 {
	if err == nil {
		return 0
	}
	errno := syscall.EIO
	_ = errors.As(err, &errno)
	return uint64(errno)
}

// remoteBuffer is a buffer of another process.
type remoteBuffer struct {
	c      *net.UnixConn
	buffer *Buffer

	mu      sync.Mutex     // guards what follows
	current *remoteMapping // what is mapped and not invalidated; nil: nothing
	reply   chan reply     // where the answer to a request goes; nil: none is awaited
	maps    bool           // that request is a MAP
	leaving int            // mappings that are invalidated and still used: the exporter waits for their end
	gone    bool           // the exporter's process has ended, or broken the rules
}

// remoteMapping is a place of the buffer, mapped here. All importers of this process share it.
type remoteMapping struct {
	files [][]byte // the exporter's memory files
	fd    int      // of the only file, if the exporter gives that up when the buffer leaves it; else -1
	table *Table
	uses  int  // guarded by the remoteBuffer's lock
	stale bool // the exporter waits for its end; guarded by the remoteBuffer's lock
}

// reply is the exporter's answer to a request.
type reply struct {
	errno   syscall.Errno
	mapping *remoteMapping
	fence   int // a descriptor, of an EXPORT_FENCE that has succeeded
}

// fromProcess makes a buffer of a descriptor of another process's.
func fromProcess(op string, fd int, name string) (*Buffer, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: "@" + name, Net: "unixpacket"})
	if err != nil {
		return nil, ib.Errorf(op, syscall.EINVAL, "the process of the buffer's exporter does not answer: %v", err)
	}
	r := &remoteBuffer{c: c}
	size, err := r.hello(fd)
	if err == nil {
		r.buffer, err = Export(Config{Size: size, Exporter: "verbena, another process", Priv: r, Ops: Ops{
			Map: r.mapping, Unmap: r.unmap, Pin: r.pin, Unpin: r.unpin, Release: r.release,
		}})
	}
	if err != nil {
		_ = c.Close() // the first error says more
		return nil, named(op, err)
	}
	go r.read()
	return r.buffer, nil
}

// hello shows the descriptor, and returns the buffer's size.
func (r *remoteBuffer) hello(fd int) (uint64, error) {
	deadline := time.Now().Add(remotePatience)
	_ = r.c.SetDeadline(deadline) // a connection that is open takes one
	b := make([]byte, 64)
	var n int
	var fds []int
	err := sys.SendFDs(r.c, encode(msgHello, remoteVersion), fd)
	if err == nil {
		n, fds, err = sys.RecvFDs(r.c, b)
		closeAll(fds)
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return 0, fmt.Errorf("the process does not answer: %w", syscall.ETIMEDOUT)
	case err != nil:
		return 0, fmt.Errorf("the process has just ended (%v): %w", err, syscall.EINVAL)
	case n == 0:
		return 0, fmt.Errorf("the process has ended, or has too many importers: %w", syscall.EINVAL)
	}
	kind, args := decode(b[:n])
	if kind != msgWelcome || len(args) != 2 {
		return 0, fmt.Errorf("an answer that is none: %w", syscall.EPROTO)
	}
	if args[0] != 0 {
		return 0, syscall.Errno(args[0])
	}
	_ = r.c.SetDeadline(time.Time{})
	return args[1], nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = sys.CloseFD(fd)
	}
}

// read reads the exporter's messages until the connection ends. Then the memory is gone.
func (r *remoteBuffer) read() {
	b := make([]byte, maxMessage)
	for {
		n, fds, err := sys.RecvFDs(r.c, b)
		if errors.Is(err, syscall.EMFILE) && r.noRoom() {
			continue
		}
		if err != nil || n == 0 {
			closeAll(fds)
			break
		}
		kind, args := decode(b[:n])
		ok := false
		switch kind {
		case msgMapped:
			ok = r.mapped(args, fds)
		case msgPinned:
			ok = len(args) == 1 && r.answer(reply{errno: syscall.Errno(args[0])})
		case msgFence:
			if ok = len(args) == 1 && r.fence(syscall.Errno(args[0]), fds); ok {
				fds = nil // the request has them
			}
		case msgInvalidate:
			ok = r.invalidated()
		}
		closeAll(fds)
		if !ok {
			break
		}
	}
	r.mu.Lock()
	r.gone, r.current = true, nil
	r.mu.Unlock()
	r.answer(reply{errno: syscall.ENODEV})
	r.stop()
	_ = r.c.Close() // it has no data that could be lost
}

// stop has the importers of this process give up what they have mapped.
func (r *remoteBuffer) stop() {
	if !r.buffer.Get() {
		return // it is released: nothing is mapped
	}
	defer r.buffer.Put()
	r.buffer.resv.Lock()
	defer r.buffer.resv.Unlock()
	r.buffer.InvalidateMappings()
}

// answer hands a reply to the request that waits for it. It reports whether one does.
func (r *remoteBuffer) answer(a reply) bool {
	r.mu.Lock()
	to := r.reply
	r.reply = nil
	if to != nil && a.mapping != nil {
		r.current = a.mapping
	}
	r.mu.Unlock()
	if to == nil {
		return false
	}
	to <- a
	return true
}

// fence takes the exporter's answer to EXPORT_FENCE or IMPORT_FENCE.
func (r *remoteBuffer) fence(errno syscall.Errno, fds []int) bool {
	if len(fds) > 1 || errno != 0 && len(fds) != 0 {
		return false
	}
	a := reply{errno: errno, fence: -1}
	if len(fds) == 1 {
		a.fence = fds[0]
	}
	return r.answer(a)
}

// mapped takes the exporter's answer to MAP: memory files, and where in them the segments lie.
func (r *remoteBuffer) mapped(args []uint64, fds []int) bool {
	if len(args) == 0 {
		return false
	}
	if args[0] != 0 {
		return r.answer(reply{errno: syscall.Errno(args[0])})
	}
	if len(args)%3 != 2 || len(fds) == 0 || args[1]&givenUp != 0 && len(fds) != 1 {
		return false
	}
	m := &remoteMapping{fd: -1, uses: 1}
	err := m.open(fds, args[1]&givenUp != 0)
	if err != nil {
		m.close()
		return r.notMapped(err)
	}
	if !m.lay(args[2:], r.buffer.cfg.Size) || !r.answer(reply{mapping: m}) {
		m.close() // the exporter's mistake is what matters
		return false
	}
	return true
}

// noRoom is called when the descriptors of an answer could not be received, because the process has too
// many: the request fails. It reports whether there was one.
func (r *remoteBuffer) noRoom() bool {
	r.mu.Lock()
	maps := r.maps
	r.mu.Unlock()
	if maps {
		return r.notMapped(syscall.EMFILE)
	}
	return r.answer(reply{errno: syscall.EMFILE})
}

// notMapped lets a MAP fail that the exporter has granted: the exporter hears that the mapping is given up.
func (r *remoteBuffer) notMapped(err error) bool {
	return r.send(msgUnmapped) == nil && r.answer(reply{errno: syscall.Errno(errnoOf(err))})
}

// open maps the files. With keep, it keeps a descriptor of the only one.
func (m *remoteMapping) open(fds []int, keep bool) error {
	for _, fd := range fds {
		b, err := sys.MapSharedFile(fd)
		if err != nil {
			return err
		}
		m.files = append(m.files, b)
	}
	if keep {
		fd, err := sys.DupFD(fds[0])
		if err != nil {
			return err
		}
		m.fd = fd
	}
	return nil
}

// lay makes the table of segments: file, offset and length of each. It reports whether they are
// inside the files, and as long as the buffer together.
func (m *remoteMapping) lay(segments []uint64, size uint64) bool {
	var list [][]byte
	f := &files{fds: []int{m.fd}}
	total := uint64(0)
	for s := segments; len(s) > 0; s = s[3:] {
		file, off, n := s[0], s[1], s[2]
		if file >= uint64(len(m.files)) {
			return false
		}
		b := m.files[file]
		if has := uint64(len(b)); off > has || n > has-off || n > size-total {
			return false
		}
		if n == 0 {
			continue
		}
		list = append(list, b[off:][:n:n])
		f.segments = append(f.segments, fileExtent{0, extent{int(off), int(n)}})
		total += n
	}
	if total != size {
		return false
	}
	m.table = NewTable(list...)
	m.table.owner = m
	if m.fd >= 0 {
		f.place = m.files[0]
		m.table.files = f
	}
	return true
}

// close unmaps the files.
func (m *remoteMapping) close() {
	for _, b := range m.files {
		_ = sys.FreeMapped(b) // it is our own mapping
	}
	if m.fd >= 0 {
		_ = sys.CloseFD(m.fd)
	}
	m.files, m.fd = nil, -1
}

// invalidated is called when the exporter wants the mapping to be given up.
func (r *remoteBuffer) invalidated() bool {
	r.mu.Lock()
	m := r.current
	if r.current = nil; m != nil {
		m.stale = true
		r.leaving++
	}
	r.mu.Unlock()
	if m == nil {
		return r.send(msgInvalidated) == nil
	}
	// The last unmap answers. An importer of this process may hold the reservation lock and wait for an
	// answer that this goroutine has yet to read.
	go r.stop()
	return true
}

// send sends a message that needs no answer.
func (r *remoteBuffer) send(kind message, args ...uint64) error {
	return sys.SendFDs(r.c, encode(kind, args...))
}

// ask sends a request and waits for the answer. The reservation is locked, so there is one at a
// time. fds are sent with it.
func (r *remoteBuffer) ask(msg []byte, fds ...int) (reply, error) {
	c := make(chan reply, 1)
	r.mu.Lock()
	if r.gone {
		r.mu.Unlock()
		return reply{}, syscall.ENODEV
	}
	kind, _ := decode(msg)
	r.reply, r.maps = c, kind == msgMap
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), remotePatience)
	defer cancel()
	err := sys.SendFDs(r.c, msg, fds...)
	if err == nil {
		select {
		case a := <-c:
			if a.errno != 0 {
				return reply{}, a.errno
			}
			return a, nil
		case <-ctx.Done():
			err = syscall.ETIMEDOUT
		}
	} else {
		err = syscall.ENODEV // the exporter's process has ended, and the reader has yet to see it
	}
	// The answer must not come later and be taken for another's: the connection ends.
	_ = r.c.Close()
	r.mu.Lock()
	answered := r.reply != c
	r.reply = nil
	r.mu.Unlock()
	if answered {
		a := <-c
		if a.mapping != nil {
			r.unuse(a.mapping)
		}
		if a.fence > 0 {
			_ = sys.CloseFD(a.fence) // it is our own
		}
	}
	return reply{}, err
}

// The exporter's operations, in this process.

func (r *remoteBuffer) mapping(_ *Attachment, dir Direction) (*Table, error) {
	if err := r.letLeave(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	if m := r.current; m != nil {
		m.uses++
		r.mu.Unlock()
		return m.table, nil
	}
	r.mu.Unlock()
	a, err := r.ask(encode(msgMap, uint64(Bidirectional))) // for all importers, whatever their direction
	if err != nil {
		return nil, fmt.Errorf("mapping for %v: %w", dir, err)
	}
	return a.mapping.table, nil
}

// letLeave waits until the mappings that the exporter has taken away are given up. The exporter holds its
// own lock until they are, and could not answer a MAP. stop needs the lock of this process, which the caller
// has: letLeave does what it does, and waits for the importers' fences.
func (r *remoteBuffer) letLeave() error {
	if !r.isLeaving() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), remotePatience/2)
	defer cancel()
	for {
		r.buffer.InvalidateMappings()
		if !r.isLeaving() {
			return nil
		}
		err := r.buffer.resv.Wait(ctx, Bookkeep)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return ib.Errorf("dma_buf_map_attachment", syscall.EBUSY, "the buffer is moving, and an importer has yet to give it up: %v", err)
		}
		time.Sleep(50 * time.Microsecond) // an importer may not have noticed the end of its work yet
	}
}

func (r *remoteBuffer) isLeaving() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leaving > 0
}

func (r *remoteBuffer) unmap(_ *Attachment, t *Table, _ Direction) {
	r.unuse(t.owner.(*remoteMapping))
}

// unuse gives up a use of a mapping. With the last one the mapping goes, and the exporter is told.
func (r *remoteBuffer) unuse(m *remoteMapping) {
	r.mu.Lock()
	m.uses--
	last, stale := m.uses == 0, m.stale
	if last && r.current == m {
		r.current = nil
	}
	if last && stale {
		r.leaving--
	}
	r.mu.Unlock()
	if !last {
		return
	}
	m.close()
	// If the exporter's process has ended, nobody waits for these.
	if stale {
		var written uint64
		if r.buffer.written.Swap(false) {
			written = 1
		}
		_ = r.send(msgInvalidated, written)
	}
	_ = r.send(msgUnmapped)
}

func (r *remoteBuffer) pin(*Attachment) error {
	_, err := r.ask(encode(msgPin))
	return err
}

func (r *remoteBuffer) unpin(*Attachment) { _ = r.send(msgUnpin) }

func (r *remoteBuffer) release(*Buffer) { _ = r.c.Close() }

// exportFence asks the exporter's process for a descriptor of its fences.
func (r *remoteBuffer) exportFence(ctx context.Context, usage Usage) (int, error) {
	a, err := r.askFence(ctx, encode(msgExportFence, uint64(usage)))
	switch {
	case err != nil:
		return -1, err
	case a.fence < 0:
		return -1, fmt.Errorf("an answer without a fence: %w", syscall.EPROTO)
	}
	return a.fence, nil
}

// importFence sends the descriptor of a fence to the exporter's process.
func (r *remoteBuffer) importFence(ctx context.Context, fd int, usage Usage) error {
	if _, _, err := sys.FenceFDOf(fd); err != nil {
		return err
	}
	a, err := r.askFence(ctx, encode(msgImportFence, uint64(usage)), fd)
	if err == nil && a.fence >= 0 {
		_ = sys.CloseFD(a.fence) // nobody has asked for it
	}
	return err
}

func (r *remoteBuffer) askFence(ctx context.Context, msg []byte, fds ...int) (reply, error) {
	if err := r.buffer.resv.LockContext(ctx); err != nil {
		return reply{}, fmt.Errorf("the buffer's reservation lock: %w: %w", err, syscall.ETIMEDOUT)
	}
	defer r.buffer.resv.Unlock()
	return r.ask(msg, fds...)
}

// waitFences waits for the fences that the exporter's process has now. If that process ends, they
// do.
func (r *remoteBuffer) waitFences(ctx context.Context, usage Usage) error {
	fd, err := r.exportFence(ctx, usage)
	if err != nil {
		return err
	}
	f, err := FenceFromFD(fd)
	_ = sys.CloseFD(fd) // it is our own
	if err != nil {
		return err
	}
	defer f.Forget() // nobody else has the fence
	return waitFor(ctx, f)
}

// processOf returns the name of the socket that a descriptor's name leads to.
func processOf(fd int) (name string, ok bool) {
	name, err := sys.MemfdName(fd)
	if err != nil || !strings.HasPrefix(name, handlePrefix) || len(name) != len(handlePrefix)+2*tokenBytes {
		return "", false
	}
	return name, true
}
