package device

// Indirect keys between devices.

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// mkey makes an indirect key, which goes before the region does.
func (e *end) mkey(pieces int) provider.MKey {
	e.t.Helper()
	k := must[provider.MKey](e.t)(e.pd.CreateMKey(pieces))
	e.t.Cleanup(func() { closeAll(e.t, k) })
	return k
}

// configure configures an indirect key and waits for that.
func (e *end) configure(c *ib.MKeyConfig) {
	e.t.Helper()
	if c.Access == 0 {
		c.Access = allRemote
	}
	e.post(ib.SendWR{ID: 40, Op: ib.OpConfigureMKey, Configure: c})
	if wc := e.ok(); wc.Op != ib.WCConfigureMKey || wc.ID != 40 {
		e.t.Fatalf("%+v", wc)
	}
}

// columns describes a matrix of so many rows, each of columns of width bytes, column
// by column.
func (e *end) columns(k provider.MKey, rows, cols, width int) *ib.MKeyConfig {
	c := &ib.MKeyConfig{MKey: k.Key(), Repeat: uint64(cols)}
	for r := range rows {
		c.Interleaved = append(c.Interleaved, ib.Stride{Addr: e.mr.Addr() + uint64(r*cols*width), Bytes: uint64(width), LKey: e.mr.LKey()})
	}
	return c
}

// Keys on all kinds of memory at once, and on each other.
func TestIndirectKeyOfEverything(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			const piece = 5000
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, 8*piece, nil)
			dm, dmr := b.deviceMemory(piece)
			pinned, lazy := mapping(t, piece), mapping(t, piece)
			pin := must[provider.MR](t)(b.pd.RegMR(pinned, ib.AccessLocalWrite))
			odp := must[provider.MR](t)(b.pd.RegMR(lazy, ib.AccessLocalWrite|ib.AccessOnDemand))
			all := must[provider.MR](t)(b.pd.RegImplicitMR(ib.AccessLocalWrite | ib.AccessOnDemand))
			t.Cleanup(func() { closeAll(t, pin, odp, all) })
			inner, outer := b.mkey(2), b.mkey(8)
			b.configure(&ib.MKeyConfig{MKey: inner.Key(), Repeat: 50, Interleaved: []ib.Stride{
				{Addr: b.mr.Addr(), Bytes: 20, Skip: 30, LKey: b.mr.LKey()}, {Addr: b.mr.Addr() + 20, Bytes: 30, Skip: 20, LKey: b.mr.LKey()}}})
			b.configure(&ib.MKeyConfig{MKey: outer.Key(), List: []ib.SGE{
				{Length: piece, LKey: dmr.LKey()}, {Addr: odp.Addr(), Length: piece, LKey: odp.LKey()},
				{Length: 2500, LKey: inner.Key()}, {Addr: pin.Addr(), Length: piece, LKey: pin.LKey()},
				{Addr: b.mr.Addr() + 2500, Length: 100, LKey: all.LKey()}}})
			total := 3*piece + 2600
			fill(a.buf, 5)
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, total), RKey: outer.Key()})
			a.ok()
			got := bytes.Join([][]byte{fromDM(t, dm, 0, piece), lazy, b.buf[:2500], pinned, b.buf[2500:2600]}, nil)
			if k := firstDifference(got, a.buf[:total]); k >= 0 {
				t.Fatalf("WRITE: byte %d is wrong", k)
			}
			back := make([]byte, total)
			copy(back, a.buf)
			clear(a.buf)
			a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, total), RKey: outer.Key()})
			a.ok()
			if k := firstDifference(a.buf[:total], back); k >= 0 {
				t.Fatalf("READ: byte %d is wrong", k)
			}
			for _, o := range []closer{dm, dmr, pin, odp, all, b.mr, inner} {
				wantErrno(t, fmt.Sprintf("closing %T that a key stands on", o), o.Close(), syscall.EBUSY)
			}
			b.post(ib.SendWR{Op: ib.OpLocalInv, InvalidateKey: outer.Key()})
			b.ok()
			a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, 1), RKey: outer.Key()})
			a.status(ib.WCRemAccessErr)
		})
	}
}

// A list of very many pieces, from the last to the first: more than a message has packets, and
// than a system call takes pieces.
func TestIndirectKeyOfManyPieces(t *testing.T) {
	const width = 12
	pieces := lastingOps(10_000, 150_000)
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, pieces*width, nil)
			k := b.mkey(pieces)
			c := &ib.MKeyConfig{MKey: k.Key()}
			for i := range pieces {
				c.List = append(c.List, b.sge((pieces-1-i)*width, width)...)
			}
			b.configure(c)
			fill(a.buf, 7)
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, pieces*width), RKey: k.Key()})
			a.ok()
			for i := range pieces {
				if !bytes.Equal(b.buf[(pieces-1-i)*width:][:width], a.buf[i*width:][:width]) {
					t.Fatalf("piece %d is wrong", i)
				}
			}
		})
	}
}

// The numbers of keys and of their pieces are limited.
func TestIndirectKeyLimits(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{MRs: 2}})
	pd := must[provider.PD](t)(d.AllocPD())
	for _, n := range []int{-1, 0, mem.MaxMKeyPieces + 1} {
		_, err := pd.CreateMKey(n)
		wantErrno(t, fmt.Sprint(n, " pieces"), err, syscall.EINVAL)
	}
	one, two := must[provider.MKey](t)(pd.CreateMKey(mem.MaxMKeyPieces)), must[provider.MKey](t)(pd.CreateMKey(1))
	_, err := pd.CreateMKey(1)
	wantErrno(t, "one too many", err, syscall.ENOMEM)
	closeAll(t, one, one, two)
	_, err = pd.CreateMKey(0)
	wantErrno(t, "none", err, syscall.EINVAL)
	closeAll(t, pd)
	_, err = pd.CreateMKey(1)
	wantErrno(t, "a closed domain", err, syscall.EINVAL)
}
