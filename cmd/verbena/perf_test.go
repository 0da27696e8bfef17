package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// perfJSON runs perf --json and returns its object as untyped JSON.
func perfJSON(t *testing.T, args ...string) map[string]any {
	t.Helper()
	o := succeed(t, append([]string{"perf", "--json"}, args...)...)
	return parseResult(t, o.stdout)
}

// parseResult checks that the output is exactly one object of the documented
// form.
func parseResult(t *testing.T, out string) map[string]any {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(out))
	var r map[string]any
	if err := dec.Decode(&r); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	if dec.More() {
		t.Fatalf("more than one object in %q", out)
	}
	for _, field := range []string{"op", "mode", "link", "mem", "poll", "lat_kind", "initiator", "target"} {
		if s, ok := r[field].(string); !ok || s == "" {
			t.Errorf("%s is %#v, want a string", field, r[field])
		}
	}
	for _, field := range []string{"size", "threads", "qps", "depth", "batch", "mtu", "iters", "seconds", "gbytes_per_s", "msgs_per_s", "cpu_seconds_per_gb"} {
		if f, ok := r[field].(float64); !ok || f <= 0 {
			t.Errorf("%s is %#v, want a positive number", field, r[field])
		}
	}
	for _, field := range []string{"inline", "checked"} {
		if _, ok := r[field].(bool); !ok {
			t.Errorf("%s is %#v, want a boolean", field, r[field])
		}
	}
	for object, fields := range map[string][]string{
		"lat_us":      {"min", "p50", "p99", "p999", "max", "mean"},
		"cpu_seconds": {"initiator", "target"},
	} {
		o, ok := r[object].(map[string]any)
		if !ok || len(o) != len(fields) {
			t.Fatalf("%s is %#v, want an object of %v", object, r[object], fields)
		}
		last := 0.0
		for _, field := range fields {
			f, ok := o[field].(float64)
			if !ok || f < 0 {
				t.Errorf("%s.%s is %#v, want a number", object, field, o[field])
			}
			if object == "lat_us" && field != "mean" {
				if f < last {
					t.Errorf("lat_us.%s is %v, less than what stands before it: %v", field, f, o)
				}
				last = f
			}
		}
	}
	if len(r) != 24 {
		t.Errorf("%d fields, want 24: %v", len(r), r)
	}
	checkPerThread(t, r)
	// The rates follow from the rest.
	messages := r["iters"].(float64)
	if r["lat_kind"] == "half-round-trip" {
		messages *= 2
	}
	if want := messages / r["seconds"].(float64); math.Abs(r["msgs_per_s"].(float64)-want) > want/1e6 {
		t.Errorf("msgs_per_s is %v, want %v", r["msgs_per_s"], want)
	}
	if want := r["msgs_per_s"].(float64) * r["size"].(float64) / 1e9; math.Abs(r["gbytes_per_s"].(float64)-want) > want/1e6 {
		t.Errorf("gbytes_per_s is %v, want %v", r["gbytes_per_s"], want)
	}
	cpu := r["cpu_seconds"].(map[string]any)
	gb := r["gbytes_per_s"].(float64) * r["seconds"].(float64)
	if want := (cpu["initiator"].(float64) + cpu["target"].(float64)) / gb; math.Abs(r["cpu_seconds_per_gb"].(float64)-want) > want/1e6 {
		t.Errorf("cpu_seconds_per_gb is %v, want %v", r["cpu_seconds_per_gb"], want)
	}
	return r
}

// checkPerThread checks that there are figures of each thread, and that they add up.
func checkPerThread(t *testing.T, r map[string]any) {
	t.Helper()
	threads, ok := r["per_thread"].([]any)
	if !ok || float64(len(threads)) != r["threads"] {
		t.Fatalf("per_thread is %#v, want figures of %v threads", r["per_thread"], r["threads"])
	}
	sums := map[string]float64{}
	for i, one := range threads {
		o, ok := one.(map[string]any)
		if !ok || len(o) != 5 {
			t.Fatalf("per_thread[%d] is %#v, want an object of 5 fields", i, one)
		}
		for _, field := range []string{"qps", "iters", "seconds", "gbytes_per_s", "msgs_per_s"} {
			f, ok := o[field].(float64)
			if !ok || f <= 0 {
				t.Errorf("per_thread[%d].%s is %#v, want a positive number", i, field, o[field])
			}
			sums[field] += f
		}
		if o["seconds"].(float64) > r["seconds"].(float64) {
			t.Errorf("thread %d took %v of %v s", i, o["seconds"], r["seconds"])
		}
	}
	if sums["qps"] != r["qps"] || sums["iters"] != r["iters"] {
		t.Errorf("the threads have %v queue pairs and sent %v messages of %v and %v", sums["qps"], sums["iters"], r["qps"], r["iters"])
	}
}

// perfCases are measurements that work over every link.
var perfCases = []struct {
	args string
	want map[string]any
}{
	{"", map[string]any{"op": "write", "size": 65536.0, "mode": "bandwidth", "depth": 64.0, "threads": 1.0, "qps": 1.0, "poll": "cq", "mem": "pinned"}},
	{"--size 8", map[string]any{"batch": 16.0}},
	{"--size 1M --depth 4", map[string]any{"size": 1048576.0, "batch": 1.0}},
	{"--size 4097 --qps 3 --depth 7", map[string]any{"qps": 3.0, "depth": 7.0}},
	{"--op write-imm --size 10001 --mtu 1024", map[string]any{"op": "write-imm", "mtu": 1024.0}},
	{"--op read --size 64K", map[string]any{"op": "read"}},
	{"--op read --size 1", map[string]any{"size": 1.0}},
	{"--op send --size 4K", map[string]any{"op": "send"}},
	{"--op send --size 100 --inline", map[string]any{"inline": true}},
	{"--op send --size 1M --depth 8 --mtu 256", map[string]any{"mtu": 256.0}},
	{"--op atomic", map[string]any{"op": "atomic", "size": 8.0}},
	{"--op atomic --qps 4", map[string]any{"qps": 4.0}},
	{"--op write --busy --size 32K", nil},
	{"--threads 3", map[string]any{"threads": 3.0, "qps": 3.0}},
	{"--threads 2 --qps 5 --size 8", map[string]any{"threads": 2.0, "qps": 5.0, "batch": 16.0}},
	{"--threads 2 --qps 3 --op send --size 4K", map[string]any{"op": "send", "threads": 2.0}},
	{"--threads 2 --op read --size 4K", map[string]any{"op": "read", "qps": 2.0}},
	{"--threads 4 --qps 6 --op atomic", map[string]any{"threads": 4.0}},
	{"--threads 2 --op write-imm --size 100 --inline", map[string]any{"inline": true}},
	{"--threads 2 --busy", map[string]any{"threads": 2.0}},
	{"--lat", map[string]any{"op": "write", "size": 8.0, "mode": "latency", "poll": "memory", "lat_kind": "half-round-trip", "depth": 1.0}},
	{"--lat --size 5000", nil},
	{"--lat --inline --size 3", nil},
	{"--lat --poll cq", map[string]any{"poll": "cq", "lat_kind": "completion"}},
	{"--lat --op send", map[string]any{"lat_kind": "half-round-trip"}},
	{"--lat --op write-imm --size 4K", map[string]any{"lat_kind": "half-round-trip"}},
	{"--lat --op read --size 8K", map[string]any{"lat_kind": "completion"}},
	{"--lat --op atomic", map[string]any{"lat_kind": "completion"}},
	{"--mem mw --size 100K --qps 2", map[string]any{"mem": "mw"}},
	{"--mem mw --op read", map[string]any{"mem": "mw"}},
	{"--mem mw --op atomic", map[string]any{"mem": "mw"}},
	{"--mem mw --lat", map[string]any{"mem": "mw", "poll": "memory"}},
	{"--mem shared --size 100K", map[string]any{"mem": "shared"}},
	{"--mem shared --op send --lat", map[string]any{"mem": "shared"}},
}

func testPerfCases(t *testing.T, link, initiator, target string) {
	for i, tt := range perfCases {
		if testing.Short() && i%4 != 0 && !strings.Contains(tt.args, "--threads 2 --qps") {
			continue
		}
		t.Run(tt.args, func(t *testing.T) {
			iters := 1001 + i // not a multiple of any batch
			if strings.Contains(tt.args, "1M") {
				iters = 101
			}
			if strings.Contains(tt.args, "--lat") {
				iters = 101
			}
			args := append(strings.Fields(tt.args), "--check", "--link", link, "--iters", strconv.Itoa(iters))
			r := perfJSON(t, args...)
			want := map[string]any{"link": link, "iters": float64(iters), "checked": true}
			for k, v := range tt.want {
				want[k] = v
			}
			for k, v := range want {
				if r[k] != v {
					t.Errorf("%s is %v, want %v", k, r[k], v)
				}
			}
			for field, network := range map[string]string{"initiator": initiator, "target": target} {
				if !strings.HasPrefix(r[field].(string), network) {
					t.Errorf("%s is %v, want one in %s", field, r[field], network)
				}
			}
			// Processes that share memory share an address, too.
			if (r["initiator"] == r["target"]) != (link == "local") {
				t.Errorf("the sides are at %v and %v", r["initiator"], r["target"])
			}
		})
	}
}

func TestPerfLoop(t *testing.T) { testPerfCases(t, "loop", "127.77.0.", "127.77.0.") }

// Over udp the other side is a process of its own, with CPU time of its own.
func TestPerfUDP(t *testing.T) {
	testPerfCases(t, "udp", "127.77.0.", "127.77.0.")
	r := perfJSON(t, "--link", "udp", "--duration", "300ms")
	cpu := r["cpu_seconds"].(map[string]any)
	if cpu["initiator"].(float64) <= 0 || cpu["target"].(float64) <= 0 {
		t.Errorf("cpu_seconds is %v", cpu)
	}
}

// By shared memory the other side is a process of its own, too.
func TestPerfLocal(t *testing.T) {
	testPerfCases(t, "local", "127.77.0.", "127.77.0.")
	r := perfJSON(t, "--link", "local", "--duration", "300ms", "--threads", "2", "--op", "send")
	cpu := r["cpu_seconds"].(map[string]any)
	if cpu["initiator"].(float64) <= 0 || cpu["target"].(float64) <= 0 {
		t.Errorf("cpu_seconds is %v", cpu)
	}
}

// Without --iters the duration counts.
func TestPerfDuration(t *testing.T) {
	for _, args := range [][]string{{}, {"--lat", "--op", "send"}, {"--threads", "3"}} {
		r := perfJSON(t, append(args, "--duration", "300ms")...)
		if s := r["seconds"].(float64); s < 0.3 || s > 3 {
			t.Errorf("%v measured for %v s, want 0.3", args, s)
		}
	}
}

func TestPerfText(t *testing.T) {
	out := succeed(t, "perf", "--iters", "1000", "--check", "--size", "4K").stdout
	for _, want := range []string{
		`^write bandwidth over loop, 127\.77\.0\.\d+ → 127\.77\.0\.\d+\n`,
		`(?m)^  4 KiB, pinned memory, 64 outstanding, 1 QP, MTU 4096$`,
		`(?m)^  done        1,000 messages in \d+\.\d\d s, data compared$`,
		`(?m)^  bandwidth   [0-9.]+ GB/s$`,
		`(?m)^  rate        [0-9,]+ messages/s$`,
		`(?m)^  latency     µs: min \S+, median \S+, 99% \S+, 99.9% \S+, max \S+ \(post to completion, under load\)$`,
		`(?m)^  CPU time    \d+\.\d\d s, both sides: [0-9.]+ s/GB$`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("nothing like %s in\n%s", want, out)
		}
	}
	if strings.Contains(out, "threads") {
		t.Errorf("one thread is compared with others in\n%s", out)
	}
	out = succeed(t, "perf", "--iters", "1000", "--size", "4K", "--link", "udp", "--threads", "2", "--qps", "3").stdout
	for _, want := range []string{
		`(?m)^  4 KiB, pinned memory, 64 outstanding, 3 QP, 2 threads, MTU 4096$`,
		`(?m)^  threads     [0-9.]+ to [0-9.]+ GB/s, [0-9,]+ to [0-9,]+ messages/s each$`,
		`(?m)^  CPU time    initiator \d+\.\d\d s, target \d+\.\d\d s: [0-9.]+ s/GB$`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("nothing like %s in\n%s", want, out)
		}
	}
}

// Two processes that were started by hand find each other; both print the same
// result.
func TestPerfListenConnect(t *testing.T) {
	for _, link := range []string{"udp", "local"} {
		t.Run(link, func(t *testing.T) { testListenConnect(t, link) })
	}
}

func testListenConnect(t *testing.T, link string) {
	listener := exec.CommandContext(t.Context(), program, "perf", "--listen=127.0.0.1:0", "--link", link, "--json")
	var stdout bytes.Buffer
	listener.Stdout = &stdout
	stderr, err := listener.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stderr).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	_, addr, ok := strings.Cut(strings.TrimSpace(line), "listening on ")
	if !ok {
		t.Fatalf("the listener says %q", line)
	}
	r := perfJSON(t, "--connect", addr, "--link", link, "--op", "send", "--size", "10K", "--iters", "2000", "--check", "--qps", "3", "--threads", "2")
	if r["link"] != link || r["checked"] != true || r["initiator"] == r["target"] {
		t.Errorf("the result is %v", r)
	}
	if err := listener.Wait(); err != nil {
		t.Fatalf("the listener: %v", err)
	}
	if there := parseResult(t, stdout.String()); fmt.Sprint(there) != fmt.Sprint(r) {
		t.Errorf("the sides differ:\n%v\n%v", r, there)
	}
}

// A stranger on the port is refused, and the listener says so.
func TestPerfListenStranger(t *testing.T) {
	listener := exec.CommandContext(t.Context(), program, "perf", "--listen=127.0.0.1:0")
	stderr, err := listener.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(stderr)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	_, addr, _ := strings.Cut(strings.TrimSpace(line), "listening on ")
	conn := dial(t, addr)
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\n\r\n")
	rest := new(bytes.Buffer)
	if _, err := rest.ReadFrom(lines); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if err := listener.Wait(); err == nil || listener.ProcessState.ExitCode() != exitFailed {
		t.Errorf("the listener ended with %v", err)
	}
	if !strings.Contains(rest.String(), "not a message of verbena perf") {
		t.Errorf("the listener says %q", rest)
	}
}

// startMeasurement starts a long measurement with a peer process and returns
// both processes, once the peer is there.
func startMeasurement(t *testing.T, stderr *bytes.Buffer, args ...string) (parent *exec.Cmd, child int) {
	t.Helper()
	parent = exec.CommandContext(t.Context(), program, append([]string{"perf", "--link", "udp", "--duration", "60s"}, args...)...)
	if stderr != nil {
		parent.Stderr = stderr
	}
	parent.WaitDelay = 5 * time.Second
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if child = childOf(parent.Process.Pid); child != 0 {
			time.Sleep(300 * time.Millisecond) // let them measure
			return parent, child
		}
	}
	t.Fatal("no peer process was started")
	return nil, 0
}

// childOf returns a process whose parent is pid, 0 if there is none.
func childOf(pid int) int {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended meanwhile
		}
		// pid (name) state ppid …; the name may hold anything.
		_, rest, ok := strings.Cut(string(b), ") ")
		fields := strings.Fields(rest)
		if !ok || len(fields) < 2 || fields[1] != strconv.Itoa(pid) || fields[0] == "Z" {
			continue
		}
		if child, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			return child
		}
	}
	return 0
}

// ended waits until a process is no more.
func ended(pid int) bool {
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return true
		}
		if _, rest, _ := strings.Cut(string(b), ") "); strings.HasPrefix(rest, "Z") {
			return true // only its new parent has not noticed yet
		}
	}
	return false
}

func TestPeerEndsWhenParentIsKilled(t *testing.T) {
	for _, args := range [][]string{{}, {"--lat"}, {"--op", "send"}} {
		parent, child := startMeasurement(t, nil, args...)
		if err := parent.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = parent.Wait() // it was killed
		if !ended(child) {
			t.Errorf("perf %v: the peer %d outlives its killed parent", args, child)
			_ = syscall.Kill(child, syscall.SIGKILL)
		}
	}
}

func TestInterrupt(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		var stderr bytes.Buffer
		parent, child := startMeasurement(t, &stderr)
		if err := parent.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		_ = parent.Wait() // the exit status counts
		if code := parent.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(stderr.String(), "interrupted") {
			t.Errorf("%v: exit status %d, message %q", sig, code, stderr.String())
		}
		if !ended(child) {
			t.Errorf("%v: the peer %d goes on", sig, child)
		}
	}
}

// The demo can be interrupted, too.
func TestInterruptDemo(t *testing.T) {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, "demo")
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // it is at work by now
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	_ = cmd.Wait() // the exit status counts
	if code := cmd.ProcessState.ExitCode(); code != exitFailed || stderr.String() != "verbena demo: interrupted\n" {
		t.Errorf("exit status %d, message %q", code, stderr.String())
	}
}

// When the peer dies, the measurement ends at once and says so.
func TestPeerDies(t *testing.T) {
	var stderr bytes.Buffer
	parent, child := startMeasurement(t, &stderr, "--op", "send")
	if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_ = parent.Wait() // the exit status counts
	if code := parent.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(stderr.String(), "peer") {
		t.Errorf("exit status %d, message %q", code, stderr.String())
	}
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("it took %v to notice", took)
	}
}
