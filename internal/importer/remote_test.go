package importer_test

// Importers in another process. The test's own program is started again for them.

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
)

const (
	childVar   = "VERBENA_TEST_IMPORTER"
	remoteSize = 5*4096 + 8
	words      = remoteSize / 8
)

// beImporter is the other process: it imports the buffer of descriptor 3, adds 1 to its words in
// turn, and says so for each line that it reads.
func beImporter(how string) {
	fail := func(what any) {
		fmt.Println("failed:", what)
		os.Exit(1)
	}
	b, err := dmabuf.Get(3)
	if err != nil {
		fail(err)
	}
	_ = syscall.Close(3)
	backing, err := importer.Import(b, importer.Config{Length: remoteSize, Pinned: how == "pinned"})
	if err != nil {
		fail(err)
	}
	b.Put()
	table := newTable()
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, Length: remoteSize, Backing: backing})
	if err != nil {
		fail(err)
	}
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for at := 0; in.Scan(); {
		n := 0
		_, _ = fmt.Sscan(in.Text(), &n)
		for range n {
			for {
				_, f := mem.Atomic(table, mem.Actor{PD: 1}, r.Key(), uint64(at%words)*8, mem.FetchAdd, 0, 1)
				if f.OK() {
					break
				}
				if f.Kind != mem.FaultPending {
					fail(f)
				}
				f.Await()
			}
			at++
		}
		fmt.Println("added", n, "moves", backing.Stats().Invalidations)
	}
	if err := r.Close(); err != nil {
		fail(err)
	}
	fmt.Println("closed")
}

// child is the other process.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startImporter(t *testing.T, how string, b *dmabuf.Buffer) *child {
	t.Helper()
	fd, err := b.FD()
	check(t, err)
	f := os.NewFile(uintptr(fd), "dma-buf")
	defer func() { check(t, f.Close()) }() // the other process has its own
	return startChild(t, how, f)
}

// startChild starts the program again, with files from descriptor 3 on.
func startChild(t *testing.T, how string, files ...*os.File) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), childVar+"="+how)
	c.cmd.ExtraFiles = files
	c.cmd.Stderr = os.Stderr
	var err error
	c.in, err = c.cmd.StdinPipe()
	check(t, err)
	out, err := c.cmd.StdoutPipe()
	check(t, err)
	c.out = bufio.NewScanner(out)
	check(t, c.cmd.Start())
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill() // it has ended, or the test has failed
		_ = c.cmd.Wait()
	})
	return c
}

// says returns the next line of the other process, which must begin with want.
func (c *child) says(want string) string {
	c.t.Helper()
	if !c.out.Scan() {
		c.t.Fatalf("it has ended, want %q: %v", want, c.out.Err())
	}
	if !strings.HasPrefix(c.out.Text(), want) {
		c.t.Fatalf("it says %q, want %q", c.out.Text(), want)
	}
	return c.out.Text()
}

func (c *child) add(n int) {
	c.t.Helper()
	_, err := fmt.Fprintln(c.in, n)
	check(c.t, err)
}

// stop stops the process, and waits until it is.
func (c *child) stop() {
	c.t.Helper()
	check(c.t, c.cmd.Process.Signal(syscall.SIGSTOP))
	eventually(c.t, "all its threads are stopped", func() bool {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.cmd.Process.Pid))
		check(c.t, err)
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			check(c.t, err)
			if !strings.Contains(string(b), ") T ") {
				return false
			}
		}
		return len(tasks) > 0
	})
}

func remoteMemory(t *testing.T) *dmabuf.Memory {
	t.Helper()
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: remoteSize, Segments: 3})
	check(t, err)
	t.Cleanup(func() { check(t, m.Close()) })
	return m
}

// sum returns the sum of the words.
func sum(t *testing.T, m *dmabuf.Memory) (total uint64) {
	t.Helper()
	b := make([]byte, words*8)
	_, err := m.ReadAt(b, 0)
	check(t, err)
	for ; len(b) > 0; b = b[8:] {
		total += binary.NativeEndian.Uint64(b)
	}
	return total
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// The buffer moves, and is evicted, while another process writes to it: nothing is lost.
func TestRemoteImporter(t *testing.T) {
	m := remoteMemory(t)
	c := startImporter(t, "dynamic", m.Buffer())
	c.says("ready")
	const rounds, each = 20, 5000
	said := make(chan string)
	go func() {
		defer close(said)
		for range rounds {
			c.add(each)
			said <- c.says("added")
		}
	}()
	moves := 0
	last := ""
	for more := true; more; moves++ {
		if moves%5 == 4 {
			check(t, m.Evict(within(t, time.Minute)))
		} else {
			check(t, m.Move(within(t, time.Minute)))
		}
		select {
		case line, ok := <-said:
			if more = ok; ok {
				last = line
			}
		case <-time.After(200 * time.Microsecond):
		}
	}
	if got := sum(t, m); got != rounds*each {
		t.Errorf("the words add up to %d, want %d", got, rounds*each)
	}
	t.Logf("%d moves; the other process: %s", moves, last)
	if strings.HasSuffix(last, "moves 0") {
		t.Error("the other process has seen no move")
	}
	check(t, c.in.Close())
	c.says("closed")
}

// A process that has pinned the buffer holds it in place, until it ends.
func TestRemotePinned(t *testing.T) {
	m := remoteMemory(t)
	c := startImporter(t, "pinned", m.Buffer())
	c.says("ready")
	wantErr(t, "a move", m.Move(within(t, time.Minute)), syscall.EBUSY)
	c.add(10)
	c.says("added")
	check(t, c.cmd.Process.Kill())
	eventually(t, "its pin is gone", func() bool { return m.Move(within(t, time.Minute)) == nil })
	if got := sum(t, m); got != 10 {
		t.Errorf("the words add up to %d", got)
	}
}

// A process that is stopped delays a move until its context ends; one that is killed does not.
func TestRemoteStopped(t *testing.T) {
	m := remoteMemory(t)
	c := startImporter(t, "dynamic", m.Buffer())
	c.says("ready")
	c.add(10)
	c.says("added")
	c.stop()
	for range 3 {
		wantErr(t, "a move", m.Move(within(t, 20*time.Millisecond)), syscall.ETIMEDOUT)
	}
	check(t, c.cmd.Process.Signal(syscall.SIGCONT))
	check(t, m.Move(within(t, time.Minute)))
	c.add(10)
	c.says("added")
	c.stop()
	wantErr(t, "a move", m.Move(within(t, 20*time.Millisecond)), syscall.ETIMEDOUT)
	check(t, c.cmd.Process.Kill())
	check(t, m.Move(within(t, time.Minute)))
	if got := sum(t, m); got != 20 {
		t.Errorf("the words add up to %d", got)
	}
}

// A buffer that is revoked is gone in other processes, too.
func TestRemoteRevoked(t *testing.T) {
	for _, how := range []string{"dynamic", "pinned"} {
		m := remoteMemory(t)
		c := startImporter(t, how, m.Buffer())
		c.says("ready")
		c.add(3)
		c.says("added")
		check(t, m.Revoke(within(t, time.Minute)))
		c.add(1)
		if line := c.says("failed:"); !strings.Contains(line, mem.FaultRevoked.String()) {
			t.Errorf("%s: %s", how, line)
		}
	}
}

// What is no descriptor of a buffer, though its name says so.
func TestRemoteForged(t *testing.T) {
	m := remoteMemory(t)
	fd, err := m.Buffer().FD()
	check(t, err)
	defer func() { check(t, syscall.Close(fd)) }()
	b, err := dmabuf.Get(fd) // this process's own: no socket is asked
	check(t, err)
	if b != m.Buffer() {
		t.Error("another buffer")
	}
	b.Put()
	// A memory file of the same name, that leads to our socket.
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	check(t, err)
	name = strings.TrimSuffix(strings.TrimPrefix(name, "/memfd:"), " (deleted)")
	for _, forged := range []string{name, "verbena-dmabuf:" + strings.Repeat("0", 32), "verbena-dmabuf:", "other"} {
		other := forge(t, forged)
		if _, err := dmabuf.Get(other); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: %v, want EINVAL", forged, err)
		}
		check(t, syscall.Close(other))
	}
}

// forge makes a memory file with a name.
func forge(t *testing.T, name string) int {
	t.Helper()
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	check(t, err)
	return fd
}
