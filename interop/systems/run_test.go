package systems

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a job may take: much longer than it needs, since the machine may be busy.
const patience = 5 * time.Minute

// program skips a test if a program is missing.
func program(t testing.TB, name, pkg string) {
	t.Helper()
	_, err := exec.LookPath(name)
	clibtest.Need(t, err == nil, "%s is missing: apt-get install %s", name, pkg)
}

// long skips a test that belongs to the long form.
func long(t testing.TB) {
	t.Helper()
	if !clibtest.Full {
		t.Skip("full: VERBENA_FULL=1 runs it")
	}
}

// seed returns the seed of a program's data, which VERBENA_SEED repeats.
func seed(t testing.TB) string {
	t.Helper()
	s := os.Getenv("VERBENA_SEED")
	if s == "" {
		s = strconv.FormatUint(rand.Uint64(), 10)
	}
	t.Logf("VERBENA_SEED=%s", s)
	return s
}

// built compiles a program of testdata by a system's compiler.
func built(t testing.TB, compiler, source string, flags ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), source)
	args := append([]string{"-std=gnu11", "-Wall", "-Werror", "-O1", "-o", out, filepath.Join("testdata", source+".c")}, flags...)
	if msg, err := exec.Command(compiler, append(args, "-lpthread", "-ldl")...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", compiler, err, msg)
	}
	return out
}

// job is a command that "verbena exec" starts.
type job struct {
	wrap []string // a command that runs it, as ip netns exec
	env  []string // variables besides those of the test
	args []string
}

// process is a running job.
type process struct {
	job      job
	cmd      *exec.Cmd
	dir      string
	out, err output
	done     chan struct{}
	failed   error
}

// output is what a job has printed.
type output struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// start starts a job. Each of its processes leaves its counters, and what UCX logs, in a directory of the job's own. The
// job has a process group, which ends with the test at the latest.
func start(t testing.TB, j job) *process {
	t.Helper()
	p := &process{job: j, dir: t.TempDir(), done: make(chan struct{})}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	args := append(append([]string{}, j.wrap...), clibtest.Built(t)+"/verbena", "exec", "--")
	args = append(args, j.args...)
	p.cmd = exec.CommandContext(ctx, args[0], args[1:]...)
	p.cmd.Env = append(append(os.Environ(), "VERBENA_STATS="+p.dir+"/stats.%p", "UCX_LOG_LEVEL=info", "UCX_LOG_FILE="+p.dir+"/ucx.%p"), j.env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.err
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Cancel = func() error { return syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) }
	p.cmd.WaitDelay = 5 * time.Second
	if err := p.cmd.Start(); err != nil {
		cancel()
		t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	go func() {
		p.failed = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		cancel()
		<-p.done
	})
	return p
}

// kill ends a job that would go on.
func (p *process) kill() {
	_ = p.cmd.Cancel() // it may have ended by itself
	<-p.done
}

// wait waits for a job that must succeed and have nothing to complain about.
func (p *process) wait(t testing.TB) {
	t.Helper()
	<-p.done
	if p.failed != nil || p.err.String() != "" {
		t.Fatalf("%s: %v\n%s\nstandard error:\n%s", strings.Join(p.job.args, " "), p.failed, p.out.String(), p.err.String())
	}
}

// run runs a job to its end. It must succeed, have nothing to complain about, and say "ok".
func run(t testing.TB, j job) *process {
	t.Helper()
	p := start(t, j)
	p.wait(t)
	if !strings.HasSuffix(p.out.String(), "ok\n") {
		t.Fatalf("%s says\n%s", strings.Join(j.args, " "), p.out.String())
	}
	return p
}

// counters returns the counters of each process of a job that has opened a device.
func (p *process) counters(t testing.TB) []map[string]uint64 {
	t.Helper()
	files, err := filepath.Glob(p.dir + "/stats.*")
	if err != nil {
		t.Fatal(err)
	}
	all := make([]map[string]uint64, 0, len(files))
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		one := map[string]uint64{}
		for line := range strings.Lines(string(b)) {
			var counter string
			var value uint64
			if n, _ := fmt.Sscan(line, &counter, &value); n == 2 { // the first line is a heading
				one[counter] += value
			}
		}
		all = append(all, one)
	}
	return all
}

// total returns the sum of a counter.
func total(all []map[string]uint64, name string) (sum uint64) {
	for _, one := range all {
		sum += one[name]
	}
	return sum
}

var (
	ways = regexp.MustCompile(`ep_cfg\[\d+\]: (.*)`)
	way  = regexp.MustCompile(`\w+\(([^)]*)\)`)
)

// onOurDevice checks that so many processes have sent at least so many bytes each by our devices, and that UCX has
// chosen no other transport in any of them.
func (p *process) onOurDevice(t testing.TB, processes int, bytes uint64) []map[string]uint64 {
	t.Helper()
	all := p.counters(t)
	if len(all) != processes {
		t.Errorf("%d processes have left counters, of %d", len(all), processes)
	}
	for _, c := range all {
		if c["tx_bytes"] < bytes {
			t.Errorf("a process has sent %d bytes by its device, and must have sent %d", c["tx_bytes"], bytes)
		}
	}
	files, err := filepath.Glob(p.dir + "/ucx.*")
	if err != nil || len(files) != processes {
		t.Errorf("%d processes have logs of UCX: %v", len(files), err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		chosen := ways.FindAllStringSubmatch(string(b), -1)
		if len(chosen) == 0 {
			t.Errorf("UCX does not say what it has chosen:\n%s", b)
		}
		for _, c := range chosen {
			for _, w := range way.FindAllStringSubmatch(c[1], -1) {
				for transport := range strings.FieldsSeq(w[1]) {
					if !strings.HasPrefix(transport, "rc_verbs/verbena") && !strings.HasPrefix(transport, "ud_verbs/verbena") {
						t.Errorf("UCX has chosen %s", c[1])
					}
				}
			}
		}
	}
	return all
}

// listens waits until a job listens on an address and TCP port, as /proc/net/tcp writes them, or has ended.
func (p *process) listens(t testing.TB, where string) {
	t.Helper()
	for {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", p.cmd.Process.Pid))
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EINVAL) {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 3 && f[3] == "0A" && f[1] == where {
				return
			}
		}
		select {
		case <-p.done:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}
