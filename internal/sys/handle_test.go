package sys

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

// handleLimit is how long tests wait for a release.
const handleLimit = 20 * time.Second

// newHandle makes a handle for a test; calls counts the calls of released.
func newHandle(t *testing.T, size int64) (h *Handle, calls chan struct{}) {
	t.Helper()
	calls = make(chan struct{}, 10)
	h, err := NewHandle("verbena-test", size, func() { calls <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if len(calls) > 0 {
			t.Errorf("released was called %d times more", len(calls))
		}
	})
	return h, calls
}

func handleFD(t *testing.T, h *Handle) int {
	t.Helper()
	fd, err := h.FD()
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// expectReleased waits for the release.
func expectReleased(t *testing.T, h *Handle, calls chan struct{}) {
	t.Helper()
	select {
	case <-calls:
	case <-time.After(handleLimit):
		t.Fatal("not released")
	}
	if fd, err := h.FD(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a descriptor after the release: %d, %v", fd, err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// expectHeld makes an attempt to release the handle by itself, which must fail.
func expectHeld(t *testing.T, h *Handle, calls chan struct{}, why string) {
	t.Helper()
	if h.tryRelease() || len(calls) > 0 {
		t.Fatalf("released, though %s", why)
	}
}

func TestHandle(t *testing.T) {
	before := openFDs(t)
	h, calls := newHandle(t, 3*4096)
	if h.given || !h.tryRelease() || h.state != handleOpen {
		t.Error("a handle without descriptors is not about to be released")
	}
	fd := handleFD(t, h)
	if id, err := HandleIDOf(fd); err != nil || id != h.ID() {
		t.Errorf("%+v, %v; should be %+v", id, err, h.ID())
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v", flags, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != 3*4096 || st.Blocks != 0 {
		t.Errorf("%d bytes in %d blocks, %v", st.Size, st.Blocks, err)
	}
	for _, n := range []int64{0, 4096, 4 * 4096} {
		if err := unix.Ftruncate(fd, n); !errors.Is(err, unix.EPERM) {
			t.Errorf("truncated to %d: %v", n, err)
		}
	}
	other, _ := newHandle(t, 4096)
	if other.ID() == h.ID() {
		t.Error("two handles with one identity")
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	CloseFD(fd)
	expectReleased(t, h, calls)
	if _, err := HandleIDOf(fd); !errors.Is(err, unix.EBADF) {
		t.Errorf("a closed descriptor: %v", err)
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	for _, size := range []int64{-1, -1 << 63} {
		if _, err := NewHandle("verbena-test", size, func() {}); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	big, _ := newHandle(t, 1<<40) // no memory is taken for it
	if err := big.Close(); err != nil {
		t.Error(err)
	}
}

// What holds a handle, and ends.
func TestHandleHeld(t *testing.T) {
	for _, c := range []struct {
		name string
		hold func(t *testing.T, fd int) (end func())
	}{
		{"dup", func(t *testing.T, fd int) func() {
			dup, err := DupFD(fd)
			if err != nil {
				t.Fatal(err)
			}
			return func() { CloseFD(dup) }
		}},
		{"opened for reading", func(t *testing.T, fd int) func() {
			own, err := ReopenRead(fd)
			if err != nil {
				t.Fatal(err)
			}
			return func() { CloseFD(own) }
		}},
		{"opened for writing", func(t *testing.T, fd int) func() {
			own, err := reopen(fd, unix.O_WRONLY)
			if err != nil {
				t.Fatal(err)
			}
			return func() { CloseFD(own) }
		}},
		{"mapped", func(t *testing.T, fd int) func() { return mapHandle(t, fd, unix.MAP_SHARED) }},
		{"mapped private", func(t *testing.T, fd int) func() { return mapHandle(t, fd, unix.MAP_PRIVATE) }},
		{"mapped in part", func(t *testing.T, fd int) func() {
			unmap := mapHandle(t, fd, unix.MAP_SHARED)
			mapHandle(t, fd, unix.MAP_SHARED)()
			return unmap
		}},
		{"under way in a socket", func(t *testing.T, fd int) func() {
			a, b := unixPair(t)
			if err := SendFDs(a, []byte("x"), fd); err != nil {
				t.Fatal(err)
			}
			return func() { a.Close(); b.Close() }
		}},
		{"another process, which ends", func(t *testing.T, fd int) func() {
			cmd := exec.Command("cat")
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			dup, err := DupFD(fd)
			if err != nil {
				t.Fatal(err)
			}
			f := os.NewFile(uintptr(dup), "handle")
			defer f.Close()
			cmd.ExtraFiles = []*os.File{f}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			return func() { in.Close(); cmd.Wait() }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, calls := newHandle(t, 4*4096)
			first := handleFD(t, h)
			fd := handleFD(t, h)
			end := c.hold(t, fd)
			if first != fd {
				CloseFD(first)
			}
			expectHeld(t, h, calls, "a descriptor is open")
			CloseFD(fd)
			expectHeld(t, h, calls, c.name)
			end()
			expectReleased(t, h, calls)
		})
	}
}

func mapHandle(t *testing.T, fd, flags int) (unmap func()) {
	t.Helper()
	b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		t.Fatal(err)
	}
	return func() { unix.Munmap(b) }
}

// handleHolderChild receives a descriptor from the socket that is descriptor 3, and keeps it,
// mapped, until it is killed.
func handleHolderChild() error {
	f := os.NewFile(3, "socket")
	conn, err := net.FileConn(f)
	if err != nil {
		return err
	}
	c := conn.(*net.UnixConn)
	_, fds, err := RecvFDs(c, make([]byte, 8))
	if err != nil || len(fds) != 1 {
		return fmt.Errorf("%d descriptors, %w", len(fds), err)
	}
	if _, err := unix.Mmap(fds[0], 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return err
	}
	CloseFD(fds[0])
	if err := SendFDs(c, []byte("mapped")); err != nil {
		return err
	}
	time.Sleep(time.Hour)
	return nil
}

func TestHandleOfKilledProcess(t *testing.T) {
	a, b := unixPair(t)
	end, err := b.File()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"=handle-holder")
	cmd.ExtraFiles = []*os.File{end}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end.Close()
	b.Close()
	h, calls := newHandle(t, 4096)
	fd := handleFD(t, h)
	if err := SendFDs(a, []byte("x"), fd); err != nil {
		t.Fatal(err)
	}
	CloseFD(fd)
	var buf [8]byte
	if n, _, err := RecvFDs(a, buf[:]); string(buf[:n]) != "mapped" || err != nil {
		t.Errorf("%q, %v", buf[:n], err)
	}
	expectHeld(t, h, calls, "another process has it mapped")
	cmd.Process.Kill()
	cmd.Wait()
	expectReleased(t, h, calls)
}

func TestHandleClose(t *testing.T) {
	before := openFDs(t)
	h, calls := newHandle(t, 4096)
	fd := handleFD(t, h)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	select {
	case <-h.watch.done:
	default:
		t.Error("Close of the last handle has not waited for the goroutine")
	}
	if _, err := h.FD(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a descriptor after Close: %v", err)
	}
	if id, err := HandleIDOf(fd); err != nil || id != h.ID() {
		t.Errorf("the descriptor that is left: %+v, %v", id, err)
	}
	CloseFD(fd)
	if after := openFDs(t); after != before || len(calls) > 0 {
		t.Errorf("%d descriptors before, %d after; released %d times", before, after, len(calls))
	}
}

// Close waits for released.
func TestHandleCloseWaits(t *testing.T) {
	begun, goOn, over := make(chan struct{}), make(chan struct{}), atomic.Bool{}
	h, err := NewHandle("verbena-test", 4096, func() {
		close(begun)
		<-goOn
		over.Store(true)
	})
	if err != nil {
		t.Fatal(err)
	}
	CloseFD(handleFD(t, h))
	<-begun
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		h.Close()
		if !over.Load() {
			t.Error("Close has returned before released")
		}
	}()
	// Another handle lives and dies meanwhile.
	other, calls := newHandle(t, 4096)
	CloseFD(handleFD(t, other))
	expectReleased(t, other, calls)
	close(goOn)
	<-closed
}

// Close and the last close of a descriptor at once: what is called is called before Close returns.
func TestHandleCloseRaces(t *testing.T) {
	var called, notCalled int
	for round := range 60 {
		var over, calls atomic.Int32
		h, err := NewHandle("verbena-test", 4096, func() {
			calls.Add(1)
			if over.Load() > 0 {
				t.Error("released after Close")
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		fd := handleFD(t, h)
		go CloseFD(fd)
		for range round * 37 % 200 { // more or less time for the release
			runtime.Gosched()
		}
		h.Close()
		over.Store(1)
		if calls.Load() > 0 {
			called++
		} else {
			notCalled++
		}
	}
	t.Logf("released in %d rounds, closed before that in %d", called, notCalled)
}

func TestManyHandles(t *testing.T) {
	const n = 1000
	before := openFDs(t)
	all := make(chan int, 2*n)
	hs, fds := make([]*Handle, n), make([]int, n)
	for i := range hs {
		h, err := NewHandle(fmt.Sprintf("verbena-test-%d", i), 1<<20, func() { all <- i })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		hs[i], fds[i] = h, handleFD(t, h)
	}
	// An even one loses its descriptor; of an odd one another is left.
	left := make(map[int]int)
	for k := range n {
		i := k * 7 % n // in another order than they were made
		if i%2 == 1 {
			left[i] = handleFD(t, hs[i])
		}
		CloseFD(fds[i])
	}
	seen := make(map[int]bool)
	collect := func(want int) {
		t.Helper()
		limit := time.After(3 * handleLimit)
		for len(seen) < want {
			select {
			case i := <-all:
				if _, open := left[i]; open || seen[i] {
					t.Fatalf("handle %d: open %v, released before %v", i, open, seen[i])
				}
				seen[i] = true
			case <-limit:
				t.Fatalf("%d of %d released", len(seen), want)
			}
		}
	}
	collect(n / 2)
	for i, fd := range left {
		delete(left, i)
		CloseFD(fd)
	}
	collect(n)
	for _, h := range hs {
		h.Close()
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	if len(all) > 0 {
		t.Errorf("%d calls of released too many", len(all))
	}
}

// A goroutine takes and closes descriptors until it finds the handle released. While it has a
// descriptor, released is not called. Its pauses are about as long as the decision to release takes.
func TestHandleFDRacesWithRelease(t *testing.T) {
	linger := func(d time.Duration) {
		for end := time.Now().Add(d); time.Now().Before(end); {
			runtime.Gosched()
		}
	}
	var taken int
	for round := range 60 {
		var released atomic.Bool
		h, err := NewHandle("verbena-test", 4096, func() { released.Store(true) })
		if err != nil {
			t.Fatal(err)
		}
		for pause := round; ; pause = (pause*37 + 11) % 150 {
			fd, err := h.FD()
			if errors.Is(err, os.ErrClosed) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			taken++
			linger(time.Millisecond) // released is called by now, if it was decided before
			if released.Load() {
				t.Fatal("released while a descriptor is open")
			}
			CloseFD(fd)
			linger(time.Duration(pause) * time.Microsecond)
		}
		h.Close()
		if !released.Load() {
			t.Fatal("not released")
		}
	}
	t.Logf("%d descriptors", taken)
}

// quickExit keeps the race detector from waiting for a second at the end of a child.
const quickExit = "GORACE=atexit_sleep_ms=0"

// handleLimitChild has few descriptors.
func handleLimitChild() error {
	var p problems
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
		return err
	}
	calls := make(chan struct{}, 100)
	var hs []*Handle
	for len(hs) < 100 {
		h, err := NewHandle("verbena-test", 4096, func() { calls <- struct{}{} })
		if err != nil {
			if !errors.Is(err, unix.EMFILE) {
				p.addf("too many handles: %v", err)
			}
			break
		}
		hs = append(hs, h)
	}
	if len(hs) < 10 || len(hs) > 64 {
		p.addf("%d handles", len(hs))
	}
	fill := func() (fds []int) {
		for {
			fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return fds
			}
			fds = append(fds, fd)
		}
	}
	fds := fill()
	if _, err := hs[0].FD(); !errors.Is(err, unix.EMFILE) {
		p.addf("no descriptor left: %v", err)
	}
	CloseFD(fds[0])
	fd, err := hs[0].FD()
	if err != nil {
		return err
	}
	// With no descriptor left, the release is noticed all the same.
	b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	CloseFD(fd)
	fill()
	Unmap(b)
	select {
	case <-calls:
	case <-time.After(handleLimit):
		p.addf("not released")
	}
	for _, h := range hs {
		if err := h.Close(); err != nil {
			p.addf("%v", err)
		}
	}
	return p.err()
}

func TestHandleFewDescriptors(t *testing.T) { runChild(t, "handle-limit", 0, quickExit) }

// handleUserChild has no privileges.
func handleUserChild() error {
	calls := make(chan struct{}, 1)
	h, err := NewHandle("verbena-test", 4096, func() { calls <- struct{}{} })
	if err != nil {
		return err
	}
	fd, err := h.FD()
	if err != nil {
		return err
	}
	if h.tryRelease() {
		return errors.New("released, though a descriptor is open")
	}
	CloseFD(fd)
	select {
	case <-calls:
		return h.Close()
	case <-time.After(handleLimit):
		return errors.New("not released")
	}
}

// handleBlindChild finds a limit of inotify reached from its second handle on. Handles are released
// nevertheless.
func handleBlindChild(call int, errno unix.Errno) error {
	var p problems
	calls := make(chan int, 10)
	var hs [4]*Handle
	var fds [4]int
	for i := range hs {
		if i == 1 {
			if err := modetest.Forbid(modetest.Rule{Number: call, Arg: -1, Value: 0, Errno: errno}); err != nil {
				return err
			}
			if call == unix.SYS_INOTIFY_INIT1 { // what is left has no instance
				hs[0].Close()
				CloseFD(fds[0])
			}
		}
		h, err := NewHandle("verbena-test", 4096, func() { calls <- i })
		if err != nil {
			return err
		}
		if hs[i] = h; (h.wd < 0) != (i > 0) {
			p.addf("handle %d is number %d of its watch", i, h.wd)
		}
		if fds[i], err = h.FD(); err != nil {
			return err
		}
	}
	if hs[1].watch != hs[2].watch || hs[2].watch != hs[3].watch {
		p.addf("several watches")
	}
	expect := func(i int) {
		select {
		case got := <-calls:
			if got != i {
				p.addf("handle %d was released, not %d", got, i)
			}
		case <-time.After(handleLimit):
			p.addf("handle %d was not released", i)
		}
	}
	CloseFD(fds[2])
	expect(2)
	if call == unix.SYS_INOTIFY_ADD_WATCH {
		CloseFD(fds[0])
		expect(0)
	}
	for _, h := range hs {
		h.Close()
	}
	<-hs[1].watch.done
	if len(calls) > 0 {
		p.addf("%d calls of released too many", len(calls))
	}
	return p.err()
}

func TestHandleWithoutInotify(t *testing.T) {
	for _, child := range []string{"handle-blind", "handle-blind-2"} { // at once: each waits for a second or two
		t.Run(child, func(t *testing.T) {
			t.Parallel()
			runChild(t, child, 0, quickExit)
		})
	}
}

func TestHandleWithoutPrivileges(t *testing.T) {
	uid := uint32(65534)
	if os.Geteuid() != 0 {
		uid = 0 // the test itself has no privilege: the child runs as the same user
	}
	runChild(t, "handle-user", uid, quickExit)
}

// A process that opens the file while the lease is held sends no SIGIO.
func TestHandleLeaseSignal(t *testing.T) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, unix.SIGIO)
	defer signal.Stop(got)
	h, calls := newHandle(t, 4096)
	fd := handleFD(t, h)
	CloseFD(fd)
	expectReleased(t, h, calls)

	h, _ = newHandle(t, 4096)
	if err := checkSoleOpener(h.kept); err != nil {
		t.Error(err)
	}
	if err := setQuietSignal(h.kept); err != nil {
		t.Error(err)
	}
	if _, err := unix.FcntlInt(uintptr(h.kept), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	if fd, err := reopen(h.kept, unix.O_RDONLY|unix.O_NONBLOCK); err != unix.EAGAIN {
		t.Errorf("opened in spite of a lease: %d, %v", fd, err)
	}
	if _, err := unix.FcntlInt(uintptr(h.kept), unix.F_SETLEASE, unix.F_UNLCK); err != nil {
		t.Error(err)
	}
	// A process without a lease can take none.
	fd = handleFD(t, h)
	defer CloseFD(fd)
	read, err := ReopenRead(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseFD(read)
	for _, c := range []struct{ fd, kind int }{{fd, unix.F_WRLCK}, {read, unix.F_RDLCK}, {read, unix.F_WRLCK}} {
		if _, err := unix.FcntlInt(uintptr(c.fd), unix.F_SETLEASE, c.kind); err == nil {
			t.Errorf("a lease of kind %d for a stranger", c.kind)
		}
	}
	if err := h.Close(); err != nil { // before fd: the handle is not released
		t.Error(err)
	}
	select {
	case s := <-got:
		t.Errorf("signal %v", s)
	case <-time.After(20 * time.Millisecond):
	}
}

// The kernel drops reports when too many are unread. A handle whose report was dropped is
// released nevertheless.
func TestHandleReportsLost(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Fatal(err)
	}
	var most int
	if _, err := fmt.Sscan(string(text), &most); err != nil || most > 1<<17 {
		t.Fatalf("%q reports, %v", text, err)
	}
	a, callsA := newHandle(t, 4096)
	b, callsB := newHandle(t, 4096)
	c, callsC := newHandle(t, 4096)
	fdA, fdB, fdC := handleFD(t, a), handleFD(t, b), handleFD(t, c)
	closeWatches.mu.Lock() // the goroutine that reads stops here
	for range most/2 + 300 {
		CloseFD(handleFD(t, a)) // in turns: the kernel makes one report of equal ones
		CloseFD(handleFD(t, b))
	}
	CloseFD(fdC)
	closeWatches.mu.Unlock()
	expectReleased(t, c, callsC)
	expectHeld(t, a, callsA, "a descriptor is open")
	expectHeld(t, b, callsB, "a descriptor is open")
	CloseFD(fdA)
	CloseFD(fdB)
	expectReleased(t, a, callsA)
	expectReleased(t, b, callsB)
}

// programFiles are files of a program that have the numbers of a handle's descriptors.
type programFiles struct {
	inotify, memfd  int      // the program's own numbers of them
	asInotify       int      // the number of the instance of handles
	asKept, asKept2 int      // the numbers of kept descriptors
	id              HandleID // of memfd
}

// A program that closes all descriptors closes those of handles, too, and their numbers are given
// to its own files. Those stay as they are.
func TestHandleDescriptorsClosedByProgram(t *testing.T) {
	p := loseHandles(t)
	// What the handles have left behind is collected as garbage, and does no harm either.
	for range 3 {
		collected := make(chan struct{})
		runtime.SetFinalizer(new([64]byte), func(*[64]byte) { close(collected) })
		runtime.GC()
		<-collected
	}
	for _, fd := range []int{p.asKept, p.asKept2} {
		if got, err := HandleIDOf(fd); err != nil || got != p.id {
			t.Errorf("a file of the program: %+v, %v", got, err)
		}
		if lease, err := unix.FcntlInt(uintptr(fd), unix.F_GETLEASE, 0); lease != unix.F_UNLCK || err != nil {
			t.Errorf("a lease on a file of the program: %d, %v", lease, err)
		}
	}
	if what, err := readFDLink(p.asInotify); what != "anon_inode:inotify" || err != nil {
		t.Errorf("the program's inotify instance: %q, %v", what, err)
	}
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", p.inotify))
	if n := strings.Count(string(info), "inotify wd:"); n != 1 || err != nil {
		t.Errorf("the program watches %d files, %v", n, err)
	}
	if n, err := unix.Read(p.inotify, make([]byte, 4096)); err != unix.EAGAIN {
		t.Errorf("the program's file was opened or closed: %d, %v", n, err)
	}
	for _, fd := range []int{p.inotify, p.memfd, p.asInotify, p.asKept, p.asKept2} {
		CloseFD(fd)
	}
}

// loseHandles makes handles and has the program take the numbers of their descriptors. What gets
// them is the worst case: files of the same kinds.
func loseHandles(t *testing.T) (p programFiles) {
	t.Helper()
	calls := make(chan struct{}, 10)
	var hs [2]*Handle
	for i := range hs {
		h, err := NewHandle("verbena-test", 4096, func() { calls <- struct{}{} })
		if err != nil {
			t.Fatal(err)
		}
		hs[i] = h
	}
	fd := handleFD(t, hs[0])
	watch := hs[0].watch
	p.asInotify, p.asKept, p.asKept2 = watch.fd, hs[0].kept, hs[1].kept

	memfd, err := NewMemfd("verbena-test-other", 8192)
	if err != nil {
		t.Fatal(err)
	}
	if p.memfd, err = reopen(memfd, unix.O_RDWR); err != nil {
		t.Fatal(err)
	}
	CloseFD(memfd)
	if p.id, err = HandleIDOf(p.memfd); err != nil {
		t.Fatal(err)
	}
	if p.inotify, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.InotifyAddWatch(p.inotify, fmt.Sprintf("/proc/self/fd/%d", p.memfd), unix.IN_OPEN|unix.IN_CLOSE); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to int }{{p.inotify, p.asInotify}, {p.memfd, p.asKept}, {p.memfd, p.asKept2}} {
		if err := unix.Dup3(c.from, c.to, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range hs {
		if _, err := h.FD(); !errors.Is(err, unix.EBADF) {
			t.Errorf("FD: %v", err)
		}
	}
	CloseFD(fd)
	if !hs[0].tryRelease() {
		t.Error("a handle whose descriptor is lost has no release")
	}
	// New handles work.
	other, otherCalls := newHandle(t, 4096)
	if other.watch == watch {
		t.Error("the new handle uses an inotify instance of the program")
	}
	CloseFD(handleFD(t, other))
	expectReleased(t, other, otherCalls)
	for _, h := range hs {
		h.Close()
	}
	select {
	case <-watch.done:
	default:
		t.Error("the goroutine of the lost instance has not ended")
	}
	if len(calls) > 0 {
		t.Error("released without a reason")
	}
	return p
}
