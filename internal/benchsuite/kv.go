package main

// GETs of a key-value store between two processes: examples/kv, whose clients READ the server's memory, beside the same store
// by messages over TCP, whose server looks each key up.

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/examples/kv/store"
	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// The ways of a GET, and what they are called.
const (
	getByTCP     = "GETs by TCP"
	getByShared  = "GETs by READ, shared memory"
	getByPackets = "GETs by READ, packets"
)

var getLinks = map[string]verbs.LinkMode{getByShared: verbs.LinkLocal, getByPackets: verbs.LinkUDP}

const (
	kvKeys  = 64
	kvValue = 64 // bytes of a value
)

func kvKey(i int) string { return fmt.Sprint("key ", i) }

// kvContent returns the value of a key, the same in both processes.
func kvContent(key string) []byte {
	b := make([]byte, kvValue)
	copy(b, key)
	return b
}

// stores is what a peer process serves: the store by each way.
type stores struct {
	servers []*store.Server
	devices []*verbs.Device
	tcp     net.Listener
	all     sync.WaitGroup
}

// serveStores listens for all ways. It returns where.
func serveStores() (s *stores, at map[string]string, err error) {
	s, at = &stores{}, make(map[string]string)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	table, err := store.NewTable(256)
	if err != nil {
		return s, nil, err
	}
	plain := make(map[string][]byte)
	for i := range kvKeys {
		key := kvKey(i)
		plain[key] = kvContent(key)
		if _, err := table.Put(key, plain[key]); err != nil {
			return s, nil, err
		}
	}
	for way, link := range getLinks {
		dev, err := verbs.Open("", &verbs.Config{Link: link})
		if err != nil {
			return s, nil, err
		}
		s.devices = append(s.devices, dev)
		// The two servers share the table. Nobody PUTs, so nobody writes it.
		server, err := store.Listen(context.Background(), dev.Addr().String()+":0", table, dev)
		if err != nil {
			return s, nil, err
		}
		s.servers = append(s.servers, server)
		at[way] = server.Addr()
	}
	if s.tcp, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return s, nil, err
	}
	at[getByTCP] = s.tcp.Addr().String()
	var mu sync.RWMutex // as a store that takes PUTs would have it
	s.all.Go(func() {
		for {
			c, err := s.tcp.Accept()
			if err != nil {
				return // it is closed
			}
			s.all.Go(func() {
				answerGets(c, &mu, plain)
				_ = c.Close() // the peer's error says more
			})
		}
	})
	return s, at, nil
}

// answerGets serves a TCP client: a length of two bytes and a key come, a length and the value go.
func answerGets(c net.Conn, mu *sync.RWMutex, table map[string][]byte) {
	in, out, key := bufio.NewReader(c), make([]byte, 0, 256), make([]byte, 256)
	for {
		var n [2]byte
		if _, err := io.ReadFull(in, n[:]); err != nil {
			return
		}
		k := key[:min(len(key), int(binary.BigEndian.Uint16(n[:])))]
		if _, err := io.ReadFull(in, k); err != nil {
			return
		}
		mu.RLock()
		value := table[string(k)]
		out = binary.BigEndian.AppendUint16(out[:0], uint16(len(value)))
		out = append(out, value...)
		mu.RUnlock()
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}

func (s *stores) close() (err error) {
	for _, server := range s.servers {
		err = errors.Join(err, server.Close())
	}
	if s.tcp != nil {
		err = errors.Join(err, s.tcp.Close())
	}
	s.all.Wait() // the connections have ended with their peers
	for _, d := range s.devices {
		err = errors.Join(err, d.Close())
	}
	return err
}

// getter GETs the value of a key.
type getter func(key string) ([]byte, error)

// tcpGetter connects to the server by TCP.
func (b *bench) tcpGetter(at string) (getter, error) {
	c, err := net.Dial("tcp", at)
	if err != nil {
		return nil, err
	}
	b.later(c.Close)
	in, buf := bufio.NewReader(c), make([]byte, 0, 256)
	return func(key string) ([]byte, error) {
		buf = append(binary.BigEndian.AppendUint16(buf[:0], uint16(len(key))), key...)
		if _, err := c.Write(buf); err != nil {
			return nil, err
		}
		var n [2]byte
		if _, err := io.ReadFull(in, n[:]); err != nil {
			return nil, err
		}
		value := make([]byte, binary.BigEndian.Uint16(n[:])) // as the other clients return one
		_, err := io.ReadFull(in, value)
		return value, err
	}, nil
}

// readGetter connects to the server of the store.
func (b *bench) readGetter(at string, dev *verbs.Device) (getter, error) {
	c, err := store.Dial(context.Background(), at, dev)
	if err != nil {
		return nil, err
	}
	b.later(c.Close)
	return func(key string) ([]byte, error) {
		value, _, err := c.Get(context.Background(), key)
		return value, err
	}, nil
}

// storeGets has so many clients GET at random keys, each one after the other. Beside the rate, how much processor time the
// server's process uses for a GET.
func (b *bench) storeGets(clients int, shared, packets *goal) (all []contender, err error) {
	p, err := b.newPeer()
	if err != nil {
		return nil, err
	}
	r, err := p.call(request{Op: opStores})
	if err != nil {
		return nil, err
	}
	for _, way := range []row{{name: getByTCP}, {name: getByShared, against: getByTCP, goal: shared}, {name: getByPackets, against: getByTCP, goal: packets}} {
		way.unit = "k/s"
		var dev *verbs.Device
		if link, ok := getLinks[way.name]; ok {
			if dev, err = verbs.Open("", &verbs.Config{Link: link}); err != nil {
				return nil, err
			}
			b.later(dev.Close)
		}
		var getters []getter
		for range clients {
			var g getter
			if dev == nil {
				g, err = b.tcpGetter(r.At[way.name])
			} else {
				g, err = b.readGetter(r.At[way.name], dev)
			}
			if err != nil {
				return nil, err
			}
			getters = append(getters, g)
		}
		cost := func(whose string) row { return row{name: way.name + ": CPU of the " + whose, unit: "µs"} }
		all = append(all, contender{rows: []row{way, cost("server"), cost("clients")}, run: func(d time.Duration) ([]float64, error) {
			far, err := p.call(request{Op: opCPU})
			if err != nil {
				return nil, err
			}
			near, start := sys.CPUTime(), time.Now()
			n, err := getAll(getters, d)
			took, used := time.Since(start), sys.CPUTime()-near
			after, cpuErr := p.call(request{Op: opCPU})
			each := func(t time.Duration) float64 { return float64(t.Nanoseconds()) / 1e3 / float64(n) }
			return []float64{float64(n) / 1e3 / took.Seconds(), each(time.Duration(after.CPU - far.CPU)), each(used)}, errors.Join(err, cpuErr)
		}})
	}
	return all, nil
}

// getAll has each getter GET for a while, and compares what it gets. It returns how many GETs there were.
func getAll(getters []getter, d time.Duration) (sum int, err error) {
	done, errs := make([]int, len(getters)), make([]error, len(getters))
	var running sync.WaitGroup
	for i, get := range getters {
		running.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(i)))
			for end := time.Now().Add(d); time.Now().Before(end); done[i]++ {
				key := kvKey(r.IntN(kvKeys))
				value, err := get(key)
				if err == nil && string(value) != string(kvContent(key)) {
					err = fmt.Errorf("GET %s: %q", key, value)
				}
				if err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	running.Wait()
	for _, n := range done {
		sum += n
	}
	return max(1, sum), errors.Join(errs...)
}
