package dmabuf

import (
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// places returns the place of the memory's bytes, and the one that is kept for the next move.
func (m *Memory) places() (at, spare *place) {
	locked(m.buffer.resv, func() { at = m.place })
	m.spare.mu.Lock()
	defer m.spare.mu.Unlock()
	return at, m.spare.place
}

// A place that only this process has seen is poisoned, and is the next move's; for a moment.
func TestSpare(t *testing.T) {
	m, want := alloc(t, MemoryConfig{Segments: 3})
	defer m.finish(t)
	q := attachQuick(t, m, false)
	defer q.leave()
	q.mapped(t)
	first, _ := m.places()
	for range 3 { // there and back
		check(t, m.Move(background(t)))
		second, spare := m.places()
		if spare != first {
			t.Fatal("the place is not kept")
		}
		for i, b := range spare.b {
			if b != poison {
				t.Fatalf("byte %d of the spare place is %#x", i, b)
			}
		}
		if string(q.mapped(t)) != string(want) {
			t.Error("the importer sees other bytes")
		}
		first = second
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, spare := m.places(); spare == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the place is still kept")
		}
	}
	m.want(t, want)
}

// A place that another process may have mapped is given up: a peer with a grant, an importer there, and
// places whose memory is wanted for something else.
func TestNoSpare(t *testing.T) {
	for what, do := range map[string]func(m *Memory, q *quick){
		"shown by an importer": func(m *Memory, q *quick) {
			if _, _, ok := q.table.Place(); !ok {
				t.Error("there is no file")
			}
			check(t, m.Move(background(t)))
		},
		"shown to another process": func(m *Memory, _ *quick) {
			fd, err := m.Buffer().FD()
			check(t, err)
			b, err := fromProcess("test", fd, server.name())
			check(t, err)
			check(t, sys.CloseFD(fd))
			a, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) {}})
			check(t, err)
			locked(b.Reservation(), func() { a.Unmap(mapIt(t, a, Bidirectional), Bidirectional) })
			check(t, m.Move(background(t)))
			a.Detach()
			b.Put()
			for more := true; more; time.Sleep(time.Millisecond) { // the connection ends
				locked(m.buffer.resv, func() { more = len(m.buffer.attachments) > 1 })
			}
			for m.buffer.refs.Load() > 2 { // the connection's
				time.Sleep(time.Millisecond)
			}
		},
		"evicted": func(m *Memory, _ *quick) { check(t, m.Evict(background(t))) },
		"revoked": func(m *Memory, _ *quick) {
			check(t, m.Move(background(t)))
			check(t, m.Revoke(background(t)))
		},
	} {
		m, _ := alloc(t, MemoryConfig{})
		q := attachQuick(t, m, false)
		q.mapped(t)
		do(m, q)
		if _, spare := m.places(); spare != nil {
			t.Errorf("%s: the place is kept", what)
		}
		q.leave()
		m.finish(t)
	}
}

// Memory is closed, and released, while a move is under way: nothing is kept for it.
func TestSpareOfClosed(t *testing.T) {
	m, _ := alloc(t, MemoryConfig{})
	check(t, m.Move(background(t)))
	_, spare := m.places()
	if spare == nil {
		t.Fatal("no place is kept")
	}
	m.finish(t)
	if spare.b != nil {
		t.Error("the place is not freed")
	}
	p, err := m.newPlace()
	check(t, err)
	m.spare.keep(p)
	if p.b != nil {
		t.Error("a place is kept for memory that is released")
	}
}
