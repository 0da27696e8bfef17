//go:build cgo

package main

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
)

// fakeEngine notes what it is asked for, and delivers the events that a test orders.
type fakeEngine struct {
	mu     sync.Mutex // guards what follows
	open   map[*fakeID]bool
	closed bool
}

type fakeID struct {
	e    *fakeEngine
	sink func(*connEvent)

	mu    sync.Mutex // guards what follows
	calls []string
	info  cma.Info
	conn  *cma.ConnParam
	opt   [2]int
	path  *cma.Path
	fail  error // of Accept and Disconnect
}

type fakeJoin struct{ left bool }

func (j *fakeJoin) Leave() error { j.left = true; return nil }

func (e *fakeEngine) newID(_ cma.PortSpace, _ ib.QPType, sink func(*connEvent)) (connID, error) {
	return e.id(sink), nil
}

func (e *fakeEngine) id(sink func(*connEvent)) *fakeID {
	i := &fakeID{e: e, sink: sink}
	e.mu.Lock()
	e.open[i] = true
	e.mu.Unlock()
	return i
}

func (e *fakeEngine) close() error { e.closed = true; return nil }

func (e *fakeEngine) left() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.open)
}

func (i *fakeID) note(what string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.calls = append(i.calls, what)
	return nil
}

func (i *fakeID) called(what string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Contains(i.calls, what)
}

func (i *fakeID) Bind(a netip.AddrPort) error {
	i.info.Src = a
	return i.note("bind " + a.String())
}
func (i *fakeID) ResolveAddr(src, dst netip.AddrPort, d time.Duration) error {
	return i.note("resolve " + src.String() + " " + dst.String() + " " + d.String())
}
func (i *fakeID) ResolveRoute(d time.Duration) error { return i.note("route " + d.String()) }
func (i *fakeID) Listen(int) error                   { return i.note("listen") }
func (i *fakeID) Connect(p *cma.ConnParam) error     { i.conn = p; return i.note("connect") }
func (i *fakeID) Accept(p *cma.ConnParam) error {
	if i.conn = p; i.fail != nil {
		i.sink(&connEvent{id: i, typ: cma.ConnectError})
		return i.fail
	}
	return i.note("accept")
}
func (i *fakeID) Reject(_ int, private []byte) error { return i.note("reject " + string(private)) }
func (i *fakeID) Seen() bool                         { return i.note("seen") == nil }
func (i *fakeID) Disconnect() error                  { return cmp.Or(i.fail, i.note("disconnect")) }
func (i *fakeID) Notify(ib.EventType) error          { return i.note("notify") }
func (i *fakeID) QPAttr(s ib.QPState) (ib.QPAttr, ib.QPAttrMask, error) {
	return ib.QPAttr{State: s, DestQPN: 0x123456, Timeout: 17, AV: ib.AHAttr{DGID: ib.GID{15: 1}, SGIDIndex: 3}}, ib.QPMaskState | ib.QPMaskAV | ib.QPMaskDestQPN, nil
}
func (i *fakeID) SetOption(o cma.Option, v int) error { i.opt = [2]int{int(o), v}; return nil }
func (i *fakeID) SetPath(p *cma.Path) error           { i.path = p; return nil }
func (i *fakeID) Info() cma.Info                      { return i.info }
func (i *fakeID) Close() error {
	i.e.mu.Lock()
	delete(i.e.open, i)
	i.e.mu.Unlock()
	return nil
}

// join delivers its event before it returns, as the connection manager may.
func (i *fakeID) join(group netip.Addr, _ bool) (connJoin, error) {
	if !group.IsMulticast() {
		return nil, syscall.EINVAL
	}
	j := &fakeJoin{}
	i.sink(&connEvent{id: i, typ: cma.MulticastJoin, member: j, group: group})
	return j, nil
}

// flagged is a readiness that tests can read.
type flagged struct {
	on, old bool // old: it cannot be cleared
	closed  int
}

func (c *flagged) set()           { c.on = true }
func (c *flagged) canClear() bool { return !c.old }
func (c *flagged) close()         { c.closed++ }
func (c *flagged) clear() {
	if !c.old {
		c.on = false
	}
}

// cmRig is a process with channels.
type cmRig struct {
	t *testing.T
	f *cmFiles
	e *fakeEngine
}

func newRig(t *testing.T) *cmRig {
	e := &fakeEngine{open: map[*fakeID]bool{}}
	return &cmRig{t, newCMFiles(func() connEngine { return e }), e}
}

func (r *cmRig) channel() *cmChannel { return r.f.open(&flagged{}) }

// ready returns the number of events, of which the channel's readiness must tell.
func ready(c *cmChannel) int {
	n := len(c.events) - c.first
	if on := c.ready.(*flagged).on; on != (n > 0) {
		panic(fmt.Sprintf("readable is %v, and there are %d events", on, n))
	}
	return n
}

// do executes a command with a body of the right size, in which numbers are set.
func (r *cmRig) do(c *cmChannel, cmd int, put func([]byte)) ([]byte, error) {
	b := make([]byte, cmCommands[cmd].size)
	put(b)
	return r.f.command(uint32(cmd), &cmCall{channel: c, in: b, room: 1024})
}

func (r *cmRig) must(c *cmChannel, cmd int, put func([]byte)) []byte {
	r.t.Helper()
	out, err := r.do(c, cmd, put)
	if err != nil {
		r.t.Fatalf("command %d: %v", cmd, err)
	}
	return out
}

func set32(off int, n uint32) func([]byte) { return func(b []byte) { native.PutUint32(b[off:], n) } }

func (r *cmRig) create(c *cmChannel, uid uint64, ps cma.PortSpace) (uint32, *fakeID) {
	r.t.Helper()
	n := native.Uint32(r.must(c, 0, func(b []byte) {
		native.PutUint64(b, uid)
		native.PutUint16(b[16:], uint16(ps))
		b[18] = 2
	}))
	return n, r.f.ids[n].conn.(*fakeID)
}

// event takes an event.
func (r *cmRig) event(c *cmChannel) (uid uint64, id, typ uint32) {
	r.t.Helper()
	b := r.must(c, cmGetEvent, func([]byte) {})
	if len(b) != sizeEventResp {
		r.t.Fatalf("an event of %d bytes", len(b))
	}
	return native.Uint64(b), native.Uint32(b[8:]), native.Uint32(b[12:])
}

func wantErr(t *testing.T, what string, got error, want syscall.Errno) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: %v, not %v", what, got, want)
	}
}

// idAt is where each command has its id; -1: it has none.
var idAt = map[int]int{0: -1, 1: 8, 2: 36, 3: 56, 4: 0, 5: 8, 6: 272, 7: 0, 8: 280, 9: 0, 10: 0, 11: 8, 12: -1, 14: 8, 15: 0, 16: 44,
	17: 8, 18: 8, 19: 8, 20: 0, 21: 0, 22: 16, 23: 0, 24: 0}

// body returns a body of a command that is right but for its id.
func body(cmd int) []byte {
	b := make([]byte, cmCommands[cmd].size)
	inet := func(at int) { native.PutUint16(b[at:], afINET) }
	switch cmd {
	case 0:
		native.PutUint16(b[16:], uint16(cma.PSTCP))
	case 2:
		inet(8)
	case 3:
		inet(28)
	case 16:
		inet(16)
	case 20:
		native.PutUint16(b[4:], sizeINET)
		inet(8)
	case 21:
		native.PutUint16(b[10:], sizeINET)
		inet(16 + sizeStorage)
	case 22:
		native.PutUint16(b[20:], sizeINET)
		inet(24)
	case 24:
		native.PutUint32(b[8:], 18)
	}
	return b
}

// Every command: a short body, no room for the answer, an id that does not exist, and an id of
// another channel.
func TestCMErrors(t *testing.T) {
	r := newRig(t)
	a, b := r.channel(), r.channel()
	id, _ := r.create(a, 1, cma.PSTCP)
	for cmd, c := range cmCommands {
		off, known := idAt[cmd]
		if !known {
			_, err := r.f.command(uint32(cmd), &cmCall{channel: a, in: make([]byte, 400), room: 1024})
			wantErr(t, "a command that is missing", err, syscall.ENOSYS)
			continue
		}
		for n := range c.size {
			if _, err := r.f.command(uint32(cmd), &cmCall{channel: a, in: body(cmd)[:n], room: 1024}); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("command %d with %d of %d bytes: %v", cmd, n, c.size, err)
			}
		}
		for n := range c.room {
			if _, err := r.f.command(uint32(cmd), &cmCall{channel: a, in: body(cmd), room: n}); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("command %d with room for %d of %d bytes: %v", cmd, n, c.room, err)
			}
		}
		if off < 0 {
			continue
		}
		in := body(cmd)
		native.PutUint32(in[off:], id+1000)
		if _, err := r.f.command(uint32(cmd), &cmCall{channel: a, in: in, room: 1024, other: a}); !errors.Is(err, syscall.ENOENT) {
			t.Errorf("command %d for an id that does not exist: %v", cmd, err)
		}
		if cmd == 17 { // its id is a membership's
			continue
		}
		native.PutUint32(in[off:], id)
		if _, err := r.f.command(uint32(cmd), &cmCall{channel: b, in: in, room: 1024, other: b}); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("command %d for an id of another channel: %v", cmd, err)
		}
	}
	_, err := r.f.command(25, &cmCall{channel: a, in: nil, room: 0})
	wantErr(t, "an unknown command", err, syscall.EINVAL)
	_, err = r.f.command(cmGetEvent, &cmCall{channel: a, in: make([]byte, 8), room: 1024})
	wantErr(t, "no event", err, syscall.EAGAIN)
	_, err = r.do(a, 0, func(b []byte) { native.PutUint16(b[16:], 7) })
	wantErr(t, "an unknown port space", err, syscall.EINVAL)
	_, err = r.do(a, 9, func(b []byte) { set32(0, id)(b); b[5] = 3 })
	wantErr(t, "a reason that is not for programs", err, syscall.EINVAL)
	_, err = r.do(a, 11, func(b []byte) { set32(8, id)(b); set32(12, 7)(b) })
	wantErr(t, "an unknown state", err, syscall.EINVAL)
	_, err = r.do(a, 6, set32(272, id))
	wantErr(t, "invalid parameters", err, syscall.EINVAL)
	_, err = r.do(a, 19, func(b []byte) { set32(8, id)(b); set32(12, 4)(b) })
	wantErr(t, "an unknown query", err, syscall.ENOSYS)
	r.f.close(a)
	r.f.close(b)
	if n := r.e.left(); n != 0 || len(r.f.ids) != 0 || len(r.f.byConn) != 0 {
		t.Errorf("%d ids are left, %d in the tables", n, len(r.f.ids)+len(r.f.byConn))
	}
}

// Random bodies and lengths: an answer or an errno, and nothing is left at the end.
func TestCMRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t)
	ch := []*cmChannel{r.channel(), r.channel()}
	var ids []uint32
	for range 30000 {
		cmd, c := rng.IntN(26), ch[rng.IntN(2)]
		in := make([]byte, rng.IntN(420))
		if cmd < 25 && rng.IntN(4) > 0 {
			in = body(cmd)
		}
		for range rng.IntN(8) {
			if len(in) > 0 {
				in[rng.IntN(len(in))] = byte(rng.Uint32())
			}
		}
		if off, ok := idAt[cmd]; ok && off >= 0 && len(in) >= off+4 && len(ids) > 0 {
			native.PutUint32(in[off:], ids[rng.IntN(len(ids))])
		}
		out, err := r.f.command(uint32(cmd), &cmCall{channel: c, in: in, room: rng.IntN(600), other: ch[rng.IntN(2)]})
		var errno syscall.Errno
		if err != nil && !errors.As(err, &errno) {
			t.Fatalf("command %d: %v", cmd, err)
		}
		if cmd == 0 && err == nil {
			ids = append(ids, native.Uint32(out))
		}
	}
	for _, c := range ch {
		r.f.close(c)
	}
	if n := r.e.left(); n != 0 || len(r.f.ids)+len(r.f.joins)+len(r.f.byConn) != 0 {
		t.Errorf("%d ids are left, %d in the tables", n, len(r.f.ids)+len(r.f.joins)+len(r.f.byConn))
	}
}

// A request carries the listener's uid and the new id. The new id has no events until it is
// accepted; then they carry the uid that the program has given it.
func TestCMAccept(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	l, listener := r.create(c, 77, cma.PSTCP)
	child := r.e.id(listener.sink)
	listener.sink(&connEvent{id: listener, child: child, typ: cma.ConnectRequest, conn: cma.ConnParam{Private: make([]byte, 56)}})
	child.sink(&connEvent{id: child, typ: cma.Disconnected})
	if ready(c) != 1 {
		t.Fatalf("%d events", ready(c))
	}
	uid, id, typ := r.event(c)
	if uid != 77 || id == l || typ != uint32(cma.ConnectRequest) {
		t.Fatalf("uid %d, id %d, event %d", uid, id, typ)
	}
	if !child.called("seen") {
		t.Error("the request still counts in the backlog")
	}
	accept := func(b []byte) {
		native.PutUint64(b, 88)
		b[8+264], b[8+271] = 3, 1
		copy(b[16:], "abc")
		set32(280, id)(b)
	}
	child.fail = syscall.EINVAL
	_, err := r.do(c, 8, accept)
	wantErr(t, "an accept that fails", err, syscall.EINVAL)
	if ready(c) != 0 {
		t.Fatalf("%d events of an id that was not accepted", ready(c))
	}
	child.fail = nil
	r.must(c, 8, accept)
	if string(child.conn.Private) != "abc" {
		t.Errorf("private data %q", child.conn.Private)
	}
	child.sink(&connEvent{id: child, typ: cma.Established})
	if uid, got, typ := r.event(c); uid != 88 || got != id || typ != uint32(cma.Established) {
		t.Errorf("uid %d, id %d, event %d", uid, got, typ)
	}
	if n := native.Uint32(r.must(c, 1, set32(8, l))); n != 1 {
		t.Errorf("%d events of the listener were reported", n)
	}
	if n := native.Uint32(r.must(c, 1, set32(8, id))); n != 1 {
		t.Errorf("%d events of the connection were reported", n)
	}
	if n := r.e.left(); n != 0 {
		t.Errorf("%d ids are left", n)
	}
}

// A listener that is destroyed: requests that the program has not taken are refused, and the
// channel is not ready any more.
func TestCMDestroyListener(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	l, listener := r.create(c, 1, cma.PSTCP)
	_, other := r.create(c, 2, cma.PSTCP)
	for range 3 {
		listener.sink(&connEvent{id: listener, child: r.e.id(listener.sink), typ: cma.ConnectRequest})
	}
	other.sink(&connEvent{id: other, typ: cma.AddrResolved})
	r.event(c)
	if n := native.Uint32(r.must(c, 1, set32(8, l))); n != 1 || ready(c) != 1 {
		t.Errorf("%d events reported, %d left", n, ready(c))
	}
	if n := r.e.left(); n != 2 { // the other id, and the request that was taken
		t.Errorf("%d ids are left", n)
	}
	listener.sink(&connEvent{id: listener, typ: cma.Disconnected})
	if uid, _, _ := r.event(c); uid != 2 || ready(c) != 0 {
		t.Errorf("an event of uid %d, %d left", uid, ready(c))
	}
	r.f.close(c)
	if n := r.e.left(); n != 0 || c.ready.(*flagged).closed != 1 {
		t.Errorf("%d ids are left, closed %d times", n, c.ready.(*flagged).closed)
	}
}

// An id that moves to another channel takes the events with it that the program has not taken,
// and the requests among them.
func TestCMMigrate(t *testing.T) {
	r := newRig(t)
	from, to := r.channel(), r.channel()
	id, conn := r.create(from, 5, cma.PSTCP)
	_, other := r.create(from, 6, cma.PSTCP)
	conn.sink(&connEvent{id: conn, typ: cma.AddrResolved})
	r.event(from)
	other.sink(&connEvent{id: other, typ: cma.AddrResolved})
	conn.sink(&connEvent{id: conn, child: r.e.id(conn.sink), typ: cma.ConnectRequest})
	in := make([]byte, 16)
	native.PutUint32(in[8:], id)
	out, err := r.f.command(18, &cmCall{channel: to, in: in, room: 4, other: from})
	if err != nil || native.Uint32(out) != 1 || ready(from) != 1 || ready(to) != 1 {
		t.Fatalf("%v: %v events reported, %d and %d left", err, out, ready(from), ready(to))
	}
	_, child, _ := r.event(to)
	r.must(to, 10, set32(0, child))
	_, err = r.do(from, 10, set32(0, id))
	wantErr(t, "the old channel", err, syscall.EINVAL)
	if err := r.f.closeAll(); err != nil || r.e.left() != 0 || !r.e.closed {
		t.Errorf("%v, %d ids are left", err, r.e.left())
	}
}

// A membership: its event may come before its number is known. Leaving counts what was taken.
func TestCMJoin(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	id, _ := r.create(c, 1, cma.PSUDP)
	put := func(b []byte) {
		native.PutUint64(b[8:], 99)
		set32(16, id)(b)
		native.PutUint16(b[20:], sizeINET)
		native.PutUint16(b[24:], afINET)
		copy(b[28:], []byte{239, 1, 2, 3})
	}
	n := native.Uint32(r.must(c, 22, put))
	if uid, got, typ := r.event(c); uid != 99 || got != n || typ != uint32(cma.MulticastJoin) {
		t.Errorf("uid %d, id %d, event %d", uid, got, typ)
	}
	if got := native.Uint32(r.must(c, 17, set32(8, n))); got != 1 {
		t.Errorf("%d events reported", got)
	}
	_, err := r.do(c, 17, set32(8, n))
	wantErr(t, "a membership that has ended", err, syscall.ENOENT)
	n = native.Uint32(r.must(c, 22, put))
	if got := native.Uint32(r.must(c, 17, set32(8, n))); got != 0 || ready(c) != 0 {
		t.Errorf("%d events reported, %d left", got, ready(c))
	}
	r.f.close(c)
}

// Addresses of all families reach the connection manager, and come back in queries.
func TestCMAddresses(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	id, conn := r.create(c, 1, cma.PSTCP)
	bind := func(a netip.AddrPort) func([]byte) {
		return func(b []byte) {
			set32(0, id)(b)
			native.PutUint16(b[4:], uint16(putSockaddr(b[8:], a)))
		}
	}
	for _, s := range []string{"10.1.2.3:4567", "[fd00::5]:80", "0.0.0.0:0"} {
		a := netip.MustParseAddrPort(s)
		r.must(c, 20, bind(a))
		if !conn.called("bind " + s) {
			t.Errorf("%s: %v", s, conn.calls)
		}
		out := r.must(c, 19, set32(8, id))
		size := int(native.Uint16(out[12:]))
		if got, _ := sockaddr(out[16:]); got != a || size != addrSize(out[16:]) || len(out) != sizeAddrResp {
			t.Errorf("%v came back as %v, with %d bytes", a, got, size)
		}
	}
	conn.info.Dev, conn.info.GUID, conn.info.Port = &cma.Device{}, 0x0102030405060708, 1
	conn.info.Dst = netip.MustParseAddrPort("10.1.2.4:99")
	conn.info.Paths = []cma.Path{{SGID: ib.GIDFromAddr(netip.MustParseAddr("10.1.2.3")), DGID: ib.GIDFromAddr(conn.info.Dst.Addr()),
		FlowLabel: 0x584ba, HopLimit: 64, TrafficClass: 8, PKey: 0xffff, MTU: ib.MTU1024, LifeTime: 16}}
	out := r.must(c, 19, func(b []byte) { set32(8, id)(b); set32(12, 1)(b) })
	if len(out) != 8+sizePathRecord || *pathRecord(out[8:]) != conn.info.Paths[0] || binary.BigEndian.Uint32(out[8+8+44:]) != 0x584ba40 {
		t.Errorf("path % x", out)
	}
	out = r.must(c, 5, set32(8, id))
	if len(out) != sizeRouteResp || binary.BigEndian.Uint64(out) != conn.info.GUID || native.Uint32(out[192:]) != 1 || ib.GID(out[8:24]) != conn.info.Paths[0].DGID {
		t.Errorf("route % x", out)
	}
	out = r.must(c, 19, func(b []byte) { set32(8, id)(b); set32(12, 2)(b) })
	if _, g := sockaddr(out[16+sizeStorage:]); g == nil || g.addrPort() != conn.info.Dst || native.Uint16(out[14:]) != sizeIB || binary.BigEndian.Uint64(g[24:]) != 0x1060063 {
		t.Errorf("GIDs % x", out)
	}
	if out = r.must(c, 11, func(b []byte) { set32(8, id)(b); set32(12, 2)(b) }); native.Uint32(out) != 1|1<<7|1<<20 || native.Uint32(out[4:]) != 2 ||
		native.Uint32(out[32:]) != 0x123456 || out[40+15] != 1 || out[40+20] != 3 || out[40+29] != 1 || out[134] != 17 {
		t.Errorf("attributes % x", out)
	}
	r.f.close(c)
}

// librdmacm finds out whether AF_IB is known by binding an id to no address of that family.
func TestCMProbe(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	id, conn := r.create(c, 1, cma.PSIB)
	r.must(c, 20, func(b []byte) {
		set32(0, id)(b)
		native.PutUint16(b[4:], sizeIB)
		putIBAddr(b[8:], ib.GID{}, 0, 0x1060000)
	})
	out := r.must(c, 19, set32(8, id))
	if len(conn.calls) != 0 || native.Uint16(out[12:]) != sizeIB || native.Uint16(out[16:]) != afIB {
		t.Errorf("calls %v, address % x", conn.calls, out[12:64])
	}
	r.must(c, 1, set32(8, id))
	r.f.close(c)
}

// Addresses of family AF_IB get the kernel's verdict for RoCE: interop/rxe compares it for each port space.
func TestCMNativeAddresses(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	own := ib.GIDFromAddr(netip.MustParseAddr("10.0.0.1"))
	native48 := func(gid ib.GID, service, mask uint64) (a [sizeIB]byte) {
		putIBAddr(a[:], gid, 0xffff, service)
		binary.BigEndian.PutUint64(a[32:], mask)
		return a
	}
	for _, w := range []struct {
		ps            cma.PortSpace
		gid           ib.GID
		service, mask uint64
		want          syscall.Errno
	}{
		{cma.PSTCP, ib.GID{}, 0x1234567, 0, 0},
		{cma.PSTCP, ib.GID{}, 0x1060050, 1<<64 - 1, 0},
		{cma.PSTCP, ib.GID{15: 1}, 0x1060050, 1<<64 - 1, 0},
		{cma.PSTCP, ib.GID{}, 0x1110050, 1<<64 - 1, syscall.EPROTONOSUPPORT},
		{cma.PSIB, ib.GID{}, 0x1110050, 1<<64 - 1, 0},
		{cma.PSIB, ib.GID{}, 0x1234567, 1<<64 - 1, syscall.EPROTONOSUPPORT},
		{cma.PSIPoIB, ib.GID{}, 0, 0, syscall.EPROTONOSUPPORT},
		{cma.PSTCP, own, 0x1060050, 1<<64 - 1, syscall.ENODEV},
	} {
		id, _ := r.create(c, 1, w.ps)
		bind := func() error {
			in := make([]byte, 136)
			native.PutUint32(in, id)
			native.PutUint16(in[4:], sizeIB)
			a := native48(w.gid, w.service, w.mask)
			copy(in[8:], a[:])
			_, err := r.f.command(20, &cmCall{channel: c, in: in})
			return err
		}
		if err := bind(); w.want == 0 && err != nil || w.want != 0 && !errors.Is(err, w.want) {
			t.Errorf("bind %#x in %#x: %v, want %v", w.service, w.ps, err, w.want)
		}
		if err := bind(); w.want == 0 && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("bind of a bound id: %v", err)
		}
	}
	id, conn := r.create(c, 1, cma.PSTCP)
	resolve := func(from []byte) error {
		in := make([]byte, 272)
		native.PutUint32(in, id)
		native.PutUint32(in[4:], 1000)
		native.PutUint16(in[8:], uint16(len(from)))
		native.PutUint16(in[10:], sizeIB)
		copy(in[16:], from)
		a := native48(own, 0x1060050, 0)
		copy(in[16+sizeStorage:], a[:])
		_, err := r.f.command(21, &cmCall{channel: c, in: in})
		return err
	}
	ip := make([]byte, sizeINET)
	native.PutUint16(ip, afINET)
	if err := resolve(ip); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("from an IP address: %v", err)
	}
	if err := resolve(nil); err != nil {
		t.Error(err)
	}
	conn.info.Dev = &cma.Device{}
	in := make([]byte, 8)
	native.PutUint32(in, id)
	native.PutUint32(in[4:], 1000)
	if _, err := r.f.command(4, &cmCall{channel: c, in: in}); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("route: %v", err)
	}
	r.f.close(c)
}

func TestCMOptions(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	id, conn := r.create(c, 1, cma.PSTCP)
	set := func(level, name, size uint32, value ...byte) error {
		in := make([]byte, 24, 24+len(value))
		for i, v := range []uint32{id, level, name, size} {
			native.PutUint32(in[8+4*i:], v)
		}
		_, err := r.f.command(14, &cmCall{channel: c, in: append(in, value...), room: 0})
		return err
	}
	for _, w := range []struct {
		level, name, size uint32
		value             []byte
		want              syscall.Errno
		opt               [2]int
	}{
		{0, 0, 1, []byte{0x20}, 0, [2]int{0, 0x20}}, {0, 1, 4, []byte{0, 1, 0, 0}, 0, [2]int{1, 1}}, {0, 2, 4, make([]byte, 4), 0, [2]int{2, 0}},
		{0, 3, 1, []byte{14}, 0, [2]int{3, 14}}, {0, 0, 4, make([]byte, 4), syscall.EINVAL, [2]int{}}, {0, 1, 1, []byte{1}, syscall.EINVAL, [2]int{}},
		{0, 4, 1, []byte{1}, syscall.ENOSYS, [2]int{}}, {2, 0, 1, []byte{1}, syscall.ENOSYS, [2]int{}}, {0, 0, 1, nil, syscall.EFAULT, [2]int{}},
		{1, 1, 0, nil, syscall.EINVAL, [2]int{}}, {1, 1, 71, make([]byte, 71), syscall.EINVAL, [2]int{}}, {1, 1, 72, make([]byte, 72), syscall.EINVAL, [2]int{}},
	} {
		conn.opt = [2]int{}
		if err := set(w.level, w.name, w.size, w.value...); w.want == 0 && err != nil || w.want != 0 && !errors.Is(err, w.want) || conn.opt != w.opt {
			t.Errorf("level %d, option %d, %d bytes: %v, %v", w.level, w.name, w.size, err, conn.opt)
		}
	}
	record := make([]byte, 2*sizePathRecord)
	putPathRecord(record[sizePathRecord:], &cma.Path{HopLimit: 9, MTU: ib.MTU512})
	if err := set(1, 1, uint32(len(record)), record...); err != nil || conn.path == nil || conn.path.HopLimit != 9 || conn.path.MTU != ib.MTU512 {
		t.Errorf("path: %v, %+v", err, conn.path)
	}
	r.f.close(c)
}

// librdmacm has a table of 65536 ids, and numbers are used in turn.
func TestCMNumbers(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	var last uint32
	for i := range usualIDs + 100 {
		id, _ := r.create(c, 1, cma.PSTCP)
		if id >= usualIDs || i > 0 && id != (last+1)%usualIDs {
			t.Fatalf("id %d after %d", id, last)
		}
		last = id
		r.must(c, 1, set32(8, id))
	}
	r.f.close(c)
}

// A program may disconnect what has ended. Other errors are reported.
func TestCMDisconnect(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	id, conn := r.create(c, 3, cma.PSTCP)
	r.must(c, 10, set32(0, id))
	conn.fail = ib.Errorf("disconnect", syscall.ENOTCONN, "it has ended")
	r.must(c, 10, set32(0, id))
	conn.fail = syscall.EINVAL
	_, err := r.do(c, 10, set32(0, id))
	wantErr(t, "an id without a connection", err, syscall.EINVAL)
	r.f.close(c)
}

// The program's own events.
func TestCMWriteEvent(t *testing.T) {
	r := newRig(t)
	c := r.channel()
	id, _ := r.create(c, 3, cma.PSTCP)
	put := func(event uint32) func([]byte) {
		return func(b []byte) { set32(0, id)(b); set32(8, event)(b); set32(16, 0xabcd)(b) }
	}
	_, err := r.do(c, 24, put(9))
	wantErr(t, "an event that is not the program's", err, syscall.EINVAL)
	r.must(c, 24, put(18))
	b := r.must(c, cmGetEvent, func([]byte) {})
	if native.Uint64(b) != 3 || native.Uint32(b[12:]) != 18 || native.Uint32(b[20:]) != 0xabcd {
		t.Errorf("% x", b[:32])
	}
	r.f.close(c)
}
