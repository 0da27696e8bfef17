package programs

// Processes of one address of which a part has ended: the main thread, or the parent of a process
// that lives on.

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// beside is a process that runs the program "beside".
type beside struct {
	t     *testing.T
	in    io.WriteCloser
	lines *bufio.Scanner
	place uint32 // of its queue pairs
}

func startBeside(t *testing.T, bin, what, addr string) *beside {
	t.Helper()
	cmd := exec.Command(built(t)+"/verbena", "exec", "--", bin, what)
	cmd.Env = append(os.Environ(), "VERBENA_ADDR="+addr)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b := &beside{t: t, in: in, lines: bufio.NewScanner(out)}
	t.Cleanup(func() {
		_ = in.Close()
		for b.lines.Scan() { // until its child has ended, too
		}
		_ = cmd.Wait()
	})
	var number uint32
	if _, err := fmt.Sscanf(b.next(), "number %d", &number); err != nil {
		t.Fatal(err)
	}
	b.place = sys.Place(number)
	return b
}

func (b *beside) next() string {
	b.t.Helper()
	if !b.lines.Scan() {
		b.t.Fatal("the process has ended")
	}
	return b.lines.Text()
}

// A process whose main thread has ended goes on, and the datagrams of two others of the same
// address arrive, by rings and by packets.
func TestMainThreadEnded(t *testing.T) {
	program(t, "ibv_ud_pingpong", "ibverbs-utils")
	addr, bin := address(), compile(t, "beside")
	b := startBeside(t, bin, "thread", addr)
	for _, link := range []string{"any", "udp"} {
		if l := b.next(); l != "used" {
			t.Errorf("it says %q", l)
		}
		between(t, []string{"ibv_ud_pingpong", "-g", "0", "-n", "300", "-r", "400"}, "VERBENA_ADDR="+addr, "VERBENA_LINK="+link)
		if _, err := io.WriteString(b.in, "again\n"); err != nil {
			t.Fatal(err)
		}
	}
	if l := b.next(); l != "used" {
		t.Errorf("it says %q", l)
	}
}

// A process has ended, and its child lives on, with copies of all its descriptors: the next process
// gets its place. If the process was alone, the next one gets its address.
func TestParentEnded(t *testing.T) {
	bin := compile(t, "beside")
	for _, what := range []string{"parent", "raw"} {
		t.Run(what, func(t *testing.T) {
			addr := address()
			stays := startBeside(t, bin, "thread", addr)
			first := startBeside(t, bin, what, addr)
			if l := first.next(); l != "child" {
				t.Fatalf("it says %q", l)
			}
			for range 3 {
				next := startBeside(t, bin, what, addr)
				if next.place != first.place || next.place == stays.place {
					t.Errorf("place %d, want that of the process that has ended, %d", next.place, first.place)
				}
				if l := next.next(); l != "child" {
					t.Fatalf("it says %q", l)
				}
			}
		})
	}
	t.Run("alone", func(t *testing.T) {
		addr := address()
		for range 2 {
			if l := startBeside(t, bin, "parent", addr).next(); !strings.HasPrefix(l, "child") {
				t.Fatalf("it says %q", l)
			}
		}
	})
}
