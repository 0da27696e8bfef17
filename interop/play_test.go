package interop

// One side of a scenario, in a process of its own:
//
//  1. play opens a device and runs the scenario;
//  2. newCast makes an RC, a UC and a UD queue pair, tells the peer, and connects;
//  3. the scenarios are in scenes_test.go.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// player is one side of a scenario.
type player struct {
	role   string
	script script
	in     *bufio.Scanner
	dev    *verbs.Device
	result result
}

// play is the main program of a process that a test has started.
func play(role string) int {
	p := &player{role: role, in: bufio.NewScanner(os.Stdin)}
	p.in.Buffer(nil, 1<<20)
	if err := json.Unmarshal([]byte(os.Getenv(scriptVar)), &p.script); err != nil {
		fmt.Fprintln(os.Stderr, "script:", err)
		return 1
	}
	run := p.run
	switch {
	case role == "holder":
		run = p.hold
	case role == "victim":
		run = p.suffer
	case role == "passive":
		run = p.suit
	case role == "citizen":
		run = p.live
	case role == "sniffer":
		run = p.sniff
	case p.script.File != "":
		run = p.serveQueue
	}
	if err := run(); err != nil {
		p.fail("%v", err)
	}
	p.write(envelope{To: "test", Result: &p.result})
	return 0
}

func (p *player) fail(format string, args ...any) {
	if len(p.result.Errors) < 20 {
		p.result.Errors = append(p.result.Errors, fmt.Sprintf(format, args...))
	}
}

func (p *player) run() (err error) {
	cfg := &verbs.Config{Link: verbs.LinkUDP}
	if p.script.Any && p.script.Packets != p.role {
		cfg.Link = verbs.LinkAny
	}
	for _, a := range p.script.Addrs {
		cfg.Addrs = append(cfg.Addrs, netip.MustParseAddr(a))
	}
	if len(cfg.Addrs) > 0 {
		p.script.Mine = ""
	}
	if p.dev, err = verbs.Open(p.script.Mine, cfg); err != nil {
		return err
	}
	port, err := p.dev.Port(1)
	if err != nil {
		return err
	}
	p.result.MTU, p.result.Offloads = port.ActiveMTU.Bytes(), p.dev.Attr().Offloads
	c, err := newCast(p)
	if err == nil {
		err = scenes[p.script.Scenario][p.role](c)
	}
	p.result.Counters = map[string]uint64{}
	for _, n := range p.dev.Counters() {
		p.result.Counters[n.Name] = n.Value
	}
	if c != nil {
		err = errors.Join(err, c.close())
	}
	return errors.Join(err, p.dev.Close())
}

// hold opens the device and keeps it open until standard input is closed. It reports the
// device's events.
func (p *player) hold() error {
	dev, err := verbs.Open(p.script.Mine, &verbs.Config{Link: verbs.LinkUDP})
	if err != nil {
		return err
	}
	p.write(envelope{To: "test", Body: json.RawMessage(`"holding"`)})
	told := make(chan struct{})
	go func() {
		defer close(told)
		for {
			ev, err := dev.NextEvent(context.Background())
			if err != nil {
				return // closed
			}
			p.write(envelope{To: "test", Body: json.RawMessage(strconv.Quote(ev.Type.String()))})
		}
	}()
	for p.in.Scan() {
	}
	err = dev.Close()
	<-told
	return err
}

func (p *player) write(e envelope) {
	b, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(append(b, '\n'))
}

// tell sends a message to the peer, hear receives one.
func (p *player) tell(v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	p.write(envelope{To: "peer", Body: b})
}

func (p *player) hear(v any) error {
	if !p.in.Scan() {
		return errors.New("the peer has gone")
	}
	return json.Unmarshal(p.in.Bytes(), v)
}

// barrier waits until the peer has come to the barrier of that name.
func (p *player) barrier(name string) error {
	p.tell(name)
	var other string
	if err := p.hear(&other); err != nil {
		return err
	}
	if other != name {
		return fmt.Errorf("the peer is at %q, not at %q", other, name)
	}
	return nil
}

// cast holds the objects of one side.
type cast struct {
	*player
	pd         *verbs.PD
	cq         *verbs.CQ
	rc, uc, ud *verbs.QP
	buf        []byte
	mr         *verbs.MR
	spare      *verbs.MR // the peer may invalidate it
	peer       hello
	ah         *verbs.AH
	opened     []interface{ Close() error }
}

// hello is what a side tells the other.
type hello struct {
	RC, UC, UD verbs.Endpoint
	Addr       uint64
	RKey       uint32
	Spare      uint32
	MTU        int
}

const (
	bufBytes = 4 << 20
	deep     = 16 // how many requests and receives each queue pair has room for
	patience = 30 * time.Second
)

func newCast(p *player) (*cast, error) {
	c := &cast{player: p, buf: make([]byte, bufBytes)}
	if err := c.build(); err != nil {
		return c, err
	}
	mine := hello{RC: c.rc.Endpoint(), UC: c.uc.Endpoint(), UD: c.ud.Endpoint(), Addr: c.mr.Addr(), RKey: c.mr.RKey(),
		Spare: c.spare.RKey(), MTU: p.result.MTU}
	for _, e := range []*verbs.Endpoint{&mine.RC, &mine.UC, &mine.UD} {
		e.GID = p.dev.GIDs()[p.script.SGID]
	}
	p.tell(mine)
	if err := p.hear(&c.peer); err != nil {
		return c, err
	}
	if c.peer.MTU != mine.MTU && !p.script.MixedMTU {
		return c, fmt.Errorf("the ports' MTUs are %d and %d", mine.MTU, c.peer.MTU)
	}
	p.result.MTU = min(mine.MTU, c.peer.MTU)
	// On a busy machine a process may not run for long. The retries last 4 s, or 0.3 s
	// where the peer will be killed.
	retries := &verbs.ConnectConfig{Timeout: 17, RetryCnt: 7}
	if p.script.Any {
		retries.Timeout = 20 // this link loses nothing: the peer is only late
	}
	if p.script.Scenario == "doomed" {
		retries = &verbs.ConnectConfig{Timeout: 14, RetryCnt: 3}
	}
	var err error
	retries.SGIDIndex, retries.MTU = p.script.SGID, mtuOf(p.result.MTU)
	av := verbs.AHAttr{DGID: c.peer.UD.GID, SGIDIndex: p.script.SGID}
	if p.script.Classes {
		class := classes[p.role]
		retries.TrafficClass, retries.HopLimit = class.rc, class.rcHops
		av.TrafficClass, av.HopLimit = class.ud, class.udHops
	}
	c.ah, err = c.pd.CreateAH(av)
	if err != nil {
		return c, err
	}
	c.opened = append(c.opened, c.ah)
	return c, errors.Join(c.rc.Connect(c.peer.RC, retries), c.uc.Connect(c.peer.UC, &verbs.ConnectConfig{MTU: retries.MTU, SGIDIndex: retries.SGIDIndex, TrafficClass: retries.TrafficClass, HopLimit: retries.HopLimit}), c.ud.Connect(c.peer.UD, nil), p.barrier("connected"))
}

// mtuOf returns the path MTU of n bytes.
func mtuOf(n int) verbs.MTU {
	for m := verbs.MTU256; m <= verbs.MTU4096; m++ {
		if m.Bytes() == n {
			return m
		}
	}
	panic(fmt.Sprintf("no MTU has %d bytes", n))
}

// build makes the objects. close closes those that were made, the last one first.
func (c *cast) build() (err error) {
	if c.pd, err = c.dev.AllocPD(); err != nil {
		return err
	}
	c.opened = append(c.opened, c.pd)
	if c.cq, err = c.dev.CreateCQ(16*deep, nil); err != nil {
		return err
	}
	c.opened = append(c.opened, c.cq)
	all := verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead | verbs.AccessRemoteAtomic
	if c.mr, err = c.pd.RegMR(c.buf, all); err != nil {
		return err
	}
	c.opened = append(c.opened, c.mr)
	if c.spare, err = c.pd.RegMR(make([]byte, 64), all|verbs.AccessRemoteInvalidate); err != nil {
		return err
	}
	c.opened = append(c.opened, c.spare)
	for _, q := range []struct {
		typ verbs.QPType
		qp  **verbs.QP
	}{{verbs.RC, &c.rc}, {verbs.UC, &c.uc}, {verbs.UD, &c.ud}} {
		*q.qp, err = c.pd.CreateQP(&verbs.QPConfig{Type: q.typ, SendCQ: c.cq, RecvCQ: c.cq, Cap: verbs.QPCap{
			MaxSendWR: deep, MaxRecvWR: deep, MaxSendSGE: 2, MaxRecvSGE: 2, MaxInlineData: 64}})
		if err != nil {
			return err
		}
		c.opened = append(c.opened, *q.qp)
	}
	return nil
}

func (c *cast) close() (err error) {
	for i := len(c.opened) - 1; i >= 0; i-- {
		err = errors.Join(err, c.opened[i].Close())
	}
	return err
}

// post posts a signaled request.
func (c *cast) post(qp *verbs.QP, wr verbs.SendWR) error {
	wr.Flags |= verbs.SendSignaled
	_, err := qp.PostSend([]verbs.SendWR{wr})
	return err
}

// wait waits for a completion, of whatever status.
func (c *cast) wait(d time.Duration) (verbs.WC, error) {
	var wc [1]verbs.WC
	for deadline := time.Now().Add(d); time.Now().Before(deadline); {
		if n, err := c.cq.Poll(wc[:]); n == 1 || err != nil {
			return wc[0], err
		}
	}
	return wc[0], errors.New("no completion")
}

// do posts a request and waits for it.
func (c *cast) do(qp *verbs.QP, wr verbs.SendWR) (verbs.WC, error) {
	if err := c.post(qp, wr); err != nil {
		return verbs.WC{}, err
	}
	wc, err := c.wait(patience)
	if err == nil {
		err = wc.Err()
	}
	if err == nil && wc.ID != wr.ID {
		err = fmt.Errorf("request %d completed, not %d", wc.ID, wr.ID)
	}
	return wc, err
}
