package sys

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

// What the kernel refuses, each in a process of its own.

func init() {
	children["pin-EPERM"] = func() error { return pinForbiddenChild(syscall.EPERM) }
	children["pin-ENOSYS"] = func() error { return pinForbiddenChild(syscall.ENOSYS) }
	children["pin-no-clone"] = pinNoCloneChild
	children["pin-memlock"] = pinMemlockChild
	children["pin-setuid"] = pinSetuidChild
	children["pin-no-descriptors"] = pinNoDescriptorsChild
}

func pinForbiddenChild(errno syscall.Errno) error {
	if err := modetest.Forbid(modetest.Rule{Number: unix.SYS_IO_URING_SETUP, Arg: -1, Errno: errno}); err != nil {
		return err
	}
	var bad problems
	b := make([]byte, 100)
	_, err := PinPages(uintptr(AddrOf(b)), 100, true)
	for what, err := range map[string]error{"CanPin": CanPin(), "PinPages": err} {
		var pin *PinError
		if !errors.As(err, &pin) || !errors.Is(err, errno) || !strings.Contains(err.Error(), "seccomp") {
			bad.addf("%s: %v", what, err)
		}
	}
	return bad.err()
}

// On a kernel that cannot clone buffers one ring has them.
func pinNoCloneChild() error {
	if err := modetest.Forbid(modetest.Rule{Number: unix.SYS_IO_URING_REGISTER, Arg: 1, Value: uringCloneBuffers, Errno: unix.EINVAL}); err != nil {
		return err
	}
	table, err := pins()
	if err != nil {
		return err
	}
	if table.clones || table.bufferSize != pinShortBuffer {
		return fmt.Errorf("buffers of %d bytes, clones: %v", table.bufferSize, table.clones)
	}
	b := make([]byte, 100)
	p, err := PinPages(uintptr(AddrOf(b)), 100, true)
	if err != nil {
		return err
	}
	if err := p.WriteAt([]byte("x"), 99); err != nil || b[99] != 'x' || len(p.bank.rings) != 1 {
		return fmt.Errorf("%w, or the byte is %q", err, b[99])
	}
	return p.Close()
}

// An ordinary user pins what RLIMIT_MEMLOCK allows and no more, and gets it back. The
// rings themselves count, too: some pages each.
func pinMemlockChild() error {
	const limit = 1 << 20
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		return err
	}
	b, err := unix.Mmap(-1, 0, 2*limit, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	addr := uintptr(AddrOf(b))
	var bad problems
	refused := func(n uintptr) {
		var pin *PinError
		_, err := PinPages(addr, n, true)
		if !errors.As(err, &pin) || !errors.Is(err, unix.ENOMEM) || !strings.Contains(err.Error(), "RLIMIT_MEMLOCK, 1048576 bytes") {
			bad.addf("%d bytes: %v", n, err)
		}
	}
	for range 20 {
		refused(limit + 1)
		const half = limit / 2
		p, err := PinPages(addr, half, true)
		if err != nil {
			return err
		}
		refused(half)
		if err := p.WriteAt([]byte("x"), half-1); err != nil || b[half-1] != 'x' {
			bad.addf("%v, or the byte is %q", err, b[half-1])
		}
		if err := p.Close(); err != nil {
			return err
		}
	}
	return bad.err()
}

// A program that begins as root and becomes another user keeps what it has pinned, and
// pins more. Root's rings have root's rights, as long as no new one is needed; then the
// user's limit counts.
func pinSetuidChild() error {
	const size = 2 << 20
	b, err := unix.Mmap(-1, 0, 3*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	at := func(i int) uintptr { return uintptr(AddrOf(b)) + uintptr(i*size) }
	old, err := PinPages(at(0), size, true)
	if err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: size + size/2, Max: size + size/2}); err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgid(61235), syscall.Setuid(61235)); err != nil {
		return err
	}
	table, _ := pins()
	if p, err := PinPages(at(1), 2*size, true); err != nil || p.Close() != nil {
		return fmt.Errorf("with root's rings: %w", err)
	}
	for _, r := range table.staging { // as if others were using them
		r.close()
	}
	table.staging = nil
	for range 20 {
		p, err := PinPages(at(1), size, true)
		if err != nil {
			return err
		}
		if _, err := PinPages(at(2), size, true); !errors.Is(err, unix.ENOMEM) {
			return fmt.Errorf("beyond the limit: %w", err)
		}
		if err := errors.Join(p.WriteAt([]byte("new"), 5), old.WriteAt([]byte("old"), 5)); err != nil {
			return err
		}
		if string(b[5:8]) != "old" || string(b[size+5:size+8]) != "new" {
			return errors.New("other bytes were written")
		}
		if err := p.Close(); err != nil {
			return err
		}
	}
	if n := len(table.banks); n != 2 {
		return fmt.Errorf("%d banks", n)
	}
	if err := old.Close(); err != nil {
		return err
	}
	if n := len(table.banks); n != 1 {
		return fmt.Errorf("%d banks at the end", n)
	}
	return nil
}

// Without descriptors nothing is pinned, and accesses fail and are good again later.
func pinNoDescriptorsChild() error {
	var bad problems
	b := make([]byte, 5000)
	addr := uintptr(AddrOf(b))
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: 1024}); err != nil {
		return err
	}
	if err := CanPin(); !errors.Is(err, unix.EMFILE) {
		bad.addf("at first: %v", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024}); err != nil {
		return err
	}
	p, err := PinPages(addr, 5000, true)
	if err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: 1024}); err != nil {
		return err
	}
	var access *PinAccessError
	if err := p.ReadAt(b, 0); !errors.As(err, &access) || access.Err != unix.EMFILE || access.Buffer {
		bad.addf("a read: %v", err)
	}
	table, _ := pins()
	if _, err := table.stage(pinStagingSlots + 1); !errors.Is(err, unix.EMFILE) {
		bad.addf("a ring: %v", err)
	}
	if _, err := table.newBank(1); !errors.Is(err, unix.EMFILE) {
		bad.addf("a bank: %v", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024}); err != nil {
		return err
	}
	if err := p.WriteAt(bytes.Repeat([]byte{7}, 5000), 0); err != nil {
		bad.addf("a write when there are descriptors again: %v", err)
	}
	if err := p.Close(); err != nil {
		bad.addf("%v", err)
	}
	return bad.err()
}

func TestPinForbidden(t *testing.T) {
	runChild(t, "pin-EPERM", 0)
	runChild(t, "pin-ENOSYS", 0)
}

func TestPinWithoutClone(t *testing.T) {
	needPins(t)
	runChild(t, "pin-no-clone", 0)
}

func TestPinMemlock(t *testing.T) {
	needPins(t)
	if os.Getuid() != 0 {
		t.Skip("only root becomes another user")
	}
	runChild(t, "pin-memlock", 61234) // nobody else runs as this user, whose pins the kernel adds up
}

func TestPinSetuid(t *testing.T) {
	needPins(t)
	if os.Getuid() != 0 {
		t.Skip("only root becomes another user")
	}
	runChild(t, "pin-setuid", 0)
}

func TestPinWithoutDescriptors(t *testing.T) {
	needPins(t)
	runChild(t, "pin-no-descriptors", 0)
}
