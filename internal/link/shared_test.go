package link

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// others implements Neighbours for tests: a device of one process, numbered 7, which has
// every queue pair.
type others struct {
	id   uint64
	dial func() (*net.UnixConn, error)
	// packets: the process wants trains as packets
	packets bool
	closed  *atomic.Int32 // if set, counts
	dead    bool          // no process has the device open
}

func (o *others) ID() [2]uint64 { return [2]uint64{o.id} }
func (o *others) Segment(_ int, id uint64, write bool) (int, error) {
	return PassSegment(id, write)
}
func (o *others) Shared(_ int, id uint64) ([]byte, int, error) { return mem.PassShared(id) }
func (o *others) ByPackets(int) bool                           { return o.packets }
func (o *others) Find(qpn uint32) (int, bool)                  { return 7, qpn != 404 }
func (o *others) Dial(int) (conn *net.UnixConn, err error)     { return o.dial() }

func (o *others) Gone(int) {}

func (o *others) Alive() bool { return !o.dead }

func (o *others) Close() error {
	if o.closed != nil {
		o.closed.Add(1)
	}
	return nil
}

// reached returns a flow from one link to the other, with a channel to queue pair 9.
func reached(t testing.TB, a, b *Shared) *train.Flow {
	t.Helper()
	flow := &train.Flow{Src: a.Addrs()[0], Dst: b.Addrs()[0]}
	if err := a.Prepare(flow); err != nil {
		t.Fatal(err)
	}
	if err := a.Reach(flow, 9); err != nil {
		t.Fatal(err)
	}
	return flow
}

// sharedPair makes two links in this process that reach each other as links of two
// processes do.
func sharedPair(t testing.TB) (a, b *Shared) {
	t.Helper()
	addrs := [2]netip.Addr{netip.AddrFrom4([4]byte{127, 98, byte(rand.Uint32()), 1}), netip.AddrFrom4([4]byte{127, 98, byte(rand.Uint32()), 2})}
	var links [2]*Shared
	open := make(chan struct{})
	close(open)
	for i := range links {
		other := 1 - i
		look := func(netip.Addr) (Neighbours, error) {
			return &others{id: uint64(other), dial: func() (*net.UnixConn, error) {
				name := &net.UnixAddr{Name: fmt.Sprintf("@verbena-link-test-%d", rand.Uint64()), Net: "unixpacket"}
				l, err := net.ListenUnix("unixpacket", name)
				if err != nil {
					return nil, err
				}
				defer l.Close()
				conn, err := net.DialUnix("unixpacket", nil, name)
				if err != nil {
					return nil, err
				}
				accepted, err := l.AcceptUnix()
				if err != nil {
					return nil, errors.Join(err, conn.Close())
				}
				links[other].Accept(accepted, addrs[i], 7, open)
				return conn, nil
			}}, nil
		}
		s, err := OpenShared(&SharedConfig{UDP: UDPConfig{Addrs: []netip.Addr{addrs[i]}}, Look: look})
		if err != nil {
			t.Fatal(err)
		}
		s.Join(&others{id: uint64(i)}, 7)
		links[i] = s
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return links[0], links[1]
}

func dialFails(err error) func() (*net.UnixConn, error) {
	return func() (*net.UnixConn, error) { return nil, err }
}

// taker is a Sink that keeps what is delivered.
type taker struct {
	got  []byte
	psns []wire.PSN
	bad  int
}

func (k *taker) Deliver(t *train.Train) {
	b := make([]byte, t.Len)
	if f, _ := mem.Copy(&mem.List{Raw: [][]byte{b}}, &t.Payload, uint64(t.Len), true); !f.OK() {
		k.bad++
		return
	}
	k.got = append(k.got, b...)
	k.psns = append(k.psns, t.PSN)
}
func (k *taker) Drop(Reason) { k.bad++ }

// Trains of all lengths arrive in order and whole, with their payload in the ring or by
// reference.
func TestSharedTrains(t *testing.T) {
	a, b := sharedPair(t)
	flow := &train.Flow{Src: a.Addrs()[0], Dst: b.Addrs()[0]}
	if err := a.Prepare(flow); err != nil || !a.IsLocal(flow) {
		t.Fatalf("%v, local %v", err, a.IsLocal(flow))
	}
	if err := a.Reach(flow, 9); err != nil {
		t.Fatal(err)
	}
	const seed = 3
	rng := rand.New(rand.NewPCG(seed, 0))
	var sent []byte
	var k taker
	for i, n := range []int{0, 1, 100, 4096, 16 << 10, 64 << 10, 256 << 10, 5, 200_000, 0, 99_999} {
		payload := make([]byte, n)
		for j := range payload {
			payload[j] = byte(rng.Uint32())
		}
		sent = append(sent, payload...)
		tr := &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, PSN: wire.PSN(i), MTU: 4096,
			N: max(1, (n+4095)/4096), Len: n, Payload: mem.List{Raw: [][]byte{payload[:n/3], payload[n/3:]}}}
		if m, err := a.Send([]*train.Train{tr}); m != 1 || err != nil {
			t.Fatalf("%d bytes: %d, %v", n, m, err)
		}
		// Polled at once: memory that the receiver fetches must still be there.
		for deadline := time.Now().Add(5 * time.Second); len(k.psns) <= i && time.Now().Before(deadline); {
			b.Wait(time.Millisecond)
			b.Poll(&k, 100)
		}
	}
	if k.bad != 0 || !bytes.Equal(k.got, sent) || a.Lost() != 0 {
		t.Fatalf("%d bytes of %d arrived, %d trains bad, %d lost", len(k.got), len(sent), k.bad, a.Lost())
	}
	for i, p := range k.psns {
		if p != wire.PSN(i) {
			t.Fatalf("train %d has PSN %v", i, p)
		}
	}
	// A payload that was given up meanwhile is not fetched any more.
	n := 64 << 10
	late := &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: n / 4096, Len: n,
		Ticket: a.Ticket(), Payload: mem.List{Raw: [][]byte{make([]byte, n)}}}
	if m, err := a.Send([]*train.Train{late}); m != 1 || err != nil {
		t.Fatalf("%d, %v", m, err)
	}
	a.GiveUpFetches()
	for deadline := time.Now().Add(5 * time.Second); k.bad == 0 && time.Now().Before(deadline); {
		b.Wait(time.Millisecond)
		b.Poll(&k, 100)
	}
	if k.bad != 1 || len(k.got) != len(sent) {
		t.Errorf("%d trains bad, %d bytes of %d", k.bad, len(k.got), len(sent))
	}
	// A train to a queue pair that no process has is lost, and counted.
	tr := &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindAck, Start: true, End: true, DestQP: 404, N: 1}
	if m, err := a.Send([]*train.Train{tr}); m != 1 || err != nil || a.Lost() != 1 {
		t.Errorf("%d, %v, %d lost", m, err, a.Lost())
	}
}

// midway fetches a long payload, instead of that of the train, which the sender gives up when
// its first byte has come.
type midway struct {
	giveUp func()
	far    []byte
	amid   bool // the last byte had not come when it was given up
	ok     bool // it counts
}

func (k *midway) Deliver(t *train.Train) {
	r := t.Payload.Ref.(*refSource)
	r.ranges[0], r.n = shm.Range{Addr: addrOf(k.far), Len: len(k.far)}, 1
	b, given := make([]byte, len(k.far)), make(chan struct{})
	go func() {
		defer close(given)
		for b[0] == 0 {
			runtime.Gosched()
		}
		k.giveUp()
		k.amid = b[len(b)-1] == 0
	}()
	k.ok, _ = r.ReadRef(b, 0)
	<-given
}
func (k *midway) Drop(Reason) {}

// A payload that its sender gives up while it is fetched does not count: the sender's memory
// may have been used for something else by then.
func TestFetchGivenUpMidway(t *testing.T) {
	a, b := sharedPair(t)
	flow := reached(t, a, b)
	const n = 64 << 10
	k := midway{giveUp: a.GiveUpFetches, far: bytes.Repeat([]byte{1}, 32<<20)}
	for deadline := time.Now().Add(20 * time.Second); !k.amid; {
		if time.Now().After(deadline) {
			t.Fatal("it was never given up in time")
		}
		tr := &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096, N: n / 4096, Len: n,
			Ticket: a.Ticket(), Payload: mem.List{Raw: [][]byte{k.far[:n]}}}
		if m, err := a.Send([]*train.Train{tr}); m != 1 || err != nil {
			t.Fatalf("%d, %v", m, err)
		}
		for b.Poll(&k, 100) == 0 {
			b.Wait(time.Millisecond)
		}
	}
	if k.ok {
		t.Error("a payload that was given up counts")
	}
}

// Datagrams to a process that does not read meet ErrBusy. When one has expired waiting, it
// and those that follow are lost, until the process has read something.
func TestSharedDatagramsLate(t *testing.T) {
	a, b := sharedPair(t)
	flow := reached(t, a, b)
	sent := 0
	send := func(late bool) error {
		tr := &train.Train{Flow: flow, Transport: wire.UD, Kind: wire.KindSend, Start: true, End: true, DestQP: 9, MTU: 4096, N: 1, Len: 4096,
			PSN: wire.PSN(sent), Expired: late, Payload: mem.List{Raw: [][]byte{make([]byte, 4096)}}}
		n, err := a.Send([]*train.Train{tr})
		if n != 1 && err == nil {
			t.Fatalf("%d sent", n)
		}
		return err
	}
	fill := func() {
		t.Helper()
		for ; sent < 10*ringBytes/4096; sent++ {
			if err := send(false); err == ErrBusy {
				return
			} else if err != nil || a.Lost() > 0 {
				t.Fatalf("%v, %d lost", err, a.Lost())
			}
		}
		t.Fatal("the ring is never full")
	}
	fill()
	if err := send(false); err != ErrBusy || a.Lost() != 0 {
		t.Errorf("%v, %d lost", err, a.Lost())
	}
	if err := send(true); err != nil || a.Lost() != 1 {
		t.Errorf("a late one: %v, %d lost", err, a.Lost())
	}
	if err := send(false); err != nil || a.Lost() != 2 {
		t.Errorf("the next one: %v, %d lost", err, a.Lost())
	}
	var k taker
	for deadline := time.Now().Add(5 * time.Second); len(k.psns) < sent/2 && time.Now().Before(deadline); {
		b.Poll(&k, sent/2)
	}
	a.lost.Store(0)
	fill()
	for deadline := time.Now().Add(5 * time.Second); len(k.psns) < sent && time.Now().Before(deadline); {
		b.Poll(&k, 100)
	}
	for i, p := range k.psns {
		if p != wire.PSN(i) {
			t.Fatalf("datagram %d has PSN %v", i, p)
		}
	}
	if len(k.psns) != sent || k.bad != 0 {
		t.Errorf("%d of %d came, %d bad", len(k.psns), sent, k.bad)
	}
}

// passedOn makes three packets of 16 bytes from outside for a queue pair at a link.
func passedOn(to *Shared) *Packets {
	from := netip.MustParseAddrPort("127.98.9.9:50001")
	ps := wire.NewPseudo(from.Addr(), to.Addrs()[0], from.Port(), wire.RoCEPort)
	op, _ := wire.Op(wire.RC, wire.KindSend, wire.Only, wire.NoExtra)
	var all []byte
	for i := range 3 {
		h := wire.Header{Opcode: op, PKey: wire.DefaultPKey, DestQP: 9, PSN: wire.PSN(i)}
		start := len(all)
		all = h.Append(all)
		all = seal(append(all, "1234567890123456"...), start, &ps, uint16(i))
	}
	return &Packets{From: from, To: to.Addrs()[0], HopLimit: 64, Segment: len(all) / 3, Bytes: all}
}

// Packets that are passed on arrive as if they had come by the socket, also the first
// ones, for which a channel has to be made.
func TestSharedForward(t *testing.T) {
	for _, early := range []bool{false, true} {
		a, b := sharedPair(t)
		a.home = flowBetween(t, a, b).Link.(*localFlow).dev // the device that both are processes of
		if !early {
			if _, err := a.channel(a.home, 7); err != nil {
				t.Fatal(err)
			}
		}
		p := passedOn(b)
		a.Forward(7, p)
		clear(p.Bytes) // as if the buffer were used for the next datagram
		var k taker
		for deadline := time.Now().Add(5 * time.Second); len(k.psns) < 3 && time.Now().Before(deadline); {
			b.Wait(time.Millisecond)
			b.Poll(&k, 100)
		}
		if k.bad != 0 || len(k.psns) != 3 || len(k.got) != 48 || a.Lost() != 0 || a.Forwarded() != 3 {
			t.Errorf("early %v: %d packets, %d bytes, %d bad, %d lost, %d forwarded", early, len(k.psns), len(k.got), k.bad, a.Lost(), a.Forwarded())
		}
	}
}

// Packets that wait for a channel are lost if it cannot be made, and at most maxEarly wait.
func TestSharedForwardInVain(t *testing.T) {
	a, b := sharedPair(t)
	answer := make(chan struct{})
	a.home = &device{view: &others{dial: func() (*net.UnixConn, error) {
		<-answer
		return nil, errors.New("nobody there")
	}}}
	for range maxEarly + 5 {
		a.Forward(7, passedOn(b))
	}
	if a.Lost() != 5 {
		t.Errorf("%d are lost while the others wait", a.Lost())
	}
	close(answer)
	for deadline := time.Now().Add(5 * time.Second); a.Lost() != maxEarly+5 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if a.Lost() != maxEarly+5 {
		t.Errorf("%d are lost", a.Lost())
	}
}

// Sending and receiving allocate nothing.
func TestSharedAllocs(t *testing.T) {
	a, b := sharedPair(t)
	flow := reached(t, a, b)
	for _, n := range []int{8, 64 << 10} {
		payload := make([]byte, n)
		tr := &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, DestQP: 9, MTU: 4096,
			N: max(1, n/4096), Len: n, Payload: mem.List{Raw: [][]byte{payload}}}
		list := []*train.Train{tr}
		k := &counter{into: mem.List{Raw: [][]byte{make([]byte, n)}}}
		once := func() {
			want := k.n + 1
			if _, err := a.Send(list); err != nil {
				t.Fatal(err)
			}
			for i := 0; k.n < want && i < 1e7; i++ {
				b.Poll(k, 100)
			}
		}
		once()
		if allocs := testing.AllocsPerRun(100, once); allocs > 0 {
			t.Errorf("%d bytes: %v allocations", n, allocs)
		}
		if k.n < 100 {
			t.Errorf("%d trains came", k.n)
		}
	}
}

type counter struct {
	n    int
	into mem.List
}

func (k *counter) Deliver(t *train.Train) {
	if f, _ := mem.Copy(&k.into, &t.Payload, uint64(t.Len), true); f.OK() {
		k.n++
	}
}
func (k *counter) Drop(Reason) {}

// A process that wants packets gets them, also from a process of this host, and no ring is
// made for it. With NoPackets, Reach fails.
func TestSharedByPackets(t *testing.T) {
	a, b := sharedPair(t)
	look := a.cfg.Look
	a.cfg.Look = func(at netip.Addr) (Neighbours, error) {
		n, err := look(at)
		n.(*others).packets = true
		return n, err
	}
	if _, err := b.First().Listen(0, nil, func(int, int) error { return nil }); err != nil {
		t.Fatal(err)
	}
	prepare := func() *train.Flow {
		flow := &train.Flow{Src: a.Addrs()[0], Dst: b.Addrs()[0], SrcPort: 0xc001, HopLimit: 64}
		if err := a.Prepare(flow); err != nil || !a.IsLocal(flow) {
			t.Fatalf("%v, local %v", err, a.IsLocal(flow))
		}
		return flow
	}
	connected, datagram := prepare(), prepare()
	dev := connected.Link.(*localFlow).dev
	if err := a.Reach(connected, 7); err != nil || a.IsLocal(connected) {
		t.Errorf("%v, local %v", err, a.IsLocal(connected))
	}
	payload := mem.List{Raw: [][]byte{[]byte("by post")}}
	for i, out := range []train.Train{
		{Flow: connected, Transport: wire.RC, Kind: wire.KindSend},
		{Flow: datagram, Transport: wire.UD, Kind: wire.KindSend},
	} {
		out.Start, out.End, out.N, out.DestQP, out.PSN, out.Len, out.MTU, out.Payload = true, true, 1, 7, wire.PSN(i), 7, 4096, payload
		if n, err := a.Send([]*train.Train{&out}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	var k taker
	for deadline := time.Now().Add(5 * time.Second); len(k.psns) < 2 && time.Now().Before(deadline); b.Wait(time.Millisecond) {
		b.Poll(&k, 100)
	}
	if k.bad != 0 || string(k.got) != "by postby post" || dev.channels[7].Load() != nil {
		t.Errorf("%q, %d bad, a ring: %v", k.got, k.bad, dev.channels[7].Load() != nil)
	}

	a.cfg.NoPackets = true
	alone := prepare()
	if err := a.Reach(alone, 7); !errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("neither by packets nor by a ring: %v", err)
	}
}

// The view of another device is closed, once, when no flow needs it any more, and at the
// latest with the link.
func TestSharedForgets(t *testing.T) {
	a, b := sharedPair(t)
	var closed atomic.Int32
	id := uint64(100)
	a.cfg.Look = func(netip.Addr) (Neighbours, error) {
		id++
		return &others{id: id, closed: &closed, dead: true}, nil
	}
	prepare := func() *train.Flow {
		f := &train.Flow{Src: a.Addrs()[0], Dst: b.Addrs()[0]}
		if err := a.Prepare(f); err != nil || !a.IsLocal(f) {
			t.Fatal(err)
		}
		return f
	}
	kept := prepare()
	for range 5 {
		prepare()
	}
	collect := func(n int32) {
		for deadline := time.Now().Add(5 * time.Second); closed.Load() < n && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			runtime.GC()
		}
	}
	collect(5)
	prepare()
	if n, known := closed.Load(), len(a.devices); n != 5 || known != 2 {
		t.Errorf("%d of 5 are forgotten, %d are known", n, known)
	}
	runtime.KeepAlive(kept)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	collect(7)
	runtime.GC() // must not close a view a second time
	if n := closed.Load(); n != 7 {
		t.Errorf("%d of 7 are closed", n)
	}
}

// A device is looked for once, as long as one of its processes lives.
func TestSharedLooksOnce(t *testing.T) {
	a, b := sharedPair(t)
	looks := 0
	found := &others{id: 100}
	a.cfg.Look = func(netip.Addr) (Neighbours, error) {
		looks++
		return found, nil
	}
	var kept []*train.Flow
	prepare := func() {
		f := &train.Flow{Src: a.Addrs()[0], Dst: b.Addrs()[0]}
		if err := a.Prepare(f); err != nil || !a.IsLocal(f) {
			t.Fatal(err)
		}
		kept = append(kept, f)
	}
	for range 3 {
		prepare()
	}
	if looks != 1 {
		t.Errorf("looked %d times for a device that lives", looks)
	}
	found.dead = true
	found = &others{id: 101}
	prepare()
	if looks != 2 {
		t.Errorf("looked %d times when the first device had gone", looks)
	}
	runtime.KeepAlive(kept)
}

// A process that looks for its place wakes no other process: it sends nothing to the socket that
// all of them read.
func TestListenQuiet(t *testing.T) {
	a, _ := sharedPair(t)
	common, err := a.OpenCommon()
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(common[0])
	drop := make([]byte, 100)
	for { // what OpenCommon itself has sent
		if _, _, err := syscall.Recvfrom(common[0], drop, syscall.MSG_DONTWAIT); err != nil {
			break
		}
	}
	if p, err := a.First().Listen(1, nil, func(int, int) error { return nil }); p != sys.CommonPlace+1 || err != nil {
		t.Fatal(p, err)
	}
	if n, _, err := syscall.Recvfrom(common[0], drop, syscall.MSG_DONTWAIT); err != syscall.EAGAIN {
		t.Errorf("%d bytes, %v: the common socket has received", n, err)
	}
}
