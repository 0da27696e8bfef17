package importer_test

import (
	"fmt"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// An exporter that hangs while a region is registered: ETIMEDOUT. When it answers after all, well
// or with an error, everything is undone.
func TestImportHangs(t *testing.T) {
	for _, pinned := range []bool{false, true} {
		for _, op := range []string{"attach", "pin", "map"} {
			if op == "pin" && !pinned {
				continue
			}
			for _, answer := range []error{nil, syscall.ENOMEM, syscall.ENODEV} {
				what := fmt.Sprintf("%s, then %v", op, answer)
				e := export(t)
				goOn := e.stop(op)
				patient := impatient(t)
				_, err := importer.Import(e.buffer, all(pinned))
				wantErr(t, what, err, syscall.ETIMEDOUT)
				e.awaitHang(op)
				if op != "attach" { // its reservation is locked: the next importer cannot even attach
					_, err = importer.Import(e.buffer, all(pinned))
					wantErr(t, what+", a second importer", err, syscall.ETIMEDOUT)
				}
				patient()
				e.set(op, answer)
				goOn()
				eventually(t, what+": all is undone", func() bool { return e.counts() == idle })
				e.set(op, nil)
				r := register(t, newTable(), e.buffer, all(pinned))
				r.works(t, what, 1)
				check(t, r.Close())
				e.end()
			}
		}
	}
}

// An exporter that hangs while the buffer is mapped again: the access fails, others that come
// meanwhile do, too, and when the exporter has answered, accesses work.
func TestMapHangsLater(t *testing.T) {
	forgetful(t)
	for _, answer := range []error{nil, syscall.ENOMEM, syscall.ENODEV} {
		what := fmt.Sprintf("then %v", answer)
		e := export(t)
		table := newTable()
		r, other := register(t, table, e.buffer, all(false)), register(t, table, e.buffer, all(false))
		e.move()
		goOn := e.stop("map")
		patient := impatient(t)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { r.fails(t, what, mem.FaultStorage) })
			wg.Go(func() { other.fails(t, what, mem.FaultStorage) })
		}
		wg.Wait()
		patient()
		e.set("map", answer)
		goOn()
		if answer != nil {
			eventually(t, "the exporter answers", func() bool {
				e.mu.Lock()
				defer e.mu.Unlock()
				return e.hangs["map"] == 0
			})
		}
		for _, r := range []region{r, other} {
			r.forgotten(t)
			if answer == syscall.ENODEV {
				r.fails(t, what, mem.FaultRevoked)
			}
		}
		e.set("map", nil)
		for _, r := range []region{r, other} {
			if answer != syscall.ENODEV {
				r.works(t, what, 1)
			}
			check(t, r.Close())
		}
		e.end()
	}
}

// An exporter that hangs while a region is closed: ETIMEDOUT, the key is useless, and what is left
// is done when the exporter answers.
func TestCloseHangs(t *testing.T) {
	for _, op := range []string{"unmap", "unpin", "detach", "release"} {
		e := export(t)
		table := newTable()
		r := register(t, table, e.buffer, all(true))
		if op == "release" {
			e.buffer.Put() // the region has the last reference
		}
		goOn := e.stop(op)
		patient := impatient(t)
		wantErr(t, op, r.Close(), syscall.ETIMEDOUT)
		check(t, r.Close())
		if n := table.Len(); n != 0 {
			t.Errorf("%s: %d regions are left", op, n)
		}
		if f := r.read(0, make([]byte, 1)); f.OK() {
			t.Errorf("%s: the key is good", op)
		}
		e.awaitHang(op)
		patient()
		goOn()
		if op == "release" {
			eventually(t, "the buffer is released", func() bool { return e.counts() == over })
			continue
		}
		e.end()
	}
}

// A region is closed, or registered again, while the exporter hangs in a mapping for it.
func TestCloseWhileMapHangs(t *testing.T) {
	for _, answer := range []error{nil, syscall.ENOMEM, syscall.ENODEV} {
		for _, rereg := range []bool{false, true} {
			what := fmt.Sprintf("then %v, rereg %v", answer, rereg)
			e, second := export(t), export(t)
			r := register(t, newTable(), e.buffer, all(false))
			e.move()
			goOn := e.stop("map")
			next, err := importer.Import(second.buffer, all(false))
			check(t, err)
			patient := impatient(t)
			r.fails(t, what, mem.FaultStorage)
			e.awaitHang("map")
			if rereg {
				err = r.Rereg(regionOn(next))
			} else {
				err = r.Close()
			}
			wantErr(t, what, err, syscall.ETIMEDOUT)
			patient()
			if rereg {
				r.works(t, what, 1)
			}
			e.set("map", answer)
			goOn()
			e.end()
			if rereg {
				r.works(t, what, 2)
				check(t, r.Close())
			} else {
				check(t, next.Close())
			}
			second.end()
		}
	}
}

// The exporter keeps the reservation locked.
func TestLockHangs(t *testing.T) {
	forgetful(t)
	e := export(t)
	r := register(t, newTable(), e.buffer, all(false))
	e.move()
	patient := impatient(t)
	resv := e.buffer.Reservation()
	resv.Lock()
	r.fails(t, "the lock is held", mem.FaultStorage)
	errs := make(chan error)
	go func() {
		_, err := importer.Import(e.buffer, all(false))
		errs <- err
	}()
	wantErr(t, "the lock is held", <-errs, syscall.ETIMEDOUT)
	resv.Unlock()
	patient()
	r.forgotten(t)
	r.works(t, "the lock is free", 1)
	resv.Lock()
	patient = impatient(t)
	wantErr(t, "Close while the lock is held", r.Close(), syscall.ETIMEDOUT)
	patient()
	resv.Unlock()
	e.end()
}

// Regions wait for Kernel fences and no others: at registration, and when they map again.
func TestFencesHang(t *testing.T) {
	forgetful(t)
	for _, pinned := range []bool{false, true} {
		e := export(t)
		resv := e.buffer.Reservation()
		add := func(usage dmabuf.Usage) *dmabuf.Fence {
			f := dmabuf.NewFence()
			resv.Lock()
			defer resv.Unlock()
			resv.Add(f, usage)
			return f
		}
		for _, usage := range []dmabuf.Usage{dmabuf.Write, dmabuf.Read, dmabuf.Bookkeep} {
			add(usage)
		}
		fence := add(dmabuf.Kernel)
		patient := impatient(t)
		_, err := importer.Import(e.buffer, all(pinned))
		wantErr(t, "a Kernel fence", err, syscall.ETIMEDOUT)
		eventually(t, "all is undone", func() bool { return e.counts() == idle })
		patient()
		fence.Signal(nil)
		r := register(t, newTable(), e.buffer, all(pinned))
		fence = add(dmabuf.Kernel)
		r.works(t, "what is mapped waits for nothing", 1)
		if !pinned {
			e.move()
			patient = impatient(t)
			r.fails(t, "a Kernel fence", mem.FaultStorage)
			patient()
			eventually(t, "it is unmapped", func() bool { return e.counts() == "1 attached, 0 pinned, 0 mapped, 0 released" })
			r.forgotten(t)
			done := make(chan struct{})
			go func() {
				defer close(done)
				r.works(t, "after the fence", 2)
				if !fence.Signaled() {
					t.Error("an access has not waited for the Kernel fence")
				}
			}()
			fence.Signal(nil)
			<-done
		}
		check(t, r.Close())
		e.end()
	}
}
