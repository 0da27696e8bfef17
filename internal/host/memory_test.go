package host

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// A process passes its memory on to processes that have the token, and to no others.
func TestMemory(t *testing.T) {
	token := NewToken()
	if other := NewToken(); other == token || len(token) != 32 {
		t.Errorf("tokens %s, %s", token, other)
	}
	memory, err := sys.NewMemfd("test", 8192)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.CloseFD(memory)
	m, err := Join(Config{Addrs: []netip.Addr{addr(77)}, Limits: manyObjects(), Listen: (&udp{addrs: []netip.Addr{addr(77)}}).listen,
		Memory: func(got string) (int, uint64, error) {
			if got != token {
				return -1, 0, syscall.ENOENT
			}
			fd, err := sys.DupFD(memory)
			return fd, 5000, err
		}})
	if err != nil {
		t.Fatal(err)
	}
	handle := m.Handle(token)
	for range 3 {
		fd, n, err := FetchMemory(handle)
		if err != nil || n != 5000 {
			t.Fatalf("%d bytes, %v", n, err)
		}
		b, err := sys.MapFile(fd)
		if err != nil || len(b) != 8192 {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
		if err := errors.Join(sys.FreeMapped(b), sys.CloseFD(fd)); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := FetchMemory(m.Handle(NewToken())); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("another token: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := FetchMemory(handle); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a process that has gone: %v", err)
	}
}
