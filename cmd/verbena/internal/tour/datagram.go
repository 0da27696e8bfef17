package tour

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/verbena-rdma/verbena/verbs"
)

func ucSendStep(l *lab) (string, error) {
	return l.withPair(verbs.UC, func(p *pair) (string, error) {
		src := l.source(l.a, length)
		dst, off := l.b.sink(length)
		wc, err := l.receive(p, l.b.mr.SGE(off, length),
			verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}}, verbs.WCSend, verbs.WCRecv)
		if err != nil {
			return "", err
		}
		if wc.ByteLen != length {
			return "", fmt.Errorf("the receive says %+v", wc)
		}
		return fmt.Sprintf("%d bytes, without acknowledgement", length), same(dst, src)
	})
}

// ucWriteStep sends a message after the write, in the same queue. When the message has
// arrived, so has the write, which is not acknowledged.
func ucWriteStep(l *lab) (string, error) {
	return l.withPair(verbs.UC, func(p *pair) (string, error) {
		src := l.source(l.a, length)
		dst, off := l.b.sink(length)
		addr, rkey := l.b.remote(off)
		if err := postRecv(p.b, verbs.RecvWR{}); err != nil {
			return "", err
		}
		err := post(p.a,
			verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, RemoteAddr: addr, RKey: rkey},
			verbs.SendWR{Op: verbs.OpSend})
		if err != nil {
			return "", err
		}
		for _, op := range []verbs.WCOpcode{verbs.WCRDMAWrite, verbs.WCSend} {
			if _, err := l.expect(l.a.cq, op); err != nil {
				return "", err
			}
		}
		if _, err := l.expect(l.b.cq, verbs.WCRecv); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d bytes, without acknowledgement; a SEND behind it tells the peer", length), same(dst, src)
	})
}

// udSendStep sends a datagram. The receiver answers with what came with it alone: the
// addresses in the routing header, and the sender's queue pair number.
func udSendStep(l *lab) (string, error) {
	return l.withPair(verbs.UD, func(p *pair) (_ string, err error) {
		const size = 1000
		src := l.source(l.a, size)
		dst, off := l.b.sink(verbs.GRHLength + size)
		ah, err := l.a.pd.CreateAH(verbs.AHAttr{DGID: p.b.Endpoint().GID})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, ah.Close()) }()
		wc, err := l.receive(p, l.b.mr.SGE(off, len(dst)), verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.a.mr.SGE(0, size)},
			AH: ah, RemoteQPN: p.b.Number(), RemoteQKey: p.b.Endpoint().QKey}, verbs.WCSend, verbs.WCRecv)
		if err != nil {
			return "", err
		}
		if wc.Flags&verbs.WCGRH == 0 || wc.ByteLen != uint32(len(dst)) || wc.SrcQP != p.a.Number() {
			return "", fmt.Errorf("the receive says %+v, the sender was %#x", wc, p.a.Number())
		}
		if err := same(dst[verbs.GRHLength:], src); err != nil {
			return "", err
		}
		from, to, err := routing(dst[:verbs.GRHLength])
		if err != nil {
			return "", err
		}
		if from != l.a.dev.Addr() || to != l.b.dev.Addr() {
			return "", fmt.Errorf("the routing header says from %v to %v", from, to)
		}
		if err := l.answer(p, from, wc.SrcQP); err != nil {
			return "", fmt.Errorf("answering: %w", err)
		}
		return fmt.Sprintf("%d bytes behind the routing header; answered with what it says", size), nil
	})
}

// answer sends a datagram from b to the queue pair qpn at an address, which is that of a.
func (l *lab) answer(p *pair, to netip.Addr, qpn uint32) (err error) {
	const size = 16
	src := l.source(l.b, size)
	dst, off := l.a.sink(verbs.GRHLength + size)
	if err := postRecv(p.a, verbs.RecvWR{SGL: []verbs.SGE{l.a.mr.SGE(off, len(dst))}}); err != nil {
		return err
	}
	ah, err := l.b.pd.CreateAH(verbs.AHAttr{DGID: verbs.GIDFromAddr(to)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ah.Close()) }()
	if err := post(p.b, verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{l.b.mr.SGE(0, size)},
		AH: ah, RemoteQPN: qpn, RemoteQKey: p.a.Endpoint().QKey}); err != nil {
		return err
	}
	if _, err := l.expect(l.a.cq, verbs.WCRecv); err != nil {
		return err
	}
	if _, err := l.expect(l.b.cq, verbs.WCSend); err != nil {
		return err
	}
	return same(dst[verbs.GRHLength:], src)
}

// routing reads the addresses in the 40 bytes in front of a datagram: an IPv6
// header, or an IPv4 header in the last 20 of them (IBA annex A17.4.5.2).
func routing(grh []byte) (from, to netip.Addr, err error) {
	switch {
	case grh[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(grh[8:24])), netip.AddrFrom16([16]byte(grh[24:40])), nil
	case grh[20]>>4 == 4:
		return netip.AddrFrom4([4]byte(grh[32:36])), netip.AddrFrom4([4]byte(grh[36:40])), nil
	default:
		return from, to, fmt.Errorf("the routing header is neither IPv4 nor IPv6: %x", grh)
	}
}
