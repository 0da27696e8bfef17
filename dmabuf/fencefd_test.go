package dmabuf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// readable reports whether poll finds a descriptor readable within a time.
func readable(t *testing.T, fd int, within time.Duration) bool {
	t.Helper()
	for end := time.Now().Add(within); ; {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, max(0, int(time.Until(end)/time.Millisecond)))
		if err == unix.EINTR {
			continue
		}
		check(t, err)
		return n == 1 && fds[0].Revents&unix.POLLIN != 0
	}
}

// fdOf returns a descriptor of a fence, which is closed when the test ends.
func fdOf(t *testing.T, f *Fence) int {
	t.Helper()
	fd, err := f.FD()
	check(t, err)
	t.Cleanup(func() { _ = sys.CloseFD(fd) })
	return fd
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not in two minutes", what)
		}
	}
}

// idle reports whether no descriptor of a fence is watched.
func idle() bool {
	fences.mu.Lock()
	defer fences.mu.Unlock()
	return fences.watch == nil && len(fences.byTag) == 0 && len(fences.byFile) == 0
}

func openFDs(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(list)
}

// A descriptor of a fence is readable once the fence is signalled, and says how, as often as it is asked.
func TestFenceFD(t *testing.T) {
	for _, c := range []struct {
		err, want error
	}{
		{nil, nil}, {syscall.EIO, syscall.EIO}, {errors.New("no number"), syscall.EIO},
		{fmt.Errorf("with a number: %w", syscall.ENOSPC), syscall.ENOSPC},
		{ib.ErrFenceFlushed, syscall.ECANCELED}, {context.Canceled, syscall.ECANCELED}, {context.DeadlineExceeded, syscall.ETIMEDOUT},
	} {
		f := NewFence()
		fd := fdOf(t, f)
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags %#x, %v", flags, err)
		}
		if readable(t, fd, 0) {
			t.Error("readable while it is pending")
		}
		if same, err := FenceFromFD(fd); same != f || err != nil {
			t.Errorf("%p, %v: should be the fence itself, %p", same, err, f)
		}
		second := fdOf(t, f)
		f.Signal(c.err)
		for _, fd := range []int{fd, second, fdOf(t, f)} { // the last one: after the signal
			if !readable(t, fd, 0) {
				t.Error("not readable when Signal has returned")
			}
			for range 2 {
				again, err := FenceFromFD(fd)
				check(t, err)
				if again == f || !again.Signaled() {
					t.Error("the fence of a descriptor is not signalled")
				}
				wantErr(t, "its error", again.Err(), c.want)
			}
		}
	}
	eventually(t, "the goroutine ends", idle)
}

// Descriptors that stand for no fence.
func TestFenceFromWrongFD(t *testing.T) {
	for _, fd := range []int{-1, 1 << 20} {
		_, err := FenceFromFD(fd)
		wantErr(t, "a descriptor that is not open", err, syscall.EBADF)
	}
	file, err := os.Open("/dev/null")
	check(t, err)
	defer func() { _ = file.Close() }()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer closeAll(pair[:])
	m, err := Alloc(MemoryConfig{Size: 4096})
	check(t, err)
	buffer, err := m.Buffer().FD()
	check(t, err)
	for what, fd := range map[string]int{"a file": int(file.Fd()), "a socket": pair[0], "a dma-buf": buffer} {
		before := openFDs(t)
		_, err := FenceFromFD(fd)
		wantErr(t, what, err, syscall.EINVAL)
		if n := openFDs(t); n > before {
			t.Errorf("%s: %d descriptors, were %d", what, n, before)
		}
	}
	check(t, sys.CloseFD(buffer))
	check(t, m.Close())
	// A process that lies: bytes that are no status, and a number that is no errno.
	for i, lie := range []string{"", "x", "12345678", "VFNC\xff\xff\xff\xff", "VFNC\x05\x00\x00\x00more"} {
		kept, given, err := sys.NewFencePair(fmt.Sprintf("lie-%d-%d", os.Getpid(), i))
		check(t, err)
		f, err := FenceFromFD(given)
		check(t, err)
		if lie != "" {
			check(t, unix.Sendto(kept, []byte(lie), 0, nil))
		}
		check(t, sys.CloseFD(kept))
		want := syscall.EPROTO
		if lie == "" {
			want = syscall.EOWNERDEAD
		}
		wantErr(t, fmt.Sprintf("%q", lie), f.Wait(background(t)), want)
		check(t, sys.CloseFD(given))
	}
	eventually(t, "the goroutine ends", idle)
}

// An eventfd is a fence that is signalled once it is readable. Signal gives the copy of a descriptor up.
func TestFenceOfEvent(t *testing.T) {
	before := openFDs(t)
	e, err := sys.NewEvent()
	check(t, err)
	f, err := FenceFromFD(e.FD())
	check(t, err)
	other, err := FenceFromFD(e.FD())
	check(t, err)
	if f == other || f.Signaled() {
		t.Error("one fence, or signalled")
	}
	other.Signal(syscall.ECANCELED)
	if f.Signaled() {
		t.Error("one fence has ended the other")
	}
	e.Signal()
	check(t, f.Wait(background(t)))
	check(t, e.Close())
	eventually(t, "nothing is left", func() bool { return idle() && openFDs(t) <= before })
}

// When all copies of a descriptor are closed, the process gives its own end up, and the fence stays.
func TestFenceFDClosed(t *testing.T) {
	before, f := openFDs(t), NewFence()
	for range 100 {
		fd, err := f.FD()
		check(t, err)
		dup, err := sys.DupFD(fd)
		check(t, err)
		check(t, sys.CloseFD(fd))
		if same, err := FenceFromFD(dup); same != f || err != nil {
			t.Fatalf("%p, %v", same, err)
		}
		check(t, sys.CloseFD(dup))
	}
	eventually(t, "nothing is left", func() bool { return idle() && openFDs(t) <= before })
	f.mu.Lock()
	n := len(f.calls)
	f.mu.Unlock()
	if n != 0 || !f.Signal(nil) {
		t.Errorf("%d calls are left, or the fence was signalled", n)
	}
}

// Many fences that are pending have one goroutine together.
func TestManyFenceFDs(t *testing.T) {
	n := 5000
	var limit unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	if most := int(min(limit.Cur, 1<<20))*10/32 - 100; most < n {
		n = most
	}
	t.Logf("%d fences that have descriptors, %d from descriptors", n, n)
	before := runtime.NumGoroutine()
	var given []int
	var own, from []*Fence
	var events []*sys.Event
	for i := range n {
		f := NewFence()
		fd, err := f.FD()
		check(t, err)
		given, own = append(given, fd), append(own, f)
		if i%10 == 0 { // there are not descriptors enough for one each
			e, err := sys.NewEvent()
			check(t, err)
			events = append(events, e)
		}
		f, err = FenceFromFD(events[i/10].FD())
		check(t, err)
		from = append(from, f)
	}
	if now := runtime.NumGoroutine(); now > before+1 {
		t.Errorf("%d goroutines, were %d", now, before)
	}
	ctx := background(t)
	for i, f := range from {
		if i%10 == 0 {
			events[i/10].Signal()
		}
		check(t, f.Wait(ctx))
	}
	for i, f := range own {
		if i%2 == 0 {
			f.Signal(nil)
			if !readable(t, given[i], 0) {
				t.Fatal("not readable")
			}
		}
	}
	closeAll(given)
	eventually(t, "nothing is left", idle)
	for _, e := range events {
		check(t, e.Close())
	}
}

// Signals, closes and imports of one descriptor at the same time.
func TestFenceFDRaces(t *testing.T) {
	rng := random(t)
	before := openFDs(t)
	for range 300 {
		f := NewFence()
		fd, err := f.FD()
		check(t, err)
		dup, err := sys.DupFD(fd)
		check(t, err)
		want := []error{nil, syscall.ENOSPC}[rng.IntN(2)]
		ctx := background(t)
		var wg sync.WaitGroup
		wg.Go(func() { f.Signal(want) })
		wg.Go(func() {
			got, err := FenceFromFD(fd)
			if err != nil {
				t.Errorf("importing: %v", err)
				return
			}
			if err := got.Wait(ctx); !errors.Is(err, want) {
				t.Errorf("%v, should be %v", err, want)
			}
			_ = sys.CloseFD(fd)
		})
		wg.Go(func() { _ = sys.CloseFD(dup) })
		wg.Wait()
	}
	eventually(t, "nothing is left", func() bool { return idle() && openFDs(t) <= before })
}

// Descriptors run out: FD and FenceFromFD fail, and leave nothing.
func TestFenceFDWithoutDescriptors(t *testing.T) {
	e, err := sys.NewEvent()
	check(t, err)
	f := NewFence()
	fd := fdOf(t, f)
	var limit unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	few := limit
	few.Cur = 3
	check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
	_, errFD := f.FD()
	_, errFrom := FenceFromFD(e.FD())
	check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	wantErr(t, "FD", errFD, syscall.EMFILE)
	wantErr(t, "FenceFromFD", errFrom, syscall.EMFILE)
	f.Signal(nil)
	if !readable(t, fd, 0) {
		t.Error("not readable")
	}
	eventually(t, "nothing is left", idle)
	check(t, e.Close())
}

// fenceChild is the variable that makes a test the process that has fences.
const fenceChild = "VERBENA_TEST_FENCE_CHILD"

// TestFenceProcess is the process of TestFenceOfProcess: it sends the descriptors of three fences, signals
// two of them when it is told to, and waits for its end.
func TestFenceProcess(t *testing.T) {
	if os.Getenv(fenceChild) == "" {
		return // it does its work in the child only
	}
	file := os.NewFile(3, "parent")
	c, err := net.FileConn(file)
	check(t, err)
	var fences []*Fence
	var fds []int
	for range 3 {
		f := NewFence()
		fences, fds = append(fences, f), append(fds, fdOf(t, f))
	}
	parent := c.(*net.UnixConn)
	check(t, sys.SendFDs(parent, []byte("fences"), fds...))
	buf := make([]byte, 16)
	_, err = parent.Read(buf)
	check(t, err)
	fences[0].Signal(nil)
	fences[1].Signal(syscall.ENOSPC)
	_, _ = parent.Read(buf) // until it is killed
}

// Fences of another process: signalled, failed, and lost with it.
func TestFenceOfProcess(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	child := exec.Command(os.Args[0], "-test.run=^TestFenceProcess$", "-test.v")
	child.Env = append(os.Environ(), fenceChild+"=1")
	child.ExtraFiles = []*os.File{os.NewFile(uintptr(pair[1]), "child")}
	child.Stderr = os.Stderr
	check(t, child.Start())
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	check(t, child.ExtraFiles[0].Close())
	file := os.NewFile(uintptr(pair[0]), "child's")
	conn, err := net.FileConn(file)
	check(t, err)
	check(t, file.Close())
	defer func() { _ = conn.Close() }()
	c := conn.(*net.UnixConn)
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	_, fds, err := sys.RecvFDs(c, make([]byte, 16))
	check(t, err)
	defer closeAll(fds)
	var list []*Fence
	for _, fd := range fds {
		f, err := FenceFromFD(fd)
		check(t, err)
		if f.Signaled() || readable(t, fd, 0) {
			t.Fatal("signalled")
		}
		list = append(list, f)
	}
	if len(list) != 3 {
		t.Fatalf("%d fences", len(list))
	}
	_, err = c.Write([]byte("signal"))
	check(t, err)
	ctx := background(t)
	check(t, list[0].Wait(ctx))
	wantErr(t, "the fence that has failed", list[1].Wait(ctx), syscall.ENOSPC)
	// The third one is in a reservation, and a merged one waits for it, when its process is killed.
	r := NewReservation()
	check(t, r.ImportFence(ctx, fds[2], Write))
	merged := MergeFences(list...)
	if r.Signaled(Write) || merged.Signaled() {
		t.Fatal("signalled")
	}
	check(t, child.Process.Kill())
	wantErr(t, "the fence of a process that was killed", list[2].Wait(ctx), ErrFenceLost)
	wantErr(t, "its errno", list[2].Err(), syscall.EOWNERDEAD)
	check(t, r.Wait(ctx, Write))
	wantErr(t, "the merged fence", merged.Wait(ctx), syscall.ENOSPC) // the first in the list
	if !readable(t, fds[2], time.Minute) {
		t.Error("the descriptor is not readable")
	}
	eventually(t, "nothing is left", idle)
}

// Descriptors of a reservation's fences: those of a class and before it, that are pending at the time.
func TestExportFence(t *testing.T) {
	r := NewReservation()
	var all [numUsages]*Fence
	locked(r, func() {
		for u := range all {
			all[u] = NewFence()
			r.Add(all[u], Usage(u))
		}
	})
	var fds [numUsages]int
	for u := range fds {
		var err error
		fds[u], err = r.ExportFence(Usage(u))
		check(t, err)
		defer func() { _ = sys.CloseFD(fds[u]) }()
	}
	locked(r, func() { r.Add(NewFence(), Kernel) }) // later: in none of them
	for u := range all {
		if readable(t, fds[u], 0) {
			t.Errorf("%v is readable too early", Usage(u))
		}
		all[u].Signal(nil)
		if !readable(t, fds[u], 0) {
			t.Errorf("%v is not readable", Usage(u))
		}
	}
	empty, err := NewReservation().ExportFence(Bookkeep)
	check(t, err)
	if !readable(t, empty, 0) {
		t.Error("no fences: not readable")
	}
	check(t, sys.CloseFD(empty))
	// Given up: it leaves nothing with the fences.
	locked(r, func() { r.Add(NewFence(), Read) })
	for range 50 {
		fd, err := r.ExportFence(Read)
		check(t, err)
		check(t, sys.CloseFD(fd))
	}
	eventually(t, "nothing is left", idle)
	for _, f := range r.Fences(Read) {
		f.mu.Lock()
		if len(f.calls) != 0 {
			t.Errorf("%d calls are left", len(f.calls))
		}
		f.mu.Unlock()
	}
	// A class that there is not, and descriptors that are none.
	wantErr(t, "a class", r.ImportFence(background(t), empty, numUsages), syscall.EINVAL)
	wantErr(t, "a descriptor", r.ImportFence(background(t), -1, Read), syscall.EBADF)
	f := NewFence()
	fd := fdOf(t, f)
	locked(r, func() { // the lock is another's
		done := make(chan error)
		go func() { done <- r.ImportFence(ended(), fd, Read) }()
		wantErr(t, "a lock that is held", <-done, syscall.ETIMEDOUT)
	})
	f.Signal(nil)
}

// The fences of a buffer that is imported from another process are that process's.
func TestRemoteFences(t *testing.T) {
	m, err := Alloc(MemoryConfig{Size: 4096})
	check(t, err)
	fd, err := m.Buffer().FD()
	check(t, err)
	b, err := fromProcess("test", fd, server.name()) // as another process would
	check(t, err)
	check(t, sys.CloseFD(fd))
	ctx := background(t)
	f := NewFence()
	locked(m.Buffer().Reservation(), func() { m.Buffer().Reservation().Add(f, Write) })
	exported, err := b.ExportFence(ctx, Write)
	check(t, err)
	wantErr(t, "a wait", b.WaitFences(ended(), Write), syscall.ETIMEDOUT)
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	wantErr(t, "a wait", b.BeginCPUAccess(short, FromDevice), syscall.ETIMEDOUT)
	cancel()
	if readable(t, exported, 0) {
		t.Error("readable")
	}
	mine := NewFence()
	check(t, b.ImportFence(ctx, fdOf(t, mine), Read))
	if got := len(m.Buffer().Reservation().Fences(Read)); got != 2 {
		t.Errorf("%d fences, should be 2", got)
	}
	wantErr(t, "a descriptor", b.ImportFence(ctx, 0, Read), syscall.EINVAL)
	f.Signal(nil)
	check(t, b.WaitFences(ctx, Write))
	if !readable(t, exported, time.Minute) {
		t.Error("not readable")
	}
	check(t, sys.CloseFD(exported))
	mine.Signal(nil)
	check(t, b.WaitFences(ctx, Read))
	check(t, m.Close())
	eventually(t, "the exporter has gone", func() bool {
		_, err := b.ExportFence(ctx, Write)
		return errors.Is(err, syscall.ENODEV) || err == nil
	})
	b.Put()
	eventually(t, "nothing is left", idle)
}

// What a request signals: a fence of this process, and an eventfd.
func TestFenceToSignal(t *testing.T) {
	before := openFDs(t)
	f := NewFence()
	fd, err := f.FD()
	check(t, err)
	same, giveUp, err := FenceToSignal(fd)
	check(t, err)
	giveUp()
	if same != f || f.Signaled() {
		t.Error("not the fence itself, or signalled")
	}
	if signaled, failure, err := FenceStatus(fd); signaled || failure != nil || err != nil {
		t.Errorf("%v, %v, %v: should be pending", signaled, failure, err)
	}
	same.Signal(syscall.ENOSPC)
	signaled, failure, err := FenceStatus(fd)
	check(t, err)
	wantErr(t, "the status", failure, syscall.ENOSPC)
	if !signaled {
		t.Error("pending")
	}
	_, _, err = FenceToSignal(fd)
	wantErr(t, "a fence that is signalled", err, syscall.EINVAL)
	check(t, sys.CloseFD(fd))
	_, _, err = FenceToSignal(-1)
	wantErr(t, "no descriptor", err, syscall.EBADF)
	_, _, err = FenceStatus(-1)
	wantErr(t, "no descriptor", err, syscall.EBADF)
	_, _, err = FenceStatus(0)
	wantErr(t, "another descriptor", err, syscall.EINVAL)
	kept, given, err := sys.NewFencePair(fmt.Sprintf("other-%d", os.Getpid())) // as of another process
	check(t, err)
	_, _, err = FenceToSignal(given)
	wantErr(t, "a fence of another process", err, syscall.EINVAL)
	check(t, sys.CloseFD(given))
	check(t, sys.CloseFD(kept))
	e, err := sys.NewEvent()
	check(t, err)
	for _, signals := range []bool{false, true} {
		f, giveUp, err := FenceToSignal(e.FD())
		check(t, err)
		if signals {
			f.Signal(syscall.EIO)
		}
		giveUp()
		if got := readable(t, e.FD(), 0); got != signals {
			t.Errorf("readable: %v, should be %v", got, signals)
		}
	}
	waits, err := FenceFromFD(e.FD())
	check(t, err)
	if !waits.Signaled() {
		t.Error("pending")
	}
	e.Drain()
	waits, err = FenceFromFD(e.FD())
	check(t, err)
	waits.Forget()
	wantErr(t, "a fence that was forgotten", waits.Err(), syscall.ECANCELED)
	f = NewFence()
	if f.Forget(); f.Signaled() {
		t.Error("a fence of one's own is forgotten")
	}
	check(t, e.Close())
	eventually(t, "nothing is left", func() bool { return idle() && openFDs(t) <= before })
}
