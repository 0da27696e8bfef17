//go:build cgo

package sys

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/forktest"
)

// While a child has inherited the memory, copy-on-write, the pinned pages are those that
// the parent sees: what either writes the other reads.
func TestPinnedAfterFork(t *testing.T) {
	pinTables(t, func(t *testing.T, table *pinTable) {
		const size = 64 << 10
		memory := anonymous(t, size)
		p := mustPinIn(t, table, memory)
		word := (*uint64)(unsafe.Pointer(&memory[0]))
		for round := range byte(5) {
			*word = uint64(round)
			child, err := forktest.Fork(word, -1, -1)
			if err != nil {
				t.Fatal(err)
			}
			if child.Word != uint64(round) {
				t.Errorf("the child sees %d", child.Word)
			}
			for i := range memory {
				memory[i] = round + byte(i)
			}
			got := make([]byte, size)
			if err := p.ReadAt(got, 0); err != nil || !bytes.Equal(got, memory) {
				t.Errorf("round %d: %v, or the pinned pages are not those that the parent has written", round, err)
			}
			for i := range got {
				got[i] ^= 0x55
			}
			if err := p.WriteAt(got, 0); err != nil || !bytes.Equal(got, memory) {
				t.Errorf("round %d: %v, or the parent does not see what was written to the pinned pages", round, err)
			}
			if err := child.End(); err != nil {
				t.Error(err)
			}
		}
	})
}

// While a child has inherited the memory, what another process writes to lent pages is what
// the parent sees.
func TestLentAfterFork(t *testing.T) {
	const size = 64 << 10
	memory := anonymous(t, size)
	l, b := lend(t, memory)
	word := (*uint64)(unsafe.Pointer(&memory[0]))
	for round := range byte(5) {
		child, err := forktest.Fork(word, -1, -1)
		if err != nil {
			t.Fatal(err)
		}
		memory[0] = 0xff // a page of its own for the parent, if the child has the pinned one
		text := bytes.Repeat([]byte{round + 1}, size)
		if !b.Write(l.Slot(), AddrOf(memory), 0, [][]byte{text}, 0) || !bytes.Equal(memory, text) {
			t.Errorf("round %d: the parent does not see what was written", round)
		}
		if err := child.End(); err != nil {
			t.Error(err)
		}
	}
}

// The child of a fork is recognised, and touches nothing of its parent's: not by an access,
// not by a registration, and not by Close.
func TestPinnedInChild(t *testing.T) {
	needPins(t)
	memory := make([]byte, 100)
	p, err := PinPages(uintptr(AddrOf(memory)), 100, true)
	if err != nil {
		t.Fatal(err)
	}
	// Go does not run in the child of a fork; C does, and looks at the word.
	child, err := forktest.Fork((*uint64)(unsafe.Pointer(forkWord)), -1, -1)
	if err != nil {
		t.Fatal(err)
	}
	if err := child.End(); err != nil {
		t.Error(err)
	}
	if child.Word != 0 || forked() {
		t.Errorf("the word is %d in the child, in the parent it says: %v", child.Word, forked())
	}
	pinned := pinnedKiB(t)
	atomic.StoreUint32(forkWord, 0) // as if this were the child
	_, pinErr := PinPages(uintptr(AddrOf(memory)), 100, true)
	for what, err := range map[string]error{
		"PinPages": pinErr,
		"ReadAt":   p.ReadAt(make([]byte, 10), 0),
		"WriteAt":  p.WriteAt([]byte("x"), 0),
		"Close":    p.Close(),
	} {
		if !errors.Is(err, unix.EBADF) {
			t.Errorf("%s in the child: %v", what, err)
		}
	}
	atomic.StoreUint32(forkWord, 1)
	if memory[0] != 0 {
		t.Error("the child has written to its parent's memory")
	}
	if got := pinnedKiB(t); got != pinned {
		t.Errorf("%d KiB are pinned, before the child %d", got, pinned)
	}
	// The parent's own Close, which in this process was the child's.
	p.bank.drain()
	if err := p.table.remove(p.bank, p.slot, p.slots, p.length); err != nil {
		t.Error(err)
	}
}
