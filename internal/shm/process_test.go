package shm

// Tests with two or more processes.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// A million records of random sizes in both directions, through rings that are
// mostly full, by processes that sleep.
func TestExchange(t *testing.T) {
	count := 1_000_000
	if testing.Short() {
		count = 100_000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	arg := fmt.Sprintf("%d,%d", seed, count)
	in := newInbox(t, &Config{RingBytes: testRing})
	k := startChild(t, listen(t), "exchange", arg)
	c, err := k.accept(t, in)
	if err != nil {
		t.Fatal(err)
	}
	x := newExchange(arg, 1, 2)
	if err := x.run(in, c); err != nil {
		t.Error(err)
	}
	if x.sent != uint64(count) || x.checked != uint64(count) {
		t.Errorf("%d sent, %d received of %d", x.sent, x.checked, count)
	}
	k.wait(t)
}

// A process is killed under load, at any instruction, also while it connects.
// The test process notices, receives everything that was committed, keeps no mapping or
// descriptor, and can connect to the next one.
func TestKill(t *testing.T) {
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	in := newInbox(t, &Config{RingBytes: testRing})
	l := listen(t)
	before, goroutines := holding(t), runtime.NumGoroutine()
	slowest, joined, records := time.Duration(0), 0, uint64(0)
	for round := range rounds {
		k := startChild(t, l, "flood", rng.Uint64()>>1)
		early := round%4 == 3 // killed during the handshake, mostly
		killed := make(chan time.Time, 1)
		kill := func(after time.Duration) {
			time.Sleep(after)
			k.cmd.Process.Kill()
			killed <- time.Now()
		}
		delay := time.Duration(rng.IntN(20_000)) * time.Microsecond
		var c *Channel
		if early {
			conn, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			go kill(delay / 50)
			c, err = in.Accept(testContext(t), conn, k)
			if err != nil {
				<-killed
				k.cmd.Wait()
				continue
			}
		} else {
			var err error
			if c, err = k.accept(t, in); err != nil {
				t.Fatal(err)
			}
			go kill(delay)
		}
		joined++
		f := flood{}
		for end := time.Now().Add(patience); f.gone == nil; {
			f.push(c, rng)
			if in.Poll(&f, 64) == 0 && rng.IntN(2) == 0 {
				wait(in, time.Second)
			}
			if time.Now().After(end) {
				t.Fatalf("round %d: the end was not noticed", round)
			}
		}
		slowest = max(slowest, time.Since(<-killed))
		if !errors.Is(f.gone, ErrPeerDied) || f.bad != nil {
			t.Errorf("round %d: %v, %v", round, f.gone, f.bad)
		}
		records += f.got
		if c.Begin() || c.Err() == nil {
			t.Errorf("round %d: the channel is still up", round)
		}
		k.cmd.Wait()
	}
	t.Logf("%d of %d were connected, %d records came, an end was noticed within %v", joined, rounds, records, slowest)
	if slowest > 5*time.Second {
		t.Errorf("an end was noticed after %v", slowest)
	}
	if records == 0 || joined < rounds/2 {
		t.Error("there was no load")
	}
	after := holding(t)
	for end := time.Now().Add(patience); (after != before || runtime.NumGoroutine() > goroutines) && time.Now().Before(end); after = holding(t) {
		time.Sleep(10 * time.Millisecond) // the last processes' pipes are being closed
	}
	if after != before || runtime.NumGoroutine() > goroutines {
		t.Errorf("%+v and %d goroutines before, %+v and %d after", before, goroutines, after, runtime.NumGoroutine())
	}
}

// A process that is stopped delays no other: the ring to it gets full, and Close does not
// wait for it.
func TestStopped(t *testing.T) {
	in := newInbox(t, &Config{RingBytes: testRing})
	k := startChild(t, listen(t), "flood", 1)
	c, err := k.accept(t, in)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	full := false
	for range 10_000 {
		if err := c.Send(recData, make([]byte, 64)); errors.Is(err, ErrFull) {
			full = true
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if !full {
		t.Error("the ring never got full")
	}
	start := time.Now()
	c.Close()
	c.Close()
	if d := time.Since(start); d > time.Second {
		t.Errorf("closing took %v", d)
	}
}

// A peer that closes is distinguished from one that dies, and what it sent before comes
// first.
func TestPeerCloses(t *testing.T) {
	in := newInbox(t, nil)
	k := startChild(t, listen(t), "close", 0)
	if _, err := k.accept(t, in); err != nil {
		t.Fatal(err)
	}
	var got []byte
	var gone error
	pollUntil(t, in, &recorder{
		record: func(_ *Channel, typ byte, _ []byte) { got = append(got, typ) },
		gone:   func(_ *Channel, err error) { gone = err },
	}, "the end", func() bool { return gone != nil })
	if len(got) != 1 || got[0] != recDone || !errors.Is(gone, ErrPeerClosed) {
		t.Errorf("records %v, then %v", got, gone)
	}
	k.wait(t)
}

// memoryChild starts a process with memory to read: 1 MiB made by fill(42),
// and as much behind it that may not be touched.
func memoryChild(t *testing.T, mode string, in *Inbox) (k *child, c *Channel, addr uint64) {
	t.Helper()
	k = startChild(t, listen(t), mode, 0)
	c, err := k.accept(t, in)
	if err != nil {
		t.Fatal(err)
	}
	pollUntil(t, in, &recorder{record: func(_ *Channel, _ byte, p []byte) { addr = binary.NativeEndian.Uint64(p) }},
		"the address", func() bool { return addr != 0 })
	return k, c, addr
}

// needReading skips a test where the administrator permits no process to read another, after
// checking that the channel reports it.
func needReading(t *testing.T, c *Channel) {
	t.Helper()
	if scope := sys.YamaScope(); scope > yamaRestricted && !c.peer.canRead && !c.PeerReads() {
		t.Skipf("kernel.yama.ptrace_scope is %d", scope)
	}
}

func TestCopyFrom(t *testing.T) {
	const n = 1 << 20
	in := newInbox(t, nil)
	k, c, addr := memoryChild(t, "memory", in)
	needReading(t, c)
	if !c.peer.canRead || !c.PeerReads() {
		t.Fatalf("can read %v, peer reads %v", c.peer.canRead, c.PeerReads())
	}
	want := make([]byte, n)
	fill(want, 42)
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var copier Copier

	// Any pieces to any pieces, also more than one system call takes.
	for range 300 {
		total := rng.IntN(64 << 10)
		if rng.IntN(20) == 0 {
			total = rng.IntN(n)
		}
		most := 1 + rng.IntN(8000)
		if rng.IntN(10) == 0 {
			most = 1 + rng.IntN(20) // thousands of pieces
			total = min(total, 30_000)
		}
		var src []Range
		var expect []byte
		for left := total; left > 0; {
			size := min(left, rng.IntN(most+1))
			off := rng.IntN(n - size + 1)
			src = append(src, Range{Addr: addr + uint64(off), Len: size})
			expect = append(expect, want[off:off+size]...)
			left -= size
		}
		got := make([]byte, total)
		var dst [][]byte
		for rest := got; len(rest) > 0; {
			size := min(len(rest), rng.IntN(most+1))
			dst = append(dst, rest[:size:size])
			rest = rest[size:]
		}
		m, err := c.CopyFrom(&copier, dst, src)
		if m != total || err != nil {
			t.Fatalf("%d of %d bytes: %v", m, total, err)
		}
		if string(got) != string(expect) {
			t.Fatalf("%d bytes in %d from %d pieces differ", total, len(dst), len(src))
		}
	}

	// As many bytes are copied as the shorter side has.
	buf := make([]byte, 100)
	if m, err := c.CopyFrom(&copier, [][]byte{buf}, []Range{{Addr: addr, Len: 50}}); m != 50 || err != nil {
		t.Errorf("%d, %v", m, err)
	}
	// A hole in the peer's memory, and one in ours, after some bytes.
	big := make([]byte, 64<<10)
	m, err := c.CopyFrom(&copier, [][]byte{big}, []Range{{Addr: addr + n - 10_000, Len: 20_000}})
	if m != 10_000 || !errors.Is(err, ErrPeerMemory) || string(big[:m]) != string(want[n-10_000:]) {
		t.Errorf("over the end: %d, %v", m, err)
	}
	m, err = c.CopyFrom(&copier, [][]byte{big}, []Range{{Addr: 1 << 46, Len: 10}})
	if m != 0 || !errors.Is(err, ErrPeerMemory) {
		t.Errorf("nowhere: %d, %v", m, err)
	}
	hole, err := unix.Mmap(-1, 0, 16<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(hole)
	if err := unix.Mprotect(hole[8<<10:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	m, err = c.CopyFrom(&copier, [][]byte{hole}, []Range{{Addr: addr, Len: 16 << 10}})
	if m != 8<<10 || !errors.Is(err, ErrOwnMemory) || string(hole[:m]) != string(want[:m]) {
		t.Errorf("own hole: %d, %v", m, err)
	}
	if n := testing.AllocsPerRun(10, func() {
		c.CopyFrom(&copier, [][]byte{big}, []Range{{Addr: addr, Len: len(big)}})
	}); n != 0 {
		t.Errorf("%v allocations a copy", n)
	}

	// Another process under the same number has another nonce.
	c.peer.nonce ^= 1
	if m, err := c.CopyFrom(&copier, [][]byte{big}, []Range{{Addr: addr, Len: 100}}); m != 0 || !errors.Is(err, ErrPeerGone) {
		t.Errorf("another process: %d, %v", m, err)
	}
	c.peer.nonce ^= 1

	k.kill()
	if m, err := c.CopyFrom(&copier, [][]byte{big}, []Range{{Addr: addr, Len: 100}}); m != 0 || !errors.Is(err, ErrPeerGone) {
		t.Errorf("dead: %d, %v", m, err)
	}
}

// Several peers at once can read our memory, also where the kernel lets a process name only
// one (Yama): this process is their common ancestor.
func TestManyRead(t *testing.T) {
	in := newInbox(t, nil)
	for range 3 {
		_, c, _ := memoryChild(t, "memory", in)
		needReading(t, c)
		if !c.peer.canRead || !c.PeerReads() {
			t.Errorf("can read %v, peer reads %v", c.peer.canRead, c.PeerReads())
		}
	}
}

// Where the kernel does not permit us to read the peer, both sides learn so, and the ring
// works. The peer has made itself private, and this thread has no privilege.
func TestCopyNotPermitted(t *testing.T) {
	in := newInbox(t, nil)
	k := startChild(t, listen(t), "private", 0)
	joined := make(chan *Channel)
	go func() {
		defer close(joined)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		dropPrivilege(t)
		c, err := k.accept(t, in)
		if err != nil {
			t.Error(err)
			return
		}
		joined <- c
	}()
	c := <-joined
	if c == nil {
		t.FailNow()
	}
	if c.peer.canRead {
		t.Error("a private process can be read")
	}
	var copier Copier
	if n, err := c.CopyFrom(&copier, [][]byte{make([]byte, 8)}, []Range{{Addr: 4096, Len: 8}}); n != 0 || !errors.Is(err, ErrNotPermitted) {
		t.Errorf("%d, %v", n, err)
	}
	ok := false
	pollUntil(t, in, &recorder{record: func(*Channel, byte, []byte) { ok = true }}, "a record", func() bool { return ok })
}

// dropPrivilege takes this thread's right to read any process.
func dropPrivilege(t *testing.T) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		t.Error(err)
	}
	data[0].Effective &^= 1 << unix.CAP_SYS_PTRACE
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		t.Error(err)
	}
}

// A process that was forked by the peer may keep the socket open: the peer's end
// is noticed all the same.
func TestSocketOutlivesPeer(t *testing.T) {
	in := newInbox(t, nil)
	a, b := connPair(t)
	other := newInbox(t, nil)
	go other.Dial(testContext(t), a, nil)
	c, err := in.Accept(testContext(t), b, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The peer is this process; another process takes its place.
	k := startChild(t, listen(t), "flood", 1)
	fd, err := unix.PidfdOpen(k.cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	in.watch.Remove(c.life.fd)
	unix.Close(c.life.fd)
	c.life.fd = fd
	err = in.watch.Add(fd, int32(c.slot))
	c.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	k.cmd.Process.Kill()
	awaitDown(t, c)
	if !errors.Is(c.Err(), ErrPeerDied) {
		t.Error(c.Err())
	}
	k.cmd.Wait()
}

// A process of another user is refused, and receives the reason. The check compares user
// numbers, so with privilege the test uses a process of a real other user.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs a second user; TestHandshakeRefusesUser covers the check")
	}
	in := newInbox(t, nil)
	l := listen(t)
	k := startOther(t, l)
	c, err := k.accept(t, in)
	if c != nil || !errors.Is(err, ErrRefused) {
		t.Errorf("%v, %v", c, err)
	}
	t.Log(err)
	if err := k.cmd.Wait(); err == nil {
		t.Error("the other process was not refused")
	}
}
