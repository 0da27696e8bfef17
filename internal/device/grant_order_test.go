package device

// The order of requests by grant and by the ring.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// Random mixtures of requests by grants and by rings, in both directions at the same time: an
// atomic sees exactly what was written before it, a message and a READ that or something
// newer. No request is counted twice, nor lost: either would make a packet out of sequence.
//
// In the second row the regions are suspended again and again, as if their memory moved: the
// peers lose their grants at any moment of a copy, and no call waits for that.
func TestGrantMixed(t *testing.T) {
	for _, row := range []struct {
		name    string
		suspend bool
		least   uint64 // requests by grant of each side
	}{{"lasting grants", false, 100}, {"regions suspended", true, 40}} {
		t.Run(row.name, func(t *testing.T) {
			seed := testSeed(t)
			a, b := byGrants(t, mixedBytes)
			sides := []*mixer{{e: a, o: b}, {e: b, o: a}}
			var working atomic.Int32
			working.Store(2)
			for i, m := range sides {
				m.suspends = row.suspend
				m.least = m.e.byGrant() + uint64(lastingOps(int(row.least), 20*int(row.least)))
				m.rng = rand.New(rand.NewPCG(seed, uint64(i)))
				for range mixedPlaces {
					m.e.recv(ib.RecvWR{})
				}
			}
			var wg sync.WaitGroup
			for _, m := range sides {
				wg.Go(func() {
					if err := m.run(lastingOps(500, 10000), &working); err != nil {
						t.Error(err)
						working.Store(0)
					}
				})
			}
			wg.Wait()
			for _, m := range sides {
				m.finish(t)
			}
		})
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
	e, o       *end
	rng        *rand.Rand
	least      uint64 // run posts more requests until so many went by grant
	suspends   bool   // it suspends its peer's region
	suspendAt  uint64 // at how many requests by grant it does so next
	suspended  int    // how often it has done so
	next       uint32
	done       uint32             // the last request that is known to be done
	unsignaled int                // requests in a row that asked for no completion
	last       [mixedSlots]uint32 // what was written there last
	size       [mixedSlots]int
	want       [mixedPlaces]uint32 // of READs and atomics: what their place is to hold, at least
}

// enoughSuspended is how often each side suspends its peer's region at least.
const enoughSuspended = 5

// enough reports whether so much has happened that the mixture shows something.
func (m *mixer) enough() bool {
	return m.e.byGrant() >= m.least && (!m.suspends || m.suspended >= enoughSuspended)
}

// run posts so many requests, up to 100 times as many until enough has happened, and receives
// until both sides have finished.
func (m *mixer) run(count int, working *atomic.Int32) error {
	most := 100 * count
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
		m.suspend()
		switch {
		case finished || m.next < uint32(count) || m.done != m.next:
		case count < most && !m.enough():
			count += 100
		default:
			finished = true
			working.Add(-1)
		}
	}
	return nil
}

// suspend suspends the peer's region, if it is time to: a new grant has come into use since
// the last time.
func (m *mixer) suspend() {
	if n := m.e.byGrant(); m.suspends && n >= m.suspendAt {
		m.suspendAt = n + 1 + m.rng.Uint64N(16)
		m.o.dev.killed(m.o.mr.(*MR).region, false)
		m.suspended++
	}
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
	if m.unsignaled++; m.unsignaled > 8 || last || m.rng.IntN(2) == 0 {
		wr.Flags |= ib.SendSignaled
	}
	if wr.Flags&ib.SendSignaled != 0 {
		m.unsignaled = 0
	}
	return wr
}

// poll takes completions and checks what they prove to be done.
func (m *mixer) poll() error {
	var wcs [16]ib.WC
	n, err := m.e.cq.Poll(wcs[:])
	if err != nil {
		return err
	}
	if n == 0 {
		runtime.Gosched()
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
				return fmt.Errorf("%d was written to slot %d before the message, where %d is", n, slot, m.e.letterAt(slot*mixedSlot))
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

// letterAt returns the number of a letter that the peer may be writing just now.
func (e *end) letterAt(off int) uint32 {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], e.word(off))
	return binary.BigEndian.Uint32(b[:])
}

// finish checks what the mixture has left, and that there was enough of it.
func (m *mixer) finish(t *testing.T) {
	t.Helper()
	if t.Failed() {
		return
	}
	for slot, n := range m.last {
		if got, err := number(m.o.buf[slot*mixedSlot:][:m.size[slot]]); n != 0 && (err != nil || got != n) {
			t.Errorf("slot %d holds %d, %v; %d was written last", slot, got, err, n)
		}
	}
	c := m.e.counted()
	t.Logf("%d of %d requests by grants, %d times suspended", c[qp.CntByGrant], m.next, m.suspended)
	if !m.enough() {
		t.Error("too few to show anything")
	}
	if n := c[qp.CntOutOfSequence] + c[qp.CntNaksSent]; n != 0 {
		t.Errorf("%d packets out of sequence, %d NAKs", c[qp.CntOutOfSequence], c[qp.CntNaksSent])
	}
}
