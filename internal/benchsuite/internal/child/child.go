// Package child runs the processes that measure together with their parent: programs of others, and peers, which answer
// requests.
package child

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

// Process is a child. It ends with this process in any case: its standard input ends, and the
// kernel kills it.
type Process struct {
	Out *os.File // its standard output; Stop and Kill close it

	cmd    *exec.Cmd
	in     io.WriteCloser
	stderr bytes.Buffer // read only after ended is closed
	ended  chan struct{}
	err    error // how it ended; read only after ended is closed
}

// Start runs a program, with variables added to the environment.
func Start(env []string, program string, args ...string) (*Process, error) {
	c := &Process{cmd: exec.Command(program, args...), ended: make(chan struct{})} //nolint:gosec // G204: the programs are ours to choose
	c.cmd.Env = append(os.Environ(), env...)
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	// Not StdoutPipe, which closes when the child ends, read or not.
	var out *os.File
	if c.Out, out, err = os.Pipe(); err != nil {
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
		return nil, fmt.Errorf("%s: %w", program, errors.Join(err, c.Out.Close()))
	}
	return c, nil
}

// PID returns the child's process id.
func (c *Process) PID() int { return c.cmd.Process.Pid }

// Ended is closed when the child has ended.
func (c *Process) Ended() <-chan struct{} { return c.ended }

// Stop closes the child's input and waits for it to end; after 3 s it kills the child. If
// the child failed, the error has what it wrote to its standard error.
func (c *Process) Stop() error {
	_ = c.in.Close() // it may have closed its end already
	select {
	case <-c.ended:
	case <-time.After(3 * time.Second):
		c.Kill()
	}
	_ = c.Out.Close() // Kill may have closed it already
	return c.Failure()
}

// KillAfter kills the child if it has not ended in time. The caller stops the timer.
func (c *Process) KillAfter(d time.Duration) *time.Timer {
	return time.AfterFunc(d, func() { _ = c.cmd.Process.Kill() })
}

// Kill ends the child at once.
func (c *Process) Kill() {
	_ = c.cmd.Process.Kill() // it may have ended already
	<-c.ended
	_ = c.in.Close()
	_ = c.Out.Close()
}

// Failure waits for the child's end and returns how it failed, or nil.
func (c *Process) Failure() error {
	<-c.ended
	if c.err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(c.cmd.Args, " "), c.err, strings.TrimSpace(c.stderr.String()))
}

// CPU waits for the child's end and returns its CPU time, user and kernel: its own and that of
// those of its children that it has waited for.
func (c *Process) CPU() time.Duration {
	<-c.ended
	return c.cmd.ProcessState.UserTime() + c.cmd.ProcessState.SystemTime()
}

// Peer is a child that answers requests: they and their replies go through its standard input
// and output, one at a time, as JSON.
type Peer struct {
	*Process
	enc *json.Encoder
	dec *json.Decoder
}

// StartPeer runs a program that answers requests.
func StartPeer(program string, args ...string) (*Peer, error) {
	c, err := Start(nil, program, args...)
	if err != nil {
		return nil, err
	}
	return &Peer{c, json.NewEncoder(c.in), json.NewDecoder(c.Out)}, nil
}

// Call sends a request and waits for its reply, no longer than limit. The peer is stopped if it does not reply.
func (p *Peer) Call(request, reply any, limit time.Duration) error {
	err := p.Out.SetReadDeadline(time.Now().Add(limit))
	if err == nil {
		err = p.enc.Encode(request)
	}
	if err == nil {
		err = p.dec.Decode(reply)
	}
	if err != nil {
		err = errors.Join(err, p.Stop())
	}
	return err
}
