package shm

// Grants of peers whose channel has broken: the owner waits for the end of the process, not of
// the connection.

import (
	"encoding/binary"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// grantChild starts a process that is inside a grant of ours, stops it, and breaks its channel
// from here: the process, being stopped, does not notice.
func grantChild(t *testing.T, attr *syscall.SysProcAttr) (*child, *Grant) {
	t.Helper()
	owner := newInbox(t, nil)
	k := startAs(t, listen(t), "grant", 0, attr)
	c, err := k.accept(t, owner)
	if err != nil {
		t.Fatal(err)
	}
	l := c.NewGrant()
	told := binary.NativeEndian.AppendUint64(nil, uint64(l.Number()))
	if err := c.Send(recData, binary.NativeEndian.AppendUint64(told, l.Serial())); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); !l.Inside(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not enter")
		}
	}
	k.signal(t, unix.SIGSTOP)
	raw, err := c.conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
	if err != nil {
		t.Fatal(err)
	}
	gone := false
	pollUntil(t, owner, &recorder{gone: func(*Channel, error) { gone = true }}, "the channel is down", func() bool { return gone })
	return k, l
}

func (k *child) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := k.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// awaits calls Await in another goroutine, and checks that it does not return for some time.
func awaits(t *testing.T, l *Grant) (done chan struct{}) {
	t.Helper()
	l.Shut()
	done = make(chan struct{})
	go func() { l.Await(); close(done) }()
	select {
	case <-done:
		t.Error("the owner has not waited for a process that lives, and is inside")
	case <-time.After(100 * time.Millisecond):
	}
	return done
}

func returns(t *testing.T, done chan struct{}, what string) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("the owner still waits, though the process %s", what)
	}
}

// grantChildren runs a test with a peer whose end is noticed by its pidfd, and with one in a PID
// namespace of its own, whose end is noticed by its pipe.
func grantChildren(t *testing.T, test func(t *testing.T, attr *syscall.SysProcAttr)) {
	t.Run("pidfd", func(t *testing.T) { test(t, nil) })
	t.Run("pipe", func(t *testing.T) {
		if unix.Geteuid() != 0 {
			t.Skip("needs privilege, to make a PID namespace")
		}
		test(t, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID})
	})
}

func TestGrantBrokenChannelKilled(t *testing.T) {
	grantChildren(t, func(t *testing.T, attr *syscall.SysProcAttr) {
		k, l := grantChild(t, attr)
		done := awaits(t, l)
		k.kill()
		returns(t, done, "has ended")
		if !l.Inside() || !l.Over() {
			t.Errorf("inside %v, over %v: it has died inside", l.Inside(), l.Over())
		}
		l.Free()
		if !l.Over() {
			t.Error("a grant that was freed is not over")
		}
		l.Await() // must return at once
	})
}

func TestGrantBrokenChannelLeft(t *testing.T) {
	grantChildren(t, func(t *testing.T, attr *syscall.SysProcAttr) {
		k, l := grantChild(t, attr)
		done := awaits(t, l)
		k.signal(t, unix.SIGUSR1)
		k.signal(t, unix.SIGCONT)
		returns(t, done, "has left")
		wantCounts(t, l, 0, 0, 0) // the process has counted nothing: the grant was shut before
		k.wait(t)
		l.Free()
	})
}
