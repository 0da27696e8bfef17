package main

// iperf3, which shows how fast TCP is on this machine.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
)

const iperfMissing = "iperf3 is not installed (Debian package iperf3)"

// iperf is a running server, and how fast its last run was.
type iperf struct {
	path string
	port int
	rate float64 // bytes a second, for the size of the next run
}

// newIperf starts a server. The group stops it. Without iperf3 it returns nil.
func (b *bench) newIperf() (*iperf, error) {
	path, err := exec.LookPath("iperf3")
	if err != nil {
		return nil, nil
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	c, err := child.Start(nil, path, "--server", "--bind", "127.0.0.1", "--port", strconv.Itoa(port))
	if err != nil {
		return nil, err
	}
	go func() { _, _ = io.Copy(io.Discard, c.Out) }() // ends with the child
	b.later(func() error {
		c.Kill() // it never ends by itself
		return nil
	})
	i := &iperf{path: path, port: port, rate: 2e9}
	// A first run shows that the server is there, and how fast.
	_, err = i.run("64K", 100*time.Millisecond)
	return i, err
}

// freePort returns a port that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// iperfResult is the part of iperf3's JSON that is used here.
type iperfResult struct {
	Error string `json:"error"`
	End   struct {
		Received struct {
			Bytes   float64 `json:"bytes"`
			Seconds float64 `json:"seconds"`
		} `json:"sum_received"`
		CPU struct {
			Host   float64 `json:"host_total"`   // percent of a core
			Remote float64 `json:"remote_total"` // percent of a core
		} `json:"cpu_utilization_percent"`
	} `json:"end"`
}

// run sends for about d, in writes of the given length. The CPU time is what both sides
// report, by getrusage(2): the server does not end after a run, so wait4(2) has no figure.
func (i *iperf) run(length string, d time.Duration) ([]rate, error) {
	// The option for a time takes whole seconds; one for bytes takes any number.
	bytes := max(1<<20, int64(i.rate*d.Seconds()))
	deadline := time.Now().Add(5 * time.Second)
	for {
		r, err := i.client(length, bytes)
		if err == nil {
			rc := r.End.Received
			i.rate = rc.Bytes / rc.Seconds
			cpu := (r.End.CPU.Host + r.End.CPU.Remote) / 100 * rc.Seconds
			return []rate{{i.rate / 1e9, cpu / (rc.Bytes / 1e9)}}, nil
		}
		// The server may not listen yet, or not have finished the last run.
		if !errors.Is(err, errNotReady) || time.Now().After(deadline) {
			return nil, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

var errNotReady = errors.New("iperf3's server is not ready")

func (i *iperf) client(length string, bytes int64) (*iperfResult, error) {
	c, err := child.Start(nil, i.path, "--client", "127.0.0.1", "--port", strconv.Itoa(i.port),
		"--length", length, "--bytes", strconv.FormatInt(bytes, 10), "--json")
	if err != nil {
		return nil, err
	}
	watchdog := c.KillAfter(replyLimit)
	defer watchdog.Stop()
	var r iperfResult
	err = json.NewDecoder(c.Out).Decode(&r)
	_, _ = io.Copy(io.Discard, c.Out)
	failure := c.Stop()
	switch {
	case strings.Contains(r.Error, "refused") || strings.Contains(r.Error, "busy"):
		return nil, fmt.Errorf("%w: %s", errNotReady, r.Error)
	case r.Error != "":
		return nil, fmt.Errorf("iperf3: %s", r.Error)
	case err != nil || failure != nil:
		return nil, fmt.Errorf("iperf3: %w", errors.Join(err, failure))
	case r.End.Received.Bytes <= 0 || r.End.Received.Seconds <= 0:
		return nil, errors.New("iperf3: its report has no figures")
	}
	return &r, nil
}
