package store

// Processes that are killed (SIGKILL) in the middle of their work, and started again.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// childVar has what this program does instead of its tests, with arguments.
const childVar = "VERBENA_KV_CHILD"

// child is a process of a test. It ends with its standard input, so never later than the test.
func child() int {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until it ends
		cancel()
	}()
	args := strings.Split(os.Getenv(childVar), " ")
	err := map[string]func(context.Context, []string) error{"serve": childServer, "client": childClient}[args[0]](ctx, args[1:])
	if err != nil && ctx.Err() == nil {
		fmt.Println("failed:", err)
		return 1
	}
	return 0
}

// childServer serves a table in a file, and prints where.
func childServer(ctx context.Context, args []string) error {
	table, err := OpenTable(args[0], 2)
	if err != nil {
		return err
	}
	s, err := Listen(ctx, args[1], table, nil)
	if err != nil {
		return err
	}
	fmt.Println("at", s.Addr())
	<-ctx.Done()
	return errors.Join(s.Close(), table.Close())
}

// childClient does operations, and prints each before and after.
func childClient(ctx context.Context, args []string) error {
	c, err := Dial(ctx, args[0], nil)
	if err != nil {
		return err
	}
	number, _ := strconv.Atoi(args[1])
	seed, _ := strconv.ParseUint(args[2], 10, 64)
	r := rand.New(rand.NewPCG(seed, uint64(number)))
	for n := 0; ctx.Err() == nil; n++ {
		o := op{client: number, n: n, whose: number, kind: "PPPGD"[r.IntN(5)], key: fmt.Sprint("key ", r.IntN(3))}
		fmt.Println("begins", n, string(o.kind), o.key, now())
		if o, err = perform(ctx, c, o); err != nil {
			return err
		}
		fmt.Println("has", n, string(o.kind), o.client, o.n, o.version, o.start, o.end)
	}
	return c.Close()
}

// process is a child that is running.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	lines *bufio.Scanner
}

func start(t testing.TB, args ...any) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), childVar+"="+strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
	p.cmd.Stderr = os.Stderr
	out := must(p.cmd.StdoutPipe())(t)
	p.stdin = must(p.cmd.StdinPipe())(t)
	p.lines = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	return p
}

// kill kills the process, unless it has ended.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended
	_ = p.cmd.Wait()         // says that it was killed
	_ = p.stdin.Close()      // the same
}

// startServer starts a server, and returns its address.
func startServer(t testing.TB, file, address string) (*process, string) {
	t.Helper()
	p := start(t, "serve", file, address)
	if !p.lines.Scan() {
		t.Fatal("the server has ended")
	}
	at, ok := strings.CutPrefix(p.lines.Text(), "at ")
	if !ok {
		t.Fatalf("the server says %q", p.lines.Text())
	}
	return p, at
}

// The server is killed again and again, and starts again with its file. Clients connect again by themselves. Nothing that was
// acknowledged is lost, and nothing comes back.
func TestKilledServer(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			seed, rounds := seedOf(t), pick(1, 20)
			file := filepath.Join(t.TempDir(), "table")
			server, at := startServer(t, file, "127.77.33.1:0")
			var clients []*Client
			for range 3 {
				clients = append(clients, dial(t, at, open(t, link)))
			}
			h, over := new(history), atomic.Bool{}
			var killer sync.WaitGroup
			killer.Go(func() {
				defer over.Store(true)
				r := rand.New(rand.NewPCG(seed, 1000))
				for round := range rounds + 1 {
					// All clients have noticed the last time, too.
					if err := h.waitFor(background(t), 50+r.IntN(200), func() bool {
						return !slices.ContainsFunc(clients, func(c *Client) bool { return c.Connections() <= uint64(round) })
					}); err != nil {
						t.Error(err)
						return
					}
					if round < rounds {
						server.kill()
						server, _ = startServer(t, file, at)
					}
				}
			})
			play(t, h, clients, 0, seed, over.Load)
			killer.Wait()
			unknown := 0
			for _, o := range h.ops {
				if o.end == never {
					unknown++
				}
			}
			for i, c := range clients {
				if n := c.Connections(); n != uint64(rounds)+1 {
					t.Errorf("client %d has made %d connections, and the server was killed %d times", i, n, rounds)
				}
			}
			t.Logf("%d operations, %d without an answer", len(h.ops), unknown)
		})
	}
}

// Clients are killed in the middle of their PUTs. The others do not notice, and what was acknowledged to the dead is there.
func TestKilledClients(t *testing.T) {
	seed := seedOf(t)
	s := serve(t, must(NewTable(2))(t), verbs.LinkAny)
	h, over := new(history), atomic.Bool{}
	var killer sync.WaitGroup
	killer.Go(func() {
		defer over.Store(true)
		r := rand.New(rand.NewPCG(seed, 1000))
		for i := range pick(3, 30) {
			if err := h.watch(start(t, "client", s.Addr(), 100+i, seed), 100+i, 20+r.IntN(200)); err != nil {
				t.Error(err)
			}
		}
	})
	play(t, h, []*Client{dial(t, s.Addr(), open(t, verbs.LinkAny)), dial(t, s.Addr(), open(t, verbs.LinkUDP))}, 0, seed, over.Load)
	killer.Wait()
	ctx := background(t)
	for s.visitors() > 2 { // the dead are noticed
		if ctx.Err() != nil {
			t.Fatalf("%d visitors are left, want 2", s.visitors())
		}
		time.Sleep(time.Millisecond)
	}
}

func (s *Server) visitors() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.current)
}

// watch takes the operations of a client from what it prints, and kills it after so many of them. The one that was under way
// then is one without an answer.
func (h *history) watch(p *process, number, kill int) error {
	var under op
	for n := 0; p.lines.Scan(); n++ {
		line, f := p.lines.Text(), strings.Fields(p.lines.Text())
		switch {
		case len(f) == 6 && f[0] == "begins":
			under = op{client: number, whose: number, kind: f[2][0], key: f[3] + " " + f[4], end: never}
			if _, err := fmt.Sscan(f[1]+" "+f[5], &under.n, &under.start); err != nil {
				return err
			}
		case len(f) == 8 && f[0] == "has":
			o := under
			o.kind = f[2][0]
			if _, err := fmt.Sscan(strings.Join(f[3:], " "), &o.client, &o.n, &o.version, &o.start, &o.end); err != nil {
				return err
			}
			h.add(o)
			under = op{}
		case !strings.HasPrefix("begins has", f[0]): // else it was killed while it printed
			return fmt.Errorf("a client says %q", line)
		}
		if n == kill {
			if err := p.cmd.Process.Kill(); err != nil {
				return err
			}
		}
	}
	_ = p.cmd.Wait() // says that it was killed
	if under.end == never && under.kind != opGet {
		h.add(under)
	}
	return nil
}
