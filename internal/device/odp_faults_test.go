package device

// On-demand memory that is not there, or not with the rights: which side gets which error,
// for every operation, on every transport.

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// odpSize is the size of an end's on-demand memory in these tests; its second
// half is what is spoiled.
const odpSize = 16 << 12

// odpEnd is an end with on-demand memory.
type odpEnd struct {
	*end
	*mapped
	odp provider.MR
}

func newODPEnd(e *end, implicit bool) *odpEnd {
	e.t.Helper()
	o := &odpEnd{end: e, mapped: newMapped(e.t, odpSize)}
	var err error
	if implicit {
		o.odp, err = e.pd.RegImplicitMR(odpAccess | ib.AccessFlushGlobal)
	} else {
		o.odp, err = e.pd.RegMRAddr(o.addr, o.n, uint64(o.addr), odpAccess|ib.AccessFlushGlobal)
	}
	if err != nil {
		e.t.Fatal(err)
	}
	return o
}

func (o *odpEnd) at(off, n int) []ib.SGE {
	return []ib.SGE{{Addr: uint64(o.addr) + uint64(off), Length: uint32(n), LKey: o.odp.LKey()}}
}

// spoilers make the second half of memory bad, for writing or for everything.
var spoilers = []struct {
	name     string
	reads    bool // it can still be read
	deferred bool // it looks as if it only had to be fetched
	spoil    func(t testing.TB, m *mapped)
}{
	{"unmapped", false, false, func(t testing.TB, m *mapped) { m.half(t, unix.SYS_MUNMAP, 0) }},
	{"forbidden", false, false, func(t testing.TB, m *mapped) { m.half(t, unix.SYS_MPROTECT, unix.PROT_NONE) }},
	{"read-only", true, false, func(t testing.TB, m *mapped) { m.half(t, unix.SYS_MPROTECT, unix.PROT_READ) }},
	{"behind the end of a file", false, true, func(t testing.TB, m *mapped) {
		name := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(name, make([]byte, 1), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, _, e := unix.Syscall6(unix.SYS_MMAP, m.addr+odpSize/2, odpSize/2, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED, f.Fd(), 4096); e != 0 {
			t.Fatal(e)
		}
	}},
}

func (m *mapped) half(t testing.TB, number, arg uintptr) {
	t.Helper()
	if _, _, e := unix.Syscall(number, m.addr+odpSize/2, odpSize/2, arg); e != 0 {
		t.Fatal(e)
	}
}

// odpOp is an operation over memory whose end is spoiled.
type odpOp struct {
	name   string
	writes struct{ local, remote bool } // which side's memory is written
	post   func(a, b *odpEnd, off, n int)
	remote ib.WCStatus // the requester's error if the peer's memory is bad
	recv   ib.WCStatus // what the receive of the peer ends with then; 0: there is none
	atomic bool
	n      int
	lists  [2]bool // the operation has local, has remote memory
}

func rcOps() []odpOp {
	write := func(op ib.Opcode) func(a, b *odpEnd, off, n int) {
		return func(a, b *odpEnd, off, n int) {
			if op == ib.OpRDMAWriteImm {
				b.recv(ib.RecvWR{ID: 7})
			}
			a.end.post(ib.SendWR{ID: 1, Op: op, SGL: a.at(off, n), RemoteAddr: uint64(b.addr) + uint64(off), RKey: b.odp.RKey()})
		}
	}
	remote := struct{ local, remote bool }{false, true}
	local := struct{ local, remote bool }{true, false}
	return []odpOp{
		{name: "WRITE", writes: remote, post: write(ib.OpRDMAWrite), remote: ib.WCRemAccessErr, n: 3 << 12, lists: [2]bool{true, true}},
		{name: "WRITE with immediate", writes: remote, post: write(ib.OpRDMAWriteImm), remote: ib.WCRemAccessErr, recv: ib.WCLocAccessErr, n: 3 << 12, lists: [2]bool{true, true}},
		{name: "READ", writes: local, post: write(ib.OpRDMARead), remote: ib.WCRemAccessErr, n: 3 << 12, lists: [2]bool{true, true}},
		{name: "SEND", writes: remote, post: func(a, b *odpEnd, off, n int) {
			b.recv(ib.RecvWR{ID: 7, SGL: b.at(off, n)})
			a.end.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: a.at(off, n)})
		}, remote: ib.WCRemOpErr, recv: ib.WCLocProtErr, n: 3 << 12, lists: [2]bool{true, true}},
		{name: "FETCH and ADD", writes: struct{ local, remote bool }{true, true}, post: func(a, b *odpEnd, off, n int) {
			a.end.post(ib.SendWR{ID: 1, Op: ib.OpAtomicFetchAdd, SGL: a.at(off, 8), RemoteAddr: uint64(b.addr) + uint64(off), RKey: b.odp.RKey(), CompareAdd: 1})
		}, remote: ib.WCRemAccessErr, atomic: true, n: 8, lists: [2]bool{true, true}},
		{name: "ATOMIC WRITE", writes: remote, post: func(a, b *odpEnd, off, n int) {
			a.end.post(ib.SendWR{ID: 1, Op: ib.OpAtomicWrite, SGL: a.at(off, 8), RemoteAddr: uint64(b.addr) + uint64(off), RKey: b.odp.RKey()})
		}, remote: ib.WCRemAccessErr, atomic: true, n: 8, lists: [2]bool{true, true}},
	}
}

// Every operation of RC, with the memory of either side bad in every way: the side
// whose memory it is learns it as its own fault, the other as the peer's; what lies
// before the bad page may be done, what lies behind it is not, and nothing is
// claimed. Where the memory is only read, read-only memory will do.
func TestOnDemandFaultsRC(t *testing.T) {
	for _, link := range []string{linkLoop, linkUDP} {
		for _, implicit := range []bool{false, true} {
			if implicit && link == linkUDP && !fullMatrix() {
				continue
			}
			x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
			for _, op := range rcOps() {
				for _, spoiler := range spoilers {
					for side := range 2 {
						t.Run(fmt.Sprintf("%s/implicit %v/%s/%s/%s", link, implicit, op.name, spoiler.name, []string{"local", "remote"}[side]), func(t *testing.T) {
							a, b := connected(t, x, y, ib.RC, 64, nil)
							testODPFault(t, newODPEnd(a, implicit), newODPEnd(b, implicit), &op, spoiler.reads, spoiler.spoil, side)
						})
					}
				}
			}
		}
	}
}

func testODPFault(t *testing.T, a, b *odpEnd, op *odpOp, reads bool, spoil func(testing.TB, *mapped), side int) {
	defer closeAll(t, a.odp, b.odp)
	victim, writes := a, op.writes.local
	if side == 1 {
		victim, writes = b, op.writes.remote
	}
	off := odpSize/2 - op.n + 4096 // the last page is bad
	if op.atomic {
		off = odpSize / 2
	}
	fill(a.bytes(), 1)
	fill(b.bytes(), 2)
	// It works, and the device knows the pages; then they are spoiled.
	op.post(a, b, off, op.n)
	a.ok()
	if op.recv != 0 {
		b.ok()
	}
	spoil(t, victim.mapped)
	op.post(a, b, off, op.n)
	if reads && !writes {
		a.ok()
		if op.recv != 0 {
			b.ok()
		}
		return
	}
	want := ib.WCLocProtErr
	if side == 1 {
		want = op.remote
	}
	if wc := a.status(want); wc.ID != 1 {
		t.Fatalf("%+v", wc)
	}
	if side == 1 && op.recv != 0 {
		// Immediate data comes last: before that, the receive is not taken yet.
		if wc := b.wait(); wc.Status != op.recv && (op.recv != ib.WCLocAccessErr || wc.Status != ib.WCWRFlushErr) {
			t.Errorf("the receive: %v, want %v", wc.Status, op.recv)
		}
	}
	if s := victim.odp.PagingStats(); s.FailedResolutions == 0 {
		t.Errorf("no failed resolution: %+v", s)
	}
	if side == 1 {
		eventually(t, "the target is in the error state", func() bool { return b.state() == ib.QPErr })
	}
}

// UC: what the sender has not is its own error; what the target has not is lost,
// and the peer does not hear of it.
func TestOnDemandFaultsUC(t *testing.T) {
	for _, link := range []string{linkLoop, linkUDP} {
		x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpSend} {
			for _, spoiler := range spoilers {
				for side := range 2 {
					t.Run(fmt.Sprintf("%s/%v/%s/%s", link, op, spoiler.name, []string{"local", "remote"}[side]), func(t *testing.T) {
						ea, eb := connected(t, x, y, ib.UC, 64, nil)
						a, b := newODPEnd(ea, false), newODPEnd(eb, false)
						defer closeAll(t, a.odp, b.odp)
						const n = 3 << 12
						off := odpSize/2 - n + 4096
						fill(a.bytes(), 1)
						victim := a
						if side == 1 {
							victim = b
						}
						spoiler.spoil(t, victim.mapped)
						if op == ib.OpSend {
							b.recv(ib.RecvWR{ID: 7, SGL: b.at(off, n)})
						}
						a.end.post(ib.SendWR{ID: 1, Op: op, SGL: a.at(off, n), RemoteAddr: uint64(b.addr) + uint64(off), RKey: b.odp.RKey()})
						if side == 0 && !spoiler.reads {
							a.status(ib.WCLocProtErr)
							return
						}
						a.ok() // it has left
						if side == 0 {
							return
						}
						eventually(t, "the failure is counted", func() bool { return b.odp.PagingStats().FailedResolutions > 0 })
						if op == ib.OpSend {
							if spoiler.deferred { // that one was dropped, to be on the safe side
								a.end.post(ib.SendWR{ID: 2, Op: op, SGL: a.at(off, n)})
								a.ok()
							}
							b.status(ib.WCLocProtErr)
						}
					})
				}
			}
		}
	}
}

// UD: likewise. The sender's error is its own; a receive whose memory is not there
// completes with an error.
func TestOnDemandFaultsUD(t *testing.T) {
	const qkey, n = 5, 1000
	for _, link := range []string{linkLoop, linkUDP} {
		x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
		for _, spoiler := range spoilers {
			for side := range 2 {
				t.Run(fmt.Sprintf("%s/%s/%s", link, spoiler.name, []string{"local", "remote"}[side]), func(t *testing.T) {
					ea, eb := newEnd(t, x, ib.UD, 64), newEnd(t, y, ib.UD, 64)
					t.Cleanup(ea.close)
					t.Cleanup(eb.close)
					ea.openDatagrams(qkey)
					eb.openDatagrams(qkey)
					a, b := newODPEnd(ea, false), newODPEnd(eb, false)
					defer closeAll(t, a.odp, b.odp)
					ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
					defer closeAll(t, ah)
					victim := a
					if side == 1 {
						victim = b
					}
					spoiler.spoil(t, victim.mapped)
					b.recv(ib.RecvWR{ID: 7, SGL: b.at(odpSize/2-100, n+ib.GRHLength)})
					a.end.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: a.at(odpSize/2-100, n), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: qkey})
					if side == 0 && !spoiler.reads {
						a.status(ib.WCLocProtErr)
						return
					}
					a.ok()
					if side == 0 {
						b.ok()
						return
					}
					eventually(t, "the failure is counted", func() bool { return b.odp.PagingStats().FailedResolutions > 0 })
					if spoiler.deferred {
						a.end.post(ib.SendWR{ID: 2, Op: ib.OpSend, SGL: a.at(odpSize/2-100, n), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: qkey})
						a.ok()
					}
					b.status(ib.WCLocProtErr)
				})
			}
		}
	}
}

// XRC: as RC, with the memory of the shared queue's domain.
func TestOnDemandFaultsXRC(t *testing.T) {
	onXRCLinks(t, func(t *testing.T, x, y *Device, domain provider.XRCD) {
		for _, spoiler := range spoilers {
			for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead, ib.OpSend} {
				t.Run(fmt.Sprintf("%s/%v", spoiler.name, op), func(t *testing.T) {
					box := newInbox(t, y, domain, 0+1)
					defer box.close()
					a, target := initiatorTo(t, x, y, domain)
					defer func() { closeAll(t, a.qp, target, a.mr, a.cq, a.pd) }()
					m := newMapped(t, odpSize)
					mr, err := box.pd.RegMRAddr(m.addr, m.n, uint64(m.addr), odpAccess)
					if err != nil {
						t.Fatal(err)
					}
					defer closeAll(t, mr)
					const n = 3 << 12
					off := uint64(odpSize/2 - n + 4096)
					// The slot that the inbox has posted takes the first message.
					wr := ib.SendWR{ID: 1, Op: op, SGL: a.sge(0, n), RemoteAddr: uint64(m.addr) + off, RKey: mr.RKey(), RemoteSRQN: box.srq.Number()}
					want := ib.WCRemAccessErr
					if op == ib.OpSend {
						want = ib.WCRemOpErr
						small := wr
						small.SGL = a.sge(0, 8)
						a.post(small)
						a.ok()
						box.wait()
						if _, err := box.srq.PostRecv([]ib.RecvWR{{ID: 9, SGL: []ib.SGE{{Addr: uint64(m.addr) + off, Length: n, LKey: mr.LKey()}}}}); err != nil {
							t.Fatal(err)
						}
					}
					spoiler.spoil(t, m)
					a.post(wr)
					if spoiler.reads && op == ib.OpRDMARead {
						a.ok()
						return
					}
					a.status(want)
					if op == ib.OpSend {
						if wc := box.wait(); wc.Status != ib.WCLocProtErr || wc.ID != 9 {
							t.Errorf("%+v", wc)
						}
					}
				})
			}
		}
	})
}

// A failed request claims nothing: what the target has is what was there before,
// or what was to be there, page by page in order, and the bad page's neighbours
// behind it are as they were.
func TestOnDemandHalfDone(t *testing.T) {
	const n = odpSize
	for _, link := range []string{linkLoop, linkUDP} {
		t.Run(link, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
			ea, eb := connected(t, x, y, ib.RC, 64, nil)
			a, b := newODPEnd(ea, false), newODPEnd(eb, false)
			defer closeAll(t, a.odp, b.odp)
			fill(a.bytes(), 1)
			fill(b.bytes(), 2)
			old := bytes.Clone(b.bytes())
			const bad = 9 << 12
			if _, _, e := unix.Syscall(unix.SYS_MPROTECT, b.addr+bad, 4096, unix.PROT_READ); e != 0 {
				t.Fatal(e)
			}
			a.end.post(ib.SendWR{ID: 1, Op: ib.OpRDMAWrite, SGL: a.at(0, n), RemoteAddr: uint64(b.addr), RKey: b.odp.RKey()})
			a.status(ib.WCRemAccessErr)
			if !bytes.Equal(b.bytes()[bad:], old[bad:]) {
				t.Error("memory from the bad page on has changed")
			}
			for p := 0; p < bad; p += 4096 {
				if got := b.bytes()[p:][:4096]; !bytes.Equal(got, old[p:][:4096]) && !bytes.Equal(got, a.bytes()[p:][:4096]) {
					t.Errorf("page %d is neither old nor new", p/4096)
				}
			}
		})
	}
}
