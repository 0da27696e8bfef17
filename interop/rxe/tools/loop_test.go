package tools

// Both sides are this package: two devices in one process, by the loop link and
// by packets.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// testTimeout is longer than any test takes, also on a busy machine.
const testTimeout = 2 * time.Minute

// patience is an acknowledgement timeout that a busy machine does not reach: 4 seconds, eight
// times.
const patience = 20

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

// open opens a device. It is closed at the end, and fails the test if objects are left.
func open(t *testing.T, link verbs.LinkMode) *verbs.Device {
	t.Helper()
	dev, err := verbs.Open("", &verbs.Config{Link: link})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Errorf("objects are left on the device: %v", err)
		}
	})
	return dev
}

type outcome struct {
	res Result
	err error
}

// both runs a server and, when it listens, a client.
func both(t *testing.T, link verbs.LinkMode, play func(*verbs.Device, Peer) (Result, error)) (client, server outcome) {
	t.Helper()
	there, here := open(t, link), open(t, link)
	listening := make(chan net.Addr, 1)
	served := make(chan outcome, 1)
	go func() {
		p := Peer{Role: Server, Addr: "127.0.0.1:0", Listening: func(a net.Addr) { listening <- a }}
		res, err := play(there, p)
		served <- outcome{res, err}
	}()
	select {
	case addr := <-listening:
		res, err := play(here, Peer{Role: Client, Addr: addr.String()})
		return outcome{res, err}, <-served
	case server = <-served:
		return client, server
	}
}

func links() []verbs.LinkMode { return []verbs.LinkMode{verbs.LinkLoop, verbs.LinkUDP} }

func TestPingpong(t *testing.T) {
	for _, link := range links() {
		for _, c := range []PingpongConfig{
			{Program: RCPingpong, Iters: 50},
			{Program: RCPingpong, Iters: 50, Size: 1, MTU: verbs.MTU256},
			{Program: RCPingpong, Iters: 10, Size: 100001, MTU: verbs.MTU256, Check: true, PSN: maxPSN - 5},
			{Program: UCPingpong, Iters: 50, Size: 5000},
			{Program: UDPingpong, Iters: 50, Size: 999},
			{Program: SRQPingpong, Iters: 200},
			{Program: SRQPingpong, Iters: 50, QPs: 1, Size: 10000},
			{Program: SRQPingpong, Iters: 400, QPs: 200, Size: 100, Check: true},
		} {
			t.Run(fmt.Sprintf("%s/%v/%d", link, c.Program, c.Size), func(t *testing.T) {
				ctx := testContext(t)
				client, server := both(t, link, func(dev *verbs.Device, p Peer) (Result, error) {
					cfg := c
					cfg.Peer, cfg.Timeout = p, patience
					return Pingpong(ctx, dev, cfg)
				})
				for _, o := range []outcome{client, server} {
					if o.err != nil {
						t.Errorf("%v: %v", o.res.String(), o.err)
						continue
					}
					n := uint64(c.Iters)
					if o.res.Sent < n || o.res.Received < n || o.res.Verified != o.res.Received {
						t.Errorf("%v, want %d and all verified", o.res.String(), n)
					}
					if c.Program == UDPingpong && o.res.GRHs != o.res.Received {
						t.Errorf("%v: not all headers were checked", o.res.String())
					}
					if len(o.res.Completions) != 1 || o.res.Completions[verbs.WCSuccess] < int(2*n) {
						t.Errorf("completions %v", o.res.Completions)
					}
				}
			})
		}
	}
}

func TestPerftest(t *testing.T) {
	for _, link := range links() {
		for _, c := range []struct {
			PerftestConfig
			client, server uint64 // verified there
		}{
			// READs and atomics are checked where they return, SENDs where they arrive,
			// WRITEs and atomics in memory at the end. Messages over UC and UD fit into a
			// socket's buffer, so that none is lost.
			{PerftestConfig{Test: WriteBW, Size: 1000, Iters: 300, QPs: 3}, 0, 3 * 4},
			{PerftestConfig{Test: WriteBW, Size: 100000, Iters: 40, MTU: verbs.MTU512}, 0, 1},
			{PerftestConfig{Test: WriteBW, Size: 64, Iters: 100, Duplex: true}, 64, 64},
			{PerftestConfig{Test: WriteBW, Size: 5000, Iters: 20, Type: verbs.UC, TxDepth: 4}, 0, 1},
			{PerftestConfig{Test: WriteBW, Size: 5000, Iters: 100, Imm: true}, 0, 1},
			{PerftestConfig{Test: WriteBW, Size: 128, Iters: 100, Imm: true, Duplex: true}, 1, 1},
			{PerftestConfig{Test: WriteLat, Iters: 300}, 1, 1}, // numbers wrap at 256
			{PerftestConfig{Test: WriteLat, Iters: 30, Size: 5000, Type: verbs.UC}, 1, 1},
			{PerftestConfig{Test: WriteLat, Iters: 30, Imm: true}, 1, 1},
			{PerftestConfig{Test: ReadBW, Size: 1000, Iters: 300, QPs: 2}, 600, 0},
			{PerftestConfig{Test: ReadBW, Size: 100000, Iters: 20, Duplex: true, OutReads: 1}, 20, 20},
			{PerftestConfig{Test: ReadLat, Iters: 50}, 50, 0},
			{PerftestConfig{Test: SendBW, Size: 2048, Iters: 600, QPs: 2}, 0, 1200},
			{PerftestConfig{Test: SendBW, Size: 20000, Iters: 50, Duplex: true, PSN: maxPSN - 3}, 50, 50},
			{PerftestConfig{Test: SendBW, Size: 3000, Iters: 30, Type: verbs.UC}, 0, 30},
			{PerftestConfig{Test: SendBW, Size: 1000, Iters: 50, Type: verbs.UD, TxDepth: 8}, 0, 50},
			{PerftestConfig{Test: SendBW, Size: 1000, Iters: 30, Type: verbs.UD, QPs: 2, Gap: time.Microsecond}, 0, 60},
			{PerftestConfig{Test: SendLat, Iters: 50}, 50, 50},
			{PerftestConfig{Test: SendLat, Iters: 50, Size: 700, Type: verbs.UD}, 50, 50},
			{PerftestConfig{Test: AtomicBW, Iters: 300, QPs: 2}, 600, 128},
			{PerftestConfig{Test: AtomicBW, Iters: 300, CAS: true}, 300, 64},
			{PerftestConfig{Test: AtomicBW, Iters: 40, CAS: true, Duplex: true}, 80, 80},
			{PerftestConfig{Test: AtomicLat, Iters: 40}, 40, 1},
		} {
			name := fmt.Sprintf("%s/%v/%v/%d", link, c.Test, c.Type, c.Size)
			t.Run(name, func(t *testing.T) {
				ctx := testContext(t)
				client, server := both(t, link, func(dev *verbs.Device, p Peer) (Result, error) {
					cfg := c.PerftestConfig
					cfg.Peer, cfg.Timeout = p, patience
					return Perftest(ctx, dev, cfg)
				})
				if client.err != nil || server.err != nil {
					t.Fatalf("%v\n%v\n%v\n%v", client.res.String(), client.err, server.res.String(), server.err)
				}
				if client.res.Verified != c.client || server.res.Verified != c.server {
					t.Errorf("verified %d here and %d there, want %d and %d",
						client.res.Verified, server.res.Verified, c.client, c.server)
				}
				if client.res.PeerVersion != ourVersion || client.res.MTU != server.res.MTU {
					t.Errorf("version %q, MTU %v here and %v there", client.res.PeerVersion, client.res.MTU, server.res.MTU)
				}
				n := uint64(c.Iters * max(c.QPs, 1))
				if client.res.Sent != n {
					t.Errorf("the client sent %d, want %d", client.res.Sent, n)
				}
				if c.Type == verbs.UD && server.res.GRHs != n {
					t.Errorf("%d headers were checked, want %d", server.res.GRHs, n)
				}
				if c.Duplex && (server.res.Sent != n || client.res.PeerReport == nil || client.res.PeerReport.Iters != n) {
					t.Errorf("the server sent %d, want %d, and reported %+v", server.res.Sent, n, client.res.PeerReport)
				}
			})
		}
	}
}

// The sides have different configurations: a message has the wrong length, data is wrong.
func TestMismatch(t *testing.T) {
	for _, c := range []struct {
		name           string
		client, server PerftestConfig
		want           string
	}{
		{"size", PerftestConfig{Test: SendBW, Size: 100, Iters: 5}, PerftestConfig{Test: SendBW, Size: 200, Iters: 5}, "has 100 bytes, not 200"},
		{"WRITE that went elsewhere", PerftestConfig{Test: WriteBW, Size: 100, Iters: 5},
			PerftestConfig{Test: WriteBW, Size: 200, Iters: 5}, "contents of slot"},
		{"fewer atomics", PerftestConfig{Test: AtomicBW, Iters: 64}, PerftestConfig{Test: AtomicBW, Iters: 128}, "word 0 of queue pair 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := testContext(t)
			_, server := both(t, verbs.LinkUDP, func(dev *verbs.Device, p Peer) (Result, error) {
				cfg := c.client
				if p.Role == Server {
					cfg = c.server
				}
				cfg.Peer, cfg.Timeout = p, 17 // a client whose server has left waits for half a second, eight times
				return Perftest(ctx, dev, cfg)
			})
			if server.err == nil || !strings.Contains(server.err.Error(), c.want) {
				t.Errorf("%v, want an error about %q", server.err, c.want)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	dev := open(t, verbs.LinkLoop)
	at := Peer{Role: Client, Addr: "127.0.0.1:1", DialTimeout: time.Millisecond}
	for name, c := range map[string]PerftestConfig{
		"READ over UC":     {Peer: at, Test: ReadBW, Type: verbs.UC},
		"WRITE over UD":    {Peer: at, Test: WriteBW, Type: verbs.UD},
		"unknown type":     {Peer: at, Test: WriteBW, Type: 9},
		"few iterations":   {Peer: at, Test: ReadBW, Iters: 4},
		"long atomics":     {Peer: at, Test: AtomicBW, Size: 16},
		"many in latency":  {Peer: at, Test: SendLat, QPs: 2},
		"duplex latency":   {Peer: at, Test: SendLat, Duplex: true},
		"READ immediate":   {Peer: at, Test: ReadBW, Imm: true},
		"CAS of something": {Peer: at, Test: ReadBW, CAS: true},
	} {
		if _, err := Perftest(context.Background(), dev, c); !errors.Is(err, ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]PerftestConfig{
		"no role":     {Test: WriteBW},
		"no test":     {Peer: at},
		"negative":    {Peer: at, Test: WriteBW, Size: -1},
		"PSN":         {Peer: at, Test: WriteBW, PSN: 1 << 24},
		"MTU":         {Peer: at, Test: WriteBW, MTU: 6},
		"memory":      {Peer: at, Test: WriteBW, Size: 1 << 30},
		"no listener": {Peer: at, Test: WriteBW},
	} {
		if _, err := Perftest(context.Background(), dev, c); err == nil || errors.Is(err, ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]PingpongConfig{
		"no role":      {Program: RCPingpong},
		"no program":   {Peer: at},
		"two pairs":    {Peer: at, Program: RCPingpong, QPs: 2},
		"256 pairs":    {Peer: at, Program: SRQPingpong, QPs: 256},
		"few receives": {Peer: at, Program: SRQPingpong, QPs: 5, RxDepth: 4},
		"negative":     {Peer: at, Program: RCPingpong, Iters: -1},
		"memory":       {Peer: at, Program: RCPingpong, Size: 1 << 30},
		"PSN":          {Peer: at, Program: RCPingpong, PSN: 1 << 30},
		"MTU":          {Peer: at, Program: RCPingpong, MTU: 6},
		"GID index":    {Peer: at, Program: RCPingpong, GIDIndex: 1},
		"no listener":  {Peer: at, Program: RCPingpong},
	} {
		if _, err := Pingpong(context.Background(), dev, c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := Pingpong(context.Background(), nil, PingpongConfig{Peer: at, Program: RCPingpong}); err == nil {
		t.Error("no device: accepted")
	}
}
