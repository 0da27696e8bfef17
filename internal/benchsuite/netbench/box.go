package main

// The box forwards IP packets between two TUN interfaces in different namespaces, through a bottleneck in each
// direction. Each direction has a goroutine that reads packets and gives them to the bottleneck, and one that writes
// them when they arrive. On a busy machine a packet may be late, never early.

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
)

// box is a path whose two directions are alike.
type box struct {
	*path
	ends [2]*os.File
	dirs [2]*direction // from either end
	wg   sync.WaitGroup
}

// direction is one direction of a box.
type direction struct {
	from, to *os.File
	start    time.Time
	due      chan parcel

	mu sync.Mutex // guards b
	b  bottleneck
}

// parcel is a packet on its way.
type parcel struct {
	packet  []byte
	arrives time.Duration
}

// mostParcels is how many packets are in the buffer and on the wire at most. What comes when there are more waits in
// the interface.
const mostParcels = 1 << 16

// newBox makes a path of two namespaces with a box between them.
func newBox(frame int, l link) (_ *box, err error) {
	p, err := newNamespaces()
	if err != nil {
		return nil, err
	}
	x := &box{path: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, x.close())
		}
	}()
	for i, ns := range p.ns {
		if x.ends[i], err = sys.OpenTUN("/run/netns/"+ns, "t0"); err != nil {
			return nil, err
		}
		// The interface's own queue is long, so that nothing is lost while the box has no processor.
		if err = commands(
			[]string{"ip", "-n", ns, "link", "set", "t0", "mtu", strconv.Itoa(frame), "txqueuelen", "20000", "up"},
			[]string{"ip", "-n", ns, "addr", "add", p.addr[i] + "/24", "dev", "t0"},
			p.cubic(i, "t0")); err != nil {
			return nil, err
		}
	}
	start := time.Now()
	for i := range x.dirs {
		d := &direction{from: x.ends[i], to: x.ends[1-i], start: start, due: make(chan parcel, mostParcels), b: bottleneck{link: l}}
		x.dirs[i] = d
		x.wg.Go(func() { d.read(frame) })
		x.wg.Go(d.write)
	}
	return x, nil
}

// packets are buffers for packets.
var packets sync.Pool

// read takes packets until the interface is closed.
func (d *direction) read(frame int) {
	defer close(d.due)
	for {
		b, _ := packets.Get().([]byte)
		if cap(b) < frame {
			b = make([]byte, frame)
		}
		n, err := d.from.Read(b[:cap(b)])
		if err != nil {
			return
		}
		d.mu.Lock()
		at, ok := d.b.admit(b[:n], time.Since(d.start))
		d.mu.Unlock()
		if ok {
			d.due <- parcel{b[:n], at}
		} else {
			packets.Put(b) //nolint:staticcheck // SA6002: allocating a slice's header costs little beside two system calls
		}
	}
}

// write delivers packets when they are due. When the interface is closed, those that are under way are dropped.
func (d *direction) write() {
	for p := range d.due {
		if wait := p.arrives - time.Since(d.start); wait > 0 {
			time.Sleep(wait)
		}
		_, _ = d.to.Write(p.packet) // an error is a packet that is lost, as on any wire
		packets.Put(p.packet)       //nolint:staticcheck // as above
	}
}

// reset begins to count again, in both directions.
func (x *box) reset() {
	for _, d := range x.dirs {
		d.mu.Lock()
		d.b.seen = seen{}
		d.mu.Unlock()
	}
}

// seen returns what was seen from one end since reset.
func (x *box) seen(end int) seen {
	d := x.dirs[end]
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.b.seen
	s.waits = append([]int32(nil), s.waits...)
	return s
}

// ecn has TCP ask for ECN, or not.
func (x *box) ecn(on bool) error {
	v := "0"
	if on {
		v = "1"
	}
	for _, ns := range x.ns {
		if _, err := command(x.in(ns, "sysctl", "-qw", "net.ipv4.tcp_ecn="+v)...); err != nil {
			return err
		}
	}
	return nil
}

// undelivered returns how many packets the interfaces of both ends have dropped, which the box has not seen.
func (x *box) undelivered() (n int, err error) {
	for _, ns := range x.ns {
		out, err := command(x.in(ns, "cat", "/sys/class/net/t0/statistics/tx_dropped")...)
		if err != nil {
			return 0, err
		}
		var k int
		if _, err := fmt.Sscan(out, &k); err != nil {
			return 0, err
		}
		n += k
	}
	return n, nil
}

func (x *box) close() error {
	var errs []error
	for _, f := range x.ends {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	x.wg.Wait()
	return errors.Join(append(errs, x.path.close())...)
}
