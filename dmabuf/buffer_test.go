package dmabuf

import (
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// Export refuses what cannot be an exporter.
func TestExportRefuses(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Config)
	}{
		{"no Map", func(c *Config) { c.Ops.Map = nil }},
		{"no Unmap", func(c *Config) { c.Ops.Unmap = nil }},
		{"no Release", func(c *Config) { c.Ops.Release = nil }},
		{"Pin alone", func(c *Config) { c.Ops.Unpin = nil }},
		{"Unpin alone", func(c *Config) { c.Ops.Pin = nil }},
		{"Vmap alone", func(c *Config) { c.Ops.Vunmap = nil }},
		{"Vunmap alone", func(c *Config) { c.Ops.Vmap = nil }},
		{"cached and pinned", func(c *Config) { c.Ops.CacheMapping = true }},
		{"no bytes", func(c *Config) { c.Size = 0 }},
		{"too many bytes", func(c *Config) { c.Size = math.MaxInt + 1 }},
	} {
		e := &exporter{t: t}
		cfg := Config{Ops: e.ops(), Size: size}
		c.change(&cfg)
		b, err := Export(cfg)
		wantErr(t, c.name, err, syscall.EINVAL)
		if b != nil {
			t.Errorf("%s: there is a buffer", c.name)
		}
	}
}

// What must be there is enough.
func TestExportLeast(t *testing.T) {
	resv, released := NewReservation(), 0
	b, err := Export(Config{
		Ops: Ops{
			Map:     func(*Attachment, Direction) (*Table, error) { return NewTable(make([]byte, 10)), nil },
			Unmap:   func(*Attachment, *Table, Direction) {},
			Release: func(*Buffer) { released++ },
		},
		Size: 10, Exporter: "least", Reservation: resv, Priv: 7,
	})
	check(t, err)
	if b.Size() != 10 || b.Exporter() != "least" || b.Reservation() != resv || b.Priv() != 7 || b.Name() != "" {
		t.Errorf("a buffer of %d bytes by %q, named %q, for %v", b.Size(), b.Exporter(), b.Name(), b.Priv())
	}
	a, err := b.Attach("device")
	check(t, err)
	if a.Buffer() != b || a.Device() != "device" || a.Dynamic() || a.PeerToPeer() || a.Revocable() {
		t.Errorf("a static attachment is %+v", a)
	}
	locked(resv, func() {
		table, err := a.Map(background(t), Bidirectional)
		check(t, err)
		if !a.Pinned() || table.Len() != 10 {
			t.Error("a static mapping does not pin")
		}
		a.Unmap(table, Bidirectional)
	})
	check(t, b.BeginCPUAccess(background(t), FromDevice))
	check(t, b.EndCPUAccess(FromDevice))
	_, err = b.Mmap(0, 4096)
	wantErr(t, "Mmap", err, syscall.EINVAL)
	locked(resv, func() {
		_, err := b.Vmap()
		wantErr(t, "Vmap", err, syscall.EINVAL)
	})
	a.Detach()
	b.Put()
	if released != 1 {
		t.Errorf("released %d times", released)
	}
}

// The last reference releases the buffer, once and for ever.
func TestReferences(t *testing.T) {
	e := export(t, nil)
	if !e.buffer.Get() {
		t.Fatal("no reference to a buffer that is there")
	}
	e.buffer.Put()
	e.end()
	if e.buffer.Get() {
		t.Error("a reference to a buffer that is released")
	}
	_, err := e.buffer.Attach(nil)
	wantErr(t, "Attach", err, syscall.EINVAL)
	_, err = e.buffer.DynamicAttach(nil, Importer{})
	wantErr(t, "DynamicAttach", err, syscall.EINVAL)
	wantPanic(t, "Put", "released", e.buffer.Put)
	e.want("attach 0, release 1")
}

// An attachment holds the buffer.
func TestAttachmentIsReference(t *testing.T) {
	e := export(t, nil)
	a, err := e.buffer.Attach(nil)
	check(t, err)
	e.buffer.Put()
	e.want("release 0")
	a.Detach()
	e.want("detach 1, release 1")
}

// Of goroutines that take and give references while the last one goes, none gets a buffer that is
// released, and it is released once.
func TestReferencesTogether(t *testing.T) {
	for range 200 {
		var gone atomic.Bool
		b, err := Export(Config{Size: 1, Ops: Ops{
			Map:   func(*Attachment, Direction) (*Table, error) { return nil, nil },
			Unmap: func(*Attachment, *Table, Direction) {},
			Release: func(*Buffer) {
				if gone.Swap(true) {
					t.Error("released twice")
				}
			},
		}})
		check(t, err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 20 {
					if !b.Get() {
						if !gone.Load() && b.refs.Load() > 0 {
							t.Error("no reference, and not released")
						}
						return
					}
					if gone.Load() {
						t.Error("a reference to a buffer that is released")
					}
					b.Put()
				}
			})
		}
		b.Put()
		wg.Wait()
		if !gone.Load() {
			t.Error("not released")
		}
	}
}

// Names have at most 31 bytes.
func TestNames(t *testing.T) {
	e := export(t, nil)
	defer e.end()
	for _, name := range []string{"frame", strings.Repeat("n", 31), ""} {
		check(t, e.buffer.SetName(name))
		if got := e.buffer.Name(); got != name {
			t.Errorf("the name is %q, should be %q", got, name)
		}
	}
	check(t, e.buffer.SetName("kept"))
	wantErr(t, "a long name", e.buffer.SetName(strings.Repeat("n", 32)), syscall.EINVAL)
	if got := e.buffer.Name(); got != "kept" {
		t.Errorf("after a name that is refused it is %q", got)
	}
}

// InvalidateMappings calls the importers of this buffer that want to be called, under the lock.
func TestInvalidateMappings(t *testing.T) {
	resv := NewReservation()
	e := export(t, func(c *Config) { c.Reservation = resv })
	other := export(t, func(c *Config) { c.Reservation = resv })
	defer e.end()
	defer other.end()
	var told []*Attachment
	tell := Importer{InvalidateMappings: func(a *Attachment) {
		a.Buffer().Reservation().mustHold("the callback")
		told = append(told, a)
	}}
	first, err := e.buffer.DynamicAttach(1, tell)
	check(t, err)
	second, err := e.buffer.DynamicAttach(2, tell)
	check(t, err)
	silent, err := e.buffer.DynamicAttach(3, Importer{AllowPeer2Peer: true})
	check(t, err)
	static, err := e.buffer.Attach(4)
	check(t, err)
	elsewhere, err := other.buffer.DynamicAttach(5, tell)
	check(t, err)
	if !first.Revocable() || silent.Revocable() || static.Revocable() || !silent.Dynamic() || !silent.PeerToPeer() || first.PeerToPeer() {
		t.Error("the attachments do not say what they are")
	}
	locked(resv, func() {
		if n := len(e.buffer.Attachments()); n != 4 {
			t.Errorf("%d attachments", n)
		}
		e.buffer.InvalidateMappings()
	})
	if len(told) != 2 || told[0] != first || told[1] != second {
		t.Errorf("%d importers were told", len(told))
	}
	first.Detach()
	told = nil
	locked(resv, e.buffer.InvalidateMappings)
	if len(told) != 1 || told[0] != second {
		t.Errorf("%d importers were told after the first has detached", len(told))
	}
	for _, a := range []*Attachment{second, silent, static, elsewhere} {
		a.Detach()
	}
}

// Cached mappings would not notice that memory moves.
func TestInvalidateCached(t *testing.T) {
	e := export(t, cached)
	defer e.end()
	locked(e.buffer.resv, func() {
		wantPanic(t, "InvalidateMappings", "cached", e.buffer.InvalidateMappings)
	})
}

// cached makes an exporter of memory whose mappings are cached, which cannot be pinned.
func cached(c *Config) { c.Ops.CacheMapping, c.Ops.Pin, c.Ops.Unpin = true, nil, nil }
