package shm

// Large payload: read from the peer's memory in one copy, by
// process_vm_readv(2). Whether the kernel lets us is found out once, in the
// handshake.
//
// A process number may be used again after its process has ended. So every read
// begins with the peer's nonce, a random word at an address that it told: one
// system call reads one address space, and if the nonce is right, what follows
// is the peer's.

import (
	"encoding/binary"
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Why a copy failed.
var (
	// ErrNotPermitted means that the kernel does not let us: Yama, a container,
	// or a process that has made itself private.
	ErrNotPermitted = errors.New("the peer's memory may not be read")
	// ErrPeerMemory means that the peer's memory is not there.
	ErrPeerMemory = errors.New("the peer's memory is not mapped")
	// ErrOwnMemory means that ours is not there.
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

// CopyFrom reads memory of the peer: the ranges in a row, into the pieces in a
// row, as many bytes as the shorter side has. It returns how many bytes it has
// read; if that is not all, why. It does not look at what the peer allows: the
// caller reads what he was told to. What CanRead promises may end, with
// ErrNotPermitted: the peer may make itself private, or the ancestor end that
// it has named (reach.go).
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

// fill makes one system call of as much as fits, and returns how many bytes.
func (k *Copier) fill(c *Channel, dst [][]byte, src []Range, dstOff, srcOff int) int {
	v := &k.vec
	v.Reset()
	v.AddLocal(k.check[:])
	v.AddRemote(Range{Addr: c.peer.nonceAddr, Len: len(k.check)})
	// The kernel reads as much as both sides have; what is counted here is
	// only whether there is anything.
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

// why explains an error at the current place. The kernel does not say whose
// memory is missing, so the peer's first byte is read by itself.
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

// readNonce reads the peer's nonce alone: the test whether its memory can be
// read at all.
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
