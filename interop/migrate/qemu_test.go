package migrate

// QEMU, as a test sees it: a process, its guest's serial port, which is a file, and its monitor (QMP), which is a socket.

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

// qemu is a QEMU process.
type qemu struct {
	*clibtest.Process

	serial string // the file with what the guest has printed
	stats  string // the file that the device's counters are written to
	conn   net.Conn
	lines  *bufio.Scanner
}

// place is where a QEMU process runs.
type place struct {
	addr string
	env  []string
	wrap []string
}

// startQEMU starts QEMU with the guest of a file, and connects to its monitor. args are further arguments.
func startQEMU(t *testing.T, at place, kernel string, args ...string) *qemu {
	t.Helper()
	dir, err := os.MkdirTemp("", "verbena-migrate") // a short name: that of a socket has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	q := &qemu{serial: filepath.Join(dir, "serial"), stats: filepath.Join(dir, "stats")}
	if err := os.WriteFile(q.serial, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	accel := os.Getenv("VERBENA_VM_ACCEL") // as in package vm
	if accel == "" {
		accel = "tcg"
	}
	socket := filepath.Join(dir, "qmp")
	q.Process = clibtest.Start(t, clibtest.Program{
		Args: append([]string{clibtest.Tool(t, "qemu-system-x86_64", "qemu-system-x86"), "-machine", "q35", "-accel", accel, "-m", fmt.Sprint(memoryMB),
			"-nodefaults", "-no-user-config", "-display", "none", "-net", "none", "-kernel", kernel,
			"-serial", "file:" + q.serial, "-qmp", "unix:" + socket + ",server=on,wait=off"}, args...),
		Env:  append([]string{"VERBENA_ADDR=" + at.addr, "VERBENA_STATS=" + q.stats}, at.env...),
		Wrap: at.wrap,
	})
	clibtest.Until(t, "QEMU's monitor answers", func() bool {
		q.conn, err = net.Dial("unix", socket)
		return err == nil
	}, q.Process)
	t.Cleanup(func() { _ = q.conn.Close() })
	q.lines = bufio.NewScanner(q.conn)
	q.do(t, "qmp_capabilities", nil)
	return q
}

// do gives the monitor a command, and returns its answer.
func (q *qemu) do(t *testing.T, command string, args any) json.RawMessage {
	t.Helper()
	c := map[string]any{"execute": command}
	if args != nil {
		c["arguments"] = args
	}
	if err := q.conn.SetDeadline(time.Now().Add(clibtest.Patience)); err != nil {
		t.Fatal(err)
	}
	if err := json.NewEncoder(q.conn).Encode(c); err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	for q.lines.Scan() {
		var answer struct {
			Return json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := json.Unmarshal(q.lines.Bytes(), &answer); err != nil {
			t.Fatalf("%s: %q: %v", command, q.lines.Text(), err)
		}
		switch {
		case answer.Error != nil:
			t.Fatalf("%s: %s", command, answer.Error.Desc)
		case answer.Return != nil: // others are events, and the greeting
			return answer.Return
		}
	}
	t.Fatalf("%s: the monitor has no answer: %v", command, q.lines.Err())
	return nil
}

// status is what query-migrate returns.
type status struct {
	Status    string
	ErrorDesc string `json:"error-desc"`
	TotalTime int    `json:"total-time"` // in ms, as Downtime
	Downtime  int
	RAM       struct {
		Transferred uint64
		Normal      uint64 // pages
		Rounds      int    `json:"dirty-sync-count"`
	}
}

// migration returns how the migration goes.
func (q *qemu) migration(t *testing.T) (s status) {
	t.Helper()
	if err := json.Unmarshal(q.do(t, "query-migrate", nil), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// running reports whether the guest runs.
func (q *qemu) running(t *testing.T) bool {
	t.Helper()
	var s struct{ Running bool }
	if err := json.Unmarshal(q.do(t, "query-status", nil), &s); err != nil {
		t.Fatal(err)
	}
	return s.Running
}

// printed returns what the guest has printed.
func (q *qemu) printed(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(q.serial)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// passes returns how many passes of the guest have begun. The test fails if the guest has found a wrong word.
func (q *qemu) passes(t *testing.T) int {
	t.Helper()
	s := q.printed(t)
	if strings.Contains(s, "B") {
		t.Fatalf("the guest's memory is wrong: %q", s[max(0, len(s)-60):])
	}
	return strings.Count(s, "\n")
}

// awaitPasses waits until the guest has begun so many more passes.
func (q *qemu) awaitPasses(t *testing.T, more int) {
	t.Helper()
	from := q.passes(t)
	clibtest.Until(t, "the guest makes passes", func() bool { return q.passes(t) >= from+more }, q.Process)
}

// quit ends QEMU, which must succeed, and returns the counters of its device.
func (q *qemu) quit(t *testing.T) map[string]uint64 {
	t.Helper()
	q.do(t, "quit", nil)
	q.Finish(t)
	return clibtest.Counters(t, q.stats)
}

// memory returns an area of the guest's memory. The guest must be stopped.
func (q *qemu) memory(t *testing.T, a area) []byte {
	t.Helper()
	file := filepath.Join(filepath.Dir(q.serial), "memory")
	q.do(t, "pmemsave", map[string]any{"val": a.start, "size": a.bytes(), "filename": file})
	b, err := os.ReadFile(file)
	if err != nil || uint64(len(b)) != a.bytes() {
		t.Fatalf("%d bytes of the guest's memory, %v", len(b), err)
	}
	return b
}
