package perf

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// Version is that of the side channel's messages; both sides need the same.
const Version = 2

// magic identifies peers of verbena perf: other programs may connect to the port.
const magic = "verbena-perf"

// maxLine bounds a message: 1024 endpoints and the memory of 256 threads take about
// 160 KiB.
const maxLine = 1 << 20

// kind is the kind of a message, in the order in which they are sent.
type kind string

const (
	kindHello   kind = "hello"   // initiator: what is to be measured
	kindOffer   kind = "offer"   // target: its endpoints and keys
	kindAccept  kind = "accept"  // initiator: its endpoints and keys, and the MTU
	kindReady   kind = "ready"   // target: connected, receives are posted
	kindStart   kind = "start"   // initiator: warm-up is over
	kindStarted kind = "started" // target: buffers are prepared, CPU time counts from here
	kindStop    kind = "stop"    // initiator: how much was sent
	kindReport  kind = "report"  // target: its CPU time, and whether the data is right
	kindResult  kind = "result"  // initiator: the figures
	kindError   kind = "error"   // either side: why it gives up
)

type message struct {
	Kind    kind     `json:"kind"`
	Magic   string   `json:"magic,omitempty"`
	Version int      `json:"version,omitempty"`
	Params  *Params  `json:"params,omitempty"`
	Offer   *offer   `json:"offer,omitempty"`
	Sent    []uint64 `json:"sent,omitempty"` // messages of each queue pair, with those of the warm-up
	Report  *report  `json:"report,omitempty"`
	Result  *Result  `json:"result,omitempty"`
	Error   string   `json:"error,omitempty"`
}

// offer is what one side sends so that the other can connect to it.
type offer struct {
	Endpoints []verbs.Endpoint `json:"endpoints"` // of all queue pairs, in the order of the threads
	Memory    []memoryOffer    `json:"memory"`    // of each thread
	MTU       int              `json:"mtu"`       // in an offer: the largest that it can use; in an accept: what both use
	Device    string           `json:"device"`    // its address, for people
}

// memoryOffer is the memory of a thread that the other side's requests reach.
type memoryOffer struct {
	TxAddr uint64 `json:"tx_addr"` // where its data is read
	TxKey  uint32 `json:"tx_key"`
	RxAddr uint64 `json:"rx_addr"` // where data is written
	RxKey  uint32 `json:"rx_key"`
}

// report is the target's part of a result.
type report struct {
	CPUSeconds float64 `json:"cpu_seconds"`
	Check      string  `json:"check"` // what was wrong with the data; empty: nothing, or it was not compared
}

// ErrPeerGone means that the peer closed the side channel without an error message.
var ErrPeerGone = errors.New("side channel: the peer has gone")

// SideChannel connects the two sides of a measurement, apart from the devices.
type SideChannel struct {
	conn   io.ReadWriteCloser
	in     chan message
	closed chan struct{} // Close was called
	reader chan struct{} // the reading goroutine has ended
	failed chan struct{} // failure is set
	once   sync.Once     // guards closed

	// failure is why the measurement cannot go on. The measuring loops load it now and
	// then; more than an atomic load would disturb the measurement.
	failure atomic.Pointer[error]
	detach  func() bool // stops watching the context
}

// NewSideChannel starts to read from conn. The channel owns conn; Close ends
// both. When ctx ends, so does a measurement under way.
func NewSideChannel(ctx context.Context, conn io.ReadWriteCloser) *SideChannel {
	s := &SideChannel{
		conn:   conn,
		in:     make(chan message, 4),
		closed: make(chan struct{}),
		reader: make(chan struct{}),
		failed: make(chan struct{}),
	}
	s.detach = context.AfterFunc(ctx, func() { s.fail(context.Cause(ctx)) })
	go s.read()
	return s
}

// Close ends the channel and waits for its goroutine.
func (s *SideChannel) Close() error {
	var err error
	s.once.Do(func() {
		s.detach()
		close(s.closed)
		err = s.conn.Close()
		<-s.reader
	})
	return err
}

func (s *SideChannel) read() {
	defer close(s.reader)
	lines := bufio.NewScanner(s.conn)
	lines.Buffer(make([]byte, 0, 4096), maxLine)
	for lines.Scan() {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			s.fail(fmt.Errorf("side channel: not a message of verbena perf: %w", err))
			return
		}
		if m.Kind == kindError {
			s.fail(fmt.Errorf("peer: %s", m.Error))
			return
		}
		select {
		case s.in <- m:
		case <-s.closed:
			return
		}
	}
	if err := lines.Err(); err != nil {
		s.fail(fmt.Errorf("side channel: %w", err))
		return
	}
	s.fail(ErrPeerGone)
}

// fail records the first reason why the measurement cannot go on.
func (s *SideChannel) fail(err error) {
	if s.failure.CompareAndSwap(nil, &err) {
		close(s.failed)
	}
}

// err returns why the measurement cannot go on, nil if it can.
func (s *SideChannel) err() error {
	if p := s.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// pending reports whether a message waits or the channel has failed.
func (s *SideChannel) pending() bool { return len(s.in) > 0 || s.failure.Load() != nil }

func (s *SideChannel) send(m message) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("side channel: %w", err)
	}
	if _, err := s.conn.Write(append(b, '\n')); err != nil {
		if reason := s.err(); reason != nil {
			return reason
		}
		return fmt.Errorf("side channel: %w", err)
	}
	return nil
}

// giveUp sends the peer why this side gives up, unless the channel has failed. It ignores
// an error of that.
func (s *SideChannel) giveUp(err error) {
	if s.err() == nil {
		_ = s.send(message{Kind: kindError, Error: err.Error()})
	}
}

// receive waits for the next message, which must be of one of the kinds. If none comes
// within limit, the peer is taken for dead; a limit of 0 means no limit, for the time
// between phases.
func (s *SideChannel) receive(limit time.Duration, kinds ...kind) (message, error) {
	var expired <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		expired = t.C
	}
	var m message
	select {
	case m = <-s.in:
	case <-s.failed:
		// A message that came before the failure still counts.
		select {
		case m = <-s.in:
		default:
			return m, s.err()
		}
	case <-expired:
		return m, fmt.Errorf("side channel: no %q from the peer in %v", kinds, limit)
	}
	if !slices.Contains(kinds, m.Kind) {
		return m, fmt.Errorf("side channel: the peer says %q where %q was expected", m.Kind, kinds)
	}
	return m, nil
}
