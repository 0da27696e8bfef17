package main

// Connections that are made while another process sends forged requests: each from another address,
// for another queue pair, and never followed by anything.

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/ib"
	proto "github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	floodRate  = 100_000 // forged requests in a second
	floodDials = 32      // real ones, all at once
)

// floodSpec is where a flood goes.
type floodSpec struct {
	To   netip.AddrPort
	Rate int
}

// flood sends forged requests for some time. It returns how many it has sent in a second.
func flood(q *floodSpec, d time.Duration) (_ []float64, err error) {
	dev, err := verbs.Open("", &verbs.Config{Link: verbs.LinkUDP})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	mgmt := provider.DeviceOf(dev).Management()
	m, err := forged(dev.Addr(), q.To)
	if err != nil {
		return nil, err
	}
	out := provider.MAD{From: m.From, To: m.To, HopLimit: m.HopLimit, Bytes: m.MAD[:]}
	start, sent := time.Now(), 0
	for time.Since(start) < d {
		due := int(time.Since(start).Seconds() * float64(q.Rate))
		for ; sent < due; sent++ {
			forge(m.MAD[:])
			if err := mgmt.Send(&out); err != nil {
				return nil, err
			}
		}
		time.Sleep(50 * time.Microsecond)
	}
	return []float64{float64(sent) / time.Since(start).Seconds()}, nil
}

// forged returns a request for a connection.
func forged(from netip.Addr, to netip.AddrPort) (proto.Send, error) {
	c := proto.New(proto.Config{GUID: 1, NewID: func() uint32 { return 1 }, Rand: rand.Uint64, Listener: func(*proto.Request) proto.Verdict { return proto.Verdict{} }})
	const tcp = 0x0106
	_, err := c.Connect(0, tcp<<16|uint64(to.Port()), proto.RC, &proto.Path{Local: from, Remote: to.Addr(), HopLimit: 64, MTU: ib.MTU1024, LifeTime: 16},
		&proto.IPHeader{Src: netip.AddrPortFrom(from, 1), Dst: to.Addr()}, &proto.Params{QPN: 1, PSN: 1}, 15)
	if err != nil {
		return proto.Send{}, err
	}
	m, _ := c.NextMAD()
	return m, nil
}

// forge makes a request one of another peer, at an address of the loopback interface where nobody is.
func forge(mad []byte) {
	const data, id, guid, qpn, gid, private = 24, 0, 16, 32, 56, 140 // IBA 12.6.5
	be := binary.BigEndian
	r := rand.Uint64()
	be.PutUint32(mad[data+id:], uint32(r)|1)
	be.PutUint64(mad[data+guid:], rand.Uint64())
	be.PutUint32(mad[data+qpn:], uint32(r>>32)&^0xff|uint32(mad[data+qpn+3]))
	r = rand.Uint64()
	addr := [4]byte{127, 96 | byte(r)&31, byte(r >> 8), byte(r >> 16)}
	copy(mad[data+gid+12:], addr[:])
	be.PutUint16(mad[data+private+2:], uint16(r>>32)|1)
	copy(mad[data+private+4+12:], addr[:])
}

// flooded dials during a flood.
func (b *bench) flooded() ([]contender, error) {
	d, err := b.newDoorway(verbs.LinkUDP)
	if err != nil {
		return nil, err
	}
	p, err := b.newPeer()
	if err != nil {
		return nil, err
	}
	rows := []row{{name: "forged requests", unit: "/s"}, {name: "connections made meanwhile, of 32", unit: "", goal: &goal{"≥", floodDials}},
		{name: "Dial, p50", unit: "s"}, {name: "Dial, slowest", unit: "s"}, {name: "memory", unit: "MiB"}, {name: "goroutines", unit: ""}}
	return []contender{{once: true, rows: rows, run: func(time.Duration) ([]float64, error) { return d.flooded(p, b.floodTime) }}}, nil
}

func (d *doorway) flooded(p *peer, long time.Duration) ([]float64, error) {
	memory, goroutines := heap(), runtime.NumGoroutine()
	ctx, cancel := context.WithTimeout(context.Background(), long)
	defer cancel()
	var sent reply
	var floodErr error
	var wg, ends sync.WaitGroup
	wg.Go(func() {
		sent, floodErr = p.call(request{Op: opFlood, Flood: &floodSpec{To: d.l.Addr(), Rate: floodRate}, For: long})
	})
	time.Sleep(long / 6) // the listener is full
	conns, took := make([]*cm.Conn, floodDials), make([]float64, floodDials)
	for i := range conns {
		ends.Go(func() {
			start := time.Now()
			conns[i], _ = cm.Dial(ctx, d.at, &cm.Config{Device: d.client, Cap: small}) // what is not made is not counted
			took[i] = time.Since(start).Seconds()
		})
	}
	ends.Wait()
	memory, goroutines = heap()-memory, runtime.NumGoroutine()-goroutines
	wg.Wait()
	err := floodErr
	made := 0
	for _, c := range conns {
		if c != nil {
			made++
			err = errors.Join(err, c.Close())
		}
	}
	if err != nil {
		return nil, err
	}
	slices.Sort(took)
	// What was measured before may have left goroutines that have ended meanwhile.
	more := max(0, goroutines-made)
	return []float64{sent.Values[0], float64(made), took[floodDials/2], took[floodDials-1], max(0, memory) / (1 << 20), float64(more)}, nil
}
