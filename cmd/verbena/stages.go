package main

import (
	"fmt"
	"os"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/perf"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
)

// stages shows on a terminal which stage a measurement is in, and for how long. A
// goroutine of its own writes the line, four times a second, which disturbs no
// measurement.
type stages struct {
	next chan string
	done chan struct{}
}

// newStages starts to show stages, unless quiet is set or standard error is no terminal.
func newStages(quiet bool) *stages {
	out := term.New(os.Stderr)
	if quiet || !out.Terminal() {
		return &stages{}
	}
	s := &stages{next: make(chan string), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		stage, since := "", time.Now()
		for {
			select {
			case next, more := <-s.next:
				if !more {
					out.Clear()
					return
				}
				stage, since = next, time.Now()
			case <-tick.C:
			}
			out.Progress("%s … %.1f s", stage, time.Since(since).Seconds())
		}
	}()
	return s
}

// set shows another stage.
func (s *stages) set(stage string) {
	if s.next != nil {
		s.next <- stage
	}
}

// notify returns the function that a measurement calls with each stage.
func (s *stages) notify(p perf.Params) func(string) {
	return func(stage string) {
		if stage == "measuring" && p.Iters == 0 {
			stage += fmt.Sprintf(" for %v", p.Duration)
		}
		s.set(stage)
	}
}

// end removes the line. It is called once.
func (s *stages) end() {
	if s.next != nil {
		close(s.next)
		<-s.done
	}
}
