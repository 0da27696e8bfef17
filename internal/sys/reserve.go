package sys

import "golang.org/x/sys/unix"

// Reserve takes n bytes of the address space, at which nothing is mapped that the CPU could access:
// a load or a store there is a fault. Unmap gives them back.
func Reserve(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
}

// TotalMemory returns how many bytes of memory the machine has; without an answer of the kernel, none.
func TotalMemory() uint64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return info.Totalram * uint64(info.Unit)
}
