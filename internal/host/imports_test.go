package host

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// exporting joins with one object, number 7, and returns what signals the end of its import.
func exporting(t *testing.T, a netip.Addr) (*Member, <-chan struct{}) {
	t.Helper()
	ended := make(chan struct{}, 10)
	m, err := Join(Config{Addrs: []netip.Addr{a}, Limits: manyObjects(), Listen: (&udp{addrs: []netip.Addr{a}}).listen,
		Export: func(token string, object uint64, _ *net.UnixConn) (*Export, error) {
			if token != "token" || object != 7 {
				return nil, syscall.ENOENT
			}
			fd, err := sys.NewMemfd("test", 4096)
			if err != nil {
				return nil, err
			}
			return &Export{Extent: Extent{Addr: 1, Length: 1 << 63, IOVA: 3, Access: 4, Proof: 5}, Guard: fd,
				Destroy: func() error { return syscall.EBUSY }, Close: func() { ended <- struct{}{} }}, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	return m, ended
}

// An import lasts until either side ends it, and both notice.
func TestImport(t *testing.T) {
	m, ended := exporting(t, addr(78))
	fetch := func() *Import {
		t.Helper()
		i, err := FetchObject(m.Handle("token"), 7)
		if err != nil {
			t.Fatal(err)
		}
		if i.Extent != (Extent{1, 1 << 63, 3, 4, 5}) || i.PID != syscall.Getpid() || i.Guard < 0 {
			t.Errorf("%+v", i)
		}
		if err := sys.CloseFD(i.Guard); err != nil {
			t.Error(err)
		}
		return i
	}
	i := fetch()
	if err := i.Destroy(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("destroyed: %v", err)
	}
	if err := errors.Join(i.Close(), i.Close()); err != nil {
		t.Error(err)
	}
	<-ended

	// An invalid request ends the import.
	i = fetch()
	if _, _, err := ask(i.c, &request{Op: opJoin}); !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		t.Errorf("an operation of another kind: %v", err)
	}
	<-ended
	if !sys.HungUp(i.c) {
		t.Error("nobody would notice that")
	}
	_ = i.Close()

	for name, f := range map[string]func() (*Import, error){
		"another object": func() (*Import, error) { return FetchObject(m.Handle("token"), 8) },
		"another token":  func() (*Import, error) { return FetchObject(m.Handle("secret"), 7) },
	} {
		if _, err := f(); !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%s: %v", name, err)
		}
	}

	// The exporter leaves, and does not wait for an importer that sends nothing.
	i = fetch()
	if sys.HungUp(i.c) {
		t.Error("it has ended before")
	}
	begin := time.Now()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(begin); d > replyTime/2 {
		t.Errorf("it took %v to leave", d)
	}
	<-ended
	if !sys.HungUp(i.c) {
		t.Error("nobody would notice that it has left")
	}
	if err := errors.Join(i.Destroy(), i.Close()); err != nil {
		t.Errorf("destroying what has ended: %v", err)
	}
	if _, err := FetchObject(m.Handle("token"), 7); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a process that has gone: %v", err)
	}
}
