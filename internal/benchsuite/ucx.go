package main

// UCX's own benchmark, which shows how fast shared memory is on this machine.

import (
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
)

const ucxMissing = "ucx_perftest is not installed (Debian package ucx-utils)"

// ucxTest is a test of ucx_perftest.
type ucxTest struct {
	path string
	test string // its name there
	tls  string // UCX_TLS: the transports
	size int
	rate float64 // iterations a second, for the next run
}

// newUCX returns a test, or nil without ucx_perftest.
func newUCX(test, tls string, size int) *ucxTest {
	path, err := exec.LookPath("ucx_perftest")
	if err != nil {
		return nil
	}
	return &ucxTest{path: path, test: test, tls: tls, size: size, rate: 1e5}
}

// The columns of its report that are used here.
const (
	ucxMedian = "50.0_percentile_lat" // µs, half a round trip
	ucxMBs    = "overall_bw"          // MB/s, of 2^20 bytes
	ucxRate   = "overall_mr"          // messages a second
)

// ucxWarmUp is how many iterations it runs before it measures.
const ucxWarmUp = 1000

// run measures for about d. It returns the report by column, and the CPU time of both
// processes for each GB, with that of their start and the warm-up.
func (u *ucxTest) run(d time.Duration) (report map[string]float64, cpuPerGB float64, err error) {
	port, err := freePort()
	if err != nil {
		return nil, 0, err
	}
	server, err := u.start("-p", strconv.Itoa(port))
	if err != nil {
		return nil, 0, err
	}
	iters := max(1000, int(u.rate*d.Seconds()))
	report, client, err := u.connect(port, iters)
	server.Kill()
	if err != nil {
		return nil, 0, err
	}
	u.rate = report[ucxRate]
	gb := float64(iters+ucxWarmUp) * float64(u.size) / 1e9
	return report, (client + server.CPU()).Seconds() / gb, nil
}

// connect runs the client until it reaches the server, which may not listen yet.
func (u *ucxTest) connect(port, iters int) (report map[string]float64, cpu time.Duration, err error) {
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		report, cpu, err = u.client(port, iters)
		if err == nil || time.Now().After(deadline) {
			return report, cpu, err
		}
	}
}

func (u *ucxTest) start(args ...string) (*child.Process, error) {
	if err := os.Setenv("UCX_TLS", u.tls); err != nil { // children inherit it
		return nil, err
	}
	return child.Start(nil, u.path, args...)
}

// client runs the client once and returns its report by column, and its CPU time.
func (u *ucxTest) client(port, iters int) (map[string]float64, time.Duration, error) {
	c, err := u.start("127.0.0.1", "-p", strconv.Itoa(port), "-t", u.test, "-s", strconv.Itoa(u.size), "-n", strconv.Itoa(iters), "-w", strconv.Itoa(ucxWarmUp), "-f", "-v")
	if err != nil {
		return nil, 0, err
	}
	watchdog := c.KillAfter(replyLimit)
	defer watchdog.Stop()
	rows, err := csv.NewReader(c.Out).ReadAll()
	if failure := c.Stop(); err != nil || failure != nil {
		return nil, 0, fmt.Errorf("ucx_perftest: %w", errors.Join(err, failure))
	}
	if len(rows) != 2 {
		return nil, 0, fmt.Errorf("ucx_perftest: its report has %d lines", len(rows))
	}
	row := map[string]float64{}
	for i, name := range rows[0] {
		if row[name], err = strconv.ParseFloat(strings.TrimSpace(rows[1][i]), 64); err != nil {
			return nil, 0, fmt.Errorf("ucx_perftest: %w", err)
		}
	}
	if row[ucxRate] <= 0 {
		return nil, 0, errors.New("ucx_perftest: its report has no figures")
	}
	return row, c.CPU(), nil
}

// bandwidth returns a test of bandwidth as a contender.
func (u *ucxTest) bandwidth(name string) contender {
	const mib = 1 << 20 / 1e9 // in GB
	c := contender{rows: []row{{name: name, unit: "GB/s"}}}
	if u == nil {
		c.notRun = ucxMissing
		return c
	}
	c.rates = func(d time.Duration) ([]rate, error) {
		report, cpu, err := u.run(d)
		return []rate{{report[ucxMBs] * mib, cpu}}, err
	}
	return c
}

// latency returns a test of latency as a contender.
func (u *ucxTest) latency(name string) contender {
	c := contender{rows: []row{{name: name, unit: "µs"}}}
	if u == nil {
		c.notRun = ucxMissing
		return c
	}
	c.run = func(d time.Duration) ([]float64, error) {
		report, _, err := u.run(d)
		return []float64{report[ucxMedian]}, err
	}
	return c
}
