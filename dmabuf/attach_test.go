package dmabuf

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

var revocable = Importer{InvalidateMappings: func(*Attachment) {}}

// attach attaches a static importer, or a dynamic one.
func (e *exporter) attach(importer *Importer) *Attachment {
	e.t.Helper()
	a, err := e.buffer.attach("device", importer)
	check(e.t, err)
	return a
}

// mapIt maps, with the reservation locked.
func mapIt(t *testing.T, a *Attachment, dir Direction) *Table {
	t.Helper()
	table, err := a.Map(background(t), dir)
	check(t, err)
	return table
}

// The exporter's errno comes to the importer, whatever form the exporter gives it, and nothing
// stays attached.
func TestAttachRefused(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	for _, errno := range errnos {
		for _, err := range []error{errno, ib.Errorf("theirs", errno, "no"), fmt.Errorf("theirs: %w", errno)} {
			e.set("attach", err)
			_, err := e.buffer.Attach(nil)
			wantErr(t, "Attach", err, errno)
			_, err = e.buffer.DynamicAttach(nil, revocable)
			wantErr(t, "DynamicAttach", err, errno)
			var op *ib.OpError
			if !errors.As(err, &op) {
				t.Errorf("%v is no OpError", err)
			}
		}
	}
	e.set("attach", errors.New("bad weather"))
	_, err := e.buffer.Attach(nil)
	wantErr(t, "an error without errno", err, syscall.EIO)
	e.want("detach 0")
}

// A static importer's mapping pins, and waits for the Kernel fences and no others.
func TestStaticImporter(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	a, resv := e.attach(nil), e.buffer.resv
	fence := NewFence()
	locked(resv, func() {
		for _, usage := range []Usage{Write, Read, Bookkeep} {
			resv.Add(NewFence(), usage)
		}
		wantErr(t, "Pin", a.Pin(), syscall.EINVAL)
		wantPanic(t, "Unpin", "without Pin", a.Unpin)
		first, second := mapIt(t, a, ToDevice), mapIt(t, a, FromDevice)
		if !a.Pinned() || first == second {
			t.Error("two mappings are one, or do not pin")
		}
		e.want("pin 2, map 2")
		a.Unmap(first, ToDevice)
		if !a.Pinned() {
			t.Error("the second mapping does not pin")
		}
		a.Unmap(second, FromDevice)
		e.want("unpin 2, unmap 2")
		if a.Pinned() {
			t.Error("pinned after the last mapping")
		}
		wantPanic(t, "Unmap", "without Map", func() { a.Unmap(first, ToDevice) })

		resv.Add(fence, Kernel)
		_, err := a.Map(ended(), Bidirectional)
		wantErr(t, "Map with a fence", err, syscall.ETIMEDOUT)
		if a.Pinned() {
			t.Error("pinned after Map has failed")
		}
		e.want("pin 3, unpin 3, map 3, unmap 3")
	})
	mapped := make(chan struct{})
	go func() {
		defer close(mapped)
		locked(resv, func() {
			table := mapIt(t, a, Bidirectional)
			if !fence.Signaled() {
				t.Error("Map has not waited for the Kernel fence")
			}
			a.Unmap(table, Bidirectional)
		})
	}()
	fence.Signal(errors.New("the move has failed, which is not the importer's business"))
	<-mapped
	a.Detach()
	a.Detach()
	e.want("detach 1")
}

// A dynamic importer maps without pinning and without waiting; it pins if it wants.
func TestDynamicImporter(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	a, resv := e.attach(&revocable), e.buffer.resv
	locked(resv, func() {
		resv.Add(NewFence(), Kernel)
		table, err := a.Map(ended(), Bidirectional)
		check(t, err)
		if a.Pinned() {
			t.Error("a dynamic mapping pins")
		}
		check(t, a.Pin())
		check(t, a.Pin())
		a.Unpin()
		if !a.Pinned() {
			t.Error("one of two pins is gone, and the memory not pinned")
		}
		a.Unpin()
		wantPanic(t, "Unpin", "without Pin", a.Unpin)
		a.Unmap(table, Bidirectional)
		e.want("pin 2, unpin 2, map 1, unmap 1")
	})
	a.Detach()
	locked(resv, func() {
		_, err := a.Map(background(t), Bidirectional)
		wantErr(t, "Map after Detach", err, syscall.EINVAL)
		wantErr(t, "Pin after Detach", a.Pin(), syscall.EINVAL)
	})
	e.want("pin 2, map 1")
}

// An importer that cannot be told of moves maps what it has pinned, and unmaps before it unpins.
func TestImporterWithoutCallback(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	a := e.attach(&Importer{AllowPeer2Peer: true})
	locked(e.buffer.resv, func() {
		_, err := a.Map(background(t), Bidirectional)
		wantErr(t, "Map", err, syscall.EINVAL)
		e.want("map 0")
		check(t, a.Pin())
		table := mapIt(t, a, Bidirectional)
		wantPanic(t, "Unpin", "cannot be told", a.Unpin)
		a.Unmap(table, Bidirectional)
		a.Unpin()
	})
	a.Detach()
}

// Pin and Map fail with the exporter's errno, and leave nothing.
func TestPinAndMapFail(t *testing.T) {
	for _, importer := range []*Importer{nil, &revocable} {
		e := export(t, nil)
		a := e.attach(importer)
		locked(e.buffer.resv, func() {
			for _, errno := range errnos {
				if importer != nil {
					e.set("pin", errno)
					wantErr(t, "Pin", a.Pin(), errno)
				}
				e.set("pin", nil)
				e.set("map", errno)
				_, err := a.Map(background(t), Bidirectional)
				wantErr(t, "Map", err, errno)
				e.set("map", nil)
				if importer == nil {
					e.set("pin", errno)
					_, err = a.Map(background(t), Bidirectional)
					wantErr(t, "Map that pins", err, errno)
					e.set("pin", nil)
				}
			}
			good := e.table
			for _, bad := range []struct {
				table *Table
				errno syscall.Errno
			}{{nil, syscall.ENOMEM}, {NewTable(), syscall.EINVAL}, {NewTable(e.bytes[:size-1]), syscall.EINVAL}} {
				e.table = func() *Table { return bad.table }
				_, err := a.Map(background(t), Bidirectional)
				wantErr(t, "a bad table", err, bad.errno)
			}
			e.want(fmt.Sprintf("unmap %d", 2)) // those that are tables are given back
			e.table = good
			if a.Pinned() {
				t.Error("pinned after errors")
			}
			for _, dir := range []Direction{3, 255} {
				_, err := a.Map(background(t), dir)
				wantErr(t, dir.String(), err, syscall.EINVAL)
			}
			a.Unmap(mapIt(t, a, ToDevice), ToDevice)
		})
		a.Detach()
		locked(e.buffer.resv, func() {
			if e.calls["pin"] > 0 && importer == nil && e.calls["unpin"] != e.calls["pin"]-len(errnos) {
				t.Errorf("%d of %d pins are undone, %d have failed", e.calls["unpin"], e.calls["pin"], len(errnos))
			}
		})
		e.buffer.Put()
		e.want("detach 1, release 1")
	}
}

// A cached mapping lasts from the first Map until Detach, and has one direction.
func TestCachedMappings(t *testing.T) {
	for _, importer := range []*Importer{nil, &revocable} {
		e := export(t, cached)
		a, both := e.attach(importer), e.attach(importer)
		resv := e.buffer.resv
		fence := NewFence()
		locked(resv, func() {
			for range 3 {
				first := mapIt(t, a, ToDevice)
				again := mapIt(t, a, ToDevice)
				if again != first {
					t.Error("the mapping is not cached")
				}
				if a.Pinned() != (importer == nil) {
					t.Errorf("pinned: %v", a.Pinned())
				}
				a.Unmap(first, ToDevice)
				if a.Pinned() != (importer == nil) {
					t.Errorf("pinned by the second: %v", a.Pinned())
				}
				a.Unmap(first, ToDevice)
				if a.Pinned() {
					t.Error("pinned after the last Unmap")
				}
			}
			for _, dir := range []Direction{FromDevice, Bidirectional} {
				_, err := a.Map(background(t), dir)
				wantErr(t, dir.String(), err, syscall.EBUSY)
			}
			e.want("map 1, unmap 0")
			table := mapIt(t, both, Bidirectional)
			both.Unmap(table, Bidirectional)
			if mapIt(t, both, ToDevice) != table {
				t.Error("a mapping in both directions is not good for one")
			}
			both.Unmap(table, ToDevice)
			e.want("map 2, unmap 0")
			if importer == nil {
				resv.Add(fence, Kernel)
				_, err := a.Map(ended(), ToDevice)
				wantErr(t, "a cached mapping with a Kernel fence", err, syscall.ETIMEDOUT)
				e.want("unmap 0")
				fence.Signal(nil)
				if a.Pinned() {
					t.Error("pinned after Map has failed")
				}
			}
		})
		a.Detach()
		e.want("unmap 1")
		both.Detach()
		e.end()
	}
}

// Detach of what is in use is a fault of the importer; the lock is free afterwards.
func TestDetachInUse(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	a := e.attach(&revocable)
	var table *Table
	locked(e.buffer.resv, func() { table = mapIt(t, a, Bidirectional) })
	wantPanic(t, "Detach of what is mapped", "mapped or pinned", a.Detach)
	locked(e.buffer.resv, func() {
		a.Unmap(table, Bidirectional)
		check(t, a.Pin())
	})
	wantPanic(t, "Detach of what is pinned", "mapped or pinned", a.Detach)
	locked(e.buffer.resv, a.Unpin)
	a.Detach()
}
