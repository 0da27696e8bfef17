package netsim

import (
	"math"
	"time"
)

// cubic is a model of a TCP connection with congestion control by CUBIC (RFC 9438) and selective
// acknowledgements, that always has data to send. It has segments as long as our packets are, so
// that both meet the same losses.
type cubic struct {
	s         *sim
	out, back func(*packet)
	capable   bool // asks for marks

	window    float64 // segments
	threshold float64
	most      float64 // window before the last reduction
	epoch     Time    // when the window began to grow after it; 0: not yet
	srtt      Time

	una, next int64 // segments
	recover   int64 // no further reduction before this one is acknowledged
	cutAt     Time  // the last reduction
	sent      map[int64]Time
	lost      map[int64]bool
	highest   int64 // acknowledged selectively
	again     int64 // retransmissions
	timer     Time

	// the receiver
	want   int64
	have   map[int64]bool
	done   int64 // bytes in order
	echo   bool  // a mark is to be echoed
	latest int64
}

// segment is what a packet of a cubic connection says.
type segment struct {
	n    int64
	ack  int64
	sack int64 // the segment that made the receiver acknowledge
	echo bool
}

const (
	cubicC    = 0.4
	cubicBeta = 0.7
	leastRTO  = 200 * time.Millisecond
)

func newCubic(s *sim, out, back func(*packet), capable bool) *cubic {
	return &cubic{s: s, out: out, back: back, capable: capable, window: 10, threshold: math.Inf(1),
		sent: map[int64]Time{}, lost: map[int64]bool{}, have: map[int64]bool{}}
}

func (c *cubic) start() { c.step() }

// step sends what the window allows: lost segments first.
func (c *cubic) step() {
	for n := range c.lost {
		if float64(len(c.sent)) >= c.window {
			break
		}
		delete(c.lost, n)
		c.again++
		c.transmit(n)
	}
	for float64(len(c.sent)) < c.window && float64(c.next-c.una) < 2*c.window+1000 {
		c.transmit(c.next)
		c.next++
	}
	c.arm()
}

func (c *cubic) transmit(n int64) {
	c.sent[n] = c.s.now
	c.out(&packet{size: mtu + overhead, capable: c.capable, tcp: segment{n: n}, arrive: c.arrive})
}

// arm sets the retransmission timer.
func (c *cubic) arm() {
	if len(c.sent) == 0 {
		return
	}
	due := c.s.now + max(leastRTO, 2*c.srtt)
	if c.timer >= c.s.now {
		c.timer = max(c.timer, due)
		return
	}
	c.timer = due
	c.s.at(due, c.timeout)
}

func (c *cubic) timeout() {
	if c.s.now < c.timer {
		c.s.at(c.timer, c.timeout)
		return
	}
	c.timer = 0
	for n, at := range c.sent {
		if c.s.now-at >= max(leastRTO, 2*c.srtt) {
			delete(c.sent, n)
			c.lost[n] = true
		}
	}
	if len(c.lost) > 0 {
		c.threshold = max(2, c.window*cubicBeta)
		c.window, c.epoch, c.most = 1, 0, c.window
		c.recover = c.next
	}
	c.step()
}

// arrive is the receiver.
func (c *cubic) arrive(p *packet) {
	n := p.tcp.n
	c.echo = c.echo || p.marked
	if n >= c.want {
		c.have[n] = true
	}
	for c.have[c.want] {
		delete(c.have, c.want)
		c.want++
		c.done += mtu
	}
	c.latest = n
	a := &packet{size: overhead, tcp: segment{ack: c.want, sack: n, echo: c.echo}, arrive: c.acked}
	c.echo = false
	c.back(a)
}

// acked takes an acknowledgement.
func (c *cubic) acked(p *packet) {
	a := p.tcp
	acked := 0
	if at, ok := c.sent[a.sack]; ok {
		rtt := c.s.now - at
		if c.srtt == 0 {
			c.srtt = rtt
		}
		c.srtt += (rtt - c.srtt) / 8
		delete(c.sent, a.sack)
		acked++
	}
	delete(c.lost, a.sack)
	for ; c.una < a.ack; c.una++ {
		if _, ok := c.sent[c.una]; ok {
			delete(c.sent, c.una)
			acked++
		}
		delete(c.lost, c.una)
	}
	c.highest = max(c.highest, a.sack)
	lost, twice := false, false
	for n := c.una; n < c.highest-2 && n < c.una+int64(2*c.window)+1000; n++ { // three behind it have come
		if at, ok := c.sent[n]; ok && (n >= c.recover || c.s.now-at > c.srtt+c.srtt/4) {
			delete(c.sent, n)
			c.lost[n] = true
			lost, twice = true, twice || n < c.recover
		}
	}
	if (lost || a.echo) && c.una >= c.recover || twice && c.s.now-c.cutAt > c.srtt { // or what was sent again is lost again
		c.recover, c.cutAt = c.next, c.s.now
		c.most = c.window
		c.window = max(2, c.window*cubicBeta)
		c.threshold, c.epoch = c.window, 0
	} else if c.una >= c.recover {
		c.grow(acked)
	}
	c.step()
}

// grow opens the window.
func (c *cubic) grow(acked int) {
	if c.window < c.threshold {
		c.window += float64(acked)
		return
	}
	if c.epoch == 0 {
		c.epoch = c.s.now
		c.most = max(c.most, c.window)
	}
	t := (c.s.now - c.epoch + c.srtt).Seconds()
	k := math.Cbrt((c.most - c.threshold) / cubicC)
	target := cubicC*math.Pow(t-k, 3) + c.most
	reno := c.threshold + 3*(1-cubicBeta)/(1+cubicBeta)*(c.s.now-c.epoch).Seconds()/max(c.srtt, 1).Seconds()
	target = max(target, reno)
	if target > c.window {
		c.window += min(float64(acked)*(target-c.window)/c.window, float64(acked)/2)
	}
}
