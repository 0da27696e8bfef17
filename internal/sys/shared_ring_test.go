package sys

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// lend lends memory by new rings, until the test ends, and borrows it in the same process.
func lend(t *testing.T, memory []byte) (*Loan, *BorrowedRings) {
	t.Helper()
	rings := newLentRings(t)
	l, err := rings.Lend(mustPin(t, memory))
	if err != nil {
		t.Fatal(err)
	}
	b, err := BorrowRings(os.Getpid(), rings.FDs(), func() bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.Close()
		if err := l.TakeBack(); err != nil {
			t.Error(err)
		}
	})
	return l, b
}

func newLentRings(t *testing.T) *LentRings {
	t.Helper()
	needPins(t)
	rings, err := NewLentRings()
	if errors.Is(err, unix.ENOSYS) {
		t.Skipf("kernel: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rings.Close)
	return rings
}

// Bytes arrive where they belong, and nowhere else, whatever their number and place.
func TestLentWrite(t *testing.T) {
	const size = 3 << 20
	memory := anonymous(t, size)
	l, b := lend(t, memory)
	random := pinSeed(t)
	source := make([]byte, 2<<20)
	for i := range source {
		source[i] = byte(random.Uint32())
	}
	want := make([]byte, size)
	for _, n := range []int{1, 7, 8, 9, 15, 16, 1024, 1025, 4095, 4096, 4097, 64 << 10, 256<<10 + 1, 1 << 20, 2 << 20} {
		for _, off := range []int{0, 1, 7, 4091, 4096, size - n} {
			from := random.IntN(len(source) - n + 1)
			cut := random.IntN(n + 1)
			src := [][]byte{source[from:][:cut], source[from+cut:][:n-cut]}
			copy(want[off:], source[from:][:n])
			if !b.Write(l.Slot(), AddrOf(memory), uint64(off), src, off) {
				t.Fatalf("%d bytes at %d are refused", n, off)
			}
			if !bytes.Equal(memory, want) {
				t.Fatalf("%d bytes at %d: other bytes are there", n, off)
			}
			back := make([]byte, n)
			if ok := b.Read(l.Slot(), AddrOf(memory), uint64(off), back, off); ok != (n <= MaxBorrowedRead) || ok && !bytes.Equal(back, want[off:][:n]) {
				t.Fatalf("%d bytes at %d: %v, or other bytes come back", n, off, ok)
			}
		}
	}
	for name, ok := range map[string]bool{
		"READ of no bytes":    b.Read(l.Slot(), AddrOf(memory), 0, nil, 0),
		"READ beyond the end": b.Read(l.Slot(), AddrOf(memory), size-4, make([]byte, 8), 0),
		"READ to no memory":   b.Read(l.Slot(), AddrOf(memory), 0, readOnly(t), 0),
		"no bytes":            b.Write(l.Slot(), AddrOf(memory), 0, nil, 0),
		"beyond the end":      b.Write(l.Slot(), AddrOf(memory), size-8, [][]byte{source[:4096]}, 0),
		"behind the end":      b.Write(l.Slot(), AddrOf(memory), size, [][]byte{source[:8]}, 0),
		"before the start":    b.Write(l.Slot(), AddrOf(memory)-8, 0, [][]byte{source[:8]}, 0),
		"another slot":        b.Write(l.Slot()+1, AddrOf(memory), 0, [][]byte{source[:8]}, 0),
		"no slot":             b.Write(lentSlots, AddrOf(memory), 0, [][]byte{source[:8]}, 0),
		"into another buffer": b.Write(l.Slot(), AddrOf(memory), uringMaxBuffer-4, [][]byte{source[:8]}, 0),
	} {
		if ok {
			t.Errorf("%s: it was written", name)
		}
	}
	if !bytes.Equal(memory, want) {
		t.Error("what was refused has changed the memory")
	}
}

// readOnly maps a page that may not be written.
func readOnly(t *testing.T) []byte {
	b := anonymous(t, 4096)
	must(t, unix.Mprotect(b, unix.PROT_READ))
	return b
}

// Once the loan is taken back nothing is written. What is mapped at the address of the pages
// meanwhile is never written to.
func TestLentAndTakenBack(t *testing.T) {
	memory := anonymous(t, 8192)
	l, b := lend(t, memory)
	text := [][]byte{[]byte("sixteen bytes of")}
	copyOver(t, memory)
	if !b.Write(l.Slot(), AddrOf(memory), 100, text, 0) {
		t.Error("the pinned pages cannot be written to")
	}
	if !bytes.Equal(memory, make([]byte, 8192)) {
		t.Error("what was mapped over the pages is written to")
	}
	if err := l.TakeBack(); err != nil {
		t.Fatal(err)
	}
	if b.Read(l.Slot(), AddrOf(memory), 100, make([]byte, 8), 0) {
		t.Error("it was read after the loan had ended")
	}
	if b.Write(l.Slot(), AddrOf(memory), 100, text, 0) {
		t.Error("it was written after the loan had ended")
	}
	second, err := l.rings.Lend(mustPin(t, memory))
	if err != nil {
		t.Fatal(err)
	}
	if b.Write(l.Slot(), AddrOf(memory), 100, text, 0) || second.Slot() == l.Slot() {
		t.Error("it was written by the slot of a loan that is not freed, which another loan has got")
	}
	if !l.Free() {
		t.Error("the loan cannot be freed")
	}
	if !b.Write(second.Slot(), AddrOf(memory), 100, text, 1) || !bytes.Equal(memory[100:116], text[0]) {
		t.Error("the pages that were lent next are not written to")
	}
	if err := second.TakeBack(); err != nil {
		t.Error(err)
	}
}

// copyOver maps new memory over some.
func copyOver(t *testing.T, memory []byte) {
	t.Helper()
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(AddrOf(memory)), uintptr(len(memory)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		t.Fatal(errno)
	}
}

// Pages that are closed cannot be lent, a table holds a limited number of loans, and what has
// another file at the descriptor is not taken for a ring.
func TestLendRefused(t *testing.T) {
	rings := newLentRings(t)
	memory := anonymous(t, 4096)
	closed, err := PinPages(uintptr(AddrOf(memory)), 4096, true)
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := rings.Lend(closed); !errors.Is(err, unix.EBADF) {
		t.Errorf("pages that are closed: %v", err)
	}
	p := mustPin(t, memory)
	var loans []*Loan
	for range lentSlots {
		l, err := rings.Lend(p)
		if err != nil {
			t.Fatal(err)
		}
		loans = append(loans, l)
	}
	if _, err := rings.Lend(p); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("one loan too many: %v", err)
	}
	for _, l := range loans {
		if err := errors.Join(l.TakeBack(), l.TakeBack()); err != nil {
			t.Error(err)
		}
	}
	if _, err := rings.Lend(p); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the slots of loans that are not freed: %v", err)
	}
	if !loans[7].Free() {
		t.Error("a loan cannot be freed")
	}
	if l, err := rings.Lend(p); err != nil || l.Slot() != loans[7].Slot() {
		t.Errorf("after one was freed: %v, %v", l, err)
	} else if err := l.TakeBack(); err != nil {
		t.Error(err)
	}
	yes := func() bool { return true }
	for name, c := range map[string]struct {
		fds   []int
		still func() bool
		want  error
	}{
		"no ring":          {nil, yes, unix.EINVAL},
		"too many":         {make([]int, MaxLentRings+1), yes, unix.EINVAL},
		"not a descriptor": {[]int{1 << 20}, yes, unix.EBADF},
		"gone meanwhile":   {rings.FDs(), func() bool { return false }, unix.ESTALE},
	} {
		if b, err := BorrowRings(os.Getpid(), c.fds, c.still); !errors.Is(err, c.want) || b != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A process that is stopped at any moment does not keep TakeBack from returning, and writes
// nothing when it goes on.
func TestLentToStoppedProcess(t *testing.T) {
	const size = 64 << 10
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	rings := newLentRings(t)
	random := pinSeed(t)
	signs := anonymous(t, 8) // counts the rounds of the other process's loop
	memory := anonymous(t, size)
	sign, err := rings.Lend(mustPin(t, signs))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sign.TakeBack() }()
	pages := mustPin(t, memory)
	loan, err := rings.Lend(pages)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"=ring-writer", fmt.Sprintf("VERBENA_RINGS=%d %d %d %d %d %d %s", os.Getpid(),
		sign.Slot(), AddrOf(signs), loan.Slot(), AddrOf(memory), size, strings.Trim(fmt.Sprint(rings.FDs()), "[]")))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = in.Close() // which ends the process
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	count := func() uint64 { return binary.NativeEndian.Uint64(signs) }
	turns := func(n uint64) {
		for from := count(); count()-from < n; {
			sysYield()
		}
	}
	pattern := bytes.Repeat([]byte{0xa5}, size)
	for round := range rounds {
		turns(2)
		if bytes.Equal(memory, pattern) {
			t.Fatalf("round %d: the other process writes nothing", round)
		}
		for range random.IntN(20_000) {
			atomic.AddUint64(&spun, 1)
		}
		must(t, cmd.Process.Signal(syscall.SIGSTOP))
		if random.IntN(2) == 0 {
			awaitStopped(t, cmd.Process.Pid)
		}
		must(t, loan.TakeBack())
		copy(memory, pattern) // it is the program's again
		must(t, cmd.Process.Signal(syscall.SIGCONT))
		turns(5)
		if !bytes.Equal(memory, pattern) {
			t.Fatalf("round %d: the memory is written to after TakeBack", round)
		}
		slot := loan.Slot()
		loan.Free() // the other process has gone on: it uses the slot for later loans alone
		if loan, err = rings.Lend(pages); err != nil || loan.Slot() != slot {
			t.Fatal(loan, err)
		}
	}
	must(t, loan.TakeBack())
}

var spun uint64

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// awaitStopped waits until a process is stopped.
func awaitStopped(t *testing.T, pid int) {
	t.Helper()
	for {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		must(t, err)
		if _, rest, _ := bytes.Cut(b, []byte(") ")); len(rest) > 0 && rest[0] == 'T' {
			return
		}
		sysYield()
	}
}

func sysYield() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// ringWriterChild writes to the memory of its parent until its input ends, and counts.
func ringWriterChild() error {
	var pid, signSlot, slot, size int
	var signs, memory uint64
	var fds [MaxLentRings]int
	n, _ := fmt.Sscan(os.Getenv("VERBENA_RINGS"), &pid, &signSlot, &signs, &slot, &memory, &size, &fds[0], &fds[1], &fds[2], &fds[3])
	if n < 7 {
		return fmt.Errorf("%d arguments", n)
	}
	b, err := BorrowRings(pid, fds[:n-6], func() bool { return true })
	if err != nil {
		return err
	}
	var ended atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		ended.Store(true)
	}()
	for i := uint64(1); !ended.Load(); i++ {
		source := bytes.Repeat([]byte{byte(i % 100)}, size) // never the bytes that the parent expects
		_ = b.Write(slot, memory, 0, [][]byte{source}, 0)   // fails while the memory is not lent
		_ = b.Write(slot, memory, 8, [][]byte{source[:8]}, 1)
		if !b.Write(signSlot, signs, 0, [][]byte{binary.NativeEndian.AppendUint64(nil, i)}, 1) {
			return errors.New("the count cannot be written")
		}
	}
	return nil
}

// Rings for other processes, and rings of other processes, take a small part of the descriptors
// that this process may have, however many peers there are.
func TestRingsLeaveDescriptors(t *testing.T) {
	newLentRings(t) // or skips
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(MaxLentRings))
	var old unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	const limit = 1024
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: old.Max}))
	defer func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	var lent []*LentRings
	var borrowed []*BorrowedRings
	closeAll := func() {
		for _, s := range lent {
			s.Close()
		}
		for _, s := range borrowed {
			s.Close()
		}
		lent, borrowed = nil, nil
	}
	defer closeAll()
	for range 2 { // what is closed counts no more
		fds, peers := 0, 0
		for ; peers < 255; peers++ {
			s, err := NewLentRings()
			if err != nil {
				break
			}
			lent = append(lent, s)
			fds += len(s.FDs())
			b, err := BorrowRings(os.Getpid(), s.FDs(), func() bool { return true })
			must(t, err)
			borrowed = append(borrowed, b)
			fds += len(b.rings)
		}
		if first := len(lent[0].FDs()); first != MaxLentRings || peers < 16 || fds > limit/4 {
			t.Fatalf("%d rings for the first of %d peers; the process has %d descriptors for all of them, of %d", first, peers, fds, limit)
		}
		if _, err := NewLentRings(); !errors.Is(err, unix.EMFILE) {
			t.Errorf("one more peer: %v", err)
		}
		closeAll()
	}
}
