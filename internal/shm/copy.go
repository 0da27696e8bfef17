package shm

// Payload by reference: what is too large for the ring is read from the peer's memory in one
// copy, by process_vm_readv(2). The handshake tries once whether the kernel permits that.
//
// A process number may be used again after its process has ended. So every read begins with
// the peer's nonce, a random word at the address that its hello names: one system call reads
// one address space, and if the nonce is right, what follows is the peer's.

import (
	"encoding/binary"
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Why a copy failed.
var (
	// ErrNotPermitted means that the kernel does not permit the read: because of Yama, a
	// container, or a peer that has made itself private.
	ErrNotPermitted = errors.New("the peer's memory may not be read")
	// ErrPeerMemory means that the peer has not mapped the memory.
	ErrPeerMemory = errors.New("the peer's memory is not mapped")
	// ErrOwnMemory means that this process has not mapped the memory to copy to.
	ErrOwnMemory = errors.New("own memory is not mapped")
	// ErrPeerGone means that the process has ended, or become another program.
	ErrPeerGone = errors.New("the peer's memory is gone with the process")
)

// Range is memory of the peer.
type Range = sys.VMRange

// Copier is scratch space for CopyFrom: one for each goroutine that copies. The
// zero value is ready.
type Copier struct {
	vec   sys.VMRead
	check [8]byte
}

// PeerReads reports whether the peer can read our memory.
func (c *Channel) PeerReads() bool { return c.peer.readsUs }

// PeerPID returns the number of the peer process, or 0 if we cannot read its memory.
func (c *Channel) PeerPID() int {
	if !c.peer.canRead {
		return 0
	}
	return c.peer.pid
}

// IsPeer reports whether the process with the peer's number is the peer, by its nonce.
func (c *Channel) IsPeer() bool { return c.peer.canRead && c.readNonce() == nil }

// CopyFrom reads memory of the peer: the ranges in a row, into the pieces in a
// row, as many bytes as the shorter side has. It returns how many bytes it has
// read; if that is not all, why. It does not check what the peer allows: the caller reads only
// what the peer has referred it to. Reads that worked may begin to fail with ErrNotPermitted:
// if the peer makes itself private, or the ancestor that the peer has named ends (reach.go).
func (c *Channel) CopyFrom(k *Copier, dst [][]byte, src []Range) (int, error) {
	if !c.peer.canRead {
		return 0, ErrNotPermitted
	}
	return c.copyFrom(k, dst, src)
}

func (c *Channel) copyFrom(k *Copier, dst [][]byte, src []Range) (int, error) {
	defer k.vec.Reset()
	total, dstOff, srcOff := 0, 0, 0
	for {
		n := k.fill(c, dst, src, dstOff, srcOff)
		if n == 0 {
			return total, nil
		}
		got, err := k.vec.Do(c.peer.pid)
		if err == nil {
			err = k.verify(c, got)
		}
		if err != nil {
			return total, c.why(k, err, src, srcOff)
		}
		if got -= len(k.check); got == 0 {
			return total, c.why(k, syscall.EFAULT, src, srcOff)
		}
		total += got
		dst, dstOff = skipBytes(dst, dstOff+got)
		src, srcOff = skipRanges(src, srcOff+got)
	}
}

// fill prepares one system call for as much as fits. It returns 0 if there is nothing to read.
func (k *Copier) fill(c *Channel, dst [][]byte, src []Range, dstOff, srcOff int) int {
	v := &k.vec
	v.Reset()
	v.AddLocal(k.check[:])
	v.AddRemote(Range{Addr: c.peer.nonceAddr, Len: len(k.check)})
	// The kernel reads as much as both sides have. The counts only show whether there is
	// anything.
	local, remote := 0, 0
	for _, b := range dst {
		if b = b[dstOff:]; len(b) > 0 {
			v.AddLocal(b)
			local += len(b)
		}
		dstOff = 0
		if room, _ := v.Room(); room == 0 {
			break
		}
	}
	for _, r := range src {
		if r = (Range{Addr: r.Addr + uint64(srcOff), Len: r.Len - srcOff}); r.Len > 0 {
			v.AddRemote(r)
			remote += r.Len
		}
		srcOff = 0
		if _, room := v.Room(); room == 0 {
			break
		}
	}
	return min(local, remote)
}

// verify checks that what was read is the peer's.
func (k *Copier) verify(c *Channel, got int) error {
	if got < len(k.check) || binary.NativeEndian.Uint64(k.check[:]) != c.peer.nonce {
		return ErrPeerGone
	}
	return nil
}

// why returns the error for a read that failed at srcOff of src. EFAULT does not distinguish
// whose memory is missing, so why reads the peer's first byte by itself.
func (c *Channel) why(k *Copier, err error, src []Range, srcOff int) error {
	switch {
	case errors.Is(err, syscall.EPERM):
		return ErrNotPermitted
	case errors.Is(err, syscall.ESRCH):
		return ErrPeerGone
	case !errors.Is(err, syscall.EFAULT):
		return err
	}
	if c.readNonce() != nil {
		return ErrPeerGone
	}
	if src, srcOff = skipRanges(src, srcOff); len(src) == 0 {
		return ErrOwnMemory
	}
	k.vec.Reset()
	k.vec.AddLocal(k.check[:1])
	k.vec.AddRemote(Range{Addr: src[0].Addr + uint64(srcOff), Len: 1})
	if _, err := k.vec.Do(c.peer.pid); err != nil {
		return ErrPeerMemory
	}
	return ErrOwnMemory
}

// readNonce reads and checks the peer's nonce alone. It returns an error if the peer's memory
// cannot be read at all.
func (c *Channel) readNonce() error {
	var k Copier
	k.fill(c, nil, nil, 0, 0)
	n, err := k.vec.Do(c.peer.pid)
	if err != nil {
		return err
	}
	return k.verify(c, n)
}

// skipBytes drops the pieces that end within the first n bytes. It returns what
// is left, and how much to skip of its first piece.
func skipBytes(b [][]byte, n int) ([][]byte, int) {
	for len(b) > 0 && n >= len(b[0]) {
		n -= len(b[0])
		b = b[1:]
	}
	return b, n
}

func skipRanges(r []Range, n int) ([]Range, int) {
	for len(r) > 0 && n >= r[0].Len {
		n -= r[0].Len
		r = r[1:]
	}
	return r, n
}
