package sys

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// unixPair returns two ends of a SOCK_SEQPACKET connection.
func unixPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	addr := &net.UnixAddr{Name: fmt.Sprintf("@verbena-sys-test-%d-%d", os.Getpid(), rand.Uint64()), Net: "unixpacket"}
	l, err := net.ListenUnix("unixpacket", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialUnix("unixpacket", nil, addr); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func openFDs(t *testing.T) int {
	t.Helper()
	if err := StartPoller(0); err != nil { // its descriptors count from the first time on
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func TestPeerCred(t *testing.T) {
	a, b := unixPair(t)
	for _, c := range []*net.UnixConn{a, b} {
		cred, err := PeerCred(c)
		if err != nil || cred != (Cred{PID: os.Getpid(), UID: os.Geteuid()}) {
			t.Errorf("%+v, %v", cred, err)
		}
	}
	a.Close()
	if _, err := PeerCred(a); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

func TestPassFDs(t *testing.T) {
	a, b := unixPair(t)
	e, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	buf := make([]byte, 16)
	before := openFDs(t)
	for n := range MaxPassedFDs + 1 {
		fds := make([]int, n)
		for i := range fds {
			fds[i] = e.FD()
		}
		if err := SendFDs(a, []byte("hello"), fds...); err != nil {
			t.Fatal(err)
		}
		m, got, err := RecvFDs(b, buf)
		if err != nil || string(buf[:m]) != "hello" || len(got) != n {
			t.Fatalf("%d descriptors: %q, %v, %v", n, buf[:m], got, err)
		}
		for _, fd := range got {
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor %d: flags %#x, %v", fd, flags, err)
			}
			CloseFD(fd)
		}
	}
	many := make([]int, MaxPassedFDs+1)
	for i := range many {
		many[i] = e.FD()
	}
	if err := SendFDs(a, nil, many...); !errors.Is(err, unix.EINVAL) {
		t.Errorf("too many: %v", err)
	}
	// What does not fit leaves nothing open.
	for _, c := range []struct {
		n   int
		fds []int
	}{{len(buf) + 1, many[:3]}, {5, append(many, many...)}} {
		if _, _, err := a.WriteMsgUnix(make([]byte, c.n), unix.UnixRights(c.fds...), nil); err != nil {
			t.Fatal(err)
		}
		if _, got, err := RecvFDs(b, buf); !errors.Is(err, unix.EMSGSIZE) || got != nil {
			t.Errorf("%d bytes, %d descriptors: %v, %v", c.n, len(c.fds), got, err)
		}
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	a.Close()
	if _, _, err := RecvFDs(b, buf); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

func TestSendRecvNow(t *testing.T) {
	a, b := unixPair(t)
	buf := make([]byte, 16)
	if n, err := RecvNow(b, buf); n != 0 || !errors.Is(err, unix.EAGAIN) {
		t.Errorf("nothing: %d, %v", n, err)
	}
	if err := SendNow(a, []byte("bye")); err != nil {
		t.Error(err)
	}
	if n, err := RecvNow(b, buf); string(buf[:n]) != "bye" || err != nil {
		t.Errorf("%q, %v", buf[:n], err)
	}
	var err error
	for i := 0; i < 1_000_000 && err == nil; i++ {
		err = SendNow(a, buf)
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Errorf("full: %v", err)
	}
	b.Close()
	if err := SendNow(a, buf); !errors.Is(err, unix.ECONNRESET) { // what was sent has not been read
		t.Errorf("to nobody: %v", err)
	}
	if err := SendNow(a, buf); !errors.Is(err, unix.EPIPE) {
		t.Errorf("to nobody, again: %v", err)
	}
	c, d := unixPair(t)
	c.Close()
	if n, err := RecvNow(d, buf); n != 0 || err != nil {
		t.Errorf("at the end: %d, %v", n, err)
	}
}
