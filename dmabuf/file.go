package dmabuf

// Buffers whose bytes are those of a memory file that the program has mapped, too: what a driver of
// graphics exports. The program's mappings show the same bytes, always.
//
// Such a buffer moves as its importers see it. A place is a mapping of the file. A move makes
// another one, and takes the former away: whoever still looks there finds poison. The pages
// themselves stay where they are, because a process cannot exchange pages under a program that writes
// to them.

import (
	"errors"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// ofFiles are the buffers of FromFile that live.
var ofFiles struct {
	mu sync.Mutex // guards by
	by map[sys.HandleID]*Memory
}

// FromFile returns the buffer of a memory file (memfd_create), with a reference ([Buffer.Put]). As long
// as the buffer lives, the same file leads to the same buffer. The descriptor stays the caller's, who
// may close it.
//
// Errors: EBADF if the descriptor is not open; EINVAL if it is no memory file, is empty, is not
// sealed against growing, shrinking and further seals, or the name has more than 31 bytes; EMFILE;
// ENOMEM.
func FromFile(fd int, exporter, name string) (*Buffer, error) {
	const op = "dmabuf_from_file"
	id, err := sys.HandleIDOf(fd)
	if err != nil {
		return nil, ib.Errorf(op, syscall.EBADF, "descriptor %d is not open", fd)
	}
	ofFiles.mu.Lock()
	defer ofFiles.mu.Unlock()
	if m := ofFiles.by[id]; m != nil && m.buffer.Get() {
		return m.buffer, nil
	}
	own, err := sys.DupFD(fd)
	if err != nil {
		return nil, descriptorError(op, err)
	}
	m := &Memory{file: own, id: id, tables: make(map[*Table]*place)}
	if err := m.exportFile(op, exporter, name); err != nil {
		_ = sys.CloseFD(own) // the first error says more
		return nil, err
	}
	if ofFiles.by == nil {
		ofFiles.by = make(map[sys.HandleID]*Memory)
	}
	ofFiles.by[id] = m
	return m.buffer, nil
}

func (m *Memory) exportFile(op, exporter, name string) error {
	// The caller may have replaced the file behind its number before it was duplicated.
	if id, err := sys.HandleIDOf(m.file); err != nil || id != m.id {
		return ib.Errorf(op, syscall.EBADF, "the descriptor became another file's")
	}
	p, err := placeOf(m.file)
	if err != nil {
		errno := syscall.EINVAL
		if errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EMFILE) {
			_ = errors.As(err, &errno)
		}
		return ib.Errorf(op, errno, "%v", err)
	}
	size := len(p.b)
	p.free()
	m.cfg = MemoryConfig{Size: uint64(size), Segments: 1, Name: name}
	m.segments = []extent{{0, size}}
	return m.export(op, exporter)
}

// placeOf maps a memory file.
func placeOf(file int) (*place, error) {
	fd, err := sys.DupFD(file)
	if err != nil {
		return nil, err
	}
	b, err := sys.MapFile(fd)
	if err != nil {
		_ = sys.CloseFD(fd) // the first error says more
		return nil, err
	}
	return &place{fd: fd, b: b, ofFile: true}, nil
}

// forgetFile is called when the buffer of a file is released.
func (m *Memory) forgetFile() {
	ofFiles.mu.Lock()
	if ofFiles.by[m.id] == m { // a new buffer of the file may have taken its place
		delete(ofFiles.by, m.id)
	}
	ofFiles.mu.Unlock()
	_ = sys.CloseFD(m.file)
}

// File returns a new descriptor of the memory file of a buffer of [FromFile], which the caller closes.
// It fails with EOPNOTSUPP for other buffers, and with EMFILE.
func (b *Buffer) File() (int, error) {
	const op = "dmabuf_file"
	m, ok := b.cfg.Priv.(*Memory)
	if !ok || m.file < 0 {
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the buffer is not made of a memory file")
	}
	fd, err := sys.DupFD(m.file)
	if err != nil {
		return -1, descriptorError(op, err)
	}
	return fd, nil
}
