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

// run measures for about d and returns one column.
func (u *ucxTest) run(column string, d time.Duration) (float64, error) {
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	server, err := u.start("-p", strconv.Itoa(port))
	if err != nil {
		return 0, err
	}
	defer server.kill()
	iters := max(1000, int(u.rate*d.Seconds()))
	deadline := time.Now().Add(5 * time.Second)
	for {
		row, err := u.client(port, iters)
		if err == nil {
			u.rate = row[ucxRate]
			return row[column], nil
		}
		// The server may not listen yet.
		if time.Now().After(deadline) {
			return 0, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (u *ucxTest) start(args ...string) (*child, error) {
	if err := os.Setenv("UCX_TLS", u.tls); err != nil { // children inherit it
		return nil, err
	}
	return startChild(u.path, args...)
}

func (u *ucxTest) client(port, iters int) (map[string]float64, error) {
	c, err := u.start("127.0.0.1", "-p", strconv.Itoa(port), "-t", u.test, "-s", strconv.Itoa(u.size), "-n", strconv.Itoa(iters), "-w", "1000", "-f", "-v")
	if err != nil {
		return nil, err
	}
	watchdog := time.AfterFunc(replyLimit, func() { _ = c.cmd.Process.Kill() })
	defer watchdog.Stop()
	rows, err := csv.NewReader(c.out).ReadAll()
	if failure := c.stop(); err != nil || failure != nil {
		return nil, fmt.Errorf("ucx_perftest: %w", errors.Join(err, failure))
	}
	if len(rows) != 2 {
		return nil, fmt.Errorf("ucx_perftest: its report has %d lines", len(rows))
	}
	row := map[string]float64{}
	for i, name := range rows[0] {
		if row[name], err = strconv.ParseFloat(strings.TrimSpace(rows[1][i]), 64); err != nil {
			return nil, fmt.Errorf("ucx_perftest: %w", err)
		}
	}
	if row[ucxRate] <= 0 {
		return nil, errors.New("ucx_perftest: its report has no figures")
	}
	return row, nil
}

// contender returns the test as a contender.
func (u *ucxTest) contender(name, unit, column string, factor float64) contender {
	c := contender{rows: []row{{name: name, unit: unit}}}
	if u == nil {
		c.notRun = ucxMissing
		return c
	}
	c.run = func(d time.Duration) ([]float64, error) {
		v, err := u.run(column, d)
		return []float64{v * factor}, err
	}
	return c
}
