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
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
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
	udp udp
}

func join(t *testing.T, addrs ...netip.Addr) *joined {
	t.Helper()
	return joinWith(t, udp{addrs: addrs})
}

func joinWith(t *testing.T, u udp) *joined {
	t.Helper()
	j, addrs := &joined{udp: u}, u.addrs
	ready := make(chan struct{})
	var err error
	j.Member, err = Join(Config{Addrs: addrs, Limits: manyObjects(), Listen: j.udp.listen,
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

// A place is used again when its process has gone, with its sockets, and goes on with numbers that
// no process has had, however many processes have had the place.
func TestPlacesAgain(t *testing.T) {
	stays := join(t, addr(20), addr(21))
	seen := map[uint32]bool{}
	for i := range 200 {
		j := join(t, addr(20), addr(21))
		r := j.lease(t)
		if p := r / rangesOfPlace; p != 1 || seen[r] || j.udp.bound != 2*max(0, 1-i) {
			t.Errorf("process %d: range %d of place %d, %d sockets bound", i, r, p, j.udp.bound)
		}
		seen[r] = true
		j.udp.close()
		_ = j.Close()
	}
	_ = stays
}

// A process that is killed while it gets a place costs none: the next one takes the sockets that
// are bound, at the place that they have.
func TestPlacesOrphaned(t *testing.T) {
	outer, stays := t, join(t, addr(32), addr(33))
	list := addr(32).String() + "," + addr(33).String()
	for _, tt := range []struct {
		moments      string // at which one process after the other is killed
		found, bound int
	}{
		{"early0 early0", 0, 2}, {"held0 held0", 0, 2}, {"bound0", 1, 1}, {"held0 bound0 early1 early1", 1, 1},
		{"early1 held1 held1", 1, 1}, {"held1 bound1", 2, 0}, {"bound1", 2, 0},
	} {
		t.Run(tt.moments, func(t *testing.T) {
			for _, when := range strings.Fields(tt.moments) {
				c := startWith(t, childEnv+"="+list, -1, modeEnv+"="+when)
				_ = c.cmd.Wait()
			}
			j := join(outer, addr(32), addr(33)) // which keeps its place
			at := j.lease(t) / rangesOfPlace
			for i, s := range j.udp.socks {
				if is, err := s.FindPlace(random()); err != nil || is != at {
					t.Errorf("socket %d is at place %d, %v, want %d", i, is, err, at)
				}
			}
			places := 0
			for p := range stays.dir.place {
				if stays.dir.place[p].socket[0].Load() != 0 {
					places++
				}
			}
			if int(at) != places-1 || j.udp.found != tt.found || j.udp.bound != tt.bound {
				t.Errorf("place %d of %d, %d sockets found and %d bound", at, places, j.udp.found, j.udp.bound)
			}
			if j.dir.process[j.Slot()].isBinding() {
				t.Error("the sockets are still noted as being bound")
			}
		})
	}
	// One that is killed when it has entered the place, before the sockets or after them.
	for _, entered := range []bool{false, true} {
		j := join(t, addr(32), addr(33))
		p, own := j.lease(t)/rangesOfPlace, &j.dir.process[j.Slot()]
		for i := range own.binding {
			own.binding[i].Store(j.dir.place[p].socket[i].Load())
			if !entered {
				j.dir.place[p].socket[i].Store(0)
			}
		}
		j.udp.close()
		j.life.Unlock()
		next := join(t, addr(32), addr(33))
		if at := next.lease(t) / rangesOfPlace; at != p || next.udp.bound != 0 || (next.udp.found == 2) == entered {
			t.Errorf("place %d, want %d; %d sockets found and %d bound", at, p, next.udp.found, next.udp.bound)
		}
		j.life, _ = sys.LockByte(j.dir.fd, MaxProcesses+1) // for Close
	}
}

// waiting returns how many bytes of packets the socket of a place holds.
func (j *joined) waiting(t *testing.T, place uint32) (bytes int) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/udp")
	if err != nil {
		t.Fatal(err)
	}
	inode := fmt.Sprint(j.dir.place[place].socket[0].Load())
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 9 && f[9] == inode {
			if _, err := fmt.Sscanf(f[4], "%x:%x", new(int), &bytes); err != nil {
				t.Fatal(err)
			}
			return bytes
		}
	}
	t.Fatalf("no socket %s", inode)
	return 0
}

// flood sends packets to a place.
func flood(t *testing.T, a netip.Addr, place uint32, n int) {
	t.Helper()
	tx, err := net.Dial("udp", netip.AddrPortFrom(a, 4791).String())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Close()
	for i := range n {
		var b [1000]byte
		binary.BigEndian.PutUint32(b[4:], sys.PlaceNumber(place, uint32(i)))
		if _, err := tx.Write(b[:]); err != nil {
			t.Fatal(err)
		}
	}
}

// received returns how many packets a process's socket has.
func (j *joined) received() (n int) {
	b := sys.NewRecvBatch(1, 1<<16)
	for k := 1; k > 0; n += k {
		if k, _ = j.udp.socks[0].Recv(b, 1); k <= 0 {
			return n
		}
	}
	return n
}

// The sockets of a process that has left, or was killed, hold no memory, and the process that takes
// them over gets no packet that was for that one.
func TestPlacesQuiet(t *testing.T) {
	a := join(t, addr(34))
	const many = 500 // more than the buffer of a socket holds here
	for range 3 {    // each time with the same socket
		killed := start(t, addr(34), -1)
		killed.expect(t, "slot")
		id := a.of(t, killed)
		_ = killed.cmd.Process.Kill()
		_ = killed.cmd.Wait()
		flood(t, addr(34), 1, many)
		if a.waiting(t, 1) == 0 {
			t.Fatal("the socket of a killed process does not receive")
		}
		a.Gone(id.slot())
		eventually(t, "the socket holds nothing", func() bool { return a.waiting(t, 1) == 0 })
		flood(t, addr(34), 1, many)
		if n := a.waiting(t, 1); n != 0 {
			t.Errorf("the socket of a dead process holds %d bytes", n)
		}

		again := start(t, addr(34), -1)
		again.expect(t, "slot")
		if a.dir.place[1].holder.Load() != uint64(a.of(t, again)) {
			t.Error("another place")
		}
		_ = again.cmd.Process.Kill()
		_ = again.cmd.Wait()
		flood(t, addr(34), 1, many)
		j := join(t, addr(34)) // notices the death by itself
		if p := j.lease(t) / rangesOfPlace; p != 1 {
			t.Fatalf("place %d", p)
		}
		drops, err := j.udp.socks[0].Overflows()
		if n := j.received(); n != 0 || drops != 0 || err != nil {
			t.Errorf("%d packets of an earlier process, %d dropped, %v", n, drops, err)
		}
		flood(t, addr(34), 1, 10)
		eventually(t, "it receives", func() bool { return a.waiting(t, 1) > 0 })
		if n := j.received(); n != 10 {
			t.Errorf("%d packets", n)
		}
		j.udp.close()
		_ = j.Close()
		flood(t, addr(34), 1, many)
		if n := a.waiting(t, 1); n != 0 {
			t.Errorf("the socket of a process that has left holds %d bytes", n)
		}
	}
}

// Another program's socket of the same user in the group moves places when it closes. Then no
// process gets the place of another one.
func TestPlacesMoved(t *testing.T) {
	foreign, err := sys.OpenUDP(netip.AddrPortFrom(addr(29), 4791), sys.UDPOptions{Held: func(int) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	a, b := join(t, addr(29)), join(t, addr(29)) // places 1 and 2
	_ = foreign.Close()                          // b is at place 0 now
	if pa, pb := a.lease(t)/rangesOfPlace, b.lease(t)/rangesOfPlace; pa != 1 || pb != 2 {
		t.Errorf("places %d and %d", pa, pb)
	}
	u := udp{addrs: []netip.Addr{addr(29)}}
	defer u.close()
	if m, err := Join(Config{Addrs: u.addrs, Listen: u.listen}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("%v", err)
		_ = m.Close()
	}
}

// A device with many addresses is shared as one with a single address.
func TestManyAddresses(t *testing.T) {
	var addrs []netip.Addr
	for i := range byte(maxAddrs + 2) {
		addrs = append(addrs, addr(100+i))
	}
	a, b := join(t, addrs...), join(t, addrs...)
	if a.ID() != b.ID() || a.lease(t)/rangesOfPlace == b.lease(t)/rangesOfPlace {
		t.Error("they do not share the device")
	}
}

// The last process leaves while another one comes. The places are then what the kernel has.
func TestLastLeaves(t *testing.T) {
	for i := range 100 {
		last := join(t, addr(30))
		var wg sync.WaitGroup
		wg.Go(func() {
			last.udp.close()
			_ = last.Close()
		})
		if i%2 == 0 {
			runtime.Gosched()
		}
		next := join(t, addr(30))
		wg.Wait()
		third := join(t, addr(30))
		for _, j := range []*joined{next, third} {
			at, err := j.udp.socks[0].FindPlace(random())
			if want := j.lease(t) / rangesOfPlace; err != nil || at != want {
				t.Fatalf("round %d: place %d, %v, and numbers of place %d", i, at, err, want)
			}
			j.udp.close()
			_ = j.Close()
		}
	}
}

// A process that needs more numbers than a place has gets another place.
func TestManyRanges(t *testing.T) {
	j := join(t, addr(26))
	seen := map[uint32]bool{}
	for range 2*rangesOfPlace + 1 {
		seen[j.lease(t)] = true
	}
	if len(seen) != 2*rangesOfPlace+1 || j.udp.bound != 3 {
		t.Errorf("%d ranges, %d sockets bound", len(seen), j.udp.bound)
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
		_ = c.cmd.Wait()
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
	_ = c.cmd.Wait()
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
		if stays.dir.process[i].id.Load() != 0 {
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
