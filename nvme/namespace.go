package nvme

// Storage: what a namespace is made of, and the kind in memory; the one in a file is in file.go. Both keep each logical
// block whole: a read beside a write of the same block returns the old or the new one.

import (
	"errors"
	"io"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Namespace is storage of logical blocks. Offsets and lengths are in bytes, and multiples of the block size. All
// methods may be called at the same time.
type Namespace interface {
	// ReadAt and WriteAt move all of p, or return an error.
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)

	// Flush returns when everything written before is on stable storage.
	Flush() error

	// Discard gives blocks back. They read as zeros until they are written.
	Discard(off, n int64) error

	Size() int64
	BlockSize() int
}

// ErrReadOnly is what a namespace answers to writes that it does not allow; the command ends in StatusWriteProtected.
var ErrReadOnly = errors.New("nvme: the namespace is read-only")

// Protected is what a namespace implements that may be read-only.
type Protected interface{ ReadOnly() bool }

// Limits of block sizes, as powers of two.
const (
	minBlockShift = 9
	maxBlockShift = 16
)

// checkGeometry refuses block sizes that hosts do not take, and sizes that are no blocks.
func checkGeometry(op string, size int64, blockSize int) error {
	if blockSize < 1<<minBlockShift || blockSize > 1<<maxBlockShift || blockSize&(blockSize-1) != 0 {
		return ib.Errorf(op, syscall.EINVAL, "blocks of %d bytes: a power of two from 512 to 65536 is possible", blockSize)
	}
	if size < int64(blockSize) || size%int64(blockSize) != 0 {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes are not one or more blocks of %d", size, blockSize)
	}
	return nil
}

// inside reports whether n bytes at off lie in size bytes.
func inside(off, n, size int64) bool { return off >= 0 && n >= 0 && off <= size && n <= size-off }

// chunkSize is what one lock guards, and what memory is allocated in: a multiple of every block size.
const chunkSize = 256 << 10

// maxMemory bounds the table of chunks.
const maxMemory = 1 << 42

// memory is a namespace in memory, of which only chunks that were written exist.
type memory struct {
	size      int64
	blockSize int
	chunks    []chunk
}

type chunk struct {
	mu   sync.RWMutex // guards data and the bytes in it
	data []byte       // nil: all zeros
}

// NewMemory makes a namespace of zeros in memory. It takes memory as it is written, in pieces of 256 KiB, and gives
// such pieces back when they are discarded; apart from that, reading and writing allocate nothing.
//
// Errors: EINVAL for a block size that is no power of two from 512 to 65536, or a size that is no multiple of it.
// ENOMEM for more than 4 TiB.
func NewMemory(size int64, blockSize int) (Namespace, error) {
	const op = "nvme_new_memory"
	if err := checkGeometry(op, size, blockSize); err != nil {
		return nil, err
	}
	if size > maxMemory {
		return nil, ib.Errorf(op, syscall.ENOMEM, "%d bytes", size)
	}
	return &memory{size: size, blockSize: blockSize, chunks: make([]chunk, (size+chunkSize-1)/chunkSize)}, nil
}

func (m *memory) Size() int64    { return m.size }
func (m *memory) BlockSize() int { return m.blockSize }
func (m *memory) Flush() error   { return nil }

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	if !inside(off, int64(len(p)), m.size) {
		return 0, io.ErrUnexpectedEOF
	}
	for done := 0; done < len(p); {
		c, at := m.find(off + int64(done))
		n := min(len(p)-done, chunkSize-at)
		c.read(p[done:done+n], at)
		done += n
	}
	return len(p), nil
}

// read and write give the lock back also if p is memory that has gone away, and whoever called recovers from the fault.
func (c *chunk) read(p []byte, at int) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.data == nil {
		clear(p)
	} else {
		copy(p, c.data[at:])
	}
}

func (c *chunk) write(p []byte, at int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.data == nil {
		c.data = make([]byte, chunkSize)
	}
	copy(c.data[at:], p)
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if !inside(off, int64(len(p)), m.size) {
		return 0, io.ErrUnexpectedEOF
	}
	for done := 0; done < len(p); {
		c, at := m.find(off + int64(done))
		n := min(len(p)-done, chunkSize-at)
		c.write(p[done:done+n], at)
		done += n
	}
	return len(p), nil
}

func (m *memory) Discard(off, n int64) error {
	if !inside(off, n, m.size) {
		return io.ErrUnexpectedEOF
	}
	for n > 0 {
		c, at := m.find(off)
		part := min(n, int64(chunkSize-at))
		c.mu.Lock()
		if part == chunkSize {
			c.data = nil
		} else if c.data != nil {
			clear(c.data[at : at+int(part)])
		}
		c.mu.Unlock()
		off, n = off+part, n-part
	}
	return nil
}

// find returns the chunk of an offset, and where in it that is.
func (m *memory) find(off int64) (*chunk, int) {
	return &m.chunks[off/chunkSize], int(off % chunkSize)
}
