package device

// WRITEs that the sender executes by grant (grant.go): when, and in what order.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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

// absorbed returns the counters of an end, with what its peer has executed by grant.
func (e *end) absorbed() qp.Counters {
	e.grantsOpen()
	return e.counted()
}

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

// letterAt returns the number of a letter that the peer may be writing just now.
func (e *end) letterAt(off int) uint32 {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], e.word(off))
	return binary.BigEndian.Uint32(b[:])
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

// A grant comes into use when a few WRITEs have come by the ring. From then on the owner
// process does nothing, and its PSN and counters include what was written all the same.
func TestGrantPassive(t *testing.T) {
	a, b := byRings(t, ib.RC, 1<<20)
	b.shareMemory(1 << 20)
	a.warm(b)
	b.dev.rx.Lock() // as if its process were stopped
	defer b.dev.rx.Unlock()
	before, sent := b.absorbed(), a.byGrant()
	was := must[ib.QPAttr](t)(b.qp.Query())
	copy(a.buf, noise)
	packets, total := 0, 0
	for i := range 300 {
		n := 1 + i*200
		a.post(a.write(b, i, n))
		a.ok()
		if !bytes.Equal(b.buf[i:][:n], a.buf[i:][:n]) {
			t.Fatalf("WRITE %d of %d bytes is not there", i, n)
		}
		packets += (n + 1023) / 1024
		total += n
	}
	now := must[ib.QPAttr](t)(b.qp.Query())
	if d := (now.RQPSN - was.RQPSN) & 0xffffff; d != uint32(packets) {
		t.Errorf("rq_psn went on by %d, by %d packets", d, packets)
	}
	if s := must[ib.QPAttr](t)(a.qp.Query()); s.SQPSN != now.RQPSN {
		t.Errorf("sq_psn is %#x, the peer's rq_psn %#x", s.SQPSN, now.RQPSN)
	}
	// Each way to ask returns counters that are up to date, without any other call before it.
	for _, ask := range []func() (packets, bytes uint64){
		func() (uint64, uint64) {
			c := counts{}
			for _, v := range b.qp.(*QP).Counters() {
				c[v.Name] = v.Value
			}
			return c["rx_packets"], c["rx_bytes"]
		},
		func() (uint64, uint64) { c := countsOf(b.dev); return c["rx_packets"], c["rx_bytes"] },
		func() (uint64, uint64) {
			r := b.dev.status(false).(ib.ProcessResources).QPs[0]
			return r.RxPackets, r.RxBytes
		},
	} {
		a.post(a.write(b, 0, 8))
		a.ok()
		packets++
		total += 8
		p, n := ask()
		if p -= before[qp.CntRxPackets]; p != uint64(packets) || n-before[qp.CntRxBytes] != uint64(total) {
			t.Errorf("%d packets of %d bytes came, %d of %d were sent", p, n-before[qp.CntRxBytes], packets, total)
		}
	}
	if n := a.byGrant() - sent; n != 303 {
		t.Errorf("%d of 303 WRITEs went by a grant", n)
	}
}

// Random mixtures of requests by grants and by rings, in both directions at the same time.
// An atomic sees exactly what was written before it, a message and a READ that or something
// newer.
func TestGrantMixed(t *testing.T) {
	testGrantMixed(t, 200, func() bool { return true }, func(*mixer) {})
}

// The same, while regions are suspended again and again, as if their memory moved: the peers
// lose their grants at any moment of a copy, and no call waits for that. No request is
// counted twice, nor lost: either would make a packet out of sequence.
func TestGrantMixedSuspended(t *testing.T) {
	var suspended atomic.Int64
	testGrantMixed(t, 50, func() bool { return suspended.Load() >= 10 }, func(m *mixer) {
		if n := m.e.byGrant(); n >= m.suspendAt {
			m.suspendAt = n + 8 + m.rng.Uint64N(32) // by then there is another grant
			m.o.dev.killed(m.o.mr.(*MR).region, false)
			suspended.Add(1)
		}
	})
	if n := suspended.Load(); n < 10 {
		t.Errorf("suspended %d times: too few to show anything", n)
	}
}

// testGrantMixed calls beside between two steps of each side. It goes on, for a limited time,
// until at least so many requests went by grants, and enough returns true.
func testGrantMixed(t *testing.T, least uint64, enough func() bool, beside func(*mixer)) {
	t.Helper()
	seed := testSeed(t)
	a, b := byGrants(t, mixedBytes)
	var working atomic.Int32
	working.Store(2)
	var wg sync.WaitGroup
	sides := []*mixer{{e: a, o: b}, {e: b, o: a}}
	for i, m := range sides {
		m.beside = beside
		m.enough = func() bool { return m.e.counted()[qp.CntByGrant] >= least && enough() }
		m.rng = rand.New(rand.NewPCG(seed, uint64(i)))
		for range mixedPlaces {
			m.e.recv(ib.RecvWR{})
		}
	}
	for _, m := range sides {
		wg.Go(func() {
			if err := m.run(lastingOps(3000, 30000), &working); err != nil {
				t.Error(err)
				working.Store(0)
			}
		})
	}
	wg.Wait()
	for _, m := range sides {
		for slot, n := range m.last {
			if got, err := number(m.o.buf[slot*mixedSlot:][:m.size[slot]]); n != 0 && (err != nil || got != n) && !t.Failed() {
				t.Errorf("slot %d holds %d, %v; %d was written last", slot, got, err, n)
			}
		}
		c := m.e.counted()
		t.Logf("%d WRITEs by grants, %d packets in all", c[qp.CntByGrant], c[qp.CntTxPackets])
		if c[qp.CntByGrant] < least {
			t.Errorf("%d WRITEs by grants: too few to show anything", c[qp.CntByGrant])
		}
		if n := c[qp.CntOutOfSequence] + c[qp.CntNaksSent]; n != 0 {
			t.Errorf("%d packets out of sequence, %d NAKs", c[qp.CntOutOfSequence], c[qp.CntNaksSent])
		}
	}
}

// In a mixture the first part of each end's memory is what the peer writes to, in slots;
// the second what it writes from and reads to, one place for each request.
const (
	mixedSlots  = 16
	mixedSlot   = 8 << 10
	mixedPlaces = 128
	mixedBytes  = (mixedSlots + mixedPlaces) * mixedSlot
)

// mixer is one side of a mixture. Requests are numbered, and a WRITE writes its number.
type mixer struct {
	e, o      *end
	beside    func(*mixer)
	enough    func() bool
	suspendAt uint64 // at how many WRITEs and READs by grants its peer's region is suspended next
	rng       *rand.Rand
	next      uint32
	done      uint32             // the last request that is known to be done
	quiet     int                // requests in a row that asked for no completion
	last      [mixedSlots]uint32 // what was written there last
	size      [mixedSlots]int
	want      [mixedPlaces]uint32 // of READs and atomics: what their place is to hold, at least
}

// run posts so many requests, up to 20 times as many until enough returns true, and receives
// until both sides have finished.
func (m *mixer) run(count int, working *atomic.Int32) error {
	most := 20 * count
	rest := false // wait for all requests, now and then: grants are used only when none is under way
	for finished := false; working.Load() > 0; {
		if rest = rest && m.done != m.next; !rest && m.next < uint32(count) && m.next-m.done < mixedPlaces/2 {
			var wrs []ib.SendWR
			rest = m.rng.IntN(2) == 0
			for n := m.rng.IntN(4); n >= 0; n-- {
				wrs = append(wrs, m.draw(m.next+1 >= uint32(count) || n == 0 && rest))
			}
			if n, err := m.e.qp.PostSend(wrs); err != nil {
				return fmt.Errorf("request %d: %w", wrs[n].ID, err)
			}
		}
		if err := m.poll(); err != nil {
			return err
		}
		m.beside(m)
		if !finished && m.next >= uint32(count) && m.done == m.next && count < most && !m.enough() {
			count = min(count+1000, most)
		}
		if !finished && m.next >= uint32(count) && m.done == m.next {
			finished = true
			working.Add(-1)
		}
	}
	return nil
}

// draw makes the next request. The last ones ask for a completion.
func (m *mixer) draw(last bool) ib.SendWR {
	m.next++
	n, slot, place := m.next, m.rng.IntN(mixedSlots), int(m.next%mixedPlaces)
	mine := (mixedSlots + place) * mixedSlot
	wr := ib.SendWR{ID: uint64(n), RemoteAddr: m.o.mr.Addr() + uint64(slot*mixedSlot), RKey: m.o.mr.RKey()}
	m.want[place] = 0
	switch k := m.rng.IntN(16); k {
	case 0, 1:
		wr.Op, wr.SGL, wr.Flags = ib.OpRDMARead, m.e.sge(mine, 8), ib.SendSignaled
		m.want[place] = m.last[slot]
	case 2, 3:
		wr.Op, wr.SGL, wr.Flags = ib.OpAtomicFetchAdd, m.e.sge(mine, 8), ib.SendSignaled
		m.want[place] = m.last[slot]
	case 4:
		wr.Op, wr.Imm = ib.OpSendImm, m.last[slot]<<8|uint32(slot)
	default:
		size := 8 * (1 + m.rng.IntN(16))
		if k == 5 {
			size = 8 * (1 + m.rng.IntN(mixedSlot/8))
		}
		wr.Op, m.last[slot], m.size[slot] = ib.OpRDMAWrite, n, size
		letter(m.e.buf[mine:][:size], n)
		if wr.SGL = m.e.sge(mine, size); size <= 128 && k%2 == 0 {
			wr.Inline, wr.SGL = bytes.Clone(m.e.buf[mine:][:size]), nil
		}
		switch k {
		case 6:
			wr.Op, wr.Imm = ib.OpRDMAWriteImm, n<<8|uint32(slot)
		case 7:
			wr.Flags = ib.SendFence
		}
	}
	if m.quiet++; m.quiet > 8 || last || m.rng.IntN(2) == 0 {
		wr.Flags |= ib.SendSignaled
	}
	if wr.Flags&ib.SendSignaled != 0 {
		m.quiet = 0
	}
	return wr
}

// poll takes completions and checks what they say is done.
func (m *mixer) poll() error {
	var wcs [16]ib.WC
	n, err := m.e.cq.Poll(wcs[:])
	if err != nil {
		return err
	}
	for i := range wcs[:n] {
		wc := &wcs[i]
		if err := wc.Err(); err != nil {
			return fmt.Errorf("%+v: %w", wc, err)
		}
		place := int(wc.ID % mixedPlaces)
		got := m.e.letterAt((mixedSlots + place) * mixedSlot)
		switch wc.Op {
		case ib.WCRecv, ib.WCRecvRDMAWithImm:
			m.e.recv(ib.RecvWR{})
			if n, slot := wc.Imm>>8, int(wc.Imm&0xff); m.e.letterAt(slot*mixedSlot) < n {
				return fmt.Errorf("a message says that %d was written to slot %d, where %d is", n, slot, m.e.letterAt(slot*mixedSlot))
			}
			continue
		case ib.WCRDMARead:
			if got < m.want[place] {
				return fmt.Errorf("READ %d finds %d, %d was written before", wc.ID, got, m.want[place])
			}
		case ib.WCFetchAdd:
			if got != m.want[place] {
				return fmt.Errorf("atomic %d finds %d, %d was written before, and nothing later", wc.ID, got, m.want[place])
			}
		}
		if uint32(wc.ID) <= m.done {
			return fmt.Errorf("request %d completes after %d", wc.ID, m.done)
		}
		m.done = uint32(wc.ID)
	}
	return nil
}

// There are more regions than a queue pair may have grants to, and more queue pairs: each
// WRITE arrives in its region, and no grant is left when all is closed.
func TestGrantMany(t *testing.T) {
	a, b := byGrants(t, 64<<10)
	var regions []provider.MR
	for i := range 2 * maxGrants {
		regions = append(regions, must[provider.MR](t)(b.pd.RegMR(b.buf[i*4096:][:4096], allRemote)))
	}
	check := func(e *end, i int, r provider.MR, n byte) {
		e.post(ib.SendWR{Op: ib.OpRDMAWrite, Inline: []byte{n, byte(i)}, RemoteAddr: r.Addr(), RKey: r.RKey()})
		e.ok()
		if off := r.Addr() - b.mr.Addr(); look(b.buf, int(off)) != n || look(b.buf, int(off)+1) != byte(i) {
			t.Fatalf("region %d: WRITE %d is not there", i, n)
		}
	}
	for n := range byte(200) {
		for i, r := range regions {
			check(a, i, r, n)
		}
	}
	if n := b.grantsOpen(); n != maxGrants {
		t.Errorf("%d grants, %d are possible", n, maxGrants)
	}
	var others []*end
	for range 8 {
		c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
		closeAll(t, d.qp)
		d.qp = must[provider.QP](t)(b.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: d.cq, RecvCQ: d.cq}))
		c.modify(ib.QPAttr{State: ib.QPReset}, 0)
		c.connect(d)
		d.connect(c)
		others = append(others, c, d)
	}
	for n := range byte(100) {
		for i := 0; i < len(others); i += 2 {
			check(others[i], i, regions[i/2], n)
		}
	}
	used := 0
	for i := 0; i < len(others); i += 2 {
		if others[i].byGrant() > 0 {
			used++
		}
	}
	if used < len(others)/4 {
		t.Errorf("%d of %d queue pairs use grants", used, len(others)/2)
	}
	for _, r := range regions {
		closeAll(t, r)
	}
	for i := 1; i < len(others); i += 2 {
		closeAll(t, others[i].qp)
	}
	closeAll(t, b.qp)
	if n := grantsOf(b.dev); n != 0 {
		t.Errorf("%d grants are left", n)
	}
}

// A post that goes by grant also sends the acknowledgements that a poll has left.
func TestGrantAnswers(t *testing.T) {
	a, b := byGrants(t, 4096)
	direct := 0
	for range 50 {
		b.recv(ib.RecvWR{})
		a.post(ib.SendWR{Op: ib.OpSend})
		for wc := b.ok(); wc.Op != ib.WCRecv; wc = b.ok() { // the WRITE of the time before
		}
		before := b.byGrant()
		b.post(b.write(a, 0, 8))
		if b.byGrant() > before { // not so while another goroutine has the token, to answer
			direct++
			q := b.qp.(*QP)
			q.mu.Lock()
			if q.core.Answering() && q.tx.Load() == txIdle { // no goroutine is sending it
				t.Error("the answer waits for a poll")
			}
			q.mu.Unlock()
		}
		a.ok()
	}
	if direct < 5 {
		t.Errorf("%d of 50 went by a grant", direct)
	}
}

// A device that captures packets captures all of them, on either side: no grant is used.
func TestGrantCapture(t *testing.T) {
	for _, side := range []string{"sender", "owner"} {
		t.Run(side, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "capture.pcap")
			cfg := [2]provider.Config{{Link: linkLocal}, {Link: linkLocal}}
			cfg[map[string]int{"sender": 0, "owner": 1}[side]].PCAP = file
			x, y := openDevice(t, cfg[0]), openDevice(t, cfg[1])
			x.loopback, y.loopback = false, false
			a, b := connected(t, x, y, ib.RC, 4096, nil)
			b.shareMemory(4096)
			for range 200 {
				a.post(a.write(b, 0, 8))
				a.ok()
			}
			if n := a.byGrant(); n != 0 {
				t.Errorf("%d WRITEs went by a grant", n)
			}
			if n := b.grantsOpen(); side == "owner" && n != 0 {
				t.Errorf("%d grants were given", n)
			}
			closeAll(t, a.qp, a.mr, a.cq, a.pd, b.qp, b.mr, b.cq, b.pd, x, y)
			if n := bytes.Count(must[[]byte](t)(os.ReadFile(file)), b.grantNeedle()); n < 200 {
				t.Errorf("%d of 200 WRITEs are in the capture", n)
			}
		})
	}
}

// grantNeedle is what a packet of a WRITE to the start of an end's memory contains: address,
// key and length.
func (e *end) grantNeedle() []byte {
	b := binary.BigEndian.AppendUint64(nil, e.mr.Addr())
	b = binary.BigEndian.AppendUint32(b, e.mr.RKey())
	return binary.BigEndian.AppendUint32(b, 8)
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

// stuckSource is memory whose first reader is stopped until the test lets it go.
type stuckSource struct {
	*mem.Host
	once       sync.Once
	begun, end chan struct{}
}

func newStuckSource(t testing.TB, text string) *stuckSource {
	t.Helper()
	h := must[*mem.Host](t)(mem.NewHostBytes([]byte(text), ib.AccessLocalWrite, ib.LockOff))
	return &stuckSource{Host: h, begun: make(chan struct{}), end: make(chan struct{})}
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
	stuck := newStuckSource(e.t, text)
	r := must[*mem.Region](e.t)(e.dev.table.Register(mem.RegionConfig{PD: e.pd.(*PD).id, Access: ib.AccessLocalWrite,
		IOVA: 0x10000, Length: uint64(len(text)), Backing: stuck}))
	wr := e.write(o, 0, len(text))
	wr.SGL = []ib.SGE{{Addr: 0x10000, Length: uint32(len(text)), LKey: r.Key()}}
	return stuck, r, wr
}

// A peer that stays amid a copy by grant, as a stopped process does, delays the call that
// takes the memory back, and no other. The WRITE that it still stores is not counted: it
// comes again by the ring, and ends as it would have without a grant.
func TestGrantStuck(t *testing.T) {
	for _, what := range []string{"region", "modify", "close"} {
		t.Run(what, func(t *testing.T) {
			a, b := byGrants(t, 4096)
			hurryNow(a)
			a.warm(b)
			stuck, r, wr := a.stuckWrite(b, "late word")
			defer closeAll(t, r)
			was := must[ib.QPAttr](t)(b.qp.Query())
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() { a.post(wr) })
			<-stuck.begun
			var free atomic.Bool
			wg.Go(func() {
				switch what {
				case "region":
					closeAll(t, b.mr)
				case "modify":
					b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemote}, ib.QPMaskAccess)
				case "close":
					closeAll(t, b.qp)
				}
				free.Store(true)
				if string(b.buf[:9]) != "late word" {
					t.Errorf("%q is there: it did not wait", b.buf[:9])
				}
			})
			time.Sleep(5 * time.Millisecond)
			if what != "close" {
				must[ib.QPAttr](t)(b.qp.Query()) // does not wait for the peer
			}
			c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
			for range 50 {
				c.post(c.write(d, 0, 64))
				c.ok()
			}
			if free.Load() {
				t.Error("nobody has waited")
			}
			stuck.end <- struct{}{}
			wg.Wait()
			a.status(map[string]ib.WCStatus{"region": ib.WCRemAccessErr, "modify": ib.WCSuccess, "close": ib.WCRetryExcErr}[what])
			if what == "modify" {
				if now := must[ib.QPAttr](t)(b.qp.Query()); (now.RQPSN-was.RQPSN)&0xffffff != 1 {
					t.Errorf("rq_psn is %#x, it was %#x", now.RQPSN, was.RQPSN)
				}
			}
		})
	}
}
