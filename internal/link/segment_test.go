package link

import (
	"bytes"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// newSegment makes memory that other processes may map.
func newSegment(t testing.TB, size int) ([]byte, *mem.Segment) {
	t.Helper()
	fd, err := sys.NewMemfd("verbena-test", size)
	if err != nil {
		t.Fatal(err)
	}
	b, err := sys.MapMemfd(fd, size)
	if err != nil {
		t.Fatal(err)
	}
	s := mem.AddSegment(b, fd)
	t.Cleanup(func() {
		s.Close()
		if err := sys.Unmap(b); err != nil {
			t.Error(err)
		}
		if err := sys.CloseFD(fd); err != nil {
			t.Error(err)
		}
	})
	return b, s
}

// A payload in a segment is copied from the mapping once there is one, and fetched
// before that and when the segment is gone; what was given up is neither.
func TestSharedSegment(t *testing.T) {
	a, b := sharedPair(t)
	f := flowBetween(t, a, b)
	if err := a.Reach(f, 9); err != nil {
		t.Fatal(err)
	}
	_, _ = newSegment(t, 4096) // other segments before and behind must not be taken for this one
	memory, segment := newSegment(t, 1<<20)
	_, _ = newSegment(t, 8192)
	for i := range memory {
		memory[i] = byte(i*7 + i>>8)
	}
	const at, n = 12345, 64 << 10
	var k taker
	send := func() {
		t.Helper()
		tr := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: n / 4096, Len: n,
			Ticket: a.Ticket(), Payload: mem.List{Raw: [][]byte{memory[at:][:n]}}}
		if m, err := a.Send([]*train.Train{tr}); m != 1 || err != nil {
			t.Fatal(m, err)
		}
	}
	take := func() {
		t.Helper()
		before := len(k.psns) + k.bad
		for deadline := time.Now().Add(5 * time.Second); len(k.psns)+k.bad == before; {
			if time.Now().After(deadline) {
				t.Fatal("nothing came")
			}
			b.Poll(&k, 10)
		}
	}
	for deadline := time.Now().Add(5 * time.Second); ; {
		k.got = nil
		send()
		take()
		if !bytes.Equal(k.got, memory[at:][:n]) {
			t.Fatal("other bytes arrived")
		}
		if _, direct := b.Fetched(); direct >= 10 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it is never mapped")
		}
	}
	fetched, _ := b.Fetched()
	if fetched == 0 {
		t.Error("it was mapped before anybody knew of it")
	}
	// Given up before the receiver polls.
	send()
	a.GiveUpFetches()
	if take(); k.bad != 1 {
		t.Errorf("%d trains bad", k.bad)
	}
	send()
	take()

	segment.Close()
	send()
	take()
	if now, _ := b.Fetched(); now != fetched+1 || len(b.segments.byKey) != 0 {
		t.Errorf("%d fetched, want %d; %d segments mapped", now, fetched+1, len(b.segments.byKey))
	}
	if _, err := PassSegment(99999, false); err == nil {
		t.Error("a segment that nobody has")
	}
}

// A descriptor that was passed for reading cannot be written by.
func TestPassSegment(t *testing.T) {
	memory, _ := newSegment(t, 4096)
	id, off := mem.SegmentOf(memory[100:200])
	if id == 0 || off != 100 {
		t.Fatalf("segment %d, offset %d", id, off)
	}
	for _, outside := range [][]byte{make([]byte, 10), memory[:0:0][:0]} {
		if id, _ := mem.SegmentOf(outside); id != 0 && len(outside) > 0 {
			t.Errorf("%d bytes elsewhere are in segment %d", len(outside), id)
		}
	}
	fd, err := PassSegment(id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sys.CloseFD(fd) }()
	if _, err := sys.MapMemfd(fd, 4096); err == nil {
		t.Error("it can be written to")
	}
	b, err := sys.MapMemfdWhole(fd, false)
	if err != nil {
		t.Fatal(err)
	}
	memory[7] = 42
	if len(b) != 4096 || b[7] != 42 {
		t.Errorf("%d bytes, %d", len(b), b[7])
	}
	if err := sys.Unmap(b); err != nil {
		t.Error(err)
	}
}
