package perf

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// sidePair returns a side channel and the raw other end of its connection.
func sidePair(t *testing.T, ctx context.Context) (*SideChannel, net.Conn) {
	t.Helper()
	here, there := net.Pipe()
	side := NewSideChannel(ctx, here)
	t.Cleanup(func() {
		there.Close()
		if err := side.Close(); err != nil {
			t.Error(err)
		}
		if err := side.Close(); err != nil {
			t.Errorf("closing twice: %v", err)
		}
	})
	return side, there
}

func TestReceive(t *testing.T) {
	tests := []struct {
		name, send string
		want       string // part of the error; empty: none
	}{
		{"expected", `{"kind":"ready"}` + "\n", ""},
		{"expected, with more than is known", `{"kind":"ready","future":[1]}` + "\n", ""},
		{"another kind", `{"kind":"report"}` + "\n", `the peer says "report"`},
		{"no kind", `{}` + "\n", `the peer says ""`},
		{"the peer gives up", `{"kind":"error","error":"out of memory"}` + "\n", "peer: out of memory"},
		{"not JSON", "HTTP/1.1 400 Bad Request\r\n", "not a message of verbena perf"},
		{"end", "", "the peer has gone"},
		{"end within a line", `{"kind":"rea`, "not a message of verbena perf"},
		{"endless line", strings.Repeat("x", maxLine+1), "token too long"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			side, peer := sidePair(t, t.Context())
			go func() {
				_, _ = peer.Write([]byte(tt.send)) // refused half-way in some cases
				peer.Close()
			}()
			_, err := side.receive(5*time.Second, kindReady)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// What was said before the end is heard before the end is.
func TestReceiveBeforeEnd(t *testing.T) {
	side, peer := sidePair(t, t.Context())
	if _, err := peer.Write([]byte(`{"kind":"ready"}` + "\n" + `{"kind":"started"}` + "\n")); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	<-side.failed
	for _, k := range []kind{kindReady, kindStarted} {
		if _, err := side.receive(time.Second, k); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := side.receive(time.Second, kindReport); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("after the end: %v", err)
	}
}

func TestReceiveTimesOut(t *testing.T) {
	side, _ := sidePair(t, t.Context())
	if _, err := side.receive(20*time.Millisecond, kindReady); err == nil || !strings.Contains(err.Error(), "no [\"ready\"] from the peer") {
		t.Errorf("error %v", err)
	}
}

func TestContextEndsReceive(t *testing.T) {
	why := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	side, _ := sidePair(t, ctx)
	cancel(why)
	if _, err := side.receive(0, kindReady); !errors.Is(err, why) {
		t.Errorf("error %v", err)
	}
	if !side.pending() || !errors.Is(side.err(), why) {
		t.Error("the loops are not told")
	}
}

// A target checks what a stranger asks for.
func TestReceiveHello(t *testing.T) {
	good := func() message {
		return message{Kind: kindHello, Magic: magic, Version: Version, Params: &Params{Iters: 1}}
	}
	tests := []struct {
		name string
		edit func(m *message)
		want string
	}{
		{"good", func(*message) {}, ""},
		{"magic", func(m *message) { m.Magic = "perftest" }, "not a peer of verbena perf"},
		{"version", func(m *message) { m.Version = 99 }, "version 99"},
		{"no params", func(m *message) { m.Params = nil }, "without content"},
		{"size", func(m *message) { m.Params.Size = 1 << 40 }, "size"},
		{"negative size", func(m *message) { m.Params.Size = -1 }, "size"},
		{"depth", func(m *message) { m.Params.Depth = 1 << 30 }, "depth"},
		{"qps", func(m *message) { m.Params.QPs = 1 << 30 }, "qps"},
		{"threads", func(m *message) { m.Params.Threads = 1 << 30 }, "threads"},
		{"negative threads", func(m *message) { m.Params.Threads = -1 }, "threads"},
		{"more threads than queue pairs", func(m *message) { m.Params.Threads, m.Params.QPs, m.Params.Iters = 3, 2, 3 }, "at least one for each of the 3 threads"},
		{"more threads than messages", func(m *message) { m.Params.Threads, m.Params.Iters = 3, 2 }, "at least one for each of the 3 threads"},
		{"latency by threads", func(m *message) { m.Params.Lat, m.Params.Threads = true, 2 }, "by one thread"},
		{"memory", func(m *message) { m.Params.QPs, m.Params.Size = maxQPs, maxSize }, "more than 4G"},
		{"batch", func(m *message) { m.Params.Batch = 3 }, "batch"},
		{"op", func(m *message) { m.Params.Op = "x" }, "op"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			side, peer := sidePair(t, t.Context())
			m := good()
			tt.edit(&m)
			b, err := json.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = peer.Write(append(b, '\n')) }()
			_, err = side.receiveHello()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// An offer that does not fit is refused before anything is connected.
func TestConnectRefusesOffer(t *testing.T) {
	r := rigFor(t, Params{Threads: 2, QPs: 3}, 0, 0)
	all := make([]verbs.Endpoint, 3)
	for _, o := range []*offer{
		nil, {}, {Endpoints: all}, {Memory: make([]memoryOffer, 2)}, {Endpoints: all[:2], Memory: make([]memoryOffer, 2)},
		{Endpoints: all, Memory: make([]memoryOffer, 1)}, {Endpoints: all, Memory: make([]memoryOffer, 3)},
		{Endpoints: all, Memory: []memoryOffer{{}, {RxAddr: math.MaxUint64}}}, {Endpoints: all, Memory: []memoryOffer{{TxAddr: math.MaxUint64 - 8}, {}}},
	} {
		if err := r.connect(o, 1024); err == nil {
			t.Errorf("offer %+v is accepted", o)
		}
	}
}

func TestChild(t *testing.T) {
	t.Run("echo", func(t *testing.T) {
		c, err := StartChild("/bin/cat")
		if err != nil {
			t.Fatal(err)
		}
		side := NewSideChannel(t.Context(), c.Conn)
		if err := side.send(message{Kind: kindReady}); err != nil {
			t.Fatal(err)
		}
		if _, err := side.receive(5*time.Second, kindReady); err != nil {
			t.Fatal(err)
		}
		if err := side.Close(); err != nil {
			t.Error(err)
		}
		if err := c.Stop(); err != nil {
			t.Errorf("a child whose input ends: %v", err)
		}
	})
	t.Run("failing", func(t *testing.T) {
		c, err := StartChild("/bin/sh", "-c", "echo no luck >&2; exit 3")
		if err != nil {
			t.Fatal(err)
		}
		side := NewSideChannel(t.Context(), c.Conn)
		if _, err := side.receive(5*time.Second, kindReady); err == nil {
			t.Error("a message from a child that said nothing")
		}
		if err := side.Close(); err != nil {
			t.Error(err)
		}
		if err := c.Stop(); err == nil || !strings.Contains(err.Error(), "no luck") {
			t.Errorf("a failing child ends with %v", err)
		}
	})
	t.Run("stubborn", func(t *testing.T) {
		c, err := StartChild("/bin/sh", "-c", "trap '' TERM INT; while :; do sleep 0.1; done")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Stop(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("a child that does not end by itself ends with %v", err)
		}
	})
	t.Run("missing", func(t *testing.T) {
		if _, err := StartChild("/nonexistent/program"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("error %v", err)
		}
	})
}
