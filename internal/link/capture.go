package link

import (
	"net/netip"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Capture shows a tap the packets that a train would be on a network, without
// sending them: for trains that travel within the process or the host. The train's
// flow need not be prepared.
func Capture(t *train.Train, tap Tap, ts time.Time) error {
	f := t.Flow
	if f == nil {
		return ErrTrain
	}
	port, hop := f.SrcPort, f.HopLimit
	if port == 0 {
		port = firstSrcPort
	}
	if hop == 0 {
		hop = sys.DefaultHopLimit
	}
	var c packetizer
	if err := c.start(t); err != nil {
		return err
	}
	src, dst := f.Src.Unmap(), f.Dst.Unmap()
	ps := wire.NewPseudo(src, dst, port, wire.RoCEPort)
	buf := make([]byte, 0, wire.MaxPacket)
	for i := range t.N {
		b, err := c.whole(buf, i, &ps)
		if err != nil {
			return err
		}
		tap.Packet(ts, netip.AddrPortFrom(src, port), netip.AddrPortFrom(dst, wire.RoCEPort), f.TClass, hop, 0, b)
	}
	return nil
}

// whole makes packet i, with identification 0, in a slice that has room for
// wire.MaxPacket bytes.
func (c *packetizer) whole(buf []byte, i int, ps *wire.Pseudo) ([]byte, error) {
	h, n, err := c.header(i)
	if err != nil {
		return nil, err
	}
	b, fault := c.appendPacket(buf[:0], h, i, n)
	if !fault.OK() {
		return nil, &PayloadError{Fault: fault, Packet: i}
	}
	return seal(b, 0, ps, 0), nil
}
