package device

// Requests that the sender executes by grant (grant.go): when a grant comes into use, and
// what the owner process sees of it. grant_order_test.go has their order with other requests,
// grant_end_test.go the end of a grant.

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// byGrants makes a connection by rings in which each end has a grant to the memory of the
// other, and uses it.
func byGrants(t testing.TB, size int) (a, b *end) {
	t.Helper()
	a, b = byRings(t, ib.RC, size)
	a.shareMemory(size)
	b.shareMemory(size)
	a.warm(b)
	b.warm(a)
	return a, b
}

// byGrant returns how many requests an end has executed by grant.
func (e *end) byGrant() uint64 { return e.counted()[qp.CntByGrant] }

// warm writes to a peer until a WRITE goes by grant.
func (e *end) warm(o *end) {
	e.t.Helper()
	before := e.byGrant()
	eventually(e.t, "a grant comes into use", func() bool {
		e.post(e.write(o, 0, 8))
		e.ok()
		return e.byGrant() > before
	})
}

// grantsOpen returns how many grants an end has given, without those that are over.
func (e *end) grantsOpen() int {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.absorbLocked()
	return len(q.grants)
}

// grantsOf returns how many grants lead to regions of a device.
func grantsOf(d *Device) (n int) {
	d.grants.mu.Lock()
	defer d.grants.mu.Unlock()
	for _, list := range d.grants.byRegion {
		n += len(list)
	}
	return n
}

// stuckSource is memory whose first reader is stopped until the test lets it go.
type stuckSource struct {
	*mem.Host
	once       sync.Once
	begun, end chan struct{}
}

func (s *stuckSource) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	s.once.Do(func() {
		s.begun <- struct{}{}
		<-s.end
	})
	return s.Host.Run(off, n, acc)
}

// stuckWrite makes a region at 0x10000 of such memory, and a WRITE of all of it to o.
func (e *end) stuckWrite(o *end, text string) (*stuckSource, *mem.Region, ib.SendWR) {
	e.t.Helper()
	h := must[*mem.Host](e.t)(mem.NewHostBytes([]byte(text), ib.AccessLocalWrite, ib.LockOff))
	stuck := &stuckSource{Host: h, begun: make(chan struct{}), end: make(chan struct{})}
	r := must[*mem.Region](e.t)(e.dev.table.Register(mem.RegionConfig{PD: e.pd.(*PD).id, Access: ib.AccessLocalWrite,
		IOVA: 0x10000, Length: uint64(len(text)), Backing: stuck}))
	wr := e.write(o, 0, len(text))
	wr.SGL = []ib.SGE{{Addr: 0x10000, Length: uint32(len(text)), LKey: r.Key()}}
	return stuck, r, wr
}

// The owner process of the memory does nothing for WRITEs and READs by grant. Its PSN and
// its counters include them all the same, whoever asks for them.
func TestGrantOwnerDoesNothing(t *testing.T) {
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
		t.Run(op.String(), func(t *testing.T) {
			a, b := byRings(t, ib.RC, 1<<20)
			b.shareMemory(1 << 20)
			a.warm(b)
			b.dev.first.rx.Lock() // b's process receives nothing any more
			defer b.dev.first.rx.Unlock()
			var want counts // of b's device, or queue pair
			packets := uint32(0)
			do := func(off, n int) {
				from, to := a, b
				if op == ib.OpRDMARead {
					from, to = b, a
				}
				copy(from.buf[off:][:n], noise)
				wr := a.write(b, off, n)
				wr.Op = op
				a.post(wr)
				if wc := a.ok(); op == ib.OpRDMARead && wc.ByteLen != uint32(n) {
					t.Fatalf("%+v of %d bytes", wc, n)
				}
				if !bytes.Equal(from.buf[off:][:n], to.buf[off:][:n]) {
					t.Fatalf("%v of %d bytes: other bytes are there", op, n)
				}
				k := (n + 1023) / 1024
				packets += uint32(k)
				if op == ib.OpRDMAWrite {
					want["rx_packets"], want["rx_bytes"] = want["rx_packets"]+uint64(k), want["rx_bytes"]+uint64(n)
				} else {
					want["rx_packets"]++
					want["tx_packets"], want["tx_bytes"] = want["tx_packets"]+uint64(k), want["tx_bytes"]+uint64(n)
				}
			}
			// Each way to ask returns counters that are up to date, without any other call before it.
			for _, ask := range []struct {
				name   string
				counts func() counts
			}{
				{"the queue pair", func() counts {
					c := counts{}
					for _, v := range b.qp.(*QP).Counters() {
						c[v.Name] = v.Value
					}
					return c
				}},
				{"the device", func() counts { return countsOf(b.dev) }},
				{"the list of resources", func() counts {
					r := b.dev.status(false).(ib.ProcessResources).QPs[0]
					return counts{"rx_packets": r.RxPackets, "rx_bytes": r.RxBytes, "tx_packets": r.TxPackets, "tx_bytes": r.TxBytes}
				}},
			} {
				want = counts{}
				packets = 0
				before, sent := ask.counts(), a.byGrant()
				was := must[ib.QPAttr](t)(b.qp.Query())
				for i := range 20 {
					do(i, 1+i*3000)
				}
				got := ask.counts()
				for _, name := range []string{"rx_packets", "rx_bytes", "tx_packets", "tx_bytes"} {
					if n := got[name] - before[name]; n != want[name] {
						t.Errorf("%s: %s has grown by %d, want %d", ask.name, name, n, want[name])
					}
				}
				now := must[ib.QPAttr](t)(b.qp.Query())
				if d := (now.RQPSN - was.RQPSN) & 0xffffff; d != packets {
					t.Errorf("rq_psn went on by %d, by %d packets", d, packets)
				}
				if s := must[ib.QPAttr](t)(a.qp.Query()); s.SQPSN != now.RQPSN {
					t.Errorf("sq_psn is %#x, the peer's rq_psn %#x", s.SQPSN, now.RQPSN)
				}
				if n := a.byGrant() - sent; n != 20 {
					t.Errorf("%d of 20 went by a grant", n)
				}
			}
		})
	}
}

// A grant to a region that may be read from and not written to is for READs alone.
func TestGrantOfReadOnlyRegion(t *testing.T) {
	a, b := byRings(t, ib.RC, 4096)
	b.shareMemory(4096)
	access := ib.AccessRemoteRead
	must0(t, b.mr.Rereg(provider.MRChange{Access: &access}))
	n := byte(0)
	eventually(t, "READs go by a grant", func() bool {
		n++
		b.buf[5] = n
		a.post(a.read(b, 0, 8))
		a.ok()
		if a.buf[5] != n {
			t.Fatal("other bytes have come")
		}
		return a.byGrant() > 10
	})
	a.post(a.write(b, 0, 8))
	a.status(ib.WCRemAccessErr)
}

// There are more regions than a queue pair may have grants to, and more queue pairs: each
// WRITE arrives in its region, and no grant is left when all is closed.
func TestGrantsToManyRegions(t *testing.T) {
	a, b := byGrants(t, 64<<10)
	var regions []provider.MR
	for i := range 2 * maxGrants {
		regions = append(regions, must[provider.MR](t)(b.pd.RegMR(b.buf[i*4096:][:4096], allRemote)))
	}
	n := byte(0)
	write := func(e *end, i int) {
		r := regions[i]
		n++
		e.post(ib.SendWR{Op: ib.OpRDMAWrite, Inline: []byte{n, byte(i)}, RemoteAddr: r.Addr(), RKey: r.RKey()})
		e.ok()
		if off := int(r.Addr() - b.mr.Addr()); look(b.buf, off) != n || look(b.buf, off+1) != byte(i) {
			t.Fatalf("region %d: WRITE %d is not there", i, n)
		}
	}
	eventually(t, "the queue pair has given as many grants as it may", func() bool {
		for i := range regions {
			write(a, i)
		}
		return b.grantsOpen() == maxGrants
	})
	for i := range regions { // the grants do not cover all of them
		write(a, i)
	}
	var others []*end
	for i := range 3 {
		c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
		d.inDomainOf(b, c)
		others = append(others, d)
		eventually(t, "another queue pair uses a grant", func() bool {
			write(c, i)
			return c.byGrant() > 0
		})
	}
	for _, r := range regions {
		closeAll(t, r)
	}
	for _, d := range others {
		closeAll(t, d.qp)
	}
	closeAll(t, b.qp)
	if n := grantsOf(b.dev); n != 0 {
		t.Errorf("%d grants are left", n)
	}
}

// inDomainOf replaces the queue pair of an end by one in the protection domain of another,
// and connects it with its peer again.
func (e *end) inDomainOf(o, peer *end) {
	e.t.Helper()
	closeAll(e.t, e.qp)
	e.qp = must[provider.QP](e.t)(o.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq,
		Cap: ib.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}}))
	qp := e.qp
	e.t.Cleanup(func() { closeAll(e.t, qp) }) // before the other's domain
	peer.modify(ib.QPAttr{State: ib.QPReset}, 0)
	peer.connect(e)
	e.connect(peer)
}

// A post that goes by grant also sends the acknowledgements that a poll has left.
func TestGrantPostSendsAnswers(t *testing.T) {
	a, b := byGrants(t, 4096)
	seen := 0
	eventually(t, "posts go by a grant", func() bool {
		b.recv(ib.RecvWR{})
		a.post(ib.SendWR{Op: ib.OpSend})
		for wc := b.ok(); wc.Op != ib.WCRecv; wc = b.ok() { // the WRITE of the time before
		}
		before := b.byGrant()
		b.post(b.write(a, 0, 8))
		if b.byGrant() > before { // not so while another goroutine has the token, to answer
			seen++
			q := b.qp.(*QP)
			q.mu.Lock()
			if q.core.Answering() && q.tx.Load() == txIdle { // no goroutine is sending it
				t.Error("the answer waits for a poll")
			}
			q.mu.Unlock()
		}
		a.ok()
		return seen == 5
	})
}

// A device that captures packets captures all of them, on either side: no grant is used.
func TestGrantNotWithCapture(t *testing.T) {
	const writes = 40
	for i, side := range []string{"sender", "owner"} {
		t.Run(side, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "capture.pcap")
			cfg := [2]provider.Config{{Link: linkLocal}, {Link: linkLocal}}
			cfg[i].PCAP = file
			x, y := openDevice(t, cfg[0]), openDevice(t, cfg[1])
			x.loopback, y.loopback = false, false
			a, b := connected(t, x, y, ib.RC, 4096, nil)
			b.shareMemory(4096)
			for range writes { // several of them are offered for a grant
				a.post(a.write(b, 0, 8))
				a.ok()
			}
			if n := a.byGrant(); n != 0 {
				t.Errorf("%d WRITEs went by a grant", n)
			}
			if n, given := b.grantsOpen(), 1-i; n != given { // the sender does not take the one that the owner gives
				t.Errorf("%d grants were given, want %d", n, given)
			}
			// What a packet of a WRITE to the start of b's memory contains: address, key and length.
			needle := binary.BigEndian.AppendUint64(nil, b.mr.Addr())
			needle = binary.BigEndian.AppendUint32(needle, b.mr.RKey())
			needle = binary.BigEndian.AppendUint32(needle, 8)
			closeAll(t, a.qp, a.mr, a.cq, a.pd, b.qp, b.mr, b.cq, b.pd, x, y)
			if n := bytes.Count(must[[]byte](t)(os.ReadFile(file)), needle); n < writes {
				t.Errorf("%d of %d WRITEs are in the capture", n, writes)
			}
		})
	}
}

// A WRITE by grant allocates nothing, on either side.
func TestGrantAlloc(t *testing.T) {
	a, b := byGrants(t, 64<<10)
	inline := make([]byte, 8)
	wrs := []ib.SendWR{
		{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: a.sge(0, 32<<10), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()},
		{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, Inline: inline, RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()},
	}
	wcs := make([]ib.WC, 2)
	before, runs := a.byGrant(), uint64(0)
	if n := testing.AllocsPerRun(1000, func() {
		runs++
		if _, err := a.qp.PostSend(wrs); err != nil {
			t.Fatal(err)
		}
		// At once, unless the device is just sending something for the queue pair.
		got, tries := 0, 0
		for ; got < 2 && tries < 10_000_000; tries++ {
			n, err := a.cq.Poll(wcs[got:])
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
		if got != 2 || wcs[0].Status != ib.WCSuccess || wcs[1].Status != ib.WCSuccess {
			t.Fatalf("%d completions: %+v", got, wcs)
		}
		if _, err := b.qp.Query(); err != nil { // it moves on
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if n := a.byGrant() - before; n < 2*runs-runs/50 {
		t.Errorf("%d of %d WRITEs went by a grant", n, 2*runs)
	}
}

// The sender keeps its peer's grants when it is modified, as long as it stays connected. While
// its queue drains, no request is begun. When it is connected with another peer, the grants of
// the old one are not used.
func TestGrantOfModifiedSender(t *testing.T) {
	a, b := byGrants(t, 4096)
	for _, s := range []ib.QPState{ib.QPRTS, ib.QPSQD, ib.QPRTS} {
		a.modify(ib.QPAttr{State: s}, 0)
	}
	before := a.byGrant()
	a.post(a.write(b, 0, 8))
	a.ok()
	if a.byGrant() != before+1 {
		t.Error("the grant is not used any more")
	}
	a.modify(ib.QPAttr{State: ib.QPSQD}, 0)
	a.buf[0]++
	a.post(a.write(b, 0, 8))
	if a.cq.(*CQ).Len() != 0 || b.buf[0] == a.buf[0] {
		t.Error("a request was done while the queue drained")
	}
	a.modify(ib.QPAttr{State: ib.QPRTS}, 0)
	a.ok()
	if b.buf[0] != a.buf[0] {
		t.Error("the request was not done")
	}
	c := newEnd(t, openFor(t, linkRings), ib.RC, 4096)
	t.Cleanup(c.close)
	a.modify(ib.QPAttr{State: ib.QPReset}, 0)
	a.connect(c)
	c.connect(a)
	a.buf[0]++
	a.post(a.write(b, 0, 8)) // c has no such key
	a.status(ib.WCRemAccessErr)
	if b.buf[0] == a.buf[0] {
		t.Error("the old peer's memory was written to")
	}
}
