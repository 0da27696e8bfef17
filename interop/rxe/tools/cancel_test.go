package tools

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// stranger connects to a server of ours and sends words.
func stranger(t *testing.T, addr net.Addr, words string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, words); err != nil {
		t.Fatal(err)
	}
	return c
}

// players are the two entry points, as servers.
var players = map[string]func(context.Context, *verbs.Device, Peer) (Result, error){
	"pingpong": func(ctx context.Context, dev *verbs.Device, p Peer) (Result, error) {
		return Pingpong(ctx, dev, PingpongConfig{Peer: p, Program: RCPingpong, Iters: 10})
	},
	"perftest": func(ctx context.Context, dev *verbs.Device, p Peer) (Result, error) {
		return Perftest(ctx, dev, PerftestConfig{Peer: p, Test: SendBW, Iters: 10, Size: 8})
	},
}

// A cancelled context ends a run wherever it is, and nothing is left.
func TestCancel(t *testing.T) {
	address := string(Address{QPN: 77, PSN: 1, GID: verbs.GID{10: 0xff, 11: 0xff, 12: 127, 13: 77, 15: 200}}.Append(nil))
	keys := string(Keys{OutReads: 1, QPN: 77, GID: verbs.GID{10: 0xff, 11: 0xff, 12: 127, 13: 77, 15: 200}}.Append(nil))
	greeting := string(appendVersion(nil, "6.06")) + "\x00\x00\x10\x00" + "\x00\x00\x00\x40" + "3\x00"
	for _, c := range []struct{ player, at, words string }{
		{"pingpong", "while listening", "-"},
		{"pingpong", "in the exchange", ""},
		{"pingpong", "in the middle of a line", address[:20]},
		{"pingpong", "while waiting for the first message", address + string(done)},
		{"perftest", "while listening", "-"},
		{"perftest", "in the negotiation", greeting[:20]},
		{"perftest", "in the exchange of keys", greeting + keys[:50]},
		{"perftest", "while waiting for the first message", greeting + strings.Repeat(keys, 4)},
	} {
		t.Run(c.player+" "+c.at, func(t *testing.T) {
			dev := open(t, verbs.LinkUDP)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			listening := make(chan net.Addr, 1)
			ended := make(chan error, 1)
			go func() {
				p := Peer{Role: Server, Addr: "127.0.0.1:0", Listening: func(a net.Addr) { listening <- a }}
				_, err := players[c.player](ctx, dev, p)
				ended <- err
			}()
			addr := <-listening
			if c.words != "-" {
				stranger(t, addr, c.words)
			}
			select {
			case err := <-ended:
				t.Fatalf("ended by itself: %v", err)
			case <-time.After(100 * time.Millisecond):
			}
			cancel()
			select {
			case err := <-ended:
				if !errors.Is(err, context.Canceled) {
					t.Errorf("ended with %v", err)
				}
			case <-time.After(testTimeout):
				t.Fatal("does not end")
			}
		})
	}
}

// Wrong input is an error that names what is wrong, and nothing is left.
func TestStrangers(t *testing.T) {
	version := string(appendVersion(nil, "6.06"))
	params := "\x00\x00\x10\x00\x00\x00\x00\x40"
	noGID := string(Keys{QPN: 5, OutReads: 1}.Append(nil))
	otherFamily := string(Keys{QPN: 5, OutReads: 1, GID: gid6}.Append(nil))
	for _, c := range []struct{ player, words, want string }{
		{"pingpong", "GET / HTTP/1.0\r\nHost: a.example.org\r\n\r\nxxxxxxxxxxxxxxxxxxxx", "no hexadecimal digit"},
		{"pingpong", string(Address{QPN: 5}.Append(nil)), "no GID"},
		{"perftest", "GET / HTTP/1.0\r\nHost: a.example.org\r\n\r\n", "version"},
		{"perftest", string(appendVersion(nil, "5.33")), "not supported"},
		{"perftest", version + "\xff\xff\xff\xff", "no size of a page"},
		{"perftest", version + params + "9\x00", "none of 1 to 5"},
		{"perftest", version + params + "3\x00" + strings.Repeat("?", keysLen), "no hexadecimal digit"},
		{"perftest", version + params + "3\x00" + noGID, "no GID"},
		{"perftest", version + params + "3\x00" + otherFamily, "one IPv4"},
	} {
		dev := open(t, verbs.LinkUDP)
		listening := make(chan net.Addr, 1)
		ended := make(chan error, 1)
		go func() {
			p := Peer{Role: Server, Addr: "127.0.0.1:0", Listening: func(a net.Addr) { listening <- a }}
			_, err := players[c.player](testContext(t), dev, p)
			ended <- err
		}()
		stranger(t, <-listening, c.words)
		if err := <-ended; err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, told %.20q: %v, want an error about %q", c.player, c.words, err, c.want)
		}
	}
}

// A peer that closes the connection too early is noticed.
func TestPeerGone(t *testing.T) {
	for name, play := range players {
		dev := open(t, verbs.LinkUDP)
		listening := make(chan net.Addr, 1)
		ended := make(chan error, 1)
		go func() {
			p := Peer{Role: Server, Addr: "127.0.0.1:0", Listening: func(a net.Addr) { listening <- a }}
			_, err := play(testContext(t), dev, p)
			ended <- err
		}()
		stranger(t, <-listening, "0000").Close()
		if err := <-ended; err == nil || !(errors.Is(err, io.ErrUnexpectedEOF) || gone(err)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
