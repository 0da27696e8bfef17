package rconn

import (
	"io"
	"net"
	"path/filepath"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// ends are two connected ends of each kind that is compared.
var ends = map[string]func(*testing.B) (net.Conn, net.Conn){
	"tcp":     func(b *testing.B) (net.Conn, net.Conn) { return plain(b, "tcp", "127.0.0.1:0") },
	"unix":    func(b *testing.B) (net.Conn, net.Conn) { return plain(b, "unix", filepath.Join(b.TempDir(), "s")) },
	"rdma":    func(b *testing.B) (net.Conn, net.Conn) { return rdma(b, verbs.LinkAny) },
	"packets": func(b *testing.B) (net.Conn, net.Conn) { return rdma(b, verbs.LinkUDP) },
}

func plain(b *testing.B, network, address string) (net.Conn, net.Conn) {
	l, err := net.Listen(network, address)
	if err != nil {
		b.Fatal(err)
	}
	c, err := net.Dial(network, l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _, _, _ = c.Close(), s.Close(), l.Close() })
	return c, s
}

func rdma(b *testing.B, link verbs.LinkMode) (net.Conn, net.Conn) {
	c, s := pair(b, link, 0)
	return c, s
}

// A stream in writes of 64 KiB.
func BenchmarkStream(b *testing.B) {
	for name, make2 := range ends {
		b.Run(name, func(b *testing.B) {
			c, s := make2(b)
			buf := make([]byte, 64<<10)
			b.SetBytes(int64(len(buf)))
			done := make(chan error)
			go func() {
				_, err := io.CopyN(io.Discard, s, int64(b.N)*int64(len(buf)))
				done <- err
			}()
			b.ResetTimer()
			for range b.N {
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		})
	}
}

// A byte there, and a byte back.
func BenchmarkPingPong(b *testing.B) {
	for name, make2 := range ends {
		b.Run(name, func(b *testing.B) {
			c, s := make2(b)
			go func() {
				var one [1]byte
				for {
					if _, err := s.Read(one[:]); err != nil {
						return
					}
					if _, err := s.Write(one[:]); err != nil {
						return
					}
				}
			}()
			var one [1]byte
			b.ResetTimer()
			for range b.N {
				if _, err := c.Write(one[:]); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(c, one[:]); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			_ = c.Close()
		})
	}
}
