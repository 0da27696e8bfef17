package device

// Queue pair 1, the general services interface, by which connections are managed. It belongs to all
// processes of a device together:
//
//  1. Requests for a connection come to sockets that all of them read (sys.CommonPlace): serveCommon.
//     Everything else comes to the process whose place is in the communication id: receiver.Deliver.
//  2. take queues a datagram. The goroutine that has received it serves it, if it is a background
//     goroutine and few have come (serveFew); otherwise the goroutine that is there for that (serve).
//  3. route finds the process that it is for, by the directory, and passes it on to that process's
//     socket, calls the handler (Handle), or answers that nobody listens.
//
// Datagrams to a device of the same process are handed over (hand). Those to another process of this host
// go by packets: they are few, and captures show them.

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// managementQKey is the Q_Key of queue pair 1.
const managementQKey = 0x80010000

// management is queue pair 1 of a device.
type management struct {
	dev    *Device
	common *link.UDPReceiver // reads the sockets that all processes read; nil without other processes
	queue  madQueue
	reader sync.WaitGroup // serveCommon
	server sync.WaitGroup // serve

	handling sync.Mutex // guards handler; held while it is called
	handler  func(from, to netip.Addr, mad []byte)

	sender madSender
	words  lastWords

	awaiting sync.Mutex         // guards awaited
	awaited  map[uint32]*func() // by queue pair: see AwaitData

	received, sent, dropped, passed atomic.Uint64
}

// mad is a datagram that has come.
type mad struct {
	from, to netip.Addr
	passed   bool // by another process of the device, which has found out that it is for this one
	bytes    [cm.Size]byte

	call func() // instead of a datagram: see AwaitData
}

// openManagement starts to serve queue pair 1.
func (d *Device) openManagement() error {
	m := &d.management
	m.dev, m.sender.psn = d, rand.Uint32()
	m.queue.wake = make(chan struct{}, 1)
	m.words.stop = make(chan struct{})
	if d.member != nil {
		var err error
		if m.common, err = d.link.(*link.Shared).NewCommonReceiver(d.member.Common()); err != nil {
			return opError("open_device", err)
		}
		m.reader.Go(m.serveCommon)
	}
	m.server.Go(m.serve)
	return nil
}

// close ends the goroutines. No receiver of the device runs any more.
func (m *management) close() {
	m.words.close()
	if m.common != nil {
		m.common.Wake()
	}
	m.reader.Wait()
	m.queue.close()
	m.server.Wait()
}

// serveCommon reads the sockets that all processes of the device read.
func (m *management) serveCommon() {
	for !m.dev.stopped.Load() {
		if n := m.common.Poll(m, rxBudget); n > 0 {
			m.serveFew(n)
		} else {
			m.common.Wait(-1)
		}
	}
}

// Deliver implements link.Sink for the sockets that all processes read. Queue pairs have none of
// their numbers there.
func (m *management) Deliver(t *train.Train) {
	if !sys.IsManagement(t.DestQP) {
		m.dev.noQP.Add(uint64(t.N))
		return
	}
	m.take(t)
}

// Drop implements link.Sink.
func (m *management) Drop(why link.Reason) { m.dev.drops[why].Add(1) }

// take queues a datagram that has come to queue pair 1.
func (m *management) take(t *train.Train) {
	d := &mad{from: t.From.Unmap(), to: t.To.Unmap(), passed: t.DestQP != wire.ManagementQP}
	length := cm.Size
	if d.passed {
		length += sourceBytes
	}
	b := t.Payload.Raw
	if t.Transport != wire.UD || t.Kind != wire.KindSend || t.Extra != wire.NoExtra || t.Len != length || len(b) != 1 || len(b[0]) < length ||
		t.DETH.QKey != managementQKey || t.DETH.SrcQP != wire.ManagementQP || d.passed && d.from != d.to {
		m.dropped.Add(1)
		return
	}
	copy(d.bytes[:], b[0])
	if d.passed {
		d.from = netip.AddrFrom16([sourceBytes]byte(b[0][cm.Size:length])).Unmap()
	}
	m.put(d)
}

// sourceBytes is the length of the sender's address, which follows a datagram that one process of the
// device passes on to another.
const sourceBytes = 16

func (m *management) put(d *mad) {
	m.received.Add(1)
	if !m.queue.put(d) {
		m.dropped.Add(1)
	}
}

// serve serves datagrams that others leave.
func (m *management) serve() {
	for open := true; open; open = m.queue.wait() {
		for d := m.queue.begin(); d != nil; d = m.queue.next() {
			m.serveOne(d)
		}
	}
}

// fewMADs is how many datagrams a background goroutine serves itself. To wake another one takes longer
// than to serve some, but a flood must not keep it from its queue pairs.
const fewMADs = 8

// serveFew serves what is in the queue after n packets were received, if that is not much.
func (m *management) serveFew(n int) {
	if n > fewMADs {
		m.queue.notify()
		return
	}
	for d := m.queue.begin(); d != nil; d = m.queue.next() {
		m.serveOne(d)
		if n--; n <= -fewMADs {
			m.queue.end()
			return
		}
	}
}

func (m *management) serveOne(d *mad) {
	if d.call != nil {
		d.call()
		return
	}
	m.route(d)
}

// AwaitData implements provider.Management.
func (m *management) AwaitData(qpn uint32, f func()) (cancel func()) {
	m.awaiting.Lock()
	defer m.awaiting.Unlock()
	if m.awaited == nil {
		m.awaited = make(map[uint32]*func())
	}
	own := &f
	m.awaited[qpn] = own
	return func() {
		m.awaiting.Lock()
		defer m.awaiting.Unlock()
		if m.awaited[qpn] == own { // not that of a later queue pair with the number
			delete(m.awaited, qpn)
		}
	}
}

// arrived is called when the first packet has come to a queue pair.
func (m *management) arrived(qpn uint32) {
	m.awaiting.Lock()
	f := m.awaited[qpn]
	delete(m.awaited, qpn)
	m.awaiting.Unlock()
	if f != nil {
		m.queue.putCall(*f)
	}
}

// route passes a datagram on to the process that it is for, or handles it here.
func (m *management) route(d *mad) {
	attr, id, service, ok := cm.Classify(d.bytes[:])
	if !ok {
		m.dropped.Add(1)
		return
	}
	member := m.dev.member
	if member == nil || d.passed {
		m.handle(d)
		return
	}
	switch {
	case attr == cm.AttrREQ || attr == cm.AttrSIDRREQ:
		space, port, known := portOf(service)
		process, listens := 0, false
		if known {
			process, listens = member.Listener(space, port, slices.Index(m.dev.addrs, d.to))
		}
		switch {
		case !listens:
			m.answer(d)
		case process == member.Slot():
			m.handle(d)
		default:
			m.pass(d, process)
		}
	case id == 0: // its sender does not know the process
		for _, p := range member.Listeners() {
			m.pass(d, p)
		}
		m.handle(d)
	default:
		if p, held := member.PlaceHolder(int(id >> 24)); held && p != member.Slot() {
			m.pass(d, p)
		} else {
			m.handle(d)
		}
	}
}

// handle calls the handler, or answers that there is none.
func (m *management) handle(d *mad) {
	m.handling.Lock()
	if m.handler != nil {
		m.handler(d.from, d.to, d.bytes[:])
		m.handling.Unlock()
		return
	}
	m.handling.Unlock()
	m.answer(d)
}

// answer answers a datagram that no process takes.
func (m *management) answer(d *mad) {
	if a, ok := cm.AnswerUnknown(d.from, d.to, d.bytes[:]); ok {
		_ = m.Send(&provider.MAD{From: a.From, To: a.To, TClass: a.TClass, HopLimit: a.HopLimit, FlowLabel: a.FlowLabel, Bytes: a.MAD[:]}) // it may be lost on the way, too
	}
}

// pass passes a datagram on to another process of the device.
func (m *management) pass(d *mad, process int) {
	if place, ok := m.dev.member.PlaceOf(process); ok {
		m.passed.Add(1)
		from := d.from.As16()
		_ = m.send(&provider.MAD{From: d.to, To: d.to, Bytes: slices.Concat(d.bytes[:], from[:])}, sys.ManagementNumber(uint32(place))) // it may be lost on the way, too
	}
}

// portOf returns the port that a service id stands for.
func portOf(service uint64) (space host.PortSpace, port uint16, ok bool) {
	space, ok = portSpaces[uint16(service>>16)]
	return space, uint16(service), ok && service>>32 == 0
}

var portSpaces = map[uint16]host.PortSpace{0x0106: host.PortsTCP, 0x0111: host.PortsUDP, 0x013f: host.PortsIB}

// Management returns queue pair 1.
func (d *Device) Management() provider.Management { return &d.management }

func (m *management) GUID() uint64        { return GUID(m.dev.addrs[0]) }
func (m *management) Addrs() []netip.Addr { return m.dev.addrs }
func (m *management) MTU() ib.MTU         { return mtuOf(m.dev.mtu) }
func (m *management) MaxRDAtomic() uint8  { return qp.MaxRDAtomic }

// Handle implements provider.Management.
func (m *management) Handle(f func(from, to netip.Addr, mad []byte)) {
	m.handling.Lock()
	defer m.handling.Unlock()
	m.handler = f
}

// Reach implements provider.Management.
func (m *management) Reach(from, to netip.Addr) error {
	if m.dev.member == nil || m.handsTo(to) != nil {
		return nil
	}
	f := managementFlow(&provider.MAD{From: from, To: to}, requestPlace)
	return opError("reach", m.dev.link.(*link.Shared).UDP.Prepare(&f))
}

// Send sends a datagram to queue pair 1 of a device.
func (m *management) Send(d *provider.MAD) error {
	if len(d.Bytes) != cm.Size {
		return ib.Errorf("send_mad", syscall.EINVAL, "%d bytes, not %d", len(d.Bytes), cm.Size)
	}
	if m.dev.member == nil {
		return m.sendLoop(d)
	}
	if m.hand(d) {
		return nil
	}
	return m.send(d, wire.ManagementQP)
}

// hand gives a datagram to a device of this process, which serves it at once if it serves no other. It
// reports false if the datagram has to go by a packet: the device is elsewhere, or packets are
// wanted, or a capture is to show them.
func (m *management) hand(d *provider.MAD) bool {
	to := m.handsTo(d.To)
	if to == nil {
		return false
	}
	s := to.shards()[0]
	s.helpers.Add(1)
	defer s.helpers.Add(-1)
	if to.stopped.Load() { // else stop, which sets it first, waits for this call
		return false
	}
	in := &mad{from: d.From, to: d.To}
	copy(in.bytes[:], d.Bytes)
	m.sent.Add(1)
	to.management.put(in)
	to.management.serveFew(1)
	return true
}

// handsTo returns the device of this process to which hand gives datagrams, nil if they go by packets.
func (m *management) handsTo(a netip.Addr) *Device {
	to := lookupDevice(a)
	if to == nil || to.member == nil || !m.dev.loopback || !to.loopback || m.dev.capture != nil || to.capture != nil {
		return nil
	}
	return to
}

// send sends a packet to a number of queue pair 1.
func (m *management) send(d *provider.MAD, qpn uint32) error {
	m.sent.Add(1)
	return m.sender.send(m.dev.link.(*link.Shared).UDP, d, qpn)
}

// madSender sends datagrams of queue pair 1.
type madSender struct {
	mu   sync.Mutex // guards what follows
	t    train.Train
	flow train.Flow
	psn  uint32
}

// send sends a packet to a number of queue pair 1.
func (s *madSender) send(udp *link.UDP, d *provider.MAD, qpn uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &s.flow
	*f = managementFlow(d, steeredTo(d.Bytes, qpn))
	err := udp.Prepare(f)
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		// The socket that Reach has opened does, too. If the kernel joins the packet with one for another
		// place, the process there passes it on.
		*f = managementFlow(d, requestPlace)
		err = udp.Prepare(f)
	}
	if err != nil {
		return opError("send_mad", err)
	}
	t := &s.t
	t.Reset()
	t.Flow, t.Transport, t.Kind, t.Start, t.End = f, wire.UD, wire.KindSend, true, true
	t.DestQP, t.PSN, t.N, t.MTU = qpn, wire.PSN(s.psn&0xffffff), 1, len(d.Bytes)
	t.DETH = wire.DETH{QKey: managementQKey, SrcQP: wire.ManagementQP}
	t.SetInline(d.Bytes)
	s.psn++
	_, err = udp.Send([]*train.Train{t})
	return opError("send_mad", err)
}

// requestPlace is what requests are steered to: they have no place yet.
const requestPlace = 0

// managementFlow returns the flow of a datagram that is steered to a place.
func managementFlow(d *provider.MAD, place uint32) train.Flow {
	// The flow label is left out: with it, each connection would have a socket of its own, up to 16.
	f := train.Flow{Src: d.From, Dst: d.To, TClass: d.TClass, HopLimit: d.HopLimit, SrcPort: firstManagementPort | uint16(place)}
	if f.HopLimit == 0 {
		f.HopLimit = defaultHopLimit
	}
	return f
}

// firstManagementPort is the first of the source ports of datagrams. Kernels join packets that have
// the same ports, and steer by the first: so datagrams for different places have different ones.
const firstManagementPort = 0xd000

func steeredTo(b []byte, qpn uint32) uint32 {
	if qpn != wire.ManagementQP {
		return sys.Place(qpn)
	}
	_, id, _, _ := cm.Classify(b)
	return id >> 24 // requestPlace in a REQ
}

// sendLoop gives a datagram to another device of this process that is reached without packets.
func (m *management) sendLoop(d *provider.MAD) error {
	to := lookupDevice(d.To)
	if to == nil || !to.loopback {
		return ib.Errorf("send_mad", syscall.EHOSTUNREACH, "%v is not a device of this process, and the device has no network link", d.To)
	}
	in := &mad{from: d.From, to: d.To}
	copy(in.bytes[:], d.Bytes)
	m.sent.Add(1)
	to.receiveManagement(in)
	return nil
}

// receiveManagement queues a datagram of another device of this process.
func (d *Device) receiveManagement(in *mad) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.management.put(in)
		d.management.queue.notify()
	}
}

// NewCommID implements provider.Management.
func (m *management) NewCommID() uint32 {
	if m.dev.member == nil {
		return loopCommIDs.next()
	}
	return m.dev.member.NewCommID()
}

// loopCommIDs are the communication ids of devices that no other process shares.
var loopCommIDs commIDs

type commIDs struct {
	once sync.Once
	perm mem.Perm24
	n    atomic.Uint32
}

func (c *commIDs) next() uint32 {
	c.once.Do(func() { c.perm = mem.NewPerm24(mem.RandomPermKey()) })
	n := c.n.Add(1)
	return (n>>24+1)<<24 | c.perm.Index(n%(1<<24))
}

// BindPort implements provider.Management.
func (m *management) BindPort(space, port uint16, addrs []int, reuse bool) (provider.BoundPort, error) {
	s, ok := portSpaces[space]
	if !ok {
		return nil, ib.Errorf("bind_addr", syscall.EPROTONOSUPPORT, "port space %#x", space)
	}
	if m.dev.member == nil {
		return loopPort{}, nil
	}
	p, err := m.dev.member.BindPort(s, port, addrs, reuse)
	if err != nil {
		return nil, opError("bind_addr", err)
	}
	return p, nil
}

// loopPort is a port of a device that no other process shares.
type loopPort struct{}

func (loopPort) Listen() error { return nil }
func (loopPort) Free()         {}

// SetListening implements provider.Management.
func (m *management) SetListening(on bool) {
	if m.dev.member != nil {
		m.dev.member.SetListening(on)
	}
}

// Record implements provider.Management.
func (m *management) Record() provider.ConnRecord {
	if m.dev.member == nil {
		return (*connRecord)(nil)
	}
	return &connRecord{r: m.dev.member.NewRecord()}
}

// connRecord is a connection in the directory; nil: other processes need not know it.
type connRecord struct{ r *host.Record }

func (c *connRecord) Set(state uint8, addr int, peer netip.Addr, local, remote, qpn uint32) {
	if c != nil {
		c.r.Set(&host.LastWords{State: state, Addr: addr, Peer: peer, Local: local, Remote: remote, QPN: qpn})
	}
}

func (c *connRecord) Free() {
	if c != nil {
		c.r.Free()
	}
}
