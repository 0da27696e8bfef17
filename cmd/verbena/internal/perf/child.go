package perf

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
)

// Child is a peer in a process of its own, whose standard input and output are
// the side channel. It ends with this process in any case: its input ends, and
// the kernel kills it.
type Child struct {
	// Conn is this end of the side channel. Closing it asks the child to end.
	Conn *Pipe

	cmd    *exec.Cmd
	stderr bytes.Buffer // read only after ended is closed
	ended  chan struct{}
	err    error // how it ended; read only after ended is closed
}

// StartChild runs a program as a peer.
func StartChild(program string, args ...string) (*Child, error) {
	childIn, toChild, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	fromChild, childOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, childIn.Close(), toChild.Close())
	}
	c := &Child{
		Conn:  &Pipe{in: fromChild, out: toChild},
		cmd:   exec.Command(program, args...),
		ended: make(chan struct{}),
	}
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = childIn, childOut, &c.stderr
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
	// The child has its ends of the pipes. With ours open, reads would not end when
	// the child does.
	err = errors.Join(err, childIn.Close(), childOut.Close())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting a peer: %w", err), c.Conn.Close())
	}
	return c, nil
}

// Stop closes the side channel and waits for the child to end; after 3 s it kills the
// child. If the child failed, the error has what it wrote to its standard error.
func (c *Child) Stop() error {
	_ = c.Conn.Close() // it may be closed already
	select {
	case <-c.ended:
	case <-time.After(3 * time.Second):
		if err := c.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("ending the peer: %w", err)
		}
		<-c.ended
	}
	if c.err != nil {
		return fmt.Errorf("peer process: %w: %s", c.err, strings.TrimSpace(c.stderr.String()))
	}
	return nil
}

// Pipe is a pair of pipes as a connection.
type Pipe struct{ in, out *os.File }

// StdPipe returns standard input and output as a connection: the child's end.
func StdPipe() (*Pipe, error) {
	in, out, err := sys.StdFiles()
	if err != nil {
		return nil, err
	}
	return &Pipe{in: in, out: out}, nil
}

func (p *Pipe) Read(b []byte) (int, error)  { return p.in.Read(b) }
func (p *Pipe) Write(b []byte) (int, error) { return p.out.Write(b) }

// Close closes both pipes.
func (p *Pipe) Close() error { return errors.Join(p.in.Close(), p.out.Close()) }
