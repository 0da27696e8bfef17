package host

import (
	"bufio"
	"encoding/binary"
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
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Each test has addresses of its own.
func addr(n byte) netip.Addr { return netip.AddrFrom4([4]byte{127, 99, 0, n}) }

type joined struct {
	*Member
	udp  udp
	died chan LastWords // what Config.Died was called with
}

func join(t *testing.T, addrs ...netip.Addr) *joined {
	t.Helper()
	return joinWith(t, udp{addrs: addrs})
}

func joinWith(t *testing.T, u udp) *joined {
	t.Helper()
	j, addrs := &joined{udp: u, died: make(chan LastWords, 100)}, u.addrs
	ready := make(chan struct{})
	var err error
	j.Member, err = Join(Config{Addrs: addrs, Limits: manyObjects(), Listen: j.udp.listen,
		Died: func(words []LastWords) {
			for _, w := range words {
				j.died <- w
			}
		},
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
	t.Cleanup(func() { j.udp.close(); _ = j.Close() })
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

// buried waits for a process that ends, and for the lock that shows that it lives: some machines
// free that one later.
func (j *joined) buried(t *testing.T, c *another) {
	t.Helper()
	_ = c.cmd.Wait()
	eventually(t, "the lock of a dead process is free", func() bool {
		for i := range j.dir.process {
			if id := identity(j.dir.ids[i].Load()); id.pid() == c.cmd.Process.Pid && j.dir.alive(id) {
				return false
			}
		}
		return true
	})
}

func (j *joined) lease(t *testing.T) uint32 {
	t.Helper()
	r, err := j.Places().Lease()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestJoin(t *testing.T) {
	a := join(t, addr(1))
	b := join(t, addr(1))
	c := join(t, addr(2))
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
			if p, ok := j.find(r<<mem.RangeBits + 5); !ok || p != slot {
				t.Errorf("range %d: process %d (%v), want %d", r, p, ok, slot)
			}
		}
	}
	if _, ok := a.Find(1 << 30); ok {
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
		if _, ok := a.find(r << mem.RangeBits); ok != (slot == a.Slot()) {
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

// find returns the process that has a slot.
func (j *joined) find(slot uint32) (process int, ok bool) {
	return j.Find(sys.PlaceNumber(slot>>mem.PlaceSlotBits, 77))
}

// Processes that leave take nothing from the others, whichever of them has come first.
func TestLeave(t *testing.T) {
	all := []*joined{join(t, addr(4)), join(t, addr(4)), join(t, addr(4)), join(t, addr(4))}
	for len(all) > 1 {
		_ = all[0].Close()
		all = all[1:]
		late := join(t, addr(4))
		if late.ID() != all[0].ID() {
			t.Fatal("another device")
		}
		_ = late.Close()
		for _, j := range all {
			r := j.lease(t)
			for _, k := range all {
				if p, ok := k.find(r << mem.RangeBits); !ok || p != j.Slot() {
					t.Errorf("range %d: process %d (%v), want %d", r, p, ok, j.Slot())
				}
			}
		}
	}
}

// A stopped process keeps nobody waiting: neither those that are there nor those that come.
func TestStopped(t *testing.T) {
	c := start(t, addr(27), -1)
	c.expect(t, "slot")
	a := join(t, addr(27))
	if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Signal(syscall.SIGCONT) })
	for range 3 {
		b := join(t, addr(27))
		if b.ID() != a.ID() {
			t.Fatal("another device")
		}
		if r := b.lease(t); r/rangesOfPlace == a.lease(t)/rangesOfPlace {
			t.Error("two processes have numbers of the same place")
		}
	}
	d, err := a.Look(addr(27))
	if err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
}

// of returns the identity of a process that the test has started.
func (j *joined) of(t *testing.T, c *another) identity {
	t.Helper()
	for i := range j.dir.process {
		if id := j.dir.who(i); id.pid() == c.cmd.Process.Pid {
			return id
		}
	}
	t.Fatalf("process %d is not in the directory", c.cmd.Process.Pid)
	return 0
}

// A process is alive from its entry to its end, whether it answers or not, and whatever it has
// closed.
func TestAlive(t *testing.T) {
	a := join(t, addr(31))
	b := join(t, addr(31))
	old := b.self
	if !a.dir.alive(a.self) || !a.dir.alive(old) {
		t.Error("a process is taken for dead")
	}
	_ = b.Close()
	if a.dir.alive(old) {
		t.Error("a process that has left is taken for alive")
	}

	stopped := start(t, addr(31), -1)
	stopped.expect(t, "slot")
	if err := stopped.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	closed := startWith(t, childEnv+"="+addr(31).String(), -1, modeEnv+"=closes")
	closed.expect(t, "closed")
	stoppedID, closedID := a.of(t, stopped), a.of(t, closed)
	a.dir.sweep(a.self)
	for name, id := range map[string]identity{"this process": a.self, "a stopped process": stoppedID, "a process that has closed the directory": closedID} {
		if !a.dir.alive(id) || a.dir.who(id.slot()) != id {
			t.Errorf("%s is taken for dead", name)
		}
	}
	for _, c := range []*another{stopped, closed} {
		id := a.of(t, c)
		_ = c.cmd.Process.Kill()
		a.buried(t, c)
		if a.dir.alive(id) {
			t.Error("a killed process is taken for alive")
		}
		if a.Gone(id.slot()); a.dir.who(id.slot()) != 0 {
			t.Error("the entry of a killed process is not free")
		}
	}
	// An entry that a dead process has left is used again without a sweep.
	a.dir.claimed.Store(uint32(closedID.slot() - 1 + MaxProcesses))
	if c := join(t, addr(31)); c.Slot() != closedID.slot() || a.dir.alive(closedID) || !a.dir.alive(c.self) {
		t.Errorf("entry %d, want %d", c.Slot(), closedID.slot())
	}
}

// A process of another user that takes the name of one that has ended does not keep what that
// one had.
func TestSquatted(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: to be another user")
	}
	a := join(t, addr(28))
	c := start(t, addr(28), -1)
	c.expect(t, "slot")
	i := a.of(t, c).slot()
	name := processName(addr(28), a.dir.who(i))
	_ = c.cmd.Process.Kill()
	a.buried(t, c)
	s := startWith(t, squatEnv+"="+name, 65534)
	s.expect(t, "squatting")
	a.Gone(i)
	if a.dir.who(i) != 0 {
		t.Error("the entry is not free")
	}
}

// Processes that do not answer keep the list waiting once, not one after the other,
// and the others are in it all the same.
func TestListDeadline(t *testing.T) {
	stuck := make(chan struct{})
	for range 3 {
		m, err := Join(Config{Addrs: []netip.Addr{addr(22)}, Listen: (&udp{addrs: []netip.Addr{addr(22)}}).listen, Status: func(bool) any { <-stuck; return nil }})
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

// A stopped process that has its device alone is listed all the same.
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
		_, err := Join(Config{Addrs: addrs, Listen: (&udp{addrs: addrs}).listen})
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("%v: %v", addrs, err)
		}
	}
	busy := errors.New("the port is taken")
	if _, err := Join(Config{Addrs: []netip.Addr{addr(7)}, Listen: func(*Sockets) (int, error) { return 0, busy }}); !errors.Is(err, busy) {
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
	if p, ok := d.Find(sys.PlaceNumber(a.lease(t)/rangesOfPlace, 1)); !ok || p != a.Slot() {
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
		if want := fmt.Sprintf(`{"slot":%d}`, j.Slot()); p.PID != os.Getpid() || string(p.Status) != want {
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
	return startWith(t, childEnv+"="+a.String(), uid)
}

func startWith(t *testing.T, env string, uid int, more ...string) *another {
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
	c.cmd.Env = append(append(os.Environ(), env), more...)
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

// A process without privileges whose user has more descriptors under way than its soft limit on
// descriptors joins all the same, and keeps that limit. If the hard limit is too low as well, it is
// told which one.
func TestFewDescriptors(t *testing.T) {
	uid := -1
	if os.Getuid() == 0 {
		uid = 65534
	}
	for range 2 { // one that makes the device, and one that joins it
		c := startWith(t, childEnv+"="+addr(35).String(), uid, modeEnv+"=limits 100 1000")
		c.expect(t, "slot")
	}
	c := startWith(t, childEnv+"="+addr(36).String(), uid, modeEnv+"=limits 100 100")
	if l := c.expectRefusal(t); !strings.Contains(l, "RLIMIT_NOFILE of this process allows, 100: raise the hard limit") {
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

// Processes come, are stopped and killed at any time. Those that are left stay one device, and
// the kernel brings each of them the packets for its queue pairs.
func TestKilled(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	rounds := 8
	if os.Getenv("VERBENA_FULL") != "" {
		rounds = 80
	}
	stays := join(t, addr(10))
	var squatter *another
	if os.Getuid() == 0 { // another user wants the address
		squatter = startWith(t, squatEnv+"="+doorName(addr(10)), 65534)
		squatter.expect(t, "trying")
	}
	var living, stopped []*another
	for range 8 {
		living = append(living, start(t, addr(10), -1))
	}
	for range rounds {
		time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond) // until they are anywhere
		for range 1 + rng.IntN(3) {
			i := rng.IntN(len(living))
			if err := living[i].cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			living[i] = start(t, addr(10), -1)
		}
		if i := rng.IntN(len(living)); rng.IntN(2) == 0 {
			if err := living[i].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			stopped = append(stopped, living[i])
			living = slices.Delete(living, i, i+1)
			living = append(living, start(t, addr(10), -1))
		}
	}
	// Every process gets numbers, and no two processes the same.
	places := map[string]*another{}
	for _, c := range living {
		c.expect(t, "slot")
		if _, err := fmt.Fprintln(c.in); err != nil {
			t.Fatal(err)
		}
		var r int
		if _, err := fmt.Sscanf(c.expect(t, "range"), "range %d", &r); err != nil {
			t.Fatal(err)
		}
		place := fmt.Sprint(r / rangesOfPlace)
		if places[place] != nil {
			t.Errorf("place %s has two processes", place)
		}
		places[place] = c
	}
	tx, err := net.Dial("udp", netip.AddrPortFrom(addr(10), 4791).String())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Close()
	for place, c := range places {
		for range 20 {
			p, _ := strconv.Atoi(place)
			var b [16]byte
			binary.BigEndian.PutUint32(b[4:], sys.PlaceNumber(uint32(p), rng.Uint32()))
			binary.BigEndian.PutUint32(b[12:], rng.Uint32())
			if _, err := tx.Write(b[:]); err != nil {
				t.Fatal(err)
			}
			c.expect(t, fmt.Sprintf("packet %x", b))
		}
	}
	if squatter != nil && len(squatter.lines) > 0 {
		t.Errorf("another user's process: %s", <-squatter.lines)
	}
	// The dead are forgotten, the stopped are not.
	stays.dir.sweep(stays.self)
	n := 0
	for i := range stays.dir.process {
		if stays.dir.ids[i].Load() != 0 {
			n++
		}
	}
	if n < 1+len(living) || n > 1+len(living)+len(stopped) { // one that was stopped early has no entry yet
		t.Errorf("%d entries for %d processes and %d stopped ones", n, 1+len(living), len(stopped))
	}
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
