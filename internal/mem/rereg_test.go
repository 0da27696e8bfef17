package mem_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// counted is a backing whose end is watched, and may fail.
type counted struct {
	*mem.Host
	closes int
	err    error
	peer   bool
}

func (c *counted) Close() error     { c.closes++; return errors.Join(c.err, c.Host.Close()) }
func (c *counted) PeerMemory() bool { return c.peer }

func wantState(t *testing.T, what string, err error, state ib.ReregState, errno syscall.Errno) {
	t.Helper()
	var failed *ib.ReregError
	if !errors.As(err, &failed) || failed.State != state || !errors.Is(err, errno) {
		t.Errorf("%s: %v, should be %v: %v", what, err, state, errno)
	}
}

// works returns how an access of a domain, with a right, to the first 8 bytes of a
// region ends.
func works(table *mem.Table, key uint32, addr uint64, right ib.Access, pd uint32) mem.FaultKind {
	_, release, f := mem.Hold(table, key, addr, 8, right, mem.Actor{PD: pd})
	release()
	return f.Kind
}

// A region changes its memory, domain and rights, alone and together: only the
// new key works, on the new memory, and the old memory is given back.
func TestRereg(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{})
	const all = ib.AccessLocalWrite | ib.AccessRemote
	first, second := &counted{Host: host(t, 100)}, &counted{Host: host(t, 200)}
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: all, IOVA: 0x1000, Length: 100, Backing: first})
	if err != nil {
		t.Fatal(err)
	}
	keys := map[uint32]bool{r.Key(): true}
	for _, c := range []struct {
		name string
		cfg  mem.RegionConfig
	}{
		{"nothing", mem.RegionConfig{PD: 1, Access: all, IOVA: 0x1000, Length: 100, Backing: first}},
		{"access", mem.RegionConfig{PD: 1, Access: ib.AccessRemoteRead, IOVA: 0x1000, Length: 100, Backing: first}},
		{"domain", mem.RegionConfig{PD: 2, Access: ib.AccessRemoteRead, IOVA: 0x1000, Length: 100, Backing: first}},
		{"address", mem.RegionConfig{PD: 2, Access: ib.AccessRemoteRead, IOVA: 0x9000, Length: 50, Backing: first}},
		{"memory", mem.RegionConfig{PD: 2, Access: ib.AccessRemoteRead, IOVA: 0x9000, Length: 200, Backing: second}},
		{"all", mem.RegionConfig{PD: 1, Access: all | ib.AccessZeroBased, Length: 60, Backing: &counted{Host: host(t, 60)}}},
	} {
		old, oldAddr := r.Key(), r.IOVA()
		if err := r.Rereg(c.cfg); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if keys[r.Key()] || table.Lookup(r.Key()) != r || table.Len() != 1 {
			t.Errorf("%s: key %#x", c.name, r.Key())
		}
		keys[r.Key()] = true
		if got, ok := r.Snapshot(); !ok || got != c.cfg || r.Kind() != mem.KindPinned {
			t.Errorf("%s: %+v, should be %+v", c.name, got, c.cfg)
		}
		if got := works(table, old, oldAddr, ib.AccessRemoteRead, c.cfg.PD); got != mem.FaultKey {
			t.Errorf("%s: the old key: %v", c.name, got)
		}
		for _, try := range []struct {
			right ib.Access
			pd    uint32
		}{{ib.AccessRemoteRead, 1}, {ib.AccessRemoteWrite, 1}, {ib.AccessRemoteRead, 2}, {ib.AccessRemoteWrite, 2}} {
			want := mem.FaultNone
			if try.pd != c.cfg.PD {
				want = mem.FaultDomain
			} else if try.right&^c.cfg.Access != 0 {
				want = mem.FaultAccess
			}
			if got := works(table, r.Key(), c.cfg.IOVA, try.right, try.pd); got != want {
				t.Errorf("%s: %v by domain %d: %v, should be %v", c.name, try.right, try.pd, got, want)
			}
		}
	}
	if first.closes != 1 || second.closes != 1 {
		t.Errorf("the old memory was closed %d and %d times", first.closes, second.closes)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// The error of a failed Rereg has what the region is then.
func TestReregFails(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{})
	const access = ib.AccessRemoteRead | ib.AccessLocalWrite | ib.AccessRemoteInvalidate
	register := func() (*mem.Region, *counted, mem.RegionConfig) {
		c := &counted{Host: host(t, 100)}
		cfg := mem.RegionConfig{PD: 1, Access: access, Length: 100, Backing: c}
		r, err := table.Register(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		return r, c, cfg
	}
	r, c, good := register()
	key := r.Key()
	for name, bad := range map[string]func(cfg *mem.RegionConfig){
		"rights":         func(cfg *mem.RegionConfig) { cfg.Access = ib.AccessRemoteWrite },
		"unknown rights": func(cfg *mem.RegionConfig) { cfg.Access = 1 << 7 },
		"too long":       func(cfg *mem.RegionConfig) { cfg.Length = 101 },
		"wrapping":       func(cfg *mem.RegionConfig) { cfg.IOVA = ^uint64(0) - 98 },
		"not persistent": func(cfg *mem.RegionConfig) { cfg.Access |= ib.AccessFlushPersistent },
	} {
		cfg := good
		bad(&cfg)
		wantState(t, name, r.Rereg(cfg), ib.ReregOldValid, syscall.EINVAL)
		if r.Key() != key || works(table, key, 0, ib.AccessRemoteRead, 1) != mem.FaultNone || c.closes != 0 {
			t.Errorf("%s: the old region does not work", name)
		}
	}
	// Peer memory: neither from it nor to it.
	peer := &counted{Host: host(t, 100), peer: true}
	to := good
	to.Backing = peer
	wantState(t, "to peer memory", r.Rereg(to), ib.ReregOldValid, syscall.EOPNOTSUPP)
	c.peer = true
	wantState(t, "of peer memory", r.Rereg(good), ib.ReregOldValid, syscall.EOPNOTSUPP)
	if peer.closes != 0 || works(table, key, 0, ib.AccessRemoteRead, 1) != mem.FaultNone {
		t.Error("the old region does not work")
	}

	// The old memory returns an error when it is given back.
	r, c, good = register()
	c.err = syscall.EIO
	to = good
	to.Backing = host(t, 100)
	wantState(t, "the old memory fails", r.Rereg(to), ib.ReregNewValid, syscall.EIO)
	if b := r.Backing(); b != to.Backing || works(table, r.Key(), 0, ib.AccessRemoteRead, 1) != mem.FaultNone {
		t.Error("the new region does not work")
	}

	r, _, good = register()
	if f := table.Invalidate(r.Key(), mem.Actor{PD: 1}); !f.OK() {
		t.Fatal(f)
	}
	wantState(t, "invalidated", r.Rereg(good), ib.ReregUnusable, syscall.EINVAL)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	wantState(t, "closed", r.Rereg(good), ib.ReregUnusable, syscall.EINVAL)
}

// Peer memory takes no windows.
func TestPeerMemory(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{})
	_, err := table.Register(mem.RegionConfig{Access: ib.AccessMWBind, Length: 100, Backing: &counted{Host: host(t, 100), peer: true}})
	wantErrno(t, err, syscall.EOPNOTSUPP, "peer memory")
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, Length: 100, Backing: &counted{Host: host(t, 100), peer: true}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	w, err := table.AllocWindow(1, ib.MWType2)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	b := ib.MWBind{MW: w.Key(), LKey: r.Key(), Length: 10, Access: ib.AccessRemoteRead}
	if f := table.Bind(&b, false, mem.Actor{PD: 1}); f.Kind != mem.FaultAccess {
		t.Errorf("a window on peer memory: %v", f)
	}
}

// Memory is registered for reading alone, and then for writing: it has to be
// writable then.
func TestReregAdapts(t *testing.T) {
	writable, readOnly := anon(t, page, 3), anon(t, page, 1)
	for _, c := range []struct {
		b  []byte
		ok bool
	}{{writable, true}, {readOnly, false}, {make([]byte, page), true}} {
		h, err := mem.NewHostBytes(c.b, 0, ib.LockOff)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			err = h.Adapt(ib.AccessLocalWrite)
			if (err == nil) != c.ok || !c.ok && !errors.Is(err, syscall.EFAULT) {
				t.Errorf("writing: %v", err)
			}
		}
		if err := h.Adapt(ib.AccessFlushPersistent); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("persistence: %v", err)
		}
		if err := h.Adapt(ib.AccessRemoteRead); err != nil {
			t.Error(err)
		}
	}
}

// A region goes back and forth between two memories under fire. A message is in
// one of them, whole; and the one that the region has left does not change.
func TestReregUnderFire(t *testing.T) {
	const size = 64 << 10
	rng := rand.New(rand.NewPCG(memtest.Seed(t), 0))
	table := mem.NewTable(mem.TableConfig{})
	var memory [2][]byte
	backing := func(i int) mem.Backing {
		h, err := mem.NewHostBytes(memory[i], ib.AccessLocalWrite, ib.LockOff)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	memory[0], memory[1] = make([]byte, size), make([]byte, size)
	cfg := mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, Length: size, Backing: backing(0)}
	r, err := table.Register(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var done atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	wg.Go(func() {
		msg := make([]byte, size)
		for n := byte(1); !stop.Load(); n++ {
			for i := range msg {
				msg[i] = n
			}
			l := &mem.List{Table: table, Actor: who, Access: ib.AccessRemoteWrite, SGEs: []ib.SGE{{Length: size, LKey: r.Key()}}}
			switch f, _ := mem.Copy(l, &mem.List{Raw: [][]byte{msg}}, size, true); {
			case f.OK():
				done.Add(1)
			case f.Kind != mem.FaultKey && f.Kind != mem.FaultDead:
				t.Error(f)
				return
			}
		}
	})
	wg.Go(func() { // what asks without an access finds the region as it was or as it is
		for !stop.Load() {
			l := &mem.List{Table: table, Actor: who, SGEs: []ib.SGE{{Length: size, LKey: r.Key()}}}
			if table.Staged(r.Key()) || l.Owner(size) != nil {
				t.Error("an engine moves plain memory")
				return
			}
			runtime.Gosched()
		}
	})
	for round := range 100 {
		for before := done.Load(); done.Load() < before+2 && !t.Failed(); {
			time.Sleep(10 * time.Microsecond)
		}
		time.Sleep(time.Duration(rng.IntN(50)) * time.Microsecond)
		cfg.Backing = backing((round + 1) % 2)
		if err := r.Rereg(cfg); err != nil {
			t.Fatal(err)
		}
		left := memory[round%2]
		for i := range left {
			if left[i] != left[0] {
				t.Fatalf("round %d: half a message was left behind", round)
			}
		}
		before := bytes.Clone(left)
		time.Sleep(20 * time.Microsecond)
		if !bytes.Equal(left, before) {
			t.Fatalf("round %d: memory changed that the region has left", round)
		}
	}
	stop.Store(true)
	wg.Wait()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}
