package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
)

// child is a helper process. It ends with this one in any case: its standard
// input ends, and the kernel kills it.
type child struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *os.File     // its standard output; stop and kill close it
	stderr bytes.Buffer // read only after ended is closed
	ended  chan struct{}
	err    error // how it ended; read only after ended is closed
}

// startChild runs a program. Its output can be read from out.
func startChild(program string, args ...string) (*child, error) {
	c := &child{cmd: exec.Command(program, args...), ended: make(chan struct{})}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	// Not StdoutPipe, which closes when the child ends, read or not.
	var out *os.File
	if c.out, out, err = os.Pipe(); err != nil {
		return nil, errors.Join(err, c.in.Close())
	}
	c.cmd.Stdout, c.cmd.Stderr = out, &c.stderr
	sys.Subordinate(c.cmd)
	started := make(chan error)
	go func() {
		// The kernel kills the child when the thread that started it ends, so
		// this thread stays until the child has ended.
		runtime.LockOSThread()
		defer close(c.ended)
		err := c.cmd.Start()
		started <- err
		if err == nil {
			c.err = c.cmd.Wait()
		}
	}()
	err = <-started
	_ = out.Close() // the child has its own; with ours open, reads would not end when the child does
	if err != nil {
		return nil, fmt.Errorf("starting a helper process: %w", errors.Join(err, c.out.Close()))
	}
	return c, nil
}

// stop closes the child's input and waits for it to end; after 3 s it kills the child. If
// the child failed, the error has what it wrote to its standard error.
func (c *child) stop() error {
	_ = c.in.Close() // it may have closed its end already
	select {
	case <-c.ended:
	case <-time.After(3 * time.Second):
		c.kill()
	}
	_ = c.out.Close() // kill may have closed it already
	return c.failure()
}

// kill ends the child at once.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // it may have ended already
	<-c.ended
	_ = c.in.Close()
	_ = c.out.Close()
}

// failure returns how a child that has ended failed, or nil.
func (c *child) failure() error {
	if c.err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w: %s", c.cmd.Path, c.err, strings.TrimSpace(c.stderr.String()))
}

// cpu returns the CPU time, user and kernel, of a child that has ended: its own and that of
// those of its children that it has waited for.
func (c *child) cpu() time.Duration {
	<-c.ended
	return c.cmd.ProcessState.UserTime() + c.cmd.ProcessState.SystemTime()
}

// peerArg makes a process a peer of the suite instead of the suite.
const peerArg = "benchsuite-peer"

func isPeer(args []string) bool { return len(args) == 2 && args[1] == peerArg }

// peer is a peer process, as this process sees it: requests and replies go through its
// standard input and output, one at a time, as JSON.
type peer struct {
	child *child
	enc   *json.Encoder
	dec   *json.Decoder
}

// replyLimit is how long a reply may take: longer than anything a peer does.
const replyLimit = time.Minute

// newPeer starts a peer process. The group stops it.
func (b *bench) newPeer() (*peer, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c, err := startChild(exe, peerArg)
	if err != nil {
		return nil, err
	}
	b.later(c.stop)
	return &peer{c, json.NewEncoder(c.in), json.NewDecoder(c.out)}, nil
}

func (p *peer) call(q request) (reply, error) {
	var r reply
	err := p.child.out.SetReadDeadline(time.Now().Add(replyLimit))
	if err == nil {
		err = p.enc.Encode(q)
	}
	if err == nil {
		err = p.dec.Decode(&r)
	}
	if err != nil {
		return r, fmt.Errorf("peer process, %s: %w", q.Op, errors.Join(err, p.child.stop()))
	}
	if r.Err != "" {
		return r, fmt.Errorf("peer process, %s: %s", q.Op, r.Err)
	}
	return r, nil
}
