package perf

import (
	"errors"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
	"github.com/verbena-rdma/verbena/verbs"
)

// indirect is a key that stands on a buffer's region, for requests of both sides. It
// is configured on a queue pair of its own, which is connected to itself.
type indirect struct {
	window
	key *verbs.MKey
}

// indirectPiece is the length of the pieces that the keys are made of.
const indirectPiece = 4 << 10

// listed makes pinned buffers with an indirect key, which requests use: a list of their
// pages in order, so that the key shows the same bytes as the region.
func listed(dev *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
	return throughKey(dev, pd, n, access, func(k *verbs.MKey, mr *verbs.MR) *verbs.MKeyConfig {
		var pieces []verbs.SGE
		for off := 0; off < int(mr.Length()); off += indirectPiece {
			pieces = append(pieces, mr.SGE(off, min(indirectPiece, int(mr.Length())-off)))
		}
		return k.List(access, pieces...)
	})
}

// strided makes the same with an interleaved pattern: the even pages and the odd ones.
func strided(dev *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
	n = (n + 2*indirectPiece - 1) &^ (2*indirectPiece - 1)
	return throughKey(dev, pd, n, access, func(k *verbs.MKey, mr *verbs.MR) *verbs.MKeyConfig {
		return k.Interleaved(access, mr.Length()/(2*indirectPiece), mr.Stride(0, indirectPiece, indirectPiece),
			mr.Stride(indirectPiece, indirectPiece, indirectPiece))
	})
}

func throughKey(dev *verbs.Device, pd *verbs.PD, n int, access verbs.Access, layout func(*verbs.MKey, *verbs.MR) *verbs.MKeyConfig) (buffer, error) {
	b, err := mapped((*verbs.PD).RegMR)(dev, pd, n, verbs.AccessLocalWrite)
	if err != nil {
		return b, err
	}
	x := new(indirect)
	b.window = &x.window
	b.key = x
	if err := x.open(dev, pd, b.mr, layout); err != nil {
		return buffer{}, errors.Join(err, b.close())
	}
	b.addr, b.rkey, b.lkey = 0, x.key.RKey(), x.key.LKey()
	return b, nil
}

// open configures a key on a region.
func (x *indirect) open(dev *verbs.Device, pd *verbs.PD, mr *verbs.MR, layout func(*verbs.MKey, *verbs.MR) *verbs.MKeyConfig) (err error) {
	if x.cq, err = dev.CreateCQ(1, nil); err != nil {
		return err
	}
	x.qp, err = pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: x.cq, RecvCQ: x.cq, Cap: verbs.QPCap{MaxSendWR: 1}})
	if err != nil {
		return err
	}
	if err = x.qp.Connect(x.qp.Endpoint(), nil); err != nil {
		return err
	}
	pieces := int(mr.Length()+indirectPiece-1) / indirectPiece
	if x.key, err = pd.CreateMKey(max(pieces, 2)); err != nil {
		return errors.Join(err, errors.New("buffers of "+units.FormatSize(int(mr.Length()))+" have too many pages for one key"))
	}
	wrs := []verbs.SendWR{{Op: verbs.OpConfigureMKey, Flags: verbs.SendSignaled, Configure: layout(x.key, mr)}}
	if _, err := x.qp.PostSend(wrs); err != nil {
		return err
	}
	var wc [1]verbs.WC
	for start := time.Now(); time.Since(start) < stallLimit; runtime.Gosched() {
		n, err := x.cq.Poll(wc[:])
		if err != nil {
			return err
		}
		if n > 0 {
			return wc[0].Err()
		}
	}
	return errors.New("stalled: an indirect key is not configured")
}

// onDevice makes buffers of device memory, of the coherent class: the program reads and
// writes the bytes too.
func onDevice(dev *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
	dm, err := dev.AllocDMWith(verbs.DMConfig{Length: uint64(n+4095) &^ 4095, LogAlign: 12, Class: verbs.DMCoherent})
	if err != nil {
		return buffer{}, err
	}
	b := buffer{free: dm.Close}
	if b.bytes, err = dm.Bytes(); err == nil {
		b.mr, err = pd.RegDMMR(dm, 0, dm.Length(), access|verbs.AccessZeroBased)
	}
	if err != nil {
		return buffer{}, errors.Join(err, b.close())
	}
	b.rkey = b.mr.RKey()
	return b, nil
}
