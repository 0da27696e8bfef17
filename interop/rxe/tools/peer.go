package tools

// The TCP connection on which the programs exchange their addresses, top-down: a Peer says
// which side connects, open makes the connection, and conn reads and writes messages of
// fixed size until the context ends.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"
)

// Role is the part that this side plays.
type Role uint8

const (
	Client Role = iota + 1 // the program listens, this side connects
	Server                 // this side listens, the program connects
)

// String returns "client" or "server".
func (r Role) String() string {
	switch r {
	case Client:
		return "client"
	case Server:
		return "server"
	}
	return fmt.Sprintf("Role(%d)", uint8(r))
}

// DefaultPort is the port that all the programs use unless told otherwise.
const DefaultPort = "18515"

// ErrUnsupported is wrapped by the error for a combination that the program, or
// this package, does not have.
var ErrUnsupported = errors.New("not supported")

// Peer says where the other program is.
type Peer struct {
	// Role is what this side is; the program is the other one.
	Role Role

	// Addr is, for a client, where the program listens; for a server, where to
	// listen. The port may be left out. Empty: for a client 127.0.0.1, for a
	// server all addresses.
	Addr string

	// DialTimeout is for how long a client tries again while the connection is refused.
	// Zero: 10 seconds.
	DialTimeout time.Duration

	// Listening, if it is not nil, is called by a server, once, when the program may
	// connect.
	Listening func(net.Addr)
}

const (
	defaultDialTimeout = 10 * time.Second
	redial             = 50 * time.Millisecond
)

func (p *Peer) check() error {
	if p.Role != Client && p.Role != Server {
		return fmt.Errorf("role is %v, neither client nor server", p.Role)
	}
	return nil
}

// hostPort returns Addr with a port.
func (p *Peer) hostPort() string {
	addr := p.Addr
	if addr == "" && p.Role == Client {
		addr = "127.0.0.1"
	}
	if _, _, err := net.SplitHostPort(addr); err == nil {
		return addr
	}
	return net.JoinHostPort(addr, DefaultPort)
}

// open makes the connection. The programs send small messages and wait for the
// answer, so Nagle's algorithm, which Go switches off, would not matter.
func (p *Peer) open(ctx context.Context) (*conn, error) {
	var c net.Conn
	var err error
	if p.Role == Client {
		c, err = p.dial(ctx)
	} else {
		c, err = p.accept(ctx)
	}
	if err != nil {
		return nil, err
	}
	return newConn(ctx, c), nil
}

// dial connects. A program that was just started may not listen yet.
func (p *Peer) dial(ctx context.Context) (net.Conn, error) {
	timeout := p.DialTimeout
	if timeout == 0 {
		timeout = defaultDialTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var d net.Dialer
	for {
		c, err := d.DialContext(ctx, "tcp", p.hostPort())
		if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
			return c, err
		}
		select {
		case <-time.After(redial):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (and time is up: %w)", err, ctx.Err())
		}
	}
}

// accept waits for one connection.
func (p *Peer) accept(ctx context.Context) (net.Conn, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", p.hostPort())
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }() // this does not close the connection
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	if p.Listening != nil {
		p.Listening(l.Addr())
	}
	c, err := l.Accept()
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return c, err
}

// conn is a connection whose operations end when a context does.
type conn struct {
	ctx  context.Context
	c    net.Conn
	stop func() bool
}

func newConn(ctx context.Context, c net.Conn) *conn {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return &conn{ctx: ctx, c: c, stop: stop}
}

// err returns the context's error instead of that of an operation which it has interrupted.
func (c *conn) err(err error) error {
	if err != nil && c.ctx.Err() != nil {
		return c.ctx.Err()
	}
	return err
}

// write sends b in one piece: the programs expect a whole message from one read.
func (c *conn) write(b []byte) error {
	_, err := c.c.Write(b)
	return c.err(err)
}

// read fills b.
func (c *conn) read(b []byte) error {
	_, err := io.ReadFull(c.c, b)
	return c.err(err)
}

// finish closes this side and waits until the peer has closed its own: then the peer does not
// need our queue pairs any more. A peer that has not read everything resets the connection
// instead, which is no error.
func (c *conn) finish() error {
	if t, ok := c.c.(*net.TCPConn); ok {
		if err := t.CloseWrite(); err != nil && !gone(err) {
			return c.err(err)
		}
	}
	_, err := io.Copy(io.Discard, io.LimitReader(c.c, maxFarewell))
	if gone(err) {
		err = nil
	}
	return c.err(err)
}

// maxFarewell bounds how much finish reads.
const maxFarewell = 1 << 16

// gone reports whether the peer has closed the connection.
func gone(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ENOTCONN)
}

// close ends the connection. It may be called again.
func (c *conn) close() {
	c.stop()
	_ = c.c.Close()
}
