package host

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// Each test has addresses of its own. Nothing is bound to them: they only make names of
// sockets.
func addr(n byte) netip.Addr { return netip.AddrFrom4([4]byte{127, 99, 0, n}) }

type joined struct {
	*Member
	became atomic.Int32
}

func join(t *testing.T, addrs ...netip.Addr) *joined {
	t.Helper()
	j := &joined{}
	ready := make(chan struct{})
	var err error
	j.Member, err = Join(Config{Addrs: addrs, Limits: manyObjects(), Become: func() error { j.became.Add(1); return nil },
		Channel: func(c *net.UnixConn, _ netip.Addr, _ int) {
			<-ready
			_, _ = c.Write([]byte(fmt.Sprint(j.Slot())))
			_ = c.Close()
		},
		Status: func(brief bool) any {
			<-ready
			if brief {
				return j.Slot()
			}
			return map[string]int{"slot": j.Slot()}
		}})
	if err != nil {
		t.Fatal(err)
	}
	close(ready)
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: ", what)
		}
	}
}

func (j *joined) lease(t *testing.T) uint32 {
	t.Helper()
	r, err := j.Lease()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestJoin(t *testing.T) {
	a := join(t, addr(1))
	b := join(t, addr(1))
	c := join(t, addr(2))
	if !a.IsOwner() || b.IsOwner() || !c.IsOwner() || a.became.Load() != 1 || b.became.Load() != 0 {
		t.Fatal("the first one of an address is its owner")
	}
	if a.Slot() == b.Slot() || a.Key() != b.Key() || a.Key() == c.Key() {
		t.Errorf("slots %d and %d", a.Slot(), b.Slot())
	}
	seen := map[uint32]int{}
	for i := range 20 {
		j := []*joined{a, b}[i%2]
		r := j.lease(t)
		if _, twice := seen[r]; twice {
			t.Fatalf("range %d is leased twice", r)
		}
		seen[r] = j.Slot()
	}
	for r, slot := range seen {
		for _, j := range []*joined{a, b} {
			if p, ok := j.dir.find(r<<RangeBits + 5); !ok || p != slot {
				t.Errorf("range %d: process %d (%v), want %d", r, p, ok, slot)
			}
		}
	}
	if _, ok := a.dir.find(1 << 30); ok {
		t.Error("a number that cannot be is somebody's")
	}

	// Each process can be reached.
	for _, j := range []*joined{a, b} {
		conn, err := a.Dial(j.Slot())
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(conn)
		if string(b) != fmt.Sprint(j.Slot()) {
			t.Errorf("process %d answers %q", j.Slot(), b)
		}
		_ = conn.Close()
	}
	if _, err := a.Dial(200); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("a process that is not there: %v", err)
	}

	// The entry and the ranges of a process that leaves are freed.
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "it is forgotten", func() bool { _, err := a.Dial(b.Slot()); return errors.Is(err, syscall.ESRCH) })
	for r, slot := range seen {
		if _, ok := a.dir.find(r << RangeBits); ok != (slot == a.Slot()) {
			t.Errorf("range %d of process %d: %v", r, slot, ok)
		}
	}
	if err := b.Close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
}

func TestLimits(t *testing.T) {
	a, b := join(t, addr(3)), join(t, addr(3))
	a.Set(MRs, 400)
	b.Set(MRs, 600)
	if a.Over(MRs) || b.Over(MRs) {
		t.Error("the limit is 1000")
	}
	a.Set(MRs, 401)
	if !a.Over(MRs) || !b.Over(MRs) || a.Over(QPs) {
		t.Error("the limit counts for all processes together, and for each kind alone")
	}
	_ = b.Close()
	eventually(t, "what it had is free", func() bool { return !a.Over(MRs) })
}

// When the owner goes, another process takes its place; each process keeps its numbers.
func TestTakeOver(t *testing.T) {
	first := join(t, addr(4))
	rest := []*joined{join(t, addr(4)), join(t, addr(4)), join(t, addr(4))}
	ranges := map[uint32]int{}
	for _, j := range rest {
		ranges[j.lease(t)] = j.Slot()
	}
	gone := first.lease(t)
	for len(rest) > 0 {
		_ = first.Close()
		eventually(t, "there is a new owner", func() bool { return slices.ContainsFunc(rest, func(j *joined) bool { return j.IsOwner() }) })
		i := slices.IndexFunc(rest, func(j *joined) bool { return j.IsOwner() })
		if n := rest[i].became.Load(); n != 1 {
			t.Errorf("it became the owner %d times", n)
		}
		for _, j := range rest {
			r := j.lease(t) // which works for every process, and so with the new owner
			if _, twice := ranges[r]; twice {
				t.Fatalf("range %d is leased twice", r)
			}
			ranges[r] = j.Slot()
		}
		for r, slot := range ranges {
			living := slices.ContainsFunc(rest, func(j *joined) bool { return j.Slot() == slot })
			if p, ok := rest[0].dir.find(r << RangeBits); living && (!ok || p != slot) {
				t.Errorf("range %d: process %d (%v), want %d", r, p, ok, slot)
			}
		}
		if _, ok := rest[0].dir.find(gone << RangeBits); ok && ranges[gone] == 0 {
			t.Error("the owner's range is still somebody's")
		}
		first = rest[i]
		rest = slices.Delete(rest, i, i+1)
	}
}

// Trouble is called when a member cannot become the owner, and again when it can at last.
func TestTakeOverTrouble(t *testing.T) {
	first := join(t, addr(20))
	var busy atomic.Bool
	busy.Store(true)
	said := make(chan error, 10)
	m, err := Join(Config{Addrs: []netip.Addr{addr(20)}, Trouble: func(err error) { said <- err }, Become: func() error {
		if busy.Load() {
			return refuse(syscall.EADDRINUSE, "the port is taken")
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	_ = first.Close()
	if err := <-said; !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("it says %v", err)
	}
	busy.Store(false)
	if err := <-said; err != nil || !m.IsOwner() {
		t.Errorf("it says %v, owner %v", err, m.IsOwner())
	}
	if len(said) > 0 {
		t.Errorf("and then it says %v", <-said)
	}
}

// A member whose device has been replaced by another one gives up.
func TestTakeOverStale(t *testing.T) {
	first := join(t, addr(21))
	said := make(chan error, 10)
	m, err := Join(Config{Addrs: []netip.Addr{addr(21)}, Trouble: func(err error) { said <- err },
		Become: func() error { return errors.New("let others") }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	other := join(t, addr(21))
	// The new owner finds the member's entry as if the member had come back too late, and
	// another process had it.
	m.dir.process[m.slot].nonce.Store(1)
	_ = first.Close()
	eventually(t, "there is a new owner", func() bool { return other.IsOwner() })
	if err := <-said; !errors.Is(err, syscall.ESTALE) {
		t.Errorf("it says %v", err)
	}
	if _, err := m.Lease(); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("a range: %v", err)
	}
}

// Processes that do not answer keep the list waiting once, not one after the other,
// and the others are in it all the same.
func TestListDeadline(t *testing.T) {
	stuck := make(chan struct{})
	for range 3 {
		m, err := Join(Config{Addrs: []netip.Addr{addr(22)}, Become: func() error { return nil }, Status: func(bool) any { <-stuck; return nil }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
	}
	t.Cleanup(func() { close(stuck) }) // before they are closed
	quick := join(t, addr(22))
	list, err := List(false)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(l Listing) bool { return l.Addr == addr(22) })
	if i < 0 || len(list[i].Processes) != 4 {
		t.Fatalf("%+v", list)
	}
	answered := 0
	for _, p := range list[i].Processes {
		if p.Status != nil {
			answered++
			if p.Slot != quick.Slot() {
				t.Errorf("process %d has answered", p.Slot)
			}
		}
	}
	if answered != 1 {
		t.Errorf("%d processes have answered", answered)
	}
}

// A process that is stopped, and owns its device, is listed all the same.
func TestListStopped(t *testing.T) {
	c := start(t, addr(23), -1)
	c.expect(t, "slot")
	quick := join(t, addr(24))
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Signal(syscall.SIGCONT) })
	list, err := List(false)
	if err != nil {
		t.Fatal(err)
	}
	found := map[netip.Addr][]Process{}
	for _, l := range list {
		found[l.Addr] = l.Processes
	}
	if p := found[addr(23)]; len(p) != 1 || p[0].PID != c.cmd.Process.Pid || p[0].Status != nil {
		t.Errorf("the stopped one: %+v", p)
	}
	if p := found[addr(24)]; len(p) != 1 || p[0].Slot != quick.Slot() || p[0].Status == nil {
		t.Errorf("the other: %+v", p)
	}
}

// A process that is refused receives the reason.
func TestRefused(t *testing.T) {
	join(t, addr(5), addr(6))
	for _, addrs := range [][]netip.Addr{{addr(5)}, {addr(6)}, {addr(6), addr(5)}, {addr(7), addr(6)}} {
		_, err := Join(Config{Addrs: addrs, Become: func() error { return nil }})
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("%v: %v", addrs, err)
		}
	}
	busy := errors.New("the port is taken")
	if _, err := Join(Config{Addrs: []netip.Addr{addr(7)}, Become: func() error { return busy }}); !errors.Is(err, busy) {
		t.Errorf("%v", err)
	}
	join(t, addr(7)) // the refused one has left nothing behind
}

func TestLook(t *testing.T) {
	b := join(t, addr(12))
	if _, err := b.Look(addr(8)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("nobody is there: %v", err)
	}
	a := join(t, addr(8))
	d, err := b.Look(addr(8))
	if err != nil {
		t.Fatal(err)
	}
	perm := mem.NewPerm24(a.Key())
	if p, ok := d.Find(perm.Index(a.lease(t) << RangeBits)); !ok || p != a.Slot() {
		t.Errorf("process %d, %v", p, ok)
	}
	conn, err := d.Dial(a.Slot())
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func TestList(t *testing.T) {
	a := join(t, addr(13), addr(14))
	b := join(t, addr(13), addr(14))
	list, err := List(false)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(l Listing) bool { return l.Addr == addr(13) })
	if i < 0 || slices.ContainsFunc(list, func(l Listing) bool { return l.Addr == addr(14) }) {
		t.Fatalf("%+v", list)
	}
	for _, j := range []*joined{a, b} {
		k := slices.IndexFunc(list[i].Processes, func(p Process) bool { return p.Slot == j.Slot() })
		if k < 0 {
			t.Fatalf("process %d is missing", j.Slot())
		}
		p := list[i].Processes[k]
		if want := fmt.Sprintf(`{"slot":%d}`, j.Slot()); p.PID != os.Getpid() || p.Owner != (j == a) || string(p.Status) != want {
			t.Errorf("%+v, %s, want %s", p, p.Status, want)
		}
	}
	brief, err := List(true)
	if err != nil {
		t.Fatal(err)
	}
	i = slices.IndexFunc(brief, func(l Listing) bool { return l.Addr == addr(13) })
	if i < 0 || len(brief[i].Processes) != 2 {
		t.Fatalf("%+v", brief)
	}
	for _, p := range brief[i].Processes {
		if string(p.Status) != fmt.Sprint(p.Slot) {
			t.Errorf("in brief: %+v, %s", p, p.Status)
		}
	}
}

// another is a process of its own, which runs child.
type another struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
}

func start(t *testing.T, a netip.Addr, uid int) *another {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if uid >= 0 { // another user may not see the directory of the test binary
		b, err := os.ReadFile(exe)
		if err == nil {
			dir := t.TempDir()
			exe = filepath.Join(dir, "test")
			err = errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755), os.WriteFile(exe, b, 0o755))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c := &another{cmd: exec.Command(exe), lines: make(chan string, 1000)}
	c.cmd.Env = append(os.Environ(), childEnv+"="+a.String())
	c.cmd.Stderr, c.cmd.Dir = os.Stderr, "/"
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid >= 0 {
		c.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(c.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.lines <- s.Text()
		}
	}()
	t.Cleanup(func() { _ = c.in.Close(); _ = c.cmd.Process.Kill(); <-done; _ = c.cmd.Wait() })
	return c
}

// expect returns the next line that begins so.
func (c *another) expect(t *testing.T, prefix string) string {
	t.Helper()
	limit := time.After(30 * time.Second)
	for {
		select {
		case l, ok := <-c.lines:
			if !ok {
				t.Fatalf("the process ended without saying %q", prefix)
			}
			if strings.HasPrefix(l, prefix) {
				return l
			}
			if strings.HasPrefix(l, "refused") || strings.HasPrefix(l, "no range") {
				t.Fatal(l)
			}
		case <-limit:
			t.Fatalf("the process never says %q", prefix)
		}
	}
}

func TestOtherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: to be another user")
	}
	join(t, addr(9))
	c := start(t, addr(9), 65534)
	if l := c.expectRefusal(t); !strings.Contains(l, "belongs to another user (uid 0)") {
		t.Error(l)
	}
}

func (c *another) expectRefusal(t *testing.T) string {
	t.Helper()
	select {
	case l := <-c.lines:
		return l
	case <-time.After(30 * time.Second):
		t.Fatal("the process says nothing")
	}
	return ""
}

// Processes come, are killed at any time, and the owner most of all. Those that
// are left stay one device.
func TestKilled(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	rounds := 6
	if os.Getenv("VERBENA_FULL") != "" {
		rounds = 60
	}
	var living []*another
	for range 8 {
		living = append(living, start(t, addr(10), -1))
	}
	for range rounds {
		time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
		for range 1 + rng.IntN(3) {
			i := rng.IntN(len(living))
			if err := living[i].cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			living[i] = start(t, addr(10), -1)
		}
	}
	for _, c := range living {
		c.expect(t, "slot")
	}
	// Every process still gets numbers, and no two processes the same.
	seen := map[string]bool{}
	for _, c := range living {
		if _, err := fmt.Fprintln(c.in); err != nil {
			t.Fatal(err)
		}
		l := c.expect(t, "range")
		if seen[l] {
			t.Errorf("%s is leased twice", l)
		}
		seen[l] = true
	}
	// In the end the directory has exactly the processes that are left.
	defer func() {
		if t.Failed() {
			for _, c := range living {
				t.Logf("%d is alive", c.cmd.Process.Pid)
			}
			if d, err := look(addr(10)); err == nil {
				for i := range d.process {
					if e := &d.process[i]; e.state.Load() == processAlive {
						t.Logf("process %d: pid %d, owner %v", i, e.pid.Load(), int(d.owner.Load()) == i)
					}
				}
				_ = d.close()
			}
			all, _ := names()
			t.Log(all)
		}
	}()
	eventually(t, "the dead are forgotten", func() bool {
		d, err := look(addr(10))
		if err != nil {
			return false
		}
		defer d.close()
		n := 0
		for i := range d.process {
			if d.process[i].state.Load() == processAlive {
				n++
			}
		}
		return n == len(living)
	})
}

// A hundred processes on one address. (What they do there is package interop's.)
func TestHundred(t *testing.T) {
	var all []*another
	for range 100 {
		all = append(all, start(t, addr(11), -1))
	}
	slots := map[string]bool{}
	for _, c := range all {
		slots[c.expect(t, "slot")] = true
	}
	if len(slots) != 100 {
		t.Errorf("%d slots", len(slots))
	}
}

// IsOwner reports whether this process receives the packets from other hosts.
func (m *Member) IsOwner() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.owner != nil
}
