// Package slowfs is a file system for tests that is as slow as a test wants: reads
// of its one file wait until the test lets them continue. It is a real file system, by
// FUSE, so the kernel treats the file as one on a slow disk or a remote server.
//
// New runs the test's own program again, in a mount namespace of its own, where init
// finds the environment variable and serves the file system; the test opens the file
// through /proc. The server is another process because the thread that waits for the
// file may be one that the Go runtime cannot stop: a server in the same process could
// wait for the collector, which waits for that thread, which waits for the server.
package slowfs

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

const variable = "VERBENA_TEST_SLOWFS"

func init() {
	if target := os.Getenv(variable); target != "" {
		if err := serve(target); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// FS is a slow file system.
type FS struct {
	tb   testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	end  sync.Once
	path string
}

// New mounts a file system with one file of the given size until the test ends. Reads do
// not wait at first. New skips the test where there is no FUSE.
func New(tb testing.TB, size int64) *FS {
	tb.Helper()
	target := filepath.Join(tb.TempDir(), "slow")
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	f := &FS{tb: tb, cmd: exec.Command("/proc/self/exe")}
	f.cmd.Env = append(os.Environ(), variable+"="+target, variable+"_SIZE="+strconv.FormatInt(size, 10))
	f.cmd.Stderr = os.Stderr
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	f.cmd.SysProcAttr = attr
	in, err := f.cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		tb.Skip("no mount namespace:", err)
	}
	f.in, f.out = in, bufio.NewReader(out)
	tb.Cleanup(f.Kill)
	line, err := f.out.ReadString('\n')
	if err != nil || line != "ready\n" {
		tb.Skipf("no FUSE: %s%v", line, err)
	}
	f.path = fmt.Sprintf("/proc/%d/root%s", f.cmd.Process.Pid, target)
	return f
}

// Open opens the file.
func (f *FS) Open() *os.File {
	f.tb.Helper()
	file, err := os.OpenFile(f.path, os.O_RDWR, 0)
	if err != nil {
		f.tb.Fatal(err)
	}
	f.tb.Cleanup(func() { _ = file.Close() })
	if _, err := file.Stat(); err != nil { // otherwise the kernel takes the file for empty
		f.tb.Fatal(err)
	}
	return file
}

// Hold makes reads wait from now on.
func (f *FS) Hold() { f.tell('h') }

// Go lets reads continue: those that wait, and later ones.
func (f *FS) Go() { f.tell('g') }

// tell sends a command to the server, and waits until the server has executed it.
func (f *FS) tell(what byte) {
	f.tb.Helper()
	if _, err := f.in.Write([]byte{what}); err != nil {
		f.tb.Fatal(err)
	}
	if line, err := f.out.ReadString('\n'); err != nil || line != "done\n" {
		f.tb.Fatal(line, err)
	}
}

// Kill ends the server. Reads that wait fail, and so do all later ones.
func (f *FS) Kill() {
	f.end.Do(func() {
		_ = f.cmd.Process.Kill()
		_ = f.cmd.Wait()
	})
}

// Byte returns the file's initial byte at an offset.
func Byte(off int64) byte { return byte(off) ^ byte(off>>12)*31 ^ 0x55 }
