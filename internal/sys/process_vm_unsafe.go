package sys

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Reading another process's memory.
//
// Why this is sound. Addresses in the other process are numbers, never Go pointers: the
// kernel checks them. Memory of this process is given as Go pointers in a field that the
// collector sees, with the lengths of the slices that they come from.

// VMRange is memory of another process.
type VMRange struct {
	Addr uint64
	Len  int
}

// VMRead collects the pieces of one process_vm_readv(2). Both sides must have as many
// bytes; each side has up to MaxPieces pieces. After Reset it can be used again, and does
// not allocate once it has grown.
type VMRead struct {
	local  []unix.Iovec
	remote []unix.RemoteIovec
}

// Reset forgets all pieces.
func (v *VMRead) Reset() {
	clear(v.local) // keep no memory alive
	v.local, v.remote = v.local[:0], v.remote[:0]
}

// Room returns how many more pieces each side takes.
func (v *VMRead) Room() (local, remote int) {
	return MaxPieces - len(v.local), MaxPieces - len(v.remote)
}

// AddLocal appends memory to read into.
func (v *VMRead) AddLocal(b []byte) {
	i := unix.Iovec{Base: unsafe.SliceData(b)}
	i.SetLen(len(b))
	v.local = append(v.local, i)
}

// AddRemote appends memory to read.
func (v *VMRead) AddRemote(r VMRange) {
	v.remote = append(v.remote, unix.RemoteIovec{Base: uintptr(r.Addr), Len: r.Len})
}

// Do reads, and returns how many bytes it has read, from the first piece on. There is an
// error only if it has read none: EFAULT, something is not mapped, in this process or the
// other; ESRCH, there is no such process, or it is ending; EPERM, this process may not.
func (v *VMRead) Do(pid int) (int, error) {
	for {
		n, err := unix.ProcessVMReadv(pid, v.local, v.remote, 0)
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// AddrOf returns the address of b's first byte, as a number for other processes. It is
// valid only for memory that the runtime does not move: mappings.
func AddrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
