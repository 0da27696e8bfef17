package device

// On-demand memory that is not there, or not with the rights: which side gets which error,
// for every operation of every transport.

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

const (
	odpSize = 16 << 12    // of an end's on-demand memory in these tests
	badPage = odpSize / 2 // where the page begins that a test spoils
)

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

// reach connects two ends. With UD it makes them ready, and addresses a request of a to b.
func reach(a, b *end, wr *ib.SendWR) {
	a.t.Helper()
	if a.qp.Type() != ib.UD {
		a.connect(b)
		b.connect(a)
		return
	}
	const qkey = 5
	a.openDatagrams(qkey)
	b.openDatagrams(qkey)
	ah := must[*ib.AH](a.t)(a.pd.CreateAH(ib.AHAttr{DGID: b.dev.GIDs()[0]}))
	a.t.Cleanup(func() { closeAll(a.t, ah) })
	wr.AH, wr.RemoteQPN, wr.RemoteQKey = ah, b.qp.Number(), qkey
}

// spoilers make a page bad, for writing or for everything.
var spoilers = []struct {
	name     string
	reads    bool // the page can still be read
	deferred bool // the page looks as if it only had to be fetched
	spoil    func(t testing.TB, page uintptr)
}{
	{"unmapped", false, false, func(t testing.TB, page uintptr) { onPage(t, unix.SYS_MUNMAP, page, 0) }},
	{"forbidden", false, false, func(t testing.TB, page uintptr) { onPage(t, unix.SYS_MPROTECT, page, unix.PROT_NONE) }},
	{"read-only", true, false, func(t testing.TB, page uintptr) { onPage(t, unix.SYS_MPROTECT, page, unix.PROT_READ) }},
	{"behind the end of a file", false, true, func(t testing.TB, page uintptr) {
		name := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(name, make([]byte, 1), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, _, e := unix.Syscall6(unix.SYS_MMAP, page, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED, f.Fd(), 4096); e != 0 {
			t.Fatal(e)
		}
	}},
}

func onPage(t testing.TB, number, page, arg uintptr) {
	t.Helper()
	if _, _, e := unix.Syscall(number, page, 4096, arg); e != 0 {
		t.Fatal(e)
	}
}

// faultRow is an operation over memory with a bad page.
type faultRow struct {
	typ     ib.QPType
	op      ib.Opcode
	n, good int     // its bytes, and how many of them lie before the bad page
	writes  [2]bool // whether it writes the requester's memory, and the peer's
	// How the request ends if the peer's memory is bad, and how the peer's receive does, if
	// the operation takes one.
	remote, recv ib.WCStatus
}

// The operations of 3 pages have the bad page in the middle. A WRITE with immediate data is
// one packet: of a longer one only the last packet takes the receive.
var faultRows = []faultRow{
	{ib.RC, ib.OpRDMAWrite, 3 << 12, 1 << 12, [2]bool{false, true}, ib.WCRemAccessErr, 0},
	{ib.RC, ib.OpRDMAWriteImm, 1000, 100, [2]bool{false, true}, ib.WCRemAccessErr, ib.WCLocAccessErr},
	{ib.RC, ib.OpRDMARead, 3 << 12, 1 << 12, [2]bool{true, false}, ib.WCRemAccessErr, 0},
	{ib.RC, ib.OpSend, 3 << 12, 1 << 12, [2]bool{false, true}, ib.WCRemOpErr, ib.WCLocProtErr},
	{ib.RC, ib.OpAtomicFetchAdd, 8, 0, [2]bool{true, true}, ib.WCRemAccessErr, 0},
	{ib.RC, ib.OpAtomicWrite, 8, 0, [2]bool{false, true}, ib.WCRemAccessErr, 0},
	{ib.UC, ib.OpRDMAWrite, 3 << 12, 1 << 12, [2]bool{false, true}, ib.WCSuccess, 0},
	{ib.UC, ib.OpSend, 3 << 12, 1 << 12, [2]bool{false, true}, ib.WCSuccess, ib.WCLocProtErr},
	{ib.UD, ib.OpSend, 1000, 100, [2]bool{false, true}, ib.WCSuccess, ib.WCLocProtErr},
}

// Every operation, with the memory of either side bad in every way. The side whose memory it
// is gets the error as its own; the peer gets the NAK of RC, and nothing with UC and UD. What
// lies before the bad page may be done, and what lies behind it is not. Where the memory is
// only read, read-only memory is good enough. The loop link shows every pair of an operation
// and a fault; packets, and the key of everything, each operation on both sides.
func TestOnDemandFaults(t *testing.T) {
	for _, way := range []struct {
		link     string
		implicit bool
	}{{linkLoop, false}, {linkLoop, true}, {linkUDP, false}, {linkUDP, true}} {
		if way.link == linkUDP && way.implicit && !fullMatrix() {
			continue
		}
		x, y := openDevice(t, provider.Config{Link: way.link}), openDevice(t, provider.Config{Link: way.link})
		for i, row := range faultRows {
			for k, s := range spoilers {
				for side := range 2 {
					all := fullMatrix() || way.link == linkLoop && !way.implicit
					if !all && k != (i+side)%len(spoilers) || way.implicit && row.typ != ib.RC {
						continue
					}
					name := fmt.Sprintf("%s/implicit %v/%v %v/%s/%s", way.link, way.implicit, row.typ, row.op, s.name, []string{"local", "remote"}[side])
					t.Run(name, func(t *testing.T) {
						a, b := newEnd(t, x, row.typ, 64), newEnd(t, y, row.typ, 64)
						t.Cleanup(a.close)
						t.Cleanup(b.close)
						f := &faultTest{faultRow: row, t: t, a: newODPEnd(a, way.implicit), b: newODPEnd(b, way.implicit)}
						t.Cleanup(func() { closeAll(t, f.a.odp, f.b.odp) })
						off := uint64(badPage - row.good)
						f.wr = ib.SendWR{ID: 1, Op: row.op, SGL: f.a.at(int(off), row.n), RemoteAddr: uint64(f.b.addr) + off, RKey: f.b.odp.RKey(), CompareAdd: 1}
						reach(a, b, &f.wr)
						f.run(side, s.reads, s.deferred, s.spoil)
					})
				}
			}
		}
	}
}

// faultTest is a row with its two ends.
type faultTest struct {
	faultRow
	t    *testing.T
	a, b *odpEnd
	wr   ib.SendWR
}

// post posts the row's request, and the receive that it takes.
func (f *faultTest) post() {
	f.t.Helper()
	if f.recv != 0 {
		room := f.n
		if f.typ == ib.UD {
			room += ib.GRHLength
		}
		f.b.recv(ib.RecvWR{ID: 7, SGL: f.b.at(badPage-f.good, room)})
	}
	f.a.post(f.wr)
}

func (f *faultTest) run(side int, reads, deferred bool, spoil func(testing.TB, uintptr)) {
	t, a, b := f.t, f.a, f.b
	t.Helper()
	fill(a.bytes(), 1)
	fill(b.bytes(), 2)
	if f.typ == ib.RC { // the request works, and the device has the pages in its table
		f.post()
		a.ok()
		if f.recv != 0 {
			b.ok()
		}
		fill(a.bytes(), 3)
	}
	victim := []*odpEnd{a, b}[side]
	spoil(t, victim.addr+badPage)
	var before []byte
	if reads {
		before = bytes.Clone(victim.bytes())
	}
	f.post()
	if reads && !f.writes[side] {
		a.ok()
		if f.recv != 0 {
			b.ok()
		}
		return
	}
	if side == 0 {
		a.status(ib.WCLocProtErr)
	} else {
		a.status(f.remote)
	}
	eventually(t, "the failure is counted", func() bool { return victim.odp.PagingStats().FailedResolutions > 0 })
	if side == 1 {
		if f.recv != 0 && deferred && f.remote == ib.WCSuccess { // the first message was dropped while its memory was fetched
			a.post(f.wr)
			a.ok()
		}
		if f.recv != 0 {
			b.status(f.recv)
		}
		if f.typ == ib.RC {
			eventually(t, "the target is in the error state", func() bool { return b.state() == ib.QPErr })
		}
	}
	if before == nil {
		return
	}
	now, sent := victim.bytes(), []*odpEnd{b, a}[side].bytes()
	if !bytes.Equal(now[badPage:], before[badPage:]) {
		t.Error("memory from the bad page on has changed")
	}
	if f.good < 4096 {
		return
	}
	for i := badPage - f.good; i < badPage; i++ {
		if now[i] != before[i] && now[i] != sent[i] {
			t.Fatalf("byte %d, before the bad page, is neither old nor new", i)
		}
	}
}

// XRC is as RC, with the memory of the shared receive queue's domain.
func TestOnDemandFaultsXRC(t *testing.T) {
	const n, off = 3 << 12, badPage - 1<<12
	onXRCLinks(t, func(t *testing.T, x, y *Device, domain provider.XRCD) {
		for i, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead, ib.OpSend} {
			s := &spoilers[[]int{2, 0, 3}[i]] // read-only, unmapped, behind the end of a file
			t.Run(fmt.Sprintf("%v/%s", op, s.name), func(t *testing.T) {
				box := newInbox(t, y, domain, 1)
				defer box.close()
				a, target := initiatorTo(t, x, y, domain)
				defer func() { closeAll(t, a.qp, target, a.mr, a.cq, a.pd) }()
				m := newMapped(t, odpSize)
				mr := must[provider.MR](t)(box.pd.RegMRAddr(m.addr, m.n, uint64(m.addr), odpAccess))
				defer closeAll(t, mr)
				wr := ib.SendWR{ID: 1, Op: op, SGL: a.sge(0, n), RemoteAddr: uint64(m.addr) + off, RKey: mr.RKey(), RemoteSRQN: box.srq.Number()}
				want := ib.WCRemAccessErr
				if op == ib.OpSend {
					want = ib.WCRemOpErr
					first := wr // takes the receive that the inbox has posted
					first.SGL = a.sge(0, 8)
					a.post(first)
					a.ok()
					box.wait()
					if _, err := box.srq.PostRecv([]ib.RecvWR{{ID: 9, SGL: []ib.SGE{{Addr: uint64(m.addr) + off, Length: n, LKey: mr.LKey()}}}}); err != nil {
						t.Fatal(err)
					}
				}
				s.spoil(t, m.addr+badPage)
				a.post(wr)
				a.status(want)
				if op == ib.OpSend {
					if wc := box.wait(); wc.Status != ib.WCLocProtErr || wc.ID != 9 {
						t.Errorf("%+v", wc)
					}
				}
			})
		}
	})
}
