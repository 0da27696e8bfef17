package rconn

import (
	"sync"
	"time"
)

// deadline is a time after which calls fail, also those that wait already. Its zero value is never.
type deadline struct {
	mu     sync.Mutex // guards what follows
	timer  *time.Timer
	passed chan struct{} // closed when the time has come; nil: nobody has asked yet
}

// set sets the time; zero: never.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.passed // the timer closes it, or has
	}
	d.timer = nil
	if d.passed == nil || isClosed(d.passed) {
		d.passed = make(chan struct{})
	}
	if t.IsZero() {
		return
	}
	in := time.Until(t)
	if in <= 0 {
		close(d.passed)
		return
	}
	passed := d.passed
	d.timer = time.AfterFunc(in, func() { close(passed) })
}

// wait returns a channel that is closed when the time has come.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.passed == nil {
		d.passed = make(chan struct{})
	}
	return d.passed
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
