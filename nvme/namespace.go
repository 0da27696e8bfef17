package nvme

// Storage: what a namespace is made of. The two kinds here keep each logical block whole: a read beside a write of the
// same block returns the old or the new one.

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
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
		c.mu.RLock()
		if c.data == nil {
			clear(p[done : done+n])
		} else {
			copy(p[done:done+n], c.data[at:])
		}
		c.mu.RUnlock()
		done += n
	}
	return len(p), nil
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if !inside(off, int64(len(p)), m.size) {
		return 0, io.ErrUnexpectedEOF
	}
	for done := 0; done < len(p); {
		c, at := m.find(off + int64(done))
		n := min(len(p)-done, chunkSize-at)
		c.mu.Lock()
		if c.data == nil {
			c.data = make([]byte, chunkSize)
		}
		copy(c.data[at:], p[done:done+n])
		c.mu.Unlock()
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

// File is a namespace in a file or block device.
type File struct {
	f         *os.File
	size      int64
	blockSize int
	readOnly  bool
	hole      func(off, n int64) error // makes a hole in the file; EOPNOTSUPP if its file system has none

	// Each guards the MiBs of the file whose number leaves its index as remainder, so that a block is not read while
	// it is half written.
	stripes [64]sync.RWMutex
}

const stripeSize = 1 << 20

var _ interface {
	Namespace
	Protected
} = (*File)(nil)

// OpenFile opens a file or block device as a namespace. What is left of it after the last whole block is not used.
//
// Errors: those of open; EINVAL for a block size that is no power of two from 512 to 65536, or a file without a block.
func OpenFile(path string, blockSize int, readOnly bool) (*File, error) {
	const op = "nvme_open_file"
	flag := os.O_RDWR
	if readOnly {
		flag = os.O_RDONLY
	}
	f, err := os.OpenFile(path, flag, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	size, err := f.Seek(0, io.SeekEnd) // also right for block devices
	if err == nil && blockSize > 0 {
		size -= size % int64(blockSize)
	}
	if err == nil {
		err = checkGeometry(op, size, blockSize)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	ns := &File{f: f, size: size, blockSize: blockSize, readOnly: readOnly}
	ns.hole = ns.punch
	return ns, nil
}

// Size returns the size in bytes.
func (f *File) Size() int64 { return f.size }

// BlockSize returns the size of a logical block.
func (f *File) BlockSize() int { return f.blockSize }

// ReadOnly reports whether writes are refused.
func (f *File) ReadOnly() bool { return f.readOnly }

// Flush writes everything to stable storage.
func (f *File) Flush() error {
	if f.readOnly {
		return nil
	}
	return f.f.Sync()
}

// Close closes the file. Closing again does nothing.
func (f *File) Close() error {
	if err := f.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// ReadAt reads blocks.
func (f *File) ReadAt(p []byte, off int64) (int, error) {
	if !inside(off, int64(len(p)), f.size) {
		return 0, io.ErrUnexpectedEOF
	}
	return f.each(len(p), off, false, func(from, to int) (int, error) {
		n, err := f.f.ReadAt(p[from:to], off+int64(from))
		if n == to-from {
			err = nil // ReadAt may report the end of the file together with all that was asked for
		}
		return n, err
	})
}

// WriteAt writes blocks.
func (f *File) WriteAt(p []byte, off int64) (int, error) {
	if f.readOnly {
		return 0, ErrReadOnly
	}
	if !inside(off, int64(len(p)), f.size) {
		return 0, io.ErrUnexpectedEOF
	}
	return f.each(len(p), off, true, func(from, to int) (int, error) { return f.f.WriteAt(p[from:to], off+int64(from)) })
}

// each calls do for each part of n bytes at off that one lock guards, with that lock held, until one fails.
func (f *File) each(n int, off int64, write bool, do func(from, to int) (int, error)) (int, error) {
	for done := 0; done < n; {
		at := off + int64(done)
		to := done + min(n-done, int(stripeSize-at%stripeSize))
		mu := &f.stripes[at/stripeSize%int64(len(f.stripes))]
		got, err := locked(mu, write, done, to, do)
		done += got
		if err != nil {
			return done, err
		}
	}
	return n, nil
}

func locked(mu *sync.RWMutex, write bool, from, to int, do func(from, to int) (int, error)) (int, error) {
	if write {
		mu.Lock()
		defer mu.Unlock()
	} else {
		mu.RLock()
		defer mu.RUnlock()
	}
	return do(from, to)
}

var zeros [64 << 10]byte

// Discard makes a hole in the file, or writes zeros if its file system has no holes.
func (f *File) Discard(off, n int64) error {
	if f.readOnly {
		return ErrReadOnly
	}
	if !inside(off, n, f.size) {
		return io.ErrUnexpectedEOF
	}
	for n > 0 {
		part := min(n, stripeSize-off%stripeSize)
		if err := f.zeroStripe(off, part); err != nil {
			return err
		}
		off, n = off+part, n-part
	}
	return nil
}

// zeroStripe makes bytes zero that one lock guards.
func (f *File) zeroStripe(off, n int64) error {
	mu := &f.stripes[off/stripeSize%int64(len(f.stripes))]
	mu.Lock()
	defer mu.Unlock()
	err := f.hole(off, n)
	if !errors.Is(err, syscall.EOPNOTSUPP) && !errors.Is(err, syscall.EINVAL) { // EINVAL: smaller than a device's blocks
		return err
	}
	for n > 0 {
		part := min(n, int64(len(zeros)))
		if _, err := f.f.WriteAt(zeros[:part], off); err != nil {
			return err
		}
		off, n = off+part, n-part
	}
	return nil
}

func (f *File) punch(off, n int64) error {
	raw, err := f.f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = sys.PunchHole(int(fd), off, n) }); err != nil {
		return err
	}
	return inner
}
