package nvme

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// File is a namespace in a file or block device.
type File struct {
	f        *os.File
	size     int64
	cfg      FileConfig
	memAlign int                      // what O_DIRECT wants of memory
	hole     func(off, n int64) error // makes a hole in the file; EOPNOTSUPP if its file system has none

	direct, copied atomic.Uint64

	// Each guards the MiBs of the file whose number leaves its index as remainder, so that a block is not read while
	// it is half written.
	stripes [64]sync.RWMutex
}

const stripeSize = 1 << 20

var _ interface {
	Namespace
	Protected
} = (*File)(nil)

// FileConfig is how a file is used.
type FileConfig struct {
	BlockSize int // a power of two from 512 to 65536
	ReadOnly  bool

	// Direct passes the kernel's cache by (O_DIRECT): the disk moves data from and to the memory of the caller, which
	// may be memory of another device. Memory that the disk does not reach is copied; Stats counts that.
	Direct bool
}

// FileStats is what a file with Direct has moved, in bytes.
type FileStats struct {
	Direct uint64 // between the disk and the caller's memory
	Copied uint64 // through memory of this process
}

// OpenFile opens a file or block device as a namespace. What is left of it after the last whole block is not used.
//
// Errors: those of open; EINVAL for a block size that is none, or smaller than O_DIRECT takes, or a file without a block.
func OpenFile(path string, cfg FileConfig) (*File, error) {
	const op = "nvme_open_file"
	flag := os.O_RDWR
	if cfg.ReadOnly {
		flag = os.O_RDONLY
	}
	if cfg.Direct {
		flag |= sys.ODirect
	}
	f, err := os.OpenFile(path, flag, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	ns := &File{f: f, cfg: cfg}
	ns.hole = ns.punch
	if err := ns.open(op); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return ns, nil
}

// open looks at the file.
func (f *File) open(op string) error {
	size, err := f.f.Seek(0, io.SeekEnd) // also right for block devices
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if f.cfg.BlockSize > 0 {
		size -= size % int64(f.cfg.BlockSize)
	}
	if err := checkGeometry(op, size, f.cfg.BlockSize); err != nil {
		return err
	}
	f.size = size
	if !f.cfg.Direct {
		return nil
	}
	offset := 0
	if f.memAlign, offset, err = sys.DirectAlignment(f.f); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if f.cfg.BlockSize%offset != 0 {
		return ib.Errorf(op, syscall.EINVAL, "blocks of %d bytes: O_DIRECT takes multiples of %d", f.cfg.BlockSize, offset)
	}
	return nil
}

// Stats returns what was moved.
func (f *File) Stats() FileStats {
	return FileStats{Direct: f.direct.Load(), Copied: f.copied.Load()}
}

// Size returns the size in bytes.
func (f *File) Size() int64 { return f.size }

// BlockSize returns the size of a logical block.
func (f *File) BlockSize() int { return f.cfg.BlockSize }

// ReadOnly reports whether writes are refused.
func (f *File) ReadOnly() bool { return f.cfg.ReadOnly }

// Flush writes everything to stable storage.
func (f *File) Flush() error {
	if f.cfg.ReadOnly {
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
	return f.each(len(p), off, false, func(from, to int) (int, error) { return f.move(p[from:to], off+int64(from), false) })
}

// WriteAt writes blocks.
func (f *File) WriteAt(p []byte, off int64) (int, error) {
	if f.cfg.ReadOnly {
		return 0, ErrReadOnly
	}
	if !inside(off, int64(len(p)), f.size) {
		return 0, io.ErrUnexpectedEOF
	}
	return f.each(len(p), off, true, func(from, to int) (int, error) { return f.move(p[from:to], off+int64(from), true) })
}

// move moves bytes that one lock guards.
func (f *File) move(p []byte, off int64, write bool) (int, error) {
	if !f.cfg.Direct {
		return f.transfer(p, off, write)
	}
	if sys.AddrOf(p)%uint64(f.memAlign) == 0 { //nolint:gosec // positive
		n, err := f.transfer(p, off, write)
		if n > 0 || !unreachable(err) {
			f.direct.Add(uint64(n)) //nolint:gosec // not negative
			return n, err
		}
	}
	return f.copy(p, off, write)
}

// unreachable reports whether an error says that the disk does not reach the memory: EINVAL since the kernel knows such
// memory, and EREMOTEIO where the disk's driver finds it out.
func unreachable(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EREMOTEIO)
}

// copy moves bytes through memory of this process.
func (f *File) copy(p []byte, off int64, write bool) (int, error) {
	room := bounce.Get().(*[]byte) //nolint:forcetypeassert // nothing else is in it
	defer bounce.Put(room)
	b := (*room)[:len(p)]
	if write {
		copy(b, p)
	}
	n, err := f.transfer(b, off, write)
	if !write {
		copy(p, b[:n])
	}
	f.copied.Add(uint64(n)) //nolint:gosec // not negative
	return n, err
}

// bounce has memory of stripeSize bytes that begins at a page.
var bounce = sync.Pool{New: func() any {
	b := alignedBytes(stripeSize)
	return &b
}}

// alignedBytes makes memory that begins at a page, as any disk takes it. Go does not move what is on its heap.
func alignedBytes(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	return b[-sys.AddrOf(b)%page:][:n:n]
}

func (f *File) transfer(p []byte, off int64, write bool) (int, error) {
	if write {
		return f.f.WriteAt(p, off)
	}
	n, err := f.f.ReadAt(p, off)
	if n == len(p) {
		err = nil // ReadAt may report the end of the file together with all that was asked for
	}
	return n, err
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

// zeros is what is written where no hole can be made. It begins at a page, as O_DIRECT wants it.
var zeros = alignedBytes(64 << 10)

// Discard makes a hole in the file, or writes zeros if its file system has no holes.
func (f *File) Discard(off, n int64) error {
	if f.cfg.ReadOnly {
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
