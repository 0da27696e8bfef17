package dmabuf

// An exporter of ordinary memory. Its life:
//
//  1. Alloc takes a place: a memory file, cut into the segments of the table.
//  2. Importers map the place. The program reads and writes by ReadAt and WriteAt.
//  3. Move tells the importers, waits for what they still do, copies the bytes to another place,
//     and poisons and gives up the old one. Evict moves the bytes to where no importer can reach
//     them, until one maps the buffer again. Revoke takes them away for good.
//     A place that no other process has seen is kept for the next move, for a moment (spare.go).
//  4. Close gives the program's reference back. With the last reference the memory goes.

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// poison is what memory holds that a buffer has left.
const poison = 0xdb

// MemoryConfig is what memory Alloc makes; the zero value of each field but Size is good.
type MemoryConfig struct {
	Size     uint64
	Segments int    // how many pieces, not next to each other, at most 65536; 0: one
	Name     string // of the buffer
	// NoPin: importers that want to pin the memory are refused, with EOPNOTSUPP, as by memory
	// of RDMA devices.
	NoPin bool
}

// Memory is a buffer of ordinary memory.
type Memory struct {
	buffer   *Buffer
	cfg      MemoryConfig
	segments []extent     // where in a place each segment lies
	file     int          // memory of FromFile: the file, for all places; otherwise -1
	id       sys.HandleID // of the file
	closed   atomic.Bool  // Close was called
	spare    spare

	// What follows is guarded by the reservation lock.
	place   *place            // nil: revoked, and no access is under way
	tables  map[*Table]*place // what is mapped
	pins    int
	evicted bool
	revoked bool
	moves   uint64
}

// maxSegments bounds what a table costs.
const maxSegments = 1 << 16

type extent struct{ off, n int }

// place is where the bytes are.
type place struct {
	fd       int
	b        []byte
	mappings int
	left     bool        // the buffer is elsewhere: the last Unmap frees the place
	ofFile   bool        // b is one mapping of a file that has others, and whose bytes stay
	shown    atomic.Bool // another process may have mapped it
}

// Alloc makes a buffer of memory, all zero.
//
// Errors: EINVAL if there are no bytes, too many segments or fewer pages than segments; ENOMEM;
// EMFILE.
func Alloc(cfg MemoryConfig) (*Memory, error) {
	const op = "dmabuf_alloc"
	page := uint64(os.Getpagesize())
	if cfg.Segments == 0 {
		cfg.Segments = 1
	}
	pages := cfg.Size/page + min(1, cfg.Size%page)
	switch {
	case cfg.Size == 0 || cfg.Size > math.MaxInt-page:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes", cfg.Size)
	case cfg.Segments < 0 || uint64(cfg.Segments) > min(pages, maxSegments):
		return nil, ib.Errorf(op, syscall.EINVAL, "%d segments of %d pages", cfg.Segments, pages)
	}
	m := &Memory{cfg: cfg, file: -1, tables: make(map[*Table]*place)}
	m.cut(int(pages), int(page))
	if err := m.export(op, "verbena"); err != nil {
		return nil, err
	}
	return m, nil
}

// export takes a place and makes the buffer.
func (m *Memory) export(op, exporter string) error {
	ops := Ops{Map: m.mapping, Unmap: m.unmap, Release: m.release, Pin: m.pin, Unpin: m.unpin}
	if m.cfg.Segments == 1 {
		ops.Vmap, ops.Vunmap = m.vmap, func(*Buffer, []byte) {}
	}
	var err error
	if m.place, err = m.newPlace(); err != nil {
		return named(op, err)
	}
	if m.buffer, err = Export(Config{Ops: ops, Size: m.cfg.Size, Exporter: exporter, Priv: m}); err == nil {
		err = m.buffer.SetName(m.cfg.Name)
	}
	if err != nil {
		m.place.free()
		return err
	}
	m.buffer.enterStorm()
	return nil
}

// cut divides the pages among the segments. In a place they lie in the opposite order, so that
// no two that follow each other are next to each other.
func (m *Memory) cut(pages, page int) {
	count, end, left := m.cfg.Segments, pages*page, int(m.cfg.Size)
	for i := range count {
		n := pages / count * page
		if i < pages%count {
			n += page
		}
		end -= n
		m.segments = append(m.segments, extent{end, min(n, left)})
		left -= min(n, left)
	}
}

func (m *Memory) newPlace() (*place, error) {
	if m.file >= 0 {
		return placeOf(m.file)
	}
	page := os.Getpagesize()
	fd, b, err := sys.NewMappedFile("verbena-dmabuf", (int(m.cfg.Size)+page-1)&^(page-1))
	if err != nil {
		return nil, err
	}
	return &place{fd: fd, b: b}, nil
}

func (p *place) free() {
	_ = sys.FreeMapped(p.b) // it is our own mapping
	_ = sys.CloseFD(p.fd)
	p.b = nil
}

// fault makes the pages of a new place present, so that a move does not wait for the kernel to
// clear them while importers wait for the move.
func (p *place) fault() error {
	err := sys.PopulateMapped(p.b)
	if errors.Is(err, syscall.EINVAL) { // the kernel is too old
		for i := 0; i < len(p.b); i += os.Getpagesize() {
			p.b[i] = 0
		}
		return nil
	}
	return err
}

// leave notes that the buffer has left the place. It reports whether the caller must discard it:
// if it is still mapped, leave poisons it, and the last unmap frees it.
func (p *place) leave() (unused bool) {
	p.left = true
	if p.mappings == 0 {
		return true
	}
	p.poison()
	return false
}

// discard poisons and frees a place that is not mapped here: another process may still have it.
func (p *place) discard() {
	if !p.ofFile {
		p.poison()
	}
	p.free()
}

// copyStill copies a place that processes may still write to, each of them the rest of one message,
// until it finds the copy the same as the place. Every byte then was what it is here from the
// time when it was copied to the time when it was compared, so all of them were so at once, when the
// copy was made: a process that stores the last word last has stored the others, too. A process
// that goes on writing, because nobody is left to stop it, is not waited for.
func (p *place) copyStill(from *place) {
	const rounds = 16
	for range rounds {
		if bytes.Equal(p.b, from.b) {
			return
		}
		p.take(from)
	}
}

func (p *place) poison() {
	if p.ofFile && sys.ReplaceMapped(p.b) != nil { // the file's bytes are not ours to overwrite
		return
	}
	p.b[0] = poison
	for n := 1; n < len(p.b); {
		n += copy(p.b[n:], p.b[:min(n, copyPiece)])
	}
}

// copyPiece is how much is copied at once. From 1 MiB on, Go's copy stores past the caches, which
// takes three times as long where the bytes would fit in there. Importers wait for a move's copy.
const copyPiece = 64 << 10

// take copies the bytes of another place.
func (p *place) take(from *place) {
	for off := 0; off < len(p.b); off += copyPiece {
		copy(p.b[off:min(off+copyPiece, len(p.b))], from.b[off:])
	}
}

// Buffer returns the buffer, for importers. It is valid until Close, or longer for a caller that
// takes a reference.
func (m *Memory) Buffer() *Buffer { return m.buffer }

// Close gives the program's reference back. The memory goes when no importer uses it any more.
// It does not wait for a Move under way. Closing again does nothing.
func (m *Memory) Close() error {
	if !m.closed.Swap(true) {
		m.buffer.Put()
	}
	return nil
}

// Moves returns how often the memory has moved.
func (m *Memory) Moves() uint64 {
	m.buffer.resv.Lock()
	defer m.buffer.resv.Unlock()
	return m.moves
}

// The exporter's operations.

func (m *Memory) pin(*Attachment) error {
	switch {
	case m.cfg.NoPin:
		return ib.Errorf("dma_buf_pin", syscall.EOPNOTSUPP, "the memory cannot be pinned")
	case m.revoked:
		return errRevoked
	}
	if err := m.comeBack(); err != nil {
		return err
	}
	m.pins++
	return nil
}

func (m *Memory) unpin(*Attachment) { m.pins-- }

var errRevoked = ib.Errorf("dma_buf_map_attachment", syscall.ENODEV, "the memory is revoked")

func (m *Memory) mapping(*Attachment, Direction) (*Table, error) {
	if m.revoked {
		return nil, errRevoked
	}
	if err := m.comeBack(); err != nil {
		return nil, err
	}
	segments := make([][]byte, len(m.segments))
	for i, s := range m.segments {
		segments[i] = m.place.b[s.off:][:s.n:s.n]
	}
	t := NewTable(segments...)
	t.files = &files{fds: []int{m.place.fd}, segments: make([]fileExtent, len(m.segments))}
	if !m.place.ofFile { // a file that the program has mapped is never given up
		t.files.place = m.place.b
	}
	t.files.shown = &m.place.shown
	for i, s := range m.segments {
		t.files.segments[i].extent = s
	}
	m.tables[t] = m.place
	m.place.mappings++
	return t, nil
}

func (m *Memory) unmap(_ *Attachment, t *Table, _ Direction) {
	p := m.tables[t]
	delete(m.tables, t)
	if p.mappings--; p.mappings == 0 && p.left {
		p.free()
	}
}

func (m *Memory) vmap(*Buffer) ([]byte, error) {
	if m.revoked {
		return nil, errRevoked
	}
	if err := m.comeBack(); err != nil {
		return nil, err
	}
	return m.place.b[:m.cfg.Size], nil
}

func (m *Memory) release(*Buffer) {
	if p := m.place; p != nil {
		m.place = nil
		p.free()
	}
	m.spare.close()
	if m.file >= 0 {
		m.forgetFile()
	}
}

// comeBack brings memory that was evicted to a place where importers reach it. The caller has
// locked the reservation, and nothing is mapped.
func (m *Memory) comeBack() error {
	if !m.evicted {
		return nil
	}
	to, err := m.newPlace()
	if err != nil {
		return ib.Errorf("dma_buf_map_attachment", syscall.ENOMEM, "%v", err)
	}
	if old := m.moveTo(to); old != nil {
		old.discard()
	}
	m.evicted = false
	return nil
}

// moveTo moves the bytes, and returns the former place if the caller must discard it. The caller has
// locked the reservation, and nobody writes to the bytes.
func (m *Memory) moveTo(to *place) (unused *place) {
	if !to.ofFile {
		to.take(m.place)
		if m.buffer.written.Swap(false) {
			to.copyStill(m.place)
		}
	}
	if m.place.leave() {
		unused = m.place
	}
	m.place = to
	m.moves++
	return unused
}

// Move moves the memory to another place. Importers that are dynamic map it there when they
// need it next.
//
// Errors: EBUSY if an importer has pinned the memory, or the CPU has mapped it; ENODEV if it is
// revoked; ENOMEM; EINVAL after Close; ETIMEDOUT if the context ends before Move has the
// reservation lock and the Bookkeep fences are signalled. Then the memory has not moved.
func (m *Memory) Move(ctx context.Context) error { return m.move(ctx, "dmabuf_move", false) }

// Evict moves the memory to where importers cannot reach it. It comes back when one of them
// needs it next. Errors: those of Move.
func (m *Memory) Evict(ctx context.Context) error { return m.move(ctx, "dmabuf_evict", true) }

func (m *Memory) move(ctx context.Context, op string, evict bool) error {
	// What cannot move now is refused before pages are taken for it.
	if err := m.locked(ctx, op, func() error { return m.mayMove(op) }); err != nil {
		return err
	}
	to, err := m.readyPlace()
	if err != nil {
		return ib.Errorf(op, syscall.ENOMEM, "%v", err)
	}
	var old *place // is discarded without the lock: importers need not wait for that
	err = m.locked(ctx, op, func() error {
		if err := m.mayMove(op); err != nil {
			return err
		}
		if err := m.stop(ctx, op); err != nil {
			return err
		}
		old = m.moveTo(to)
		m.evicted = evict
		return nil
	})
	if err != nil {
		to.free()
	}
	switch {
	case old == nil:
	case evict: // the memory is wanted for something else
		old.discard()
	default:
		m.spare.keep(old)
	}
	return err
}

// readyPlace returns a place whose pages are present.
func (m *Memory) readyPlace() (*place, error) {
	if p := m.spare.take(); p != nil {
		return p, nil
	}
	p, err := m.newPlace()
	if err != nil {
		return nil, err
	}
	if err := p.fault(); err != nil {
		p.free()
		return nil, err
	}
	return p, nil
}

// mayMove returns why the memory cannot move. The caller has locked the reservation.
func (m *Memory) mayMove(op string) error {
	switch {
	case m.revoked:
		return ib.Errorf(op, syscall.ENODEV, "the memory is revoked")
	case m.pins > 0 || m.buffer.vmaps > 0:
		return ib.Errorf(op, syscall.EBUSY, "the memory is pinned")
	}
	return nil
}

// Revoke takes the memory away for good: importers cannot map it any more, and accesses by
// memory regions end in errors. Revoking again does nothing.
//
// Errors: EBUSY if an importer that has pinned the memory cannot be told of it; EINVAL and
// ETIMEDOUT as for Move. If the fences were not signalled in time the memory is revoked, but
// accesses may still be under way: another Revoke waits for them.
func (m *Memory) Revoke(ctx context.Context) error {
	const op = "dmabuf_revoke"
	return m.locked(ctx, op, func() error {
		if m.place == nil {
			return nil // revoked already
		}
		for _, a := range m.buffer.attachments {
			if a.pins > 0 && !a.Revocable() {
				return ib.Errorf(op, syscall.EBUSY, "an importer has pinned the memory, and cannot be told of its end")
			}
		}
		if m.buffer.vmaps > 0 {
			return ib.Errorf(op, syscall.EBUSY, "the CPU has mapped the memory")
		}
		m.revoked = true
		if err := m.stop(ctx, op); err != nil {
			return err
		}
		if m.place.leave() {
			m.place.discard()
		}
		m.place = nil
		m.spare.drop()
		return nil
	})
}

// locked runs do with the reservation locked, unless the memory is closed.
func (m *Memory) locked(ctx context.Context, op string, do func() error) error {
	r := m.buffer.resv
	if m.closed.Load() || !m.buffer.Get() {
		return ib.Errorf(op, syscall.EINVAL, "the memory is closed")
	}
	defer m.buffer.Put()
	if err := r.LockContext(ctx); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "the reservation lock: %v", err)
	}
	defer r.Unlock()
	return do()
}

// stop tells the importers, and waits for what they still do.
func (m *Memory) stop(ctx context.Context, op string) error {
	m.buffer.InvalidateMappings()
	if err := m.buffer.resv.Wait(ctx, Bookkeep); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's fences: %v", err)
	}
	return nil
}

// ReadAt reads from the memory, and WriteAt writes to it, as the CPU of the exporter's device:
// they wait for no fences but keep the memory from moving meanwhile. Errors: EFAULT if not all
// of the range is inside, then nothing is copied; EINVAL after Close; ENODEV if it is revoked.
func (m *Memory) ReadAt(b []byte, off int64) (int, error) {
	return m.access("dmabuf_read", b, off, func(at, b []byte) { copy(b, at) })
}

// WriteAt is explained at ReadAt.
func (m *Memory) WriteAt(b []byte, off int64) (int, error) {
	return m.access("dmabuf_write", b, off, func(at, b []byte) { copy(at, b) })
}

func (m *Memory) access(op string, b []byte, off int64, move func(at, b []byte)) (int, error) {
	size := m.cfg.Size
	if off < 0 || uint64(off) > size || uint64(len(b)) > size-uint64(off) {
		return 0, ib.Errorf(op, syscall.EFAULT, "%d bytes at %d are not inside a buffer of %d", len(b), off, size)
	}
	err := m.locked(context.Background(), op, func() error {
		if m.revoked {
			return ib.Errorf(op, syscall.ENODEV, "the memory is revoked")
		}
		for done := 0; done < len(b); {
			at := m.at(int(off)+done, len(b)-done)
			move(at, b[done:][:len(at)])
			done += len(at)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

// at returns the bytes at off that lie together, at most n.
func (m *Memory) at(off, n int) []byte {
	for _, s := range m.segments {
		if off < s.n {
			return m.place.b[s.off+off:][:min(n, s.n-off)]
		}
		off -= s.n
	}
	return nil
}
