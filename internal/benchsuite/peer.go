package main

// A peer process reads requests from its standard input and answers each:
//
//	make      make a side, from a spec → what the other side must know
//	connect   connect it to the other side
//	serve     serve a measurement as the far side, until the next request; answered at once
//	stop      end serving → the CPU time that it took
//	listen    listen for a TCP connection → the port
//	pin       keep to one processor
//	cpu       → the CPU time that the process has used
//	staged, connect-staged   the same as make and connect, with memory of an engine
//	streams   listen for streams of bytes, by TCP and others → where
//	stores    serve a key-value store, by TCP and others → where
//	resident  → how much of its memory is there
//	memory, idle, regions, close   measure something that needs a process of its own
//
// It ends when its input ends.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
)

type (
	peerOp string
	mode   string
)

const (
	opMake     peerOp = "make"
	opConnect  peerOp = "connect"
	opServe    peerOp = "serve"
	opStop     peerOp = "stop"
	opListen   peerOp = "listen"
	opPin      peerOp = "pin"
	opCPU      peerOp = "cpu"
	opMemory   peerOp = "memory"
	opIdle     peerOp = "idle"
	opRegions  peerOp = "regions"
	opClose    peerOp = "close"
	opFlood    peerOp = "flood"
	opStreams  peerOp = "streams"
	opStores   peerOp = "stores"
	opResident peerOp = "resident"

	opStaged        peerOp = "staged"
	opConnectStaged peerOp = "connect-staged"

	modePassive   mode = "passive"    // sleep: the device does everything
	modePoll      mode = "poll"       // poll a completion queue that stays empty
	modeSink      mode = "sink"       // take messages and post receives
	modePongWrite mode = "pong-write" // answer WRITEs, seen in memory
	modePongWatch mode = "pong-watch" // the same, but poll only for completions of one's own requests
	modePongSend  mode = "pong-send"  // answer SENDs
	modePongTCP   mode = "pong-tcp"
)

type request struct {
	Op      peerOp
	Spec    *spec         `json:",omitempty"`
	Offer   *offer        `json:",omitempty"`
	Mode    mode          `json:",omitempty"`
	Verify  bool          `json:",omitempty"`
	Profile string        `json:",omitempty"`
	QPs     int           `json:",omitempty"`
	CPU     int           `json:",omitempty"`
	Regions int           `json:",omitempty"`
	For     time.Duration `json:",omitempty"`
	Flood   *floodSpec    `json:",omitempty"`

	Staged      *stagedSpec  `json:",omitempty"`
	StagedOffer *stagedOffer `json:",omitempty"`
}

type reply struct {
	Err    string    `json:",omitempty"`
	Offer  *offer    `json:",omitempty"`
	CPU    int64     `json:",omitempty"` // nanoseconds
	Port   int       `json:",omitempty"`
	Values []float64 `json:",omitempty"`

	At map[string]string `json:",omitempty"` // where streams or stores are served, by their ways

	Staged *stagedOffer `json:",omitempty"`
}

func peerMain() int {
	if err := servePeer(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// peerState is what a peer process holds between requests.
type peerState struct {
	side     *side
	staged   *stagedEnd
	streams  *streams
	stores   *stores
	listener *sys.Listener
	conn     *sys.Conn
	requests chan request
	pending  atomic.Bool   // a request waits, or the input has ended: serve must return
	wake     chan struct{} // the same, for a serve that sleeps

	verify bool
	served error         // how serving ended
	last   uint64        // the word in memory before the first ping
	cpu    time.Duration // CPU time of this process when serving began
}

func servePeer(in io.Reader, out io.Writer) (err error) {
	p := &peerState{requests: make(chan request), wake: make(chan struct{}, 1)}
	go p.read(in)
	defer func() { err = errors.Join(err, p.close()) }()
	enc := json.NewEncoder(out)
	for q := range p.requests {
		p.pending.Store(false)
		select {
		case <-p.wake:
		default:
		}
		r, err := p.handle(&q)
		if err != nil {
			r.Err = err.Error()
		}
		if err := enc.Encode(&r); err != nil {
			return fmt.Errorf("the suite does not listen: %w", err)
		}
		if q.Op == opServe && r.Err == "" {
			p.serve(&q)
		}
	}
	return nil
}

// read sends requests to servePeer, and ends a serve that is under way when one has come.
func (p *peerState) read(in io.Reader) {
	defer close(p.requests)
	dec := json.NewDecoder(in)
	for {
		var q request
		err := dec.Decode(&q)
		p.pending.Store(true)
		select {
		case p.wake <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
		p.requests <- q
	}
}

func (p *peerState) handle(q *request) (r reply, err error) {
	switch q.Op {
	case opMake:
		if p.side, err = newSide(*q.Spec); err == nil {
			o := p.side.offer()
			r.Offer = &o
		}
	case opConnect:
		err = p.side.connect(*q.Offer)
	case opServe:
		if p.verify = q.Verify; p.verify {
			err = p.side.forget()
		}
		if q.Mode == modePongTCP && p.conn == nil && err == nil {
			p.conn, err = p.listener.Accept() // does not wait: the suite has connected already
		}
		if q.Mode == modePongWrite || q.Mode == modePongWatch {
			p.last = loadWord(p.side.rx.bytes) // the first ping may come before pongWrite looks
		}
		p.cpu = sys.CPUTime()
	case opStop:
		r.CPU = int64(sys.CPUTime() - p.cpu)
		err = p.served
		if err == nil && p.verify {
			err = p.side.arrived()
		}
	case opListen:
		l, at, e := sys.Listen()
		p.listener, r.Port, err = l, int(at.Port()), e
	case opPin:
		err = sys.Pin(q.CPU)
	case opCPU:
		r.CPU = int64(sys.CPUTime())
	case opMemory:
		r.Values, err = measureMemory(q.QPs)
	case opIdle:
		r.Values, err = measureIdle(q.QPs, q.For)
	case opRegions:
		r.Values, err = measureRegions(q.Regions, q.For)
	case opStaged:
		if p.staged, err = makeStaged(q.Staged); err == nil {
			r.Staged = p.staged.offer()
		}
	case opConnectStaged:
		err = p.staged.connect(q.StagedOffer)
	case opResident:
		n, e := residentBytes()
		r.Values, err = []float64{float64(n)}, e
	case opStreams:
		p.streams, r.At, err = serveStreams()
	case opStores:
		p.stores, r.At, err = serveStores()
	case opFlood:
		r.Values, err = flood(q.Flood, q.For)
	case opClose:
		r.Values, err = measureClosing(q.Regions)
	default:
		err = fmt.Errorf("unknown request %q", q.Op)
	}
	return r, err
}

// serve is the far side of a measurement until the next request has come.
func (p *peerState) serve(q *request) {
	if q.Profile != "" {
		stop, err := startProfile(q.Profile)
		if err != nil {
			p.served = err
			return
		}
		defer func() { p.served = errors.Join(p.served, stop()) }()
	}
	switch q.Mode {
	case modePassive:
		<-p.wake
		p.served = nil
	case modePoll:
		p.served = p.side.pollUntil(&p.pending)
	case modeSink:
		p.served = p.side.sink(&p.pending)
	case modePongWrite:
		p.served = p.side.pongWrite(p.last, &p.pending)
	case modePongWatch:
		p.served = p.side.pongMemory(p.last, &p.pending)
	case modePongSend:
		p.served = p.side.pongSend(&p.pending)
	case modePongTCP:
		p.served = pongTCP(p.conn, &p.pending)
	default:
		p.served = fmt.Errorf("unknown mode %q", q.Mode)
	}
}

func (p *peerState) close() error {
	if p.conn != nil {
		p.conn.Close()
	}
	if p.listener != nil {
		p.listener.Close()
	}
	if p.streams != nil {
		return p.streams.close()
	}
	if p.stores != nil {
		return p.stores.close()
	}
	if p.staged != nil {
		return p.staged.close()
	}
	if p.side != nil {
		return p.side.close()
	}
	return nil
}
