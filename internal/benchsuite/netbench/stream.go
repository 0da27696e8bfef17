package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// streamBuffer is what one call writes or reads.
const streamBuffer = 64 << 10

// streams receives TCP connections, one after the other or several at a time. The first bytes of a connection say for
// how long it is measured.
type streams struct {
	l    net.Listener
	done chan streamed
}

// streamed is what has arrived by one connection, from its first byte on.
type streamed struct {
	bytes int64
	took  time.Duration
	err   error
}

func listenStreams(addr string) (*streams, error) {
	l, err := net.Listen("tcp", addr+":0")
	if err != nil {
		return nil, err
	}
	s := &streams{l, make(chan streamed, 64)}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			go func() { s.done <- receive(c) }()
		}
	}()
	return s, nil
}

func (s *streams) port() int { return s.l.Addr().(*net.TCPAddr).Port }

func (s *streams) close() error { return s.l.Close() }

// next returns what has arrived by the next connection that ends.
func (s *streams) next() ([]int64, time.Duration, error) {
	select {
	case d := <-s.done:
		return []int64{d.bytes}, d.took, d.err
	case <-time.After(replyLimit):
		return nil, 0, errors.New("a stream has not ended")
	}
}

// receive counts what arrives in the time that the connection is measured. Then it closes the connection, whatever is
// under way.
func receive(c net.Conn) (r streamed) {
	defer func() { _ = c.Close() }() // nothing is written
	var d time.Duration
	if _, err := fmt.Fscanf(c, "%d\n", &d); err != nil {
		r.err = err
		return r
	}
	start := time.Now()
	if r.err = c.SetReadDeadline(start.Add(d)); r.err != nil {
		return r
	}
	b := make([]byte, streamBuffer)
	for {
		n, err := c.Read(b)
		r.bytes += int64(n)
		if errors.Is(err, os.ErrDeadlineExceeded) || err == nil && time.Since(start) >= d { // with data at hand a deadline may pass unseen
			r.took = time.Since(start)
			return r
		}
		if err != nil {
			r.err = fmt.Errorf("after %d bytes: %w", r.bytes, err)
			return r
		}
	}
}

// streamAll sends by some connections at a time.
func streamAll(addr string, connections int, d time.Duration) error {
	errs := make([]error, connections)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = stream(addr, d) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// stream sends to an address until the receiver, which measures for d, closes the connection.
func stream(addr string, d time.Duration) error {
	c, err := net.DialTimeout("tcp", addr, 30*time.Second)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // the receiver has counted
	if err := c.SetWriteDeadline(time.Now().Add(d + 30*time.Second)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(c, "%d\n", d); err != nil {
		return err
	}
	b := make([]byte, streamBuffer)
	for {
		if _, err := c.Write(b); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return io.ErrNoProgress
			}
			return nil // reset by the receiver
		}
	}
}
