package main

// Short runs of UCX's own benchmark while other processes want the processors, too: over RC of the drop-in libibverbs
// and, in turns, over TCP. Nothing is lost on the path, so what a run is slower than the others is ours.

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/figure"
)

// busyArg makes a process one that does nothing but use the processors. It ends when its input ends, or after
// busyLimit.
const (
	busyArg   = "netbench-busy"
	busyLimit = time.Hour
)

func busyMain(loops int) int {
	runtime.GOMAXPROCS(loops + 1) // each loop has a thread of its own, however few processors there are
	for range loops {
		go func() {
			for x := uint64(1); ; x = x*2862933555777941757 + 3037000493 { // some arithmetic
				if x == 0 {
					return // it never is: the number is odd
				}
			}
		}()
	}
	time.AfterFunc(busyLimit, func() { os.Exit(1) })
	_, _ = io.Copy(io.Discard, os.Stdin) // however it ends
	return 0
}

// startLoad starts such a process.
func startLoad(loops int) (*child.Process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return child.Start(nil, exe, busyArg, strconv.Itoa(loops))
}

const (
	steadyGoal = 0.25 // of the median
	steadyTime = 1500 * time.Millisecond
	runLimit   = time.Minute // of a run that takes some seconds at most
)

// steadyRun is one run.
type steadyRun struct {
	mbs      float64 // MB/s, of 2^20 bytes; 0 if it has not ended in time
	took     time.Duration
	counters map[string]float64 // of both devices together, and udp_rcvbuf_errors
	queued   [2]float64         // of the client's and the server's first thread: seconds in which it waited for a processor, for each second that it ran
	err      error
}

// watchQueued watches a process that has one thread which always wants a processor, its first, until the process ends.
// The channel then has how long the thread has waited for a processor, for each second that it has run.
func watchQueued(c *child.Process) <-chan float64 {
	result := make(chan float64, 1)
	go func() {
		waited := 0.0
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			// The kernel counts nanoseconds that the thread has run, and that it has waited.
			var ran, stood float64
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", c.PID())); err == nil {
				if _, err := fmt.Sscan(string(b), &ran, &stood); err == nil && ran > 0 {
					waited = stood / ran
				}
			}
			select {
			case <-c.Ended():
				tick.Stop()
				result <- waited
				return
			case <-tick.C:
			}
		}
	}()
	return result
}

// bandwidth is one transport.
type bandwidth struct {
	name, tls string
	exec      bool // under verbena exec
	iters     int
	runs      []steadyRun
}

func steady(s *settings) (_ *table, err error) {
	verbena, err := filepath.Abs(filepath.Join(s.bin, "verbena"))
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(s.bin, "lib", "libibverbs.so.1")); err != nil {
		return nil, fmt.Errorf("the drop-in libibverbs is not built: make build clib: %w", err)
	}
	ucx, err := exec.LookPath("ucx_perftest")
	if err != nil {
		return nil, errors.New("ucx_perftest is missing: apt-get install ucx-utils")
	}
	dir, err := os.MkdirTemp("", "netbench")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p, err := newPath(s.frame, segmented)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()

	both := []*bandwidth{{name: "UCX over RC", tls: "rc", exec: true}, {name: "UCX over TCP", tls: "tcp"}}
	wrap := func(b *bandwidth) []string {
		if b.exec {
			return []string{verbena, "exec", "--", ucx}
		}
		return []string{ucx}
	}
	for _, b := range both { // without load, to find out how much a run is to do
		b.iters = 1000
		r := b.run(s, p, dir, wrap(b))
		if r.err != nil {
			return nil, fmt.Errorf("%s: %w", b.name, r.err)
		}
		b.iters = max(1000, int(r.mbs*mib/float64(s.size)*steadyTime.Seconds()))
	}
	if s.busy > 0 {
		load, err := startLoad(s.busy)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, load.Stop()) }()
	}
	for i := range s.runs {
		for _, b := range both {
			r := b.run(s, p, dir, wrap(b))
			b.runs = append(b.runs, r)
			fmt.Fprintf(os.Stderr, "run %d, %s: %.0f MB/s in %.1f s, %.0f sent again, %.0f timeouts, %.0f dropped by sockets; waited for a processor %.1f and %.1f times as long as they ran", i+1, b.name, r.mbs, r.took.Seconds(),
				r.counters["retransmitted_packets"], r.counters["local_ack_timeouts"], r.counters["udp_rcvbuf_errors"], r.queued[0], r.queued[1])
			if r.err != nil {
				fmt.Fprintf(os.Stderr, ": %v", r.err)
			}
			fmt.Fprintln(os.Stderr)
		}
	}
	return steadyTable(both), nil
}

func steadyTable(both []*bandwidth) *table {
	t := &table{columns: []string{"", "runs", "least MB/s", "median", "most", "least of median", "goal", "", "least of TCP's least", "goal", "", "sent again", "timeouts", "probes", "dropped by sockets", "RNR NAKs", "waits for a processor, median run", "slowest run"}}
	rates := func(b *bandwidth) (fs []figures) {
		for i := range b.runs {
			fs = append(fs, figures{mibs: b.runs[i].mbs})
		}
		return fs
	}
	tcpLeast := least(rates(both[1]))
	for _, b := range both {
		fs := rates(b)
		low, mid := least(fs), medianOf(fs, rateOf)
		row := []string{b.name, strconv.Itoa(len(fs)), figure.Number(low), figure.Number(mid), figure.Number(most(fs)), figure.Number(low / mid)}
		sum := func(name string) string {
			n := 0.0
			for i := range b.runs {
				n += b.runs[i].counters[name]
			}
			return figure.Number(n)
		}
		if b.exec {
			row = append(row, fmt.Sprintf("≥ %g", steadyGoal), verdictOf(low >= steadyGoal*mid), figure.Number(low/tcpLeast), "≥ 1", verdictOf(low >= tcpLeast),
				sum("retransmitted_packets"), sum("local_ack_timeouts"), sum("ack_probes"), sum("udp_rcvbuf_errors"), sum("rnr_naks_sent"))
		} else {
			row = append(row, "", "", "", "", "", "", "", "", "", "")
		}
		var all []float64
		slowest := &b.runs[0]
		for i := range b.runs {
			r := &b.runs[i]
			all = append(all, max(r.queued[0], r.queued[1]))
			if r.mbs < slowest.mbs {
				slowest = r
			}
		}
		t.rows = append(t.rows, append(row, figure.Number(median(all)), figure.Number(max(slowest.queued[0], slowest.queued[1]))))
		for i := range b.runs {
			r := &b.runs[i]
			if r.mbs >= steadyGoal*mid && r.err == nil {
				continue
			}
			note := fmt.Sprintf("%s, run %d: %s MB/s in %.1f s, %.0f packets sent again, %.0f timeouts, %.0f probes, %.0f dropped by sockets; client and server waited for a processor %.1f and %.1f times as long as they ran.", b.name, i+1, figure.Number(r.mbs), r.took.Seconds(),
				r.counters["retransmitted_packets"], r.counters["local_ack_timeouts"], r.counters["ack_probes"], r.counters["udp_rcvbuf_errors"],
				r.queued[0], r.queued[1])
			if r.err != nil {
				note += " " + r.err.Error()
			}
			t.notes = append(t.notes, note)
		}
	}
	t.notes = append(t.notes, "Waits for a processor: how long the client or the server, whichever waited longer, was ready to run and did not, for each second that it ran.")
	return t
}

// run runs the benchmark once.
func (b *bandwidth) run(s *settings, p *path, dir string, wrap []string) (r steadyRun) {
	r.counters = map[string]float64{}
	before, err := p.network()
	if err != nil {
		r.err = err
		return r
	}
	stats := filepath.Join(dir, "stats")
	_ = os.Remove(stats) // it may not exist
	start := time.Now()
	r.mbs, r.queued, r.err = b.between(s, p, wrap, []string{"UCX_TLS=" + b.tls, "VERBENA_STATS=" + stats})
	r.took = time.Since(start)
	after, err := p.network()
	r.err = errors.Join(r.err, err, addCounters(stats, r.counters))
	r.counters["udp_rcvbuf_errors"] = float64(after["Udp.RcvbufErrors"] - before["Udp.RcvbufErrors"])
	return r
}

// between runs server and client, and returns the client's rate, and queued of both.
func (b *bandwidth) between(s *settings, p *path, wrap, env []string) (mbs float64, queued [2]float64, err error) {
	const port = "13337"
	serve := p.in(p.ns[1], append(wrap, "-p", port)...)
	server, err := child.Start(env, serve[0], serve[1:]...)
	if err != nil {
		return 0, queued, err
	}
	serverQueued := watchQueued(server)
	watchdog := time.AfterFunc(runLimit, server.Kill)
	defer func() {
		if watchdog.Stop() {
			select { // the server ends with its client
			case <-server.Ended():
			case <-time.After(10 * time.Second):
			}
			server.Kill()
		}
		queued[1] = <-serverQueued
	}()
	if err := p.waitListening(1, port); err != nil {
		return 0, queued, err
	}
	args := p.in(p.ns[0], append(wrap, p.addr[1], "-p", port, "-t", "tag_bw", "-s", strconv.Itoa(s.size), "-n", strconv.Itoa(b.iters), "-w", "100", "-f", "-v")...)
	client, err := child.Start(env, args[0], args[1:]...)
	if err != nil {
		return 0, queued, err
	}
	clientQueued := watchQueued(client)
	limit := client.KillAfter(runLimit)
	defer limit.Stop()
	rows, err := csv.NewReader(bufio.NewReader(client.Out)).ReadAll()
	failure := client.Stop()
	queued[0] = <-clientQueued
	if err != nil || failure != nil {
		return 0, queued, errors.Join(err, failure)
	}
	if len(rows) == 2 {
		for i, name := range rows[0] {
			if name == "overall_bw" {
				mbs, err = strconv.ParseFloat(strings.TrimSpace(rows[1][i]), 64)
				return mbs, queued, err
			}
		}
	}
	return 0, queued, fmt.Errorf("ucx_perftest reports %q", rows)
}

// waitListening waits until a process of a namespace listens at a TCP port.
func (p *path) waitListening(end int, port string) error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		out, err := command(p.in(p.ns[end], "ss", "-Htln", "sport = :"+port)...)
		if err != nil || strings.TrimSpace(out) != "" {
			return err
		}
		if time.Now().After(deadline) {
			return errors.New("ucx_perftest does not listen")
		}
	}
}

// addCounters adds those of a file that VERBENA_STATS has named, of all processes in it. There may be none.
func addCounters(file string, to map[string]float64) error {
	b, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for l := range strings.Lines(string(b)) {
		if w := strings.Fields(l); len(w) == 2 && w[0] != "#" {
			n, err := strconv.ParseFloat(w[1], 64)
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			to[w[0]] += n
		}
	}
	return err
}
