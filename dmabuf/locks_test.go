package dmabuf

import (
	"context"
	"testing"
)

// Every rule of the package's documentation: a call that breaks it panics, and the same call in
// the other state of the lock does not. That the exporter's operations run as the rules say is
// checked by the exporter of all tests.
func TestLockRules(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		call  string
		holds bool // the rule is that the caller holds the lock
		do    func(b *Buffer, a *Attachment)
	}{
		{"Pin", true, func(_ *Buffer, a *Attachment) { _ = a.Pin() }},
		{"Unpin", true, func(_ *Buffer, a *Attachment) { a.Unpin() }},
		{"Pinned", true, func(_ *Buffer, a *Attachment) { a.Pinned() }},
		{"Map", true, func(_ *Buffer, a *Attachment) { _, _ = a.Map(ctx, Bidirectional) }},
		{"Unmap", true, func(_ *Buffer, a *Attachment) { a.Unmap(a.Priv.(*Table), Bidirectional) }},
		{"Vmap", true, func(b *Buffer, _ *Attachment) { _, _ = b.Vmap() }},
		{"Vunmap", true, func(b *Buffer, _ *Attachment) { b.Vunmap() }},
		{"Kmap", true, func(b *Buffer, _ *Attachment) { _, _ = b.Kmap(99) }},
		{"Vunmap", true, func(b *Buffer, _ *Attachment) { b.Kunmap() }},
		{"InvalidateMappings", true, func(b *Buffer, _ *Attachment) { b.InvalidateMappings() }},
		{"Attachments", true, func(b *Buffer, _ *Attachment) { b.Attachments() }},
		{"Reservation.Add", true, func(b *Buffer, _ *Attachment) { b.resv.Add(NewFence(), Bookkeep) }},
		{"Attach", false, func(b *Buffer, _ *Attachment) { _, _ = b.Attach(nil) }},
		{"Attach", false, func(b *Buffer, _ *Attachment) { _, _ = b.DynamicAttach(nil, revocable) }},
		{"Detach", false, func(_ *Buffer, a *Attachment) { a.mapped, a.pins = 0, 0; a.Detach() }},
		{"Get", false, func(b *Buffer, _ *Attachment) { b.Get() }},
		{"Put", false, func(b *Buffer, _ *Attachment) { b.Put() }},
		{"Mmap", false, func(b *Buffer, _ *Attachment) { _, _ = b.Mmap(0, 4096) }},
		{"BeginCPUAccess", false, func(b *Buffer, _ *Attachment) { _ = b.BeginCPUAccess(ctx, ToDevice) }},
		{"EndCPUAccess", false, func(b *Buffer, _ *Attachment) { _ = b.EndCPUAccess(ToDevice) }},
	} {
		run := func(held bool) {
			e := export(t, nil)
			a := e.attach(&revocable)
			locked(e.buffer.resv, func() { // something for Unpin, Unmap and Vunmap
				check(t, a.Pin())
				a.Priv = mapIt(t, a, Bidirectional)
				_, err := e.buffer.Vmap()
				check(t, err)
			})
			if held {
				e.buffer.resv.Lock()
				defer e.buffer.resv.Unlock()
			}
			c.do(e.buffer, a)
		}
		run(c.holds)
		words := "dmabuf: " + c.call + " without the reservation lock"
		if !c.holds {
			words = "dmabuf: " + c.call + " with the reservation lock held"
		}
		wantPanic(t, c.call, words, func() { run(!c.holds) })
	}
}

// The lock itself: it is not locked again by its holder, as in an importer's callback, and nobody
// else unlocks it.
func TestLockOnce(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	r := e.buffer.resv
	again := func(what string) {
		wantPanic(t, what, "locked by this goroutine already", r.Lock)
		wantPanic(t, what, "locked by this goroutine already", func() { _ = r.LockContext(context.Background()) })
		if r.TryLock() {
			t.Errorf("%s: TryLock locks again", what)
		}
	}
	locked(r, func() {
		again("Lock")
		done := make(chan struct{})
		go func() {
			defer close(done)
			wantPanic(t, "Unlock", "another goroutine", r.Unlock)
		}()
		<-done
	})
	wantPanic(t, "Unlock", "another goroutine", r.Unlock)
	told := false
	a := e.attach(&Importer{InvalidateMappings: func(*Attachment) {
		told = true
		again("a callback")
	}})
	locked(r, e.buffer.InvalidateMappings)
	if !told {
		t.Error("the importer was not told")
	}
	a.Detach()
}

// Without the checks, breaches pass and the lock still works.
func TestNoChecks(t *testing.T) {
	CheckLocks(false)
	defer CheckLocks(true)
	r := NewReservation()
	r.Add(NewFence(), Read)
	done := make(chan struct{})
	r.Lock()
	go func() {
		defer close(done)
		r.Unlock()
	}()
	<-done
	wantPanic(t, "Unlock", "not locked", r.Unlock)
}
