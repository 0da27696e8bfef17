package sys

import (
	"errors"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestWatch(t *testing.T) {
	w, err := NewWatch()
	if err != nil {
		t.Fatal(err)
	}
	a, b := unixPair(t)
	e, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()

	heard := make(chan int32, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(heard)
		var tags [4]int32
		for {
			n, err := w.Wait(tags[:])
			if err != nil {
				if !errors.Is(err, os.ErrClosed) {
					t.Error(err)
				}
				return
			}
			for _, tag := range tags[:n] {
				switch tag {
				case 1:
					e.Drain()
				case 2:
					var buf [8]byte
					if n, _ := RecvNow(b, buf[:]); n == 0 { // the end
						w.RemoveConn(b)
					}
				}
				heard <- tag
			}
		}
	})
	expect := func(want int32) {
		t.Helper()
		select {
		case tag := <-heard:
			if tag != want {
				t.Fatalf("heard of %d, not of %d", tag, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("nothing was heard of %d", want)
		}
	}
	// Both are added while a goroutine waits.
	if err := w.Add(e.FD(), 1); err != nil {
		t.Fatal(err)
	}
	e.Signal()
	expect(1)
	if err := w.AddConn(b, 2); err != nil {
		t.Fatal(err)
	}
	if err := w.AddConn(b, 2); !errors.Is(err, unix.EEXIST) {
		t.Errorf("twice: %v", err)
	}
	if err := SendNow(a, []byte("x")); err != nil {
		t.Fatal(err)
	}
	expect(2)
	a.Close()
	expect(2)
	if err := w.Remove(e.FD()); err != nil {
		t.Error(err)
	}
	e.Signal()
	time.Sleep(10 * time.Millisecond)
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	for tag := range heard {
		t.Errorf("heard of %d again", tag)
	}
	if err := w.Add(e.FD(), 1); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after close: %v", err)
	}
}

func TestPidfd(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := OpenPidfd(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseFD(fd)
	if Exited(fd) {
		t.Error("it has not ended")
	}
	cmd.Process.Kill()
	cmd.Wait()
	if !Exited(fd) {
		t.Error("it has ended")
	}
	if fd, err := OpenPidfd(cmd.Process.Pid); err == nil {
		CloseFD(fd)
		t.Error("a process that has ended")
	}
}

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		stat            string
		parent, session int
		ok              bool
	}{
		{"17 (name) S 4 17 9 0 -1", 4, 9, true},
		{"17 (a) R 1) S 4 17 9 0", 4, 9, true},
		{"17 ((x)", 0, 0, false},
		{"", 0, 0, false},
		{"17 (name) S x 17 9", 0, 0, false},
		{"17 (name) S 4 17 y", 4, 0, false},
	} {
		parent, session, err := parseStat([]byte(c.stat))
		if parent != c.parent || session != c.session || (err == nil) != c.ok {
			t.Errorf("%q: %d, %d, %v", c.stat, parent, session, err)
		}
	}
	sid, err := unix.Getsid(0)
	if err != nil {
		t.Fatal(err)
	}
	if parent, session, err := ParentAndSession(os.Getpid()); parent != os.Getppid() || session != sid || err != nil {
		t.Errorf("%d, %d, %v; should be %d, %d", parent, session, err, os.Getppid(), sid)
	}
	if _, _, err := ParentAndSession(1 << 30); err == nil {
		t.Error("a process that cannot be")
	}
	if s := YamaScope(); s < 0 || s > 3 {
		t.Errorf("scope %d", s)
	}
}

// The pieces of both sides need not match, and what is not there ends the read.
func TestVMRead(t *testing.T) {
	src, dst := pattern(1000), make([]byte, 1000)
	b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	copy(b, src)
	var v VMRead
	for range 2 {
		v.AddRemote(VMRange{AddrOf(b), 300})
		v.AddRemote(VMRange{AddrOf(b) + 300, 700})
		v.AddLocal(dst[:999])
		v.AddLocal(dst[999:])
		if l, r := v.Room(); l != MaxPieces-2 || r != MaxPieces-2 {
			t.Errorf("room for %d and %d", l, r)
		}
		if n, err := v.Do(os.Getpid()); n != 1000 || err != nil || string(dst) != string(src) {
			t.Errorf("%d, %v", n, err)
		}
		v.Reset()
		clear(dst)
	}
	addr := AddrOf(b)
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	v.AddRemote(VMRange{addr, 10})
	v.AddLocal(dst)
	if n, err := v.Do(os.Getpid()); n != 0 || !errors.Is(err, unix.EFAULT) {
		t.Errorf("unmapped: %d, %v", n, err)
	}
	if n, err := v.Do(1 << 30); n != 0 || !errors.Is(err, unix.ESRCH) {
		t.Errorf("nobody: %d, %v", n, err)
	}
}
