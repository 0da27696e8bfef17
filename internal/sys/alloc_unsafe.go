package sys

// Memory that the library allocates for regions: a sealed memory file, mapped in
// one piece, on huge pages where the system has some to give.
//
// Why this is sound. The mappings are made by the kernel at places that it chose,
// and the Go collector does not know them: a slice of one is good until FreeMapped.

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size of a huge page on the common architectures. Where it is another,
// newHuge asks the file for the size, and transparent huge pages are not used.
const hugePage = 2 << 20

// NewMappedFile makes a memory file of at least size bytes, zero and sealed, and
// maps it. A long file is on huge pages: on reserved ones if there are enough,
// otherwise on ordinary ones that the kernel is asked to join. The descriptor and the
// mapping are the caller's.
func NewMappedFile(name string, size int) (fd int, b []byte, err error) {
	if size <= 0 {
		return -1, nil, fmt.Errorf("memory of %d bytes: %w", size, unix.EINVAL)
	}
	if size >= hugePage {
		if fd, b, err := newHuge(name, size); err == nil {
			return fd, b, nil
		}
	}
	align := int(pageSize)
	if size >= hugePage {
		align = hugePage
	}
	if size > maxInt-align {
		return -1, nil, fmt.Errorf("memory of %d bytes: %w", size, unix.ENOMEM)
	}
	size = (size + align - 1) &^ (align - 1)
	if fd, err = NewMemfd(name, size); err != nil {
		return -1, nil, err
	}
	if b, err = mapAligned(fd, size, align); err != nil {
		_ = unix.Close(fd) // the first error says more
		return -1, nil, err
	}
	if align == hugePage {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a wish; the system may not want to
	}
	return fd, b, nil
}

const maxInt = int(^uint(0) >> 1)

// newHuge is NewMappedFile on reserved huge pages. The mapping reserves all of
// them, or fails.
func newHuge(name string, size int) (fd int, b []byte, err error) {
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
	if err != nil {
		return -1, nil, err
	}
	var fs unix.Statfs_t
	if err = unix.Fstatfs(fd, &fs); err == nil {
		page := int(fs.Bsize)
		if page <= 0 || page&(page-1) != 0 || size > maxInt-page {
			err = unix.EINVAL
		} else {
			size = (size + page - 1) &^ (page - 1)
			if err = sizeMemfd(fd, size); err == nil {
				b, err = mapReserved(fd, size)
			}
		}
	}
	if err != nil {
		_ = unix.Close(fd) // the first error says more
		return -1, nil, err
	}
	return fd, b, nil
}

// mapReserved maps a file on reserved huge pages, which the kernel aligns by itself. That often fails.
func mapReserved(fd, size int) ([]byte, error) {
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	return unsafe.Slice((*byte)(p), size), nil
}

// MapFile maps all of a memory file that came from another process. The file must be
// sealed, so that no process can make it shorter. The descriptor stays the caller's.
func MapFile(fd int) ([]byte, error) { return mapSealed(fd, memfdSeals) }

// MapSharedFile is MapFile for a memory file that somebody else has made: it must not shrink, but
// may grow, and is mapped as long as it is now.
func MapSharedFile(fd int) ([]byte, error) { return mapSealed(fd, unix.F_SEAL_SHRINK) }

// CannotShrink reports whether a descriptor is of a memory file that is sealed against shrinking.
func CannotShrink(fd int) bool {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	return err == nil && seals&unix.F_SEAL_SHRINK != 0
}

func mapSealed(fd, want int) ([]byte, error) {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("not a memory file: %w", err)
	}
	if seals&want != want {
		return nil, fmt.Errorf("seals are %#x, must include %#x: %w", seals, want, unix.EPERM)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	if st.Size <= 0 || st.Size > int64(maxInt) {
		return nil, fmt.Errorf("memory file of %d bytes: %w", st.Size, unix.EINVAL)
	}
	align := int(pageSize)
	if st.Size >= hugePage {
		align = hugePage
	}
	b, err := mapAligned(fd, int(st.Size), align)
	if err == nil && align == hugePage {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a wish
	}
	return b, err
}

// mapAligned maps size bytes of a file, shared, at a multiple of align, which is a
// power of two. The place is found by reserving more than is needed.
func mapAligned(fd, size, align int) ([]byte, error) {
	if size > maxInt-align {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, unix.ENOMEM)
	}
	room := uintptr(size + align)
	p, err := unix.MmapPtr(-1, 0, nil, room, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	skip := -uintptr(p) & uintptr(align-1)
	at := unsafe.Add(p, skip)
	_, err = unix.MmapPtr(fd, 0, at, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	// What was reserved around it goes. If mmap has failed, the place itself stays as it is: the kernel may have unmapped it,
	// and another thread may have mapped something there since.
	if skip > 0 {
		_ = unix.MunmapPtr(p, skip)
	}
	if rest := uintptr(align) - skip; rest > 0 {
		_ = unix.MunmapPtr(unsafe.Add(at, size), rest)
	}
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	return unsafe.Slice((*byte)(at), size), nil
}

// PopulateMapped makes the pages of what NewMappedFile has mapped present, for writing. It fails
// with EINVAL if the kernel cannot do it (before Linux 5.14), and with ENOMEM or EFAULT if there
// is no memory.
func PopulateMapped(b []byte) error {
	for {
		if err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); err != unix.EINTR && err != unix.EAGAIN {
			return err
		}
	}
}

// ReplaceMapped puts fresh memory, all zero, in the place of what MapFile has mapped. Whoever still
// reads there sees neither the file nor a fault.
func ReplaceMapped(b []byte) error {
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	return err
}

// FreeMapped unmaps what NewMappedFile or MapFile has mapped. No goroutine may touch
// it any more.
func FreeMapped(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}

// DupFD returns another descriptor of the same file, closed on exec.
func DupFD(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }
