package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/perf"
	"github.com/verbena-rdma/verbena/verbs"
)

// defaultPerfPort is the TCP port on which --listen waits.
const defaultPerfPort = 18791

// perfPeerCmd is the child process that perf starts: the target of one measurement. Its
// standard input and output are the side channel.
type perfPeerCmd struct {
	Link   string `default:"udp"`
	Device string
}

func (c *perfPeerCmd) Run(ctx context.Context) (err error) {
	conn, err := perf.StdPipe()
	if err != nil {
		return err
	}
	side := perf.NewSideChannel(ctx, conn)
	defer func() { err = errors.Join(err, side.Close()) }()
	dev, err := verbs.Open(c.Device, &verbs.Config{Link: verbs.LinkMode(c.Link)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	_, err = perf.Serve(dev, side)
	return err
}

// peerArgs returns the arguments of the child process. With packets the child takes
// another loopback address, the first free one; with shared memory it shares this side's
// address.
func peerArgs(dev *verbs.Device, link string) []string {
	args := []string{"perf-peer", "--link", link}
	if link == string(verbs.LinkLocal) {
		args = append(args, "--device", dev.Addr().String())
	}
	return args
}

// withChild measures against a child process.
func (c *perfCmd) withChild(ctx context.Context, p perf.Params, show *stages) (res *perf.Result, err error) {
	dev, err := verbs.Open(c.Device, &verbs.Config{Link: verbs.LinkMode(c.Link), PCAP: c.PCAP})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	c.captureNote(dev)
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	child, err := perf.StartChild(self, peerArgs(dev, c.Link)...)
	if err != nil {
		return nil, err
	}
	defer func() {
		// A child that knows what was wrong has sent it over the side channel
		// already; or it repeats what this side has sent.
		if childErr := child.Stop(); err == nil || errors.Is(err, perf.ErrPeerGone) {
			err = errors.Join(err, childErr)
		}
	}()
	side := perf.NewSideChannel(ctx, child.Conn)
	defer func() { err = errors.Join(err, side.Close()) }()
	return perf.Initiate(dev, side, p, show.notify(p))
}

// connect measures against a host that listens.
func (c *perfCmd) connect(ctx context.Context, p perf.Params, show *stages) (res *perf.Result, err error) {
	addr, err := withPort(c.Connect)
	if err != nil {
		return nil, usagef("--connect %s: %w", c.Connect, err)
	}
	dialer := net.Dialer{Timeout: 10 * time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	side := perf.NewSideChannel(ctx, conn)
	defer func() { err = errors.Join(err, side.Close()) }()
	dev, err := verbs.Open(c.deviceFor(conn), &verbs.Config{Link: verbs.LinkMode(c.Link), PCAP: c.PCAP})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	c.captureNote(dev)
	return perf.Initiate(dev, side, p, show.notify(p))
}

// listen serves one measurement of a host that connects.
func (c *perfCmd) listen(ctx context.Context, show *stages) (res *perf.Result, err error) {
	addr, err := withPort(c.Listen.value)
	if err != nil {
		return nil, usagef("--listen=%s: %w", c.Listen.value, err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "verbena perf: listening on %v\n", l.Addr())
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // ends Accept with an error
	conn, err := l.Accept()
	stop()
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if err != nil {
		return nil, errors.Join(err, closeIf(conn), ignoreClosed(l.Close()))
	}
	if err := l.Close(); err != nil { // one measurement, then the port is free
		return nil, errors.Join(err, conn.Close())
	}
	show.set("serving " + conn.RemoteAddr().String())
	side := perf.NewSideChannel(ctx, conn)
	defer func() { err = errors.Join(err, side.Close()) }()
	dev, err := verbs.Open(c.deviceFor(conn), &verbs.Config{Link: verbs.LinkMode(c.Link), PCAP: c.PCAP})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	c.captureNote(dev)
	return perf.Serve(dev, side)
}

func closeIf(c net.Conn) error {
	if c == nil {
		return nil
	}
	return c.Close()
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// deviceFor returns the device to open for a peer: the one asked for, or that
// on the address which reaches the peer. Two processes of one host meet on
// loopback addresses, of which each takes a free one.
func (c *perfCmd) deviceFor(conn net.Conn) string {
	if c.Device != "" {
		return c.Device
	}
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil || local.Addr().Unmap().IsLoopback() {
		return ""
	}
	return local.Addr().Unmap().WithZone("").String()
}

// withPort adds the default port to an address that has none. An empty address
// means all of this host.
func withPort(addr string) (string, error) {
	port := strconv.Itoa(defaultPerfPort)
	if addr == "" {
		return ":" + port, nil
	}
	if ip, err := netip.ParseAddr(addr); err == nil {
		return net.JoinHostPort(ip.String(), port), nil
	}
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		if host, p, err = net.SplitHostPort(addr + ":" + port); err != nil {
			return "", errors.New("want ADDR or ADDR:PORT, with an IPv6 address in brackets")
		}
	}
	if n, err := strconv.ParseUint(p, 10, 16); err != nil || n > 65535 {
		return "", fmt.Errorf("port %q: want 0 to 65535", p)
	}
	return net.JoinHostPort(host, p), nil
}
