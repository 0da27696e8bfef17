package cmtools

// udaddy. Each connection of the client resolves the service, and sends 10 datagrams to the queue pair
// that it is told, with the number of its own queue pair as immediate data. When all have come, the
// server answers each with 10 datagrams.

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/interop/rxe/tools"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	udaddySize     = 100
	udaddyMessages = 10
	immLength      = 4 // of the immediate data, in a packet
)

// post is a UD queue pair with a slot for each datagram that it takes.
type post struct {
	m *Meeting
	completions
	pd   *verbs.PD
	qp   *verbs.QP
	ins  int // datagrams that it takes
	in   []byte
	out  []byte
	mrs  [2]*verbs.MR // of in and out
	shut []func() error
}

// newPost makes a queue pair that takes the datagrams of all connections, and posts all receives.
func (m *Meeting) newPost() (p *post, err error) {
	p = &post{m: m, ins: m.Count * udaddyMessages}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.pd, err = m.Device.AllocPD(); err != nil {
		return p, err
	}
	p.shut = append(p.shut, p.pd.Close)
	if p.cq, err = m.Device.CreateCQ(2*p.ins, nil); err != nil {
		return p, err
	}
	p.shut = append(p.shut, p.cq.Close)
	p.in, p.out = make([]byte, p.ins*p.slot()), make([]byte, m.Size)
	for i, b := range [][]byte{p.in, p.out} {
		if p.mrs[i], err = p.pd.RegMR(b, verbs.AccessLocalWrite); err != nil {
			return p, err
		}
		p.shut = append(p.shut, p.mrs[i].Close)
	}
	p.qp, err = p.pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: p.cq, RecvCQ: p.cq,
		Cap: verbs.QPCap{MaxSendWR: udaddyMessages, MaxRecvWR: p.ins, MaxSendSGE: 1, MaxRecvSGE: 1}})
	if err != nil {
		return p, err
	}
	p.shut = append(p.shut, p.qp.Close)
	if err := cm.ReadyUD(p.qp); err != nil {
		return p, err
	}
	for i := range p.ins {
		if _, err := p.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SGL: []verbs.SGE{p.mrs[0].SGE(i*p.slot(), p.slot())}}}); err != nil {
			return p, err
		}
	}
	return p, nil
}

// slot returns the length of a slot: that of a datagram with its header.
func (p *post) slot() int { return p.m.Size + verbs.GRHLength }

func (p *post) close() (err error) {
	for i := len(p.shut) - 1; i >= 0; i-- {
		err = errors.Join(err, p.shut[i]())
	}
	p.shut = nil
	return err
}

// send sends the datagrams of a connection to a queue pair, and waits until they are sent.
func (p *post) send(ctx context.Context, ah verbs.AHAttr, qpn uint32) (err error) {
	to, err := p.pd.CreateAH(ah)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	for range udaddyMessages {
		_, err := p.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSendImm, Flags: verbs.SendSignaled, Imm: p.qp.Number(),
			SGL: []verbs.SGE{p.mrs[1].SGE(0, p.m.Size)}, AH: to, RemoteQPN: qpn, RemoteQKey: cm.QKey}})
		if err != nil {
			return err
		}
	}
	for range udaddyMessages {
		if _, err := p.wait(ctx, verbs.WCSend); err != nil {
			return err
		}
	}
	return nil
}

// receive takes all datagrams, which come from the address that from returns. It returns the queue pairs
// that have sent them: one for each connection.
func (p *post) receive(ctx context.Context, from func() netip.Addr) (senders []uint32, err error) {
	own, came := p.m.Device.GIDs()[0], map[uint32]int{}
	for n := range p.ins {
		wc, err := p.wait(ctx, verbs.WCRecv)
		if err != nil {
			return nil, fmt.Errorf("datagram %d of %d: %w", n, p.ins, err)
		}
		switch {
		case int(wc.ByteLen) != p.slot():
			return nil, fmt.Errorf("datagram %d has %d bytes, want %d", n, wc.ByteLen, p.slot())
		case wc.Flags&verbs.WCWithImm == 0 || wc.Imm != wc.SrcQP:
			return nil, fmt.Errorf("datagram %d of queue pair %#x has the number %#x in it (flags %v)", n, wc.SrcQP, wc.Imm, wc.Flags)
		}
		if err := tools.CheckGRH(p.in[int(wc.ID)*p.slot():][:verbs.GRHLength], verbs.GIDFromAddr(from()), own, p.m.Size+immLength); err != nil {
			return nil, fmt.Errorf("datagram %d: %w", n, err)
		}
		if came[wc.SrcQP]++; came[wc.SrcQP] == 1 {
			senders = append(senders, wc.SrcQP)
		}
	}
	for qpn, n := range came {
		if n != udaddyMessages {
			return nil, fmt.Errorf("%d datagrams of queue pair %#x, want %d", n, qpn, udaddyMessages)
		}
	}
	return senders, nil
}

// clients is what the server knows of those who have asked for its queue pair.
type clients struct {
	mu    sync.Mutex // guards what follows
	addr  netip.Addr
	count int
	err   error
}

// answer takes a question.
func (c *clients) answer(at netip.AddrPort, private []byte) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.addr, c.count, c.err = at.Addr(), c.count+1, errors.Join(c.err, checkPrivate(private, cm.MaxResolvePrivate))
	return nil, c.err == nil
}

// from returns the address of those who have asked.
func (c *clients) from() netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addr
}

// UdaddyServer plays the server. All connections of the client are told the same queue pair.
func UdaddyServer(ctx context.Context, m *Meeting) (err error) {
	m = m.filled(udaddySize)
	p, err := m.newPost()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	var c clients
	s, err := cm.Announce(ctx, m.Addr, p.qp, &cm.Config{Device: m.Device, Answer: c.answer})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close(), c.err) }() // nobody asks after Close
	if m.Listening != nil {
		m.Listening()
	}
	senders, err := p.receive(ctx, c.from)
	if err != nil {
		return err
	}
	for _, qpn := range senders {
		if err := p.send(ctx, verbs.AHAttr{DGID: verbs.GIDFromAddr(c.from())}, qpn); err != nil {
			return err
		}
	}
	return nil
}

// UdaddyClient plays the client. All its connections have the same queue pair.
func UdaddyClient(ctx context.Context, m *Meeting) (err error) {
	m = m.filled(udaddySize)
	p, err := m.newPost()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	var peers []*cm.Peer
	for range m.Count {
		err := whenListening(ctx, func() error {
			peer, err := cm.Resolve(ctx, m.Addr, &cm.Config{Device: m.Device})
			if err == nil {
				peers = append(peers, peer)
				err = checkPrivate(peer.Private, cm.MaxAnswerPrivate)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	for _, peer := range peers {
		if err := p.send(ctx, peer.AH, peer.QPN); err != nil {
			return err
		}
	}
	_, err = p.receive(ctx, func() netip.Addr { return peers[0].RemoteAddr.Addr() })
	return err
}
