package tools

// A ping-pong, top-down: Pingpong checks its configuration (options), makes queue
// pairs and posts receives (newGame), exchanges addresses as the programs do and
// connects (meet), and plays (play). contents.go makes and checks the messages.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// PingpongProgram is one of the programs of ibverbs-utils.
type PingpongProgram uint8

const (
	RCPingpong  PingpongProgram = iota + 1 // ibv_rc_pingpong
	UCPingpong                             // ibv_uc_pingpong
	UDPingpong                             // ibv_ud_pingpong
	SRQPingpong                            // ibv_srq_pingpong
)

var pingpongs = [...]struct {
	name string
	typ  verbs.QPType
	size int // the default
	qps  int // the default
	fill byte
}{
	RCPingpong:  {"ibv_rc_pingpong", verbs.RC, 4096, 1, 0x7b},
	UCPingpong:  {"ibv_uc_pingpong", verbs.UC, 4096, 1, 0x7b},
	UDPingpong:  {"ibv_ud_pingpong", verbs.UD, 1024, 1, 0x7b},
	SRQPingpong: {"ibv_srq_pingpong", verbs.RC, 4096, 16, 0},
}

// String returns the program's name.
func (p PingpongProgram) String() string {
	if p.known() {
		return pingpongs[p].name
	}
	return fmt.Sprintf("PingpongProgram(%d)", uint8(p))
}

func (p PingpongProgram) known() bool { return p > 0 && int(p) < len(pingpongs) }

// PingpongConfig configures a ping-pong. Fields for which the program has an option must have
// the same value there.
type PingpongConfig struct {
	Peer
	Program PingpongProgram

	Size  int       // -s, bytes of a message. Zero: 4096; UD: 1024
	Iters int       // -n, messages in each direction. Zero: 1000
	MTU   verbs.MTU // -m. Zero: 1024 bytes. UD has none
	QPs   int       // -q of ibv_srq_pingpong. Zero: 16; the others have one
	Check bool      // -c: the program, as a server, checks what it received last

	GIDIndex int    // of the device's GIDs, which one to use
	PSN      uint32 // the first PSN of this side, 24 bits. Zero: random
	RxDepth  int    // receives posted. Zero: 8, or twice the number of queue pairs
	Timeout  uint8  // acknowledgement timeout, as a code. Zero: 14, as in the programs

	// Linger is for how long the queue pairs stay open at the end, to acknowledge
	// again what the program may send again. On a network that loses packets it should
	// be some timeouts. Zero: not at all.
	Linger time.Duration
}

// maxSRQPairs is one more than ibv_srq_pingpong can have, and the number of
// lines in its exchange, whatever the number of queue pairs.
const maxSRQPairs = 256

// maxMemory bounds the buffers of a run.
const maxMemory = 1 << 30

// options returns the configuration with its defaults filled in.
func (c PingpongConfig) options() (PingpongConfig, error) {
	if err := c.check(); err != nil {
		return c, err
	}
	if !c.Program.known() {
		return c, fmt.Errorf("%v: no such program", c.Program)
	}
	p := &pingpongs[c.Program]
	setDefault(&c.Size, p.size)
	setDefault(&c.Iters, 1000)
	setDefault(&c.MTU, verbs.MTU1024)
	setDefault(&c.QPs, p.qps)
	setDefault(&c.RxDepth, max(8, 2*c.QPs))
	setDefault(&c.PSN, 1+rand.Uint32N(maxPSN))
	switch {
	case c.Size < 1 || c.Iters < 1 || c.QPs < 1 || c.RxDepth < 1:
		return c, errors.New("size, iterations, queue pairs and receives cannot be negative")
	case c.PSN > maxPSN:
		return c, fmt.Errorf("PSN %#x has more than 24 bits", c.PSN)
	case c.MTU.Bytes() == 0:
		return c, fmt.Errorf("MTU(%d): no such MTU", uint8(c.MTU))
	case c.Program != SRQPingpong && c.QPs != 1:
		return c, fmt.Errorf("%v with %d queue pairs: %w", c.Program, c.QPs, ErrUnsupported)
	case c.QPs >= maxSRQPairs || c.QPs > c.RxDepth:
		return c, fmt.Errorf("%d queue pairs with %d receives: %w", c.QPs, c.RxDepth, ErrUnsupported)
	case c.Size > maxMemory/(c.QPs+c.RxDepth):
		return c, fmt.Errorf("%d messages of %d bytes do not fit the memory this package allows itself", c.QPs+c.RxDepth, c.Size)
	}
	return c, nil
}

func setDefault[T int | uint32 | verbs.MTU](field *T, v T) {
	if *field == 0 {
		*field = v
	}
}

// Pingpong plays one side of a ping-pong program until both sides have sent and
// received as many messages as asked for.
func Pingpong(ctx context.Context, dev *verbs.Device, cfg PingpongConfig) (res Result, err error) {
	cfg, err = cfg.options()
	if err != nil {
		return res, err
	}
	res = Result{Program: cfg.Program.String(), Role: cfg.Role, MTU: cfg.MTU}
	g, err := newGame(dev, cfg, &res)
	if err != nil {
		return res, fmt.Errorf("%v: %w", cfg.Program, err)
	}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := g.meet(ctx); err != nil {
		return res, fmt.Errorf("%v: exchange of addresses: %w", cfg.Program, err)
	}
	if err := g.play(ctx); err != nil {
		return res, fmt.Errorf("%v: after %d sent and %d received: %w", cfg.Program, res.Sent, res.Received, err)
	}
	return res, g.linger(ctx, cfg.Linger)
}

// game is a ping-pong in progress.
type game struct {
	*rig
	cfg   PingpongConfig
	typ   verbs.QPType
	pairs []*pair
	srq   *verbs.SRQ // of ibv_srq_pingpong

	tx     []byte // one message for each queue pair
	txMR   *verbs.MR
	rx     []byte // one message for each receive
	rxMR   *verbs.MR
	stride int // of a receive
	header int // bytes in front of a message: UD's

	script contents
	wr     []verbs.SendWR
}

// pair is one of the queue pairs.
type pair struct {
	qp   *verbs.QP
	ah   *verbs.AH
	psn  uint32
	peer Address

	sending  bool // a SEND has not completed
	awaiting bool // a message has not arrived
	sent     int  // messages, of this queue pair
	received int
}

// newGame makes the queue pairs and posts all receives.
func newGame(dev *verbs.Device, cfg PingpongConfig, res *Result) (_ *game, err error) {
	r, err := newRig(dev, cfg.GIDIndex, cfg.RxDepth+cfg.QPs, res)
	if err != nil {
		return nil, err
	}
	g := &game{rig: r, cfg: cfg, typ: pingpongs[cfg.Program].typ, wr: make([]verbs.SendWR, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if g.typ == verbs.UD {
		g.header = verbs.GRHLength
	}
	g.stride = (cfg.Size + g.header + 7) &^ 7
	if g.tx, g.txMR, err = r.buffer(cfg.QPs*cfg.Size, 0); err != nil {
		return nil, err
	}
	if g.rx, g.rxMR, err = r.buffer(cfg.RxDepth*g.stride, verbs.AccessLocalWrite); err != nil {
		return nil, err
	}
	g.script = newContents(&cfg)
	if err := g.makePairs(); err != nil {
		return nil, err
	}
	for slot := range cfg.RxDepth {
		if err := g.postReceive(slot); err != nil {
			return nil, err
		}
	}
	return g, nil
}

func (g *game) makePairs() error {
	depth := verbs.QPCap{MaxSendWR: 1, MaxSendSGE: 1}
	if g.cfg.Program == SRQPingpong {
		srq, err := g.pd.CreateSRQ(&verbs.SRQConfig{MaxWR: g.cfg.RxDepth, MaxSGE: 1})
		if err != nil {
			return err
		}
		g.srq = srq
		g.onClose(srq.Close)
	} else {
		depth.MaxRecvWR, depth.MaxRecvSGE = g.cfg.RxDepth, 1
	}
	for i := range g.cfg.QPs {
		qp, err := g.queuePair(g.typ, depth, g.srq, 0)
		if err != nil {
			return err
		}
		g.pairs = append(g.pairs, &pair{qp: qp, psn: (g.cfg.PSN + uint32(i)) & maxPSN})
	}
	return nil
}

// postReceive posts a receive for a slot: to the SRQ, or to the only queue pair.
func (g *game) postReceive(slot int) error {
	wr := []verbs.RecvWR{{
		ID:  recvID | makeID(0, uint64(slot)),
		SGL: []verbs.SGE{g.rxMR.SGE(slot*g.stride, g.cfg.Size+g.header)},
	}}
	var err error
	if g.srq != nil {
		_, err = g.srq.PostRecv(wr)
	} else {
		_, err = g.pairs[0].qp.PostRecv(wr)
	}
	return err
}

// meet exchanges addresses. A server connects its queue pairs before it answers:
// when the client has the answer it may send.
func (g *game) meet(ctx context.Context) error {
	c, err := g.cfg.open(ctx)
	if err != nil {
		return err
	}
	defer c.close()
	if g.cfg.Role == Server {
		if err := g.readAddresses(c); err != nil {
			return err
		}
		if err := g.connectAll(); err != nil {
			return err
		}
		if err := g.writeAddresses(c); err != nil {
			return err
		}
		return c.read(make([]byte, len(done)))
	}
	if err := g.writeAddresses(c); err != nil {
		return err
	}
	if err := g.readAddresses(c); err != nil {
		return err
	}
	if err := c.write(done); err != nil {
		return err
	}
	return g.connectAll()
}

// lines returns the number of addresses exchanged: ibv_srq_pingpong always sends as many as it
// has room for.
func (g *game) lines() int {
	if g.cfg.Program == SRQPingpong {
		return maxSRQPairs
	}
	return 1
}

func (g *game) writeAddresses(c *conn) error {
	for i := range g.lines() {
		var a Address
		if i < len(g.pairs) {
			a = Address{QPN: g.pairs[i].qp.Number(), PSN: g.pairs[i].psn, GID: g.gid}
		}
		if err := c.write(a.Append(nil)); err != nil {
			return err
		}
	}
	return nil
}

func (g *game) readAddresses(c *conn) error {
	line := make([]byte, addressLen)
	for i := range g.lines() {
		if err := c.read(line); err != nil {
			return err
		}
		a, err := ParseAddress(line)
		if err != nil {
			return err
		}
		if i < len(g.pairs) {
			if a.GID.IsZero() || a.QPN == 0 {
				return fmt.Errorf("queue pair %d of the peer has no GID or no number: does it run with -g and as many queue pairs?", i)
			}
			g.pairs[i].peer = a
		}
	}
	return nil
}

func (g *game) connectAll() error {
	for _, p := range g.pairs {
		var err error
		p.ah, err = g.connect(p.qp, &link{mtu: g.cfg.MTU, gidIndex: g.cfg.GIDIndex, localPSN: p.psn,
			peer: p.peer, timeout: g.cfg.Timeout, reads: 1, serves: 1})
		if err != nil {
			return err
		}
	}
	return nil
}

// play sends and receives. As in the programs, a queue pair sends when its last SEND has
// completed and a message has arrived since, until Iters SENDs of all queue pairs have
// completed. With several queue pairs there may be more than Iters messages at the end.
func (g *game) play(ctx context.Context) error {
	start := time.Now()
	defer func() { g.result.Elapsed = time.Since(start) }()
	iters := uint64(g.cfg.Iters)
	for i, p := range g.pairs {
		p.awaiting = true
		if g.cfg.Role == Client {
			if err := g.send(i); err != nil {
				return err
			}
		}
	}
	for g.result.Sent < iters || g.result.Received < iters {
		wcs, err := g.wait(ctx)
		if err != nil {
			return err
		}
		for i := range wcs {
			if over, err := g.completed(&wcs[i], iters); err != nil || over {
				return err
			}
		}
	}
	return nil
}

// completed handles a completion. It reports whether the game is over though
// something is missing: see Result.LastUnacknowledged.
func (g *game) completed(wc *verbs.WC, iters uint64) (over bool, err error) {
	recv, i, slot := splitID(wc.ID)
	if wc.Status != verbs.WCSuccess {
		last := !recv && wc.Status == verbs.WCRetryExcErr && g.result.Received >= iters && g.result.Sent == iters-1
		if last && len(g.pairs) == 1 {
			g.result.LastUnacknowledged = true
			return true, nil
		}
		return false, wc.Err()
	}
	if recv {
		if i, err = g.find(wc.QPN); err != nil {
			return false, err
		}
		if err := g.received(g.pairs[i], int(slot), wc); err != nil {
			return false, err
		}
	} else {
		g.pairs[i].sending = false
		g.result.Sent++
		g.result.SentBytes += uint64(g.cfg.Size)
	}
	p := g.pairs[i]
	if g.result.Sent < iters && !p.sending && !p.awaiting {
		return false, g.send(i)
	}
	return false, nil
}

func (g *game) find(qpn uint32) (int, error) {
	for i, p := range g.pairs {
		if p.qp.Number() == qpn {
			return i, nil
		}
	}
	return 0, fmt.Errorf("completion of queue pair %#06x, which is none of ours", qpn)
}

// received checks a message and posts its slot again.
func (g *game) received(p *pair, slot int, wc *verbs.WC) error {
	length := int(wc.ByteLen) - g.header
	if length != g.cfg.Size {
		return fmt.Errorf("message %d has %d bytes, not %d", p.received, length, g.cfg.Size)
	}
	buf := g.rx[slot*g.stride:][:g.header+length]
	if g.typ == verbs.UD {
		if wc.Flags&verbs.WCGRH == 0 {
			return fmt.Errorf("message %d: the completion does not report a GRH", p.received)
		}
		if wc.SrcQP != p.peer.QPN {
			return fmt.Errorf("message %d is from queue pair %#06x, not %#06x", p.received, wc.SrcQP, p.peer.QPN)
		}
		if err := CheckGRH(buf[:g.header], p.peer.GID, g.gid, length); err != nil {
			return fmt.Errorf("message %d: %w", p.received, err)
		}
		g.result.GRHs++
	}
	if err := g.script.check(buf[g.header:], p.received); err != nil {
		return fmt.Errorf("message %d: %w", p.received, err)
	}
	g.result.Verified++
	g.result.Received++
	g.result.ReceivedBytes += uint64(length)
	p.received++
	p.awaiting = false
	return g.postReceive(slot)
}

// send sends the next message of a queue pair.
func (g *game) send(i int) error {
	p := g.pairs[i]
	g.script.next(g.tx[i*g.cfg.Size:][:g.cfg.Size], p.sent)
	g.wr[0] = verbs.SendWR{
		ID: makeID(i, 0), Op: verbs.OpSend, Flags: verbs.SendSignaled,
		SGL: []verbs.SGE{g.txMR.SGE(i*g.cfg.Size, g.cfg.Size)},
		AH:  p.ah, RemoteQPN: p.peer.QPN, RemoteQKey: udQKey,
	}
	if _, err := p.qp.PostSend(g.wr); err != nil {
		return err
	}
	p.sent++
	p.sending, p.awaiting = true, true
	return nil
}
