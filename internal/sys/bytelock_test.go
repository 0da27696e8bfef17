//go:build cgo

package sys

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/forktest"
)

func lockedFile(t *testing.T) int {
	t.Helper()
	fd, err := NewMemfd("verbena-test", 2*int(pageSize))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = CloseFD(fd) })
	return fd
}

// wantLocked checks which of the first bytes are locked.
func wantLocked(t *testing.T, fd int, want ...int64) {
	t.Helper()
	var got []int64
	for at := range int64(8) {
		locked, err := ByteLocked(fd, at)
		if err != nil {
			t.Fatal(err)
		}
		if locked {
			got = append(got, at)
		}
	}
	if len(got) != len(want) {
		t.Fatalf("bytes %v are locked, want %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("bytes %v are locked, want %v", got, want)
		}
	}
}

func lock(t *testing.T, fd int, at int64) *ByteLock {
	t.Helper()
	l, err := LockByte(fd, at)
	if err != nil || l == nil {
		t.Fatalf("byte %d: %v, %v", at, l, err)
	}
	return l
}

func TestByteLock(t *testing.T) {
	fd := lockedFile(t)
	wantLocked(t, fd)
	a, b := lock(t, fd, 3), lock(t, fd, 4)
	wantLocked(t, fd, 3, 4)
	if l, err := LockByte(fd, 3); l != nil || err != nil {
		t.Errorf("locked twice: %v, %v", l, err)
	}
	dup, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(dup) // a closed descriptor of the file changes nothing
	wantLocked(t, fd, 3, 4)
	a.Unlock()
	wantLocked(t, fd, 4)
	a = lock(t, fd, 3)
	b.Unlock()
	wantLocked(t, fd, 3)
	a.Unlock()
	wantLocked(t, fd)
	if _, err := LockByte(-1, 0); err == nil {
		t.Error("a byte of no file is locked")
	}
	if _, err := ByteLocked(-1, 0); err == nil {
		t.Error("a byte of no file was looked at")
	}
}

// A child of fork, which has all descriptors of its parent and calls no execve, does not keep a
// byte locked.
func TestByteLockFork(t *testing.T) {
	fd := lockedFile(t)
	a := lock(t, fd, 5)
	word := uint64(7)
	c, err := forktest.Fork(&word, fd, fd)
	if err != nil {
		t.Fatal(err)
	}
	if c.Word != 7 || c.Open != 2 {
		t.Errorf("the child has found %d, and %d descriptors", c.Word, c.Open)
	}
	wantLocked(t, fd, 5)
	a.Unlock()
	wantLocked(t, fd)
	if err := c.End(); err != nil {
		t.Error(err)
	}
}
