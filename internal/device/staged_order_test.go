package device

// Memory that the CPU does not address: in which order programs and peers see what an engine
// moves, also when it fails.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// A message completes neither at the sender nor at the receiver before its bytes are there,
// nor does a READ behind it overtake it. By packets that holds also after the sender has sent
// the message again.
func TestStagedAcknowledgedBehindBytes(t *testing.T) {
	onAllLinks(t, func(t *testing.T, mode string) {
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMAWriteImm, ib.OpSend, ib.OpAtomicFetchAdd, ib.OpAtomicWrite} {
			t.Run(fmt.Sprint(op), func(t *testing.T) {
				g := stoppedEngine()
				a, b := stagedPair(t, mode, ib.RC, g, "b")
				if mode == linkUDP {
					a.ackTimeout(14, 7)
				}
				b.recv(ib.RecvWR{ID: 9, SGL: b.sge(4096, 4096)})
				fill(a.buf[:4096], 7)
				wr := a.write(b, 0, 4096)
				wr.ID, wr.Op = 1, op
				switch op {
				case ib.OpSend:
					wr.RemoteAddr, wr.RKey = 0, 0
				case ib.OpAtomicFetchAdd, ib.OpAtomicWrite:
					wr.SGL = a.sge(0, 8)
				}
				a.post(wr)
				a.post(ib.SendWR{ID: 2, Op: ib.OpRDMARead, SGL: a.sge(8192, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				waitBegun(t, g, 1)
				if mode == linkUDP {
					eventually(t, "the message is sent again", func() bool { return a.counted()[qp.CntRetransmits] > 0 })
				}
				a.noCompletion("before its bytes are there")
				b.noCompletion("before its bytes are there")
				g.Release()
				for id := range uint64(2) {
					if wc := a.ok(); wc.ID != id+1 {
						t.Fatalf("%d completes, want %d", wc.ID, id+1)
					}
				}
				if op == ib.OpSend || op == ib.OpRDMAWriteImm {
					b.ok()
				}
			})
		}
	})
}

// What a UC queue pair has sent is its program's again, and what arrives is what it was.
func TestStagedUCSource(t *testing.T) {
	onAllLinks(t, func(t *testing.T, mode string) {
		g := stoppedEngine()
		a, b := stagedPair(t, mode, ib.UC, g, "b")
		paint(a.buf[:4096], 1)
		a.post(a.write(b, 8192, 64)) // the engine is at this
		a.ok()
		waitBegun(t, g, 1)
		a.post(a.write(b, 0, 4096))
		a.ok()
		paint(a.buf[:4096], 2)
		g.Release()
		m := b.memory()
		eventually(t, "it has arrived", func() bool {
			m.Lock()
			defer m.Unlock()
			if m.Bytes[0] == 2 || m.Bytes[4095] == 2 {
				t.Fatal("other bytes have arrived")
			}
			return m.Bytes[4095] == 1
		})
	})
}

// A flag behind a WRITE whose memory fails, or is revoked, is never seen, though both had come
// before that: neither in the engine's memory nor in that of the host, whether the engine
// reaches it or not. The WRITE before is done, and the connection can be used again after a
// reset.
func TestStagedFlagBehindFailedData(t *testing.T) {
	for _, row := range []struct {
		mode    string
		on      string // whose memory, of the WRITE that fails, is the engine's
		reaches bool
		revoked bool
	}{
		{linkLoop, "a", false, false}, // elsewhere, what is loaded before it is sent is not in a chain
		{linkLoop, "a", true, false},
		{linkLoop, "b", false, false},
		{linkLoop, "b", false, true},
		{linkRings, "b", true, false},
		{linkRings, "b", false, true},
		{linkUDP, "b", false, false},
		{linkUDP, "b", false, true},
	} {
		t.Run(fmt.Sprintf("%s/%s/reaches %v/revoked %v", row.mode, row.on, row.reaches, row.revoked), func(t *testing.T) {
			g := enginetest.New(enginetest.Config{Reaches: row.reaches})
			a, b := stagedPair(t, row.mode, ib.RC, g, row.on)
			own := map[string]*end{"a": a, "b": b}[row.on]
			mr := own.anotherRegion(g, 4096, allRemote)
			clear(b.buf)
			fill(a.buf[:20480], 1)
			data := a.write(b, 16384, 4096)
			if row.on == "b" {
				data.RemoteAddr, data.RKey = mr.Addr(), mr.RKey()
			} else {
				data.SGL = []ib.SGE{{Addr: mr.Addr(), Length: 4096, LKey: mr.LKey()}}
			}
			g.Hold()
			begun := g.Begun()
			a.post(a.write(b, 8192, 64)) // the engine is at this
			if row.revoked {             // and has not begun what follows: then Revoke would wait for it
				waitBegun(t, g, begun+1)
			}
			a.post(data)
			a.post(a.write(b, 0, 4096))
			waitBegun(t, g, begun+1)
			if row.on == "b" {
				eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxPackets] >= 9 })
			}
			status := map[string]ib.WCStatus{"a": ib.WCLocProtErr, "b": ib.WCRemAccessErr}[row.on]
			if region := mr.(*MR).region; row.revoked {
				region.Revoke()
			} else {
				region.Backing().(*enginetest.Memory).Fail(mem.FaultStale)
			}
			g.Release()
			a.ok()
			a.status(status)
			a.status(ib.WCWRFlushErr)
			for _, e := range []*end{a, b} {
				e.modify(ib.QPAttr{State: ib.QPReset}, 0) // no engine is at its memory any more
			}
			want := make([]byte, len(b.buf))
			copy(want[8192:], a.buf[8192:][:64])
			if k := firstDifference(b.buf, want); k >= 0 {
				t.Errorf("byte %d was written", k)
			}
			a.connect(b)
			b.connect(a)
			a.post(a.write(b, 0, 4096))
			a.ok()
			a.same("a WRITE after that", 0, b, 0, 4096)
		})
	}
}

// A flag behind a WRITE whose bytes an engine has loaded, and whose target is revoked before they
// reach it, is never seen, though its bytes were loaded, too.
func TestStagedFlagBehindRevokedTarget(t *testing.T) {
	g := enginetest.New(enginetest.Config{})
	a, b := stagedPair(t, linkLoop, ib.RC, g, "a")
	clear(b.buf)
	fill(a.buf[:8192], 1)
	target := must[provider.MR](t)(b.pd.RegMR(make([]byte, 4096), allRemote))
	t.Cleanup(func() { closeAll(t, target) })
	data := a.write(b, 0, 4096)
	data.RemoteAddr, data.RKey = target.Addr(), target.RKey()
	g.Hold()
	begun := g.Begun()
	a.post(data)
	a.post(a.write(b, 4096, 4096))
	waitBegun(t, g, begun+2)
	target.(*MR).region.Revoke()
	g.Release()
	a.status(ib.WCRemAccessErr)
	a.status(ib.WCWRFlushErr)
	for _, e := range []*end{a, b} {
		e.modify(ib.QPAttr{State: ib.QPReset}, 0) // no engine is at its memory any more
	}
	if k := firstDifference(b.buf, make([]byte, len(b.buf))); k >= 0 {
		t.Errorf("byte %d was written", k)
	}
}

// A program that watches the memory sees the data of a message before the flag behind it,
// wherever the two lie: on an engine or in the host's memory.
func TestStagedOrderSeen(t *testing.T) {
	const size = 64 << 10
	onAllLinks(t, func(t *testing.T, mode string) {
		for _, where := range []string{"engine engine", "engine host", "host engine", "engine other"} {
			t.Run(where, func(t *testing.T) {
				engines := map[string]*enginetest.Engine{"engine": enginetest.New(slowEngine), "other": enginetest.New(slowEngine)}
				a, b := stagedPair(t, mode, ib.RC, engines["engine"], "")
				place := func(name string, iova uint64) (*enginetest.Memory, *end) {
					e := *b
					var m *enginetest.Memory
					if g := engines[name]; g != nil {
						m = g.Alloc(size)
						e.mr = must[provider.MR](t)(b.pd.(*PD).RegBacking(m, iova, allRemote))
					} else {
						m = enginetest.New(enginetest.Config{}).Alloc(size)
						e.mr = must[provider.MR](t)(b.pd.RegMR(m.Bytes, allRemote))
					}
					t.Cleanup(m.Free)
					t.Cleanup(func() { closeAll(t, b.qp, e.mr) })
					return m, &e
				}
				names := strings.Fields(where)
				data, toData := place(names[0], 0x100_0000)
				flag, toFlag := place(names[1], 0x200_0000)
				stop, watched := make(chan struct{}), make(chan struct{})
				go func() {
					defer close(watched)
					for {
						select {
						case <-stop:
							return
						default:
						}
						flag.Lock()
						n := lookWord(flag.Bytes)
						flag.Unlock()
						data.Lock()
						first, last := lookWord(data.Bytes), lookWord(data.Bytes[size-8:])
						data.Unlock()
						if first < n || last < n {
							t.Errorf("the flag is %d, the data %d and %d", n, first, last)
							return
						}
						runtime.Gosched()
					}
				}()
				for i := range uint64(lastingOps(9, 300)) {
					binary.NativeEndian.PutUint64(a.buf, i+1)
					binary.NativeEndian.PutUint64(a.buf[size-8:], i+1)
					a.post(a.write(toData, 0, size))
					wr := a.write(toFlag, 0, 8)
					switch i % 3 {
					case 1:
						wr.Op = ib.OpAtomicWrite
					case 2:
						wr = ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(size, 8), RemoteAddr: wr.RemoteAddr, RKey: wr.RKey, CompareAdd: 1}
					}
					a.post(wr)
					a.ok()
					a.ok()
				}
				close(stop)
				<-watched
			})
		}
	})
}

// lookWord looks at a word that an engine or a peer may be storing.
//
//go:norace
func lookWord(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

// A request that fails, behind one that is loaded to be sent again, waits for that.
func TestStagedFailsBehindLoad(t *testing.T) {
	g := stoppedEngine()
	a, b := stagedPair(t, linkLoop, ib.RC, g, "a")
	bad := a.write(b, 0, 64)
	bad.ID, bad.SGL[0].LKey, bad.Flags = 2, bad.SGL[0].LKey^1, ib.SendSignaled
	if _, err := a.qp.PostSend([]ib.SendWR{a.write(b, 0, 4096), bad}); err != nil {
		t.Fatal(err)
	}
	waitBegun(t, g, 1)
	a.noCompletion("the first is not done")
	g.Release()
	if wc := a.status(ib.WCLocProtErr); wc.ID != 2 {
		t.Errorf("%+v", wc)
	}
}

// paint makes all bytes of a range the same.
func paint(b []byte, v byte) { copy(b, bytes.Repeat([]byte{v}, len(b))) }
