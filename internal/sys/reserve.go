package sys

import "golang.org/x/sys/unix"

// Reserve takes n bytes of the address space, at which nothing is mapped that the CPU could access:
// a load or a store there is a fault. Unmap gives them back.
func Reserve(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
}
