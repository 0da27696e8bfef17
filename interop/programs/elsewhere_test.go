package programs

// A program in C that works on a dma-buf of another process, the test's.

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
)

// elsewhere starts the program, and waits until it has written and read the buffer once.
func elsewhere(t *testing.T, m *dmabuf.Memory, how string) *process {
	t.Helper()
	fd, err := m.Buffer().FD()
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "dma-buf")
	t.Cleanup(func() { _ = f.Close() })
	p := start(t.Context(), t, side{args: []string{compile(t, "elsewhere"), fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), how}, env: []string{"VERBENA_ADDR=" + address()}})
	for deadline := time.Now().Add(time.Minute); !strings.Contains(p.out.String(), "ready\n"); time.Sleep(time.Millisecond) {
		select {
		case <-p.done:
			t.Fatalf("it has ended: %v\n%s", p.err, p.out.String())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("it does not begin:\n%s", p.out.String())
		}
	}
	return p
}

// The buffer moves, is evicted and revoked while the program works on it. If the program is killed, a move does not
// wait for it, also if a child that it has forked lives on.
func TestDMABufElsewhere(t *testing.T) {
	for _, how := range []string{"revoked", "killed", "fork"} {
		t.Run(how, func(t *testing.T) {
			m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: 64 << 10})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			p := elsewhere(t, m, how)
			for i := range 100 {
				move := m.Move
				if i%5 == 4 {
					move = m.Evict
				}
				if err := move(ctx); err != nil {
					t.Fatalf("move %d: %v\n%s", i, err, p.out.String())
				}
				time.Sleep(200 * time.Microsecond)
			}
			if how == "revoked" {
				if err := m.Revoke(ctx); err != nil {
					t.Error(err)
				}
				if out := p.finish(t); !strings.HasSuffix(out, "ended\n") {
					t.Errorf("it says\n%s", out)
				}
				return
			}
			if how == "fork" {
				_, rest, _ := strings.Cut(p.out.String(), "child ")
				number, _, _ := strings.Cut(rest, "\n")
				child, err := strconv.Atoi(number)
				if err != nil {
					t.Fatalf("it says\n%s", p.out.String())
				}
				defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
				if err := syscall.Kill(child, 0); err != nil {
					t.Fatalf("the child: %v", err)
				}
			}
			if err := p.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			brief, end := context.WithTimeout(ctx, 20*time.Second)
			defer end()
			if err := m.Move(brief); err != nil {
				t.Errorf("a move after the program's end: %v", err)
			}
		})
	}
}
