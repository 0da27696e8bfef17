package dmabuf

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// alloc makes memory that is full of random bytes, which it returns. The test closes it.
func alloc(t *testing.T, cfg MemoryConfig) (*Memory, []byte) {
	t.Helper()
	if cfg.Size == 0 {
		cfg.Size = size
	}
	m, err := Alloc(cfg)
	check(t, err)
	rng := random(t)
	b := make([]byte, cfg.Size)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	n, err := m.WriteAt(b, 0)
	check(t, err)
	if n != len(b) {
		t.Fatalf("%d bytes written", n)
	}
	return m, b
}

// finish closes the memory, and looks whether it is gone.
func (m *Memory) finish(t *testing.T) {
	t.Helper()
	if n := m.buffer.refs.Load(); n != 1 || len(m.buffer.attachments) != 0 || m.pins != 0 || len(m.tables) != 0 {
		t.Errorf("%d references, %d attachments, %d pins, %d mappings", n, len(m.buffer.attachments), m.pins, len(m.tables))
	}
	check(t, m.Close())
	check(t, m.Close())
	if m.place != nil {
		t.Error("the memory is not gone")
	}
}

func (m *Memory) want(t *testing.T, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	_, err := m.ReadAt(got, 0)
	check(t, err)
	if !bytes.Equal(got, want) {
		t.Error("the memory holds other bytes")
	}
}

// contents returns what a table shows.
func contents(table *Table) []byte { return bytes.Join(table.Segments(), nil) }

// quick is a dynamic importer that unmaps when it is told, and counts that.
type quick struct {
	a     *Attachment
	table *Table
	told  int
	pins  bool
}

func attachQuick(t *testing.T, m *Memory, pins bool) *quick {
	t.Helper()
	q := &quick{pins: pins}
	a, err := m.buffer.DynamicAttach(nil, Importer{AllowPeer2Peer: true, InvalidateMappings: func(a *Attachment) {
		if q.told++; q.table != nil {
			q.drop()
		}
	}})
	check(t, err)
	q.a = a
	return q
}

func (q *quick) drop() {
	q.a.Unmap(q.table, Bidirectional)
	if q.table = nil; q.pins {
		q.a.Unpin()
	}
}

// mapped maps, if it is not, and returns what the importer sees.
func (q *quick) mapped(t *testing.T) (b []byte) {
	t.Helper()
	locked(q.a.buffer.resv, func() {
		if q.table == nil {
			if q.pins {
				check(t, q.a.Pin())
			}
			q.table = mapIt(t, q.a, Bidirectional)
		}
		b = contents(q.table)
	})
	return b
}

func (q *quick) leave() {
	locked(q.a.buffer.resv, func() {
		if q.table != nil {
			q.drop()
		}
	})
	q.a.Detach()
}

func TestAllocRefuses(t *testing.T) {
	page := uint64(os.Getpagesize())
	for _, c := range []struct {
		cfg  MemoryConfig
		want error
	}{
		{MemoryConfig{}, syscall.EINVAL},
		{MemoryConfig{Size: math.MaxUint64}, syscall.EINVAL},
		{MemoryConfig{Size: math.MaxInt}, syscall.EINVAL},
		{MemoryConfig{Size: math.MaxInt - 2*page}, syscall.ENOMEM},
		{MemoryConfig{Size: page, Segments: -1}, syscall.EINVAL},
		{MemoryConfig{Size: page, Segments: 2}, syscall.EINVAL},
		{MemoryConfig{Size: 1 << 50, Segments: 1 << 30}, syscall.EINVAL},
		{MemoryConfig{Size: page << 17, Segments: maxSegments + 1}, syscall.EINVAL},
		{MemoryConfig{Size: 3*page + 1, Segments: 5}, syscall.EINVAL},
		{MemoryConfig{Size: page, Name: strings.Repeat("n", 32)}, syscall.EINVAL},
	} {
		m, err := Alloc(c.cfg)
		wantErr(t, fmt.Sprintf("%+v", c.cfg), err, c.want)
		if m != nil {
			t.Errorf("%+v: there is memory", c.cfg)
		}
	}
}

// Memory of every number of segments holds what is written; no two segments that follow each
// other are neighbours; importers see the same bytes as the program.
func TestMemorySegments(t *testing.T) {
	page := os.Getpagesize()
	for pages := 1; pages <= 5; pages++ {
		for _, odd := range []int{0, 1, page - 1} {
			for segments := 0; segments <= pages; segments++ {
				m, want := alloc(t, MemoryConfig{Size: uint64(pages*page - odd), Segments: segments, Name: "n"})
				m.want(t, want)
				q := attachQuick(t, m, false)
				if got := q.mapped(t); !bytes.Equal(got, want) {
					t.Errorf("%d segments of %d bytes: the importer sees other bytes", segments, len(want))
				}
				if n := len(q.table.Segments()); n != max(segments, 1) {
					t.Errorf("%d segments, should be %d", n, segments)
				}
				for i := range len(m.segments) - 1 {
					if m.segments[i].off+m.segments[i].n == m.segments[i+1].off {
						t.Errorf("segments %d and %d are neighbours", i, i+1)
					}
				}
				// A range that crosses segments, by the importer and by the program.
				from, to := len(want)/3, len(want)-len(want)/5
				part := bytes.Repeat([]byte{0x5a}, to-from)
				_, err := m.WriteAt(part, int64(from))
				check(t, err)
				copy(want[from:to], part)
				if !bytes.Equal(q.mapped(t), want) {
					t.Error("the importer does not see what the program has written")
				}
				got := make([]byte, to-from)
				_, err = m.ReadAt(got, int64(from))
				check(t, err)
				if !bytes.Equal(got, part) {
					t.Error("the program reads other bytes")
				}
				locked(m.buffer.resv, func() {
					all, err := m.buffer.Vmap()
					if segments > 1 {
						wantErr(t, "Vmap of several segments", err, syscall.EINVAL)
						return
					}
					check(t, err)
					if !bytes.Equal(all, want) {
						t.Error("Vmap shows other bytes")
					}
					m.buffer.Vunmap()
				})
				q.leave()
				m.finish(t)
			}
		}
	}
}

func TestMemoryBounds(t *testing.T) {
	m, want := alloc(t, MemoryConfig{Segments: 2})
	defer m.finish(t)
	for _, c := range []struct {
		off int64
		n   int
	}{{-1, 1}, {0, size + 1}, {size, 1}, {size + 1, 0}, {size - 1, 2}, {math.MaxInt64, 1}, {math.MinInt64, 1}} {
		b := make([]byte, c.n)
		_, err := m.ReadAt(b, c.off)
		wantErr(t, fmt.Sprintf("read of %d bytes at %d", c.n, c.off), err, syscall.EFAULT)
		n, err := m.WriteAt(b, c.off)
		wantErr(t, fmt.Sprintf("write of %d bytes at %d", c.n, c.off), err, syscall.EFAULT)
		if n != 0 {
			t.Errorf("%d bytes", n)
		}
	}
	n, err := m.ReadAt(nil, size)
	check(t, err)
	if n != 0 {
		t.Errorf("%d bytes", n)
	}
	m.want(t, want)
}

// Memory moves with its bytes, and importers find them in the new place.
func TestMove(t *testing.T) {
	for _, segments := range []int{1, 3} {
		m, want := alloc(t, MemoryConfig{Segments: segments})
		q := attachQuick(t, m, false)
		for round := range 5 {
			q.mapped(t)
			old := &q.table.Segments()[0][0]
			do, moves := m.Move, uint64(1)
			if round%2 == 1 {
				do, moves = m.Evict, 2 // there, and back for the importer
			}
			before := m.Moves()
			check(t, do(background(t)))
			if q.table != nil || q.told != round+1 {
				t.Error("the importer was not told")
			}
			m.want(t, want)
			if !bytes.Equal(q.mapped(t), want) {
				t.Error("the importer sees other bytes")
			}
			if m.Moves() != before+moves {
				t.Errorf("%d moves", m.Moves()-before)
			}
			if moves == 1 && &q.table.Segments()[0][0] == old {
				t.Error("the memory is where it was")
			}
			want[round] ^= 0xff
			_, err := m.WriteAt(want[round:][:1], int64(round))
			check(t, err)
		}
		q.leave()
		m.finish(t)
	}
}

// What is evicted stays so until an importer maps it, pins it, or the CPU maps it.
func TestEvict(t *testing.T) {
	m, want := alloc(t, MemoryConfig{})
	defer m.finish(t)
	q := attachQuick(t, m, true)
	defer q.leave()
	for _, back := range []func(){
		func() { q.mapped(t) },
		func() {
			locked(m.buffer.resv, func() {
				check(t, q.a.Pin())
				q.a.Unpin()
			})
		},
		func() {
			locked(m.buffer.resv, func() {
				b, err := m.buffer.Vmap()
				check(t, err)
				if !bytes.Equal(b, want) {
					t.Error("Vmap shows other bytes")
				}
				m.buffer.Vunmap()
			})
		},
	} {
		check(t, m.Evict(background(t)))
		m.want(t, want)
		if !m.evicted {
			t.Fatal("the program's access brings it back")
		}
		back()
		if m.evicted {
			t.Error("it is still evicted")
		}
		m.want(t, want)
		if q.table != nil {
			locked(m.buffer.resv, q.drop)
		}
	}
}

// The system has no room for another place: calls fail, and the memory stays as it is.
func TestNoPlace(t *testing.T) {
	m, want := alloc(t, MemoryConfig{})
	defer m.finish(t)
	q := attachQuick(t, m, false)
	defer q.leave()
	// The limit of descriptors is the program's: no other test runs meanwhile.
	var limit syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	without := func(do func()) {
		t.Helper()
		check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: limit.Max}))
		do()
		check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	}
	without(func() {
		_, err := Alloc(MemoryConfig{Size: size})
		wantErr(t, "Alloc", err, syscall.EMFILE)
		wantErr(t, "Move", m.Move(background(t)), syscall.ENOMEM)
		wantErr(t, "Evict", m.Evict(background(t)), syscall.ENOMEM)
	})
	m.want(t, want)
	check(t, m.Evict(background(t)))
	without(func() {
		locked(m.buffer.resv, func() {
			_, err := q.a.Map(background(t), Bidirectional)
			wantErr(t, "Map", err, syscall.ENOMEM)
			wantErr(t, "Pin", q.a.Pin(), syscall.ENOMEM)
			_, err = m.buffer.Vmap()
			wantErr(t, "Vmap", err, syscall.ENOMEM)
		})
		m.want(t, want) // where it is evicted to
	})
	if !bytes.Equal(q.mapped(t), want) {
		t.Error("the importer sees other bytes")
	}
}

// What is pinned, or mapped by the CPU, stays where it is.
func TestMovePinned(t *testing.T) {
	m, want := alloc(t, MemoryConfig{})
	defer m.finish(t)
	busy := func(what string) {
		t.Helper()
		wantErr(t, what, m.Move(background(t)), syscall.EBUSY)
		wantErr(t, what, m.Evict(background(t)), syscall.EBUSY)
		m.want(t, want)
	}
	static, err := m.buffer.Attach(nil)
	check(t, err)
	var table *Table
	locked(m.buffer.resv, func() { table = mapIt(t, static, ToDevice) })
	busy("a static importer")
	wantErr(t, "a static importer", m.Revoke(background(t)), syscall.EBUSY)
	locked(m.buffer.resv, func() { static.Unmap(table, ToDevice) })
	check(t, m.Move(background(t)))
	static.Detach()

	silent, err := m.buffer.DynamicAttach(nil, Importer{})
	check(t, err)
	locked(m.buffer.resv, func() { check(t, silent.Pin()) })
	busy("an importer without callback")
	wantErr(t, "an importer without callback", m.Revoke(background(t)), syscall.EBUSY)
	locked(m.buffer.resv, silent.Unpin)
	silent.Detach()

	q := attachQuick(t, m, true)
	q.mapped(t)
	busy("a revocable importer")
	if q.told != 0 {
		t.Error("the importer was told of a move that cannot be")
	}
	q.leave()

	locked(m.buffer.resv, func() {
		_, err := m.buffer.Vmap()
		check(t, err)
	})
	busy("a CPU")
	wantErr(t, "a CPU", m.Revoke(background(t)), syscall.EBUSY)
	locked(m.buffer.resv, m.buffer.Vunmap)
	check(t, m.Move(background(t)))
	m.want(t, want)
}

// Memory that cannot be pinned refuses importers that want to.
func TestNoPin(t *testing.T) {
	m, _ := alloc(t, MemoryConfig{NoPin: true})
	defer m.finish(t)
	q := attachQuick(t, m, false)
	q.mapped(t)
	locked(m.buffer.resv, func() { wantErr(t, "Pin", q.a.Pin(), syscall.EOPNOTSUPP) })
	check(t, m.Move(background(t)))
	q.leave()
	static, err := m.buffer.Attach(nil)
	check(t, err)
	locked(m.buffer.resv, func() {
		_, err := static.Map(background(t), Bidirectional)
		wantErr(t, "a static Map", err, syscall.EOPNOTSUPP)
	})
	static.Detach()
}

// Revoked memory is gone for all importers, pinned or not, and for the program.
func TestRevoke(t *testing.T) {
	for _, evicted := range []bool{false, true} {
		m, want := alloc(t, MemoryConfig{})
		pinned, free := attachQuick(t, m, true), attachQuick(t, m, false)
		if evicted {
			check(t, m.Evict(background(t)))
		} else {
			pinned.mapped(t)
			free.mapped(t)
		}
		for range 2 {
			check(t, m.Revoke(background(t)))
			if pinned.told != free.told || pinned.table != nil || free.table != nil {
				t.Error("the importers still have the memory")
			}
			if m.place != nil {
				t.Error("nobody maps the memory, and it is not given up")
			}
		}
		locked(m.buffer.resv, func() {
			_, err := free.a.Map(background(t), Bidirectional)
			wantErr(t, "Map", err, syscall.ENODEV)
			wantErr(t, "Pin", pinned.a.Pin(), syscall.ENODEV)
			_, err = m.buffer.Vmap()
			wantErr(t, "Vmap", err, syscall.ENODEV)
		})
		_, err := m.ReadAt(want, 0)
		wantErr(t, "ReadAt", err, syscall.ENODEV)
		_, err = m.WriteAt(want, 0)
		wantErr(t, "WriteAt", err, syscall.ENODEV)
		wantErr(t, "Move", m.Move(background(t)), syscall.ENODEV)
		wantErr(t, "Evict", m.Evict(background(t)), syscall.ENODEV)
		late, err := m.buffer.Attach(nil)
		check(t, err)
		locked(m.buffer.resv, func() {
			_, err := late.Map(background(t), Bidirectional)
			wantErr(t, "a static Map", err, syscall.ENODEV)
		})
		late.Detach()
		pinned.leave()
		free.leave()
		m.finish(t)
	}
}

// slow is an importer that unmaps some time after it was told.
func slow(t *testing.T, m *Memory) (a *Attachment, table *Table, told *int) {
	t.Helper()
	told = new(int)
	a, err := m.buffer.DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) { *told++ }})
	check(t, err)
	locked(m.buffer.resv, func() { table = mapIt(t, a, Bidirectional) })
	return a, table, told
}

// An importer that unmaps later can read the old place until then, and finds poison there. Its
// place is given up with its last mapping, and not before.
func TestSlowImporter(t *testing.T) {
	for _, end := range []string{"Move", "Evict", "Revoke"} {
		m, want := alloc(t, MemoryConfig{Segments: 2})
		a, table, told := slow(t, m)
		var twice *Table
		locked(m.buffer.resv, func() { twice = mapIt(t, a, ToDevice) })
		old := m.place
		do := map[string]func(context.Context) error{"Move": m.Move, "Evict": m.Evict, "Revoke": m.Revoke}[end]
		check(t, do(background(t)))
		if *told != 1 {
			t.Fatalf("%s: told %d times", end, *told)
		}
		poisoned := bytes.Repeat([]byte{poison}, size)
		if !bytes.Equal(contents(table), poisoned) || !bytes.Equal(contents(twice), poisoned) {
			t.Errorf("%s: the old place is not poisoned", end)
		}
		var newer *Table
		if end != "Revoke" {
			locked(m.buffer.resv, func() { newer = mapIt(t, a, Bidirectional) })
			if !bytes.Equal(contents(newer), want) {
				t.Errorf("%s: the new place holds other bytes", end)
			}
		}
		locked(m.buffer.resv, func() { a.Unmap(table, Bidirectional) })
		if old.b == nil || !bytes.Equal(contents(twice), poisoned) {
			t.Errorf("%s: the old place is given up while it is mapped", end)
		}
		locked(m.buffer.resv, func() { a.Unmap(twice, ToDevice) })
		if old.b != nil {
			t.Errorf("%s: the old place is not given up", end)
		}
		if newer != nil {
			m.want(t, want)
			locked(m.buffer.resv, func() { a.Unmap(newer, Bidirectional) })
		}
		a.Detach()
		m.finish(t)
	}
}

// A slow importer may detach after the program has closed the memory, and then it goes.
func TestSlowImporterOfClosed(t *testing.T) {
	m, _ := alloc(t, MemoryConfig{})
	a, table, _ := slow(t, m)
	old := m.place
	check(t, m.Move(background(t)))
	check(t, m.Close())
	locked(m.buffer.resv, func() { a.Unmap(table, Bidirectional) })
	if old.b != nil || m.place == nil {
		t.Error("the old place is still there, or the new one gone")
	}
	a.Detach()
	if m.place != nil {
		t.Error("the memory is not gone")
	}
}

// Move, Evict and Revoke wait for Bookkeep fences, which an importer adds for accesses that it
// cannot stop at once; until they are signalled the memory is where it was.
func TestBookkeep(t *testing.T) {
	for _, end := range []string{"Move", "Evict", "Revoke"} {
		m, want := alloc(t, MemoryConfig{})
		fence := NewFence()
		a, err := m.buffer.DynamicAttach(nil, Importer{InvalidateMappings: func(a *Attachment) {
			a.Buffer().Reservation().Add(fence, Bookkeep)
		}})
		check(t, err)
		var table *Table
		locked(m.buffer.resv, func() { table = mapIt(t, a, Bidirectional) })
		do := map[string]func(context.Context) error{"Move": m.Move, "Evict": m.Evict, "Revoke": m.Revoke}[end]

		wantErr(t, end, do(ended()), syscall.ETIMEDOUT)
		if !bytes.Equal(contents(table), want) || m.Moves() != 0 {
			t.Errorf("%s: the memory is not where it was", end)
		}
		if end == "Revoke" { // it is revoked all the same
			_, err := m.ReadAt(make([]byte, 1), 0)
			wantErr(t, "ReadAt", err, syscall.ENODEV)
		} else {
			m.want(t, want)
		}
		done := make(chan error)
		go func() { done <- do(context.Background()) }()
		for !fence.waiting() || m.buffer.resv.TryLock() { // until it waits for the fence, with the lock
			if fence.waiting() {
				m.buffer.resv.Unlock()
			}
			runtime.Gosched()
		}
		select {
		case err := <-done:
			t.Errorf("%s has not waited: %v", end, err)
		default:
		}
		table.Segments()[0][7] ^= 0xff // the access that could not be stopped
		want[7] ^= 0xff
		fence.Signal(nil)
		check(t, <-done)
		if end != "Revoke" {
			m.want(t, want)
		} else if table.Segments()[0][7] != poison {
			t.Error("the revoked memory is not poisoned")
		}
		locked(m.buffer.resv, func() { a.Unmap(table, Bidirectional) })
		a.Detach()
		m.finish(t)
	}
}

// Waiting for the reservation lock ends with the context.
func TestMoveLocked(t *testing.T) {
	m, want := alloc(t, MemoryConfig{})
	defer m.finish(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	locked(m.buffer.resv, func() {
		for _, do := range []func(context.Context) error{m.Move, m.Evict, m.Revoke} {
			go func() { done <- do(ctx) }()
		}
		cancel()
		for range 3 {
			wantErr(t, "a move of what is locked", <-done, syscall.ETIMEDOUT)
		}
	})
	m.want(t, want)
}

// Importers keep the memory of a program that has closed it; the program itself has it no more.
func TestCloseAttached(t *testing.T) {
	m, want := alloc(t, MemoryConfig{})
	q := attachQuick(t, m, false)
	q.mapped(t)
	check(t, m.Close())
	check(t, m.Close())
	if !bytes.Equal(q.mapped(t), want) {
		t.Error("the importer has lost the memory")
	}
	for what, err := range map[string]error{
		"Move": m.Move(background(t)), "Evict": m.Evict(background(t)), "Revoke": m.Revoke(background(t)),
		"ReadAt": second(m.ReadAt(make([]byte, 1), 0)), "WriteAt": second(m.WriteAt(make([]byte, 1), 0)),
	} {
		wantErr(t, what, err, syscall.EINVAL)
	}
	if q.told != 0 {
		t.Error("the importer was told of something")
	}
	other, err := m.Buffer().DynamicAttach(nil, Importer{}) // by the importer's reference
	check(t, err)
	other.Detach()
	q.leave()
	if m.place != nil {
		t.Error("the memory is not gone")
	}
	wantErr(t, "Move", m.Move(background(t)), syscall.EINVAL)
	_, err = m.Buffer().Attach(nil)
	wantErr(t, "Attach", err, syscall.EINVAL)
}

func second(_ int, err error) error { return err }

// Close does not wait for a move, which goes on.
func TestCloseMoving(t *testing.T) {
	m, _ := alloc(t, MemoryConfig{})
	fence := NewFence()
	locked(m.buffer.resv, func() { m.buffer.resv.Add(fence, Read) })
	done := make(chan error)
	go func() { done <- m.Move(context.Background()) }()
	for !fence.waiting() {
		runtime.Gosched()
	}
	check(t, m.Close())
	fence.Signal(nil)
	check(t, <-done)
	if m.place != nil {
		t.Error("the memory is not gone")
	}
}

// Several programs' goroutines and importers use, move and at last revoke and close the memory.
func TestMemoryTogether(t *testing.T) {
	const each = 40
	m, want := alloc(t, MemoryConfig{Segments: 2})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			for range each {
				do := m.Move
				if i == 1 {
					do = m.Evict
				}
				if err := do(background(t)); err != nil {
					wantErr(t, "a move", err, syscall.EBUSY)
				}
			}
		})
	}
	for i := range 3 {
		wg.Go(func() {
			q := attachQuick(t, m, i == 0)
			for n := range each {
				if !bytes.Equal(q.mapped(t), want) { // under the lock
					t.Error("the importer sees other bytes")
				}
				if n%3 == 0 {
					locked(m.buffer.resv, func() {
						if q.table != nil {
							q.drop()
						}
					})
				}
			}
			q.leave()
		})
	}
	wg.Go(func() {
		for range each {
			m.want(t, want)
		}
	})
	wg.Wait()
	check(t, m.Revoke(background(t)))
	m.finish(t)
}

// A process that was not waited for writes a message to the place that the buffer leaves, just while
// the bytes are copied: the word that it stores last is not moved without the first.
func TestMoveStillWritten(t *testing.T) {
	const size, rounds = 4 << 20, 100
	const end = size - 64<<10 // a copy loads the last bytes of all first
	m, _ := alloc(t, MemoryConfig{Size: size})
	rng := random(t)
	var other []byte // the process's own mapping
	var written sync.WaitGroup
	var begin chan struct{} // closed right before the bytes are copied
	a, err := m.Buffer().DynamicAttach(nil, Importer{InvalidateMappings: func(a *Attachment) {
		a.StillWritten()
		close(begin)
	}})
	check(t, err)
	both := 0
	for i := range rounds {
		number := byte(i)
		var first, last [1]byte
		locked(m.Buffer().Reservation(), func() {
			table, err := a.Map(t.Context(), Bidirectional)
			check(t, err)
			_, fd, ok := table.Place()
			if !ok {
				t.Fatal("no place")
			}
			other, err = sys.MapFile(fd)
			check(t, err)
			a.Unmap(table, Bidirectional)
		})
		other[0], other[end] = ^number, ^number
		begin = make(chan struct{})
		began, delay := begin, rng.IntN(500)
		written.Go(func() {
			<-began
			for range delay {
				runtime.Gosched()
			}
			other[0] = number
			other[end] = number
		})
		check(t, m.Move(t.Context()))
		written.Wait()
		check(t, sys.FreeMapped(other))
		_, err := m.ReadAt(first[:], 0)
		check(t, err)
		_, err = m.ReadAt(last[:], end)
		check(t, err)
		if last[0] == number && first[0] != number {
			t.Fatalf("move %d: the last word of the message without the first", i)
		}
		if last[0] == number {
			both++
		}
	}
	t.Logf("%d of %d messages were moved", both, rounds)
	a.Detach()
	m.finish(t)
}
