package main

// The drop-in libibverbs: programs that are linked with it, compared with the same work
// done by "verbena perf"; and what its calls cost by themselves.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
)

const perftestMissing = "ib_write_bw is not installed (Debian package perftest)"

// library is the command and the library, built from this tree.
type library struct {
	root    string
	command string
}

func newLibrary() (*library, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	for !exists(filepath.Join(dir, "scripts", "clib.sh")) {
		if dir == filepath.Dir(dir) {
			return nil, errors.New("the library is built from its sources: run this in the repository")
		}
		dir = filepath.Dir(dir)
	}
	l := &library{dir, filepath.Join(dir, "bin", "verbena")}
	for _, args := range [][]string{{"scripts/clib.sh"}, {"go", "build", "-o", l.command, "./cmd/verbena"}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return l, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// output runs the command and returns what it prints, and its CPU time.
func (l *library) output(args ...string) (string, time.Duration, error) {
	c, err := child.Start(nil, l.command, args...)
	if err != nil {
		return "", 0, err
	}
	watchdog := c.KillAfter(replyLimit)
	defer watchdog.Stop()
	out, err := io.ReadAll(c.Out)
	err = errors.Join(err, c.Stop())
	return string(out), c.CPU(), err
}

// perf measures by "verbena perf".
func (l *library) perf(d time.Duration, args ...string) (r perfReport, err error) {
	out, _, err := l.output(append([]string{"perf", "--json", "--duration", d.String()}, args...)...)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return r, fmt.Errorf("verbena perf: %w", err)
	}
	return r, nil
}

// perfReport is the part of the report of "verbena perf" that is used here.
type perfReport struct {
	GBs float64 `json:"gbytes_per_s"`
	CPU float64 `json:"cpu_seconds_per_gb"`
	Lat struct {
		P50 float64 `json:"p50"`
	} `json:"lat_us"`
}

// perftest is one of perftest's programs, run on the library by two processes that
// share an address.
type perftest struct {
	lib   *library
	args  []string // the program and its options
	link  string
	flags []string // of "verbena exec", besides
	says  string   // text that its report must have
	rate  float64  // iterations a second, for the next run
}

// libraryAddr is the address of the devices.
const libraryAddr = "127.77.1.78"

// perftestRun is what a run of perftest found.
type perftestRun struct {
	fifth float64 // column of the report: of a bandwidth test millions of messages a second, of a latency test the typical time
	iters int
	cpu   time.Duration // of both processes
}

// run measures for about d. It tries again if perftest could not time the processor's clock.
func (p *perftest) run(d time.Duration) (got perftestRun, err error) {
	for range 6 {
		if got, err = p.runOnce(d); !errors.Is(err, errNoClock) {
			break
		}
	}
	return got, err
}

func (p *perftest) runOnce(d time.Duration) (perftestRun, error) {
	port, err := freePort()
	if err != nil {
		return perftestRun{}, err
	}
	iters := max(1000, int(p.rate*d.Seconds()))
	args := append([]string{"exec", "--addr", libraryAddr, "--link", p.link}, p.flags...)
	args = append(append(args, "--"), p.args...)
	args = append(args, "-F", "-p", strconv.Itoa(port), "-n", strconv.Itoa(iters))
	server, err := child.Start(nil, p.lib.command, args...)
	if err != nil {
		return perftestRun{}, err
	}
	out, client, err := p.connect(append(args, "127.0.0.1"))
	server.Kill()
	if err != nil {
		return perftestRun{}, err
	}
	v, err := fifth(out)
	return perftestRun{v, iters, client + server.CPU()}, err
}

// connect runs the client until it reaches the server, which may not listen yet.
func (p *perftest) connect(args []string) (out string, cpu time.Duration, err error) {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		out, cpu, err = p.lib.output(args...)
		if err == nil && !strings.Contains(out, p.says) {
			err = fmt.Errorf("perftest does not say %q: %s", p.says, out)
			return out, cpu, err
		}
		if err == nil || time.Now().After(deadline) {
			return out, cpu, err
		}
	}
}

// errNoClock: perftest measures the processor's clock before it reports. If other
// processes use the processor meanwhile, it may give up and report 0.
var errNoClock = errors.New("perftest could not time the processor's clock")

// fifth returns the fifth column of perftest's report, from the line below its heading.
func fifth(report string) (float64, error) {
	_, table, _ := strings.Cut(report, "#bytes")
	_, table, _ = strings.Cut(table, "\n")
	line, _, _ := strings.Cut(table, "\n")
	words := strings.Fields(line)
	if len(words) < 5 {
		return 0, fmt.Errorf("perftest: its report has no figures: %s", report)
	}
	v, err := strconv.ParseFloat(words[4], 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) || v <= 0 {
		return 0, fmt.Errorf("%w: %s", errNoClock, line)
	}
	return v, nil
}

// missing returns why the program cannot run here; empty: it can.
func (p *perftest) missing() string {
	if _, err := exec.LookPath(p.args[0]); err != nil {
		return perftestMissing
	}
	return ""
}

// bandwidth returns a program that measures bandwidth as a contender. The CPU time is that
// of both processes from their start to their end.
func (p *perftest) bandwidth(rw row, size int) contender {
	return contender{rows: []row{rw}, notRun: p.missing(), rates: func(d time.Duration) ([]rate, error) {
		got, err := p.run(d)
		if err != nil {
			return nil, err
		}
		p.rate = got.fifth * 1e6
		gb := float64(size) / 1e9
		return []rate{{p.rate * gb, got.cpu.Seconds() / (float64(got.iters) * gb)}}, nil
	}}
}

// latency returns a program that measures latency as a contender.
func (p *perftest) latency(rw row) contender {
	return contender{rows: []row{rw}, notRun: p.missing(), run: func(d time.Duration) ([]float64, error) {
		got, err := p.run(d)
		if err != nil {
			return nil, err
		}
		p.rate = 1e6 / (2 * got.fifth)
		return []float64{got.fifth}, nil
	}}
}

func (b *bench) libraryBandwidth() ([]contender, error) {
	const size, depth = 64 << 10, 128 // ib_write_bw's own depth
	lib, err := newLibrary()
	if err != nil {
		return nil, err
	}
	var cs []contender
	for _, link := range []string{"local", "udp"} {
		ref := "verbena perf, " + link
		p := &perftest{lib: lib, args: []string{"ib_write_bw", "-s", strconv.Itoa(size)}, link: link, rate: 5e4}
		cs = append(cs,
			contender{rows: []row{{name: ref, unit: "GB/s"}}, rates: func(d time.Duration) ([]rate, error) {
				r, err := lib.perf(d, "--link", link, "--size", strconv.Itoa(size), "--depth", strconv.Itoa(depth))
				return []rate{{r.GBs, r.CPU}}, err
			}},
			p.bandwidth(row{"ib_write_bw, " + link, "GB/s", ref, &goal{"≥", 0.77}}, size))
	}
	return cs, nil
}

func (b *bench) libraryLatency() ([]contender, error) {
	lib, err := newLibrary()
	if err != nil {
		return nil, err
	}
	var cs []contender
	for _, m := range []struct {
		how   string
		perf  []string // options
		flags []string
		most  string // what perftest reports as its limit for inline data
	}{
		{"", nil, nil, "0[B]"}, // perftest sends inline data only on devices that it knows
		{", inline", []string{"--inline"}, []string{"--set", "VERBENA_IDENTITY=mlx5"}, "220[B]"},
	} {
		ref := "verbena perf --poll memory, p50" + m.how
		p := &perftest{lib: lib, args: []string{"ib_write_lat", "-s", "8"}, link: "local", flags: m.flags, says: "Max inline data : " + m.most, rate: 1e5}
		cs = append(cs,
			contender{rows: []row{{name: ref, unit: "µs"}}, run: func(d time.Duration) ([]float64, error) {
				r, err := lib.perf(d, append([]string{"--link", "local", "--lat", "--poll", "memory", "--size", "8"}, m.perf...)...)
				return []float64{r.Lat.P50}, err
			}},
			p.latency(row{"ib_write_lat, typical" + m.how, "µs", ref, &goal{"≤", 1.3}}))
	}
	return cs, nil
}

// libraryCalls runs programs of interop/programs that print one figure.
func (b *bench) libraryCalls() ([]contender, error) {
	lib, err := newLibrary()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "benchsuite")
	if err != nil {
		return nil, err
	}
	b.later(func() error { return os.RemoveAll(dir) })
	var cs []contender
	for _, m := range []struct {
		rw        row
		name, arg string
	}{
		{row{name: "a call into the backend", unit: "ns"}, "speed", "0"},
		{row{name: "WRITE, post and poll", unit: "ns", goal: &goal{"<", 300}}, "speed", "1"},
		{row{name: "WRITE, lists of 16", unit: "ns"}, "speed", "16"},
		{row{name: "the first ibv_get_device_list", unit: "ms", goal: &goal{"<", 50}}, "first", ""},
	} {
		program, err := lib.compile(m.name, dir)
		if err != nil {
			return nil, err
		}
		cs = append(cs, contender{rows: []row{m.rw}, run: func(time.Duration) ([]float64, error) {
			out, _, err := lib.output(append([]string{"exec", "--addr", libraryAddr, "--", program}, strings.Fields(m.arg)...)...)
			if err != nil {
				return nil, err
			}
			v, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
			return []float64{v}, err
		}})
	}
	return cs, nil
}

// compile builds a program that is linked with the library.
func (l *library) compile(name, dir string) (string, error) {
	out := filepath.Join(dir, name)
	cmd := exec.Command("cc", "-std=gnu11", "-O1", "-o", out, filepath.Join("interop", "programs", "testdata", name+".c"),
		"-L", filepath.Join("bin", "lib"), "-libverbs")
	cmd.Dir = l.root
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cc: %w: %s", err, msg)
	}
	return out, nil
}
