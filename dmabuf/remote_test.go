package dmabuf

// Processes that lie to each other.

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// dialServer connects to this process's own socket.
func dialServer(t *testing.T) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: "@" + server.name(), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// hungUp reports whether the server ends the connection, after messages that it may have sent.
func hungUp(t *testing.T, c *net.UnixConn) bool {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	for range 100 {
		n, fds, err := sys.RecvFDs(c, make([]byte, maxMessage))
		closeAll(fds)
		if err != nil || n == 0 {
			return !errors.Is(err, net.ErrClosed)
		}
	}
	return false
}

// An importer that breaks the rules is dropped, and leaves nothing: neither an attachment nor a pin.
func TestLyingImporter(t *testing.T) {
	m, err := Alloc(MemoryConfig{Size: 8192, Segments: 2})
	if err != nil {
		t.Fatal(err)
	}
	fd, err := m.Buffer().FD()
	if err != nil {
		t.Fatal(err)
	}
	hello := encode(msgHello, remoteVersion)
	send := func(c *net.UnixConn, b []byte, fds ...int) {
		_ = sys.SendFDs(c, b, fds...) // the server may have gone
	}
	for name, lie := range map[string]func(c *net.UnixConn){
		"nothing":            func(c *net.UnixConn) { _ = c.CloseWrite() },
		"no descriptor":      func(c *net.UnixConn) { send(c, hello) },
		"another descriptor": func(c *net.UnixConn) { send(c, hello, unix.Stderr) },
		"two descriptors":    func(c *net.UnixConn) { send(c, hello, fd, fd) },
		"another version":    func(c *net.UnixConn) { send(c, encode(msgHello, 99), fd) },
		"a short message":    func(c *net.UnixConn) { send(c, hello[:7], fd) },
		"a long message":     func(c *net.UnixConn) { send(c, make([]byte, 4096), fd) },
		"no kind":            func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(0)) },
		"an unknown kind":    func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(77, 1, 2)) },
		"unmapped":           func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgUnmapped)) },
		"unpin":              func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgUnpin)) },
		"invalidated":        func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgInvalidated)) },
		"no direction":       func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgMap)) },
		"a wrong direction":  func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgMap, 9)) },
		"no class":           func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgExportFence)) },
		"a wrong class":      func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgExportFence, 4)) },
		"no fence":           func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgImportFence, 0)) },
		"two fences":         func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgImportFence, 0), fd, fd) },
		"control after that": func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgControl, 1, 0, 1, 0, 0, 0, 0), fd) },
		"hello again":        func(c *net.UnixConn) { send(c, hello, fd); send(c, hello, fd) },
		"mapped, then a lie": func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgMap, 0)); send(c, encode(77)) },
		"pinned, then gone":  func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgPin)); _ = c.CloseWrite() },
		"mapped too often": func(c *net.UnixConn) {
			send(c, hello, fd)
			for range maxRemoteMappings + 1 {
				send(c, encode(msgMap, 0))
			}
		},
		"unmapped twice": func(c *net.UnixConn) {
			send(c, hello, fd)
			send(c, encode(msgMap, 0))
			send(c, encode(msgUnmapped))
			send(c, encode(msgUnmapped))
		},
		"mapped, then a file": func(c *net.UnixConn) { send(c, hello, fd); send(c, encode(msgMap, 0), fd); send(c, encode(0)) },
	} {
		c := dialServer(t)
		lie(c)
		if !hungUp(t, c) {
			t.Errorf("%s: the connection has not ended", name)
		}
		_ = c.Close()
	}
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 300 { // any messages in any order
		c := dialServer(t)
		send(c, hello, fd)
		for range rng.IntN(20) {
			send(c, encode(message(rng.IntN(18)), make([]uint64, rng.IntN(3))...))
		}
		_ = c.CloseWrite()
		if !hungUp(t, c) {
			t.Fatal("the connection has not ended")
		}
		_ = c.Close()
	}
	r := m.Buffer().Reservation()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		r.Lock()
		left, pins := len(m.buffer.attachments), m.pins
		mapped := len(m.tables)
		r.Unlock()
		if left+pins+mapped == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d attachments, %d pins, %d mappings are left", left, pins, mapped)
		}
	}
	if err := m.Move(t.Context()); err != nil {
		t.Error(err)
	}
	_ = sys.CloseFD(fd)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// An exporter that lies is not believed: what it shows is checked, and its end is the buffer's.
func TestLyingExporter(t *testing.T) {
	const size = 3 * 4096 // of the buffer
	name := handlePrefix + "0123456789abcdef0123456789abcdef"
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "@" + name, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	handle, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sys.CloseFD(handle) }()
	sealed, err := sys.NewMemfd("sealed", size)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sys.CloseFD(sealed) }()
	open, err := unix.MemfdCreate("open", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sys.CloseFD(open) }()

	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()

	const max = ^uint64(0)
	for what, c := range map[string]struct {
		welcome, mapped []byte
		fds             []int
		want            syscall.Errno // of Map
	}{
		"it is right":            {mapped: encode(msgMapped, 0, 0, 0, 0, size), fds: []int{sealed}},
		"it is given up":         {mapped: encode(msgMapped, 0, givenUp, 0, 0, size), fds: []int{sealed}},
		"in two segments":        {mapped: encode(msgMapped, 0, 0, 0, 4096, 8192, 0, 0, 4096), fds: []int{sealed}},
		"in two files":           {mapped: encode(msgMapped, 0, 0, 1, 4096, 8192, 0, 0, 4096), fds: []int{sealed, sealed}},
		"a file without seals":   {mapped: encode(msgMapped, 0, 0, 0, 0, size), fds: []int{open}, want: syscall.EPERM},
		"no memory file":         {mapped: encode(msgMapped, 0, 0, 0, 0, size), fds: []int{int(null.Fd())}, want: syscall.EINVAL},
		"no file":                {mapped: encode(msgMapped, 0, 0, 0, 0, size), want: syscall.ENODEV},
		"two files given up":     {mapped: encode(msgMapped, 0, givenUp, 0, 0, size), fds: []int{sealed, sealed}, want: syscall.ENODEV},
		"another file":           {mapped: encode(msgMapped, 0, 0, 1, 0, size), fds: []int{sealed}, want: syscall.ENODEV},
		"a file far away":        {mapped: encode(msgMapped, 0, 0, max, 0, size), fds: []int{sealed}, want: syscall.ENODEV},
		"behind the end":         {mapped: encode(msgMapped, 0, 0, 0, 8192, size), fds: []int{sealed}, want: syscall.ENODEV},
		"a sum that wraps":       {mapped: encode(msgMapped, 0, 0, 0, max-4095, 4096+size), fds: []int{sealed}, want: syscall.ENODEV},
		"too few bytes":          {mapped: encode(msgMapped, 0, 0, 0, 0, 4096), fds: []int{sealed}, want: syscall.ENODEV},
		"too many bytes":         {mapped: encode(msgMapped, 0, 0, 0, 0, size, 0, 0, 4096), fds: []int{sealed}, want: syscall.ENODEV},
		"half a segment":         {mapped: encode(msgMapped, 0, 0, 0, 0), fds: []int{sealed}, want: syscall.ENODEV},
		"no segment":             {mapped: encode(msgMapped), fds: []int{sealed}, want: syscall.ENODEV},
		"another message":        {mapped: encode(msgWelcome, 0, 0), want: syscall.ENODEV},
		"an answer nobody wants": {mapped: encode(msgPinned), want: syscall.ENODEV},
		"an error":               {mapped: encode(msgMapped, uint64(syscall.EBUSY)), want: syscall.EBUSY},
		"the end":                {want: syscall.ENODEV},
	} {
		t.Run(what, func(t *testing.T) {
			finished := make(chan struct{})
			go func() { // the exporter
				defer close(finished)
				conn, err := l.AcceptUnix()
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = conn.Close() }()
				b := make([]byte, 64)
				_, fds, _ := sys.RecvFDs(conn, b)
				closeAll(fds)
				_ = sys.SendFDs(conn, encode(msgWelcome, 0, size))
				_, _, _ = sys.RecvFDs(conn, b) // MAP
				if c.mapped != nil {
					_ = sys.SendFDs(conn, c.mapped, c.fds...)
					n, _, _ := sys.RecvFDs(conn, b) // UNMAPPED, or the end
					kind, _ := decode(b[:n])
					if ended := c.want == syscall.ENODEV || c.want == syscall.EBUSY; ended == (kind == msgUnmapped) {
						t.Errorf("the exporter hears %d at last", kind)
					}
				}
			}()
			b, err := Get(handle)
			if err != nil {
				t.Fatal(err)
			}
			a, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) {}})
			if err != nil {
				t.Fatal(err)
			}
			r := b.Reservation()
			r.Lock()
			table, err := a.Map(t.Context(), Bidirectional)
			switch {
			case c.want == 0 && err != nil, c.want != 0 && !errors.Is(err, c.want):
				t.Errorf("%v, want %v", err, c.want)
			case err == nil:
				table.Segments()[0][0] = 1 // it is there
				a.Unmap(table, Bidirectional)
			}
			r.Unlock()
			a.Detach()
			b.Put()
			<-finished
		})
	}
}

// A process that maps, unmaps and pins while the exporter moves the buffer: neither waits for the other
// for longer than the other's accesses last.
func TestRemoteCrossing(t *testing.T) {
	m, err := Alloc(MemoryConfig{Size: 8192, Segments: 2})
	check(t, err)
	fd, err := m.Buffer().FD()
	check(t, err)
	b, err := fromProcess("test", fd, server.name()) // as another process would
	check(t, err)
	check(t, sys.CloseFD(fd))
	r := b.Reservation()
	var table *Table // guarded by the reservation lock
	drop := func(a *Attachment) {
		if table != nil {
			a.Unmap(table, Bidirectional)
			table = nil
		}
	}
	mapper, err := b.DynamicAttach(nil, Importer{InvalidateMappings: drop})
	check(t, err)
	pinner, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) {}})
	check(t, err)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	again := func(do func()) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					do()
				}
			}
		})
	}
	again(func() { // maps and unmaps
		locked(r, func() {
			if table == nil {
				var err error
				if table, err = mapper.Map(t.Context(), Bidirectional); err != nil {
					t.Errorf("mapping: %v", err)
				}
			} else {
				drop(mapper)
			}
		})
	})
	pins := 0
	again(func() {
		locked(r, func() {
			switch err := pinner.Pin(); {
			case err == nil:
				pins++
				pinner.Unpin()
			case !errors.Is(err, syscall.EBUSY):
				t.Errorf("pinning: %v", err)
			}
		})
	})
	moves, refused := 0, 0
	for start := time.Now(); moves+refused < 3000 && time.Since(start) < 10*time.Second && !t.Failed(); {
		ctx, cancel := context.WithTimeout(t.Context(), remotePatience/2)
		switch err := m.Move(ctx); {
		case err == nil:
			moves++
		case errors.Is(err, syscall.EBUSY): // it is pinned
			refused++
		default:
			t.Errorf("moving: %v", err)
		}
		cancel()
	}
	close(stop)
	wg.Wait()
	t.Logf("%d moves, %d refused, %d pins", moves, refused, pins)
	if moves == 0 || pins == 0 {
		t.Error("nothing has moved, or nothing was pinned")
	}
	locked(r, func() { drop(mapper) })
	mapper.Detach()
	pinner.Detach()
	b.Put()
	check(t, m.Close())
}

// The process of an importer ends just before the exporter moves the buffer: the exporter waits for no
// answer, also if it has the lock that it takes to unmap what the importer had.
func TestRemoteEndsBeforeMove(t *testing.T) {
	m, err := Alloc(MemoryConfig{Size: 8192})
	check(t, err)
	fd, err := m.Buffer().FD()
	check(t, err)
	c := dialServer(t)
	check(t, sys.SendFDs(c, encode(msgHello, remoteVersion), fd))
	check(t, sys.SendFDs(c, encode(msgMap, uint64(Bidirectional))))
	for range 2 { // WELCOME and MAPPED
		_, fds, err := sys.RecvFDs(c, make([]byte, maxMessage))
		check(t, err)
		closeAll(fds)
	}
	r := m.Buffer().Reservation()
	locked(r, func() {
		check(t, c.Close())
		for !m.buffer.written.Load() { // the server has noticed
			time.Sleep(time.Millisecond)
		}
		m.buffer.InvalidateMappings()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		check(t, r.Wait(ctx, Bookkeep))
	})
	check(t, sys.CloseFD(fd))
	check(t, m.Move(background(t)))
	check(t, m.Close())
}

// A mapping is asked for just after the exporter's process has ended: the memory is gone, whether or not
// the end was noticed before.
func TestRemoteExporterHasEnded(t *testing.T) {
	ours, theirs := packetPair(t)
	check(t, theirs.CloseWrite()) // it reads, and answers nothing
	_, err := (&remoteBuffer{c: ours}).hello(0)
	wantErr(t, "the first words", err, syscall.EINVAL)
	check(t, theirs.Close())
	r := &remoteBuffer{c: ours} // nobody reads
	_, err = r.hello(0)
	wantErr(t, "the first words", err, syscall.EINVAL)
	_, err = r.mapping(nil, Bidirectional)
	wantErr(t, "mapping", err, syscall.ENODEV)
	wantErr(t, "pinning", r.pin(nil), syscall.ENODEV)
}

// packetPair returns a connection's two ends.
func packetPair(t *testing.T) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(f)
		check(t, err)
		check(t, f.Close())
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// Each operation of the exporter fails in turn, for an importer in another process: it gets the exporter's
// errno, and nothing is left of it.
func TestRemoteOpFails(t *testing.T) {
	memory, err := sys.NewMemfd("exporter", 4*4096)
	check(t, err)
	defer func() { check(t, sys.CloseFD(memory)) }()
	bytes, err := sys.MapMemfd(memory, 4*4096)
	check(t, err)
	defer func() { check(t, sys.Unmap(bytes)) }()
	for _, op := range []string{"attach", "pin", "map", ""} {
		for _, errno := range errnos {
			e := export(t, nil)
			// It has more bytes than the buffer, which is no mistake.
			e.table = func() *Table { return NewFileTable(FileSegment{FD: memory, Bytes: bytes}) }
			fd, err := e.buffer.FD()
			check(t, err)
			e.set(op, errno)
			wants := func(which string, err error) bool {
				t.Helper()
				want := syscall.Errno(0)
				if which == op {
					want = errno
				}
				if err == nil && want == 0 || err != nil && want != 0 && errors.Is(err, want) {
					return err == nil
				}
				t.Errorf("%s fails with %v: %v", which, want, err)
				return false
			}
			b, err := fromProcess("test", fd, server.name())
			check(t, sys.CloseFD(fd))
			if wants("attach", err) {
				a, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) {}})
				check(t, err)
				locked(b.Reservation(), func() {
					if wants("pin", a.Pin()) {
						a.Unpin()
					}
					table, err := a.Map(t.Context(), Bidirectional)
					if wants("map", err) {
						if table.Len() != size {
							t.Errorf("%d bytes", table.Len())
						}
						a.Unmap(table, Bidirectional)
					}
				})
				a.Detach()
				b.Put()
			}
			for deadline := time.Now().Add(time.Minute); e.buffer.refs.Load() > 1; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("%s fails: %d references are left", op, e.buffer.refs.Load())
				}
			}
			e.end()
		}
	}
}

// The exporter moves the buffer while an importer of another process, as a GPU, still works on it. Another
// importer of that process maps the buffer meanwhile: it waits for the work and the move, and both go on.
func TestRemoteMapsDuringMove(t *testing.T) {
	m, err := Alloc(MemoryConfig{Size: 8192})
	check(t, err)
	fd, err := m.Buffer().FD()
	check(t, err)
	b, err := fromProcess("test", fd, server.name())
	check(t, err)
	check(t, sys.CloseFD(fd))
	r := b.Reservation()
	work := NewFence()
	var table *Table // of the one that works; guarded by the reservation lock
	told := make(chan struct{}, 10)
	worker, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(a *Attachment) {
		if table != nil && work.Signaled() {
			a.Unmap(table, Bidirectional)
			table = nil
		}
		told <- struct{}{}
	}})
	check(t, err)
	other, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) {}})
	check(t, err)
	locked(r, func() {
		table = mapIt(t, worker, Bidirectional)
		r.Add(work, Write)
	})
	moved := make(chan error)
	go func() { moved <- m.Move(background(t)) }()
	<-told
	mapped := make(chan error)
	go func() {
		var err error
		locked(r, func() {
			var t2 *Table
			if t2, err = other.Map(t.Context(), Bidirectional); err == nil {
				other.Unmap(t2, Bidirectional)
			}
		})
		mapped <- err
	}()
	<-told // the other importer has asked for it
	work.Signal(nil)
	check(t, <-mapped)
	check(t, <-moved)
	worker.Detach()
	other.Detach()
	b.Put()
	check(t, m.Close())
}

// Any messages with any descriptors, from the first one on: the server keeps none of them.
func TestLyingImporterDescriptors(t *testing.T) {
	rng := random(t)
	m, err := Alloc(MemoryConfig{Size: 8192})
	check(t, err)
	fd, err := m.Buffer().FD()
	check(t, err)
	fence := NewFence()
	fenceFD, err := fence.FD()
	check(t, err)
	null, err := os.Open(os.DevNull)
	check(t, err)
	files := []int{fd, fenceFD, int(null.Fd())}
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		check(t, err)
		return len(list)
	}
	before := open()
	for range 300 {
		c := dialServer(t)
		if rng.IntN(2) == 0 {
			_ = sys.SendFDs(c, encode(msgHello, remoteVersion), fd) // the server may have gone, here and below
		}
		for range 1 + rng.IntN(6) {
			args := make([]uint64, rng.IntN(9))
			for i := range args {
				args[i] = uint64(rng.IntN(4))
			}
			b := encode(message(rng.IntN(18)), args...)
			if rng.IntN(10) == 0 {
				b = b[:rng.IntN(len(b))]
			}
			var fds []int
			for range rng.IntN(4) {
				fds = append(fds, files[rng.IntN(len(files))])
			}
			_ = sys.SendFDs(c, b, fds...)
		}
		_ = c.CloseWrite()
		if !hungUp(t, c) {
			t.Fatal("the connection has not ended")
		}
		check(t, c.Close())
	}
	fence.Signal(nil)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		after := open()
		var left int
		locked(m.buffer.resv, func() { left = len(m.buffer.attachments) })
		if after <= before && left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors are open, and %d were; %d attachments", after, before, left)
		}
	}
	for _, fd := range []int{fd, fenceFD} {
		check(t, sys.CloseFD(fd))
	}
	check(t, null.Close())
	check(t, m.Close())
}

// A process that has too many descriptors cannot map another one's buffer, nor get its fences, while that is so.
// Afterwards it can.
func TestRemoteNoDescriptors(t *testing.T) {
	m, err := Alloc(MemoryConfig{Size: 8192})
	check(t, err)
	fd, err := m.Buffer().FD()
	check(t, err)
	b, err := fromProcess("test", fd, server.name())
	check(t, err)
	var table *Table
	a, err := b.DynamicAttach(nil, Importer{InvalidateMappings: func(a *Attachment) {
		if table != nil {
			a.Unmap(table, Bidirectional)
			table = nil
		}
	}})
	check(t, err)
	var limit syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	var errs []error
	check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: limit.Max}))
	locked(b.resv, func() {
		for range 2 * maxRemoteMappings {
			got, err := a.Map(t.Context(), Bidirectional)
			if errs = append(errs, err); err == nil {
				a.Unmap(got, Bidirectional)
			}
		}
	})
	_, err = b.ExportFence(background(t), Write)
	check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
	for _, err := range append(errs, err) {
		wantErr(t, "mapping, and a fence", err, syscall.EMFILE)
	}
	check(t, m.Move(background(t)))
	locked(b.resv, func() { table = mapIt(t, a, Bidirectional) })
	fence, err := b.ExportFence(background(t), Write)
	check(t, err)
	check(t, sys.CloseFD(fence))
	check(t, m.Move(background(t)))
	a.Detach()
	b.Put()
	check(t, sys.CloseFD(fd))
	check(t, m.Close())
}
