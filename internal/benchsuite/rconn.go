package main

// Streams of bytes between two processes: package rconn beside TCP and unix sockets, all by net.Conn.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/rconn"
	"github.com/verbena-rdma/verbena/verbs"
)

// The ways of a stream, and what they are called.
const (
	overTCP     = "TCP"
	overUnix    = "unix socket"
	overShared  = "rconn, shared memory"
	overPackets = "rconn, packets"
)

// streamLinks are the links of those that are ours.
var streamLinks = map[string]verbs.LinkMode{overShared: verbs.LinkLocal, overPackets: verbs.LinkUDP}

// What the first byte of a connection asks the server for.
const (
	askEcho    = 'e' // send each byte back
	askDiscard = 'd' // take all, and confirm the end with a byte
)

// byHTTP is put in front of the name of a way, for the listener of its HTTP server.
const byHTTP = "http by "

// streams is what a peer process serves: two listeners for each way, one of them of an HTTP server.
type streams struct {
	listeners []net.Listener
	servers   []*http.Server
	devices   []*verbs.Device
	all       sync.WaitGroup
}

// serveStreams listens for all ways. It returns where.
func serveStreams() (s *streams, at map[string]string, err error) {
	s, at = &streams{}, make(map[string]string)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for way, link := range streamLinks {
		dev, err := verbs.Open("", &verbs.Config{Link: link})
		if err != nil {
			return s, nil, err
		}
		s.devices = append(s.devices, dev)
		err = s.serveWay(way, at, func(string) (net.Listener, error) {
			return rconn.Listen(context.Background(), dev.Addr().String()+":0", &rconn.Config{Config: cm.Config{Device: dev}})
		})
		if err != nil {
			return s, nil, err
		}
	}
	err = s.serveWay(overTCP, at, func(string) (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") })
	if err == nil {
		err = s.serveWay(overUnix, at, func(use string) (net.Listener, error) {
			return net.Listen("unix", fmt.Sprintf("@verbena-bench-%d-%s", os.Getpid(), use))
		})
	}
	return s, at, err
}

// serveWay listens for a way, and notes where.
func (s *streams) serveWay(way string, at map[string]string, listen func(use string) (net.Listener, error)) error {
	l, err := listen("stream")
	if err != nil {
		return err
	}
	s.serve(l)
	at[way] = l.Addr().String()
	if l, err = listen("http"); err != nil {
		return err
	}
	at[byHTTP+way] = l.Addr().String()
	server := &http.Server{Handler: http.HandlerFunc(greet), ReadHeaderTimeout: time.Minute}
	s.servers = append(s.servers, server)
	s.all.Go(func() { _ = server.Serve(l) }) // until it is closed
	return nil
}

const greeting = "hello\n"

func greet(w http.ResponseWriter, _ *http.Request) {
	_, _ = io.WriteString(w, greeting) // the client counts what it gets
}

func (s *streams) serve(l net.Listener) {
	s.listeners = append(s.listeners, l)
	s.all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // it is closed
			}
			s.all.Go(func() {
				answer(c)
				_ = c.Close() // the peer's error says more
			})
		}
	})
}

// answer serves a connection, until its peer has closed it.
func answer(c net.Conn) {
	b := make([]byte, 64<<10)
	if _, err := io.ReadFull(c, b[:1]); err != nil {
		return
	}
	ask := b[0]
	for {
		n, err := c.Read(b)
		if err == nil && ask == askEcho {
			_, err = c.Write(b[:n])
		}
		if err == io.EOF && ask == askDiscard {
			_, _ = c.Write(b[:1]) // the peer's error says more
		}
		if err != nil {
			return
		}
	}
}

// close ends the listeners. The connections have ended with their peers.
func (s *streams) close() (err error) {
	for _, l := range s.listeners {
		err = errors.Join(err, l.Close())
	}
	for _, h := range s.servers {
		err = errors.Join(err, h.Close())
	}
	s.all.Wait()
	for _, d := range s.devices {
		err = errors.Join(err, d.Close())
	}
	return err
}

// streamer connects to a peer process by all ways.
type streamer struct {
	peer    *peer
	at      map[string]string
	devices map[string]*verbs.Device
}

func (b *bench) newStreamer() (*streamer, error) {
	p, err := b.newPeer()
	if err != nil {
		return nil, err
	}
	r, err := p.call(request{Op: opStreams})
	if err != nil {
		return nil, err
	}
	s := &streamer{peer: p, at: r.At, devices: make(map[string]*verbs.Device)}
	for way, link := range streamLinks {
		if s.devices[way], err = verbs.Open("", &verbs.Config{Link: link}); err != nil {
			return nil, err
		}
		b.later(s.devices[way].Close)
	}
	return s, nil
}

// dial connects, and says what the server is to do.
func (s *streamer) dial(way string, ask byte) (c net.Conn, err error) {
	if c, err = s.connect(context.Background(), way, s.at[way]); err != nil {
		return nil, err
	}
	if _, err := c.Write([]byte{ask}); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (s *streamer) connect(ctx context.Context, way, at string) (net.Conn, error) {
	var d net.Dialer
	switch dev := s.devices[way]; {
	case dev != nil:
		return (&rconn.Dialer{Config: rconn.Config{Config: cm.Config{Device: dev}}}).DialContext(ctx, "rdma", at)
	case way == overUnix:
		return d.DialContext(ctx, "unix", at)
	default:
		return d.DialContext(ctx, "tcp", at)
	}
}

// ways are the contenders, in the order in which they are shown, with their goals against TCP.
func ways(shared, packets *goal) []row {
	return []row{{name: overTCP}, {name: overUnix, against: overTCP}, {name: overShared, against: overTCP, goal: shared}, {name: overPackets, against: overTCP, goal: packets}}
}

// streamLatency sends a byte there and back, again and again.
func (b *bench) streamLatency() (all []contender, err error) {
	s, err := b.newStreamer()
	if err != nil {
		return nil, err
	}
	for _, r := range ways(&goal{"≤", 0.67}, nil) {
		c, err := s.dial(r.name, askEcho)
		if err != nil {
			return nil, err
		}
		b.later(c.Close)
		var one [1]byte
		all = append(all, each(r, func() error {
			if _, err := c.Write(one[:]); err != nil {
				return err
			}
			_, err := io.ReadFull(c, one[:])
			return err
		}))
	}
	return all, nil
}

// streamBandwidth writes 64 KiB, again and again. The server has all of it when a measurement ends.
func (b *bench) streamBandwidth() (all []contender, err error) {
	s, err := b.newStreamer()
	if err != nil {
		return nil, err
	}
	for _, r := range ways(&goal{"≥", 1.5}, nil) {
		r.unit = "GB/s"
		all = append(all, contender{rows: []row{r}, rates: func(d time.Duration) ([]rate, error) {
			v, err := s.pump(r.name, d)
			return []rate{v}, err
		}})
	}
	return all, nil
}

func (s *streamer) pump(way string, d time.Duration) (r rate, err error) {
	c, err := s.dial(way, askDiscard)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	far, err := s.peer.call(request{Op: opCPU})
	if err != nil {
		return r, err
	}
	buf, n, near, start := make([]byte, 64<<10), 0, sys.CPUTime(), time.Now()
	for time.Since(start) < d {
		k, err := c.Write(buf)
		if err != nil {
			return r, err
		}
		n += k
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return r, err
	}
	if _, err := io.ReadFull(c, buf[:1]); err != nil {
		return r, err
	}
	took, used := time.Since(start), sys.CPUTime()-near
	after, err := s.peer.call(request{Op: opCPU})
	gb := float64(n) / 1e9
	return rate{value: gb / took.Seconds(), cpu: (used + time.Duration(after.CPU-far.CPU)).Seconds() / gb}, err
}

// httpClients is how many goroutines make requests, each one after the other.
const httpClients = 8

// streamHTTP makes requests by net/http, and counts them.
func (b *bench) streamHTTP() (all []contender, err error) {
	s, err := b.newStreamer()
	if err != nil {
		return nil, err
	}
	for _, r := range ways(nil, nil) {
		r.unit = "k/s"
		t := &http.Transport{MaxIdleConnsPerHost: httpClients, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return s.connect(ctx, r.name, s.at[byHTTP+r.name])
		}}
		b.later(func() error { t.CloseIdleConnections(); return nil })
		client := &http.Client{Transport: t}
		all = append(all, contender{rows: []row{r}, run: func(d time.Duration) ([]float64, error) {
			n, took, err := requestAll(client, d)
			return []float64{float64(n) / 1e3 / took.Seconds()}, err
		}})
	}
	return all, nil
}

// requestAll has httpClients goroutines make requests for a while.
func requestAll(client *http.Client, d time.Duration) (sum int, took time.Duration, err error) {
	var done [httpClients]int
	var errs [httpClients]error
	var running sync.WaitGroup
	start := time.Now()
	for i := range done {
		running.Go(func() {
			for ; time.Since(start) < d; done[i]++ {
				if errs[i] = requestOne(client); errs[i] != nil {
					return
				}
			}
		})
	}
	running.Wait()
	for _, n := range done {
		sum += n
	}
	return sum, time.Since(start), errors.Join(errs[:]...)
}

func requestOne(client *http.Client) error {
	r, err := client.Get("http://bench/")
	if err != nil {
		return err
	}
	b, err := io.ReadAll(r.Body)
	err = errors.Join(err, r.Body.Close())
	if err == nil && string(b) != greeting {
		err = fmt.Errorf("the server says %q", b)
	}
	return err
}

// idleStreams measures the memory of connections on which nothing moves, at the server, whose process has nothing else.
func (b *bench) idleStreams() ([]contender, error) {
	s, err := b.newStreamer()
	if err != nil {
		return nil, err
	}
	n := max(b.atOnce, 64) // enough to be seen beside what the runtime takes and gives back
	return []contender{{once: true, rows: []row{{name: "memory of each, one side", unit: "KiB"}}, run: func(time.Duration) (v []float64, err error) {
		var conns []net.Conn
		defer func() {
			for _, c := range conns {
				err = errors.Join(err, c.Close())
			}
		}()
		dial := func(n int) (resident float64, err error) {
			for range n {
				c, err := s.dial(overPackets, askEcho)
				if err != nil {
					return 0, err
				}
				conns = append(conns, c)
				one := []byte{1}
				if _, err := c.Write(one); err != nil {
					return 0, err
				}
				if _, err := io.ReadFull(c, one); err != nil { // the server has it, and waits
					return 0, err
				}
			}
			r, err := s.peer.call(request{Op: opResident})
			if err != nil {
				return 0, err
			}
			return r.Values[0], nil
		}
		before, err := dial(8) // what the first ones need is not counted
		if err != nil {
			return nil, err
		}
		after, err := dial(n)
		return []float64{(after - before) / 1024 / float64(n)}, err
	}}}, nil
}
