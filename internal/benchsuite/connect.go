package main

// Connections by address: made and closed one after the other, beside TCP, and many at once.

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// small are queues for connections that carry nothing.
var small = verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1}

// doorway is a listener, and a device that connects to it.
type doorway struct {
	l      *cm.Listener
	at     string
	client *verbs.Device
}

// newDoorway listens on a device. It closes connections when their peers have.
func (b *bench) newDoorway(link verbs.LinkMode) (*doorway, error) {
	server, err := verbs.Open("", &verbs.Config{Link: link})
	if err != nil {
		return nil, err
	}
	b.later(server.Close)
	client, err := verbs.Open("", &verbs.Config{Link: link})
	if err != nil {
		return nil, err
	}
	b.later(client.Close)
	l, err := cm.Listen(context.Background(), server.Addr().String()+":0", &cm.Config{Device: server, Cap: small})
	if err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			wg.Go(func() {
				<-c.Done()
				_ = c.Close() // the peer's error says more
			})
		}
	})
	b.later(func() error {
		err := l.Close()
		wg.Wait()
		return err
	})
	return &doorway{l, l.Addr().String(), client}, nil
}

func (d *doorway) dial() (*cm.Conn, error) {
	return cm.Dial(context.Background(), d.at, &cm.Config{Device: d.client, Cap: small})
}

// connecting makes a connection and closes it, again and again.
func (b *bench) connecting() ([]contender, error) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close() // the peer has closed it
			})
		}
	})
	b.later(func() error {
		err := tcp.Close()
		wg.Wait()
		return err
	})
	const plain = "TCP"
	all := []contender{each(row{name: plain}, func() error {
		c, err := net.Dial("tcp", tcp.Addr().String())
		if err != nil {
			return err
		}
		return c.Close()
	})}
	for _, link := range []verbs.LinkMode{verbs.LinkLocal, verbs.LinkUDP} {
		d, err := b.newDoorway(link)
		if err != nil {
			return nil, err
		}
		all = append(all, each(row{name: "RDMA-CM with a queue pair, " + string(link), goal: &goal{"<", 150}}, func() error {
			c, err := d.dial()
			if err != nil {
				return err
			}
			return c.Close()
		}))
	}
	return all, nil
}

// connections makes many connections at once.
func (b *bench) connections() ([]contender, error) {
	d, err := b.newDoorway(verbs.LinkUDP)
	if err != nil {
		return nil, err
	}
	return []contender{{once: true, rows: []row{{name: "time of each", unit: "µs"}, {name: "memory of each, both sides", unit: "KiB"}}, run: func(time.Duration) ([]float64, error) {
		return d.many(b.atOnce)
	}}}, nil
}

// many makes n connections at once. It returns the time and the memory of each.
func (d *doorway) many(n int) ([]float64, error) {
	before := heap()
	conns, errs := make([]*cm.Conn, n), make([]error, n)
	start := time.Now()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { conns[i], errs[i] = d.dial() })
	}
	wg.Wait()
	took := time.Since(start)
	used := heap() - before
	for i, c := range conns {
		if c != nil {
			errs[i] = errors.Join(errs[i], c.Close())
		}
	}
	return []float64{took.Seconds() * 1e6 / float64(n), used / 1024 / float64(n)}, errors.Join(errs...)
}

// heap returns the bytes in use, of memory that the runtime has, with the stacks.
func heap() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) + float64(m.StackInuse)
}
