package host

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"
)

// watcherEnv names a watcher's socket to a process of the tests.
const watcherEnv = "VERBENA_HOST_TEST_WATCHER"

// farewell is what a watcher was called with.
type farewell struct {
	addrs []netip.Addr
	words []LastWords
}

// watcher serves as a watcher, until end is called, which waits for it.
func watcher(t *testing.T) (name string, died <-chan farewell, end func()) {
	t.Helper()
	name = fmt.Sprintf("@verbena-host-test-%x", random())
	l, err := listen(name)
	if err != nil {
		t.Fatal(err)
	}
	ended, done, said := make(chan struct{}), make(chan error, 1), make(chan farewell, 10)
	go func() {
		done <- ServeWatcher(l, ended, func(addrs []netip.Addr, words []LastWords) { said <- farewell{addrs, words} })
	}()
	once := false
	end = func() {
		if once {
			return
		}
		once = true
		close(ended)
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the watcher does not end")
		}
	}
	t.Cleanup(end)
	return name, said, end
}

// The watcher says the last words of the last process of a device, also if it was told to end
// before.
func TestWatcher(t *testing.T) {
	for _, told := range []bool{false, true} {
		name, died, end := watcher(t)
		c := startWith(t, childEnv+"="+addr(70).String(), -1, modeEnv+"=connected", watcherEnv+"="+name)
		c.expect(t, "watched <nil>")
		ended := make(chan struct{})
		if told {
			go func() { defer close(ended); end() }()
			select {
			case <-ended:
				t.Fatal("the watcher ends before the process does")
			case <-time.After(50 * time.Millisecond):
			}
		}
		if err := c.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		select {
		case f := <-died:
			if !slices.Equal(f.addrs, []netip.Addr{addr(70)}) || len(f.words) != 2 || f.words[0].Local+f.words[1].Local != 201 || f.words[0].Peer != netip.MustParseAddr("192.0.2.7") {
				t.Errorf("%+v", f)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the watcher does not hear of it")
		}
		if told {
			<-ended
		} else {
			end()
		}
	}
}

// A connection that outlives the process, in a child, does not keep the watcher from seeing its end.
func TestWatcherHeldOpen(t *testing.T) {
	name, died, end := watcher(t)
	a := join(t, addr(74))
	a.endWatch() // it watches nobody
	c := startWith(t, childEnv+"="+addr(74).String(), -1, modeEnv+"=connected")
	c.expect(t, "connected <nil>")
	held, err := dial(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := send(held, &request{Op: opWatch, Protocol: protocol, Addrs: a.cfg.Addrs}, a.dir.fd); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-died:
		if len(f.words) != 2 {
			t.Errorf("%+v", f)
		}
	case <-time.After(20 * time.Second):
		t.Error("the watcher does not hear of it")
	}
	_ = held.Close()
	end()
}

// The same holds for the other processes of the device.
func TestWatchHeldOpen(t *testing.T) {
	a := join(t, addr(75))
	c := startWith(t, childEnv+"="+addr(75).String(), -1, modeEnv+"=connected")
	c.expect(t, "connected <nil>")
	a.endWatch() // so that the connection that follows is the only one
	a.watch.mu.Lock()
	a.watch.closed, a.watch.ending = false, make(chan struct{})
	a.watch.mu.Unlock()
	held, err := dial(processName(addr(75), a.self))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := send(held, &request{Op: opWatch, Protocol: protocol}); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		select {
		case <-a.died:
		case <-time.After(20 * time.Second):
			t.Fatal("nobody hears of it")
		}
	}
}

// A process that leaves in order has no last words.
func TestWatcherLeaves(t *testing.T) {
	name, died, end := watcher(t)
	c := startWith(t, childEnv+"="+addr(71).String(), -1, modeEnv+"=connected", watcherEnv+"="+name)
	c.expect(t, "watched <nil>")
	_ = c.in.Close()
	if err := c.cmd.Wait(); err != nil {
		t.Error(err)
	}
	end()
	for len(died) > 0 {
		if f := <-died; len(f.words) > 0 {
			t.Errorf("last words %+v", f)
		}
	}
}

// Of several processes that see a process die, one says its last words.
func TestWatcherAndOthers(t *testing.T) {
	name, died, end := watcher(t)
	a := join(t, addr(72))
	a.Watch()
	for range 5 {
		c := startWith(t, childEnv+"="+addr(72).String(), -1, modeEnv+"=connected", watcherEnv+"="+name)
		c.expect(t, "watched <nil>")
		if err := c.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		a.buried(t, c)
		heard := 0
		for limit := time.After(20 * time.Second); heard < 2; {
			select {
			case <-a.died:
				heard++
			case f := <-died:
				heard += len(f.words)
			case <-limit:
				t.Fatalf("%d of 2 connections were heard of", heard)
			}
		}
	}
	end()
	for len(died) > 0 {
		if f := <-died; len(f.words) > 0 {
			t.Errorf("last words again: %+v", f)
		}
	}
	for i := range a.dir.process {
		if id := a.dir.who(i); id != 0 && id != a.self {
			t.Errorf("entry %d is not free", i)
		}
	}
}

// Whoever calls without a directory is sent away, and the watcher goes on.
func TestWatcherBadCalls(t *testing.T) {
	name, _, _ := watcher(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	fd := int(r.Fd())
	for i, call := range []func(c *net.UnixConn) error{
		func(c *net.UnixConn) error { _, err := c.Write([]byte("{")); return err },
		func(c *net.UnixConn) error { return send(c, &request{Op: opWatch, Protocol: protocol}) },
		func(c *net.UnixConn) error {
			return send(c, &request{Op: opWatch, Protocol: protocol, Addrs: []netip.Addr{addr(73)}})
		},
		func(c *net.UnixConn) error {
			return send(c, &request{Op: opWatch, Protocol: protocol, Addrs: []netip.Addr{addr(73)}}, fd)
		},
		func(c *net.UnixConn) error {
			return send(c, &request{Op: opWatch, Protocol: protocol, Addrs: []netip.Addr{addr(73)}}, fd, fd)
		},
		func(c *net.UnixConn) error {
			return send(c, &request{Op: opLook, Protocol: protocol, Addrs: []netip.Addr{addr(73)}}, fd)
		},
	} {
		c, err := dial(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := call(c); err != nil {
			t.Error(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := c.Read(make([]byte, 1)); n != 0 || os.IsTimeout(err) {
			t.Errorf("call %d: %d bytes, %v; want the end", i, n, err)
		}
		_ = c.Close()
	}
}

// A process calls the watcher and dies at once, before the watcher has accepted the call: its last words
// are said all the same.
func TestWatcherCalledLast(t *testing.T) {
	for range 20 {
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: fmt.Sprintf("@verbena-test-last-%d", os.Getpid()), Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		c := startWith(t, childEnv+"="+addr(79).String(), -1, modeEnv+"=connected", watcherEnv+"="+l.Addr().String())
		c.expect(t, "watched <nil>")
		if err := c.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = c.cmd.Wait() // it was killed
		ended, words := make(chan struct{}), 0
		close(ended)
		if err := ServeWatcher(l, ended, func(_ []netip.Addr, w []LastWords) { words += len(w) }); err != nil {
			t.Fatal(err)
		}
		if words != 2 {
			t.Fatalf("the last words of %d connections are said, of 2", words)
		}
	}
}
