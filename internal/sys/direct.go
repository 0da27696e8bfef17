package sys

import (
	"os"

	"golang.org/x/sys/unix"
)

// OpenDirect opens a file or a block device for reads and writes that pass the kernel's cache by: O_DIRECT. Memory, offsets
// and lengths are whole blocks.
func OpenDirect(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0) }
