package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// spec is what the two sides of a connection are made of.
type spec struct {
	Link      verbs.LinkMode
	Type      verbs.QPType
	QPs       int
	Threads   int    // that post; each has as many queue pairs, slots and so on, and a completion queue. 0: one
	Size      int    // bytes of a message
	Slots     int    // places for messages, on each side; all queue pairs share them
	Sends     int    // room in each send queue
	Recvs     int    // receives that each queue pair keeps posted
	Inline    bool   // messages are inline data
	NoScatter bool   // no inline receive
	Mapped    bool   // buffers lie outside the Go heap
	Into      memory // kind of the rx buffers
	From      memory // kind of the tx buffers
	Addr      string // of the device; empty: a free one
}

// memory is a kind of memory. The zero value is pinned memory.
type memory string

const (
	onDemand memory = "on demand"
	implicit memory = "implicit"     // the whole address space has one key
	shared   memory = "shared"       // allocated by the device: other processes can map it
	movable  memory = "dma-buf"      // of dmabuf.Alloc, which may move it
	held     memory = "held dma-buf" // the same, held in place by the device (PinDMABuf)
	inVRAM   memory = "VRAM"         // of a software GPU

	awayPages memory = "pages in VRAM" // of a space of package hmm
	homePages memory = "pages at home"
)

// stride is the distance of two slots. Slots start on a cache line, and have
// room for the header that comes with a datagram.
func (s *spec) stride() int {
	n := s.Size
	if s.Type == verbs.UD {
		n += verbs.GRHLength
	}
	return (n + 63) &^ 63
}

// side is one side: a device with two buffers. What is sent, or is there to be
// read, lies in tx; what arrives goes to rx. If it has several threads, the side itself is
// that of the first.
type side struct {
	spec
	others []*side // of the other threads, with the same device and protection domain
	dev    *verbs.Device
	pd     *verbs.PD
	cq     *verbs.CQ
	tx     buffer
	rx     buffer
	qps    []*verbs.QP
	ah     *verbs.AH // UD: the peer
	peer   offer
	wcs    []verbs.WC
	recv   []verbs.RecvWR // one receive, posted again and again
}

type buffer struct {
	bytes  []byte
	addr   uint64 // in requests
	mr     *verbs.MR
	mapped bool

	// exporter has the memory, if it is a dma-buf. bytes are a copy of it then: see store and
	// load.
	exporter *dmabuf.Memory

	// gpu and vram have the memory, if it is a GPU's. bytes are a copy of it, too.
	gpu  *gpu.Device
	vram *gpu.Buffer

	// space has the memory, if it is of package hmm. bytes are a copy of it, too.
	space *spaceOf
}

// sge returns the element for n bytes from off on.
func (b *buffer) sge(off, n int) verbs.SGE {
	return verbs.SGE{Addr: b.addr + uint64(off), Length: uint32(n), LKey: b.mr.LKey()}
}

// offer is what the other side must know.
type offer struct {
	Endpoints    []verbs.Endpoint
	Tx, Rx       uint64 // addresses
	TxKey, RxKey uint32
	Others       []offer // of the other threads
}

const everything = verbs.AccessLocalWrite | verbs.AccessRemote

// newSide makes a side. On failure nothing is left.
func newSide(sp spec) (_ *side, err error) {
	s := &side{spec: sp}
	defer func() {
		if err != nil {
			_ = s.close() // the first error says more
		}
	}()
	if s.dev, err = verbs.Open(sp.Addr, &verbs.Config{Link: sp.Link, PinDMABuf: sp.Into == held || sp.From == held}); err != nil {
		return nil, err
	}
	if s.pd, err = s.dev.AllocPD(); err != nil {
		return nil, err
	}
	for range sp.Threads - 1 {
		s.others = append(s.others, &side{spec: sp, dev: s.dev, pd: s.pd})
	}
	for _, t := range s.threads() {
		if err := t.open(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// threads returns what each thread has.
func (s *side) threads() []*side { return append([]*side{s}, s.others...) }

// open makes what one thread has.
func (s *side) open() (err error) {
	s.wcs = make([]verbs.WC, 64)
	if err := s.tx.make(s.pd, s.Slots*s.stride(), s.Mapped, s.From); err != nil {
		return err
	}
	if err := s.rx.make(s.pd, s.Slots*s.stride(), s.Mapped, s.Into); err != nil {
		return err
	}
	fill(s.tx.bytes)
	if err := s.tx.store(); err != nil {
		return err
	}
	if s.cq, err = s.dev.CreateCQ(max(1, s.QPs*(s.Sends+s.Recvs)), nil); err != nil {
		return err
	}
	qpCap := verbs.QPCap{MaxSendWR: s.Sends, MaxRecvWR: s.Recvs, MaxSendSGE: 1, MaxRecvSGE: 1}
	if s.Inline {
		qpCap.MaxInlineData = s.Size
	}
	for range s.QPs {
		qp, err := s.pd.CreateQP(&verbs.QPConfig{Type: s.Type, SendCQ: s.cq, RecvCQ: s.cq, Cap: qpCap, NoScatterToCQE: s.NoScatter})
		if err != nil {
			return err
		}
		s.qps = append(s.qps, qp)
	}
	return nil
}

func (b *buffer) make(pd *verbs.PD, n int, mapped bool, kind memory) (err error) {
	n = max(4096, n)
	if kind == shared {
		if b.mr, err = pd.AllocMR(n, everything); err == nil {
			b.bytes, b.addr = b.mr.Bytes(), b.mr.Addr()
		}
		return err
	}
	if kind == movable || kind == held {
		return b.makeDMABuf(pd, n)
	}
	if kind == inVRAM {
		return b.makeVRAM(pd, n)
	}
	if kind == awayPages || kind == homePages {
		return b.makeMirror(pd, n, kind == awayPages)
	}
	if mapped {
		if b.bytes, err = sys.Map(n); err != nil {
			return fmt.Errorf("mmap: %w", err)
		}
		b.mapped = true
	} else {
		b.bytes = make([]byte, (n+4095)&^4095) // whole pages start on a cache line
	}
	return b.register(pd, kind)
}

// register registers the bytes.
func (b *buffer) register(pd *verbs.PD, kind memory) (err error) {
	b.addr = addrOf(b.bytes)
	switch kind {
	case onDemand:
		b.mr, err = pd.RegMR(b.bytes, everything|verbs.AccessOnDemand)
	case implicit:
		b.mr, err = pd.RegImplicitMR(everything | verbs.AccessOnDemand)
	default:
		b.mr, err = pd.RegMR(b.bytes, everything)
	}
	return err
}

func (b *buffer) close() error {
	var errs []error
	if b.mr != nil {
		errs = append(errs, b.mr.Close())
	}
	if b.mapped {
		errs = append(errs, sys.Unmap(b.bytes))
	}
	if b.exporter != nil {
		errs = append(errs, b.exporter.Close())
	}
	if b.gpu != nil {
		errs = append(errs, b.gpu.Close()) // it frees vram
	}
	if b.space != nil {
		errs = append(errs, b.space.close())
	}
	return errors.Join(errs...)
}

// fill writes what every tx buffer holds, and every rx buffer must hold in the
// end: the same in all processes, and no two slots alike.
func fill(b []byte) { _, _ = rand.NewChaCha8([32]byte{}).Read(b) } // never fails

func (s *side) offer() offer {
	o := offer{Tx: s.tx.addr, TxKey: s.tx.mr.RKey(), Rx: s.rx.addr, RxKey: s.rx.mr.RKey()}
	for _, qp := range s.qps {
		o.Endpoints = append(o.Endpoints, qp.Endpoint())
	}
	for _, t := range s.others {
		o.Others = append(o.Others, t.offer())
	}
	return o
}

// connect connects every queue pair to its peer and posts all receives.
func (s *side) connect(o offer) (err error) {
	if len(o.Endpoints) != len(s.qps) || len(o.Others) != len(s.others) {
		return fmt.Errorf("the peer has %d queue pairs and %d threads, this side %d and %d", len(o.Endpoints), 1+len(o.Others), len(s.qps), 1+len(s.others))
	}
	for i, t := range s.others {
		if err := t.connect(o.Others[i]); err != nil {
			return err
		}
	}
	s.peer = o
	s.makeRecv()
	// The RNR timer is 10 µs: a receiver that falls behind for a moment should not cost
	// more. The timeout is 1 s, with seven retries: a process that gets no processor for
	// half a second should not cost the connection.
	cfg := &verbs.ConnectConfig{MinRNRTimer: 1, Timeout: 18}
	for i, qp := range s.qps {
		if err := qp.Connect(o.Endpoints[i], cfg); err != nil {
			return err
		}
		for range s.Recvs {
			if _, err := qp.PostRecv(s.recv); err != nil {
				return err
			}
		}
	}
	if s.Type == verbs.UD {
		s.ah, err = s.pd.CreateAH(verbs.AHAttr{DGID: o.Endpoints[0].GID})
	}
	return err
}

// makeRecv makes the receive that is posted all the time. Everything arrives in
// the first slot, behind its header if it is a datagram.
func (s *side) makeRecv() {
	n := s.Size
	if s.Type == verbs.UD {
		n += verbs.GRHLength
	}
	s.recv = []verbs.RecvWR{{SGL: []verbs.SGE{s.rx.sge(0, n)}}}
}

// list makes a list of requests for the slots from first on, the last of which
// asks for a completion.
func (s *side) list(op verbs.Opcode, first, n int) []verbs.SendWR {
	wrs := make([]verbs.SendWR, n, n+1) // the room at the end keeps lists of different threads in different cache lines
	for i := range wrs {
		slot := (first + i) % s.Slots
		off := slot * s.stride()
		wr := &wrs[i]
		wr.Op = op
		local, remote, key := &s.tx, s.peer.Rx, s.peer.RxKey
		switch op {
		case verbs.OpRDMARead:
			local, remote, key = &s.rx, s.peer.Tx, s.peer.TxKey
		case verbs.OpAtomicFetchAdd:
			local, wr.CompareAdd = &s.rx, 1
		}
		if s.Inline {
			wr.Inline = s.tx.bytes[off : off+s.Size]
		} else {
			wr.SGL = []verbs.SGE{local.sge(off, s.Size)}
		}
		if op != verbs.OpSend {
			wr.RemoteAddr, wr.RKey = remote+uint64(off), key
		}
		if s.Type == verbs.UD {
			wr.AH, wr.RemoteQPN, wr.RemoteQKey = s.ah, s.peer.Endpoints[0].QPN, s.peer.Endpoints[0].QKey
		}
	}
	wrs[n-1].Flags = verbs.SendSignaled
	return wrs
}

// poll polls once and fails with the first completion that did.
func (s *side) poll() ([]verbs.WC, error) {
	n, err := s.cq.Poll(s.wcs)
	if err != nil {
		return nil, err
	}
	for i := range s.wcs[:n] {
		if s.wcs[i].Status != verbs.WCSuccess {
			return nil, s.wcs[i].Err()
		}
	}
	return s.wcs[:n], nil
}

// forget clears rx. arrived checks afterwards that all data has come again.
func (s *side) forget() error {
	for _, t := range s.threads() {
		clear(t.rx.bytes)
		if err := t.rx.store(); err != nil {
			return err
		}
	}
	return nil
}

// arrived returns an error unless rx holds what every tx buffer holds: a figure for bytes
// that were not moved would be worth nothing.
func (s *side) arrived() error {
	for _, t := range s.threads() {
		if err := t.arrivedHere(); err != nil {
			return err
		}
	}
	return nil
}

// arrivedHere is arrived for one thread.
func (s *side) arrivedHere() error {
	if err := s.rx.load(); err != nil {
		return err
	}
	for slot := range s.Slots {
		off := slot * s.stride()
		got, want := s.rx.bytes[off:off+s.Size], s.tx.bytes[off:off+s.Size]
		if bytes.Equal(got, want) {
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				return fmt.Errorf("byte %d of slot %d is %#x, not %#x as was sent", i, slot, got[i], want[i])
			}
		}
	}
	return nil
}

// troubles returns the device's counters of what goes wrong on a network.
func (s *side) troubles() map[string]uint64 {
	t := make(map[string]uint64)
	for _, c := range s.dev.Counters() {
		switch c.Name {
		case "retransmitted_packets", "local_ack_timeouts", "rnr_naks_received", "naks_received", "implied_nak_seq_err", "gap_reports_received",
			"tx_refused_packets", "rx_overflow_packets", "drop_bad_icrc":
			t[c.Name] = c.Value
		}
	}
	return t
}

// close closes everything in the order that the objects depend on each other.
func (s *side) close() error {
	var errs []error
	for _, t := range s.threads() {
		errs = append(errs, t.closeHere())
	}
	if s.pd != nil {
		errs = append(errs, s.pd.Close())
	}
	if s.dev != nil {
		errs = append(errs, s.dev.Close())
	}
	return errors.Join(errs...)
}

// closeHere closes what one thread has.
func (s *side) closeHere() error {
	var errs []error
	if s.ah != nil {
		errs = append(errs, s.ah.Close())
	}
	for _, qp := range s.qps {
		errs = append(errs, qp.Close())
	}
	if s.cq != nil {
		errs = append(errs, s.cq.Close())
	}
	return errors.Join(append(errs, s.tx.close(), s.rx.close())...)
}

// spinner is how a loop that polls waits. Mostly it does nothing: giving the processor
// away would cost more than the wait. After some 20 µs without progress it lets other
// goroutines and threads run, since the one that it waits for may be among them; on a
// machine with a core for each side that hardly happens.
type spinner struct {
	crowded bool // each processor has a loop that spins: every pause lets goroutines run
	turns   uint32
	looks   uint32
	since   time.Time
}

const (
	yieldTurns   = 1 << 6
	goschedTurns = 1 << 10
	looksOfPoll  = 1 << 6
	checkTurns   = 1 << 12
	stallLimit   = 10 * time.Second
)

var oneProcessor = runtime.GOMAXPROCS(0) == 1

func (w *spinner) reset() { w.turns, w.since = 0, time.Time{} }

// pause is called after each iteration without progress, by loops that may wait for ever
// because a request of the suite ends them.
func (w *spinner) pause() {
	w.turns++
	if w.turns%yieldTurns != 0 {
		return
	}
	sys.Yield()
	if w.crowded || oneProcessor || w.turns%goschedTurns == 0 { // it makes the runtime wake a thread to look for work, on the processor that the other side needs
		runtime.Gosched()
	}
}

// seldom is for loops that watch memory. It returns true once in as many looks as take the
// time of a poll; then the loop calls pause or idle.
func (w *spinner) seldom() bool {
	w.looks++
	return w.looks%looksOfPoll == 0
}

// idle is called after each iteration without progress, by all other loops. After
// stallLimit it returns an error.
func (w *spinner) idle() error {
	w.pause()
	if w.turns%checkTurns != 0 {
		return nil
	}
	if now := time.Now(); w.since.IsZero() {
		w.since = now
	} else if now.Sub(w.since) > stallLimit {
		return fmt.Errorf("stalled: nothing has happened for %v", stallLimit)
	}
	return nil
}
