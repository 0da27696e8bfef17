package main

import (
	"errors"
	"io"
	"net"
	"sync"
)

// proxy passes the bytes of each connection that a listener takes on to a target, and back.
type proxy struct {
	l               net.Listener
	network, target string
	all             sync.WaitGroup

	mu     sync.Mutex // guards conns and closed
	conns  map[net.Conn]bool
	closed bool
}

func newProxy(l net.Listener, network, target string) *proxy {
	p := &proxy{l: l, network: network, target: target, conns: make(map[net.Conn]bool)}
	p.all.Go(p.accept)
	return p
}

func (p *proxy) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return // the proxy is closed
		}
		p.all.Go(func() {
			p.pass(c)
			_ = c.Close() // what fails, the client has seen
		})
	}
}

// pass passes bytes until both directions have ended. If the target is not there, the client sees the end at once.
func (p *proxy) pass(c net.Conn) {
	t, err := net.Dial(p.network, p.target)
	if err != nil {
		return
	}
	defer func() { _ = t.Close() }() // what fails, the client has seen
	if !p.enter(c) {
		return
	}
	defer p.leave(c)
	var back sync.WaitGroup
	back.Go(func() { forward(c, t) })
	forward(t, c)
	back.Wait()
}

// forward copies one direction, and passes its end on: the other direction may go on. A direction that fails ends both.
func forward(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if end, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		err = end.CloseWrite()
	}
	if err != nil {
		_, _ = to.Close(), from.Close() // the error is known
	}
}

func (p *proxy) enter(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.conns[c] = true
	}
	return !p.closed
}

func (p *proxy) leave(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// Close ends the listener and all connections.
func (p *proxy) Close() error {
	err := p.l.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		err = errors.Join(err, c.Close())
	}
	p.mu.Unlock()
	p.all.Wait()
	return err
}
