package clibtest

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience is how long a test waits for a program: much longer than it takes, since the machine may be busy.
const Patience = 3 * time.Minute

// Program says how a program is run.
type Program struct {
	Args []string
	Env  []string // variables besides those of the test
	Wrap []string // a command that runs it, as ip netns exec
}

// Process is a running program.
type Process struct {
	Name string

	cmd  *exec.Cmd
	out  output
	done chan struct{}
	err  error // written before done is closed
}

// output is what a program has printed.
type output struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(b)
}

// Start runs a program with "verbena exec". It is killed at the end of the test, if it still runs then.
func Start(t testing.TB, p Program) *Process {
	t.Helper()
	args := append(append([]string{}, p.Wrap...), Built(t)+"/verbena", "exec", "--log", "--")
	return start(t, append(args, p.Args...), p)
}

// StartAlone runs a program without "verbena exec".
func StartAlone(t testing.TB, p Program) *Process {
	t.Helper()
	return start(t, append(append([]string{}, p.Wrap...), p.Args...), p)
}

func start(t testing.TB, args []string, p Program) *Process {
	t.Helper()
	r := &Process{Name: strings.Join(p.Args, " "), cmd: exec.Command(args[0], args[1:]...), done: make(chan struct{})}
	r.cmd.Env = append(os.Environ(), p.Env...)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r.cmd.WaitDelay = 5 * time.Second
	if err := r.cmd.Start(); err != nil {
		t.Fatalf("%s: %v", r.Name, err)
	}
	go func() {
		r.err = r.cmd.Wait()
		close(r.done)
	}()
	t.Cleanup(func() {
		r.Kill()
		if t.Failed() {
			t.Logf("%s: %v\n%s", r.Name, r.err, r.Output())
		}
	})
	return r
}

// Output returns what the program has printed.
func (p *Process) Output() string {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	return p.out.b.String()
}

// Ended reports whether the program has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Signal sends a signal to the program.
func (p *Process) Signal(s os.Signal) {
	_ = p.cmd.Process.Signal(s) // it may have ended
}

// Kill ends the program, and waits for its end.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.done
}

// Wait waits for the program's end, and returns its error. The test fails if that takes too long.
func (p *Process) Wait(t testing.TB) error {
	t.Helper()
	select {
	case <-p.done:
		return p.err
	case <-time.After(Patience):
		t.Fatalf("%s does not end", p.Name)
		return nil
	}
}

// Finish waits for the program's end, which must be a success, and returns what it has printed.
func (p *Process) Finish(t testing.TB) string {
	t.Helper()
	if err := p.Wait(t); err != nil {
		t.Fatalf("%s: %v\n%s", p.Name, err, p.Output())
	}
	return p.Output()
}

// Until waits until is returns true. The test fails if one of the programs ends before that, or if it takes too long.
func Until(t testing.TB, what string, is func() bool, programs ...*Process) {
	t.Helper()
	for end := time.Now().Add(Patience); !is(); time.Sleep(10 * time.Millisecond) {
		for _, p := range programs {
			if p.Ended() && !is() {
				t.Fatalf("waiting until %s: %s has ended: %v\n%s", what, p.Name, p.err, p.Output())
			}
		}
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", Patience, what)
		}
	}
}
