package host

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"
)

// A port of an address has one process, unless all that want it allow others; one listens.
func TestPorts(t *testing.T) {
	a, b := join(t, addr(40), addr(41)), join(t, addr(40), addr(41))
	bind := func(j *joined, port uint16, reuse bool, addrs ...int) *Ports {
		t.Helper()
		p, err := j.BindPort(PortsTCP, port, addrs, reuse)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	taken := func(j *joined, port uint16, reuse bool, addrs ...int) {
		t.Helper()
		if _, err := j.BindPort(PortsTCP, port, addrs, reuse); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("port %d at %d: %v", port, addrs, err)
		}
	}
	listener := func(port uint16, addr, want int) {
		t.Helper()
		for _, j := range []*joined{a, b} {
			if p, ok := j.Listener(PortsTCP, port, addr); ok != (want >= 0) || ok && p != want {
				t.Errorf("port %d at %d: process %d, %v; want %d", port, addr, p, ok, want)
			}
		}
	}
	both := bind(a, 1, false, 0, 1)
	taken(b, 1, false, 1)
	taken(b, 1, true, 0)
	bind(b, 2, false, 1)
	taken(a, 2, false, 0, 1)
	bind(b, 2, false, 0) // what a has bound before it failed is free again
	if _, err := b.BindPort(PortsUDP, 1, []int{0}, false); err != nil {
		t.Errorf("another space: %v", err)
	}
	listener(1, 0, -1)
	if err := both.Listen(); err != nil {
		t.Fatal(err)
	}
	listener(1, 0, a.Slot())
	listener(1, 1, a.Slot())
	both.Free()
	both.Free()
	listener(1, 0, -1)
	bind(b, 1, false, 0)

	first, second := bind(a, 3, true, 0), bind(b, 3, true, 0)
	taken(b, 3, false, 0)
	if err := second.Listen(); err != nil {
		t.Fatal(err)
	}
	listener(3, 0, b.Slot())
	if err := first.Listen(); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("two processes listen: %v", err)
	}
	first.Free()
	listener(3, 0, b.Slot())

	if _, ok := a.Listener(NumPortSpaces, 1, 0); ok {
		t.Error("a space that is none")
	}
	if _, ok := a.Listener(PortsTCP, 1, -1); ok {
		t.Error("an address that is none")
	}
}

// Communication ids of several processes differ, and lead to the process.
func TestCommIDs(t *testing.T) {
	a, b := join(t, addr(42)), join(t, addr(42))
	seen := map[uint32]bool{}
	for range 5000 {
		for _, j := range []*joined{a, b} {
			id := j.NewCommID()
			if p, ok := a.PlaceHolder(int(id >> 24)); id == 0 || seen[id] || !ok || p != j.Slot() {
				t.Fatalf("id %#x: seen %v, process %d, %v", id, seen[id], p, ok)
			}
			seen[id] = true
		}
	}
	if p, ok := b.PlaceOf(a.Slot()); !ok || p != a.first {
		t.Errorf("place %d, %v; want %d", p, ok, a.first)
	}
}

// When a process dies, one of the others hears of its connections, whoever is there first, and its
// port is free. One that leaves has no last words.
func TestLastWords(t *testing.T) {
	a := join(t, addr(43))
	a.Watch()
	c := startWith(t, childEnv+"="+addr(43).String(), -1, modeEnv+"=connected")
	c.expect(t, "connected <nil>")
	b := join(t, addr(43)) // later than the connections
	b.Watch()
	taken := func() bool {
		p, err := a.BindPort(PortsTCP, 7174, []int{0}, false)
		if err == nil {
			p.Free()
		}
		return err != nil
	}
	if !taken() {
		t.Error("the port is free")
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	var heard []uint32
	for range 2 {
		var w LastWords
		select {
		case w = <-a.died:
		case w = <-b.died:
		case <-time.After(20 * time.Second):
			t.Fatal("nobody hears of it")
		}
		if w.State != 1 || w.Peer != netip.MustParseAddr("192.0.2.7") || w.Remote != w.Local+100 || w.QPN != w.Local+200 || w.Addr != 0 {
			t.Errorf("%+v", w)
		}
		heard = append(heard, w.Local)
	}
	if slices.Sort(heard); !slices.Equal(heard, []uint32{100, 101}) {
		t.Errorf("connections %d", heard)
	}
	eventually(t, "the port is free", func() bool { return !taken() })
	for i := range a.dir.chunkHolder {
		eventually(t, "the records are free", func() bool { return a.dir.chunkHolder[i].Load() == 0 })
	}
	if len(a.died)+len(b.died) > 0 {
		t.Error("a connection has last words twice")
	}
}

// Of a process that is alone when it dies, the next one to join hears.
func TestLastWordsLater(t *testing.T) {
	a := join(t, addr(44))
	c := startWith(t, childEnv+"="+addr(44).String(), -1, modeEnv+"=connected")
	c.expect(t, "connected <nil>")
	a.endWatch() // it watches nobody any more
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = c.cmd.Process.Wait()
	b := join(t, addr(44))
	b.Watch()
	for range 2 {
		select {
		case <-b.died:
		case <-time.After(20 * time.Second):
			t.Fatal("nobody hears of it")
		}
	}
}

// A process that leaves in order frees its records, and nobody hears of them.
func TestNoLastWords(t *testing.T) {
	a, b := join(t, addr(45)), join(t, addr(45))
	a.Watch()
	r := b.NewRecord()
	r.Set(&LastWords{State: 1, Peer: addr(9), Local: 1})
	r.Free()
	r.Free()
	(*Record)(nil).Free()
	_ = b.Close()
	a.mourn()
	if len(a.died) > 0 {
		t.Error("last words of a process that has none")
	}
}
