package mem_test

// Memory of another process: a child, which maps files of the test's, so that the test
// sees them too, and enters guards, in which it may die.

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
	"github.com/verbena-rdma/verbena/internal/sys"
)

const importedChild = "VERBENA_TEST_FOREIGN_CHILD"

// other is the child.
type other struct {
	tb  testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// TestImportedChild is the child: it does one command for each line of its input.
func TestImportedChild(t *testing.T) {
	if os.Getenv(importedChild) == "" {
		return
	}
	mapped := map[uint64][]byte{}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var what string
		var n uint64
		fmt.Sscan(in.Text(), &what, &n)
		fd, err := 0, error(nil)
		if what != "unmap" {
			if fd, err = unix.Open(fmt.Sprintf("/proc/%d/fd/%d", os.Getppid(), n), unix.O_RDWR, 0); err != nil {
				t.Fatal(err)
			}
		}
		switch what {
		case "map":
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				t.Fatal(err)
			}
			b := mmap(t, fd, uint64(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			mapped[uint64(addrOf(b))] = b
			fmt.Println("reply", addrOf(b))
			unix.Close(fd)
		case "unmap":
			fmt.Println("reply", len(mapped[n]), unix.Munmap(mapped[n]))
			delete(mapped, n)
		case "enter":
			g, err := mem.OpenGuard(fd)
			if err != nil {
				t.Fatal(err)
			}
			_, kind := g.Enter()
			fmt.Println("reply", kind == mem.FaultNone)
		}
	}
}

func startOther(tb testing.TB) *other {
	tb.Helper()
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	o := &other{tb: tb, cmd: exec.Command(exe, "-test.run=^TestImportedChild$")}
	o.cmd.Env = append(os.Environ(), importedChild+"=1")
	o.cmd.Stderr = os.Stderr
	if o.in, err = o.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	o.out = bufio.NewScanner(out)
	if err := o.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(o.kill)
	return o
}

func (o *other) kill() {
	_ = o.cmd.Process.Kill()
	_ = o.cmd.Wait()
}

// ask has the child do something and returns what it answers.
func (o *other) ask(format string, args ...any) (answer string) {
	o.tb.Helper()
	fmt.Fprintf(o.in, format+"\n", args...)
	for o.out.Scan() {
		if _, err := fmt.Sscanf(o.out.Text(), "reply %s", &answer); err == nil {
			return answer
		}
	}
	o.tb.Fatal("the child says nothing")
	return ""
}

// noLink is a connection that never ends.
type noLink struct{ io.Closer }

func (noLink) Close() error { return nil }
func (noLink) HungUp() bool { return false }

// imported is memory of the child, imported here.
type imported struct {
	*mem.Imported
	guard *mem.Guard // the owner's end
	fd    int        // the user's
	file  int
	seen  []byte
	addr  uint64
}

// move moves the memory, as its owner would.
func (f *imported) move(tb testing.TB) func(poison byte) {
	move := movesInFile(tb, f.file, f.seen)
	return func(poison byte) {
		f.guard.Suspend()
		move(poison)
		f.guard.Resume()
	}
}

func (o *other) memory(n uint64) *imported {
	o.tb.Helper()
	file := memfd(o.tb, n)
	f := &imported{file: file, seen: mmap(o.tb, file, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)}
	if _, err := fmt.Sscan(o.ask("map %d", file), &f.addr); err != nil {
		o.tb.Fatal(err)
	}
	var err error
	if f.guard, f.fd, err = mem.NewGuard(); err != nil {
		o.tb.Fatal(err)
	}
	user, err := mem.OpenGuard(f.fd)
	if err != nil {
		o.tb.Fatal(err)
	}
	fd, err := sys.OpenMemory(o.cmd.Process.Pid)
	if err != nil {
		o.tb.Fatal(err)
	}
	f.Imported = mem.NewImported(mem.ImportedConfig{Memory: fd, Addr: f.addr, Length: n, Guard: user, Link: noLink{}})
	return f
}

func (f *imported) free() {
	unix.Munmap(f.seen)
	unix.Close(f.file)
	unix.Close(f.fd)
	f.guard.Close()
}

// Memory of another process passes the suite, but for atomics.
func TestConformanceOfImported(t *testing.T) {
	o := startOther(t)
	for _, how := range []memtest.Constructor{{Name: "imported"}, {Name: "window", Window: ib.MWType2}, {Name: "indirect", Shape: memtest.List}} {
		how.NoAtomics = true
		how.New = func(tb testing.TB, n uint64, _ ib.Access) memtest.Memory {
			f := o.memory(n)
			return memtest.Memory{Backing: f.Imported, Bytes: f.seen, Move: f.move(tb), Free: func() {
				o.ask("unmap %d", f.addr)
				f.free()
			}}
		}
		memtest.Run(t, how)
	}
}

// The owner moves memory while its importer reads and writes there, without any message
// between them: no poison is read, and what was written is there at the end.
func TestImportedMovedByItsOwner(t *testing.T) {
	const n, poison = 3*4096 + 80, 0xdb
	rng := rand.New(rand.NewPCG(memtest.Seed(t), 0))
	f := startOther(t).memory(n)
	_, list := importedRegion(t, f)
	move := f.move(t)
	var stop atomic.Bool
	var wg sync.WaitGroup
	var reads, writes atomic.Int64
	insist := func(copy func() mem.Fault) {
		if fault := copy(); !fault.OK() {
			t.Error(fault)
			stop.Store(true)
		}
	}
	var readStream, writeStream mem.Stream
	last := byte(0)
	wg.Go(func() {
		for b := byte(1); !stop.Load(); b = b%100 + 1 {
			msg := bytes.Repeat([]byte{b}, n)
			insist(func() mem.Fault {
				fault, _ := mem.CopyWaiting(list(ib.AccessRemoteWrite), &mem.List{Raw: [][]byte{msg}}, n, true, &writeStream)
				return fault
			})
			last = b
			writes.Add(1)
		}
	})
	wg.Go(func() {
		for got := make([]byte, n); !stop.Load(); reads.Add(1) {
			insist(func() mem.Fault {
				fault, _ := mem.CopyWaiting(&mem.List{Raw: [][]byte{got}}, list(ib.AccessRemoteRead), n, true, &readStream)
				return fault
			})
			if bytes.IndexByte(got, poison) >= 0 {
				t.Error("poison was read")
				stop.Store(true)
			}
		}
	})
	for moves := 0; !stop.Load() && (moves < 200 || reads.Load() < 20 || writes.Load() < 20); moves++ {
		move(poison)
		time.Sleep(time.Duration(rng.IntN(100)) * time.Microsecond)
	}
	stop.Store(true)
	wg.Wait()
	if !bytes.Equal(f.seen, bytes.Repeat([]byte{last}, n)) {
		t.Error("what was written last is not there")
	}
}

// brokenLink is a connection whose other end has gone.
type brokenLink struct{ noLink }

func (brokenLink) HungUp() bool { return true }

// An access that waits for memory which its owner has suspended ends when the region is closed
// meanwhile, and when the owner has ended.
func TestImportedSuspendedForGood(t *testing.T) {
	for _, link := range []mem.ImportedLink{noLink{}, brokenLink{}} {
		owner, fd, err := mem.NewGuard()
		if err != nil {
			t.Fatal(err)
		}
		user, err := mem.OpenGuard(fd)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		memory, err := sys.OpenMemory(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		table := mem.NewTable(mem.TableConfig{})
		b := mem.NewImported(mem.ImportedConfig{Memory: memory, Addr: 4096, Length: 4096, Guard: user, Link: link})
		r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: 4096, Backing: b})
		if err != nil {
			t.Fatal(err)
		}
		owner.Suspend()
		var stream mem.Stream
		waited := make(chan mem.Fault)
		go func() {
			l := mem.List{Table: table, Actor: mem.Actor{PD: 1}, Access: ib.AccessLocalWrite, SGEs: []ib.SGE{{Length: 8, LKey: r.Key()}}}
			f, _ := mem.CopyWaiting(&l, &mem.List{Raw: [][]byte{make([]byte, 8)}}, 8, true, &stream)
			waited <- f
		}()
		want := mem.FaultStale // after the owner's end
		if !link.HungUp() {
			select {
			case f := <-waited:
				t.Fatalf("it did not wait: %v", f)
			case <-time.After(3 * time.Millisecond):
			}
			want = mem.FaultDead
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		if f := <-waited; f.Kind != want {
			t.Errorf("%v, should be %v", f, want)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		owner.Close()
	}
}

var importedUser = mem.Actor{PD: 1, QPN: 2}

// importedRegion registers imported memory, and returns a list of all of it.
func importedRegion(t *testing.T, f *imported) (*mem.Table, func(ib.Access) *mem.List) {
	t.Helper()
	table := mem.NewTable(mem.TableConfig{})
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, IOVA: f.addr, Length: f.Len(), Backing: f.Imported})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(r.Close(), r.Close()); err != nil {
			t.Error(err)
		}
		f.free()
	})
	return table, func(access ib.Access) *mem.List {
		return &mem.List{Table: table, Actor: importedUser, Access: access, SGEs: []ib.SGE{{Addr: f.addr, Length: uint32(f.Len()), LKey: r.Key()}}}
	}
}

// Only its engine reaches the memory, and has no atomics.
func TestImportedIsNotAddressed(t *testing.T) {
	f := startOther(t).memory(8192)
	table, list := importedRegion(t, f)
	l := list(0)
	var pins mem.Pins
	if out, fault, whole := mem.Gather(l, 8192, make([][]byte, 0, 4), &pins); whole || !fault.Staged() || len(out) != 0 || pins.Len() != 0 {
		t.Errorf("%d pieces, %v, %v, %d sections", len(out), fault, whole, pins.Len())
	}
	key := l.SGEs[0].LKey
	if table.IsHost(key, f.addr, 8, 0, importedUser) {
		t.Error("it counts as memory of this process")
	}
	table.Whole(key, f.addr, 0, importedUser, func(*mem.Region, []byte) { t.Error("it can be had whole") })
	var stream mem.Stream
	if _, fault := mem.AtomicWaiting(table, importedUser, key, f.addr, mem.Store, 0, 1, &stream, mem.Link{}); fault.Kind != mem.FaultAccess {
		t.Errorf("a store of a word: %v", fault)
	}
}

// refBytes is a source in another process.
type refBytes struct{ b []byte }

func (f refBytes) Mapped(_, _ uint64) []byte { return nil }
func (f refBytes) Still() bool               { return true }
func (f refBytes) ReadRef(b []byte, off uint64) (ok, own bool) {
	copy(b, f.b[off:])
	return true, false
}

// From one other process to another one.
func TestImportedFromReference(t *testing.T) {
	const n = 2*mem.Quantum + 77
	f := startOther(t).memory(n)
	_, list := importedRegion(t, f)
	want := bytes.Repeat([]byte("far away, "), n/10+1)[:n]
	src := &mem.List{Ref: refBytes{want}, RefLen: n - 64, Raw: [][]byte{want[n-64:]}}
	if fault, side := mem.CopyWaiting(list(ib.AccessLocalWrite), src, n, true, new(mem.Stream)); !fault.OK() {
		t.Fatal(side, fault)
	}
	if !bytes.Equal(f.seen, want) {
		t.Error("other bytes came")
	}
	f.guard.Shut()
	if fault, side := mem.CopyWaiting(list(ib.AccessLocalWrite), src, n, true, new(mem.Stream)); fault.Kind != mem.FaultDead || side != mem.Dst {
		t.Errorf("after the end: %v: %v", side, fault)
	}
}

// When the owner has shut the guard and waited, the memory changes no more, whatever accesses
// were under way.
func TestImportedRevoked(t *testing.T) {
	o := startOther(t)
	for range 20 {
		const n = mem.Quantum + 4096
		f := o.memory(n)
		_, list := importedRegion(t, f)
		var running, wg sync.WaitGroup
		for i := range 4 {
			running.Add(1)
			wg.Go(func() {
				b := bytes.Repeat([]byte{byte(i + 1)}, n)
				started := sync.OnceFunc(running.Done)
				for round := 0; ; round++ {
					dst, src, want := list(ib.AccessRemoteWrite), &mem.List{Raw: [][]byte{b}}, mem.Dst
					if i == 3 {
						dst, src, want = src, list(ib.AccessRemoteRead), mem.Src
					}
					fault, side := mem.CopyWaiting(dst, src, n, true, new(mem.Stream))
					started()
					if !fault.OK() {
						if fault.Kind != mem.FaultDead || side != want {
							t.Errorf("%v: %v", side, fault)
						}
						return
					}
				}
			})
		}
		running.Wait()
		f.guard.Shut()
		f.guard.Await(func() bool { return false })
		before := bytes.Clone(f.seen)
		wg.Wait()
		if !bytes.Equal(before, f.seen) {
			t.Fatal("bytes changed after the end")
		}
	}
}

// What is not mapped there, or not any more, is a fault, and so is all when the owner has
// ended.
func TestImportedGone(t *testing.T) {
	o := startOther(t)
	f, g := o.memory(3*4096), o.memory(4096)
	table, list := importedRegion(t, f)
	_, other := importedRegion(t, g)
	buf := &mem.List{Raw: [][]byte{make([]byte, 3*4096)}}
	try := func(what string, l func(ib.Access) *mem.List, n uint64, want mem.FaultKind) {
		t.Helper()
		if fault, _ := mem.CopyWaiting(l(ib.AccessLocalWrite), buf, n, true, new(mem.Stream)); fault.Kind != want {
			t.Errorf("%s, written to: %v", what, fault)
		}
		if fault, _ := mem.CopyWaiting(buf, l(0), n, true, new(mem.Stream)); fault.Kind != want {
			t.Errorf("%s, read from: %v", what, fault)
		}
	}
	try("all there", list, 3*4096, mem.FaultNone)
	o.ask("unmap %d", f.addr)
	try("unmapped", list, 3*4096, mem.FaultStale)
	try("other memory", other, 4096, mem.FaultNone)
	o.kill()
	for fault := (mem.Fault{}); fault.OK(); { // memory outlives its threads by a moment, on many cores
		fault, _ = mem.CopyWaiting(buf, other(0), 4096, true, new(mem.Stream))
	}
	try("the owner has ended", other, 4096, mem.FaultStale)
	if table.StaleFaults() == 0 {
		t.Error("nothing was counted")
	}
}

// The owner waits for a live user whose access is under way, and not for one that has died
// during an access, whatever it has written into the guard.
func TestGuardOfTheDead(t *testing.T) {
	o := startOther(t)
	g, fd, err := mem.NewGuard()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { g.Close(); unix.Close(fd) }()
	if o.ask("enter %d", fd) != "true" {
		t.Fatal("nobody may enter")
	}
	g.Shut()
	if o.ask("enter %d", fd) != "false" {
		t.Error("one may enter what is shut")
	}
	var ended atomic.Bool
	asked, done := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(done)
		g.Await(func() bool {
			select {
			case asked <- struct{}{}:
			default:
			}
			return ended.Load()
		})
	}()
	for range 3 {
		<-asked
	}
	select {
	case <-done:
		t.Fatal("nobody waited for the user")
	case <-time.After(time.Millisecond):
	}
	o.kill()
	ended.Store(true)
	<-done
}
