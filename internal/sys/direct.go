package sys

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ODirect is the flag of files whose reads and writes pass the kernel's cache by. Memory, offsets and lengths are whole
// blocks: see DirectAlignment.
const ODirect = unix.O_DIRECT

// OpenDirect opens a file or a block device with ODirect.
func OpenDirect(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDWR|ODirect, 0) }

// DirectAlignment returns what a file with ODirect wants the addresses of memory, and offsets and lengths, to be
// multiples of. A kernel before 6.1, or a file system, that does not say gets the block size of files.
func DirectAlignment(f *os.File) (memory, offset int, err error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN|unix.STATX_BASIC_STATS, &st); err != nil {
		return 0, 0, fmt.Errorf("statx: %w", err)
	}
	if st.Mask&unix.STATX_DIOALIGN == 0 || st.Dio_mem_align == 0 || st.Dio_offset_align == 0 {
		n := max(int(st.Blksize), 512)
		return n, n, nil
	}
	return int(st.Dio_mem_align), int(st.Dio_offset_align), nil
}
