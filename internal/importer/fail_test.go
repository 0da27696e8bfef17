package importer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// failure is a way in which an exporter's operation fails, and the errno that comes of it.
type failure struct {
	name  string
	op    string // "": the table is bad
	err   error
	table func() *dmabuf.Table
	want  syscall.Errno
}

// failures are those of each operation that an importer's accesses need.
func (e *exporter) failures() (all []failure) {
	for _, op := range []string{"attach", "pin", "map"} {
		for _, errno := range errnos {
			all = append(all, failure{fmt.Sprintf("%s: %v", op, errno), op, errno, nil, errno})
		}
		all = append(all,
			failure{op + ": an error with errno", op, ib.Errorf("theirs", syscall.ENOSPC, "full"), nil, syscall.ENOSPC},
			failure{op + ": an error without errno", op, errors.New("bad weather"), nil, syscall.EIO})
	}
	return append(all,
		failure{"no table", "", nil, func() *dmabuf.Table { return nil }, syscall.ENOMEM},
		failure{"an empty table", "", nil, func() *dmabuf.Table { return dmabuf.NewTable() }, syscall.EINVAL},
		failure{"a short table", "", nil, func() *dmabuf.Table { return dmabuf.NewTable(e.bytes[:4096], e.bytes[4096:size-1]) }, syscall.EINVAL})
}

func (e *exporter) apply(f failure) {
	if f.op != "" {
		e.set(f.op, f.err)
	}
	e.setTable(f.table)
}

func (e *exporter) recover(f failure) {
	if f.op != "" {
		e.set(f.op, nil)
	}
	e.setTable(nil)
}

// Each operation fails in turn when a region is registered: with the exporter's errno, and nothing
// is left. Then it succeeds.
func TestImportFails(t *testing.T) {
	for _, pinned := range []bool{false, true} {
		e := export(t)
		table := newTable()
		for _, f := range e.failures() {
			e.apply(f)
			b, err := importer.Import(e.buffer, all(pinned))
			if f.op == "pin" && !pinned {
				check(t, err)
				e.wantCounts(f.name, "1 attached, 0 pinned, 1 mapped, 0 released")
				check(t, b.Close())
				check(t, b.Close())
				e.recover(f)
				continue
			}
			wantErr(t, f.name, err, f.want)
			e.wantCounts(f.name, idle)
			e.recover(f)
			r := register(t, table, e.buffer, all(pinned))
			r.works(t, f.name, 7)
			check(t, r.Close())
			e.wantCounts(f.name, idle)
		}
		e.end()
	}
}

// Import refuses ranges that are not in the buffer, and buffers that are released.
func TestImportRefuses(t *testing.T) {
	e := export(t)
	for _, c := range []importer.Config{
		{}, {Offset: size}, {Length: size + 1}, {Offset: 1, Length: size}, {Offset: size, Length: 1}, {Offset: size + 1, Length: 1},
		{Offset: 1<<64 - 1, Length: 1}, {Offset: 1, Length: 1<<64 - 1}, {Length: 1<<64 - 1}, {Offset: 1<<64 - 1, Length: 1<<64 - 1},
	} {
		_, err := importer.Import(e.buffer, c)
		wantErr(t, fmt.Sprintf("%+v", c), err, syscall.EINVAL)
	}
	e.wantCounts("after refusals", idle)
	e.end()
	_, err := importer.Import(e.buffer, all(false))
	wantErr(t, "a buffer that is released", err, syscall.EINVAL)
}

// What a region is: an importer that is peer-to-peer and revocable, of a part of the buffer.
func TestImport(t *testing.T) {
	e := export(t)
	for _, pinned := range []bool{false, true} {
		r := register(t, newTable(), e.buffer, importer.Config{Offset: 4090, Length: 2020, Pinned: pinned, Device: "device"})
		resv := e.buffer.Reservation()
		resv.Lock()
		for _, a := range e.buffer.Attachments() {
			if !a.PeerToPeer() || !a.Revocable() || a.Device() != "device" || a.Pinned() != pinned {
				t.Errorf("peer-to-peer %v, revocable %v, pinned %v, of %v", a.PeerToPeer(), a.Revocable(), a.Pinned(), a.Device())
			}
		}
		resv.Unlock()
		if b, off := r.backing.Buffer(); b != e.buffer || off != 4090 || r.backing.Pins() != pinned || r.Kind() != mem.KindDMABuf || r.backing.Len() != 2020 {
			t.Errorf("offset %d, %d bytes", off, r.backing.Len())
		}
		// Bytes 910 of the region are where the first segment ends.
		want := bytes.Repeat([]byte{3}, 2020)
		if f := r.write(0, want); !f.OK() {
			t.Fatal(f)
		}
		if !bytes.Equal(e.bytes[4090:][:2020], want) || bytes.ContainsRune(e.bytes[:4090], 3) || bytes.ContainsRune(e.bytes[4090+2020:], 3) {
			t.Error("not the region's part of the buffer was written")
		}
		clear(e.bytes)
		for _, off := range []uint64{2020, 2021, 1 << 40} {
			if _, kind := r.backing.Run(off, 1, 0); kind != mem.FaultBounds {
				t.Errorf("a byte at %d: %v", off, kind)
			}
		}
		check(t, r.Close())
	}
	e.end()
}

// Each way to map fails after the buffer has moved: the access ends with a fault, and with the
// exporter's recovery the region works again, unless the memory is revoked.
func TestMapFailsLater(t *testing.T) {
	forgetful(t)
	e := export(t)
	for _, f := range e.failures() {
		if f.op == "attach" || f.op == "pin" {
			continue // they are asked once
		}
		r := register(t, newTable(), e.buffer, all(false))
		r.works(t, f.name, 1)
		e.move()
		e.wantCounts(f.name, "1 attached, 0 pinned, 0 mapped, 0 released")
		e.apply(f)
		want := mem.FaultStorage
		if f.want == syscall.ENODEV {
			want = mem.FaultRevoked
		}
		r.fails(t, f.name, want)
		e.wantCounts(f.name, "1 attached, 0 pinned, 0 mapped, 0 released")
		e.recover(f)
		if want == mem.FaultRevoked {
			r.fails(t, f.name, want) // for good
			if r.Open() {
				t.Errorf("%s: the region is not revoked", f.name)
			}
		} else {
			r.forgotten(t)
			r.works(t, f.name, 2)
			if s := r.backing.Stats(); s.FailedResolutions == 0 || s.PageFaults != 1 || s.Invalidations != 1 {
				t.Errorf("%s: %+v", f.name, s)
			}
			e.move()
			r.works(t, f.name, 3)
		}
		check(t, r.Close())
		e.wantCounts(f.name, idle)
	}
	e.end()
}

// That Await has failed is no reason for a later access to fail: not after the buffer was mapped
// by another, and not for longer than a moment.
func TestFailureIsForgotten(t *testing.T) {
	e := export(t)
	r := register(t, newTable(), e.buffer, all(false))
	e.move()
	e.set("map", syscall.ENOMEM)
	if kind := r.backing.Await(0, 1, 0); kind != mem.FaultStorage {
		t.Fatal(kind)
	}
	e.set("map", nil)
	if kind := r.backing.Await(0, 1, ib.AccessRemoteRead); kind != mem.FaultNone { // another access
		t.Fatal(kind)
	}
	r.works(t, "after it was mapped", 4)
	e.move()
	r.works(t, "after another move", 5)

	forgetful(t)
	e.move()
	e.set("map", syscall.ENOMEM)
	if kind := r.backing.Await(0, 1, 0); kind != mem.FaultStorage {
		t.Fatal(kind)
	}
	e.set("map", nil)
	r.forgotten(t)
	r.works(t, "after the refusal", 6)
	if s := r.backing.Stats(); s.RemoteFaults == 0 || s.PageFaults != s.RemoteFaults+s.LocalFaults || s.PageFaultPages != 4*s.PageFaults || s.InvalidationPages != 4*s.Invalidations {
		t.Errorf("%+v", s)
	}
	check(t, r.Close())
	e.end()
}

// A refusal is logged once, and again after the buffer was mapped: peers could fill the log.
func TestLogsOnce(t *testing.T) {
	forgetful(t)
	var log bytes.Buffer
	was := slog.Default()
	defer slog.SetDefault(was)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	e := export(t)
	r := register(t, newTable(), e.buffer, all(false))
	for round := 1; round <= 2; round++ {
		e.move()
		e.set("map", syscall.ENOMEM)
		for range 3 {
			r.fails(t, "map", mem.FaultStorage)
		}
		if n := strings.Count(log.String(), "cannot be mapped again"); n != round {
			t.Errorf("logged %d times, should be %d", n, round)
		}
		e.set("map", nil)
		r.forgotten(t)
		r.works(t, "map", 1)
	}
	check(t, r.Close())
	e.end()
}

// The CPU's operations fail, at first and later, and a region on the same buffer does not notice.
func TestCPUFails(t *testing.T) {
	e := export(t)
	r := register(t, newTable(), e.buffer, all(false))
	b, resv := e.buffer, e.buffer.Reservation()
	use := map[string]func() error{
		"begin": func() error { return b.BeginCPUAccess(context.Background(), dmabuf.FromDevice) },
		"end":   func() error { return b.EndCPUAccess(dmabuf.FromDevice) },
		"mmap":  func() error { _, err := b.Mmap(0, 4096); return err },
		"vmap": func() error {
			resv.Lock()
			defer resv.Unlock()
			_, err := b.Vmap()
			if err == nil {
				b.Vunmap()
			}
			return err
		},
	}
	for op, do := range use {
		for _, later := range []bool{false, true} {
			if later {
				check(t, do())
			}
			for _, errno := range errnos {
				e.set(op, errno)
				wantErr(t, op, do(), errno)
				r.works(t, op, byte(errno))
			}
			e.set(op, nil)
			check(t, do())
		}
	}
	check(t, r.Close())
	e.end()
}

// Pinned memory that is invalidated is gone for good: the region is revoked, and its pin and its
// mapping are given back at once.
func TestPinnedIsRevoked(t *testing.T) {
	e := export(t)
	r := register(t, newTable(), e.buffer, all(true))
	r.works(t, "pinned", 1)
	e.move()
	e.wantCounts("invalidated", "1 attached, 0 pinned, 0 mapped, 0 released")
	r.fails(t, "invalidated", mem.FaultRevoked)
	e.move()
	if kind := r.backing.Await(0, 1, 0); kind != mem.FaultNone {
		t.Error(kind)
	}
	e.wantCounts("after Await", "1 attached, 0 pinned, 0 mapped, 0 released")
	r.fails(t, "after Await", mem.FaultRevoked)
	check(t, r.Close())

	// The same before there is a region.
	backing, err := importer.Import(e.buffer, all(true))
	check(t, err)
	e.move()
	e.wantCounts("before the region", "1 attached, 0 pinned, 0 mapped, 0 released")
	table := newTable()
	mr, err := table.Register(regionOn(backing))
	check(t, err)
	region{mr, table, backing}.fails(t, "before the region", mem.FaultRevoked)
	check(t, mr.Close())

	// Memory that is not pinned is mapped again, also if it moves before there is a region.
	backing, err = importer.Import(e.buffer, all(false))
	check(t, err)
	e.move()
	mr, err = table.Register(regionOn(backing))
	check(t, err)
	region{mr, table, backing}.works(t, "before the region", 6)
	check(t, mr.Close())
	e.end()
}

// Await after Close does nothing.
func TestAwaitClosed(t *testing.T) {
	e := export(t)
	r := register(t, newTable(), e.buffer, all(false))
	e.move()
	check(t, r.Close())
	if kind := r.backing.Await(0, 1, 0); kind != mem.FaultNone {
		t.Error(kind)
	}
	e.end()
}

// Registering again gives the old buffer back and uses the new one, whose moves it follows.
func TestRereg(t *testing.T) {
	first, second := export(t), export(t)
	r := register(t, newTable(), first.buffer, all(false))
	r.works(t, "first", 1)
	next, err := importer.Import(second.buffer, all(true))
	check(t, err)
	check(t, r.Rereg(regionOn(next)))
	first.wantCounts("the old buffer", idle)
	second.wantCounts("the new buffer", "1 attached, 1 pinned, 1 mapped, 0 released")
	r.works(t, "second", 2)
	first.move()
	r.works(t, "after a move of the old buffer", 3)
	if second.bytes[size-1] != 3 || first.bytes[size-1] != 1 {
		t.Error("the region is on the old buffer")
	}
	second.move()
	r.fails(t, "after a move of the new buffer", mem.FaultRevoked)
	check(t, r.Close())
	first.end()
	second.end()
}

// Bytes that the exporter has offered, and that are not there when they are accessed, are a fault of
// the access and not the end of the program.
func TestBytesAreNotThere(t *testing.T) {
	b, err := syscall.Mmap(-1, 0, 4*4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	check(t, err)
	defer func() { check(t, syscall.Munmap(b)) }()
	e := export(t)
	e.setTable(func() *dmabuf.Table { return dmabuf.NewTable(b) })
	r := register(t, newTable(), e.buffer, all(false))
	r.works(t, "while they are there", 1)
	check(t, syscall.Mprotect(b, syscall.PROT_NONE))
	r.fails(t, "bytes that are not there", mem.FaultStale)
	check(t, syscall.Mprotect(b, syscall.PROT_READ|syscall.PROT_WRITE))
	r.works(t, "when they are there again", 2)
	check(t, r.Close())
	e.end()
}
