package device

// Requests that the sender executes by grant in plain memory (grant_plain.go): memory that no
// other process can map.

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// needLoans skips a test of WRITEs by grant where pages cannot be lent.
func needLoans(t testing.TB) {
	t.Helper()
	rings, err := sys.NewLentRings()
	if err != nil {
		t.Skipf("kernel: %v", err)
	}
	rings.Close()
	if s := mem.PagingMeans(); s.Notifier != "userfaultfd" {
		t.Skipf("kernel: changes of mappings are not reported: %s", s.Notifier)
	}
}

// useMemory makes an end use memory of another kind, with some rights.
func (e *end) useMemory(b []byte, access ib.Access) {
	e.t.Helper()
	closeAll(e.t, e.mr)
	e.buf = b
	e.mr = must[provider.MR](e.t)(e.pd.RegMR(b, access))
	e.t.Cleanup(func() { closeAll(e.t, e.qp, e.mr) }) // before the memory is unmapped
}

// mapOver maps new memory over some.
func mapOver(t testing.TB, b []byte) {
	t.Helper()
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(sys.AddrOf(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		t.Fatal(errno)
	}
}

// plainGrants makes a connection by rings in which a has a grant to plain memory of b, and uses
// it: Go memory, or mapped memory.
func plainGrants(t testing.TB, size int, mapped bool) (a, b *end) {
	t.Helper()
	needLoans(t)
	a, b = byRings(t, ib.RC, size)
	if mapped {
		b.useMemory(mapping(t, size), allRemote)
	}
	a.warm(b)
	return a, b
}

// plainLoans returns how many of the grants that an end has given are open, and lend pages.
func (e *end) plainLoans() (n int) {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, g := range q.grants {
		if g.Open() && g.plain != nil && g.plain.loan != nil {
			n++
		}
	}
	return n
}

// The owner process does nothing for WRITEs and READs, and the bytes are right at odd places and
// of odd numbers.
func TestGrantPlainBytes(t *testing.T) {
	const size = 1 << 20
	for _, row := range []struct {
		name   string
		mapped bool
		op     ib.Opcode
	}{
		{"WRITE to Go memory", false, ib.OpRDMAWrite}, {"READ from Go memory", false, ib.OpRDMARead},
		{"WRITE to mapped memory", true, ib.OpRDMAWrite}, {"READ from mapped memory", true, ib.OpRDMARead},
	} {
		t.Run(row.name, func(t *testing.T) {
			a, b := plainGrants(t, size, row.mapped)
			rng := rand.New(rand.NewPCG(testSeed(t), 0))
			from, to := a, b
			if row.op == ib.OpRDMARead {
				from, to = b, a
			}
			for i := range from.buf {
				from.buf[i] = byte(rng.Uint32())
			}
			want := bytes.Clone(to.buf)
			b.dev.first.rx.Lock() // b's process receives nothing any more
			defer b.dev.first.rx.Unlock()
			before, requests := a.byGrant(), uint64(0)
			for _, n := range []int{1, 3, 8, 9, 64, 65, 4095, 4096, 4097, 8192, 64 << 10, 256 << 10} {
				for _, off := range []int{0, 1, 4093, 8191, size - n, rng.IntN(size - n)} {
					wr := a.write(b, off, n)
					wr.Op = row.op
					a.post(wr)
					a.ok()
					requests++
					copy(want[off:][:n], from.buf[off:])
					if !bytes.Equal(to.buf, want) {
						t.Fatalf("%d bytes at %d: other bytes are there", n, off)
					}
				}
			}
			if n := a.byGrant() - before; n != requests {
				t.Errorf("%d of %d went by a grant", n, requests)
			}
			got := countsOf(b.dev)
			if q := must[ib.QPAttr](t)(b.qp.Query()); q.RQPSN != must[ib.QPAttr](t)(a.qp.Query()).SQPSN {
				t.Errorf("the owner's queue pair has not moved on: %+v", got)
			}
		})
	}
}

// Messages that no grant covers go by the ring, between those by grant: of no bytes, of more
// than a train, and those to a part of the region that the peer has no right to.
func TestGrantPlainAndRing(t *testing.T) {
	a, b := plainGrants(t, 1<<20, true)
	for _, n := range []int{0, 8, 1 << 20, 8, 0, 4096} {
		fill(a.buf, byte(n+1))
		wr := a.write(b, 0, n)
		if n == 0 {
			wr.SGL = nil
		}
		a.post(wr)
		a.ok()
		if !bytes.Equal(a.buf[:n], b.buf[:n]) {
			t.Fatalf("%d bytes: other bytes are there", n)
		}
	}
	a.post(a.write(b, 1<<20-4, 8))
	a.status(ib.WCLocProtErr) // its own memory ends there, too
}

// The source of a WRITE lies in several pieces, or is inline; the target of a READ is not
// contiguous.
func TestGrantPlainPieces(t *testing.T) {
	a, b := plainGrants(t, 1<<20, true)
	fill(a.buf, 3)
	before := a.byGrant()
	a.post(ib.SendWR{Op: ib.OpRDMAWrite, Inline: []byte("inline"), RemoteAddr: b.mr.Addr() + 77, RKey: b.mr.RKey()})
	a.ok()
	if string(b.buf[77:83]) != "inline" || a.byGrant() != before+1 {
		t.Errorf("%q is there, %d by grant", b.buf[77:83], a.byGrant()-before)
	}
	list := func(op ib.Opcode, at ...int) ib.SendWR {
		wr := ib.SendWR{Op: op, RemoteAddr: b.mr.Addr() + 1000, RKey: b.mr.RKey()}
		for _, off := range at {
			wr.SGL = append(wr.SGL, a.sge(off, 30_001)...)
		}
		return wr
	}
	a.post(list(ib.OpRDMAWrite, 500_000, 0, 100_003))
	a.ok()
	want := slicesOf(a.buf, 500_000, 0, 100_003)
	if !bytes.Equal(b.buf[1000:][:len(want)], want) {
		t.Error("WRITE: other bytes are there")
	}
	fill(b.buf, 9)
	a.post(list(ib.OpRDMARead, 700_001, 300_000))
	a.ok()
	if !bytes.Equal(slicesOf(a.buf, 700_001, 300_000), b.buf[1000:][:60_002]) {
		t.Error("READ: other bytes have come")
	}
}

// slicesOf returns 30,001 bytes from each offset on, in a row.
func slicesOf(b []byte, at ...int) (s []byte) {
	for _, off := range at {
		s = append(s, b[off:][:30_001]...)
	}
	return s
}

// Which regions of plain memory get a grant, and for what.
func TestGrantPlainRights(t *testing.T) {
	needLoans(t)
	for _, row := range []struct {
		name        string
		memory      func(t *testing.T) []byte
		access      ib.Access
		lock        ib.LockMode
		write, read bool // go by grant
	}{
		{"all rights", nil, allRemote, ib.LockAuto, true, true},
		{"no remote write", nil, ib.AccessLocalWrite | ib.AccessRemoteRead, ib.LockAuto, false, true},
		{"no remote read", nil, ib.AccessLocalWrite | ib.AccessRemoteWrite, ib.LockAuto, true, false},
		{"on demand", nil, allRemote | ib.AccessOnDemand, ib.LockAuto, false, false},
		{"pages not locked", nil, allRemote, ib.LockOff, false, true},
		{"a file's pages", filePages, allRemote, ib.LockAuto, false, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: linkLocal}), openDevice(t, provider.Config{Link: linkLocal, Lock: row.lock})
			x.loopback, y.loopback = false, false
			a, b := connected(t, x, y, ib.RC, 8192, nil)
			memory := mapping(t, 8192)
			if row.memory != nil {
				memory = row.memory(t)
			}
			b.useMemory(memory, row.access)
			for _, c := range []struct {
				op      ib.Opcode
				right   ib.Access
				byGrant bool
			}{{ib.OpRDMARead, ib.AccessRemoteRead, row.read}, {ib.OpRDMAWrite, ib.AccessRemoteWrite, row.write}} {
				if row.access&c.right == 0 {
					continue
				}
				wr := a.write(b, 0, 8)
				wr.Op = c.op
				before := a.byGrant()
				if c.byGrant {
					eventually(t, c.op.String()+" goes by a grant", func() bool {
						a.post(wr)
						a.ok()
						return a.byGrant() > before+5
					})
					continue
				}
				for range 300 {
					a.post(wr)
					a.ok()
				}
				if n := a.byGrant() - before; n != 0 {
					t.Errorf("%d of %v went by a grant", n, c.op)
				}
			}
		})
	}
}

// filePages maps a file.
func filePages(t *testing.T) []byte {
	f := must[*os.File](t)(os.CreateTemp(t.TempDir(), ""))
	t.Cleanup(func() { _ = f.Close() })
	must0(t, f.Truncate(8192))
	b := must[[]byte](t)(unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED))
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// When a call that ends a grant has returned, or the program has unmapped the memory, a WRITE
// does not reach the memory, and ends as it would have without a grant. What is mapped at the
// place next is not written to, and not read.
func TestGrantPlainEnds(t *testing.T) {
	readOnly := ib.AccessLocalWrite | ib.AccessRemoteRead
	for _, row := range []struct {
		name   string
		end    func(a, b *end)
		status ib.WCStatus
		again  bool // a grant comes into use again
	}{
		{"region closed", func(_, b *end) { closeAll(b.t, b.mr) }, ib.WCRemAccessErr, false},
		{"fewer rights", func(_, b *end) { must0(b.t, b.mr.Rereg(provider.MRChange{Access: &readOnly, KeepKeys: true})) }, ib.WCRemAccessErr, false},
		{"other memory", func(_, b *end) { must0(b.t, b.mr.Rereg(provider.MRChange{Buf: mapping(b.t, 8192), KeepKeys: false})) }, ib.WCRemAccessErr, false},
		{"invalidated", func(a, b *end) {
			b.recv(ib.RecvWR{})
			a.post(ib.SendWR{Op: ib.OpSendInv, InvalidateKey: b.mr.RKey()})
			a.ok()
			b.ok()
		}, ib.WCRemAccessErr, false},
		{"queue pair with fewer rights", func(_, b *end) {
			b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemoteRead}, ib.QPMaskAccess)
		}, ib.WCRemInvReqErr, false},
		{"queue pair reset", func(_, b *end) { b.modify(ib.QPAttr{State: ib.QPReset}, 0) }, ib.WCRetryExcErr, false},
		{"queue pair closed", func(_, b *end) { closeAll(b.t, b.qp) }, ib.WCRetryExcErr, false},
		{"suspended and resumed", func(_, b *end) {
			if !b.mr.(*MR).region.Suspend() {
				b.t.Fatal("it cannot be suspended")
			}
			b.mr.(*MR).region.Resume()
		}, ib.WCSuccess, true},
		{"mapped over", func(_, b *end) { mapOver(b.t, b.buf) }, ib.WCRemAccessErr, false},
		{"discarded and mapped over", func(_, b *end) {
			must0(b.t, unix.Madvise(b.buf, unix.MADV_DONTNEED_LOCKED))
			mapOver(b.t, b.buf)
		}, ib.WCRemAccessErr, false},
		{"a page discarded", func(_, b *end) { must0(b.t, unix.Madvise(b.buf[:4096], unix.MADV_DONTNEED_LOCKED)) }, ib.WCRemAccessErr, false},
		{"other memory unmapped", func(_, b *end) {
			other := must[[]byte](b.t)(unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS))
			mr := must[provider.MR](b.t)(b.pd.RegMR(other, allRemote))
			must0(b.t, unix.Munmap(other))
			closeAll(b.t, mr)
		}, ib.WCSuccess, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			a, b := byRings(t, ib.RC, 8192)
			needLoans(t)
			b.useMemory(mapping(t, 8192), allRemote|ib.AccessRemoteInvalidate)
			a.warm(b)
			if b.plainLoans() != 1 {
				t.Fatalf("%d loans", b.plainLoans())
			}
			memory, wr := b.buf, a.write(b, 0, 4000)
			row.end(a, b)
			before := bytes.Clone(memory)
			fill(a.buf, 77)
			a.post(wr)
			if row.status == ib.WCSuccess {
				a.ok()
				a.warm(b)
				return
			}
			a.status(row.status)
			if !bytes.Equal(memory, before) {
				t.Error("the memory is written to")
			}
			if n := b.plainLoans(); n != 0 {
				t.Errorf("%d loans are left", n)
			}
		})
	}
}

// The sender stands still between its look at the grant and the system call that writes. The
// owner process takes the memory away meanwhile: the call does not wait for the sender, and
// when the sender goes on nothing is written. The WRITE comes again by the ring.
func TestGrantPlainAmidWrite(t *testing.T) {
	const text = "last bytes"
	for _, row := range []struct {
		name   string
		end    func(b *end)
		status ib.WCStatus
	}{
		{"region closed", func(b *end) { closeAll(b.t, b.mr) }, ib.WCRemAccessErr},
		{"region elsewhere", func(b *end) { must0(b.t, b.mr.Rereg(provider.MRChange{Buf: mapping(b.t, 8192)})) }, ib.WCRemAccessErr},
		{"mapped over", func(b *end) { mapOver(b.t, b.buf) }, ib.WCRemAccessErr},
		{"suspended", func(b *end) {
			b.mr.(*MR).region.Suspend()
			b.mr.(*MR).region.Resume()
		}, ib.WCSuccess},
	} {
		t.Run(row.name, func(t *testing.T) {
			a, b := plainGrants(t, 8192, true)
			memory := b.buf
			stuck, r, wr := a.stuckWrite(b, text)
			t.Cleanup(func() { must0(t, r.Close()) })
			before, posted := a.byGrant(), make(chan struct{})
			go func() {
				defer close(posted)
				a.post(wr)
			}()
			<-stuck.begun
			row.end(b) // or this would not return
			clear(memory)
			b.dev.first.rx.Lock() // what comes by the ring stays there
			close(stuck.end)
			<-posted
			if !bytes.Equal(memory, make([]byte, 8192)) {
				t.Error("the memory is written to")
			}
			b.dev.first.rx.Unlock()
			a.status(row.status)
			if got := bytes.HasPrefix(memory, []byte(text)); got != (row.status == ib.WCSuccess) {
				t.Errorf("%q is there", memory[:len(text)])
			}
			if a.byGrant() != before {
				t.Error("the WRITE is counted as one by grant")
			}
		})
	}
}

const plainChild = "VERBENA_TEST_PLAIN_CHILD"

// runPlainChild is the other process: it writes to and reads from the test's memory as long as
// it can, again and again by new connections.
func runPlainChild(t *testing.T, arg string) {
	var o peerAddress
	must0(t, json.Unmarshal([]byte(arg), &o))
	a := newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, 64<<10)
	for i := range a.buf {
		a.buf[i] = 0xee
	}
	in := a.announce(o)
	fmt.Println("GOES")
	for in.Scan() { // a key, for each round
		var key uint32
		must[int](t)(fmt.Sscan(in.Text(), &key))
		before, told := a.byGrant(), false
		for i := 0; ; i++ {
			wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 64<<10), RemoteAddr: o.Remote, RKey: key}
			switch i % 3 {
			case 1:
				wr.SGL = a.sge(0, 8)
			case 2:
				wr.Op, wr.SGL = ib.OpRDMARead, a.sge(32<<10, 4096)
			}
			a.post(wr)
			if wc := a.wait(); wc.Status != ib.WCSuccess {
				break
			}
			for k := range a.buf {
				a.buf[k] = 0xee // a READ has changed it
			}
			if !told && a.byGrant() > before+3 {
				told = true
				fmt.Println("GRANT")
			}
		}
		a.modify(ib.QPAttr{State: ib.QPReset}, 0)
		fmt.Println("ENDED")
		in.Scan()
		a.connectTo(o.Addr, o.QPN, a.psn, a.rd)
		fmt.Println("AGAIN")
	}
}

// The peer process is stopped at a random moment while it writes and reads by grant. The owner
// process closes the region, or unmaps its memory, without waiting for it, and maps new memory
// there: nothing is ever written to that, also when the peer goes on. In the end the peer is
// killed while it is stopped.
func TestGrantPlainOfStoppedProcess(t *testing.T) {
	if arg := os.Getenv(plainChild); arg != "" {
		runPlainChild(t, arg)
		return
	}
	needLoans(t)
	const size = 64 << 10
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	d := openDevice(t, provider.Config{Link: linkLocal})
	b := newEnd(t, d, ib.RC, size)
	t.Cleanup(b.close)
	memory := newMapped(t, size)
	b.useMemory(memory.bytes(), allRemote)
	child := runInChild(t, "TestGrantPlainOfStoppedProcess", plainChild, b.address())
	o := child.connect(b)
	child.said("GOES")
	clean := make([]byte, size)
	rounds := lastingOps(12, 200)
	for round := range rounds {
		must[int](t)(fmt.Fprintln(child.in, b.mr.RKey()))
		child.said("GRANT")
		for range rng.IntN(200) {
			runtime.Gosched()
		}
		stop := rng.IntN(4) > 0
		if stop {
			must0(t, child.cmd.Process.Signal(syscall.SIGSTOP))
		}
		switch rng.IntN(3) {
		case 0: // the region is closed first, as a program should
			closeAll(t, b.mr)
			memory.remap()
		case 1:
			memory.unmap()
			memory.remap()
			closeAll(t, b.mr)
		case 2:
			must0(t, unix.Madvise(b.buf, unix.MADV_DONTNEED_LOCKED))
			closeAll(t, b.mr)
		}
		if round == rounds-1 {
			child.kill()
		} else {
			must0(t, child.cmd.Process.Signal(syscall.SIGCONT))
			child.said("ENDED")
		}
		if !bytes.Equal(b.buf, clean) {
			t.Fatalf("round %d: the new memory is written to", round)
		}
		b.mr = must[provider.MR](t)(b.pd.RegMR(b.buf, allRemote))
		b.modify(ib.QPAttr{State: ib.QPReset}, 0)
		if round < rounds-1 {
			b.connectTo(o.Addr, o.QPN, b.psn, b.rd)
			must[int](t)(fmt.Fprintln(child.in))
			child.said("AGAIN")
		}
	}
	eventually(t, "no grants are left", func() bool { return grantsOf(d) == 0 })
}

// BenchmarkGrant measures requests by grant, from the post to the completion.
func BenchmarkGrant(b *testing.B) {
	for _, kind := range []string{"segment", "plain"} {
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
			for _, n := range []int{8, 64, 4096, 64 << 10} {
				b.Run(fmt.Sprintf("%s/%v/%d", kind, op, n), func(b *testing.B) {
					x, y := byRings(b, ib.RC, 64<<10)
					if kind == "segment" {
						y.shareMemory(64 << 10)
					} else {
						needLoans(b)
					}
					x.warm(y)
					wr := x.write(y, 0, n)
					wr.Op, wr.Flags = op, ib.SendSignaled
					wrs, wcs := []ib.SendWR{wr}, make([]ib.WC, 1)
					before := x.byGrant()
					b.SetBytes(int64(n))
					for b.Loop() {
						n, err := x.qp.PostSend(wrs)
						for got := 0; got == 0 && err == nil; {
							got, err = x.cq.Poll(wcs)
						}
						if n != 1 || err != nil {
							b.Fatal(n, err)
						}
					}
					if got := x.byGrant() - before; got < uint64(b.N) {
						b.Errorf("%d of %d went by grant", got, b.N)
					}
				})
			}
		}
	}
}

// The sender stands still between its look at the grant and the system call that writes. The
// owner process closes the region meanwhile, and registers its memory again, which another queue
// pair of the sender's process gets a grant to. The old WRITE does not reach the memory by the
// new loan.
func TestGrantPlainAmidWriteLentAgain(t *testing.T) {
	a, b := plainGrants(t, 8192, true)
	c, d := connected(t, a.dev, b.dev, ib.RC, 8192, nil)
	c.warm(d) // a loan of other memory, which keeps the rings
	stuck, r, wr := a.stuckWrite(b, "last bytes")
	t.Cleanup(func() { must0(t, r.Close()) })
	posted := make(chan struct{})
	go func() {
		defer close(posted)
		a.post(wr)
	}()
	<-stuck.begun
	closeAll(t, b.mr)
	mr := must[provider.MR](t)(d.pd.RegMR(b.buf, allRemote))
	t.Cleanup(func() { closeAll(t, d.qp, mr) })
	again := c.write(d, 0, 8)
	again.RemoteAddr, again.RKey = mr.Addr()+4096, mr.RKey()
	before := d.plainLoans()
	eventually(t, "the memory is lent again", func() bool {
		c.post(again)
		c.ok()
		return d.plainLoans() > before
	})
	clear(b.buf)
	b.dev.first.rx.Lock() // what comes by the ring stays there
	close(stuck.end)
	<-posted
	if !bytes.Equal(b.buf, make([]byte, 8192)) {
		t.Errorf("%q is there, of a WRITE with a key that is gone", b.buf[:10])
	}
	b.dev.first.rx.Unlock()
	a.status(ib.WCRemAccessErr)
}
