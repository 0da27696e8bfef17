package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain is the command itself if a test starts it as that.
func TestMain(m *testing.M) {
	if os.Getenv("VERBENA_KV_MAIN") != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func command(ctx context.Context, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), "VERBENA_KV_MAIN=1", "GORACE=atexit_sleep_ms=0") // the race detector waits a second otherwise
	return c
}

// startServer starts a server, and returns its address.
func startServer(ctx context.Context, t *testing.T, file, address string) (*exec.Cmd, string) {
	t.Helper()
	c := command(ctx, "serve", "-file", file, "-buckets", "1", address)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // fails if it has ended
		_ = c.Wait()         // the same
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	at, ok := strings.CutPrefix(line, "listening on ")
	if !ok {
		t.Fatalf("the server says %q, %v", line, err)
	}
	return c, strings.TrimSpace(at)
}

// The command as a user calls it: each operation, what it prints and its exit status, and a server that is killed and comes back.
func TestCommand(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	file := filepath.Join(t.TempDir(), "table")
	server, at := startServer(ctx, t, file, "127.77.34.1:0")
	long := strings.Repeat("x", 193)
	steps := func(lines [][3]string) {
		t.Helper()
		for _, l := range lines {
			args := strings.Fields(strings.Replace(l[0], "ADDR", at, 1))
			out, err := command(ctx, args...).CombinedOutput()
			got := fmt.Sprint(err)
			if !strings.Contains(string(out), l[1]) || got != l[2] {
				t.Errorf("kv %.60s: %q, %v; want %q, %s", l[0], out, got, l[1], l[2])
			}
		}
	}
	const good, bad, wrong = "<nil>", "exit status 1", "exit status 2"
	steps([][3]string{
		{"get ADDR colour", "kv: no such key\n", bad},
		{"put ADDR colour green", "version 1\n", good},
		{"put ADDR colour blue", "version 2\n", good},
		{"get ADDR colour", "blue\n", good},
		{"put ADDR colour " + long, "too long", bad},
		{"put ADDR a 1", "version 3\n", good},
		{"put ADDR b 2", "version 4\n", good},
		{"put ADDR c 3", "version 5\n", good},
		{"put ADDR d 4", "full", bad},
		{"delete ADDR a", "", good},
		{"delete ADDR a", "no such key", bad},
		{"put ADDR colour", "usage: kv put ADDR KEY VALUE", wrong},
		{"steal ADDR colour", "usage: kv get ADDR KEY", wrong},
		{"get 127.77.34.1:9 colour", "refused", bad},
	})
	if err := server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = server.Wait() // says that it was killed
	_, at = startServer(ctx, t, file, at)
	steps([][3]string{
		{"get ADDR colour", "blue\n", good},
		{"get ADDR a", "no such key", bad},
		{"put ADDR d 4", "version 7\n", good},
	})
}

// The benchmark runs, with PUTs, and counts both.
func TestBench(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c := command(ctx, "serve", "127.77.34.2:0")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	got, err := command(ctx, "bench", "-clients", "2", "-puts", "50", "-for", "300ms", strings.Fields(line)[2]).CombinedOutput()
	for _, part := range []string{"GET: ", "PUT: ", " a second by 2 clients; ", "torn READs, repeated: "} {
		if !strings.Contains(string(got), part) {
			t.Errorf("the benchmark prints\n%swithout %q", got, part)
		}
	}
	if err != nil {
		t.Error(err)
	}
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("the server ends with %v", err)
	}
}
