package device

// Memory that the CPU does not address, in every place where memory is named: windows,
// indirect keys together with memory of the host, shared receive queues, datagrams, FLUSH,
// re-registration.

import (
	"bytes"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// same fails the test unless n bytes of two ends are the same.
func (e *end) same(what string, off int, o *end, at, n int) {
	e.t.Helper()
	if k := firstDifference(e.buf[off:][:n], o.buf[at:][:n]); k >= 0 {
		e.t.Errorf("%s: other bytes from %d on", what, k)
	}
}

func TestStagedWindow(t *testing.T) {
	const size = 600 << 10
	types := map[string]ib.MWType{linkLoop: ib.MWType1, linkRings: ib.MWType2, linkUDP: ib.MWType2}
	onAllLinks(t, func(t *testing.T, mode string) {
		a, b := stagedPair(t, mode, ib.RC, enginetest.New(slowEngine), "ab")
		b.registerAgain(allRemote | ib.AccessMWBind)
		w := b.window(types[mode])
		key := b.bind(w, 4096, size-4096, ib.AccessRemoteWrite|ib.AccessRemoteRead)
		fill(a.buf[:size], 5)
		write := a.write(b, 4096, size-4096)
		write.RKey = key
		a.post(write)
		a.ok()
		a.same("WRITE", 4096, b, 4096, size-4096)
		fill(b.buf[:size], 6)
		read := a.read(b, 4096, size-4096)
		read.RKey = key
		a.post(read)
		a.ok()
		a.same("READ", 4096, b, 4096, size-4096)
		outside := a.write(b, 0, 4100)
		outside.RKey = key
		a.post(outside)
		a.status(ib.WCRemAccessErr)
	})
}

// Pieces of the host's memory and of two engines', one behind the other, under one key.
func TestStagedIndirectKey(t *testing.T) {
	const piece, rounds = 1000, 64
	const size = 3 * piece * rounds
	onAllLinks(t, func(t *testing.T, mode string) {
		a, b := stagedPair(t, mode, ib.RC, enginetest.New(slowEngine), "ab")
		host := make([]byte, piece*rounds)
		hostMR := must[provider.MR](t)(b.pd.RegMR(host, allRemote))
		t.Cleanup(func() { closeAll(t, hostMR) })
		otherMR := b.anotherRegion(enginetest.New(enginetest.Config{}), piece*rounds, allRemote)
		other := otherMR.(*MR).region.Backing().(*enginetest.Memory).Bytes
		k := b.mkey(3)
		b.configure(&ib.MKeyConfig{MKey: k.Key(), Repeat: rounds, Interleaved: []ib.Stride{
			{Addr: b.mr.Addr(), Bytes: piece, LKey: b.mr.LKey()},
			{Addr: hostMR.Addr(), Bytes: piece, LKey: hostMR.LKey()},
			{Addr: otherMR.Addr(), Bytes: piece, LKey: otherMR.LKey()},
		}})
		whole := func() (all []byte) {
			for i := range rounds {
				all = append(all, b.buf[i*piece:][:piece]...)
				all = append(all, host[i*piece:][:piece]...)
				all = append(all, other[i*piece:][:piece]...)
			}
			return all
		}
		same := func(what string, want []byte) {
			t.Helper()
			if n := firstDifference(a.buf[:size], want); n >= 0 {
				t.Errorf("%s: other bytes from %d on", what, n)
			}
		}
		fill(a.buf[:size], 7)
		write := a.write(b, 0, size)
		write.RKey, write.RemoteAddr = k.Key(), 0
		a.post(write)
		a.ok()
		same("WRITE", whole())
		want := bytes.Clone(a.buf[:size])
		fill(a.buf[:size], 8)
		read := a.read(b, 0, size)
		read.RKey, read.RemoteAddr = k.Key(), 0
		a.post(read)
		a.ok()
		same("READ", want)
		// As the memory of its own requests.
		own := []ib.SGE{{Length: size, LKey: k.Key()}}
		fill(a.buf[:size], 9)
		b.post(ib.SendWR{Op: ib.OpRDMARead, SGL: own, RemoteAddr: a.mr.Addr(), RKey: a.mr.RKey()})
		b.ok()
		same("READ into it", whole())
		fill(a.buf[:size], 10)
		a.recv(ib.RecvWR{ID: 3, SGL: a.sge(0, size)})
		b.post(ib.SendWR{Op: ib.OpSend, SGL: own})
		b.ok()
		a.ok()
		same("SEND", whole())
	})
}

// Datagrams from and into such memory; their completions keep the order of the receives,
// also where the next one goes to memory of the host.
func TestStagedDatagrams(t *testing.T) {
	onAllLinks(t, func(t *testing.T, mode string) {
		x, y := openFor(t, mode), openFor(t, mode)
		a, b := newEnd(t, x, ib.UD, 4096), newEnd(t, y, ib.UD, 8<<10)
		t.Cleanup(a.close)
		t.Cleanup(b.close)
		g := enginetest.New(slowEngine)
		a.onEngine(g)
		host, hostMR := b.buf, must[provider.MR](t)(b.pd.RegMR(b.buf, allRemote))
		t.Cleanup(func() { closeAll(t, hostMR) })
		b.onEngine(g)
		a.openDatagrams(7)
		b.openDatagrams(7)
		ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
		t.Cleanup(func() { closeAll(t, ah) })
		fill(a.buf, 4)
		b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
		b.recv(ib.RecvWR{ID: 2, SGL: []ib.SGE{{Addr: hostMR.Addr(), Length: 4096, LKey: hostMR.LKey()}}})
		b.recv(ib.RecvWR{ID: 3, SGL: b.sge(4096, 4096)})
		for i := range 3 {
			a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(i*1000, 1000), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: 7})
			a.ok()
		}
		for i, where := range [][]byte{b.buf, host, b.buf[4096:]} {
			if wc := b.ok(); wc.ID != uint64(i+1) || wc.ByteLen != 1000+ib.GRHLength || !bytes.Equal(where[ib.GRHLength:][:1000], a.buf[i*1000:][:1000]) {
				t.Errorf("message %d: %+v, or other bytes", i, wc)
			}
		}
	})
}

// Receives of a shared queue lie there.
func TestStagedSharedReceives(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			srq, from, to := shared(t, mode, 2, provider.SRQConfig{MaxWR: 16, MaxSGE: 1})
			b := to[0]
			m := enginetest.New(slowEngine).Alloc(64 << 10)
			mr := must[provider.MR](t)(b.pd.(*PD).RegBacking(m, 0x1000, allRemote))
			t.Cleanup(func() {
				for _, e := range to {
					closeAll(t, e.qp)
				}
				closeAll(t, mr)
				m.Free()
			})
			for i := range 4 {
				if _, err := srq.PostRecv([]ib.RecvWR{{ID: uint64(i), SGL: []ib.SGE{{Addr: mr.Addr() + uint64(i)*16<<10, Length: 16 << 10, LKey: mr.LKey()}}}}); err != nil {
					t.Fatal(err)
				}
			}
			for i := range 4 {
				a := from[i%2]
				fill(a.buf, byte(i))
				a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 9000+i)})
				a.ok()
				if wc := b.ok(); wc.ID != uint64(i) || int(wc.ByteLen) != 9000+i || !bytes.Equal(m.Bytes[i*16<<10:][:9000+i], a.buf[:9000+i]) {
					t.Errorf("message %d: %+v, or other bytes", i, wc)
				}
			}
		})
	}
}

// A FLUSH is answered when what was written before it is there, and other rights, given by
// re-registration, hold at once.
func TestStagedFlushAndRereg(t *testing.T) {
	const size = 64 << 10
	onAllLinks(t, func(t *testing.T, mode string) {
		a, b := stagedPair(t, mode, ib.RC, enginetest.New(slowEngine), "b")
		b.registerAgain(allRemote | ib.AccessFlushGlobal)
		fill(a.buf[:size], 2)
		if _, err := a.qp.PostSend([]ib.SendWR{a.write(b, 0, size), {Op: ib.OpFlush, Flags: ib.SendSignaled, RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(),
			RemoteLength: size, FlushType: ib.FlushGlobal, FlushLevel: ib.FlushRange}}); err != nil {
			t.Fatal(err)
		}
		if wc := a.ok(); wc.Op != ib.WCFlush {
			t.Fatalf("%+v", wc)
		}
		a.same("WRITE", 0, b, 0, size)
		access := ib.AccessLocalWrite | ib.AccessRemoteRead
		must0(t, b.mr.Rereg(provider.MRChange{Access: &access}))
		a.post(a.read(b, 0, 100))
		a.ok()
		a.post(a.write(b, 0, 100))
		a.status(ib.WCRemAccessErr)
	})
}

// Staging bytes are page-locked, if the engine's owner wants that.
func TestStagedPageLocked(t *testing.T) {
	const size = 200 << 10
	onAllLinks(t, func(t *testing.T, mode string) {
		for _, where := range []string{"ab", "a", "b"} {
			t.Run(where, func(t *testing.T) {
				cfg := slowEngine
				cfg.Locks = true
				g := newEngine(t, mode, cfg)
				a, b := stagedPair(t, mode, ib.RC, g, where)
				for n, wr := range []ib.SendWR{a.write(b, 0, size), {Op: ib.OpSend, SGL: a.sge(0, size)}, a.read(b, 0, size), a.write(b, 0, 8), a.read(b, 0, 8)} {
					fill(a.buf[:size], byte(n))
					fill(b.buf[:size], byte(10+n))
					if wr.Op == ib.OpSend {
						b.recv(ib.RecvWR{SGL: b.sge(0, size)})
					}
					a.post(wr)
					a.ok()
					a.same(wr.Op.String(), 0, b, 0, int(wr.SGL[0].Length))
				}
				if g.Begun() == 0 || g.Unlocked() != 0 {
					t.Errorf("%d of %d operations had bytes that are not locked", g.Unlocked(), g.Begun())
				}
			})
		}
	})
}

// When more is under way than there are page-locked staging bytes, requests wait for those before them: bytes that are
// not locked would be several times slower, and so would all that have begun behind them.
func TestStagedPageLockedDeep(t *testing.T) {
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
		t.Run(op.String(), func(t *testing.T) {
			g := newEngine(t, linkLoop, enginetest.Config{Bandwidth: 2e9, Locks: true})
			const size, n = 8 << 20, 8
			a, b := connected(t, openFor(t, linkLoop), openFor(t, linkLoop), ib.RC, size, nil)
			a.makeMoving(size, false)
			b.onEngine(g)
			fill(a.buf, 1)
			fill(b.buf, 2)
			wr := a.write(b, 0, size)
			wr.Op, wr.Flags = op, ib.SendSignaled
			for range n {
				a.post(wr)
			}
			for range n {
				a.ok()
			}
			a.same(op.String(), 0, b, 0, size)
			if g.Begun() == 0 || g.Unlocked() != 0 {
				t.Errorf("%d of %d operations had bytes that are not locked", g.Unlocked(), g.Begun())
			}
		})
	}
}
