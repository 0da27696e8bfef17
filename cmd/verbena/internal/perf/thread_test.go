package perf

import (
	"bufio"
	"encoding/json"
	"errors"
	"net"
	"runtime"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// The threads' shares are all there is, follow each other, and are as equal as can be.
func TestShare(t *testing.T) {
	for threads := 1; threads <= 9; threads++ {
		for n := threads; n <= 40; n++ {
			p := Params{Threads: threads}
			next := 0
			for i := range threads {
				count, before := p.share(n, i)
				if before != next || count != n/threads && count != (n+threads-1)/threads {
					t.Errorf("%d for %d threads: thread %d has %d, after %d", n, threads, i, count, before)
				}
				next += count
			}
			if next != n {
				t.Errorf("%d for %d threads: they have %d", n, threads, next)
			}
		}
	}
}

// Threads carry every operation, each with its own queue pairs, and what they did adds up.
func TestThreads(t *testing.T) {
	for _, link := range []verbs.LinkMode{verbs.LinkLoop, verbs.LinkUDP} {
		a, b := openPair(t, link)
		for _, p := range []Params{
			{Op: OpWrite, Size: 10_001}, {Op: OpWriteImm, Size: 100}, {Op: OpRead, Size: 4096}, {Op: OpSend, Size: 5000}, {Op: OpAtomic},
			{Op: OpWrite, BusyTarget: true},
		} {
			p.Threads, p.QPs, p.Iters, p.Check, p.Link = 3, 7, 500, true, string(link)
			if err := p.Complete(); err != nil {
				t.Fatal(err)
			}
			r, err := Local(t.Context(), a, b, p, nil)
			if err != nil {
				t.Fatalf("%s over %s: %v", p.Op, link, err)
			}
			checkThreads(t, r, []int{3, 2, 2}, []uint64{167, 167, 166})
		}
	}
}

func checkThreads(t *testing.T, r *Result, qps []int, iters []uint64) {
	t.Helper()
	if r.Threads != len(qps) || len(r.PerThread) != len(qps) {
		t.Fatalf("%s: %d threads, figures of %d", r.Op, r.Threads, len(r.PerThread))
	}
	var all uint64
	longest := 0.0
	for i, one := range r.PerThread {
		if one.QPs != qps[i] || one.Iters != iters[i] || one.Seconds <= 0 || one.MsgsPerS <= 0 || one.GBytesPerS <= 0 {
			t.Errorf("%s: thread %d: %+v", r.Op, i, one)
		}
		all += one.Iters
		longest = max(longest, one.Seconds)
	}
	if r.Iters != all || r.Seconds != longest || r.CPUPerGB <= 0 {
		t.Errorf("%s: %+v", r.Op, r)
	}
}

// When a thread fails, the others end, and its error is the one that counts.
func TestThreadFails(t *testing.T) {
	side, _ := sidePair(t, t.Context())
	why := errors.New("broken")
	for failing := range 3 {
		r := rigFor(t, Params{Threads: 3}, 0, 0)
		r.side = side
		err := r.each(func(i int) error {
			if i == failing {
				return why
			}
			for {
				if err := r.err(); err != nil {
					return err
				}
				runtime.Gosched()
			}
		})
		if err != why || !r.pending() {
			t.Errorf("thread %d fails: %v", failing, err)
		}
	}
}

// script is one end of a side channel in the hands of a test.
type script struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Scanner
}

func newScript(t *testing.T, conn net.Conn) *script {
	in := bufio.NewScanner(conn)
	in.Buffer(nil, maxLine)
	return &script{t, conn, in}
}

func (s *script) say(m message) {
	s.t.Helper()
	b, err := json.Marshal(m)
	if err == nil {
		_, err = s.conn.Write(append(b, '\n'))
	}
	if err != nil {
		s.t.Error(err)
	}
}

func (s *script) hear(k kind) (m message) {
	s.t.Helper()
	if !s.in.Scan() {
		s.t.Errorf("the end instead of %q: %v", k, s.in.Err())
	} else if err := json.Unmarshal(s.in.Bytes(), &m); err != nil || m.Kind != k {
		s.t.Errorf("%s instead of %q, %v", s.in.Bytes(), k, err)
	}
	return m
}

// A target refuses an initiator whose counts do not fit.
func TestTargetRefusesCounts(t *testing.T) {
	dev, other := openPair(t, verbs.LinkLoop)
	p := Params{Threads: 2, QPs: 3, Iters: 10, Size: 64, Check: true}
	if err := p.Complete(); err != nil {
		t.Fatal(err)
	}
	result := func(threads, figures int) *Result {
		return &Result{Threads: threads, PerThread: make([]ThreadResult, figures)}
	}
	tests := []struct {
		name         string
		edit         func(accept *offer)
		start, stop  []uint64
		result       *Result
		want, report string
	}{
		{"good", func(*offer) {}, make([]uint64, 3), make([]uint64, 3), result(2, 2), "", ""},
		{"memory of one thread", func(o *offer) { o.Memory = o.Memory[:1] }, nil, nil, nil, "does not fit", ""},
		{"no memory", func(o *offer) { o.Memory = nil }, nil, nil, nil, "does not fit", ""},
		{"two endpoints", func(o *offer) { o.Endpoints = o.Endpoints[:2] }, nil, nil, nil, "does not fit", ""},
		{"no counts", func(*offer) {}, nil, nil, nil, "0 counts for 3 queue pairs", ""},
		{"too many counts", func(*offer) {}, make([]uint64, 3), make([]uint64, 4), nil, "4 counts for 3 queue pairs", ""},
		{"fewer messages than in the warm-up", func(*offer) {}, []uint64{5, 5, 5}, []uint64{5, 5, 4}, result(2, 2), "", "4 messages in all, 5 of them in the warm-up"},
		{"no result", func(*offer) {}, make([]uint64, 3), make([]uint64, 3), nil, "without content", ""},
		{"result without threads", func(*offer) {}, make([]uint64, 3), make([]uint64, 3), result(2, 0), "figures of 0", ""},
		{"result of other threads", func(*offer) {}, make([]uint64, 3), make([]uint64, 3), result(5, 5), "of 5 threads", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			// The initiator's queue pairs are real, so that only the counts are wrong.
			mine, err := newRig(other, nil, p)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := mine.close(); err != nil {
					t.Error(err)
				}
			}()
			accept, err := mine.offer(other)
			if err != nil {
				t.Fatal(err)
			}
			tt.edit(accept)
			side, conn := sidePair(t, t.Context())
			served := make(chan error, 1)
			go func() {
				_, err := Serve(dev, side)
				served <- err
			}()
			peer := newScript(t, conn)
			steps := []struct {
				m      message
				answer kind
			}{
				{message{Kind: kindHello, Magic: magic, Version: Version, Params: &p}, kindOffer},
				{message{Kind: kindAccept, Offer: accept}, kindReady},
				{message{Kind: kindStart, Sent: tt.start}, kindStarted},
				{message{Kind: kindStop, Sent: tt.stop}, kindReport},
				{message{Kind: kindResult, Result: tt.result}, ""},
			}
			for _, s := range steps {
				peer.say(s.m)
				if s.answer == "" {
					break
				}
				if !peer.in.Scan() {
					t.Fatalf("no answer to %q: %v", s.m.Kind, peer.in.Err())
				}
				var answer message
				if err := json.Unmarshal(peer.in.Bytes(), &answer); err != nil {
					t.Fatal(err)
				}
				if answer.Kind == kindError {
					break
				}
				if answer.Kind != s.answer {
					t.Fatalf("%q after %q", answer.Kind, s.m.Kind)
				}
				if answer.Kind == kindReport && (!strings.Contains(answer.Report.Check, tt.report) || answer.Report.Check != "" && tt.report == "") {
					t.Errorf("the target reports %+v", answer.Report)
				}
			}
			go func() { // takes what the target says while it gives up
				for peer.in.Scan() {
				}
			}()
			err = <-served
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("the target ends with %v", err)
			}
		})
	}
}

// An initiator refuses a target whose counts do not fit.
func TestInitiatorRefusesCounts(t *testing.T) {
	dev, other := openPair(t, verbs.LinkLoop)
	p := Params{Threads: 2, QPs: 3, Iters: 10, Size: 64}
	if err := p.Complete(); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name   string
		edit   func(*offer)
		report *report
		want   string
	}{
		{"memory of one thread", func(o *offer) { o.Memory = o.Memory[:1] }, nil, "does not fit"},
		{"memory of too many threads", func(o *offer) { o.Memory = append(o.Memory, o.Memory...) }, nil, "does not fit"},
		{"four endpoints", func(o *offer) { o.Endpoints = append(o.Endpoints, o.Endpoints[0]) }, nil, "does not fit"},
		{"no report", func(*offer) {}, nil, "without valid content"},
		{"negative CPU time", func(*offer) {}, &report{CPUSeconds: -1}, "without valid content"},
		{"good", func(*offer) {}, &report{CPUSeconds: 1}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			mine, err := newRig(other, nil, p)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := mine.close(); err != nil {
					t.Error(err)
				}
			}()
			o, err := mine.offer(other)
			if err != nil {
				t.Fatal(err)
			}
			tt.edit(o)
			side, conn := sidePair(t, t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := Initiate(dev, side, p, nil)
				ended <- err
			}()
			peer := newScript(t, conn)
			peer.hear(kindHello)
			peer.say(message{Kind: kindOffer, Offer: o})
			if tt.want == "does not fit" {
				peer.hear(kindError)
			} else {
				accepted := peer.hear(kindAccept)
				if err := mine.connect(accepted.Offer, accepted.Offer.MTU); err != nil {
					t.Fatal(err)
				}
				peer.say(message{Kind: kindReady})
				peer.hear(kindStart)
				peer.say(message{Kind: kindStarted})
				peer.hear(kindStop)
				peer.say(message{Kind: kindReport, Report: tt.report})
				if tt.want == "" {
					peer.hear(kindResult)
				} else {
					peer.hear(kindError)
				}
			}
			err = <-ended
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("the initiator ends with %v", err)
			}
		})
	}
}
