package main

// A peer process reads requests from its standard input and answers each:
//
//	make      make queue pairs, from a spec → what the other side must know
//	connect   connect them to the other side's
//	mark      begin to count; forget what has arrived
//	pump      keep messages under way for a while → how many bytes completed, for each queue pair
//	count     → CPU time and counters since mark; with Verify, fail unless all data has arrived
//	listen    listen for TCP connections → the port
//	stream    send to a TCP port for a while
//	streamed  → the bytes that have arrived from one of these
//	close     close the queue pairs
//
// It ends when its input ends.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

type request struct {
	Op     string
	Spec   *spec         `json:",omitempty"`
	Offer  *offer        `json:",omitempty"`
	Verb   verbs.Opcode  `json:",omitempty"`
	Start  time.Time     `json:",omitzero"` // when to begin; zero: at once
	For    time.Duration `json:",omitempty"`
	Verify bool          `json:",omitempty"`
	Addr   string        `json:",omitempty"`

	Connections int `json:",omitempty"`
}

type reply struct {
	Err      string            `json:",omitempty"`
	Offer    *offer            `json:",omitempty"`
	Port     int               `json:",omitempty"`
	Bytes    []int64           `json:",omitempty"` // of each queue pair, or of a stream
	Took     time.Duration     `json:",omitempty"`
	All      int64             `json:",omitempty"` // bytes, with those that completed after the measurement
	CPU      time.Duration     `json:",omitempty"`
	Counters map[string]uint64 `json:",omitempty"`
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
	side    *side
	streams *streams
	cpu     time.Duration     // at mark
	counted map[string]uint64 // at mark
}

func servePeer(in io.Reader, out io.Writer) (err error) {
	p := &peerState{}
	defer func() { err = errors.Join(err, p.close()) }()
	enc, dec := json.NewEncoder(out), json.NewDecoder(in)
	for {
		var q request
		if err := dec.Decode(&q); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		r, err := p.handle(&q)
		if err != nil {
			r.Err = err.Error()
		}
		if err := enc.Encode(&r); err != nil {
			return fmt.Errorf("the judge does not listen: %w", err)
		}
	}
}

func (p *peerState) handle(q *request) (r reply, err error) {
	switch q.Op {
	case "make":
		if p.side, err = newSide(*q.Spec); err == nil {
			o := p.side.offer()
			r.Offer = &o
		}
	case "connect":
		err = p.side.connect(q.Offer)
	case "mark":
		p.cpu = sys.CPUTime()
		if p.side != nil {
			p.counted = p.side.counters()
			p.side.forget()
		}
	case "pump":
		var done pumped
		time.Sleep(time.Until(q.Start))
		done, err = p.side.pump(q.Verb, q.For)
		r.Bytes, r.Took, r.All = done.bytes, done.took, done.all
	case "count":
		r.CPU = sys.CPUTime() - p.cpu
		if p.side == nil {
			break
		}
		r.Counters = p.side.counters()
		for name, n := range p.counted {
			r.Counters[name] -= n
		}
		if q.Verify {
			err = p.side.arrived()
		}
		err = errors.Join(err, p.side.failure())
	case "listen":
		if p.streams, err = listenStreams(q.Addr); err == nil {
			r.Port = p.streams.port()
		}
	case "stream":
		err = streamAll(q.Addr, q.Connections, q.For)
	case "streamed":
		r.Bytes, r.Took, err = p.streams.next()
	case "close":
		err = p.close()
	default:
		err = fmt.Errorf("unknown request %q", q.Op)
	}
	return r, err
}

func (p *peerState) close() (err error) {
	if p.streams != nil {
		err = p.streams.close()
		p.streams = nil
	}
	if p.side != nil {
		err = errors.Join(err, p.side.close())
		p.side = nil
	}
	return err
}
