package interop

// What a test does with its two processes:
//
//  1. perform starts them, in namespaces if wanted;
//  2. listen passes messages to a process's peer on, and gives those to the test to
//     a function of the test;
//  3. when both have ended, or were killed on purpose, perform returns their results.

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	roleVar   = "VERBENA_INTEROP_ROLE"   // "initiator", "target" or another one that play knows
	scriptVar = "VERBENA_INTEROP_SCRIPT" // a script, as JSON
)

// script is what a test tells its processes.
type script struct {
	Scenario string   // see scenes
	Mine     string   // address
	Seconds  int      // "stream": how long
	Lossy    bool     // UC and UD messages may get lost
	Any      bool     // LinkAny, not LinkUDP
	Packets  string   // the role that has LinkUDP all the same
	Group    string   // "choir", "requiem": the multicast group
	Note     bool     // "choir": tell the test when it begins
	Addrs    []string // of the device, instead of Mine
	SGID     int      // which of its addresses to use
	MixedMTU bool     // the ports' MTUs differ
	Classes  bool     // packets have traffic classes and hop limits of their own
	File     string   // the file of an XRC domain
	Link     string   // of a process with an XRC domain
	Shared   bool     // "victim": its memory is shared, so that the peer writes into it by grants
}

// envelope is a message of a process, one line of JSON.
type envelope struct {
	To     string          `json:"to"` // "peer" or "test"
	Body   json.RawMessage `json:"body,omitempty"`
	Result *result         `json:"result,omitempty"`
}

// result is what a process reports at its end.
type result struct {
	Errors   []string          `json:"errors"`
	MTU      int               `json:"mtu"`
	Bytes    uint64            `json:"bytes"`
	Offloads []string          `json:"offloads"`
	Counters map[string]uint64 `json:"counters"`
	Heard    []uint32          `json:"heard,omitempty"` // messages, by their immediate data
	Seen     map[string]int    `json:"seen,omitempty"`  // packets, by what describe returns
}

// actor is one process.
type actor struct {
	role   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout io.ReadCloser
	stderr *strings.Builder
	result *result
	killed bool
}

// place is where a process runs.
type place struct {
	netns string // empty: here
	addr  string
}

// start starts a process.
func start(ctx context.Context, t testing.TB, role string, s script, at place) *actor {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s.Mine = at.addr
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	args := []string{exe}
	if at.netns != "" {
		args = []string{"ip", "netns", "exec", at.netns, exe}
	}
	a := &actor{role: role, cmd: exec.CommandContext(ctx, args[0], args[1:]...), stderr: new(strings.Builder)}
	a.cmd.Env = append(os.Environ(), roleVar+"="+role, scriptVar+"="+string(text))
	a.cmd.Stderr = a.stderr
	if a.stdin, err = a.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if a.stdout, err = a.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return a
}

// listen passes a process's messages to its peer on until the process ends, and keeps its
// result. notes gets the other messages to the test.
func (a *actor) listen(peer *actor, notes func(a *actor, body string)) error {
	lines := bufio.NewScanner(a.stdout)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e envelope
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Fprintf(a.stderr, "not a message: %s\n", lines.Bytes())
			continue
		}
		switch {
		case e.Result != nil:
			a.result = e.Result
		case e.To == "peer":
			// If the peer has ended, the write fails, and that does not matter.
			_, _ = fmt.Fprintf(peer.stdin, "%s\n", e.Body)
		case notes != nil:
			notes(a, string(e.Body))
		}
	}
	_ = peer.stdin.Close() // a peer that waits for a message learns that none will come
	return lines.Err()
}

// perform plays a scenario with two processes and returns their results, the initiator's
// first. Errors of either fail the test. notes, if it is not nil, gets the notes to the test,
// each with the peer of its sender, which it may kill.
func perform(t *testing.T, s script, initiator, target place, notes func(a *actor, body string)) [2]*result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	a := start(ctx, t, "initiator", s, initiator)
	b := start(ctx, t, "target", s, target)
	var wg sync.WaitGroup
	wg.Go(func() { _ = a.listen(b, func(_ *actor, body string) { note(notes, b, body) }) })
	wg.Go(func() { _ = b.listen(a, func(_ *actor, body string) { note(notes, a, body) }) })
	wg.Wait()
	for _, x := range []*actor{a, b} {
		err := x.cmd.Wait()
		if x.killed {
			continue
		}
		if err != nil || x.result == nil {
			t.Errorf("%s: %v\n%s", x.role, err, x.stderr)
			continue
		}
		for _, e := range x.result.Errors {
			t.Errorf("%s: %s", x.role, e)
		}
		if x.stderr.Len() > 0 {
			t.Logf("%s says:\n%s", x.role, x.stderr)
		}
	}
	if t.Failed() {
		for _, x := range []*actor{a, b} {
			if x.result != nil {
				t.Logf("%s: %+v", x.role, *x.result)
			}
		}
		t.FailNow()
	}
	return [2]*result{a.result, b.result}
}

// note calls notes, if there is one, with the peer of the sender.
func note(notes func(other *actor, body string), other *actor, body string) {
	if notes != nil {
		notes(other, body)
	}
}

// kill kills a process.
func (a *actor) kill(t testing.TB) {
	a.killed = true
	if err := a.cmd.Process.Kill(); err != nil {
		t.Errorf("killing the %s: %v", a.role, err)
	}
}
