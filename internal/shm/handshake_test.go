package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// offer is the hello of a peer that may not follow the protocol.
type offer struct {
	msg []byte
	fds []int
}

// goodOffer returns an offer that would be accepted, for tests to spoil.
func goodOffer(t *testing.T) offer {
	t.Helper()
	in := newInbox(t, nil)
	ring, mem, err := newSegment("verbena-test", controlPage+MinRing)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sys.Unmap(mem); sys.CloseFD(ring) })
	h := hello{pid: uint32(os.Getpid()), ring: MinRing, nonce: in.nonce, nonceAddr: sys.AddrOf(in.mem[nonceAt:])}
	return offer{h.append(message(msgHello)), []int{ring, in.memfd, in.event.FD(), in.life}}
}

func memfd(t *testing.T, size int64, seals int, flags int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// Whatever a peer offers is checked before it is used. The peer receives the reason for a
// refusal, and no mapping or descriptor stays behind.
func TestHandshakeRefuses(t *testing.T) {
	put := func(b []byte, at int, v uint64) []byte {
		binary.LittleEndian.PutUint64(b[at:], v)
		return b
	}
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, o *offer)
	}{
		{"nothing", func(_ *testing.T, o *offer) { o.msg, o.fds = []byte{}, nil }},
		{"noise", func(_ *testing.T, o *offer) { o.msg = []byte("hello, world") }},
		{"other magic", func(_ *testing.T, o *offer) { o.msg[0] ^= 1 }},
		{"other version", func(_ *testing.T, o *offer) { o.msg[5]++ }},
		{"other kind", func(_ *testing.T, o *offer) { o.msg[4] = msgReady }},
		{"short", func(_ *testing.T, o *offer) { o.msg = o.msg[:len(o.msg)-1] }},
		{"long", func(_ *testing.T, o *offer) { o.msg = append(o.msg, 0) }},
		{"too long", func(_ *testing.T, o *offer) { o.msg = append(o.msg, make([]byte, maxMessage)...) }},
		{"slot", func(_ *testing.T, o *offer) { binary.LittleEndian.PutUint32(o.msg[12:], MaxPeers) }},
		{"ring too small", func(_ *testing.T, o *offer) { put(o.msg, 16, 0) }},
		{"ring too large", func(_ *testing.T, o *offer) { put(o.msg, 16, 1<<40) }},
		{"ring not whole pages", func(_ *testing.T, o *offer) { put(o.msg, 16, MinRing+64) }},
		{"ring longer than its memory", func(_ *testing.T, o *offer) { put(o.msg, 16, MinRing+RingUnit) }},
		{"no descriptors", func(_ *testing.T, o *offer) { o.fds = nil }},
		{"too few descriptors", func(_ *testing.T, o *offer) { o.fds = o.fds[:3] }},
		{"too many descriptors", func(_ *testing.T, o *offer) { o.fds = append(o.fds, o.fds[0]) }},
		{"far too many descriptors", func(t *testing.T, o *offer) {
			for len(o.fds) < 2*sys.MaxPassedFDs {
				o.fds = append(o.fds, o.fds[0])
			}
		}},
		{"ring not sealed", func(t *testing.T, o *offer) { o.fds[0] = memfd(t, controlPage+MinRing, 0, 0) }},
		{"ring may shrink", func(t *testing.T, o *offer) {
			o.fds[0] = memfd(t, controlPage+MinRing, unix.F_SEAL_GROW|unix.F_SEAL_SEAL, 0)
		}},
		{"ring too short", func(t *testing.T, o *offer) { o.fds[0] = memfd(t, MinRing, seals, 0) }},
		{"ring of huge pages", func(t *testing.T, o *offer) { o.fds[0] = memfd(t, 2<<20, seals, unix.MFD_HUGETLB) }},
		{"ring not to be written", func(t *testing.T, o *offer) {
			o.fds[0] = memfd(t, controlPage+MinRing, seals|unix.F_SEAL_WRITE, 0)
		}},
		{"inbox not sealed", func(t *testing.T, o *offer) { o.fds[1] = memfd(t, inboxBytes, 0, 0) }},
		{"inbox of another size", func(t *testing.T, o *offer) { o.fds[1] = memfd(t, inboxBytes+1, seals, 0) }},
		{"a file as ring", func(t *testing.T, o *offer) { o.fds[0] = file(t) }},
		{"a file as event", func(t *testing.T, o *offer) { o.fds[2] = file(t) }},
		{"a file as life", func(t *testing.T, o *offer) { o.fds[3] = file(t) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := newInbox(t, nil)
			o := goodOffer(t)
			c.spoil(t, &o)
			a, b := connPair(t)
			before := holding(t)
			send(t, a, o)
			ch, err := in.Accept(testContext(t), b, nil)
			if err == nil {
				ch.Close()
				t.Fatal("accepted")
			}
			if after := holding(t); after.maps != before.maps || after.fds != before.fds-1 { // b
				t.Errorf("%+v before, %+v after", before, after)
			}
			if used := in.used[0]; used {
				t.Error("the slot is still taken")
			}
			// The peer receives the reason, unless it did not even send a hello.
			buf := make([]byte, maxMessage)
			n, err := a.Read(buf)
			if c.name == "nothing" || strings.HasPrefix(c.name, "far too") || c.name == "too long" {
				return
			}
			if err != nil || kindOf(buf[:n]) != msgRefuse {
				t.Errorf("the peer hears %q, %v", buf[:n], err)
			}
		})
	}
	t.Run("good", func(t *testing.T) {
		in := newInbox(t, nil)
		a, b := connPair(t)
		send(t, a, goodOffer(t))
		sys.SendFDs(a, append(message(msgReady), 1))
		c, err := in.Accept(testContext(t), b, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !c.peer.canRead || !c.PeerReads() {
			t.Errorf("can read %v, is read %v", c.peer.canRead, c.PeerReads())
		}
	})
}

func file(t *testing.T) int {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(controlPage + MinRing); err != nil {
		t.Fatal(err)
	}
	return int(f.Fd())
}

func send(t *testing.T, conn *net.UnixConn, o offer) {
	t.Helper()
	var oob []byte
	if len(o.fds) > 0 {
		oob = unix.UnixRights(o.fds...)
	}
	if _, _, err := conn.WriteMsgUnix(o.msg, oob, nil); err != nil {
		t.Fatal(err)
	}
}

// A process of another user is refused before anything is passed, and receives the reason.
func TestHandshakeRefusesUser(t *testing.T) {
	for _, dialer := range []bool{true, false} {
		ours, theirs := newInbox(t, nil), newInbox(t, nil)
		a, b := connPair(t)
		told := make(chan error)
		go func() {
			var err error
			if dialer {
				_, err = theirs.Accept(testContext(t), b, nil)
			} else {
				_, err = theirs.Dial(testContext(t), b, nil)
			}
			told <- err
		}()
		c := &Channel{in: ours, conn: a}
		h := handshake{c: c, in: ours, conn: a, dialer: dialer, uid: os.Geteuid() + 1}
		err := h.join(testContext(t))
		a.Close()
		for _, err := range []error{err, <-told} {
			if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "different users") {
				t.Errorf("dialler %v: %v", dialer, err)
			}
		}
	}
}

func TestHandshakeEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		want error
		end  func(in *Inbox, cancel context.CancelFunc, peer *net.UnixConn)
	}{
		{"cancelled", context.Canceled, func(_ *Inbox, cancel context.CancelFunc, _ *net.UnixConn) { cancel() }},
		{"inbox closed", ErrClosed, func(in *Inbox, _ context.CancelFunc, _ *net.UnixConn) { in.Close() }},
		{"peer ended", nil, func(_ *Inbox, _ context.CancelFunc, peer *net.UnixConn) { peer.Close() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := newInbox(t, nil)
			a, b := connPair(t)
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			done := make(chan error)
			go func() {
				_, err := in.Dial(ctx, b, nil)
				done <- err
			}()
			time.Sleep(5 * time.Millisecond)
			c.end(in, cancel, a)
			select {
			case err := <-done:
				if err == nil || c.want != nil && !errors.Is(err, c.want) {
					t.Error(err)
				}
			case <-time.After(patience):
				t.Fatal("the handshake goes on")
			}
		})
	}
	in := newInbox(t, nil)
	in.Close()
	a, _ := connPair(t)
	if _, err := in.Dial(testContext(t), a, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// A channel has its own tag, and what the handshake found out about the peer.
func TestHandshakeResult(t *testing.T) {
	ab, ba := joinPair(t, newInbox(t, nil), newInbox(t, nil))
	if !ba.peer.canRead || !ab.PeerReads() { // a process can always read its own memory
		t.Error("is not read")
	}
	if ab.peer.pid != os.Getpid() || ab.Tag() != "dialled" || ba.Tag() != "accepted" || ab.MaxRecord() != maxRecord(defaultRing) {
		t.Error(ab.peer.pid, ab.Tag(), ba.Tag(), ab.MaxRecord())
	}
}

func FuzzHello(f *testing.F) {
	good := hello{1, 2, MinRing, 4, 5}
	f.Add(good.append(message(msgHello)))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHello(b)
		if err != nil {
			return
		}
		if h.slot >= MaxPeers || !validRing(h.ring) {
			t.Fatalf("%+v", h)
		}
		if got := h.append(b[:preambleBytes:preambleBytes]); string(got) != string(b) {
			t.Fatalf("%x is not %x", got, b)
		}
	})
}
